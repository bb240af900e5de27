"""The cut of a graph that one rank makes for all; N nodes, E edges, P parts of E_p edges each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.sources import checked_edges
from lightning_gnn.extensions.plans.choice import PricedPlan
from lightning_gnn.extensions.plans.make_exchange import PlanName, check_plan, looks_at_links
from lightning_gnn.extensions.plans.plan import p2p
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.swap import SwapExchange
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.ways import Way, follow, planned
from lightning_gnn.partition.budget import COSTS
from lightning_gnn.partition.edge_cut import assign_nodes, several_alike
from lightning_gnn.partition.locality import local_relabelling
from lightning_gnn.partition.shard import HaloPlan, Ids, edge_cut_parts, halo_plan
from lightning_gnn.registry import PARTITIONERS


@dataclass(frozen=True)
class Header:
    """What every rank must know of a cut.

    Attributes:
        offsets: first row of each rank and the end, int64 ``[P + 1]``.
        edge_counts: edges of each rank.
        report: quality of the cut.
    """

    offsets: Ids
    edge_counts: tuple[int, ...]
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """What one rank must know of a cut.

    Attributes:
        n_id: original ids of its rows, int64 ``[N_p]``.
        rows: what it sends and receives directly.
        halo: relabelled ids of its halo rows, ascending, for exchanges through host memory; None for others.
        ways: in which rows may travel, unless they go through host memory.
    """

    n_id: Ids
    rows: HaloPlan
    halo: Ids | None
    ways: tuple[Way, ...]

    def exchange(self, offsets: Ids, world: World, meter: Meter) -> Exchange:
        """Returns this rank's exchange."""
        if self.halo is not None:
            return SwapExchange(self.rows, self.halo, offsets, world, meter)
        return follow(self.ways, self.rows, world, meter)


def cut_graph(
    graph: tuple[Tensor, int],
    world: World,
    links: Topology | None,
    plan: PlanName,
    partition: Any,
    seed: int,
) -> tuple[Header, list[Part], list[Tensor]]:
    """Returns the cut, what each rank gets of it, and each part's edges, int64 ``[E_p, 3]``: source, target, position.

    METIS, KaMinPar and ``"streaming"`` cut between the machines of `links` first, then between their sockets, if there are
    several of equally many ranks (DGCL section 4.1), as :class:`~lightning_gnn.strategies.dgcl.strategy.DGCLStrategy` does.
    """
    check_plan(plan, links)
    size, edge_index = world.size, graph[0].numpy()
    by_levels = isinstance(partition, str) and partition in ("auto", *COSTS, *PARTITIONERS)
    groups = links.groups if by_levels and links is not None and several_alike(links.groups) else None
    assignment = assign_nodes(edge_index, graph[1], size, partition, seed=seed, groups=groups)
    relabelling = local_relabelling(edge_index, assignment.part, size)
    pieces = list(edge_cut_parts(edge_index, relabelling))
    halos, offsets = [piece.halo for piece in pieces], relabelling.offsets
    plans: list[PricedPlan] = []
    if plan != "swap" and looks_at_links(plan, links, world):
        assert links is not None
        relation = Relation.from_halos(halos, offsets)
        if plan == "p2p":
            p2p(relation, links)  # refuses what it cannot send
        else:
            plans = planned(relation, links)
    parts = [
        Part(
            relabelling.n_id[offsets[rank] : offsets[rank + 1]],
            halo_plan(rank, offsets, halos),
            halos[rank] if plan == "swap" else None,
            tuple(Way.of(each.plan, each.cost.price, rank) for each in plans) or (Way(),),
        )
        for rank in range(size)
    ]
    edges = [torch.from_numpy(np.stack([*piece.edge_index, piece.edge_ids], 1)) for piece in pieces]
    return Header(offsets, tuple(map(len, edges)), assignment.report.as_dict()), parts, edges


def checked_graph(graph: Data | Tensor, num_nodes: int | None) -> tuple[Tensor, int]:
    """Returns ``edge_index`` int64 ``[2, E]`` on the CPU, and N."""
    edge_index = graph if isinstance(graph, Tensor) else getattr(graph, "edge_index", None)
    if not isinstance(edge_index, Tensor):
        raise ValueError(f"build_comm_info takes a PyG Data with an edge_index, or an edge_index (got {type(graph).__name__}).")
    if num_nodes is None:
        if isinstance(graph, Tensor):
            raise ValueError(
                "build_comm_info cannot tell the number of nodes from edges, as the last ones may be isolated. Pass num_nodes=..."
            )
        num_nodes = graph.num_nodes
    if not num_nodes or num_nodes < 1:
        raise ValueError(f"build_comm_info needs a graph of at least one node (got num_nodes={num_nodes}).")
    return checked_edges(edge_index.detach().cpu(), num_nodes), num_nodes
