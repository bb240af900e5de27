"""Rules of functions about shapes: sizes, views, joins, products, indices. Sizes are those of the whole graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward  # autograd.grad itself is a function that modes are asked about

from lightning_gnn.rows.elementwise import RANDOM, converted, dim_of, placed, properties, register, same, target_of
from lightning_gnn.rows.mode import (
    LOCAL_IDS,
    RULES,
    RowsMode,
    has_counts,
    mapped,
    name_of,
    place,
    placement_of,
    tensors_in,
    user_line,
)
from lightning_gnn.rows.placement import (
    FROM_ROWS,
    IN_ORDER,
    REPLICATED,
    Placement,
    RowCount,
    RowSet,
    View,
)

# Sizes ########################################################################


def _placement(x: Any) -> Placement | None:
    """Returns the placement of a row tensor; None of any other."""
    found = placement_of(x) if isinstance(x, Tensor) else None
    return found if found is not None and found.rows is not None else None


def _size(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    out, placement = func(*args, **kwargs), _placement(args[0])
    if placement is None:
        return out
    assert placement.rows is not None
    if isinstance(out, int):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return RowCount(placement.rows) if dim % args[0].dim() == placement.dim else out
    return torch.Size([RowCount(placement.rows) if dim == placement.dim else size for dim, size in enumerate(out)])


def _len(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    placement = _placement(args[0])
    return func(*args) if placement is None or placement.dim else placement.rows.total  # type: ignore[union-attr]


def _numel(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    placement, x = _placement(args[0]), args[0]
    if placement is None:
        return func(*args)
    assert placement.rows is not None
    others = prod(size for dim, size in enumerate(x.shape) if dim != placement.dim)
    return RowCount(placement.rows) if others == 1 else placement.rows.total * others


RULES[Tensor.size] = _size
properties(_size, "shape")
RULES[Tensor.__len__] = _len
for _name in ("numel", "nelement"):
    RULES[getattr(Tensor, _name)] = _numel
RULES[torch.numel] = _numel


def _untouched(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


_ABOUT = """dim ndimension stride is_contiguous is_floating_point is_complex is_signed is_same_size element_size
get_device data_ptr storage_offset is_set_to is_pinned is_inference untyped_storage storage has_names is_neg is_conj
is_shared is_coalesced const_data_ptr dim_order record_stream
__hash__ __repr__ __str__ __format__ __deepcopy__ __setstate__ retains_grad_ is_nonzero_ _is_view
is_tensor is_storage result_type can_cast promote_types get_default_dtype is_grad_enabled typename"""
register(_untouched, _ABOUT, (torch, Tensor))
properties(
    _untouched,
    "dtype device ndim requires_grad is_leaf grad_fn layout is_cuda is_cpu is_sparse is_quantized is_meta is_mps is_nested "
    "_version output_nr itemsize nbytes _base _backward_hooks retains_grad name _grad_fn _post_accumulate_grad_hooks "
    "is_sparse_csr is_mkldnn is_xla is_xpu is_vulkan is_ipu is_maia is_mtia",
)


_properties: Any = vars(Tensor) | vars(torch._C.TensorBase)
_data_, _grad_, _requires_grad_ = (_properties[name] for name in ("data", "grad", "requires_grad"))


def _pickled(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What is saved in a run has no placement, nor row sets that it has selected."""
    x = args[0]
    kept = {name: x.__dict__.pop(name) for name in [*x.__dict__] if name.startswith("_lightning_gnn")}
    try:
        return func(*args, **kwargs)
    finally:
        x.__dict__.update(kept)


RULES[Tensor.__reduce_ex__] = _pickled


def _kept_gradient(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``x.grad``: that of a replicated tensor is 1 / P of the true one on each rank; the parameters' are summed already."""
    x, of = args[0], placement_of(args[0])
    out = func(x)
    if out is None or of is None or of.rows is not None or isinstance(x, torch.nn.Parameter) or mode.ranks.size == 1:
        return same(mode, func, args, kwargs)
    if x.is_leaf:
        raise mode.refuse("x.grad of a tensor that all ranks share is this rank's part. Take torch.autograd.grad(loss, x)")
    return mode.tagged(mode.sum(out.detach(), "grad"), FROM_ROWS)


def _set(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``x.data = value`` and ``x.grad = value``."""
    x, value = args
    of, placement = placement_of(value) if isinstance(value, Tensor) else None, _placement(x)
    if func == _grad_.__set__ and placement is not None and of is not None:
        value = converted(mode, value, placement.rows, x.dim() - placement.dim, "grad")  # type: ignore[arg-type]
    elif of is not None and of.rows is not None and isinstance(x, torch.nn.Parameter):
        raise mode.refuse("rows are assigned to a parameter, which is whole on every rank")
    func(x, value)
    if func == _data_.__set__ and not isinstance(x, torch.nn.Parameter):
        mode.untagged(x) if of is None else mode.tagged(x, of.with_view(None))


RULES[_data_.__set__] = RULES[_grad_.__set__] = _set
RULES[_grad_.__get__] = _kept_gradient
RULES[_requires_grad_.__set__] = RULES[_grad_.__delete__] = _untouched

# Views ########################################################################

_MANY = 1_000_003
"""Rows of a selection of unknown size: a prime, which no other sizes multiply to."""
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "atleast_2d"}
_EXPANDS = {"expand", "broadcast_to"}


def _int(value: Any) -> Any:
    return int(value) if isinstance(value, RowCount) else value


def _frozen(value: Any) -> Any:
    """Returns arguments as a key, which is kept: a `RowCount` would keep the ranks of a run alive."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return _int(value)


@lru_cache(4096)
def _seen(func: Any, shape: Any, dim: int, args: Any, kwargs: Any) -> list[tuple[Any, int | None, Any]]:
    """Returns of each result of a function that returns views: its shape, the dimension of the rows, None if they lie along
    none, and its first row; nothing where it fails or copies. It is given a tensor without memory, of which only the rows have a
    stride."""
    x = torch.empty_strided(shape, [int(each == dim) for each in range(len(shape))], device="meta")
    try:
        results = func(x, *args, **dict(kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return []  # torch's own error is raised where the function runs on all rows
    found = []
    for out in (results,) if isinstance(results, Tensor) else results:
        if out.untyped_storage()._cdata != x.untyped_storage()._cdata:
            return []
        along = [at for at, size in enumerate(out.shape) if size != 1 and out.stride(at)]
        found.append((tuple(out.shape), along[0] if len(along) == 1 else None, out.storage_offset()))
    return found


def _view(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that return views of their first argument."""
    x, placement, name = args[0], _placement(args[0]), name_of(func)
    if placement is None:
        return mode.plain(func, mapped(args, _int), mapped(kwargs, _int))
    if name == "view" and len(args) == 2 and isinstance(args[1], torch.dtype):
        return same(mode, func, args, kwargs)
    func = Tensor.reshape if name == "view" else func  # gathered rows may lie otherwise in memory
    if any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values())):
        return mode.on_all_rows(func, args, kwargs)
    rows, dim, key = placement.rows, placement.dim, (_frozen(args[1:]), _frozen(tuple(kwargs.items())))
    assert rows is not None
    # Where no sizes are given, only squeezing the rows depends on how many there are.
    squeezed = [each % x.dim() for each in _flat((*args[1:], *kwargs.values()))] if name == "squeeze" else []
    needs_total = name == "squeeze" and dim in (squeezed or range(x.dim()))
    found: Any = []
    for total in (_MANY, None):
        if total is None or not needs_total:
            total = total or rows.total
            whole = (*x.shape[:dim], total, *x.shape[dim + 1 :])
            found = _seen(func, whole, dim, *key)
            if found and all(at is not None and size[at] == total for size, at, _ in found):
                break
    else:
        return _part_or_entries(mode, func, args, kwargs, whole, found)
    if name in _RESHAPES | _EXPANDS:
        [(shape, at, _)] = found
        local = [*shape[:at], x.size(dim), *shape[at + 1 :]]
        results: Any = (x.expand(local) if name in _EXPANDS else x.reshape(local),)
    elif name in _PARTS | {"narrow"} and found[0][0] == whole:
        results = (x.view_as(x),)
    else:
        results = func(*mapped(args, _int), **kwargs)
        results = (results,) if isinstance(results, Tensor) else results
    for number, (out, (_, at, _)) in enumerate(zip(results, found)):
        new = _kept(rows.at(at), placement)
        if name in ("unbind", "select") and placement.local_ids == "both":
            end = number if name == "unbind" else kwargs.get("index", args[-1])
            new = Placement(rows, 0, local_ids=("source", "target")[end])
        mode.tagged(out, new)
    return tuple(results) if name in _PARTS else results[0]


def _part_or_entries(mode: RowsMode, func: Any, args: Any, kwargs: Any, whole: Any, seen: Any) -> Any:
    """Views that do not keep all rows: parts along the rows, and reshaped rows. `whole` is the size of all rows, and results are
    `seen` from there."""
    x, placement, name = args[0], _placement(args[0]), name_of(func)
    assert placement is not None and placement.rows is not None
    dim, every = placement.dim, (slice(None),) * placement.dim
    beside = (*whole[:dim], *whole[dim + 1 :])
    if name == "unbind" and seen:
        raise mode.refuse(_LEAVES.format("a loop over rows"))
    if name == "select" and seen and seen[0][0] == beside:
        return _index(mode, x, (*every, seen[0][2]))
    if name in _PARTS | {"narrow"} and seen and all((*size[:dim], *size[dim + 1 :]) == beside for size, _, _ in seen):
        parts = tuple(_index(mode, x, (*every, slice(first, first + size[dim]))) for size, _, first in seen)
        return parts if name in _PARTS else parts[0]
    if name in _RESHAPES and whole[dim] > 1 and prod(whole):
        shape = func(torch.empty(whole, device="meta"), *mapped(args[1:], _int), **mapped(kwargs, _int)).shape
        found = _entries_of(placement.rows, prod(whole[:dim]), prod(whole[dim + 1 :]), shape)
        if found is not None:
            entries, at = found
            return mode.tagged(x.reshape(*shape[:at], entries.count, *shape[at + 1 :]), entries.at(at))
    return mode.on_all_rows(func, args, kwargs)


def _entries_of(rows: RowSet, before: int, behind: int, shape: Sequence[int]) -> tuple[RowSet, int] | None:
    """Returns what rows the entries of rows become in a new shape, or the rows that entries were, and along which dimension."""
    at = next((place for place, size in enumerate(shape) if size != 1), None)
    if before != 1 or at is None:
        return None
    last = prod(shape[at + 1 :])
    if last and behind % last == 0 and behind != last:
        return rows.repeated(behind // last), at
    times: Any = rows._derived.get("times")
    if times is not None and behind * times == last:
        return rows._derived["parent"], at
    return None


def _kept(new: Placement, before: Placement) -> Placement:
    """Returns a placement whose values are of the same kind as before."""
    if not before.local_ids and not (before.in_order and new.rows is before.rows):
        return new
    local_ids = "mixed" if before.local_ids == "both" and new.dim != before.dim else before.local_ids
    return Placement(new.rows, new.dim, local_ids=local_ids, in_order=before.in_order)


def _view_as(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    shape = _size(mode, Tensor.size, (args[1],), {})
    if func is Tensor.expand_as:
        return _expand(mode, Tensor.expand, (args[0], shape), {})
    return _view(mode, Tensor.reshape, (args[0], shape), {})


def _expand(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A replicated tensor that is expanded to a number of rows has rows."""
    x, shape = args[0], kwargs.get("size", args[1:])
    shape = shape[0] if shape and isinstance(shape[0], (tuple, list)) else shape
    at = next((place for place, size in enumerate(shape) if isinstance(size, RowCount)), None)
    if at is None or _placement(x) is not None:
        return _view(mode, func, args, kwargs)
    rows = shape[at].rows
    x = converted(mode, x, rows, len(shape) - at, "expand")
    return mode.tagged(x.expand([*map(int, shape[:at]), rows.count, *map(int, shape[at + 1 :])]), rows.at(at))


def _repeat(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, placement = args[0], _placement(args[0])
    times = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    at = 0 if placement is None else placement.dim + len(times) - x.dim()
    if placement is None or kwargs or len(times) < x.dim() or times[at] != 1 or has_counts(times):
        return mode.other(func, args, kwargs)
    return mode.tagged(func(*args), _kept(placement.rows.at(at), placement))  # type: ignore[union-attr]


def _view_(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The same in place."""
    x, placement, name = args[0], _placement(args[0]), name_of(func)
    if placement is None:
        return mode.plain(func, args, kwargs)
    if placement.view is None and name not in ("resize_", "resize_as_", "set_", "as_strided_"):
        of = placement_of(_view(mode, getattr(Tensor, name[:-1]), (mode.tagged(x.detach(), placement), *args[1:]), kwargs))
        if of is not None and of.rows is placement.rows:
            if name == "squeeze_":
                given = _frozen(args[1:]) or range(x.dim())
                args, kwargs = (
                    (x, tuple(dim for dim in given if x.size(dim) == 1 and dim % x.dim() != placement.dim)),
                    {},
                )
            return mode.tagged(func(*args, **kwargs), of)
    raise mode.refuse(f"{name} changes where rows lie in place. Use the function without an underscore.")


_PARTS = {"split", "chunk", "unbind", "tensor_split", "split_with_sizes"}
register(_view, "view reshape flatten ravel unflatten squeeze unsqueeze atleast_2d narrow select", (torch, Tensor))
register(_view, "t transpose permute movedim moveaxis swapaxes swapdims adjoint", (torch, Tensor))
register(_view, "split chunk unbind tensor_split split_with_sizes", (torch, Tensor))
properties(_view, "T mT H mH")
register(_view_as, "view_as reshape_as expand_as", (Tensor,))
register(_expand, "expand broadcast_to", (torch, Tensor))
register(_repeat, "repeat tile", (Tensor,))
register(_view_, "t_ transpose_ unsqueeze_ squeeze_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_", (Tensor,))

# Joins ########################################################################


def _cat(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    found = mode.row_tensors(args, kwargs)
    if not found:
        return mode.plain(func, args, kwargs)
    given = list(kwargs.get("tensors", args[0] if args else ()))
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    rows, right, _ = target_of(found)
    most = max(each.dim() for each in given)
    if any(of.local_ids for _, of in found):
        return mode.on_all_rows(func, args, kwargs)
    if dim % most != most - right:
        given = [converted(mode, each, rows, right, "cat") for each in given]
        return placed(torch.cat(given, dim), rows, right, mode)
    placements = [_placement(each) for each in given]
    if any(each is None or most - given[place].dim() or each.dim != most - right for place, each in enumerate(placements)):
        return mode.on_all_rows(func, args, kwargs)
    first, *others = [each.rows for each in placements if each is not None]
    assert first is not None
    joined = first.joined([each for each in others if each is not None]) if others else first
    if joined is None:
        return mode.on_all_rows(func, args, kwargs)
    return mode.tagged(torch.cat(given, dim), joined.at(most - right))


def _stack(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    found = mode.row_tensors(args, kwargs)
    if not found:
        return mode.other(func, args, kwargs)
    given = kwargs.get("tensors", args[0] if args else ())
    dim = dim_of(kwargs.get("dim", args[1] if len(args) > 1 else 0), found[0][0].dim() + 1)
    return _cat(mode, torch.cat, ([_view(mode, torch.unsqueeze, (each, dim), {}) for each in given], dim), {})


register(_cat, "cat concat concatenate", (torch,))
register(_stack, "stack", (torch,))

# Products #####################################################################


def _matmul(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    found = mode.row_tensors(args, kwargs)
    if not found:
        return mode.plain(func, args, kwargs)
    if len(args) != 2 or kwargs or any(of.local_ids for _, of in found):
        return mode.on_all_rows(func, args, kwargs)
    x, y = args if "r" not in name_of(func)[:3] else (args[1], args[0])
    of_x, of_y = _placement(x), _placement(y)
    if (x.dim() > 2 and y.dim() != 2) or y.dim() > 2 or not x.dim() or not y.dim():
        return mode.on_all_rows(func, args, kwargs)
    name, last, inner = name_of(func), x.dim() - 1, max(0, y.dim() - 2)
    contracts_x, contracts_y = of_x is not None and of_x.dim == last, of_y is not None and of_y.dim == inner
    if contracts_x or contracts_y:
        rows = (of_x if contracts_x else of_y).rows  # type: ignore[union-attr]
        if (of_x is not None and not contracts_x) or (of_y is not None and not contracts_y):
            return mode.on_all_rows(func, args, kwargs)
        assert rows is not None
        x = converted(mode, x, rows, 1, name)
        y = converted(mode, y, rows, y.dim() - inner, name)
        part = x.narrow(last, 0, rows.owned) @ y.narrow(inner, 0, rows.owned)
        return mode.tagged(mode.sum(part, name), FROM_ROWS)
    if of_x is not None:
        y = mode.gathered(y, of_y, name) if of_y is not None else y
        y = mode.enter(y, FROM_ROWS if of_y is not None else placement_of(y), name)
        return mode.tagged(x @ y, of_x.rows.at(of_x.dim))  # type: ignore[union-attr]
    assert of_y is not None and of_y.rows is not None
    out = mode.enter(x, placement_of(x), name) @ y
    return mode.tagged(out, of_y.rows.at(out.dim() - 1))


def _einsum(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    found = mode.row_tensors(args, kwargs)
    if not found:
        return mode.plain(func, args, kwargs)
    equation = args[0].replace(" ", "") if isinstance(args[0], str) else "..."
    given = list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    if "..." in equation or "->" not in equation or any(of.local_ids for _, of in found):
        return mode.on_all_rows(func, args, kwargs)
    inputs, output = equation.split("->")
    letters = inputs.split(",")
    rows = found[0][1].rows
    place = next(number for number, each in enumerate(given) if each is found[0][0])
    letter = letters[place][found[0][1].dim]
    operands = []
    for names, x in zip(letters, given):
        if names.count(letter) > 1:
            return mode.on_all_rows(func, args, kwargs)
        if letter in names:
            operands.append(converted(mode, x, rows, len(names) - names.index(letter), "einsum"))  # type: ignore[arg-type]
        else:
            placement = _placement(x)
            if placement is not None:
                x = mode.gathered(x, placement, "einsum")
            operands.append(mode.enter(x, FROM_ROWS if placement is not None else placement_of(x), "einsum"))
    assert rows is not None
    if letter in output:
        return mode.tagged(func(equation, *operands), rows.at(output.index(letter)))
    own = [x.narrow(names.index(letter), 0, rows.owned) if letter in names else x for names, x in zip(letters, operands)]
    return mode.tagged(mode.sum(func(equation, *own), "einsum"), FROM_ROWS)


register(_matmul, "matmul mm mv dot vdot __matmul__ __rmatmul__", (torch, Tensor))
RULES[torch.einsum] = _einsum


# Creation #####################################################################


def _create(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``zeros`` and its kind, and ``x.new_zeros``: of a size that is a number of rows, they have these rows."""
    if "full" in name_of(func):  # a value is no size
        place = int(isinstance(args[0] if args else None, Tensor)) + 1
        args = (*args[:place], *map(_int, args[place:]))
        kwargs = {key: _int(value) if key == "fill_value" else value for key, value in kwargs.items()}
    counts = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, RowCount)]
    known = all(placement_of(x) is not None for x in tensors_in(args) if not isinstance(args[0], Tensor) or x is not args[0])
    if not counts or (func in RANDOM and mode.draws_for_all(kwargs)):
        with mode.common_draws() if func in RANDOM else _nothing:
            out = func(*mapped(args, _int), **mapped(kwargs, _int))
        return mode.tagged(out, REPLICATED) if known else mode.untagged(out)
    rows, seen = counts[0].rows, [False]

    def local(value: Any) -> Any:
        if isinstance(value, RowCount):
            first, seen[0] = not seen[0], True
            return rows.count if first else int(value)
        return value

    out = func(*mapped(args, local), **mapped(kwargs, local))
    sizes = [each for each in _flat(args) if isinstance(each, int)] or [each for each in _flat(tuple(kwargs.values()))]
    at = next(place for place, each in enumerate(sizes) if isinstance(each, RowCount))
    return mode.tagged(out, rows.at(at))


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return found


def _range(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*mapped(args, _int), **mapped(kwargs, _int))
    from_0 = (len(args) == 1 and not {"start", "step"} & kwargs.keys()) or (
        len(args) == 2 and args[0] == 0 and "step" not in kwargs
    )
    return mode.tagged(out, IN_ORDER if from_0 and func is torch.arange else REPLICATED)


def _from_values(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.tensor`` and its kind: numbers are the same on all ranks."""
    values = args[1:] if func is Tensor.new_tensor else args
    given = list(tensors_in((values, kwargs.get("data"))))
    if any(_placement(x) is not None for x in given):
        if isinstance(values[0] if values else None, Tensor) and func is not Tensor.new_tensor:
            return same(mode, func, args, kwargs)
        raise mode.refuse(_LEAVES.format(f"torch.{name_of(func)} of rows"))
    known = all(placement_of(x) is not None for x in given)
    out = func(*mapped(args, _int), **kwargs)
    return mode.tagged(out, FROM_ROWS if given else REPLICATED) if known else mode.untagged(out)


def _identity(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    with mode.common_draws() if func in RANDOM else _nothing:
        return mode.tagged(func(*mapped(args, _int), **mapped(kwargs, _int)), REPLICATED)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


_nothing = _Nothing()
register(_create, "zeros ones empty full rand randn new_zeros new_ones new_empty new_full", (torch, Tensor))


def _draw_integers(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``randint(high, size)``: only the size may be one of rows."""
    size = kwargs.get("size", args[-1] if isinstance(args[-1], (tuple, list, torch.Size)) else ())
    if not has_counts(tuple(size)) or mode.draws_for_all(kwargs):
        return _identity(mode, func, args, kwargs)
    bounds = [_int(each) for each in args if not isinstance(each, (tuple, list))]
    rows = next(each for each in size if isinstance(each, RowCount)).rows
    at = next(place for place, each in enumerate(size) if isinstance(each, RowCount))
    local = [rows.count if place == at else int(each) for place, each in enumerate(size)]
    return mode.tagged(func(*bounds, size=local, **{k: _int(v) for k, v in kwargs.items() if k != "size"}), rows.at(at))


RULES[torch.randint] = _draw_integers


def _init(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.nn.init.uniform_`` and its kind, which name their tensor."""
    args = (kwargs["tensor"], *args) if "tensor" in kwargs else args
    return mode.other(func, args, {key: value for key, value in kwargs.items() if key != "tensor"})


for _name in ("uniform_", "normal_", "constant_", "kaiming_uniform_"):
    RULES[getattr(torch.nn.init, _name)] = _init
register(_range, "arange", (torch,))
register(_identity, "linspace logspace eye randperm tril_indices triu_indices hann_window", (torch,))
register(_from_values, "tensor as_tensor asarray from_numpy scalar_tensor", (torch,))
register(_from_values, "new_tensor", (Tensor,))

# Rows that leave torch ########################################################

_LEAVES = (
    "{0} would see this rank's rows only. Take lightning_gnn.gather_global(x), which has the rows of all ranks in the "
    "order of the graph, on every rank"
)


def _leave(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    if _placement(args[0]) is not None:
        if not mode.lets_rows_leave:
            raise mode.refuse(_LEAVES.format(f"x.{name_of(func)}()"))
        mode.left[id(out)] = out, args[0]
    return out


def _number(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    placement = _placement(args[0])
    if placement is None:
        return func(*args, **kwargs)
    return func(mode.gathered(args[0], placement, name_of(func)), *args[1:], **kwargs)


register(_leave, "numpy tolist __array__ __dlpack__ __reversed__", (Tensor,))


def _contains(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    placement = _placement(args[0])
    return func(*args) if placement is None else func(mode.gathered(args[0], placement, "in"), args[1])


RULES[Tensor.__contains__] = _contains


def _iterate(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    placement = _placement(args[0])
    return func(*args) if placement is None else iter(_view(mode, Tensor.unbind, args, {}))


RULES[Tensor.__iter__] = _iterate
register(_number, "item __bool__ __int__ __float__ __index__ __complex__ __long__ is_nonzero equal allclose_", (Tensor,))


def _equal(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.equal`` and ``torch.allclose``, which return a bool."""
    found = mode.row_tensors(args, kwargs)
    if not found:
        return func(*args, **kwargs)
    return func(*(mode.gathered(x, p, name_of(func)) if (p := _placement(x)) else x for x in args), **kwargs)


register(_equal, "equal allclose", (torch, Tensor))


def gather_global(x: Tensor) -> Tensor:
    """Returns the rows of all ranks in the order of the graph, on every rank; `x` itself on one device and for replicated
    tensors.

    Differentiable. All ranks call it.

    Args:
        x: rows of nodes, edges or of a selection of these, ``[n, ...]``.
    """
    from lightning_gnn.rows.mode import active_mode

    mode, placement = active_mode(), _placement(x)
    if mode is None or placement is None:
        return x
    with mode.pause():
        return mode.tagged(mode.gathered(x, placement, "gather_global"), FROM_ROWS)


# Indices ######################################################################


def _index(mode: RowsMode, x: Tensor, index: Any) -> Any:
    return _getitem(mode, Tensor.__getitem__, (x, index), {})


def _items(x: Tensor, index: Any) -> list[Any] | None:
    """Returns one item for each dimension, and None for each new one; None where it is too involved."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [
        place(torch.tensor(each), REPLICATED)
        if isinstance(each, (list, range)) and not any(isinstance(e, Tensor) for e in each)
        else each
        for each in items
    ]
    if any(isinstance(each, (list, bool)) for each in items):
        return None
    items = [
        torch.as_tensor(each) if type(each).__module__ == "numpy" and bool(getattr(each, "ndim", 0)) else each for each in items
    ]
    taken = sum(
        each.dim() if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) else 1
        for each in items
        if each is not None and each is not Ellipsis
    )
    fill = [slice(None)] * (x.dim() - taken)
    where = next((place for place, each in enumerate(items) if each is Ellipsis), None)
    return [*items, *fill] if where is None else [*items[:where], *fill, *items[where + 1 :]]


def _is_all(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _getitem(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, index = args
    found = mode.row_tensors((x, index), None)
    placement = placement_of(x)
    if not found:
        index = mapped(index, _int)
        if placement is None or any(placement_of(each) is None for each in tensors_in((index,))):
            return func(x, index)
        return mode.tagged(func(x, index), FROM_ROWS if placement.from_rows else REPLICATED)
    items = _items(x, index)
    if items is None:
        return mode.on_all_rows(func, args, kwargs)
    if placement is None or placement.rows is None:
        return _from_table(mode, func, x, items, args)
    return _of_rows(mode, func, x, placement, items, args)


def _from_table(mode: RowsMode, func: Any, x: Tensor, items: list[Any], args: Any) -> Any:
    """Entries of a replicated tensor at places that rows name."""
    at = [place for place, each in enumerate(items) if isinstance(each, Tensor)]
    found = [(items[place], of) for place in at if (of := _placement(items[place])) is not None]
    edges = next((of.rows for _, of in found if of.local_ids), None)
    if edges is not None:
        nodes = edges.targets
        if nodes is None or x.size(0) != nodes.total or at[0] != 0:
            raise mode.refuse(LOCAL_IDS)
        own = mode.tagged(mode.take(x, 0, nodes, "indexing"), nodes.at(0))
        return _getitem(mode, func, (own, tuple(items)), {})
    first = items[at[0]]
    if first.dtype == torch.bool:
        if len(at) > 1 or first.dim() > 1 or any(each is None for each in items[: at[0]]):
            return mode.on_all_rows(func, args, {})
        rows = found[0][1].rows
        own = mode.take(x, at[0], rows, "indexing")  # type: ignore[arg-type]
        return _getitem(mode, func, (mode.tagged(own, rows.at(at[0])), tuple(items)), {})  # type: ignore[union-attr]
    rows, right, _ = target_of(found)
    if at != list(range(at[0], at[0] + len(at))) or any(items[place].dtype == torch.bool for place in at):
        return mode.on_all_rows(func, args, {})
    items = [converted(mode, each, rows, right, "indexing") if isinstance(each, Tensor) else each for each in items]
    most = max(items[place].dim() for place in at)
    begin = sum(1 for each in items[: at[0]] if each is None or isinstance(each, slice))
    out = mode.enter(x, placement_of(x), "indexing")[tuple(mapped(items, _int))]
    return mode.tagged(out, rows.at(begin + most - right))


def _of_rows(mode: RowsMode, func: Any, x: Tensor, placement: Placement, items: list[Any], args: Any) -> Any:
    """Entries of a row tensor."""
    rows, dim = placement.rows, placement.dim
    assert rows is not None
    # The item of the dimension of the rows.
    widths = [0 if x is None else x.dim() if isinstance(x, Tensor) and x.dtype == torch.bool else 1 for x in items]
    place = next(number for number, width in enumerate(widths) if sum(widths[:number]) <= dim < sum(widths[: number + 1]))
    item = items[place]
    tensors = [number for number, each in enumerate(items) if isinstance(each, Tensor)]
    others = [number for number in tensors if number != place]
    if _is_all(item):
        return _at_other_dims(mode, func, x, placement, items, place, args)
    if others:
        return _at_both(mode, func, x, placement, items, place, others, args)
    every: list[Any] = [slice(None)] * x.dim()
    if isinstance(item, Tensor) and item.dim() == 0 and item.dtype != torch.bool and _placement(item) is None:
        item = int(item)
    if isinstance(item, int):
        chosen, local = rows.choose(_one(item, rows))
        part = x.index_select(dim, local).sum(dim, dtype=x.dtype)
        out = mode.tagged(mode.sum(part, "row"), FROM_ROWS)
        beside = tuple(each for number, each in enumerate(items) if number != place)
        out = out if all(map(_is_all, beside)) else _getitem(mode, func, (out, beside), {})
        return out if tensors else mode.tagged(out, FROM_ROWS.with_view(View(x, args[1])))
    if isinstance(item, slice):
        item = mapped(item, lambda each: each if each is None else int(each))
        key = ("slice", item.start, item.stop, item.step)
        index: Any = rows._derived.get(key)
        if index is None:
            index = rows._derived[key] = torch.arange(rows.total, device=x.device)[item]  # type: ignore[assignment]
        item = index
    is_view = not tensors and isinstance(items[place], slice)
    of = _placement(item)
    rest: tuple[Any, ...] = tuple(slice(None) if number == place else each for number, each in enumerate(items))
    if item.dtype == torch.bool:
        if item.dim() > 1:
            if not all(map(_is_all, rest)):
                return mode.on_all_rows(func, args, {})
            return _entries(mode, x, placement, item, place, args)
        if of is None:
            if len(item) != rows.total:
                return mode.on_all_rows(func, args, {})  # which raises
            item = mode.take(item, 0, rows, "mask")
        elif of.rows is not rows:
            if of.rows.total != rows.total:  # type: ignore[union-attr]
                return mode.on_all_rows(func, args, {})  # which raises
            item = converted(mode, item, rows, 1, "mask")
        chosen = rows.select(item)
        out = x.index_select(dim, chosen.places)
    elif of is None:
        if item.dim() != 1:
            return mode.on_all_rows(func, args, {})
        chosen, local = rows.choose(item)
        out = x.index_select(dim, local)
    elif of.local_ids:
        edges = of.rows
        assert edges is not None
        expanded = rows is mode.halo_rows
        if of.local_ids not in ("source", "target") or dim or mode.expand is None or not (expanded or edges.targets is rows):
            raise mode.refuse(LOCAL_IDS)
        with mode.pause():
            out = (mode.expand(x) if of.local_ids == "source" and not expanded else x)[item]
        chosen = edges
    elif of.in_order and of.rows is rows:
        out, chosen = x, rows
    else:
        whole = mode.enter(mode.gathered(x, placement, "indexing"), FROM_ROWS, "indexing")
        every[dim] = item
        out, chosen = whole[tuple(every)], of.rows  # type: ignore[assignment]
        if item.dim() > 1:
            if not all(map(_is_all, rest)):
                return mode.on_all_rows(func, args, {})
            return mode.tagged(out, chosen.at(dim + of.dim))
    out = mode.tagged(out, _kept(chosen.at(dim), Placement(rows, dim, local_ids=placement.local_ids)))
    if not all(map(_is_all, rest)):
        out = _getitem(mode, func, (out, rest), {})
        if not is_view:  # tensors in an index make a copy of it all
            out = mode.tagged(out.contiguous(), placement_of(out) or FROM_ROWS)
    of = placement_of(out)
    return mode.tagged(out, of.with_view(View(x, args[1]))) if is_view and of is not None else out


def _one(position: int, rows: RowSet) -> Tensor:
    """Returns the position as a tensor, the same one each time, so that it chooses the same rows."""
    kept = rows._derived.setdefault(("one", position), torch.tensor([position]))  # type: ignore[arg-type]
    found: Any = kept
    return found


def _at_other_dims(mode: RowsMode, func: Any, x: Tensor, placement: Placement, items: list[Any], place: int, args: Any) -> Any:
    """All rows, and some entries of each."""
    rows = placement.rows
    assert rows is not None
    tensors = [number for number, each in enumerate(items) if isinstance(each, Tensor)]
    if any(_placement(items[number]) is not None for number in tensors) or len(tensors) > 1:
        return mode.on_all_rows(func, args, {})
    before = 0
    for each in items[:place]:
        before += 1 if each is None or isinstance(each, slice) else each.dim() if isinstance(each, Tensor) else 0
        if isinstance(each, Tensor) and each.dtype == torch.bool:
            before += 1 - each.dim()
    out = x[tuple(mapped(items, _int))]
    new = rows.at(before)
    if placement.local_ids and tensors:
        raise mode.refuse(LOCAL_IDS)
    if placement.local_ids == "both" and placement.dim == 1 and isinstance(items[0], int) and items[0] in (0, 1, -1, -2):
        return mode.tagged(out, Placement(rows, 0, local_ids=("source", "target")[items[0]]))
    return mode.tagged(out, _kept(new, placement))


def _at_both(
    mode: RowsMode,
    func: Any,
    x: Tensor,
    placement: Placement,
    items: list[Any],
    place: int,
    others: list[int],
    args: Any,
) -> Any:
    """``x[arange(n), y]``: an entry of each row."""
    rows, item = placement.rows, items[place]
    assert rows is not None
    of = placement_of(item) if isinstance(item, Tensor) else None
    in_order = of is not None and of.in_order and (of.rows is rows or (of.rows is None and len(item) == rows.total))
    in_order = in_order and (of.rows is rows or torch.equal(item, torch.arange(len(item), device=item.device)))  # type: ignore[union-attr]
    if not in_order or place or placement.dim or item.dim() != 1 or others != [1] or placement.local_ids:
        return mode.on_all_rows(func, args, {})
    other = converted(mode, items[1], rows, items[1].dim(), "indexing")
    if other.dim() != 1:
        return mode.on_all_rows(func, args, {})
    own = torch.arange(rows.count, device=x.device)
    return mode.tagged(x[(own, other, *items[2:])], rows.at(0))


def _entries(mode: RowsMode, x: Tensor, placement: Placement, mask: Tensor, place: int, args: Any) -> Any:
    """``x[mask]`` with a mask of entries: those of this rank's rows."""
    of, rows = _placement(mask), placement.rows
    apart = of is None or rows is None or of.rows is not rows or rows.replicas
    if apart or of.dim or placement.dim or place or placement.local_ids:  # type: ignore[union-attr]
        return mode.on_all_rows(Tensor.__getitem__, args, {})
    assert rows is not None
    width = prod(mask.shape[1:])

    def keys() -> Tensor:
        places = mask.reshape(len(mask), width).nonzero()
        return rows.positions[places[:, 0]] * width + places[:, 1]

    def make() -> RowSet:
        return RowSet(rows.ranks, int(mask.sum()), keys, name=f"selected entries of {rows.name}")

    chosen = rows._selected(mask, make)
    return mode.tagged(x[mask], chosen.at(0))


def _setitem(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, index, value = args
    found = mode.row_tensors((x, index, value), None)
    placement = placement_of(x)
    if not found:
        func(x, mapped(index, _int), value)
        values = placement_of(value) if isinstance(value, Tensor) else REPLICATED
        if placement is not None and (values is None or values.from_rows):
            mode.untagged(x)
            if values is not None:
                mode.tagged(x, FROM_ROWS)
        return None
    if placement is None or placement.rows is None:
        func(x, *(_gathered_index(mode, each) for each in (index, value)))
        mode.tagged(x, FROM_ROWS)
        return None
    rows, dim, items = placement.rows, placement.dim, _items(x, index)
    if items is None or (placement.local_ids and not _keeps_ends(placement, items, value)) or any(each is None for each in items):
        return mode.on_all_rows(func, args, kwargs)
    place = dim
    if isinstance(items[0], Tensor) and items[0].dtype == torch.bool and items[0].dim() > 1:
        of = _placement(items[0])
        if of is None or of.rows is not rows or _placement(value) is not None or (isinstance(value, Tensor) and value.dim()):
            return mode.on_all_rows(func, args, kwargs)
        func(x, index, value)
        return None
    item = items[place]
    if any(isinstance(each, Tensor) for number, each in enumerate(items) if number != place):
        return mode.on_all_rows(func, args, kwargs)
    assigned = _assigned(mode, rows, item, x)
    if assigned is None:
        return mode.on_all_rows(func, args, kwargs)
    target, local = assigned
    region = [slice(None) if number == place else each for number, each in enumerate(items)]
    kept = [number for number, each in enumerate(region) if not isinstance(each, int)]
    right = len(kept) - kept.index(place)
    if isinstance(value, Tensor):
        if isinstance(item, int) and value.dim() >= right:
            value = value.unsqueeze(value.dim() - right + 1)
        value = converted(mode, value, target, right, "assignment")
    region[place] = local
    func(x, tuple(mapped(region, _int)), value)
    return None


def _keeps_ends(placement: Placement, items: Sequence[Any], value: Any) -> bool:
    """Returns whether what is assigned to edges leaves them where they are: they end at this rank's own rows."""
    of = _placement(value)
    into_sources = placement.local_ids == "source" or (placement.local_ids == "both" and items[0] == 0)
    return of is not None and (of.local_ids == "target" or (of.local_ids == "source" and into_sources))


def _assigned(mode: RowsMode, rows: RowSet, item: Any, x: Tensor) -> tuple[RowSet, Any] | None:
    """Returns the rows that an index names, and this rank's places of them; None where all rows are needed to know."""
    if _is_all(item):
        return rows, slice(None)
    if isinstance(item, Tensor) and item.dim() == 0 and item.dtype != torch.bool:
        item = int(item)
    if isinstance(item, int):
        return rows.choose(_one(int(item), rows))
    if isinstance(item, slice):
        return rows.choose(torch.arange(rows.total, device=x.device)[mapped(item, _int)])
    of = _placement(item)
    if item.dtype == torch.bool and item.dim() == 1:
        if (len(item) if of is None else of.rows.total) != rows.total:  # type: ignore[union-attr]
            return None  # and torch raises
        mask = mode.take(item, 0, rows, "mask") if of is None else converted(mode, item, rows, 1, "mask")
        return rows.select(mask), mask
    if of is None and item.dim() == 1:
        return rows.choose(item)
    if of is not None and of.in_order and of.rows is rows:
        return rows, slice(None)
    return None


def _gathered_index(mode: RowsMode, value: Any) -> Any:
    def change(each: Any) -> Any:
        placement = _placement(each)
        return mode.gathered(each, placement, "assignment") if placement is not None else _int(each)

    return mapped(value, change)


RULES[Tensor.__getitem__] = _getitem
RULES[Tensor.__setitem__] = _setitem


def _index_select(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    names = dict(zip(("dim", "index"), args[1:])) | kwargs
    every = (slice(None),) * dim_of(names["dim"], args[0].dim())
    index = names["index"]
    if not index.dim():
        index = place(index.view(1), placement_of(index) or REPLICATED)
    return _index(mode, args[0], (*every, index))


def _masked_select(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    return _index(mode, args[0], args[1]) if len(args) == 2 and args[0].shape == args[1].shape else mode.other(func, args, kwargs)


def _along_dim(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``gather`` and ``scatter`` along a dimension without rows, and sums into places that rows name."""
    found = mode.row_tensors(args, kwargs)
    name = name_of(func)
    if not found:
        return mode.plain(func, args, kwargs)
    names = ("dim", "index", "src", "reduce") if "gather" not in name and "take" not in name else ("dim", "index")
    if "take" in name:
        names = ("index", "dim")
    given = dict(zip(names, args[1:])) | kwargs
    given.setdefault("src", given.pop("source", given.pop("value", None)))
    x, index, dim = args[0], given["index"], given["dim"]
    into, of = placement_of(x), _placement(index)
    dim = dim_of(dim, x.dim())
    changes = name.endswith("_")
    if into is not None and into.local_ids:
        raise mode.refuse(LOCAL_IDS)
    if of is None or of.local_ids or any(p.rows is not of.rows for _, p in found):
        if of is not None and of.local_ids:
            return _into_nodes(mode, func, args, kwargs, given, dim)
        return mode.on_all_rows(func, args, kwargs)
    rows, right = of.rows, index.dim() - of.dim
    assert rows is not None
    if into is not None and into.rows is rows and dim != into.dim and right == x.dim() - into.dim:
        src = given.get("src")
        if isinstance(src, Tensor):
            given["src"] = converted(mode, src, rows, right, name)
        rest = [given[key] for key in names if given.get(key) is not None]
        options = {k: v for k, v in kwargs.items() if k not in (*names, "value")}
        return mode.tagged(func(x, *rest, **options), rows.at(into.dim))
    adds = "add" in name or (given.get("reduce") in ("add", "sum") and kwargs.get("include_self", True))
    if into is not None and into.rows is None and adds and isinstance(given.get("src"), Tensor) and of.dim == dim:
        src = converted(mode, given["src"], rows, right if "index" not in name else given["src"].dim() - dim, name)
        own = index.narrow(of.dim, 0, rows.owned), src.narrow(dim, 0, rows.owned)
        plain = torch.zeros_like(x).index_add if "index" in name else torch.zeros_like(x).scatter_add
        total = mode.sum(plain(dim, *own), name) * given.get("alpha", 1)
        out = x.add_(total) if changes else x + total
        return mode.tagged(out, FROM_ROWS)
    return mode.on_all_rows(func, args, kwargs)


def _into_nodes(mode: RowsMode, func: Any, args: Any, kwargs: Any, given: dict[str, Any], dim: int) -> Any:
    """Reductions over the in-edges of each node, all of which its owner has, and sums over the out-edges: ``index`` is a row of
    ``edge_index``."""
    x, index, into, of = args[0], given["index"], _placement(args[0]), _placement(given["index"])
    assert of is not None and of.rows is not None
    name, nodes, src, whole = name_of(func), of.rows.targets, given.get("src"), placement_of(args[0])
    if nodes is not None and whole is not None and whole.rows is None and not dim and x.size(0) == nodes.total:
        own = mode.tagged(mode.take(x, 0, nodes, name), nodes.at(0))
        out = _along_dim(mode, getattr(Tensor, name.removesuffix("_")), (own, *args[1:]), kwargs)
        if name.endswith("_") and (placed := _placement(out)) is not None:
            out = mode.tagged(x.copy_(mode.gathered(out, placed, name)), FROM_ROWS)
        return out
    at_targets = of.local_ids == "target" or (of.local_ids == "source" and "add" in name and mode.expand is not None)
    if into is not None and into.rows is mode.halo_rows:
        at_targets, nodes = bool(of.local_ids), mode.halo_rows
    if not at_targets or into is None or into.rows is not nodes or nodes is None or dim or into.dim or of.dim:
        return mode.on_all_rows(func, args, kwargs)
    if isinstance(src, Tensor):
        src = given["src"] = converted(mode, src, of.rows, src.dim(), name)
    names = ("index", "src") if "index" in name else ("index", "src", "reduce")
    if of.local_ids == "target" or nodes is mode.halo_rows:
        values = [given[key] for key in names if given.get(key) is not None]
        options = {key: value for key, value in given.items() if key not in ("dim", *names)}
        return mode.tagged(func(x, 0, *values, **options), nodes.at(0))
    with mode.pause():
        assert mode.expand is not None and mode.reduce is not None and isinstance(src, Tensor)
        sums = torch.zeros_like(mode.expand(x.detach()))
        total = mode.reduce(sums.index_add(0, index, src) if "index" in name else sums.scatter_add(0, index, src))
        out = x.add_(total) if name.endswith("_") else x + total
    return mode.tagged(out, nodes.at(0))


register(_index_select, "index_select", (torch, Tensor))
register(_masked_select, "masked_select", (torch, Tensor))
register(
    _along_dim,
    "gather take_along_dim scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_",
    (torch, Tensor),
)

# Autograd #####################################################################


def _backward(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    if mode.in_backward:
        first = args[0] if args else kwargs["tensors"]
        names = (
            "tensors",
            "gradient" if func is Tensor.backward else "grad_tensors",
            "retain_graph",
            "create_graph",
            "inputs",
        )
        given = dict(zip(names, args)) | kwargs
        starts = given.get("gradient", given.get("grad_tensors"))
        _run_backward(mode, _as_tuple(first), _as_tuple(starts), _as_tuple(given.get("inputs")), given, accumulate_grad=True)
        return None
    raise mode.refuse(
        "loss.backward() leaves gradients of this rank alone. Call self.manual_backward(loss), which sums them over ranks"
    )


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return () if given is None else (given,) if isinstance(given, Tensor) else tuple(given)


def _run_backward(
    mode: RowsMode,
    outputs: tuple[Tensor, ...],
    starts: tuple[Any, ...],
    inputs: tuple[Tensor, ...],
    given: Any,
    accumulate_grad: bool,
) -> Any:
    """Runs torch's engine, in which what is computed again, such as checkpoints, is what it was the first time."""
    starts = starts or (None,) * len(outputs)
    starts = tuple(torch.ones_like(out) if start is None else start for out, start in zip(outputs, starts))
    again, retain = bool(given.get("create_graph")), given.get("retain_graph")
    unused = accumulate_grad or bool(given.get("allow_unused", given.get("materialize_grads")))
    if again:
        mode.twice_at = user_line()
    with mode.opened(in_backward=True, in_rule=True), mode.differentiating():
        return _engine_run_backward(
            outputs, starts, again if retain is None else retain, again, inputs, unused, accumulate_grad=accumulate_grad
        )


def _grad(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.autograd.grad``: gradients of replicated tensors and parameters are summed over ranks."""
    given = dict(zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args)) | kwargs
    outputs = [given["outputs"]] if isinstance(given["outputs"], Tensor) else list(given["outputs"])
    inputs = [given["inputs"]] if isinstance(given["inputs"], Tensor) else list(given["inputs"])
    starts = given.get("grad_outputs")
    starts = [None] * len(outputs) if starts is None else [starts] if isinstance(starts, Tensor) else list(starts)
    mode.row_tensors((outputs, inputs, starts), None)
    scaled = []
    for out, start in zip(outputs, starts):
        of = placement_of(out)
        if of is None:
            raise mode.refuse("torch.autograd.grad of a tensor of unknown origin")
        if of.rows is not None:
            start = None if start is None else converted(mode, start, of.rows, out.dim() - of.dim, "grad")
            scaled.append(start if not of.rows.replicas else _of_owned(torch.ones_like(out) if start is None else start, of))
        else:
            scaled.append((torch.ones_like(out) if start is None else start) / mode.ranks.size)
    found = _run_backward(mode, tuple(outputs), tuple(scaled), tuple(inputs), given, accumulate_grad=False)
    made = []
    for x, grad in zip(inputs, found):
        of = placement_of(x)
        if grad is None and given.get("materialize_grads"):
            grad = torch.zeros_like(x)
        if of is None:
            raise mode.refuse("torch.autograd.grad with respect to a tensor of unknown origin")
        if of.rows is not None:
            made.append(grad if grad is None else mode.tagged(_of_all_ranks(mode, grad, of), of.rows.at(of.dim)))
        else:
            made.append(grad if grad is None else mode.tagged(mode.sum(grad, "gradient"), FROM_ROWS))
    return tuple(made)


def _of_owned(grad: Tensor, of: Placement) -> Tensor:
    """Returns gradients without those of replicas, which their owners have."""
    rows = of.rows
    assert rows is not None
    if rows.owned == rows.count:
        return grad
    own = grad.narrow(of.dim, 0, rows.owned)
    return torch.cat([own, torch.zeros_like(grad.narrow(of.dim, rows.owned, rows.count - rows.owned))], of.dim)


def _of_all_ranks(mode: RowsMode, grad: Tensor, of: Placement) -> Tensor:
    """Returns gradients of rows with those that replicas on other ranks have."""
    rows, dim = of.rows, of.dim
    assert rows is not None
    if not rows.replicas:
        return grad
    shape = [*grad.shape[:dim], rows.total, *grad.shape[dim + 1 :]]
    return mode.take(mode.sum(grad.new_zeros(shape).index_add(dim, rows.positions, grad), "gradient"), dim, rows, "gradient")


def _register_hook(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A hook gets the gradient of one device."""
    x, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    of = placement_of(x)
    if of is None or isinstance(x, torch.nn.Parameter):
        return func(*args, **kwargs)

    def on_gradient(grad: Tensor) -> Any:
        # Inside, a gradient is what the tensor is.
        if of.rows is not None:
            whole = mode.tagged(_of_all_ranks(mode, grad.view_as(grad), of), of.rows.at(of.dim))
        else:
            whole = mode.tagged(mode.sum(grad, "gradient for a hook"), FROM_ROWS)
        with mode.opened():
            changed = hook(whole)
        if changed is None:
            return None
        if of.rows is not None:
            return _of_owned(converted(mode, changed, of.rows, x.dim() - of.dim, "hook"), of)
        return changed / mode.ranks.size

    return func(x, on_gradient)


RULES[Tensor.backward] = _backward
RULES[torch.autograd.backward] = _backward
RULES[torch.autograd.grad] = _grad
RULES[Tensor.register_hook] = _register_hook
