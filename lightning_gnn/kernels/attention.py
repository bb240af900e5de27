"""Attention over edges without a row per edge: scores per edge and head, softmax, weighted sums. Differentiable.

For devices with loops, see :func:`~lightning_gnn.kernels.run.has_loops`. 16-bit floats are summed in float32, on the CPU from
copies; results have the dtype of the first argument.

Edge values are ``[E, H]`` in slot order of a CSR matrix of R rows (targets) and K columns (sources). No tensor has edges times
channels elements, while PyG's gather and scatter store several such tensors.

R rows, K columns of the matrix, E slots, H heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.kernels import loops
from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.run import run_over_rows

Across = Callable[[Tensor, str], Tensor]
"""Completes the partial ``"max"`` or ``"sum"`` of each row, ``[R, H]``, if a row's edges are on several ranks."""


def pair_sums(csr: CSR, source: Tensor, target: Tensor) -> Tensor:
    """Returns ``source[col] + target[row]`` of each edge, ``[E, H]``: GAT's score before its activation.

    Args:
        csr: matrix ``[R, K]``.
        source: ``[K, H]``.
        target: ``[R, H]``.
    """
    return _apply(_PairSums, csr, source, target)


def pair_products(csr: CSR, source: Tensor, target: Tensor) -> Tensor:
    """Returns ``<source[col, h], target[row, h]>`` of each edge and head, ``[E, H]`` (SDDMM).

    Args:
        csr: matrix ``[R, K]``.
        source: ``[K, H, C]``.
        target: ``[R, H, C]``.
    """
    return _apply(_PairProducts, csr, source, target)


def additive_scores(csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float) -> Tensor:
    """Returns ``<attention[h], leaky_relu(source[col, h] + target[row, h])>`` of each edge, ``[E, H]``: GATv2's score.

    Args:
        csr: matrix ``[R, K]``.
        source: ``[K, H, C]``.
        target: ``[R, H, C]``.
        attention: ``[H, C]``.
        slope: negative slope of the leaky ReLU.
    """
    return _apply(_AdditiveScores, csr, source, target, attention, slope=slope)


def edge_softmax(csr: CSR, scores: Tensor, across: Across | None = None) -> Tensor:
    """Returns the softmax of each row's scores, ``[E, H]``, with PyG's 1e-16 added to the denominator.

    Args:
        csr: matrix ``[R, K]``.
        scores: ``[E, H]``.
        across: see :data:`Across`; None if this rank has all edges of its rows. For 16-bit floats, it gets float32.
    """
    return _EdgeSoftmax.apply(csr if csr.edge is None else csr.slot_order, scores, across)


def weighted_sums(csr: CSR, x: Tensor, weight: Tensor) -> Tensor:
    """Returns the sum of ``weight * x`` over each row's edges and by head, ``[R, H, C]``.

    Args:
        csr: matrix ``[R, K]``.
        x: ``[K, H, C]``.
        weight: ``[E, H]``.
    """
    return _apply(_WeightedSums, csr, x, weight)


def _apply(function: Any, csr: CSR, *tensors: Tensor, **options: float) -> Tensor:
    """Returns the result of an autograd function, in the dtype of the first tensor; numba has no 16-bit floats."""
    wide = list[Tensor]()
    for each in tensors:  # a comprehension would be a call
        wide.append(each.float() if each.element_size() < 4 and each.device.type == "cpu" else each)
    return function.apply(csr if csr.edge is None else csr.slot_order, *wide, *options.values()).to(tensors[0].dtype)


# Loops as functions ###########################################################


def _scores(loop: Any, csr: CSR, source: Tensor, *arguments: Any) -> Tensor:
    out = source.new_empty((csr.num_edges, source.size(1)))
    run_over_rows(loop, csr, csr.indices, source, *arguments, out, work=csr.num_edges * source[:1].numel())
    return out


def _slot_sums(csr: CSR, values: Tensor) -> Tensor:
    """Returns sums over rows; `values` are in the order of the list that `csr.edge` refers to."""
    place, placed = csr.slots
    out = values.new_empty((csr.num_rows, values.size(1)))
    run_over_rows(loops.slot_sums, csr, place, values, out, placed, work=values.numel())
    return out


def _spmm_heads(csr: CSR, x: Tensor, weight: Tensor) -> Tensor:
    place, placed = csr.slots
    out = x.new_empty((csr.num_rows, *x.shape[1:]))
    work = csr.num_edges * x.size(1) * x.size(2)
    run_over_rows(loops.spmm_heads, csr, csr.indices, place, weight, x, out, placed, work=work)
    return out


# Autograd #####################################################################


class _PairSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: CSR, source: Tensor, target: Tensor) -> Tensor:
        ctx.csr = csr
        return _scores(loops.pair_sums, csr, source.contiguous(), target.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        grad = grad.contiguous()
        source = _slot_sums(ctx.csr.full_transpose, grad) if ctx.needs_input_grad[1] else None
        target = _slot_sums(ctx.csr, grad) if ctx.needs_input_grad[2] else None
        return None, source, target


class _PairProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: CSR, source: Tensor, target: Tensor) -> Tensor:
        source, target = source.contiguous(), target.contiguous()
        ctx.csr = csr
        ctx.save_for_backward(source, target)
        return _scores(loops.pair_products, csr, source, target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        source, target = ctx.saved_tensors
        grad = grad.contiguous()
        source_grad = _spmm_heads(ctx.csr.full_transpose, target, grad) if ctx.needs_input_grad[1] else None
        target_grad = _spmm_heads(ctx.csr, source, grad) if ctx.needs_input_grad[2] else None
        return None, source_grad, target_grad


class _AdditiveScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float) -> Tensor:
        source, target, attention = source.contiguous(), target.contiguous(), attention.contiguous()
        ctx.csr, ctx.slope = csr, slope
        ctx.save_for_backward(source, target, attention)
        return _scores(loops.additive_scores, csr, source, target, attention, slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None]:
        source, target, attention = ctx.saved_tensors
        grad = grad.contiguous()

        def slopes(csr: CSR, row_values: Tensor, col_values: Tensor) -> Tensor:
            place, placed = csr.slots
            out = torch.empty_like(row_values)
            arguments = (csr.indices, place, grad, row_values, col_values, ctx.slope, out, placed)
            run_over_rows(loops.additive_scores_grad, csr, *arguments, work=csr.num_edges * row_values[:1].numel())
            return out

        # leaky_relu(z) is z times its slope, so the gradient of attention uses the same sums as the gradients of both sides.
        at_source, at_target = slopes(ctx.csr.full_transpose, source, target), slopes(ctx.csr, target, source)
        for_attention = torch.einsum("khc,khc->hc", source, at_source) + torch.einsum("rhc,rhc->hc", target, at_target)
        return None, at_source.mul_(attention), at_target.mul_(attention), for_attention, None


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: CSR, scores: Tensor, across: Across | None) -> Tensor:
        # In float16, a hub's sum of exponentials would overflow, and 1e-16 would round to 0.
        dtype, scores = scores.dtype, scores.contiguous().to(torch.promote_types(scores.dtype, torch.float32))
        of_rows, out = scores.new_empty((csr.num_rows, scores.size(1))), torch.empty_like(scores)
        run_over_rows(loops.below_maxima, csr, scores, of_rows, out, False, work=scores.numel())
        if across is not None:
            run_over_rows(loops.below_maxima, csr, scores, across(of_rows, "max"), out, True, work=scores.numel())
        out.exp_()
        if across is not None:
            of_rows = across(_slot_sums(csr, out), "sum")
        run_over_rows(loops.shares, csr, out, of_rows, across is not None, work=out.numel())
        out = out.to(dtype)
        ctx.csr, ctx.across = csr, across
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (out,) = ctx.saved_tensors
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        grad, found = grad.contiguous().to(wide.dtype), torch.empty_like(wide)
        if ctx.across is None:
            total = wide.new_empty((ctx.csr.num_rows, wide.size(1)))
        else:
            total = ctx.across(_slot_sums(ctx.csr, wide * grad), "sum")
        run_over_rows(loops.shares_grad, ctx.csr, wide, grad, total, found, ctx.across is not None, work=wide.numel())
        return None, found.to(out.dtype), None


class _WeightedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, csr: CSR, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.csr = csr
        ctx.save_for_backward(x, weight)
        return _spmm_heads(csr, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        x_grad = _spmm_heads(ctx.csr.full_transpose, grad, weight) if ctx.needs_input_grad[1] else None
        weight_grad = _scores(loops.pair_products, ctx.csr, x, grad) if ctx.needs_input_grad[2] else None
        return None, x_grad, weight_grad
