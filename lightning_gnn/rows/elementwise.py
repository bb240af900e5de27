"""Rules of functions that treat each row by itself: their rows are the rank's own, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn.rows.mode import RULES, OtherSizeError, RowsMode, Rule, has_counts, name_of, placement_of, tensors_in
from lightning_gnn.rows.placement import ATTRIBUTE, FROM_ROWS, REPLICATED, Placement, RowSet


def register(rule: Rule, names: str, owners: Sequence[Any] = (torch, Tensor, F, torch.special)) -> None:
    """Gives a rule to the functions of some names, wherever torch has them."""
    for name in names.split():
        found = [getattr(owner, name) for owner in owners if callable(getattr(owner, name, None))]
        if not found:
            continue
        for function in found:
            RULES[function] = rule


def properties(rule: Rule, names: str) -> None:
    """Gives a rule to the getters of properties of tensors."""
    for name in names.split():
        RULES[getattr(Tensor, name).__get__] = rule


def dim_of(dim: int, dims: int) -> int:
    """Returns a dimension of a tensor with `dims` dimensions, counted from the left.

    Raises:
        IndexError: there is no such dimension.
    """
    most = max(1, dims)
    if not -most <= dim < most:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})")
    return dim % most


def converted(mode: RowsMode, x: Tensor, rows: RowSet, right: int, name: str) -> Tensor:
    """Returns a tensor as it is combined with one that has `rows` along its dimension `right` from the right."""
    placement = placement_of(x)
    assert placement is not None
    if placement.rows is not None:
        if placement.rows is rows and x.dim() - placement.dim == right:
            return x
        x, placement = mode.gathered(x, placement, name), FROM_ROWS
    at = x.dim() - right
    if at < 0:
        return mode.enter(x, placement, name)
    if x.size(at) == 1:  # expanded for functions that do not broadcast, on ranks without the row
        return mode.enter(x, placement, name).expand(*x.shape[:at], rows.count, *x.shape[at + 1 :])
    if x.size(at) != rows.total:
        raise OtherSizeError(
            f"The size of a tensor ({x.size(at)}) must match the number of {rows.name} ({rows.total}) at dimension "
            f"{at}, in {name}"
        )
    return mode.take(x, at, rows, name)


def target_of(found: Sequence[tuple[Tensor, Placement]]) -> tuple[RowSet, int, Placement]:
    """Returns along which rows the result of tensors that broadcast is distributed, and the dimension from the right."""
    best_x, best = found[0]
    right = best_x.dim() - best.dim
    for x, placement in found[1:]:
        if x.dim() - placement.dim > right:
            best_x, best, right = x, placement, x.dim() - placement.dim
    assert best.rows is not None
    return best.rows, right, best


def rowwise(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions of the corresponding entries of tensors, which broadcast."""
    found = mode.row_tensors(args, kwargs)
    if not found:
        return mode.plain(func, args, kwargs)
    rows, right, _ = target_of(found)
    if any(of.local_ids for _, of in found) and not _compares_ends(func, found, args):
        return mode.on_all_rows(func, args, kwargs)
    name = name_of(func)

    def change(value: Any) -> Any:
        return converted(mode, value, rows, right, name) if isinstance(value, Tensor) else value

    args = tuple(change(each) for each in args)
    if kwargs:
        kwargs = {key: change(each) for key, each in kwargs.items()}
    return placed(func(*args, **kwargs), rows, right, mode)


def _compares_ends(func: Any, found: Sequence[tuple[Tensor, Placement]], args: Any) -> bool:
    """Returns whether the ends of edges are compared with each other: places are equal where nodes are."""
    same = all(of.local_ids and of.rows is found[0][1].rows for _, of in found) and len(found) == len(args)
    return same and name_of(func) in ("eq", "ne", "__eq__", "__ne__")


def placed(out: Any, rows: RowSet, right: int, mode: RowsMode) -> Any:
    """Sets the placement of results that have `rows` along the dimension `right` from the right."""
    if type(out) is Tensor:
        out.__dict__[ATTRIBUTE] = rows.at(out.dim() - right)
        return out
    for x in tensors_in((out,)):
        x.__dict__[ATTRIBUTE] = rows.at(x.dim() - right)
    return out


def rowwise_(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The same in place."""
    found = mode.row_tensors(args, kwargs)
    into = args[0]
    placement = placement_of(into)
    if not found:
        return mode.plain(func, args, kwargs)
    if placement is None or placement.rows is None or any(of.local_ids for _, of in found):
        return mode.on_all_rows(func, args, kwargs)
    rows, right = placement.rows, into.dim() - placement.dim
    name = name_of(func)

    def change(value: Any) -> Any:
        return converted(mode, value, rows, right, name) if isinstance(value, Tensor) else value

    out = func(into, *(change(each) for each in args[1:]), **{key: change(each) for key, each in kwargs.items()})
    return mode.tagged(out, rows.at(placement.dim))


def same(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions whose result has the placement of their first argument."""
    x = args[0]
    placement = placement_of(x) if isinstance(x, Tensor) else None
    if placement is None:
        return mode.plain(func, args, kwargs)
    out = func(*args, **kwargs)
    return out if out is x or not isinstance(out, Tensor) else mode.tagged(out, placement.with_view(None))


def like(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``zeros_like`` and its kind."""
    placement = placement_of(args[0])
    if placement is None:
        out = func(*args, **kwargs)
        return mode.untagged(out)
    if placement.rows is None:
        with mode.common_draws() if func in RANDOM else _nothing:
            return mode.tagged(func(*args, **kwargs), REPLICATED)
    if func in RANDOM and mode.draws_for_all(kwargs):
        return _drawn(mode, func, args, kwargs)
    return mode.tagged(func(*args, **kwargs), placement.rows.at(placement.dim))


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


_nothing = _Nothing()
RANDOM: set[Any] = set()
"""Functions that draw random numbers."""


def random(rule: Rule) -> Rule:
    """Draws of replicated results are the same on all ranks; those for rows are each rank's own, unless the mode wants those of
    one device."""

    def draw(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
        if not mode.row_tensors(args, kwargs):
            with mode.common_draws():
                return rule(mode, func, args, kwargs)
        return _drawn(mode, func, args, kwargs) if mode.draws_for_all(kwargs) else rule(mode, func, args, kwargs)

    return draw


def _drawn(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Draws for the rows of all ranks, on every rank; what has the shape of the first argument stays rows."""
    out = mode.on_all_rows(func, args, kwargs)
    x = args[0] if args else kwargs.get("input")
    of = placement_of(x) if isinstance(x, Tensor) else None
    if of is None or of.rows is None or not isinstance(out, Tensor) or out is x:
        return out
    shape = list(x.shape)
    shape[of.dim] = of.rows.total
    if list(out.shape) != shape:
        return out
    return mode.tagged(mode.take(out, of.dim, of.rows, name_of(func)), of.rows.at(of.dim))


def first_rows(own_dims: Callable[[Tensor, Any, Any], Iterable[int]] = lambda x, a, k: ()) -> Rule:
    """Functions of the first argument alone, row by row, with replicated weights, unless rows lie along one of its `own_dims`."""

    def rule(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
        found = mode.row_tensors(args, kwargs)
        if not found:
            return mode.plain(func, args, kwargs)
        x = args[0] if args else kwargs.get("input")
        placement = placement_of(x) if isinstance(x, Tensor) else None
        if placement is None or placement.rows is None or len(found) > 1 or placement.local_ids:
            return mode.on_all_rows(func, args, kwargs)
        if any(dim % max(1, x.dim()) == placement.dim for dim in own_dims(x, args, kwargs)):
            return mode.on_all_rows(func, args, kwargs)
        name = name_of(func)

        def change(value: Any) -> Any:
            return mode.enter(value, placement_of(value), name) if isinstance(value, Tensor) and value is not x else value

        out = func(*(change(each) for each in args), **{key: change(each) for key, each in kwargs.items()})
        return mode.tagged(out, placement.rows.at(placement.dim))

    return rule


def dim_argument(place: int, default: int | None) -> Callable[[Tensor, Any, Any], Iterable[int]]:
    """Returns what finds the argument ``dim`` of a function."""

    def find(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
        dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
        if dim is None:
            return range(x.dim())
        return dim if isinstance(dim, (tuple, list)) else (dim,)

    return find


def _normalized_dims(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    return range(x.dim() - (len(shape) if isinstance(shape, (tuple, list)) else 1), x.dim())


def _flip_dims(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
    given = kwargs.get("dims", args[1:])
    given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return (given,) if isinstance(given, int) else given


def _diff_dims(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
    others = (
        kwargs.get("prepend", args[3] if len(args) > 3 else None),
        kwargs.get("append", args[4] if len(args) > 4 else None),
    )
    return range(x.dim()) if any(each is not None for each in others) else dim_argument(2, -1)(x, args, kwargs)


# fmt: off
_OF_ENTRIES = """abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor ceil clamp clamp_max clamp_min clip conj copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv
exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot i0
isclose isfinite isinf isnan isneginf isposinf isreal ldexp le lerp less less_equal lgamma log log10 log1p log2
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply
nan_to_num ne neg negative nextafter not_equal polygamma positive pow rad2deg real reciprocal relu remainder round
rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh true_divide trunc where xlogy
expit log_ndtr ndtr entr erfcx ndtri relu6 elu selu celu gelu silu mish softplus softsign tanhshrink logsigmoid
hardtanh hardsigmoid hardswish hardshrink softshrink threshold leaky_relu __add__ __radd__ __mul__ __rmul__ __sub__
__rsub__ __truediv__ __rtruediv__ __rdiv__ __div__ __pow__ __rpow__ __floordiv__ __rfloordiv__ __mod__ __rmod__
__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__
__ge__ __lshift__ __rshift__ __rlshift__ __rrshift__ mvlgamma igamma igammac"""
_IN_PLACE = """abs_ absolute_ acos_ add_ addcdiv_ addcmul_ asin_ atan_ atan2_ bitwise_and_ bitwise_not_ bitwise_or_
bitwise_xor_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ copysign_ copy_ cos_ cosh_ deg2rad_ div_ divide_ eq_ erf_ erfc_
exp_ exp2_ expm1_ fill_ float_power_ floor_ floor_divide_ fmod_ frac_ ge_ gt_ le_ lerp_ log_ log10_ log1p_ log2_
logical_and_ logical_not_ logical_or_ logical_xor_ logit_ lt_ masked_fill_ mul_ multiply_ nan_to_num_ ne_ neg_
negative_ pow_ rad2deg_ reciprocal_ relu_ remainder_ round_ rsqrt_ sigmoid_ sign_ sin_ sinh_ sqrt_ square_ sub_
subtract_ tan_ tanh_ true_divide_ trunc_ xlogy_ zero_ leaky_relu_ elu_ selu_ celu_ hardtanh_ threshold_ rrelu_
__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__
__irshift__"""
_SAME = """detach clone contiguous cpu cuda to type float double half bfloat16 long int bool short char byte cfloat
cdouble chalf detach_ requires_grad_ pin_memory resolve_conj resolve_neg alias retain_grad type_as"""
_RANDOM = """rand randn randint randperm bernoulli multinomial normal rand_like randn_like randint_like poisson rrelu
dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d gumbel_softmax bernoulli_ uniform_ normal_
random_ exponential_ cauchy_ geometric_ log_normal_ binomial fractional_max_pool2d dropout_ alpha_dropout_
feature_dropout feature_dropout_ feature_alpha_dropout_"""
# fmt: on

register(rowwise, _OF_ENTRIES)
register(rowwise_, _IN_PLACE)
register(same, _SAME)
register(random(first_rows()), "bernoulli poisson rrelu dropout alpha_dropout")
register(random(first_rows(lambda x, a, k: range(1, x.dim()))), "feature_alpha_dropout dropout1d feature_dropout")
register(
    random(rowwise_),
    "bernoulli_ uniform_ normal_ random_ exponential_ cauchy_ geometric_ log_normal_ dropout_ alpha_dropout_",
)
register(random(first_rows(dim_argument(4, -1))), "gumbel_softmax")
register(
    first_rows(dim_argument(1, None)),
    "softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp",
    (torch, Tensor, F),
)
register(first_rows(_diff_dims), "diff", (torch, Tensor))
register(first_rows(dim_argument(1, -1)), "sort argsort glu", (torch, Tensor, F))
register(first_rows(_flip_dims), "flip", (torch, Tensor))
register(first_rows(lambda x, a, k: (1,)), "fliplr", (torch, Tensor))
register(first_rows(lambda x, a, k: (0,)), "msort", (torch, Tensor))
register(first_rows(dim_argument(2, -1)), "topk", (torch, Tensor))
register(first_rows(dim_argument(2, None)), "roll", (torch, Tensor))
register(first_rows(dim_argument(2, 1)), "normalize", (F,))
register(first_rows(_normalized_dims), "layer_norm rms_norm", (torch, F))
register(first_rows(lambda x, a, k: (-1,)), "linear", (F,))
register(first_rows(lambda x, a, k: (1,) if x.dim() > 1 else ()), "prelu", (torch, F, Tensor))
register(first_rows(), "one_hot_ i1 i1e i0e sinc_")
register(like, "zeros_like ones_like full_like empty_like rand_like randn_like randint_like", (torch,))
for _name in _RANDOM.split():
    RANDOM.update(getattr(owner, _name) for owner in (torch, Tensor, F) if hasattr(owner, _name))
properties(same, "data _grad real imag")


def _softmax_dim(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """F.softmax without ``dim`` chooses 1 for matrices, else 0 for vectors."""
    x = args[0] if args else kwargs["input"]
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if given is None and isinstance(x, Tensor) and not (len(args) > 1 and isinstance(args[1], int)):
        kwargs = {**kwargs, "dim": 0 if x.dim() in (0, 1, 3) else 1}
        args = args[:1]
    return _along(mode, func, args, kwargs)


_along = first_rows(dim_argument(1, None))
for _function in (F.softmax, F.log_softmax, F.softmin):
    RULES[_function] = _softmax_dim


def _where(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    return rowwise(mode, func, args, kwargs) if len(args) + len(kwargs) > 1 else mode.other(func, args, kwargs)


RULES[torch.where] = _where


def _embedding(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """F.embedding: rows of places in a table."""
    if kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None:
        return mode.on_all_rows(func, args, kwargs) if mode.row_tensors(args, kwargs) else mode.plain(func, args, kwargs)
    return first_alone(mode, func, args, kwargs)


first_alone = first_rows()
RULES[F.embedding] = _embedding


def _isin(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The first argument's entries, looked up in a table that all ranks have."""
    found = mode.row_tensors(args[1:], kwargs)
    return mode.on_all_rows(func, args, kwargs) if found or has_counts(args) else first_alone(mode, func, args, kwargs)


register(_isin, "isin bucketize", (torch,))
