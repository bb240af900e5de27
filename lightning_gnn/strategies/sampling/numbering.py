"""Local numbers of global ids, by first occurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn.strategies.sampling import loops

LARGEST_ARRAY = 1 << 24
"""Up to so many ids an array of all is used, 4 bytes each; ``benchmarks/sampling.py`` has what a table costs."""

_LARGEST_BASE = 1 << 30
"""Beyond this the array starts over: what is left of int32 is room for the numbers of one batch."""


class Numbering:
    """Numbers ids in the order in which they first occur. Its buffers are used again from batch to batch.

    One thread at a time.

    Args:
        num_ids: ids lie between 0 and `num_ids` - 1, which is not checked.
        dense: keep an array of all ids, or a hash table of those that occur; by default what is faster, while the array is
            small.
    """

    def __init__(self, num_ids: int, dense: bool | None = None):
        self.num_ids = num_ids
        self.dense = num_ids <= LARGEST_ARRAY if dense is None else dense
        # What is below the base belongs to an earlier batch: nothing needs clearing.
        self._base = 0
        self._count = 0
        self._known = torch.empty(1024, dtype=torch.long)
        self._array = torch.full((num_ids if self.dense else 0,), -1, dtype=torch.int32)
        self._table = _empty_table(0 if self.dense else 2048)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Tensor:
        """The id of each number, int64 ``[count]``; a copy."""
        return self._known[: self._count].clone()

    def since(self, first: int) -> Tensor:
        """Returns the ids of the numbers from `first` on, int64; a copy."""
        return self._known[first : self._count].clone()

    def clear(self) -> None:
        self._base += self._count
        self._count = 0
        if self.dense and self._base > _LARGEST_BASE:
            self._array.fill_(-1)
            self._base = 0

    def start(self, seeds: Tensor) -> None:
        """Forgets all numbers and gives `seeds`, int64 ``[n]``, the first n; a duplicate takes one, but the first is found."""
        self.clear()
        self._number(seeds, loops.APPEND)

    def add(self, ids: Tensor) -> Tensor:
        """Returns the number of each id, int64 ``[n]``; new ids get the next numbers."""
        return self._number(ids, loops.ADD)

    def find(self, ids: Tensor) -> Tensor:
        """Returns the number of each id, int64 ``[n]``; -1 for those that have none."""
        return self._number(ids, loops.FIND)

    def _number(self, ids: Tensor, mode: int) -> Tensor:
        if mode != loops.FIND:
            self._reserve(self._count + len(ids))
        loop, memory = (loops.number_in_array, self._array) if self.dense else (loops.number_in_table, self._table)
        numbers = torch.empty(len(ids), dtype=torch.long)
        arrays = ids.contiguous().numpy(), memory.numpy(), self._base, self._known.numpy()
        self._count = loop(*arrays, self._count, numbers.numpy(), mode)
        return numbers

    def _reserve(self, size: int) -> None:
        if size > len(self._known):
            known = torch.empty(2 * size, dtype=torch.long)
            known[: self._count] = self._known[: self._count]
            self._known = known
        if not self.dense and 2 * size > len(self._table):
            ids = self.ids
            self._table, self._base, self._count = _empty_table(2 * size), 0, 0
            self._number(ids, loops.APPEND)


def _empty_table(size: int) -> Tensor:
    """Returns a table of at least `size` places, a power of two: ids and numbers, int64 ``[places, 2]``."""
    return torch.full((1 << max(size - 1, 1).bit_length(), 2), -1, dtype=torch.long)
