"""Lookup of node pairs that are edges of the graph, for filtered ranking.

N nodes and E edges of the whole graph, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnn.datamodules.graph import GraphDataModule


def known_edges(data: GraphDataModule, edges: Tensor, other_nodes: Tensor, typed: bool = False) -> Tensor:
    """Returns for edges (s, t) and other nodes t' whether (s, t') is an edge too, bool ``[n, K]``.

    Reads the stored graph part by part, with memory for the edges of one part. Not collective: any rank may call it after
    `setup`.

    Args:
        data: datamodule of the graph.
        edges: original ids of the edges, int64 ``[n]``.
        other_nodes: original ids of the nodes t', ``[n, K]``.
        typed: whether (s, t') must have the same ``edge_type`` as (s, t).
    """
    num_nodes = sum(data.shard.counts)
    distinct, each = edges.unique(return_inverse=True)
    source, kind = torch.zeros_like(distinct), torch.zeros_like(distinct)
    for e_id, ends, types in _parts(data, typed):
        # Each edge is in one part.
        place = torch.searchsorted(distinct, e_id).clamp(max=max(0, len(distinct) - 1))
        found = distinct[place] == e_id if len(distinct) else torch.zeros_like(e_id, dtype=torch.bool)
        source[place[found]], kind[place[found]] = ends[0, found], types[found]
    wanted = _keys(source[each].unsqueeze(1), other_nodes, kind[each].unsqueeze(1), num_nodes)
    known = torch.zeros_like(other_nodes, dtype=torch.bool)
    for _, ends, types in _parts(data, typed):
        known |= torch.isin(wanted, _keys(ends[0], ends[1], types, num_nodes))
    return known


def _keys(source: Tensor, target: Tensor, kind: Tensor, num_nodes: int) -> Tensor:
    return (kind * num_nodes + source) * num_nodes + target


def _parts(data: GraphDataModule, typed: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields per part the original ids of its edges ``[E_p]`` and of their endpoints ``[2, E_p]``, and types ``[E_p]``."""
    batch = data.shard.batch
    if data.is_whole:
        types = batch.edge_type.cpu() if typed else torch.zeros_like(batch.e_id).cpu()
        yield batch.e_id.cpu(), batch.edge_index.cpu(), types
        return
    cut = data.stored_cut()
    for rank in range(len(cut.halos)):
        e_id = torch.arange(int(cut.edge_offsets[rank]), int(cut.edge_offsets[rank + 1]))
        types = cut.attributes["edge"]["edge_type"][e_id] if typed else torch.zeros_like(e_id)
        yield cut.e_id[e_id].long(), cut.n_id[torch.from_numpy(cut.relabeled_edges(rank))], types
