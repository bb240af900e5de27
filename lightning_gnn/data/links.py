"""Edge splits for link prediction."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType
from torch_geometric.utils import is_undirected

from lightning_gnn.data.sources import checked_edges

Graph = TypeVar("Graph", Data, HeteroData)


def split_edges(
    data: Graph,
    val: float = 0.05,
    test: float = 0.1,
    undirected: bool | None = None,
    seed: int = 0,
    edge_type: EdgeType | None = None,
    rev_edge_type: EdgeType | None = None,
) -> Graph:
    """Returns the graph with a random split of its edges: ``edge_train_mask``, ``edge_val_mask``, ``edge_test_mask``.

    Parallel edges are in the same split and, in an undirected graph, both directions, which would reveal each other. Self-loops,
    which carry no information, are in the training split. No edges are removed. In :class:`~lightning_gnn.LinkPredictor` and in
    all batches of ``strategy="sampling"``, only training edges carry messages.

    Args:
        data: graph; not changed.
        val: fraction of the edges for validation.
        test: fraction of the edges for testing.
        undirected: whether ``(u, v)`` and ``(v, u)`` are one edge; by default, whether the graph has both directions of all
            edges.
        seed: random seed; equal seeds give equal splits.
        edge_type: edge type of a ``HeteroData`` to split, which gets the masks.
        rev_edge_type: edge type with the reversed edges, if there is one. Reversed edges of held-out edges are held out as well:
            the type gets an ``edge_train_mask`` of the other edges. PyG's ``RandomLinkSplit`` has the same edges, but in another
            order.

    Returns:
        A shallow copy; the masks are bool ``[E]``.

    Raises:
        ValueError: fractions are out of range, or too small for the number of edges. An edge has a node id out of range. The
            graph does not have an edge type, or `rev_edge_type` does not connect the same node types in reverse.
    """
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise ValueError(
            f"val and test must be fractions of the edges with a sum below 1, the rest is for training (got {val} and {test})."
        )
    edges, num_sources, num_targets = _edges_of(data, edge_type, rev_edge_type)
    edge_index = checked_edges(edges.edge_index, max(num_sources, num_targets)).cpu()
    within = num_sources == num_targets and (edge_type is None or edge_type[0] == edge_type[2])
    if undirected is None:
        undirected = within and bool(is_undirected(edge_index, num_nodes=num_targets))
    if undirected and not within:
        raise ValueError(f"undirected=True requires edges between nodes of one type (got edge_type={edge_type}).")
    key = _keys(edge_index, num_targets, undirected)
    distinct, group = key.unique(return_inverse=True)
    splittable = (group[edge_index[0] != edge_index[1]] if within else group).unique()
    sizes = [round(share * len(splittable)) for share in (val, test)]
    for name, share, size in zip(("val", "test"), (val, test), sizes):
        if share > 0 and size == 0:
            raise ValueError(f"{name}={share} of {len(splittable)} distinct edges selects no edge. Use a larger fraction, or 0.")
    drawn = splittable[torch.from_numpy(np.random.default_rng(seed).permutation(len(splittable)))]
    parts = drawn[: sum(sizes)].split(sizes)
    held = [torch.isin(group, part) for part in parts]
    result = copy.copy(data)
    into: Any = result if edge_type is None else result[edge_type]
    masks: dict[str, Tensor] = {"train": ~(held[0] | held[1]), "val": held[0], "test": held[1]}
    for name, mask in masks.items():
        into[f"edge_{name}_mask"] = mask.to(edges.edge_index.device)
    if rev_edge_type is not None:
        back = result[rev_edge_type]
        found = _keys(back.edge_index.cpu().flip(0), num_targets, undirected)
        back.edge_train_mask = ~torch.isin(found, distinct[torch.cat(parts)]).to(back.edge_index.device)
    return result


def _edges_of(data: Any, edge_type: EdgeType | None, rev_edge_type: EdgeType | None) -> tuple[Any, int, int]:
    """Returns the store of the edges to split, and the numbers of possible source and target nodes."""
    if isinstance(data, HeteroData):
        if edge_type not in data.edge_types:
            raise ValueError(f"edge_type must be the edge type to split, one of {data.edge_types} (got {edge_type}).")
        assert edge_type is not None
        source, _, target = edge_type
        if rev_edge_type is not None:
            fits = rev_edge_type in data.edge_types and (rev_edge_type[2], rev_edge_type[0]) == (source, target)
            if not fits or rev_edge_type == edge_type:
                raise ValueError(
                    f"rev_edge_type must be another edge type, with the reverse edges of {edge_type}: of {data.edge_types}, "
                    f"from {target!r} to {source!r} (got {rev_edge_type})."
                )
        return data[edge_type], int(data[source].num_nodes), int(data[target].num_nodes)
    if edge_type is not None or rev_edge_type is not None:
        raise ValueError("edge_type and rev_edge_type require a HeteroData, but the graph has no types. Remove them.")
    if not isinstance(data, Data) or data.edge_index is None:
        raise ValueError(
            f"split_edges requires a Data with edge_index, or a HeteroData, of torch_geometric.data (got {type(data).__name__})."
        )
    num_nodes = int(data.num_nodes or 0)
    return data, num_nodes, num_nodes


def _keys(edge_index: Tensor, num_targets: int, undirected: bool) -> Tensor:
    """Returns a number for each pair of nodes, ``[E]``; if `undirected`, the same for both directions."""
    source, target = edge_index.sort(0).values if undirected else edge_index
    return source * num_targets + target
