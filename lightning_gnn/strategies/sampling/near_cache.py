"""Local cache of a machine's own features in memory, for stores larger than memory.

Sources:

- GNNLab (Yang et al., EuroSys 2022): samples read a few rows far more often than the others.
- PaGraph (Lin et al., SoCC 2020): before requests are counted, rows of the highest out-degree are cached.

N nodes of a type in the whole graph, K of them cached.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.typing import NodeType

from lightning_gnn.comm.group import World
from lightning_gnn.devices import available_bytes
from lightning_gnn.partition.layout import Types
from lightning_gnn.strategies.sampling.one_copy import one_copy, shared_zeros

Rows = tuple[Tensor, Tensor]
"""Ids, int64 ``[n]``, and a number for each, ``[n]``."""

PLACE_BYTES = 4
"""Bytes of the index per node of a machine."""


def most_worth(worth: Mapping[NodeType, Tensor], row_bytes: Mapping[NodeType, int], room: int) -> dict[NodeType, Tensor]:
    """Returns which rows fit into `room` bytes, by type, bool ``[n]``: rows of the highest worth, ties in order.

    Args:
        worth: worth per byte of each row, float32 ``[n]``; rows with negative worth are excluded.
        row_bytes, room: bytes of a row of each type, and maximum bytes in total.
    """
    # The bits of nonnegative floats have the order of the floats. So bisection finds the threshold without sorting.
    order = {name: each.view(torch.int32) for name, each in worth.items()}
    low, high = -1, 2**31 - 1
    while low < high:
        middle = (low + high) // 2
        if sum(row_bytes[name] * int((each > middle).sum()) for name, each in order.items()) <= room:
            high = middle
        else:
            low = middle + 1
    kept = {name: each > low for name, each in order.items()}
    room -= sum(row_bytes[name] * int(each.sum()) for name, each in kept.items())
    for name, each in order.items():
        if row_bytes[name]:
            equal = (each == low).nonzero().view(-1)[: room // row_bytes[name]]
            kept[name][equal] = True
            room -= row_bytes[name] * len(equal)
    return kept


@dataclass(frozen=True)
class _CachedRows:
    """Cached feature rows of one node type.

    Attributes:
        place: 1 + the position of each node's features, or 0, int32 ``[N]``; not used for nodes of other machines.
        rows: features, ``[K, ...]``.
    """

    place: Tensor
    rows: Tensor


class NearCache:
    """Features of nodes on this machine, one copy for all of its ranks; all ranks of all machines create and fill it.

    Args:
        features: features in the store, by node type that has some, ``[N, ...]``.
        types: types of the graph.
        world: the ranks.
        local_ranks: ranks of this machine.
        num_bytes: maximum bytes, with the index.

    Raises:
        ValueError: `num_bytes` is too small for any features, the bytes needed exceed the available memory, or several ranks run
            without Linux's memfd.
    """

    def __init__(
        self, features: Mapping[NodeType, Tensor], types: Types, world: World, local_ranks: Sequence[int], num_bytes: int
    ) -> None:
        self._world, self._local_ranks = world, local_ranks
        self._features = features
        self._row_bytes = {name: each[:1].nbytes for name, each in features.items() if each.numel()}
        self._offsets = {name: types.offsets(name) for name in self._row_bytes}
        counts = {name: sum(int(of[rank + 1] - of[rank]) for rank in local_ranks) for name, of in self._offsets.items()}
        places = PLACE_BYTES * sum(counts.values())
        self._room, free, wrong = num_bytes - places, available_bytes(), None
        needed = places + min(self._room, sum(count * self._row_bytes[name] for name, count in counts.items()))
        if self._room < 0:
            wrong = (
                f"local_cache must be more than {places:,} bytes, got {num_bytes:,}: its index takes {PLACE_BYTES} bytes for "
                f"each of the {sum(counts.values()):,} nodes of a machine. Increase it, or remove it."
            )
        elif free is not None and needed > free:
            wrong = f"local_cache needs {needed:,} bytes, but a machine has {free:,} available. Set a smaller local_cache."
        elif world.size > 1 and not hasattr(os, "memfd_create"):
            wrong = "local_cache is not supported on this system: its shared memory needs Linux. Remove it."
        for message in [wrong] if world.size == 1 else world.all_gather_object(wrong):
            if message is not None:
                raise ValueError(message)
        self._cached_rows: dict[NodeType, _CachedRows] = {}

    def fill(self, reads: Mapping[NodeType, Rows], uses: Mapping[NodeType, Rows]) -> None:
        """Cache the rows with the most requests per byte; ties go to rows that more edges read.

        The previous rows are released first: until this returns, features are read from the store.

        Args:
            reads: nodes, and the number of edges of this rank that read each.
            uses: nodes, and the number of requests for each to this rank.
        """
        self._cached_rows = {}
        nothing = (torch.empty(0, dtype=torch.long),) * 2
        own = [each for of in (reads, uses) for name in self._row_bytes for each in of.get(name, nothing)]
        counted = one_copy(self._world, self._local_ranks, own)
        first = min(self._local_ranks)
        chosen = self._choose_nodes(counted) if self._world.rank == first else {}
        counts = {name: len(ids) for name, ids in chosen.items()}
        if self._world.size > 1:
            counts = self._world.all_gather_object(counts)[first]
        kept = dict[NodeType, _CachedRows]()
        for name, row_bytes in self._row_bytes.items():
            x, count = self._features[name], counts[name]
            sizes = PLACE_BYTES * len(x), row_bytes * count
            place, rows = (shared_zeros(self._world, self._local_ranks, size) for size in sizes)
            kept[name] = _CachedRows(place.view(torch.int32), rows.view(x.dtype).view(count, *x.shape[1:]))
            if name in chosen:
                kept[name].place[chosen[name]] = torch.arange(1, count + 1, dtype=torch.int32)
        self._meet()
        for name, of in kept.items():
            begin, end = self._offsets[name][self._world.rank : self._world.rank + 2].tolist()
            ids = begin + of.place[begin:end].nonzero().view(-1)
            if len(ids):
                to = int(of.place[ids[0]]) - 1
                torch.index_select(self._features[name], 0, ids, out=of.rows[to : to + len(ids)])
        self._meet()
        self._cached_rows = kept

    def _meet(self) -> None:
        if self._world.size > 1:
            self._world.all_gather_object("")

    def _choose_nodes(self, counted: Mapping[int, Sequence[Tensor]]) -> dict[NodeType, Tensor]:
        """Returns the nodes to cache, ascending, by type, from the counts of all ranks of this machine."""
        worth = dict[NodeType, Tensor]()
        for number, (name, row_bytes) in enumerate(self._row_bytes.items()):
            reads, uses = (torch.zeros(len(self._features[name])) for _ in range(2))
            for of_rank in counted.values():
                for sums, at in ((reads, 2 * number), (uses, 2 * (len(self._row_bytes) + number))):
                    sums.index_add_(0, of_rank[at], of_rank[at + 1].float())
            worth[name] = torch.full_like(reads, -1)
            for rank in self._local_ranks:
                here = slice(*self._offsets[name][rank : rank + 2])
                worth[name][here] = (uses[here] + reads[here] / (1 + reads.max())) / row_bytes
        kept = most_worth(worth, self._row_bytes, self._room)
        return {name: each.nonzero().view(-1) for name, each in kept.items()}

    def rows(self, name: NodeType, ids: Tensor) -> tuple[Tensor, int]:
        """Returns features of nodes of this machine, ``[n, ...]``, from the cache or the store, and the number from the cache."""
        kept, stored = self._cached_rows.get(name), self._features[name]  # another thread may refill it
        if kept is None or not len(kept.rows):
            return stored.index_select(0, ids), 0
        place = kept.place.index_select(0, ids)
        missing = (place == 0).nonzero().view(-1)
        out = kept.rows.index_select(0, (place - 1).clamp_(min=0))
        out.index_copy_(0, missing, stored.index_select(0, ids[missing]))
        return out, len(ids) - len(missing)
