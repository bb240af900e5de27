"""The cut of a graph that one rank makes for all; N nodes, E edges, P parts of E_p edges each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.comm.plans import PlanName, check_plan
from lightning_gnn.data.sources import checked_edges
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.locality import local_relabelling
from lightning_gnn.partition.shard import Ids, edge_cut_parts
from lightning_gnn.planning import Topology, find_topology


@dataclass(frozen=True)
class Header:
    """What every rank must know of a cut.

    Attributes:
        offsets: first row of each rank and the end, int64 ``[P + 1]``.
        order: original ids in rank order, int64 ``[N]``.
        halos: relabelled ids of the halo rows of each rank, ascending.
        edge_counts: edges of each rank.
        plan, topology: how rows travel, and over what.
        report: quality of the cut.
    """

    offsets: Ids
    order: Ids
    halos: tuple[Ids, ...]
    edge_counts: tuple[int, ...]
    plan: PlanName
    topology: Topology | None
    report: Mapping[str, Any]


def cut_graph(
    graph: tuple[Tensor, int],
    size: int,
    topology: str | Path | Topology | None,
    plan: PlanName,
    partition: Any,
    seed: int,
) -> tuple[Header, list[Tensor]]:
    """Returns the cut, and each part's edges, int64 ``[E_p, 3]``: local source, local target, position."""
    check_plan(plan, topology)
    links = None if topology is None else find_topology(topology, size)
    edge_index = graph[0].numpy()
    assignment = assign_nodes(edge_index, graph[1], size, partition, seed=seed)
    relabelling = local_relabelling(edge_index, assignment.part, size)
    parts = list(edge_cut_parts(edge_index, relabelling))
    halos = tuple(part.halo for part in parts)
    edges = [torch.from_numpy(np.stack([*part.edge_index, part.edge_ids], 1)) for part in parts]
    counts = tuple(map(len, edges))
    header = Header(relabelling.offsets, relabelling.n_id, halos, counts, plan, links, assignment.report.as_dict())
    return header, edges


def checked_graph(graph: Data | Tensor, num_nodes: int | None) -> tuple[Tensor, int]:
    """Returns ``edge_index`` int64 ``[2, E]`` on the CPU, and N."""
    edge_index = graph if isinstance(graph, Tensor) else getattr(graph, "edge_index", None)
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"build_comm_info takes a PyG Data with an edge_index, or an edge_index (got {type(graph).__name__})."
        )
    if num_nodes is None:
        if isinstance(graph, Tensor):
            raise ValueError(
                "build_comm_info cannot tell the number of nodes from edges, as the last ones may be isolated. Pass num_nodes=..."
            )
        num_nodes = graph.num_nodes
    if not num_nodes or num_nodes < 1:
        raise ValueError(f"build_comm_info needs a graph of at least one node (got num_nodes={num_nodes}).")
    return checked_edges(edge_index.detach().cpu(), num_nodes), num_nodes
