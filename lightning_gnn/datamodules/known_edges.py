"""Which pairs of nodes are edges of the graph, wherever these lie: what a filtered ranking leaves out.

N nodes and E edges of the whole graph, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnn.datamodules.graph import GraphDataModule


def known_edges(data: GraphDataModule, edges: Tensor, others: Tensor, typed: bool = False) -> Tensor:
    """Returns for some edges (s, t) and other nodes t' which (s, t') are edges as well, bool ``[n, K]``.

    Ids are original ones, of `edges` int64 ``[n]`` and of `others` ``[n, K]``; if `typed`, (s, t') has the same ``edge_type``.

    Reads the stored graph part by part, so it takes memory for the edges of one. On any rank, without others; after `setup`.
    """
    num_nodes = sum(data.shard.counts)
    distinct, each = edges.unique(return_inverse=True)
    source, kind = torch.zeros_like(distinct), torch.zeros_like(distinct)
    for e_id, ends, types in _parts(data, typed):
        # Each edge lies in one part.
        place = torch.searchsorted(distinct, e_id).clamp(max=max(0, len(distinct) - 1))
        found = distinct[place] == e_id if len(distinct) else torch.zeros_like(e_id, dtype=torch.bool)
        source[place[found]], kind[place[found]] = ends[0, found], types[found]
    wanted = _keys(source[each].unsqueeze(1), others, kind[each].unsqueeze(1), num_nodes)
    known = torch.zeros_like(others, dtype=torch.bool)
    for _, ends, types in _parts(data, typed):
        known |= torch.isin(wanted, _keys(ends[0], ends[1], types, num_nodes))
    return known


def _keys(source: Tensor, target: Tensor, kind: Tensor, num_nodes: int) -> Tensor:
    return (kind * num_nodes + source) * num_nodes + target


def _parts(data: GraphDataModule, typed: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the edges of part after part: original ids ``[E_p]``, original ids of ends ``[2, E_p]``, and types ``[E_p]``."""
    batch = data.shard.batch
    if data.is_whole:
        types = batch.edge_type.cpu() if typed else torch.zeros_like(batch.e_id).cpu()
        yield batch.e_id.cpu(), batch.edge_index.cpu(), types
        return
    cut = data.stored_cut()
    for rank in range(len(cut.halos)):
        e_id = torch.arange(int(cut.edge_offsets[rank]), int(cut.edge_offsets[rank + 1]))
        types = cut.attributes["edge"]["edge_type"][e_id] if typed else torch.zeros_like(e_id)
        yield cut.e_id[e_id].long(), cut.n_id[torch.from_numpy(cut.relabelled_edges(rank))], types
