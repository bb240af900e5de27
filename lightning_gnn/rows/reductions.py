"""Rules of reductions over rows, and of losses: each rank reduces its rows, and one message combines the results."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn.rows.elementwise import (
    Call,
    align_rows,
    along,
    by_itself,
    dim_argument,
    dim_of,
    first_tensor,
    on_all,
    pass_row_tensors,
    register,
    rowwise,
    target_of,
)
from lightning_gnn.rows.mode import RULES, RowsMode, Rule, name_of, placement_of, rows_of, unknown_origin
from lightning_gnn.rows.placement import FROM_ROWS, RowPlacement, RowSet


def reduction(reduce_rows: Callable[[RowsMode, Call], Tensor | None], place: int = 1) -> Rule:
    """Returns the rule of a reduction.

    Along other dimensions, each row is reduced separately. Over rows, `reduce_rows` reduces; if it returns None, the rows of all
    ranks are gathered.

    Args:
        reduce_rows: function that returns a replicated tensor or None.
        place: position of the argument ``dim``, which precedes ``keepdim``.
    """

    def join(mode: RowsMode, call: Call) -> Any:
        out = reduce_rows(mode, call)
        return mode.on_all_rows(call.func, call.args, call.kwargs) if out is None else mode.place(out, FROM_ROWS)

    return along(dim_argument(place), join, _without_rows)


def _without_rows(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    x = first_tensor(args, kwargs)
    if x is not None and x.numel() != 1 and placement_of(x) is None and not mode.constants_of(x):
        raise mode.refuse(f"{name_of(func)} of {unknown_origin(x)}")
    return mode.plain(func, args, kwargs)


def _keeps(call: Call, place: int = 2) -> bool:
    """Returns the argument ``keepdim``."""
    given, args = call.kwargs, call.args
    return bool(given.get("keepdim", given.get("keepdims", args[place] if len(args) > place else False)))


def _sum(mode: RowsMode, call: Call) -> Tensor:
    return mode.sum(call.again(mode.drop_replicas(call.x, call.of)), call.name)


def _mean(mode: RowsMode, call: Call) -> Tensor | None:
    x, dtype = call.x, call.kwargs.get("dtype")
    if not (x.is_floating_point() or x.is_complex()) and dtype is None:
        return None  # torch raises the error
    return mean(mode, x.to(dtype) if dtype else x, call.of, call.dims, _keeps(call), call.name)


def mean(mode: RowsMode, x: Tensor, of: RowPlacement, dims: Sequence[int], keepdim: bool, name: str) -> Tensor:
    """Returns the mean over rows of all ranks, and other dimensions."""
    owned_rows, dims = mode.drop_replicas(x, of), tuple(dims)
    wide = owned_rows.float() if x.dtype in (torch.float16, torch.bfloat16) else owned_rows
    part = wide.sum(dims, keepdim=keepdim)
    others = prod(x.size(dim) for dim in set(dims) if dim != of.dim)
    total, num = with_count(mode, part, of.rows, name)
    return (total / (num * others).to(total.dtype)).to(x.dtype)


def with_count(mode: RowsMode, part: Tensor, rows: RowSet, name: str) -> tuple[Tensor, Tensor]:
    """Returns the sum of `part` over ranks and the number of rows of all ranks, in one message."""
    num = rows.num_rows(part)
    if num is not None:
        return mode.sum(part, name), num
    joined = mode.sum(torch.cat([part.reshape(-1), part.new_full((1,), rows.owned)]), name)
    num = joined[-1].detach().to(joined.real.dtype)
    rows.note_num_rows(num)
    return joined[:-1].view(part.shape), num


def _var(mode: RowsMode, call: Call) -> Tensor:
    given, args, x, of = call.kwargs, call.args, call.x, call.of
    # x.std(False), x.std(dim, unbiased, keepdim), and x.std(dim, correction=1)
    place = 1 if len(args) > 1 and isinstance(args[1], bool) else 2
    unbiased, correction = given.get("unbiased", args[place] if len(args) > place else True), given.get("correction")
    correction = float(unbiased) if correction is None else correction
    center = mode.enter(mean(mode, x, of, call.dims, True, call.name), FROM_ROWS, call.name)
    centered = mode.drop_replicas(x, of) - center
    part = (centered * centered.conj()).real.sum(call.dims, keepdim=_keeps(call, 3))
    num = of.rows.num_rows(part)
    assert num is not None
    others = prod(x.size(dim) for dim in call.dims if dim != of.dim)
    var = mode.sum(part, call.name) / (num * others - correction).clamp(min=0).to(part.dtype)
    if "std" in call.name:
        # As in torch, the gradient is 0 if there is no deviation.
        none = var == 0
        var = var.masked_fill(none, 1).sqrt().masked_fill(none, 0)
    return var


def _combine_parts(combine: Callable[[Tensor], Tensor]) -> Callable[[RowsMode, Call], Tensor]:
    """Returns a reduction that combines the results of ranks by itself."""
    return lambda mode, call: combine(mode.parts(call.again(mode.drop_replicas(call.x, call.of)), call.name))


def _norm(mode: RowsMode, call: Call) -> Tensor | None:
    """Reduction ``x.norm(p, dim)`` and ``vector_norm(x, ord, dim)`` over rows; None for matrix norms, which need all rows."""
    given = call.kwargs.get("p", call.kwargs.get("ord", call.args[1] if len(call.args) > 1 else None))
    of_matrix = call.func is torch.linalg.norm and given is not None and len(call.dims) == 2
    order = 2.0 if given in (None, "fro") else given
    if of_matrix or isinstance(order, str) or not 0 <= order < float("inf") or call.kwargs.get("dtype") is not None:
        return None
    part = torch.linalg.vector_norm(mode.drop_replicas(call.x, call.of), order, call.dims, _keeps(call, 3))
    if order == 0:  # number of nonzero entries
        return mode.sum(part, call.name)
    return torch.linalg.vector_norm(mode.parts(part, call.name), order, 0)


def _extreme(mode: RowsMode, call: Call) -> Tensor | None:
    if 0 in (call.of.rows.total, *(size for dim, size in enumerate(call.x.shape) if dim != call.of.dim)):
        return None  # torch raises the error
    return extreme(mode, call.name, call.x, call.of, call.dims, _keeps(call))


def extreme(mode: RowsMode, name: str, x: Tensor, of: RowPlacement, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Returns the maximum, or minimum, over rows of all ranks; ties share the gradient evenly, as on one device."""
    is_max, rows, dims = "max" in name, mode.drop_replicas(x, of), tuple(dims)
    reduce = torch.amax if is_max else torch.amin
    with torch.no_grad():
        if rows.size(of.dim):
            part = reduce(rows, dims, keepdim=True)
        else:
            part = rows.new_full([1 if dim in dims else size for dim, size in enumerate(rows.shape)], _bound(rows.dtype, is_max))
        found = reduce(mode.parts(part, name), 0)
    if x.requires_grad and torch.is_grad_enabled():
        ties = rows.detach() == found
        num = mode.sum(ties.sum(dims, keepdim=True).to(x.dtype), name)
        total = mode.sum((rows.where(ties, torch.zeros_like(rows)) / num).sum(dims, keepdim=True), name)
        found = total + (found - total).detach()
    return found if keepdim else found.squeeze(dims)


def _bound(dtype: torch.dtype, is_max: bool) -> Any:
    if dtype == torch.bool:
        return not is_max
    if dtype.is_floating_point:
        return float("-inf") if is_max else float("inf")
    info = torch.iinfo(dtype)
    return info.min if is_max else info.max


def _max(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of ``max(x)``, ``max(x, dim)``, which also returns indices, and ``max(x, other)``."""
    other = kwargs.get("other", args[1] if len(args) > 1 else None)
    is_alone = len(args) + len(kwargs) == 1
    return (rowwise if isinstance(other, Tensor) else _max_of_all if is_alone else _places)(mode, func, args, kwargs)


def _bincount(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    row_args, names = mode.row_tensors(args, kwargs), dict(zip(("input", "weights", "minlength"), args)) | kwargs
    x, weights, of = names.get("input"), names.get("weights"), rows_of(names.get("input"))
    if of is None or any(each.rows is not of.rows or each.local_ids for _, each in row_args):
        return on_all(mode, func, args, kwargs)
    owned_rows = mode.drop_replicas(x, of)
    weights = None if weights is None else align_rows(mode, weights, of.rows, 1, "bincount")[: len(owned_rows)]
    part = torch.bincount(owned_rows, weights, int(names.get("minlength", 0)))
    most, rows = mode.ranks.gather(torch.tensor([len(part), len(owned_rows)], device=x.device), "bincount").amax(0).tolist()
    if weights is not None and rows:  # without rows, torch returns integer counts
        part = part.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    part = torch.cat([part, part.new_zeros(most - len(part))])
    return mode.place(mode.sum(part, "bincount"), FROM_ROWS)


_max_of_all, _places = reduction(_extreme), reduction(lambda mode, call: None)
register(reduction(_sum), "sum nansum count_nonzero")
register(reduction(_mean), "mean")
register(reduction(_var), "var std")
register(reduction(_combine_parts(lambda parts: parts.prod(0))), "prod")
register(reduction(_combine_parts(lambda parts: parts.any(0))), "any")
register(reduction(_combine_parts(lambda parts: parts.all(0))), "all")
register(reduction(_combine_parts(lambda parts: parts.logsumexp(0))), "logsumexp")
register(_max_of_all, "amax amin")
register(_places, "argmax argmin nanmean median nanmedian mode std_mean var_mean aminmax")
register(reduction(lambda mode, call: None, 2), "kthvalue")
register(reduction(_norm, 2), "norm vector_norm")
register(_max, "max min")
register(_bincount, "bincount")


def _one_hot(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, classes = first_tensor(args, kwargs), kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    of = rows_of(x)
    if x is None or of is None or classes >= 0:
        return by_itself(mode, func, args, kwargs)
    if of.rows.total == 0:
        return mode.on_all_rows(func, args, kwargs)  # raises the error of torch
    most = extreme(mode, "max", x, of, range(x.dim()), False)
    return by_itself(mode, func, (x, int(most) + 1), {})


RULES[F.one_hot] = _one_hot

# Losses #######################################################################

_POINTWISE = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss"""
_PER_ROW = """cross_entropy nll_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
triplet_margin_loss cosine_embedding_loss"""


@cache
def _parameters(func: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters)


def _weight_of_l1_loss() -> Any:
    """Returns the weight argument of F.l1_loss, which does not pass it to modes."""
    frame = sys._getframe()
    while frame.f_code is not F.l1_loss.__code__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None


def _loss(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    if func is F.l1_loss and (weight := _weight_of_l1_loss()) is not None:
        kwargs = {**kwargs, "weight": weight}
    row_args = mode.row_tensors(args, kwargs)
    if not row_args:
        return mode.plain(func, args, kwargs)
    arguments = dict(zip(_parameters(func), args)) | kwargs
    reduction = arguments.get("reduction", "mean")
    first = _parameters(func)[0]
    # Weighted means, a variance per row, and rows that are vectors.
    needs_all = arguments.get("weight") is not None and func in (F.mse_loss, F.l1_loss)
    if func is F.gaussian_nll_loss and isinstance(arguments["var"], Tensor):
        needs_all = needs_all or arguments["var"].dim() != arguments[first].dim()
    if needs_all or arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return mode.on_all_rows(func, args, kwargs)
    arguments["reduction"] = "none"
    name = name_of(func)
    if func in _OF_ROWS:
        rows, _ = target_of(row_args)
        if any(of.dim or of.local_ids for _, of in row_args) or arguments[first].dim() < 2:
            return mode.on_all_rows(func, args, kwargs)
        for key, value in arguments.items():
            if not isinstance(value, Tensor):
                continue
            if key == "weight" or not value.dim() or placement_of(value) is None:
                arguments[key] = mode.enter(value, placement_of(value), name)
            else:
                arguments[key] = align_rows(mode, value, rows, value.dim(), name)
        each = mode.place(func(**arguments), rows.at(0))
    else:
        each = rowwise(mode, func, (arguments.pop(first),), arguments)
    if reduction == "none":
        return each
    placement = rows_of(each)
    if placement is None or (arguments.get("weight") is not None and func in _WEIGHTED):
        return mode.on_all_rows(func, args, kwargs)
    losses = mode.drop_replicas(each, placement)
    if reduction == "sum":
        return mode.place(mode.sum(losses.sum(), name), FROM_ROWS)
    if func in (F.cross_entropy, F.nll_loss) and not arguments["target"].is_floating_point():
        return _weighted_mean(mode, losses, arguments, name)
    of = rows_of(args[0] if args else kwargs[first])
    if reduction == "batchmean" and of is not None and of.rows is placement.rows and of.dim == placement.dim == 0:
        total, num = with_count(mode, losses.sum(), placement.rows, name)
        return mode.place(total / num.to(total.dtype), FROM_ROWS)
    if reduction != "mean":
        return mode.on_all_rows(func, args, kwargs)
    return mode.place(mean(mode, each, placement, range(each.dim()), False, name), FROM_ROWS)


def _weighted_mean(mode: RowsMode, losses: Tensor, arguments: dict[str, Any], name: str) -> Tensor:
    """Returns the mean of F.cross_entropy: weighted by class weights, without ignored labels."""
    target, weight = arguments["target"][: len(losses)], arguments.get("weight")
    counted = target != arguments.get("ignore_index", -100)
    if weight is None:
        part = counted.sum().to(losses.dtype)
    else:
        part = (weight.detach()[target.where(counted, torch.zeros_like(target))] * counted).sum().to(losses.dtype)
    total, num = mode.sum(torch.stack([losses.sum(), part]), name).unbind()
    return mode.place(total / num.detach(), FROM_ROWS)


register(_loss, f"{_POINTWISE} {_PER_ROW}", (F,))
_WEIGHTED = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
"""Losses whose mean with weights divides by the weights, in newer versions of torch."""
_OF_ROWS = {getattr(F, name) for name in _PER_ROW.split()}


@pass_row_tensors
def _similarity(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    """Rule of F.cosine_similarity(x1, x2, dim=1) and F.pairwise_distance, which broadcast and reduce one dimension."""
    order = ("x1", "x2", "p", "eps", "keepdim") if func is F.pairwise_distance else ("x1", "x2", "dim", "eps")
    names = dict(zip(order, args)) | kwargs
    most = max(names["x1"].dim(), names["x2"].dim())
    dim = dim_of(int(names.get("dim", 1)) if func is F.cosine_similarity else -1, most)
    rows, right = target_of(row_args)
    if right == most - dim or names.get("keepdim"):
        return mode.on_all_rows(func, args, kwargs)
    for key in ("x1", "x2"):
        names[key] = align_rows(mode, names[key], rows, right, name_of(func))
    at = most - right
    return mode.place(func(**names), rows.at(at - (dim < at)))


RULES[F.cosine_similarity] = RULES[torch.cosine_similarity] = RULES[F.pairwise_distance] = _similarity
