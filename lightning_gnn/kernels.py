"""Sparse times dense, in one place: CSR and the loops over edges.

On CPU the loops are compiled by numba at first use and kept on disk; on other devices torch's sparse kernels are used.
Results do not depend on timing: a row is summed by one thread, in slot order.

R rows, C columns of the matrix, E edges, F columns of the dense operand; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

_INT32_MAX = 2**31 - 1
_MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


@dataclass(frozen=True)
class CSR:
    """A sparse matrix without values: the columns of each row's edges, duplicates kept.

    Attributes:
        indptr: first slot of each row and the end, int64 ``[R + 1]``.
        indices: column of each slot, int32 ``[E]``.
        edge: position of each slot's edge in the list that the matrix was made from, int64 ``[E]``.
        num_cols: C.
    """

    indptr: Tensor
    indices: Tensor
    edge: Tensor
    num_cols: int

    @classmethod
    def from_coo(cls, row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> CSR:
        """Returns the matrix of a list of edges; within a row, slots keep the order of the list.

        Args:
            row, col: int64 ``[E]``.
            num_rows, num_cols: R and C.

        Raises:
            ValueError: ids outside the matrix, or more columns than int32 counts.
        """
        if num_cols > _INT32_MAX:
            raise ValueError(f"A matrix of {num_cols} columns needs ids beyond int32; split the graph into more parts.")
        for ids, size, name in ((row, num_rows, "rows"), (col, num_cols, "columns")):
            if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
                raise ValueError(
                    f"Ids from {int(ids.min())} to {int(ids.max())} are outside a matrix of {size} {name}."
                )
        if row.device.type == "cpu":
            indptr, edge = _counting_sort(row.contiguous().numpy(), num_rows)
            order = torch.from_numpy(edge)
            return cls(torch.from_numpy(indptr), col[order].int(), order, num_cols)
        order = torch.argsort(row, stable=True)
        counts = torch.bincount(row, minlength=num_rows)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(indptr, col[order].int(), order, num_cols)

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    def permute(self, values: Tensor) -> Tensor:
        """Returns one value per edge, ``[E, ...]`` in list order, in slot order."""
        return values[self.edge]

    def transpose(self) -> CSR:
        """Returns the transpose, made once; its ``edge`` refers to the same list."""
        return self._transposed

    @cached_property
    def _transposed(self) -> CSR:
        row = torch.repeat_interleave(
            torch.arange(self.num_rows, device=self.device), self.indptr.diff(), output_size=self.num_edges
        )
        flipped = CSR.from_coo(self.indices.long(), row, self.num_cols, self.num_rows)
        return CSR(flipped.indptr, flipped.indices, self.edge[flipped.edge], self.num_rows)


def spmm(
    csr: CSR, x: Tensor, weight: Tensor | None = None, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """Returns the sum of ``weight * x`` over each row's edges, ``[R, ...]``. No autograd.

    Args:
        csr: ``[R, C]``.
        x: ``[C, ...]``, floating. bfloat16 and float16 are summed in float32.
        weight: of each slot, ``[E]``, see :meth:`CSR.permute`; None for ones.
        out: where the result goes, ``[R, ...]``, contiguous, of x's dtype; a new tensor by default.
        accumulate: add to `out` instead of overwriting it.
    """
    if x.size(0) != csr.num_cols:
        raise ValueError(f"x has {x.size(0)} rows, but the matrix has {csr.num_cols} columns.")
    if weight is not None and len(weight) != csr.num_edges:
        raise ValueError(f"weight has {len(weight)} entries, but the matrix has {csr.num_edges} edges.")
    if out is None:
        out, accumulate = x.new_empty((csr.num_rows, *x.shape[1:])), False
    if out.numel() == 0:
        return out
    if x.numel() == 0:
        return out if accumulate else out.zero_()
    exact = x.dtype in (torch.float32, torch.float64)
    dtype = x.dtype if exact else torch.float32
    dense = x.detach().to(dtype).reshape(x.size(0), -1).contiguous()
    values = None if weight is None else weight.detach().to(dtype).contiguous()
    if x.device.type != "cpu":
        result = _torch_spmm(csr, dense, values).view(out.shape)
        return out.add_(result) if accumulate else out.copy_(result)
    target = out.view(csr.num_rows, -1) if exact else torch.empty((csr.num_rows, dense.size(1)), dtype=dtype)
    _numba_spmm(csr, dense, values, target, accumulate and exact)
    if not exact:
        result = target.view(out.shape)
        return out.add_(result) if accumulate else out.copy_(result)
    return out


def _torch_spmm(csr: CSR, x: Tensor, weight: Tensor | None) -> Tensor:
    """Returns the product by torch's sparse kernels."""
    values = torch.ones(csr.num_edges, dtype=x.dtype, device=x.device) if weight is None else weight
    matrix = torch.sparse_csr_tensor(csr.indptr, csr.indices.long(), values, (csr.num_rows, csr.num_cols))
    return matrix @ x


def take_rows(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Writes ``x[rows]`` into `out`, ``[K, ...]``."""
    with torch.no_grad():
        return torch.index_select(x.detach(), 0, rows, out=out)


def add_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Adds `values` ``[K, ...]`` to rows of `out` in place; `rows` are distinct, so that no two additions meet."""
    return out.index_add_(0, rows, values)


# The loops ####################################################################

# A parallel region must not be entered by two threads at once in every threading layer of numba.
_parallel = threading.Lock()


def _numba_spmm(csr: CSR, x: Tensor, weight: Tensor | None, out: Tensor, accumulate: bool) -> None:
    arrays: tuple[Any, ...] = (
        csr.indptr.numpy(),
        csr.indices.numpy(),
        np.empty(0, x.numpy().dtype) if weight is None else weight.numpy(),
        x.numpy(),
        out.numpy(),
    )
    threads = min(torch.get_num_threads(), _MAX_THREADS)
    if threads == 1 or csr.num_edges * x.size(1) < 1 << 16:
        # No parallel region: none of its cost, and safe in a forked process.
        _spmm_rows(*arrays, weight is not None, accumulate, 0, csr.num_rows)  # type: ignore[call-arg]
        return
    with _parallel:
        numba.set_num_threads(threads)
        # Several chunks a thread, of about as many edges each.
        chunks = 4 * threads
        bounds = np.searchsorted(arrays[0], np.linspace(0, csr.num_edges, chunks + 1)[1:-1])
        bounds = np.concatenate([[0], np.maximum.accumulate(bounds.clip(0, csr.num_rows)), [csr.num_rows]])
        _spmm_parallel(*arrays, weight is not None, accumulate, bounds)  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True, fastmath={"contract", "nsz"})
def _spmm_rows(indptr, indices, weight, x, out, weighted, accumulate, low, high):  # type: ignore[no-untyped-def]
    columns = x.shape[1]
    for row in range(low, high):
        if not accumulate:
            for f in range(columns):
                out[row, f] = 0
        slot, end = indptr[row], indptr[row + 1]
        # Four neighbours a pass: the output row is read and written a quarter as often.
        while slot + 4 <= end:
            a, b, c, d = indices[slot], indices[slot + 1], indices[slot + 2], indices[slot + 3]
            if weighted:
                u, v, w, z = weight[slot], weight[slot + 1], weight[slot + 2], weight[slot + 3]
                for f in range(columns):
                    out[row, f] += (u * x[a, f] + v * x[b, f]) + (w * x[c, f] + z * x[d, f])
            else:
                for f in range(columns):
                    out[row, f] += (x[a, f] + x[b, f]) + (x[c, f] + x[d, f])
            slot += 4
        while slot < end:
            a = indices[slot]
            if weighted:
                u = weight[slot]
                for f in range(columns):
                    out[row, f] += u * x[a, f]
            else:
                for f in range(columns):
                    out[row, f] += x[a, f]
            slot += 1


@numba.njit(cache=True, nogil=True, parallel=True, fastmath={"contract", "nsz"})
def _spmm_parallel(indptr, indices, weight, x, out, weighted, accumulate, bounds):  # type: ignore[no-untyped-def]
    for chunk in numba.prange(len(bounds) - 1):
        _spmm_rows(indptr, indices, weight, x, out, weighted, accumulate, bounds[chunk], bounds[chunk + 1])


@numba.njit(cache=True, nogil=True)
def _counting_sort(keys, num_rows):  # type: ignore[no-untyped-def]
    """Returns indptr and the stable order of `keys`."""
    indptr = np.zeros(num_rows + 1, np.int64)
    for key in keys:
        indptr[key + 1] += 1
    for row in range(num_rows):
        indptr[row + 1] += indptr[row]
    place = indptr[:-1].copy()
    order = np.empty(len(keys), np.int64)
    for edge in range(len(keys)):
        key = keys[edge]
        order[place[key]] = edge
        place[key] += 1
    return indptr, order


def cache_folder() -> Path:
    """Returns where compiled kernels are kept; there once one was compiled."""
    return Path(str(_counting_sort.stats.cache_path))
