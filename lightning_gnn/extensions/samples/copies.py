"""Copies of a graph, one for each sample of a batch, as in PyG's batches.

B samples of this data rank, S samples of the global batch, N nodes and E edges of the whole graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.data.lazy_ids import kept_as, stored_ids
from lightning_gnn.data.shards import BatchRows, Shard
from lightning_gnn.data.sources import GraphData, kinds_of, left_out_of
from lightning_gnn.extensions.samples.order import positions_of
from lightning_gnn.partition.layout import Types
from lightning_gnn.partition.shard import Ids


@dataclass(frozen=True, kw_only=True)
class CopiedShard(Shard):
    """Shard of a graph of copies. Its sizes and halos describe the graph ranks of this data rank.

    Attributes:
        node_rows, edge_rows: nodes and edges of the batch, among the rows of all ranks. Their ids order samples by position in
            the global batch.
    """

    node_rows: BatchRows
    edge_rows: BatchRows

    def nodes_held(self) -> dict[Any, BatchRows]:
        return {None: self.node_rows}

    def edges_held(self) -> dict[Any, BatchRows]:
        return {None: self.edge_rows}


class Copies:
    """Copies of a shard for the batches of a data rank, by the number of samples of the global batch.

    Args:
        shard: shard of the graph, without replicas.
        data_ranks: number of data ranks.
        data_rank: number of this data rank.
    """

    def __init__(self, shard: Shard, data_ranks: int = 1, data_rank: int = 0) -> None:
        self._shard, self._data_ranks, self._data_rank = shard, data_ranks, data_rank
        self._shards: dict[int, CopiedShard] = {}

    def __getitem__(self, total: int) -> CopiedShard:
        """Returns the copies for a global batch of `total` samples, always the same tensors."""
        if total not in self._shards:
            with torch.inference_mode(False):  # evaluation may come first
                self._shards[total] = self._copy(total)
        return self._shards[total]

    def _copy(self, total: int) -> CopiedShard:
        shard, graph = self._shard, self._shard.batch
        positions = [positions_of(rank, self._data_ranks, total) for rank in range(self._data_ranks)]
        own = positions[self._data_rank].to(graph.n_id.device)
        copies, offsets = len(own), shard.offsets
        kinds = {**kinds_of(graph), "n_id": "node", "e_id": "edge", "batch": "node"}
        batch = GraphData(kinds, left_out_of(graph))  # type: ignore[arg-type]
        for name, value in graph.to_dict().items():
            batch[name] = _repeat_rows(value, copies) if kinds.get(name) in ("node", "edge") else value
        places = torch.from_numpy(_local_ids(shard.halos[shard.rank], offsets, shard.rank, copies)).to(graph.n_id.device)
        edges = stored_ids(graph.edge_index).long()
        batch.edge_index = kept_as(places[:, edges].movedim(0, 1).flatten(1), graph.edge_index)
        batch.batch = own.repeat_interleave(graph.num_owned)
        batch.num_owned = copies * graph.num_owned
        given = {each.name: getattr(shard, each.name) for each in fields(Shard)}
        counts, edge_counts = (tuple(copies * each for each in of) for of in (shard.counts, shard.edge_counts))
        given |= {
            "batch": batch,
            "halos": tuple(_halo_ids(halo, offsets, copies) for halo in shard.halos),
            "counts": counts,
            "edge_counts": edge_counts,
            "rows": counts,
            "edges": edge_counts,
            "holders": None if shard.holders is None else shard.holders.repeat(copies),
            "n_id": shard.n_id.repeat(copies),
            "types": Types.none(np.array(counts), np.array(edge_counts)),
            "node_rows": _rows("nodes", graph.n_id, shard.n_id, shard.counts, own, positions),
            "edge_rows": _rows("edges", graph.e_id, shard.e_id, shard.edge_counts, own, positions),
        }
        return CopiedShard(**given)


def _repeat_rows(values: Tensor, copies: int) -> Tensor:
    return values.repeat(copies, *[1] * (values.dim() - 1))


def _rows(
    name: str, ids: Tensor, all_ids: Tensor, counts: Sequence[int], samples: Tensor, positions: Sequence[Tensor]
) -> BatchRows:
    """Returns the rows of this rank among the rows of all ranks.

    Args:
        name: name of the rows in errors.
        ids: original ids of this rank's rows of one copy.
        all_ids: original ids of the rows of one copy, in the order of graph ranks.
        counts: number of rows of each graph rank.
        samples, positions: positions of the samples of this data rank, and of each data rank.
    """

    def make_keys(samples: Tensor, rows: Tensor) -> Tensor:
        return (samples.unsqueeze(1) * len(all_ids) + rows.long()).flatten()

    parts = all_ids.split(list(counts))
    keys = torch.cat([make_keys(each, part) for each in positions for part in parts])
    every = [len(each) * count for each in positions for count in counts]
    return BatchRows(name, make_keys(samples, ids), keys, every, len(samples) * len(ids))


def _halo_ids(halo: Ids, offsets: Ids, copies: int) -> Ids:
    """Returns the ids of halo nodes of all copies, ascending: each rank numbers its nodes copy after copy."""
    owners = np.searchsorted(offsets, halo, "right") - 1
    sizes = np.diff(offsets)[owners]
    found = copies * offsets[owners] + np.arange(copies)[:, None] * sizes + halo - offsets[owners]
    return np.sort(found, axis=None)


def _local_ids(halo: Ids, offsets: Ids, rank: int, copies: int) -> Ids:
    """Returns the local id, in the graph of copies, of each local and halo node of a copy, int64 ``[B, N_r + H]``.

    Halo nodes are in the order of their owners, and copy after copy for each owner.
    """
    num_owned, number = int(offsets[rank + 1] - offsets[rank]), np.arange(copies)[:, None]
    begins = np.searchsorted(halo, offsets)
    owners = np.searchsorted(offsets, halo, "right") - 1
    first, sizes = begins[owners], np.diff(begins)[owners]
    halo_places = copies * (num_owned + first) + number * sizes + np.arange(len(halo)) - first
    return np.concatenate([number * num_owned + np.arange(num_owned), halo_places], 1)
