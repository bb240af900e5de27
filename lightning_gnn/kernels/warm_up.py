"""Compiles the loops that a model needs before it trains, so that no epoch waits for it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from lightning_gnn.extensions.codecs.kernels import dequantise, quantise, shorten
from lightning_gnn.extensions.zero_rows.kernels import nonzero_rows, pack_rows, unpack_rows
from lightning_gnn.kernels.attention import additive_scores, edge_softmax, pair_products, pair_sums, weighted_sums
from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.run import timed_compilation
from lightning_gnn.kernels.sums import STATISTICS, RowStatistics, row_statistics_grad, spmm


def _statistics(csr: CSR, dtype: torch.dtype) -> None:
    x = torch.ones(csr.num_cols, 2, dtype=torch.promote_types(dtype, torch.float32))
    found = RowStatistics.empty(csr, x, STATISTICS)
    found.add(csr, x, accumulate=False)
    row_statistics_grad(csr, x, found, found)


def _attention(csr: CSR, dtype: torch.dtype) -> None:
    def ones(*shape: int) -> Tensor:
        return torch.ones(*shape, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)

    rows, own, attention = ones(csr.num_cols, 1, 2), ones(csr.num_rows, 1, 2), ones(1, 2)
    scores = pair_products(csr, rows, own) + additive_scores(csr, rows, own, attention, 0.2)
    scores = scores + pair_sums(csr, rows[..., 0], own[..., 0])
    weighted_sums(csr, rows, edge_softmax(csr, scores)).sum().backward()


def _codes(csr: CSR, dtype: torch.dtype) -> None:
    rows = torch.ones(1, 2, dtype=dtype)
    for noise in (None, 1):
        ends, packed, _ = quantise(rows, 8, noise)
        shorten(rows, torch.empty(1, 2, dtype=torch.bfloat16), noise)
    dequantise(ends, packed, 8, rows)


def _zeros(csr: CSR, dtype: torch.dtype) -> None:
    rows, out = torch.ones(1, 2, dtype=dtype), torch.empty(1 + 2 * dtype.itemsize, dtype=torch.uint8)
    nonzero_rows(rows, [1])
    pack_rows(rows, [1], [True], [0], out)
    unpack_rows(out, rows)


_GROUPS: dict[str, Callable[[CSR, torch.dtype], object]] = {
    "sums": lambda csr, dtype: spmm(csr, torch.ones(csr.num_cols, 2, dtype=dtype)),
    "statistics": _statistics,
    "attention": _attention,
    "codes": _codes,
    "zeros": _zeros,
}


def warm_up(groups: Collection[str], dtypes: Collection[torch.dtype]) -> float:
    """Loads loops from disk, and compiles those that are not there; returns the seconds of that, 0 if all were.

    Args:
        groups: of ``"sums"``, ``"statistics"``, ``"attention"``, ``"codes"`` and ``"zeros"``.
        dtypes: of the rows.
    """
    # Sources out of order, so that the transpose is sorted, and a permutation of slots is needed.
    rows, columns = torch.tensor([[0, 0, 1], [2, 0, 1]], dtype=torch.int32)
    csr = CSR.from_coo(rows, columns, 2, 3)

    def use() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            CSR.halves(rows, columns, 2, 2, 1)
            for group in groups:
                for dtype in dtypes:
                    _GROUPS[group](csr, dtype)

    return timed_compilation(use)
