"""Compilation of a model's loops before training, so that no epoch waits for it."""

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
    groups: Collection[str], dtypes: Collection[torch.dtype], extra_loops: Sequence[Callable[[torch.dtype], object]] = ()
) -> float:
    """Load loops from disk, and compile missing loops; returns the seconds of compilation, 0 if all were on disk.

    Args:
        groups: names among ``"sums"``, ``"statistics"`` and ``"attention"``.
        dtypes: dtypes of the rows.
        extra_loops: functions that run other loops, on rows of a dtype.
    """
    # Unsorted sources, so that the transpose sorts them and needs a permutation of slots.
    rows, columns = torch.tensor([[0, 0, 1], [2, 0, 1]], dtype=torch.int32)
    csr = CSR.from_coo(rows, columns, 2, 3)

    def use() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            CSR.halves(rows, columns, 2, 2, 1)
            for group in groups:
                for dtype in dtypes:
                    _GROUPS[group](csr, dtype)
            for run_loop in extra_loops:
                for dtype in dtypes:
                    run_loop(dtype)

    return timed_compilation(use)
