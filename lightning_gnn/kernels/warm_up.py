"""Compiles the loops that a model needs before it trains, so that no epoch waits for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

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


_GROUPS: dict[str, Callable[[CSR, torch.dtype], object]] = {
    "sums": lambda csr, dtype: spmm(csr, torch.ones(csr.num_cols, 2, dtype=dtype)),
    "statistics": _statistics,
    "attention": _attention,
}


def warm_up(
    groups: Collection[str], dtypes: Collection[torch.dtype], others: Sequence[Callable[[torch.dtype], object]] = ()
) -> float:
    """Loads loops from disk, and compiles those that are not there; returns the seconds of that, 0 if all were.

    Args:
        groups: of ``"sums"``, ``"statistics"`` and ``"attention"``.
        dtypes: of the rows.
        others: run other loops, on rows of a dtype.
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
            for other in others:
                for dtype in dtypes:
                    other(dtype)

    return timed_compilation(use)
