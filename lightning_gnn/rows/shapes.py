"""Rules of functions about shapes: sizes, views, joins, products, indices. Sizes are sizes of the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.private_torch import TensorBase, hooks_on_gradient, storage_id
from lightning_gnn.rows.elementwise import (
    align_rows,
    dim_of,
    keep_placement,
    on_all,
    pass_row_tensors,
    place_rows,
    properties,
    random,
    register,
    target_of,
    whole,
)
from lightning_gnn.rows.mode import (
    LOCAL_IDS,
    RULES,
    RowsMode,
    active_mode,
    has_counts,
    is_count,
    map_leaves,
    name_of,
    place,
    placement_of,
    rows_of,
    tensors_in,
)
from lightning_gnn.rows.placement import FROM_ROWS, REPLICATED, Placement, RowCount, RowPlacement, RowSet, View

# Sizes ########################################################################


def _size(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    out, of = func(*args, **kwargs), rows_of(args[0])
    if of is None:
        return out
    if isinstance(out, int):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return RowCount(of.rows, out) if dim % args[0].dim() == of.dim else out
    return torch.Size([RowCount(of.rows, size) if dim == of.dim else size for dim, size in enumerate(out)])


def _len(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    of = rows_of(args[0])
    return func(*args) if of is None or of.dim else of.rows.total


def _numel(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, of = args[0], rows_of(args[0])
    if of is None:
        return func(*args)
    others = prod(size for dim, size in enumerate(x.shape) if dim != of.dim)
    return RowCount(of.rows) if others == 1 else of.rows.total * others


RULES[Tensor.size] = _size
properties(_size, "shape")
RULES[Tensor.__len__] = _len
register(_numel, "numel nelement")


_ABOUT = """dim ndimension stride is_contiguous is_floating_point is_complex is_signed is_same_size element_size
get_device data_ptr storage_offset is_set_to is_pinned is_inference untyped_storage storage has_names is_neg is_conj
is_shared is_coalesced const_data_ptr dim_order record_stream
__hash__ __repr__ __str__ __format__ __deepcopy__ __setstate__ retains_grad_ is_nonzero_ _is_view
is_tensor is_storage result_type can_cast promote_types get_default_dtype is_grad_enabled typename"""
register(RowsMode.run_unchanged, _ABOUT)
properties(
    RowsMode.run_unchanged,
    "dtype device ndim requires_grad is_leaf grad_fn layout is_cuda is_cpu is_sparse is_quantized is_meta is_mps is_nested "
    "_version output_nr itemsize nbytes _base _backward_hooks retains_grad name _grad_fn _post_accumulate_grad_hooks "
    "is_sparse_csr is_mkldnn is_xla is_xpu is_vulkan is_ipu is_maia is_mtia",
)


_properties: Any = vars(Tensor) | vars(TensorBase)
_data_, _grad_, _requires_grad_ = (_properties[name] for name in ("data", "grad", "requires_grad"))


def _pickle(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of pickling: saved tensors have no placement and no row sets."""
    x = args[0]
    placements = {name: x.__dict__.pop(name) for name in [*x.__dict__] if name.startswith("_lightning_gnn")}
    try:
        return func(*args, **kwargs)
    finally:
        x.__dict__.update(placements)


RULES[Tensor.__reduce_ex__] = _pickle


def _kept_gradient(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of ``x.grad``: sum the ranks' parts for a replicated tensor; refuse leaves. Gradients of parameters stay unchanged."""
    x, of = args[0], placement_of(args[0])
    out = func(x)
    if out is None or of is None or of.rows is not None or isinstance(x, torch.nn.Parameter) or mode.ranks.size == 1:
        return keep_placement(mode, func, args, kwargs)
    if x.is_leaf:
        raise mode.refuse("x.grad of a replicated tensor is this rank's part only. Use torch.autograd.grad(loss, x)")
    return mode.place(mode.sum(out.detach(), "grad"), FROM_ROWS)


def _set(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of ``x.data = value`` and ``x.grad = value``."""
    x, value = args
    of, placement = placement_of(value) if isinstance(value, Tensor) else None, rows_of(x)
    if func == _grad_.__set__ and placement is not None and of is not None:
        value = align_rows(mode, value, placement.rows, x.dim() - placement.dim, "grad")
    elif of is not None and of.rows is not None and isinstance(x, torch.nn.Parameter):
        raise mode.refuse("rows are assigned to a parameter, which is whole on every rank. Assign gather_global(rows)")
    func(x, value)
    if func == _data_.__set__ and not isinstance(x, torch.nn.Parameter):
        mode.remove_placement(x) if of is None else mode.place(x, of.with_view(None))


RULES[_data_.__set__] = RULES[_grad_.__set__] = _set
RULES[_grad_.__get__] = _kept_gradient
RULES[_requires_grad_.__set__] = RULES[_grad_.__delete__] = RowsMode.run_unchanged

# Views ########################################################################

_ROWS_PRIME = 1_000_003
"""Number of rows in a first attempt, which needs no messages; if no view is found, the real number is used."""
_EMPTY_PRIME = 999_983
"""Size in place of 0: strides and products of sizes of an empty tensor do not show its rows."""
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "atleast_2d"}
_EXPANDS = {"expand", "broadcast_to"}


def _reshape(func: Any) -> Callable[..., Tensor]:
    """Returns the function that reshapes local rows: a copy in place of a view would lose in-place changes."""
    return Tensor.view if func is Tensor.view else Tensor.reshape


def _int(value: Any) -> Any:
    return int(value) if is_count(value) else value


class ShapeConverter:
    """Converts shapes of a row tensor between all ranks and this rank. On all ranks, a prime replaces size 0.

    Args:
        x: row tensor.
        of: its placement.
        arguments: sizes in the arguments of a function.

    Attributes:
        has_empty_dim: whether a dimension other than the dimension of the rows has size 0.
    """

    def __init__(self, x: Tensor, of: RowPlacement, arguments: Sequence[Any]) -> None:
        self.sizes, self.dim = [int(size) for size in x.shape], of.dim
        self.has_empty_dim = 0 in (*self.sizes[: of.dim], *self.sizes[of.dim + 1 :])

    def to_global(self, size: Any) -> Any:
        """Returns a size of an argument, or a number of repetitions of rows, on all ranks."""
        return size

    def global_rows(self, rows: RowSet) -> int:
        """Returns the number of rows of all ranks."""
        return rows.total

    def global_shape(self, total: int) -> tuple[int, ...]:
        """Returns the shape of the tensor with `total` rows."""
        sizes = (*self.sizes[: self.dim], total, *self.sizes[self.dim + 1 :])
        return tuple(int(each) or _EMPTY_PRIME * self.has_empty_dim for each in sizes)

    def to_local(self, size: int) -> int:
        """Returns the size on this rank."""
        return 0 if self.has_empty_dim and size % _EMPTY_PRIME == 0 else size

    def local_rows(self, rows: RowSet) -> int:
        """Returns the number of local rows."""
        return rows.count

    def local_shape(self, shape: Sequence[int], rows: RowSet, dim: int) -> list[int]:
        """Returns the shape on this rank, for a shape whose dimension `dim` has rows."""
        return [*map(self.to_local, shape[:dim]), self.local_rows(rows), *map(self.to_local, shape[dim + 1 :])]


def _frozen(value: Any) -> Any:
    """Returns arguments as a hashable key without `RowCount`, which would keep the ranks of a run alive."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return int(value) if isinstance(value, RowCount) else value


@lru_cache(4096)
def _trace_views(func: Any, shape: Any, dim: int, args: Any, kwargs: Any) -> list[Any]:
    """Returns the shape, the dimension of the rows, and the first row, for each result of a function that returns views.

    The dimension is None if no dimension has the rows. Empty if the function fails or copies. The function is called on a tensor
    without memory in which only the dimension of the rows has a stride.
    """
    x = torch.empty_strided(shape, [int(each == dim) for each in range(len(shape))], device="meta")
    try:
        results = func(x, *args, **dict(kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return []  # torch raises the error when the function runs on all rows
    views = []
    for out in (results,) if isinstance(results, Tensor) else results:
        if storage_id(out.untyped_storage()) != storage_id(x.untyped_storage()):
            return []
        along = [at for at, size in enumerate(out.shape) if size != 1 and out.stride(at)]
        views.append((tuple(out.shape), along[0] if len(along) == 1 else None, out.storage_offset()))
    return views


def _view(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of functions that return views of their first argument."""
    x, of, name = args[0], rows_of(args[0]), name_of(func)
    if of is None:
        return mode.plain(func, map_leaves(args, _int), map_leaves(kwargs, _int))
    if name == "view" and len(args) == 2 and isinstance(args[1], torch.dtype):
        return keep_placement(mode, func, args, kwargs)
    given = _flat((*args[1:], *kwargs.values()))
    if any(isinstance(each, Tensor) for each in given):
        return mode.on_all_rows(func, args, kwargs)
    rows, dim, converter = of.rows, of.dim, (mode.shape_converter or ShapeConverter)(x, of, given)
    sizes = map_leaves(args[1:], lambda size: converter.to_global(_int(size)))
    if converter.has_empty_dim and name in ("view", "reshape", *_EXPANDS) and -1 not in _flat(sizes):
        sizes = map_leaves(sizes, lambda size: size or -1)
    key = _frozen(sizes), _frozen(tuple(kwargs.items()))
    # Without size arguments, only squeezing the rows depends on their number.
    needs_total = name == "squeeze" and dim in ([each % x.dim() for each in given] or range(x.dim()))
    for total in (None,) if needs_total else (_ROWS_PRIME, None):
        total = total or converter.global_rows(rows)
        shape = converter.global_shape(total)
        views = _trace_views(func, shape, dim, *key)
        if views and all(at is not None and size[at] == total for size, at, _ in views):
            break
    else:
        return _slice_or_regroup(mode, func, args, kwargs, shape, views, sizes, converter)
    if name in _RESHAPES | _EXPANDS:
        size, at, _ = views[0]
        local = converter.local_shape(size, rows, at)
        results: Any = (x.expand(local) if name in _EXPANDS else _reshape(func)(x, local),)
    elif name in _PARTS | {"narrow"} and views[0][0] == shape:
        results = (x.view_as(x),)
    else:
        results = func(*map_leaves(args, _int), **kwargs)
        results = (results,) if isinstance(results, Tensor) else results
    for number, (out, (_, at, _)) in enumerate(zip(results, views)):
        new = _keep_ids(rows.at(at), of)
        if name in ("unbind", "select") and of.local_ids == "both":
            new = _end(rows, number if name == "unbind" else kwargs.get("index", given[-1]))
        mode.place(out, new)
    return tuple(results) if name in _PARTS else results[0]


def _slice_or_regroup(
    mode: RowsMode, func: Any, args: Any, kwargs: Any, shape: Any, views: Any, sizes: Any, converter: ShapeConverter
) -> Any:
    """Returns slices of the rows, and reshapes that split rows or join them.

    `shape` is the shape with all rows; `views` is the result of :func:`_trace_views` for it and the arguments `sizes`.
    `converter` converts these sizes to sizes on this rank.
    """
    x, of, name = args[0], rows_of(args[0]), name_of(func)
    assert of is not None
    dim, every = of.dim, (slice(None),) * of.dim
    beside = (*shape[:dim], *shape[dim + 1 :])
    if name == "unbind" and views:
        raise mode.refuse(_LEAVES.format("a loop over rows"))
    if name == "select" and views and views[0][0] == beside:
        return _index(mode, x, (*every, views[0][2]))
    if name in _PARTS | {"narrow"} and views and all((*size[:dim], *size[dim + 1 :]) == beside for size, _, _ in views):
        parts = tuple(_index(mode, x, (*every, slice(first, first + size[dim]))) for size, _, first in views)
        return parts if name in _PARTS else parts[0]
    if name in _RESHAPES and shape[dim] > 1 and prod(shape):
        new = func(torch.empty(shape, device="meta"), *sizes, **map_leaves(kwargs, _int)).shape
        found = _find_repeats(of, shape, new, converter)
        if found is None and prod(shape[:dim]) == 1:
            at = next((place for place, size in enumerate(new) if size != 1), 0)
            entries = _find_entries(of.rows, prod(shape[dim + 1 :]), prod(new[at + 1 :]), converter)
            found = None if entries is None else entries.at(at)
        if found is not None:
            return mode.place(_reshape(func)(x, converter.local_shape(new, found.rows, found.dim)), found)
    return mode.on_all_rows(func, args, kwargs)


def _find_repeats(of: RowPlacement, shape: Sequence[int], new: Sequence[int], converter: ShapeConverter) -> RowPlacement | None:
    """Returns the placement after a reshape that joins the rows with dimensions before them, or splits them; else None."""
    rows, times = of.rows.repeats_of or (of.rows, 1)
    if rows.replicas or of.local_ids:
        return None
    before, after = prod(shape[: of.dim]) * converter.to_global(times), prod(shape[of.dim + 1 :])
    for at, size in enumerate(new):
        repeats, left = divmod(size, converter.global_rows(rows))
        if repeats and not left and prod(new[:at]) * repeats == before and prod(new[at + 1 :]) == after:
            return rows.repeat(converter.to_local(repeats)).at(at)
    return None


def _find_entries(rows: RowSet, before: int, after: int, converter: ShapeConverter) -> RowSet | None:
    """Returns the row set after a reshape from `before` to `after` entries per row; None if it has none.

    Entries become separate rows, or are joined to the original rows.
    """
    if after and before % after == 0 and before != after:
        return rows.flatten_entries(converter.to_local(before // after))
    of, times = rows.entries_of or (None, 0)
    return of if before * converter.to_global(times) == after else None


def _keep_ids(new: RowPlacement, before: RowPlacement) -> RowPlacement:
    """Returns a placement whose values have the same kind of ids as before."""
    if not before.local_ids:
        return new
    mixes = before.local_ids == "both" and new.dim != before.dim
    return RowPlacement(new.rows, new.dim, local_ids="mixed" if mixes else before.local_ids)


def _end(edges: RowSet, number: int) -> RowPlacement:
    """Returns the placement of a row of ``edge_index``."""
    return RowPlacement(edges, local_ids=("source", "target")[number])


def _view_as(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    shape = _size(mode, Tensor.size, (args[1],), {})
    if func is Tensor.expand_as:
        return _expand(mode, Tensor.expand, (args[0], shape), {})
    return _view(mode, Tensor.view if func is Tensor.view_as else Tensor.reshape, (args[0], shape), {})


def _expand(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of expand: a replicated tensor that is expanded to a number of rows becomes a row tensor."""
    x, shape = args[0], kwargs.get("size", args[1:])
    shape = shape[0] if shape and isinstance(shape[0], (tuple, list)) else shape
    at = next((place for place, size in enumerate(shape) if is_count(size)), None)
    if at is None or rows_of(x) is not None:
        return _view(mode, func, args, kwargs)
    rows = shape[at].rows
    x = align_rows(mode, x, rows, len(shape) - at, "expand")
    return mode.place(x.expand([*map(int, shape[:at]), rows.count, *map(int, shape[at + 1 :])]), rows.at(at))


def _repeat(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, of = args[0], rows_of(args[0])
    times = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    at = 0 if of is None else of.dim + len(times) - x.dim()
    if of is None or kwargs or len(times) < x.dim() or times[at] != 1 or has_counts(times, {}):
        return mode.run_without_rule(func, args, kwargs)
    return mode.place(func(*args), _keep_ids(of.rows.at(at), of))


def _view_(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of in-place view functions."""
    x, placement, name = args[0], rows_of(args[0]), name_of(func)
    if placement is None:
        return mode.plain(func, args, kwargs)
    if placement.view is None and name not in ("resize_", "resize_as_", "set_", "as_strided_"):
        seen = _view(mode, getattr(Tensor, name[:-1]), (mode.place(x.detach(), placement), *args[1:]), kwargs)
        of = rows_of(seen)
        if of is not None and of.rows is placement.rows:
            return mode.place(x.as_strided_(seen.shape, seen.stride(), seen.storage_offset()), of)
    raise mode.refuse(f"{name} changes the layout of rows in place. Use the function without an underscore.")


_PARTS = {"split", "chunk", "unbind", "tensor_split", "split_with_sizes"}
register(_view, "view reshape flatten ravel unflatten squeeze unsqueeze atleast_2d narrow select")
register(_view, "t transpose permute movedim moveaxis swapaxes swapdims adjoint")
register(_view, "split chunk unbind tensor_split split_with_sizes")
properties(_view, "T mT H mH")
register(_view_as, "view_as reshape_as expand_as")
register(_expand, "expand broadcast_to")
register(_repeat, "repeat tile", (Tensor,))
register(_view_, "t_ transpose_ unsqueeze_ squeeze_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_")

# Joins ########################################################################


@pass_row_tensors
def _cat(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    if any(of.local_ids for _, of in row_args):
        return mode.on_all_rows(func, args, kwargs)
    given = list(kwargs.get("tensors", args[0] if args else ()))
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    (rows, right), most = target_of(row_args), max(each.dim() for each in given)
    if dim % most != most - right:
        return place_rows(torch.cat([align_rows(mode, each, rows, right, "cat") for each in given], dim), rows, right)
    sets = [of.rows for x, of in row_args if x.dim() == most and of.dim == most - right]
    joined = (sets[0].concat(sets[1:]) if len(sets) > 1 else rows) if len(sets) == len(given) else None
    if joined is None:
        return mode.on_all_rows(func, args, kwargs)
    return mode.place(torch.cat(given, dim), joined.at(most - right))


@pass_row_tensors
def _stack(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    given = kwargs.get("tensors", args[0] if args else ())
    dim = dim_of(kwargs.get("dim", args[1] if len(args) > 1 else 0), row_args[0][0].dim() + 1)
    return _cat(mode, torch.cat, ([_view(mode, torch.unsqueeze, (each, dim), {}) for each in given], dim), {})


register(_cat, "cat concat concatenate")
register(_stack, "stack")

# Products #####################################################################


def _product(mode: RowsMode, func: Any, row_args: Any, operands: Sequence[Tensor], names: Sequence[str], output: str) -> Any:
    """Returns a product of tensors whose dimensions have one-letter names, as in ``torch.einsum``.

    The product sums over the dimensions that are not in its `output`.
    """
    (first, of), name = row_args[0], name_of(func)
    rows, factors = of.rows, []
    letter = [letters for letters, x in zip(names, operands) if x is first][0][of.dim]  # noqa: RUF015
    for letters, x in zip(names, operands):
        at = letters.find(letter)
        x = whole(mode, x, name) if at < 0 else align_rows(mode, x, rows, len(letters) - at, name)
        factors.append(x if at < 0 or letter in output else x.narrow(at, 0, rows.owned))
    if letter in output:
        return mode.place(func(*factors), rows.at(output.index(letter)))
    return mode.place(mode.sum(func(*factors), name), FROM_ROWS)


@pass_row_tensors
def _matmul(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    dims = tuple([x.dim() for x in args])
    names = _names_of_product(dims, name_of(func) == "__rmatmul__") if len(dims) == 2 and not kwargs else None
    if names is None or any(of.local_ids for _, of in row_args):
        return mode.on_all_rows(func, args, kwargs)
    return _product(mode, func, row_args, args, *names)


@cache
def _names_of_product(dims: tuple[int, int], is_swapped: bool) -> tuple[tuple[str, str], str] | None:
    """Returns names for the dimensions of two factors and of their product; None if there are too many."""
    x, y = dims[::-1] if is_swapped else dims
    if not x or not (y == 2 or (y == 1 and x < 3)):
        return None
    first, second = "abcdefgh"[: x - 1] + "z", "zy"[:y]
    return (second, first) if is_swapped else (first, second), first[:-1] + second[1:]


@pass_row_tensors
def _einsum(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    equation = args[0].replace(" ", "") if isinstance(args[0], str) else "..."
    inputs, _, output = equation.partition("->")
    names = inputs.split(",")
    repeats = any(len(set(letters)) < len(letters) for letters in names)
    if "..." in equation or "->" not in equation or repeats or any(of.local_ids for _, of in row_args):
        return mode.on_all_rows(func, args, kwargs)
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]

    def einsum(*tensors: Tensor) -> Tensor:
        return torch.einsum(equation, *tensors)

    return _product(mode, einsum, row_args, operands, names, output)


register(_matmul, "matmul mm mv dot vdot __matmul__ __rmatmul__")
RULES[torch.einsum] = _einsum


# Creation #####################################################################


def _create(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of ``zeros``, ``x.new_zeros`` and similar functions: results whose size has a number of rows become row tensors."""
    begin = int(isinstance(args[0] if args else None, Tensor))
    given = (*args[begin:], kwargs.get("size"))
    size = next((each for each in given if isinstance(each, (tuple, list))), None)
    is_apart = size is None  # zeros(n, 3)
    size = given[:-1] if size is None else size
    at = next((place for place, each in enumerate(size) if is_count(each)), None)
    if at is None:
        known = all(placement_of(x) is not None for x in tensors_in(given))
        out = func(*map_leaves(args, _int), **map_leaves(kwargs, _int))
        return mode.place(out, REPLICATED) if known else mode.remove_placement(out)
    rows = size[at].rows
    local = [each.local if place == at else _int(each) for place, each in enumerate(size)]
    if is_apart:
        args = (*args[:begin], size)

    def change(value: Any) -> Any:
        return local if value is size else _int(value)  # other numbers than the size are values

    return mode.place(func(*map(change, args), **{key: change(each) for key, each in kwargs.items()}), rows.at(at))


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return found


def _new_tensor(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    return on_all(mode, torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs})


def _init(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of ``torch.nn.init.uniform_`` and similar functions, which have a `tensor` argument."""
    args = (kwargs["tensor"], *args) if "tensor" in kwargs else args
    return mode.run_without_rule(func, args, {key: value for key, value in kwargs.items() if key != "tensor"})


register(_create, "zeros ones empty full new_zeros new_ones new_empty new_full")
register(random(_create), "rand randn randint")
register(_init, "uniform_ normal_ constant_ kaiming_uniform_", (torch.nn.init,))
register(keep_placement, "tensor as_tensor asarray")
register(on_all, "arange scalar_tensor")
register(_new_tensor, "new_tensor")

# Rows that leave torch ########################################################

_LEAVES = (
    "{0} would see this rank's rows only. Use lightning_gnn.gather_global(x), which returns the rows of all ranks "
    "in the order of the graph"
)


def _leave(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    if rows_of(args[0]) is not None:
        if not mode.lets_rows_leave:
            raise mode.refuse(_LEAVES.format(f"x.{name_of(func)}()"))
        mode.exports[id(out)] = out, args[0]
    return out


def _iterate(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args) if rows_of(args[0]) is None else iter(_view(mode, Tensor.unbind, args, {}))


register(_leave, "numpy tolist __array__ __dlpack__ __reversed__")
register(on_all, "item __bool__ __int__ __float__ __index__ __complex__ __long__ __contains__ is_nonzero equal allclose")
RULES[Tensor.__iter__] = _iterate


def gather_global(x: Tensor) -> Tensor:
    """Returns the rows of all ranks in the order of the graph, on every rank.

    Returns `x` itself on one device and for replicated tensors. Differentiable. Collective.

    Args:
        x: rows of nodes, edges or of a selection of them, ``[n, ...]``.
    """
    mode, of = active_mode(), rows_of(x)
    if mode is None:
        return x
    with mode.pause():  # on a mesh, the mode of the other axis is active now
        found = gather_global(x if of is None else mode.gather_rows(x, of, "gather_global"))
    return found if of is None else mode.place(found, FROM_ROWS)


# Indices ######################################################################


def _index(mode: RowsMode, x: Tensor, index: Any) -> Any:
    return _getitem(mode, Tensor.__getitem__, (x, index), {})


def _items(x: Tensor, index: Any) -> list[Any] | None:
    """Returns one item per dimension, and None per new dimension; returns None if the index is not supported."""
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
    if not mode.row_tensors(args, None):
        return mode.plain(func, (x, map_leaves(index, _int)), kwargs)
    items, of = _items(x, index), rows_of(x)
    out = None if items is None else _index_table(mode, x, items) if of is None else _index_rows(mode, x, of, items, index)
    return mode.on_all_rows(func, args, kwargs) if out is None else out


def _index_table(mode: RowsMode, x: Tensor, items: list[Any]) -> Any:
    """Returns entries of a replicated tensor at positions that are rows; None if all rows are needed."""
    at = [place for place, each in enumerate(items) if isinstance(each, Tensor)]
    begin, last = at[0], at[-1]
    tensors = items[begin : last + 1]
    row_args = [(each, of) for each in tensors if (of := rows_of(each)) is not None]
    (rows, right), edges = target_of(row_args), next((of.rows for _, of in row_args if of.local_ids), None)
    if edges is not None:
        if edges.targets is None or x.size(0) != edges.targets.total or begin:
            raise mode.refuse(LOCAL_IDS)
        rows = edges.targets
    elif any(each.dtype == torch.bool for each in tensors if isinstance(each, Tensor)):
        if len(at) > 1 or tensors[0].dim() > 1 or None in items[:begin] or x.size(begin) != rows.total:
            return None
    elif len(at) != len(tensors):
        return None
    else:
        indices = [align_rows(mode, each, rows, right, "indexing") for each in tensors]
        before = sum(each is None or isinstance(each, slice) for each in items[:begin])
        items = map_leaves([*items[:begin], *indices, *items[last + 1 :]], _int)
        out = mode.enter(x, placement_of(x), "indexing")[tuple(items)]
        return mode.place(out, rows.at(before + max(each.dim() for each in indices) - right))
    own = mode.place(mode.take(x, begin, rows, "indexing"), rows.at(begin))
    return _index(mode, own, tuple(items))


def _index_rows(mode: RowsMode, x: Tensor, of: RowPlacement, items: list[Any], index: Any) -> Any:
    """Returns the entries of a row tensor that an index selects; None if this needs the rows of all ranks."""
    rows, dim = of.rows, of.dim
    # Item for the dimension of the rows.
    widths = [0 if x is None else x.dim() if isinstance(x, Tensor) and x.dtype == torch.bool else 1 for x in items]
    place = next(number for number, width in enumerate(widths) if sum(widths[:number]) <= dim < sum(widths[: number + 1]))
    item, rest = items[place], (*items[:place], slice(None), *items[place + 1 :])
    if _is_all(item):
        return _index_other_dims(mode, x, of, items, place)
    if any(isinstance(each, Tensor) for each in rest):
        return _pick_entries(mode, x, of, items, place)
    takes_all, by = all(map(_is_all, rest)), rows_of(item)
    if isinstance(item, Tensor) and item.dtype == torch.bool and item.dim() > 1:  # mask of entries
        if not takes_all or by is None or by.rows is not rows or by.dim or dim or place or of.local_ids:
            return None
        entries = rows.get_selection(item, lambda: rows.flatten_entries(prod(item.shape[1:])).select(item.reshape(-1)))
        return mode.place(x[item], entries.at(0))
    if by is None or item.dtype == torch.bool:
        selection = _choose_rows(mode, rows, item)
        if selection is None:
            return None
        out = x.index_select(dim, mode.places_of(selection))
        if isinstance(item, int) or not getattr(item, "ndim", 1):
            out = mode.place(mode.sum(out.sum(dim, dtype=x.dtype), "row"), FROM_ROWS)
            out = out if takes_all else _index(mode, out, (*rest[:place], *rest[place + 1 :]))
            return out if isinstance(item, Tensor) else mode.place_view(out, FROM_ROWS, View(x, index))
    elif by.local_ids:
        selection, is_expanded = by.rows, rows is mode.halo_rows
        reaches = is_expanded or selection.targets is rows
        if by.local_ids not in ("source", "target") or dim or mode.expand is None or not reaches:
            raise mode.refuse(LOCAL_IDS)
        with mode.pause():
            out = (mode.expand(x) if by.local_ids == "source" and not is_expanded else x)[item]
    else:
        selection, out = by.rows, whole(mode, x, "indexing")[(*(slice(None),) * dim, item)]
        if item.dim() > 1:
            return mode.place(out, selection.at(dim + by.dim)) if takes_all else None
    out = mode.place(out, _keep_ids(selection.at(dim), of))
    is_view = isinstance(item, slice)
    if not takes_all:
        out = _index(mode, out, rest)
        if not is_view:  # tensors in an index copy the result
            out = mode.place(out.contiguous(), placement_of(out) or FROM_ROWS)
    new = placement_of(out)
    return mode.place_view(out, new, View(x, index)) if is_view and new is not None else out


def _choose_rows(mode: RowsMode, rows: RowSet, item: Any) -> RowSet | None:
    """Returns the rows that an index (one row, a slice, a mask or ids) selects; None if all rows are needed."""
    if isinstance(item, slice):  # the same tensor each time, so that it selects the same rows
        bounds = tuple(each if each is None else int(each) for each in (item.start, item.stop, item.step))
        item = rows.get_or_make(bounds, lambda: torch.arange(rows.total)[slice(*bounds)])
    elif isinstance(item, int) or (not item.dim() and item.dtype != torch.bool):
        position = int(item)
        item = rows.get_or_make(("one", position), lambda: torch.tensor([position]))
    of = rows_of(item)
    if item.dim() != 1:
        return None
    if item.dtype != torch.bool:
        return rows.choose(item) if of is None else None
    if (len(item) if of is None else of.rows.total) != rows.total:
        return None  # torch raises the error
    return rows.select(align_rows(mode, item, rows, 1, "mask"))


def _index_other_dims(mode: RowsMode, x: Tensor, of: RowPlacement, items: list[Any], place: int) -> Any:
    """Indexes dimensions after the dimension of rows, as in `x[:, 3]`; returns None if this needs the rows of all ranks."""
    tensors = [each for each in items if isinstance(each, Tensor)]
    if len(tensors) > 1 or any(rows_of(each) is not None for each in tensors):
        return None
    if of.local_ids and tensors:
        raise mode.refuse(LOCAL_IDS)

    out = x[tuple(map_leaves(items, _int))]
    if of.local_ids == "both" and of.dim == 1 and isinstance(items[0], int):
        return mode.place(out, _end(of.rows, items[0]))
    dims = [x.dim() if isinstance(x, Tensor) and x.dtype != torch.bool else not isinstance(x, int) for x in items[:place]]
    return mode.place(out, _keep_ids(of.rows.at(sum(dims)), of))


def _pick_entries(mode: RowsMode, x: Tensor, of: RowPlacement, items: list[Any], place: int) -> Any:
    """Returns ``x[arange(n), y]``: an entry of each row."""
    rows, (first, second, *others) = of.rows, items
    if place or of.dim or of.local_ids or not isinstance(first, Tensor) or first.shape != (rows.total,) or rows_of(first):
        return None
    if any(isinstance(each, Tensor) for each in others) or not isinstance(second, Tensor) or second.dim() != 1:
        return None
    if first.dtype != torch.int64 or not torch.equal(first, torch.arange(len(first), device=first.device)):
        return None
    own = torch.arange(rows.count, device=x.device)
    return mode.place(x[(own, align_rows(mode, second, rows, 1, "indexing"), *others)], rows.at(0))


def _setitem(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, index, value = args
    found, of = mode.row_tensors(args, None), placement_of(x)
    if not found:
        func(x, map_leaves(index, _int), value)
        values = placement_of(value) if isinstance(value, Tensor) else REPLICATED
        if of is not None and (values is None or values.from_rows):
            mode.remove_placement(x)
            if values is not None:
                mode.place(x, FROM_ROWS)
        return
    if not isinstance(of, RowPlacement):
        mode.on_all_rows(func, args, kwargs)
        mode.place(x, FROM_ROWS)
    elif not _assign(mode, x, of, _items(x, index), value):
        mode.on_all_rows(func, args, kwargs)


def _assign(mode: RowsMode, x: Tensor, of: RowPlacement, items: list[Any] | None, value: Any) -> bool:
    """Set entries of a row tensor; returns False if all rows are needed."""
    rows, place = of.rows, of.dim
    if items is None or (of.local_ids and not _keeps_ends(of, items, value)) or any(each is None for each in items):
        return False
    first = items[0]
    if isinstance(first, Tensor) and first.dtype == torch.bool and first.dim() > 1:
        by = rows_of(first)
        is_number = rows_of(value) is None and not (isinstance(value, Tensor) and value.dim())
        if by is None or by.rows is not rows or by.dim != place or not is_number:
            return False
        x[tuple(items)] = value
        return True
    item = items[place]
    has_tensors = any(isinstance(each, Tensor) for number, each in enumerate(items) if number != place)
    target = None if has_tensors else rows if _is_all(item) else _choose_rows(mode, rows, item)
    if target is None:
        return False
    region = [slice(None) if number == place else each for number, each in enumerate(items)]
    kept = [number for number, each in enumerate(region) if not isinstance(each, int)]
    right = len(kept) - kept.index(place)
    if isinstance(value, Tensor):
        if isinstance(item, int) and value.dim() >= right:
            value = value.unsqueeze(value.dim() - right + 1)
        value = align_rows(mode, value, target, right, "assignment")
    if target is not rows:
        region[place] = mode.places_of(target)
    x[tuple(map_leaves(region, _int))] = value
    return True


def _keeps_ends(placement: RowPlacement, items: Sequence[Any], value: Any) -> bool:
    """Returns whether an assignment to edges leaves them on this rank: their targets remain local nodes."""
    of = rows_of(value)
    into_sources = placement.local_ids == "source" or (placement.local_ids == "both" and items[0] == 0)
    return of is not None and (of.local_ids == "target" or (of.local_ids == "source" and into_sources))


RULES[Tensor.__getitem__] = _getitem
RULES[Tensor.__setitem__] = _setitem


def _index_select(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    names = dict(zip(("dim", "index"), args[1:])) | kwargs
    every, index = (slice(None),) * dim_of(names["dim"], args[0].dim()), names["index"]
    if not index.dim():
        index = place(index.view(1), placement_of(index) or REPLICATED)
    return _index(mode, args[0], (*every, index))


def _masked_select(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    return _index(mode, *args) if len(args) == 2 and args[0].shape == args[1].shape else mode.run_without_rule(func, args, kwargs)


@pass_row_tensors
def _along_dim(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    """Rule of ``gather`` and ``scatter`` along a dimension without rows, and of sums at indices that are rows."""
    name, x = name_of(func), args[0]
    names = ("index", "dim") if "take" in name else ("dim", "index", "src", "reduce")
    arguments = {_NAMES.get(key, key): value for key, value in (dict(zip(names, args[1:])) | kwargs).items()}
    index, dim, src = arguments["index"], dim_of(arguments["dim"], x.dim()), arguments.get("src")
    into, of = placement_of(x), rows_of(index)
    if into is not None and into.local_ids:
        raise mode.refuse(LOCAL_IDS)
    if of is not None and of.local_ids:
        return _into_nodes(mode, func, args, kwargs, arguments, dim)
    if of is None or any(each.rows is not of.rows for _, each in row_args):
        return mode.on_all_rows(func, args, kwargs)
    rows, right = of.rows, index.dim() - of.dim
    if into is not None and into.rows is rows and dim != into.dim and right == x.dim() - into.dim:
        return mode.place(_with_source(mode, func, args, kwargs, rows, right), rows.at(into.dim))
    adds = "add" in name or (arguments.get("reduce") in ("add", "sum") and arguments.get("include_self", True))
    if into is not None and into.rows is None and adds and isinstance(src, Tensor) and of.dim == dim:
        src = align_rows(mode, src, rows, right if "index" not in name else src.dim() - dim, name)
        own = index.narrow(of.dim, 0, rows.owned), src.narrow(dim, 0, rows.owned)
        plain = torch.zeros_like(x).index_add if "index" in name else torch.zeros_like(x).scatter_add
        total = mode.sum(plain(dim, *own), name) * arguments.get("alpha", 1)
        return mode.place(x.add_(total) if name.endswith("_") else x + total, FROM_ROWS)
    return mode.on_all_rows(func, args, kwargs)


_NAMES = {"indices": "index", "source": "src", "value": "src"}
"""Argument names of other functions, mapped to common names."""


def _with_source(mode: RowsMode, func: Any, args: Any, kwargs: Any, rows: RowSet, right: int | None = None) -> Any:
    """Run a function on local rows, indices and sources with `rows` along dimension `right` from the right (None: the first)."""

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return align_rows(mode, value, rows, value.dim() if right is None else right, name_of(func))

    return func(args[0], *map(change, args[1:]), **{key: change(value) for key, value in kwargs.items()})


def _into_nodes(mode: RowsMode, func: Any, args: Any, kwargs: Any, arguments: dict[str, Any], dim: int) -> Any:
    """Returns reductions over the in-edges of each node, which its owner has, or sums over out-edges.

    ``index`` is a row of ``edge_index``.
    """
    x, index, src, into, of = args[0], arguments["index"], arguments.get("src"), rows_of(args[0]), rows_of(arguments["index"])
    assert of is not None
    name, nodes, halo = name_of(func), of.rows.targets, mode.halo_rows
    if nodes is not None and into is None and placement_of(x) is not None and not dim and x.size(0) == nodes.total:
        own = mode.place(mode.take(x, 0, nodes, name), nodes.at(0))
        out = _along_dim(mode, getattr(Tensor, name.removesuffix("_")), (own, *args[1:]), kwargs)
        if name.endswith("_") and (placement := rows_of(out)) is not None:
            out = mode.place(x.copy_(mode.gather_rows(out, placement, name)), FROM_ROWS)
        return out
    at_targets = of.local_ids == "target"
    at_sources = of.local_ids == "source" and "add" in name and mode.expand is not None
    if into is not None and into.rows is halo:
        at_targets, nodes = True, halo
    if not (at_targets or at_sources) or into is None or into.rows is not nodes or nodes is None or dim or into.dim or of.dim:
        return mode.on_all_rows(func, args, kwargs)
    if at_targets:
        return mode.place(_with_source(mode, func, args, kwargs, of.rows), nodes.at(0))
    assert isinstance(src, Tensor)
    src = align_rows(mode, src, of.rows, src.dim(), name)
    with mode.pause():
        assert mode.expand is not None and mode.reduce is not None
        sums = torch.zeros_like(mode.expand(x.detach()))
        total = mode.reduce(sums.index_add(0, index, src) if "index" in name else sums.scatter_add(0, index, src))
        out = x.add_(total) if name.endswith("_") else x + total
    return mode.place(out, nodes.at(0))


register(_index_select, "index_select")
register(_masked_select, "masked_select")
register(
    _along_dim,
    "gather take_along_dim scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_",
)

# Autograd #####################################################################


def _backward(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    if not mode.in_backward:
        raise mode.refuse(
            "loss.backward() computes gradients of this rank only. Call self.manual_backward(loss), which sums them over ranks"
        )
    names = "tensors", "gradient", "retain_graph", "create_graph", "inputs"
    options = dict(zip(names, args)) | kwargs
    starts = _as_tuple(options.get("gradient", options.get("grad_tensors")))
    mode.run_backward(_as_tuple(options["tensors"]), starts, _as_tuple(options.get("inputs")), options, accumulate_grad=True)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return () if value is None else (value,) if isinstance(value, Tensor) else tuple(value)


def _grad(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of ``torch.autograd.grad``: gradients of replicated tensors and parameters are summed over ranks."""
    options = dict(zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args)) | kwargs
    outputs, inputs = _as_tuple(options["outputs"]), _as_tuple(options["inputs"])
    starts = _as_tuple(options.get("grad_outputs")) or (None,) * len(outputs)
    mode.row_tensors((outputs, inputs, starts), None)
    scaled = []
    for out, start in zip(outputs, starts):
        of = placement_of(out)
        if of is None:
            raise mode.refuse("torch.autograd.grad of a tensor of unknown origin")
        if not isinstance(of, RowPlacement):
            scaled.append((torch.ones_like(out) if start is None else start) / mode.ranks.size)
        elif start is None and not of.rows.replicas:
            scaled.append(None)
        else:
            start = torch.ones_like(out) if start is None else align_rows(mode, start, of.rows, out.dim() - of.dim, "grad")
            scaled.append(_zero_replicas(start, of))
    # Hooks on parameters get the sum over ranks: they are removed during the backward pass, which has partial gradients.
    hooks = {x: hooks_on_gradient(x)[0] or {} for x in inputs if isinstance(x, torch.nn.Parameter)}
    removed = {x: {key: each.pop(key) for key in [*each]} for x, each in hooks.items()}
    try:
        found = mode.run_backward(outputs, tuple(scaled), inputs, options)
    finally:
        for x, each in hooks.items():
            each.update(removed[x])
    made = []
    for x, grad in zip(inputs, found):
        of = placement_of(x)
        if of is None:
            raise mode.refuse("torch.autograd.grad with respect to a tensor of unknown origin")
        if grad is None and options.get("materialize_grads"):
            grad = torch.zeros_like(x)
        grad = None if grad is None else _sum_gradient(mode, grad, of, "gradient")
        for hook in () if grad is None else removed.get(x, {}).values():
            with mode.activate(in_rule=True):
                changed = hook(grad)
            grad = grad if changed is None else changed
        made.append(grad)
    return tuple(made)


def _zero_replicas(grad: Tensor, of: RowPlacement) -> Tensor:
    """Returns gradients with zeros for replicas, which their owners have."""
    rows = of.rows
    if rows.owned == rows.count:
        return grad
    owned_rows = grad.narrow(of.dim, 0, rows.owned)
    return torch.cat([owned_rows, torch.zeros_like(grad.narrow(of.dim, rows.owned, rows.count - rows.owned))], of.dim)


def _sum_gradient(mode: RowsMode, grad: Tensor, of: Placement, name: str) -> Tensor:
    """Returns the gradient of one device for a tensor.

    For rows, gradients of replicas on other ranks are added; for replicated tensors, the gradients of all ranks are summed.
    """
    if not isinstance(of, RowPlacement):
        return mode.place(mode.sum(grad, name), FROM_ROWS)  # type: ignore[no-any-return]
    rows, dim = of.rows, of.dim
    if rows.replicas:
        shape = [*grad.shape[:dim], rows.total, *grad.shape[dim + 1 :]]
        grad = mode.take(mode.sum(grad.new_zeros(shape).index_add(dim, rows.positions, grad), name), dim, rows, name)
    return mode.place(grad, rows.at(dim))  # type: ignore[no-any-return]


def _register_hook(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of hooks, which get the gradient of one device."""
    x, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    of = placement_of(x)
    if of is None or isinstance(x, torch.nn.Parameter):
        return func(*args, **kwargs)

    def on_gradient(grad: Tensor) -> Any:
        with mode.reading():
            whole = _sum_gradient(mode, grad.view_as(grad), of, "gradient for a hook")  # the view has a placement of its own
            with mode.activate():
                changed = hook(whole)
            if changed is None:
                return None
            if isinstance(of, RowPlacement):
                return _zero_replicas(align_rows(mode, changed, of.rows, x.dim() - of.dim, "hook"), of)
            return changed / mode.ranks.size

    return func(x, on_gradient)


RULES[Tensor.backward] = _backward
RULES[torch.autograd.backward] = _backward
RULES[torch.autograd.grad] = _grad
RULES[Tensor.register_hook] = _register_hook
