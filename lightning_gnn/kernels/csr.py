"""List of edges as a sparse matrix whose rows are targets.

R rows, C columns of the matrix, E edges; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.kernels import loops

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class CSR:
    """Sparse matrix without values: the columns of each row's edges, with duplicates. A *slot* is the position of an edge in it.

    Attributes:
        indptr: first slot of each row and the end, int64 ``[R + 1]``.
        indices: column of each slot, int32 ``[E]``.
        edge: position of each slot's edge in the original edge list, int32 (or int64 for longer lists) ``[E]``; None if the list
            is in slot order.
        num_cols: C.
    """

    indptr: Tensor
    indices: Tensor
    edge: Tensor | None
    num_cols: int

    @classmethod
    def from_coo(cls, row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> CSR:
        """Returns the matrix of an edge list; within a row, slots keep the order of the list.

        Args:
            row, col: int32 or int64 ``[E]``.
            num_rows, num_cols: R and C.

        Raises:
            ValueError: an id is outside of the matrix, or there are more columns than int32 allows.
        """
        _check_columns(num_cols)
        _check(row, num_rows, "rows")
        _check(col, num_cols, "columns")
        if bool((row[1:] >= row[:-1]).all()):
            return cls(_indptr(row, num_rows), col.int(), None, num_cols)
        if row.device.type == "cpu":
            indptr, order = map(torch.from_numpy, loops.counting_sort(row.contiguous().numpy(), num_rows))
        else:
            indptr, order = _indptr(row, num_rows), torch.argsort(row, stable=True)
        return cls(indptr, col[order].int(), _short(order), num_cols)

    @classmethod
    def halves(
        cls,
        row: Tensor,
        col: Tensor,
        num_rows: int,
        num_first: int,
        num_last: int,
        in_list: bool = True,
        self_loops: bool = False,
    ) -> tuple[CSR, CSR]:
        """Returns two matrices of an edge list, ``[R, num_first + num_last]``: its first and its last columns.

        On the CPU, it needs no memory besides the result.

        Args:
            row, col: int32 or int64 ``[E]``.
            num_rows: R.
            num_first, num_last: number of columns of each half.
            in_list: whether to store the positions of edges in the list.
            self_loops: whether to omit self-loops in the list and append one to the row of each of the first columns. Requires as
                many rows as first columns; not with `in_list`.

        Raises:
            ValueError: an id is outside of the matrix, or a half has more columns than int32 allows.
        """
        if row.device.type != "cpu":
            return cls._halves_by_torch(row, col, num_rows, num_first, num_last, in_list, self_loops)
        _check_columns(max(num_first, num_last))
        _check(row, num_rows, "rows")
        _check(col, num_first + num_last, "columns")
        source, target = col.contiguous().numpy(), row.contiguous().numpy()
        indptrs = [torch.zeros(num_rows + 1, dtype=torch.long) for _ in range(2)]
        loops.count_halves(source, target, num_first, self_loops, *(each.numpy() for each in indptrs))
        halves, filled = [], []
        for indptr, columns in zip(indptrs, (num_first, num_last)):
            torch.cumsum(indptr, 0, out=indptr)
            size = int(indptr[-1])
            places = torch.empty(size if in_list else 0, dtype=_id_dtype(len(row)))
            half = cls(indptr, torch.empty(size, dtype=torch.int32), places if in_list else None, columns)
            halves.append(half)
            filled += [indptr[:-1].clone().numpy(), half.indices.numpy(), places.numpy()]
        loops.fill_halves(source, target, num_first, self_loops, in_list, *filled)
        return halves[0], halves[1]

    @classmethod
    def _halves_by_torch(
        cls, row: Tensor, col: Tensor, num_rows: int, num_first: int, num_last: int, in_list: bool, self_loops: bool
    ) -> tuple[CSR, CSR]:
        if self_loops:
            kept, own = (row != col).nonzero().view(-1), torch.arange(num_first, dtype=row.dtype, device=row.device)
            row, col = torch.cat([row[kept], own]), torch.cat([col[kept], own])

        if not num_last:  # nothing is selected, so nothing is copied
            first, none = cls.from_coo(row, col, num_rows, num_first), col[:0]
            last = cls.from_coo(none, none, num_rows, 0)
            return (first, last.in_list(none)) if in_list else (first.to_slot_order(), last)

        def half(where: Tensor, first: int, columns: int) -> CSR:
            ids = where.nonzero().view(-1)
            made = cls.from_coo(row[ids], col[ids] - first, num_rows, columns)
            return made.in_list(ids) if in_list else made.to_slot_order()

        return half(col < num_first, 0, num_first), half(col >= num_first, num_first, num_last)

    @cached_property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @cached_property
    def num_edges(self) -> int:
        return len(self.indices)

    @cached_property
    def device(self) -> torch.device:
        return self.indptr.device

    def edge_ids(self) -> Tensor:
        """Returns the position of each slot's edge in the list, int64 ``[E]``."""
        return torch.arange(self.num_edges, device=self.device) if self.edge is None else self.edge.long()

    def permute(self, values: Tensor) -> Tensor:
        """Returns edge values, ``[E, ...]`` in list order, in slot order."""
        return values if self.edge is None else values[self.edge]

    def unpermute(self, values: Tensor) -> Tensor:
        """Returns edge values, ``[E, ...]`` in slot order, in list order."""
        return values if self.edge is None else values[self._slot_of_edge]

    def in_list(self, edge_ids: Tensor) -> CSR:
        """Returns the same matrix for a longer edge list, in which its k-th edge is at ``edge_ids[k]``, int64 ``[E]``."""
        return CSR(self.indptr, self.indices, _short(self.permute(edge_ids)), self.num_cols)

    def row_of_slot(self) -> Tensor:
        """Returns the row of each slot, int32 ``[E]``."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_edges)

    def transpose(self, in_list: bool = True) -> CSR:
        """Returns the cached transpose; its ``edge`` refers to the slots of this matrix.

        Args:
            in_list: whether it must have an ``edge``, 4 bytes per edge; unweighted sums do not need it. A cached ``edge``
                remains.
        """
        return self.full_transpose if in_list or "full_transpose" in vars(self) else self._bare_transpose

    def to_slot_order(self) -> CSR:
        """Returns the matrix with its slots as the edge list."""
        return self if self.edge is None else self.slot_order

    def chunks(self, count: int) -> list[tuple[int, int]]:
        """Returns at most `count` ranges of rows with about equal numbers of edges and rows."""
        if count not in self._chunks:
            self._chunks[count] = even_ranges(self.indptr, count)
        return self._chunks[count]

    def segments(self, length: int) -> Segments | None:
        """Returns the segments of rows with more than `length` edges, or None without such rows; cached, with one host sync."""
        if length not in self._segments:
            self._segments[length] = Segments.of(self.indptr, length)
        return self._segments[length]

    @cached_property
    def kept_rows(self) -> Tensor:
        """Cached :meth:`row_of_slot`."""
        return self.row_of_slot()

    @cached_property
    def torch_parts(self) -> tuple[Tensor, Tensor]:
        """Cached arguments of torch's sparse matrices besides `indptr`: columns int64 and ones float32, ``[E]``."""
        return self.indices.long(), torch.ones(self.num_edges, device=self.device)

    @cached_property
    def _segments(self) -> dict[int, Segments | None]:
        return {}

    @cached_property
    def _chunks(self) -> dict[int, list[tuple[int, int]]]:
        return {}

    @cached_property
    def slot_order(self) -> CSR:
        """Matrix with its slots as the edge list, see :meth:`to_slot_order`."""
        return CSR(self.indptr, self.indices, None, self.num_cols)

    @cached_property
    def slots(self) -> tuple[Tensor, bool]:
        """:attr:`edge`, empty for None, and whether there is one."""
        return (self.indptr.new_empty(0, dtype=torch.int32), False) if self.edge is None else (self.edge, True)

    @cached_property
    def full_transpose(self) -> CSR:
        """Transpose with an ``edge``, see :meth:`transpose`."""
        return self._transpose(in_list=True)

    @cached_property
    def _bare_transpose(self) -> CSR:
        return self._transpose(in_list=False)

    def _transpose(self, in_list: bool) -> CSR:
        if self.device.type != "cpu":
            made = CSR.from_coo(self.indices, self.row_of_slot(), self.num_cols, self.num_rows)
            return made if in_list else made.to_slot_order()
        # Allocated by torch, so that tools that count its tensors include them.
        indptr = _indptr(self.indices, self.num_cols)
        rows = torch.empty(self.num_edges, dtype=torch.int32)
        slots = torch.empty(self.num_edges if in_list else 0, dtype=_id_dtype(self.num_edges))
        filled = indptr[:-1].clone().numpy(), rows.numpy(), slots.numpy()
        loops.transpose(self.indptr.numpy(), self.indices.numpy(), in_list, *filled)
        return CSR(indptr, rows, slots if in_list else None, self.num_rows)

    @cached_property
    def _slot_of_edge(self) -> Tensor:
        assert self.edge is not None
        slots = torch.empty_like(self.edge)
        slots[self.edge.long()] = torch.arange(self.num_edges, dtype=slots.dtype, device=self.device)
        return slots


@dataclass(frozen=True)
class Segments:
    """Rows with many edges (hubs), split into segments of equal length, the last of a row shorter; U hubs, S segments.

    Attributes:
        hubs: rows, int64 ``[U]``.
        first: first segment of each hub and the end, int64 ``[U + 1]``.
        row, start: row and first slot of each segment, int64 ``[S]``.
    """

    hubs: Tensor
    first: Tensor
    row: Tensor
    start: Tensor

    @classmethod
    def of(cls, indptr: Tensor, length: int) -> Segments | None:
        """Returns the segments of rows with more than `length` edges; None without such rows."""
        degrees = indptr.diff()
        hubs = (degrees > length).nonzero().squeeze(1)
        if not len(hubs):
            return None
        counts = (degrees[hubs] + length - 1) // length
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        hub = torch.repeat_interleave(counts)
        place = torch.arange(len(hub), device=hub.device) - first[hub]
        return cls(hubs, first, hubs[hub], indptr[hubs[hub]] + place * length)


def even_ranges(indptr: Tensor, count: int) -> list[tuple[int, int]]:
    """Returns at most `count` ranges of rows with about equal numbers of edges and rows; indptr int64 ``[R + 1]``."""
    # Rows without edges are written, too.
    cost = indptr.numpy() + np.arange(len(indptr))
    bounds = np.searchsorted(cost, np.linspace(0, cost[-1], count + 1))
    return [(int(low), int(high)) for low, high in pairwise(bounds) if high > low]


def _indptr(rows: Tensor, num_rows: int) -> Tensor:
    """Returns the first slot of each row and the end, int64 ``[R + 1]``."""
    counts = torch.bincount(rows, minlength=num_rows)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _check_columns(num_cols: int) -> None:
    if num_cols > _INT32_MAX:
        raise ValueError(f"A matrix of {num_cols} columns needs ids beyond int32; split the graph into more parts.")


def _check(ids: Tensor, size: int, name: str) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise ValueError(f"Ids from {int(ids.min())} to {int(ids.max())} are outside a matrix of {size} {name}.")


def _id_dtype(count: int) -> torch.dtype:
    """Returns the dtype of ids for `count` edges."""
    return torch.int32 if count <= _INT32_MAX else torch.int64


def _short(ids: Tensor) -> Tensor:
    return ids.int() if not len(ids) or int(ids.max()) <= _INT32_MAX else ids
