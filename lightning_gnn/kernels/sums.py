"""Sums, means, maxima and minima of rows over edges, without autograd.

Devices with loops (:func:`~lightning_gnn.kernels.run.has_loops`) use compiled loops: the CPU, and GPUs with Triton. Loops add a
row's edges in an order that does not depend on timing or on the number of threads. On other devices, :func:`spmm` uses torch's
own kernels, and :class:`RowStatistics` is not supported.

R rows, C columns of the matrix, E slots, F columns of the dense operand; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lightning_gnn.kernels import loops
from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.run import BACKENDS, has_loops, run_over_rows


def spmm(
    csr: CSR,
    x: Tensor,
    weight: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    scale: Tensor | None = None,
) -> Tensor:
    """Returns the sum of ``weight * x`` over each row's edges, times ``scale``, ``[R, ...]``.

    Args:
        csr: matrix ``[R, C]``.
        x: ``[C, ...]``, floating point.
        weight: weight of each slot, ``[E]``, see :meth:`CSR.permute`; None for ones.
        out: result tensor, ``[R, ...]``, contiguous; by default a new tensor of x's dtype. bfloat16 and float16 are summed in
            float32.
        accumulate: whether to add to `out` instead of overwriting it; `scale` then applies to the total.
        scale: scale of each row, ``[R]``; None for ones.
    """
    if x.size(0) != csr.num_cols:
        raise ValueError(f"x must have one row for each of the matrix's {csr.num_cols} columns, got {x.size(0)} rows.")
    if weight is not None and len(weight) != csr.num_edges:
        raise ValueError(f"weight has {len(weight)} entries, but the matrix has {csr.num_edges} edges.")
    if out is None:
        out, accumulate = x.new_empty((csr.num_rows, *x.shape[1:])), False
    if out.numel() == 0:
        return out
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    direct = out.dtype == wide or has_loops(x.device, out.dtype)
    dense = x.detach().reshape(csr.num_cols, out[0].numel()).contiguous()
    target = out.view(csr.num_rows, -1)
    if not direct:
        target = target.to(wide) if accumulate else torch.empty_like(target, dtype=wide)
    weight = None if weight is None else weight.detach().to(wide).contiguous()
    scale = None if scale is None else scale.detach().to(wide).contiguous()
    if has_loops(x.device, target.dtype):
        # 16-bit floats are read directly: half the bytes, which limit a sum. numba's loop reads bfloat16.
        short = dense.dtype == torch.bfloat16 or (dense.dtype == torch.float16 and has_loops(x.device, dense.dtype))
        dense = dense if short and wide == torch.float32 else dense.to(wide)
        none = dense.new_empty(0, dtype=wide)
        if dense.dtype == torch.bfloat16 and x.device.type not in BACKENDS:
            dense = dense.view(torch.uint16)
        tensors = none if weight is None else weight, dense, none if scale is None else scale, target
        given = weight is not None, scale is not None, accumulate
        run_over_rows(loops.spmm, csr, csr.indices, *tensors, *given, work=csr.num_edges * dense.size(1))
    else:
        product = _torch_spmm(csr, dense.to(wide), weight)
        target = target.add_(product) if accumulate else target.copy_(product)
        if scale is not None:
            target.mul_(scale.unsqueeze(1))
    return out if direct else out.copy_(target.view(out.shape))


def _torch_spmm(csr: CSR, x: Tensor, weight: Tensor | None) -> Tensor:
    col, ones = csr.torch_parts
    values = (ones if weight is None else weight).to(x.dtype)
    matrix = torch.sparse_csr_tensor(csr.indptr, col, values, (csr.num_rows, csr.num_cols))
    # Autocast would multiply in 16 bits, in which sums of hubs overflow. Not all devices support autocast.
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return matrix @ x


def take_rows(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Write ``x[rows]`` into `out`, ``[K, ...]``."""
    with torch.no_grad():
        return torch.index_select(x.detach(), 0, rows, out=out)


STATISTICS = ("sum", "squares", "max", "min")
"""Names of the statistics in :class:`RowStatistics`."""


@dataclass
class RowStatistics:
    """Several statistics of the same rows, computed in one pass over the edges; statistics that are not requested have no rows.

    Attributes:
        sum, squares: sums of x and of x * x, ``[R, F]``.
        max, min: ``[R, F]``; infinite for rows without edges.
        num_max, num_min: number of a row's edges that attain the extremum, int32 ``[R, F]``.
    """

    sum: Tensor
    squares: Tensor
    max: Tensor
    min: Tensor
    num_max: Tensor
    num_min: Tensor

    @classmethod
    def empty(cls, csr: CSR, x: Tensor, wanted: Collection[str]) -> RowStatistics:
        """Returns uninitialized statistics for the names `wanted` from :data:`STATISTICS`."""

        def make(name: str, dtype: torch.dtype) -> Tensor:
            return x.new_empty((csr.num_rows if name in wanted else 0, x.size(1)), dtype=dtype)

        floats = {name: make(name, x.dtype) for name in STATISTICS}
        return cls(**floats, num_max=make("max", torch.int32), num_min=make("min", torch.int32))

    def add(self, csr: CSR, x: Tensor, accumulate: bool) -> None:
        """Compute the statistics of the edges of `csr`; with `accumulate`, add them to earlier matrices with these rows.

        Args:
            csr: matrix ``[R, C]``.
            x: ``[C, F]``, contiguous, of a dtype for which its device has loops.
            accumulate: whether to add to the statistics instead of overwriting them.
        """
        parts = (self.sum, self.squares, self.max, self.num_max, self.min, self.num_min)
        work = csr.num_edges * x.size(1) * 2
        run_over_rows(loops.statistics, csr, csr.indices, x.detach(), *parts, accumulate, work=work)

    def ties(self, name: str) -> Tensor:
        """Returns the number of ties that share a gradient of ``"max"`` or ``"min"``, at least 1, ``[R, F]``, as torch counts."""
        extreme, count = (self.max, self.num_max) if name == "max" else (self.min, self.num_min)
        count = count.to(extreme.dtype)
        return (count + (extreme == 0) if _zero_is_a_tie() else count).clamp_(min=1)


@cache
def _zero_is_a_tie() -> bool:
    """Returns whether torch's scatter counts its initial zero as a tie for an extremum of zero, even if it is excluded."""
    # Computed once in each process, at different times on different ranks: no mode may send messages here.
    with torch.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        source, here = torch.zeros(1, requires_grad=True), torch.zeros(1, dtype=torch.long)
        result = torch.zeros(1).scatter_reduce(0, here, source, "amax", include_self=False)
        return float(torch.autograd.grad(result, source)[0]) < 1


def row_statistics_grad(csr: CSR, x: Tensor, grads: RowStatistics, extremes: RowStatistics) -> Tensor:
    """Returns the gradient of :meth:`RowStatistics.add` with respect to x, ``[C, F]``; ties share it evenly, as in torch.

    Args:
        csr: matrix ``[R, C]`` of the forward pass.
        x: ``[C, F]`` of the forward pass.
        grads: gradient of each statistic, ``[R, F]``, with max and min divided by their :meth:`~RowStatistics.ties`; ``[0, F]``
            for none.
        extremes: statistics of the forward pass.
    """
    out, flipped = torch.empty_like(x), csr.transpose(in_list=False)
    # Gradients may be expanded.
    total, square, largest, smallest = (each.contiguous() for each in (grads.sum, grads.squares, grads.max, grads.min))
    parts = (total, square, extremes.max, largest, extremes.min, smallest)
    work = csr.num_edges * x.size(1) * 4
    run_over_rows(loops.statistics_grad, flipped, flipped.indices, x.detach(), *parts, out, work=work)
    return out
