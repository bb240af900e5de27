"""Rules of functions that treat each row separately: their rows are local, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn.rows.mode import RULES, OtherSizeError, RowsMode, Rule, has_counts, name_of, placement_of, rows_of, tensors_in
from lightning_gnn.rows.placement import FROM_ROWS, RowPlacement, RowSet, axis

_OWNERS = (torch, Tensor, F, torch.special, torch.linalg)


def register(rule: Rule, names: str, owners: Sequence[Any] = _OWNERS) -> None:
    """Register a rule for functions by name, for each owner in torch that has them."""
    for name in names.split():
        for owner in owners:
            function = getattr(owner, name, None)
            if callable(function):
                RULES[function] = rule


def properties(rule: Rule, names: str) -> None:
    """Register a rule for the getters of tensor properties."""
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


def align_rows(mode: RowsMode, x: Tensor, rows: RowSet, right: int, name: str) -> Tensor:
    """Returns a tensor in a form that combines with a tensor that has `rows` along dimension `right` from the right."""
    placement = placement_of(x)
    assert placement is not None
    if isinstance(placement, RowPlacement):
        if placement.rows is rows and x.dim() - placement.dim == right:
            return x
        x, placement = mode.gather_rows(x, placement, name), FROM_ROWS
    at = x.dim() - right
    if at < 0:
        return mode.enter(x, placement, name)
    if x.size(at) == 1:  # expanded for functions that do not broadcast and for ranks without the row
        return mode.enter(x, placement, name).expand(*x.shape[:at], rows.count, *x.shape[at + 1 :])
    if x.size(at) != rows.total:
        raise OtherSizeError(
            f"The size of a tensor ({x.size(at)}) must match the number of {rows.name} ({rows.total}) at dimension "
            f"{at}, in {name}"
        )
    return mode.take(x, at, rows, name)


def whole(mode: RowsMode, x: Tensor, name: str) -> Tensor:
    """Returns a tensor with the rows of all ranks, for use with another row set."""
    of = placement_of(x)
    if isinstance(of, RowPlacement):
        x, of = mode.gather_rows(x, of, name), FROM_ROWS
    return mode.enter(x, of, name)


def target_of(row_args: Sequence[tuple[Tensor, RowPlacement]]) -> tuple[RowSet, int]:
    """Returns the row set of the result of tensors that broadcast, and its dimension from the right."""
    rows, right = row_args[0][1].rows, 0
    for x, of in row_args:
        if x.dim() - of.dim > right:
            rows, right = of.rows, x.dim() - of.dim
    return rows, right


def on_all(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of functions that need the rows of all ranks, gathered, or their number."""
    has_rows = mode.row_tensors(args, kwargs) or has_counts(args, kwargs)
    return (mode.on_all_rows if has_rows else mode.plain)(func, args, kwargs)


RuleOfRows = Callable[[RowsMode, Any, Any, Any, Sequence[tuple[Tensor, RowPlacement]]], Any]


def pass_row_tensors(rule: RuleOfRows, without: Rule = RowsMode.plain) -> Rule:
    """Returns a rule that calls `rule`, with the row tensors as last argument, or `without` if no argument is a row tensor."""

    @wraps(rule)
    def call(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
        row_args = mode.row_tensors(args, kwargs)
        return rule(mode, func, args, kwargs, row_args) if row_args else without(mode, func, args, kwargs)

    return call


def rowwise(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of functions of corresponding entries of tensors, which broadcast."""
    row_args = mode.row_tensors(args, kwargs)
    if not row_args:  # as in pass_row_tensors, without another call
        return mode.plain(func, args, kwargs)
    if any(of.local_ids for _, of in row_args) and not _compares_ends(func, row_args, args):
        return mode.on_all_rows(func, args, kwargs)
    return _by_entries(mode, func, args, kwargs, *target_of(row_args))


def _by_entries(mode: RowsMode, func: Any, args: Any, kwargs: Any, rows: RowSet, right: int) -> Any:
    name = name_of(func)

    def change(value: Any) -> Any:
        return align_rows(mode, value, rows, right, name) if isinstance(value, Tensor) else value

    args = tuple(change(each) for each in args)
    if kwargs:
        kwargs = {key: change(each) for key, each in kwargs.items()}
    return place_rows(func(*args, **kwargs), rows, right)


def _compares_ends(func: Any, row_args: Sequence[tuple[Tensor, RowPlacement]], args: Any) -> bool:
    """Returns whether endpoints of edges are compared with each other: local ids are equal if the nodes are equal."""
    are_ends = all(of.local_ids and of.rows is row_args[0][1].rows for _, of in row_args) and len(row_args) == len(args)
    return are_ends and name_of(func) in ("eq", "ne", "__eq__", "__ne__")


def place_rows(out: Any, rows: RowSet, right: int) -> Any:
    """Set the placement of results that have `rows` along the dimension `right` from the right."""
    if type(out) is Tensor:
        out.__dict__[axis.attribute] = rows.at(out.dim() - right)
        return out
    for x in tensors_in((out,)):
        x.__dict__[axis.attribute] = rows.at(x.dim() - right)
    return out


@pass_row_tensors
def rowwise_(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    """Rule of in-place functions of corresponding entries."""
    into = rows_of(args[0])
    if into is None or any(of.local_ids for _, of in row_args):
        return mode.on_all_rows(func, args, kwargs)
    return _by_entries(mode, func, args, kwargs, into.rows, args[0].dim() - into.dim)


def rows_beside(x: Tensor, rows: RowSet, dim: int) -> bool:
    """Returns whether a tensor has `rows` along dimension `dim`."""
    of = rows_of(x)
    return of is not None and of.rows is rows and of.dim == dim


def keep_placement(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of functions whose result has the placement of their first argument."""
    x = args[0] if args else None
    if not isinstance(x, Tensor):
        return on_all(mode, func, args, kwargs)
    placement = placement_of(x)
    if placement is None:
        return mode.plain(func, args, kwargs)
    out = func(*args, **kwargs)
    return out if out is x or not isinstance(out, Tensor) else mode.place(out, placement.with_view(None))


def like(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of ``zeros_like`` and similar functions: the result has the row placement of the first tensor."""
    of = rows_of(first_tensor(args, kwargs))
    return mode.plain(func, args, kwargs) if of is None else mode.place(func(*args, **kwargs), of.rows.at(of.dim))


def random(rule: Rule) -> Rule:
    """Returns a rule for random draws.

    Replicated results are drawn equally on all ranks. Each rank draws its own rows. With exact draws of the mode, every rank
    draws the rows of all ranks as one device does. Results with the shape of the first argument remain row tensors.
    """

    def draw(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
        if not mode.row_tensors(args, kwargs) and not has_counts(args, kwargs):
            with mode.common_draws():
                return rule(mode, func, args, kwargs)
        if not mode.exact_draws and kwargs.get("generator") is None:  # a generator is equal on all ranks
            return rule(mode, func, args, kwargs)
        out, x = mode.on_all_rows(func, args, kwargs), first_tensor(args, kwargs)
        of = rows_of(x)
        if x is None or of is None or not isinstance(out, Tensor) or out is x:
            return out
        if out.shape != (*x.shape[: of.dim], of.rows.total, *x.shape[of.dim + 1 :]):
            return out
        return mode.place(mode.take(out, of.dim, of.rows, name_of(func)), of.rows.at(of.dim))

    return draw


def first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    """Returns the first tensor among the arguments."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    return next((each for each in kwargs.values() if isinstance(each, Tensor)), None)


class Call(NamedTuple):
    """Call of a function of row tensor `x`, which mixes or reduces the entries along `dims`."""

    func: Any
    args: Any
    kwargs: Any
    x: Tensor
    of: RowPlacement
    dims: tuple[int, ...]

    @property
    def name(self) -> str:
        return name_of(self.func)

    def again(self, x: Tensor) -> Any:
        """Returns the function's result for another tensor."""
        kwargs = {key: x if value is self.x else value for key, value in self.kwargs.items()}
        return self.func(*(x if value is self.x else value for value in self.args), **kwargs)


Dims = Callable[[Tensor, Any, Any], Iterable[int]]


def _run_on_all_rows(mode: RowsMode, call: Call) -> Any:
    return mode.on_all_rows(call.func, call.args, call.kwargs)


def along(
    own_dims: Dims = lambda x, a, k: (),
    rule_for_rows: Callable[[RowsMode, Call], Any] = _run_on_all_rows,
    without: Rule = RowsMode.plain,
) -> Rule:
    """Returns a rule for functions of one tensor, with replicated weights, that mix or reduce its entries.

    Args:
        own_dims: function that returns the dimensions that are mixed or reduced.
        rule_for_rows: rule if the rows are along one of these dimensions; otherwise each row is treated separately.
        without: rule for arguments without rows.
    """

    def rule(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
        x = first_tensor(args, kwargs)
        of = rows_of(x)
        if x is None or of is None or len(row_args) > 1 or of.local_ids:
            return mode.on_all_rows(func, args, kwargs)
        dims = [dim_of(dim, x.dim()) for dim in own_dims(x, args, kwargs)]
        if of.dim in dims:
            return rule_for_rows(mode, Call(func, args, kwargs, x, of, tuple(dims)))

        def change(value: Any) -> Any:
            if not isinstance(value, Tensor) or value is x:
                return value
            return mode.enter(value, placement_of(value), name_of(func))

        out = func(*map(change, args), **{key: change(each) for key, each in kwargs.items()})
        is_reduced = (out if isinstance(out, Tensor) else out[0]).dim() < x.dim()
        gone = sum([dim < of.dim for dim in {*dims}]) if is_reduced else 0
        return mode.place(out, of.rows.at(of.dim - gone))

    return pass_row_tensors(rule, without)


def dim_argument(place: int, default: int | None = None) -> Dims:
    """Returns a function that finds the argument ``dim`` of a call; None stands for all dimensions."""

    def find(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
        dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
        if dim is None or isinstance(dim, (bool, torch.dtype)) or dim in ((), []):
            return range(x.dim())
        return (dim,) if isinstance(dim, int) else dim

    return find


def _flipped_dims(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
    dims = kwargs.get("dims", args[1:])
    return dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims


def _normalized_dims(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    return range(x.dim() - (len(shape) if isinstance(shape, (tuple, list)) else 1), x.dim())


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
__ge__ __lshift__ __rshift__ __rlshift__ __rrshift__ mvlgamma igamma igammac i1 i1e i0e"""
_SAME = """detach clone contiguous cpu cuda to type float double half bfloat16 long int bool short char byte cfloat
cdouble chalf detach_ requires_grad_ pin_memory resolve_conj resolve_neg alias retain_grad type_as"""
# fmt: on

for _name in _OF_ENTRIES.split():
    register(rowwise, _name)
    register(rowwise_, f"__i{_name[2:]}" if _name.startswith("__") else f"{_name}_")
register(rowwise_, "copy_ fill_ zero_")
register(keep_placement, _SAME)
register(like, "zeros_like ones_like full_like empty_like")
register(random(like), "rand_like randn_like randint_like")
register(random(along()), "bernoulli poisson rrelu dropout alpha_dropout")
register(random(along(lambda x, a, k: range(1, x.dim()))), "feature_alpha_dropout dropout1d feature_dropout")
register(
    random(rowwise_),
    "bernoulli_ uniform_ normal_ random_ exponential_ cauchy_ geometric_ log_normal_ dropout_ alpha_dropout_ rrelu_",
)
register(random(along(dim_argument(4, -1))), "gumbel_softmax")
register(along(dim_argument(1)), "softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp")
register(along(dim_argument(1, -1)), "sort argsort glu")
register(along(dim_argument(2, -1)), "topk")
register(along(dim_argument(2)), "roll")
register(along(_flipped_dims), "flip")
register(along(dim_argument(2, 1)), "normalize")
register(along(_normalized_dims), "layer_norm rms_norm")
register(along(lambda x, a, k: (-1,)), "linear")
register(along(lambda x, a, k: (1,) if x.dim() > 1 else ()), "prelu")
properties(keep_placement, "data _grad real imag")


def _where(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    return (rowwise if len(args) + len(kwargs) > 1 else on_all)(mode, func, args, kwargs)


RULES[torch.where] = _where


def _embedding(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of F.embedding: lookups in a table, which `max_norm` would change."""
    changes = kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None
    return (on_all if changes else by_itself)(mode, func, args, kwargs)


by_itself = along()
RULES[F.embedding] = _embedding


def _isin(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of lookups of the first argument's entries in a table that all ranks have."""
    row_args = mode.row_tensors(args[1:], kwargs)
    return mode.on_all_rows(func, args, kwargs) if row_args or has_counts(args, {}) else by_itself(mode, func, args, kwargs)


register(_isin, "isin bucketize")
