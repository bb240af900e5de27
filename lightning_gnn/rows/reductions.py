"""Rules of reductions over rows, and of losses: each rank reduces its own rows, and one message joins the results of all
ranks."""

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

from lightning_gnn.rows.elementwise import converted, dim_of, first_alone, register, rowwise, target_of
from lightning_gnn.rows.mode import RULES, RowsMode, Rule, name_of, placement_of, tensors_in, unknown_origin
from lightning_gnn.rows.placement import FROM_ROWS, Placement, RowSet


def _dims(x: Tensor, given: Any) -> tuple[int, ...] | None:
    """Returns dimensions counted from the left; None for all."""
    if given is None or isinstance(given, (bool, torch.dtype)) or (isinstance(given, (tuple, list)) and not len(given)):
        return None
    return tuple(dim_of(dim, x.dim()) for dim in (given if isinstance(given, (tuple, list)) else (given,)))


class _Call:
    """The arguments of a reduction: ``(input, dim=None, keepdim=False, ...)``, with `dim` at `place`."""

    def __init__(self, args: Any, kwargs: Any, place: int = 1) -> None:
        self.args, self.kwargs = args, kwargs
        self.x: Tensor = args[0] if args else next(each for each in kwargs.values() if isinstance(each, Tensor))
        given = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
        self.dims = _dims(self.x, given)
        self.keepdim = bool(kwargs.get("keepdim", kwargs.get("keepdims", args[place + 1] if len(args) > place + 1 else False)))

    def over(self, placement: Placement) -> bool:
        return self.dims is None or placement.dim in self.dims


def reduction(over_rows: Callable[[RowsMode, Any, _Call, Placement], Any], place: int = 1) -> Rule:
    """Returns the rule of a reduction: along other dimensions each row by itself, over rows as `over_rows` says."""

    def rule(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
        found = mode.row_tensors(args, kwargs)
        if not found:
            for x in (*args[:1], *kwargs.values()):
                if isinstance(x, Tensor) and x.numel() != 1 and placement_of(x) is None and not mode.constants_of(x):
                    raise mode.refuse(f"{name_of(func)} of {unknown_origin(x)}")
            return mode.plain(func, args, kwargs)
        call = _Call(args, kwargs, place)
        placement = placement_of(call.x)
        if placement is None or placement.rows is None or len(found) > 1 or placement.local_ids:
            return mode.on_all_rows(func, args, kwargs)
        if call.over(placement):
            return over_rows(mode, func, call, placement)
        return along_others(mode, func, call, placement)

    return rule


def along_others(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
    """Reduces dimensions without rows."""
    out = func(*call.args, **call.kwargs)
    assert call.dims is not None and placement.rows is not None
    kept = next(tensors_in((out,))).dim() == call.x.dim()
    gone = 0 if kept else sum(dim < placement.dim for dim in set(call.dims))
    return mode.tagged(out, placement.rows.at(placement.dim - gone))


def _replaced(call: _Call, own: Tensor) -> tuple[Any, Any]:
    return (own, *call.args[1:]), {key: value for key, value in call.kwargs.items() if value is not call.x}


def _sum(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
    args, kwargs = _replaced(call, mode.own(call.x, placement))
    return mode.tagged(mode.sum(func(*args, **kwargs), name_of(func)), FROM_ROWS)


def _mean(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
    x, dtype = call.x, call.kwargs.get("dtype")
    if not (x.is_floating_point() or x.is_complex()) and dtype is None:
        return func(*call.args, **call.kwargs)  # which raises
    return mode.tagged(mean(mode, x.to(dtype) if dtype else x, placement, call.dims, call.keepdim, name_of(func)), FROM_ROWS)


def mean(mode: RowsMode, x: Tensor, placement: Placement, dims: Sequence[int] | None, keepdim: bool, name: str) -> Tensor:
    """Returns the mean over rows of all ranks, and other dimensions."""
    dims = range(x.dim()) if dims is None else dims
    own = mode.own(x, placement)
    wide = own.float() if x.dtype in (torch.float16, torch.bfloat16) else own
    part = wide.sum(tuple(dims), keepdim=keepdim)
    assert placement.rows is not None
    others = prod(x.size(dim) for dim in set(dims) if dim != placement.dim)
    total, num = with_count(mode, part, placement.rows, name)
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


def _var(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
    given = call.kwargs
    if len(call.args) > 1 and isinstance(call.args[1], bool):  # x.std(False)
        given, call.dims, call.keepdim = {"unbiased": call.args[1], **given}, _dims(call.x, given.get("dim")), False
    elif len(call.args) > 2:  # x.std(dim, unbiased, keepdim)
        given = {"unbiased": call.args[2], **given}
        call.keepdim = bool(given.get("keepdim", call.args[3] if len(call.args) > 3 else False))
    correction = given.get("correction")
    correction = correction if correction is not None else float(given.get("unbiased", True))
    x, name, rows = call.x, name_of(func), placement.rows
    assert rows is not None
    dims = tuple(range(x.dim())) if call.dims is None else call.dims
    center = mode.enter(mean(mode, x, placement, dims, True, name), FROM_ROWS, name)
    apart = mode.own(x, placement) - center
    part = (apart * apart.conj()).real.sum(dims, keepdim=call.keepdim)
    num = rows.num_rows(part)
    assert num is not None
    others = prod(x.size(dim) for dim in dims if dim != placement.dim)
    var = mode.sum(part, name) / (num * others - correction).clamp(min=0).to(part.dtype)
    if "std" in name:
        # As torch's own, whose gradient is 0 where there is no deviation.
        none = var == 0
        var = var.masked_fill(none, 1).sqrt().masked_fill(none, 0)
    return mode.tagged(var, FROM_ROWS)


def _joined(combine: Callable[[Tensor, _Call], Tensor]) -> Callable[[RowsMode, Any, _Call, Placement], Any]:
    """Reductions that join the results of ranks by the same reduction."""

    def over_rows(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
        args, kwargs = _replaced(call, mode.own(call.x, placement))
        return mode.tagged(combine(mode.parts(func(*args, **kwargs), name_of(func)), call), FROM_ROWS)

    return over_rows


def _norm(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
    """``x.norm(p, dim)`` and ``vector_norm(x, ord, dim)`` over rows: norms of vectors; those of matrices are of all rows."""
    given = call.kwargs.get("p", call.kwargs.get("ord", call.args[1] if len(call.args) > 1 else None))
    dims = len(call.x.shape if call.dims is None else call.dims)
    of_matrix = func is torch.linalg.norm and given is not None and dims == 2
    order = 2.0 if given in (None, "fro") else given
    if of_matrix or isinstance(order, str) or not 0 <= order < float("inf") or call.kwargs.get("dtype") is not None:
        return mode.on_all_rows(func, call.args, call.kwargs)
    part = torch.linalg.vector_norm(mode.own(call.x, placement), order, call.dims, call.keepdim)
    if order == 0:  # the number of entries that are not 0
        return mode.tagged(mode.sum(part, name_of(func)), FROM_ROWS)
    return mode.tagged(torch.linalg.vector_norm(mode.parts(part, name_of(func)), order, 0), FROM_ROWS)


def extreme(mode: RowsMode, func: Any, x: Tensor, placement: Placement, dims: Sequence[int] | None, keepdim: bool) -> Tensor:
    """Returns the largest, or smallest, entries over rows of all ranks; ties share the gradient evenly, as on one device."""
    assert placement.rows is not None
    name = name_of(func)
    largest = "max" in name
    dims = tuple(range(x.dim())) if dims is None else tuple(dims)
    own = mode.own(x, placement)
    whole = torch.amax if largest else torch.amin
    with torch.no_grad():
        if own.size(placement.dim):
            part = whole(own, dims, keepdim=True)
        else:
            part = own.new_full([1 if dim in dims else size for dim, size in enumerate(own.shape)], _least(own.dtype, largest))
        found = whole(mode.parts(part, name), 0)
    if x.requires_grad and torch.is_grad_enabled():
        ties = own.detach() == found
        num = mode.sum(ties.sum(dims, keepdim=True).to(x.dtype), name)
        total = mode.sum((own.where(ties, torch.zeros_like(own)) / num).sum(dims, keepdim=True), name)
        found = total + (found - total).detach()
    return found if keepdim else found.squeeze(dims)


def _least(dtype: torch.dtype, of_largest: bool) -> Any:
    if dtype == torch.bool:
        return not of_largest
    if dtype.is_floating_point:
        return float("-inf") if of_largest else float("inf")
    info = torch.iinfo(dtype)
    return info.min if of_largest else info.max


def _amax(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
    x = call.x
    assert placement.rows is not None
    if 0 in (placement.rows.total, *(size for dim, size in enumerate(x.shape) if dim != placement.dim)):
        return mode.on_all_rows(func, call.args, call.kwargs)  # which raises
    return mode.tagged(extreme(mode, func, x, placement, call.dims, call.keepdim), FROM_ROWS)


def _max(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``max(x)``, ``max(x, dim)`` and ``max(x, other)``."""
    other = kwargs.get("other", args[1] if len(args) > 1 else None)
    if isinstance(other, Tensor):
        return rowwise(mode, func, args, kwargs)
    return _max_rule(mode, func, args, kwargs)


def _max_over_rows(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
    if call.dims is not None:
        return mode.on_all_rows(func, call.args, call.kwargs)  # with the places of the largest
    return _amax(mode, func, call, placement)


_max_rule = reduction(_max_over_rows)


def _all_rows(mode: RowsMode, func: Any, call: _Call, placement: Placement) -> Any:
    return mode.on_all_rows(func, call.args, call.kwargs)


def _bincount(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    found = mode.row_tensors(args, kwargs)
    names = dict(zip(("input", "weights", "minlength"), args)) | kwargs
    x, weights = names.get("input"), names.get("weights")
    if not found or any(of.rows is not found[0][1].rows or of.local_ids for _, of in found) or x is not found[0][0]:
        return mode.other(func, args, kwargs)
    own = mode.own(x, found[0][1])
    weights = None if weights is None else converted(mode, weights, found[0][1].rows, 1, "bincount")[: len(own)]  # type: ignore[arg-type]
    part = torch.bincount(own, weights, int(names.get("minlength", 0)))
    most, rows = mode.ranks.gather(torch.tensor([len(part), len(own)], device=x.device), "bincount").amax(0).tolist()
    if weights is not None and rows:  # torch counts no rows in integers
        part = part.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    part = torch.cat([part, part.new_zeros(most - len(part))])
    return mode.tagged(mode.sum(part, "bincount"), FROM_ROWS)


_sum_rule = reduction(_sum)
register(_sum_rule, "sum nansum count_nonzero")
register(reduction(_mean), "mean")
register(reduction(_var), "var std")
register(reduction(_joined(lambda parts, call: parts.prod(0))), "prod", (torch, Tensor))
register(reduction(_joined(lambda parts, call: parts.any(0))), "any")
register(reduction(_joined(lambda parts, call: parts.all(0))), "all")
register(reduction(_joined(lambda parts, call: parts.logsumexp(0))), "logsumexp")
register(reduction(_amax), "amax amin")
register(reduction(_all_rows), "argmax argmin nanmean median nanmedian mode std_mean var_mean aminmax")
register(reduction(_all_rows, 2), "kthvalue")
register(reduction(_norm, 2), "norm vector_norm", (torch, Tensor, torch.linalg))
register(_max, "max min", (torch, Tensor))
register(_bincount, "bincount", (torch, Tensor))


def _one_hot(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    if classes < 0 and mode.row_tensors(args, kwargs):
        placement = placement_of(args[0])
        assert placement is not None and placement.rows is not None
        if placement.rows.total == 0:
            return mode.on_all_rows(func, args, kwargs)  # which raises
        classes = int(extreme(mode, torch.amax, args[0], placement, None, False)) + 1
        return first_alone(mode, func, (args[0], classes), {})
    return first_alone(mode, func, args, kwargs)


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
    """Returns the weight that F.l1_loss was called with, which it does not tell modes."""
    frame = sys._getframe()
    while frame.f_code is not F.l1_loss.__code__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None


def _loss(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    if func is F.l1_loss and (weight := _weight_of_l1_loss()) is not None:
        kwargs = {**kwargs, "weight": weight}
    found = mode.row_tensors(args, kwargs)
    if not found:
        return mode.plain(func, args, kwargs)
    given = dict(zip(_parameters(func), args)) | kwargs
    reduction = given.get("reduction", "mean")
    first = _parameters(func)[0]
    # Means by weights, a variance for each row, and rows that are vectors themselves.
    apart = given.get("weight") is not None and func in (F.mse_loss, F.l1_loss)
    if func is F.gaussian_nll_loss and isinstance(given["var"], Tensor):
        apart = apart or given["var"].dim() != given[first].dim()
    if apart or given.get("size_average") is not None or given.get("reduce") is not None:
        return mode.on_all_rows(func, args, kwargs)
    given["reduction"] = "none"
    name = name_of(func)
    if func in _OF_ROWS:
        rows = target_of(found)[0]
        if any(of.dim or of.local_ids for _, of in found) or given[first].dim() < 2:
            return mode.on_all_rows(func, args, kwargs)
        for key, value in given.items():
            if not isinstance(value, Tensor):
                continue
            if key == "weight" or not value.dim() or placement_of(value) is None:
                given[key] = mode.enter(value, placement_of(value), name)
            else:
                given[key] = converted(mode, value, rows, value.dim(), name)
        each = mode.tagged(func(**given), rows.at(0))
    else:
        each = rowwise(mode, func, (given.pop(first),), given)
    if reduction == "none":
        return each
    if given.get("weight") is not None and "reduction" in given and func in _WEIGHTED:
        return mode.on_all_rows(func, args, kwargs)
    placement = placement_of(each)
    assert placement is not None and placement.rows is not None
    own = mode.own(each, placement)
    if reduction == "sum":
        return mode.tagged(mode.sum(own.sum(), name), FROM_ROWS)
    if func in (F.cross_entropy, F.nll_loss) and not given["target"].is_floating_point():
        return _weighted_mean(mode, own, given, name)
    of = placement_of(args[0] if args else kwargs[first])
    if reduction == "batchmean" and of is not None and of.rows is placement.rows and of.dim == placement.dim == 0:
        total, num = with_count(mode, own.sum(), placement.rows, name)
        return mode.tagged(total / num.to(total.dtype), FROM_ROWS)
    if reduction != "mean":
        return mode.on_all_rows(func, args, kwargs)
    return mode.tagged(mean(mode, each, placement, None, False, name), FROM_ROWS)


def _weighted_mean(mode: RowsMode, own: Tensor, given: dict[str, Any], name: str) -> Tensor:
    """The mean of F.cross_entropy: by class weights, without ignored labels."""
    target, weight = given["target"][: len(own)], given.get("weight")
    counted = target != given.get("ignore_index", -100)
    if weight is None:
        part = counted.sum().to(own.dtype)
    else:
        part = (weight.detach()[target.where(counted, torch.zeros_like(target))] * counted).sum().to(own.dtype)
    total, num = mode.sum(torch.stack([own.sum(), part]), name).unbind()
    return mode.tagged(total / num.detach(), FROM_ROWS)


register(_loss, f"{_POINTWISE} {_PER_ROW}", (F,))
_WEIGHTED = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
"""Whose mean with weights divides by these, in newer versions of torch."""
_OF_ROWS = {getattr(F, name) for name in _PER_ROW.split()}


def _similarity(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """F.cosine_similarity(x1, x2, dim=1) and F.pairwise_distance, which broadcast and reduce one dimension."""
    found = mode.row_tensors(args, kwargs)
    if not found:
        return mode.plain(func, args, kwargs)
    order = ("x1", "x2", "p", "eps", "keepdim") if func is F.pairwise_distance else ("x1", "x2", "dim", "eps")
    names = dict(zip(order, args)) | kwargs
    most = max(names["x1"].dim(), names["x2"].dim())
    dim = dim_of(int(names.get("dim", 1)) if func is F.cosine_similarity else -1, most)
    rows, right, _ = target_of(found)
    if right == most - dim or names.get("keepdim"):
        return mode.on_all_rows(func, args, kwargs)
    for key in ("x1", "x2"):
        names[key] = converted(mode, names[key], rows, right, name_of(func))
    at = most - right
    return mode.tagged(func(**names), rows.at(at - (dim < at)))


RULES[F.cosine_similarity] = RULES[torch.cosine_similarity] = RULES[F.pairwise_distance] = _similarity
