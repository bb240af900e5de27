"""`RowsMode`: mode in which torch functions of row tensors have the results of the whole graph on one device.

Functions are looked up in :data:`RULES`. Functions without a rule receive the rows of all ranks, gathered, on every rank, which
is exact for any function. Rules save messages and memory if rows need not be gathered.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_gnn.private_torch import (
    COMPILED_FUNCTION,
    COMPILER,
    FORWARD_CLASS,
    OPERATOR,
    OpOverloadPacket,
    base_of,
    is_functorch_wrapped_tensor,
    run_backward,
)
from lightning_gnn.rows.placement import (
    FROM_ROWS,
    REPLICATED,
    GatherRows,
    Placement,
    RowCount,
    RowPlacement,
    RowSet,
    TakeRows,
    View,
    axis,
    copied_for,
    note_change,
    version_of,
)
from lightning_gnn.rows.ranks import EnterRows, GatherParts, Ranks, SumOverRanks, digest_of

Rule = Callable[["RowsMode", Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
"""Rules of functions for row tensors."""


class NotExactError(RuntimeError):
    """Raised for an operation that would not give the result of one device; names the user's line."""


class OtherSizeError(RuntimeError):
    """Raised if the size of a tensor differs from the number of rows that it is combined with."""


class _Open(threading.local):
    def __init__(self) -> None:
        self.modes: list[RowsMode] = []


_open = _Open()  # for ranks that are threads
_everywhere: list[RowsMode] = []  # for the rank of this process, also in the threads of autograd


def active_mode() -> RowsMode | None:
    """Returns the active mode, on a mesh of samples if it is not paused; None if there is no active mode."""
    for mode in reversed(_open.modes or _everywhere):
        if not mode.paused:
            return mode
    return None


def _mode_of_axis() -> RowsMode | None:
    """Returns the open mode of the axis in use."""
    return next((mode for mode in reversed(_open.modes or _everywhere) if mode.attribute == axis.attribute), None)


@contextmanager
def local_rows() -> Iterator[None]:
    """Context manager without row semantics: every tensor has the local rows, and sizes are local."""
    mode = active_mode()
    if mode is None:
        yield
        return
    with mode.pause(), local_rows():  # of each axis
        yield


def placement_of(x: Tensor) -> Placement | None:
    """Returns the placement of a tensor; None if it is unknown."""
    found = x.__dict__.get(axis.attribute)
    if found is None:
        if isinstance(x, torch.nn.Parameter):
            return REPLICATED
        mode = _mode_of_axis()
        is_same = None if mode is None else mode.is_same(x)
        return REPLICATED if (_is_of_host(x) if is_same is None else is_same) else None
    if found.view is not None and found.view.is_stale:
        return None
    if x.requires_grad:
        made_by: Any = type(x.grad_fn)
        if not _is_trusted(made_by):
            return None
        if found.rows is None and not found.from_rows and base_of(x) is not None:
            of = base_of(x).__dict__.get(axis.attribute)  # a view of a tensor that was changed by values reduced from rows
            return found if of is None or not of.from_rows else FROM_ROWS
    return found


def rows_of(x: Any) -> RowPlacement | None:
    """Returns the placement of a row tensor; None for other values."""
    found = placement_of(x) if isinstance(x, Tensor) else None
    return found if isinstance(found, RowPlacement) else None


def _is_of_host(x: Tensor) -> bool:
    """Returns whether a tensor shares the memory of a NumPy array; row tensors never do."""
    return (
        type(x) is Tensor
        and x.is_leaf
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and not is_functorch_wrapped_tensor(x)  # tensors of vmap have no memory
        and not x.untyped_storage().resizable()
    )


@cache
def _is_trusted(made_by: type) -> bool:
    """Returns whether the backward of an autograd node is known: a node of torch or this package, or with a rule."""
    function = getattr(made_by, FORWARD_CLASS, None)
    return (
        function is None
        or function in _row_wise
        or function.__module__ in ("torch.utils.checkpoint", COMPILED_FUNCTION)  # of inputs that are trusted
        or function.__name__ in _backwards
        or function.__module__.partition(".")[0] == "lightning_gnn"
    )


_row_wise: set[Any] = set()
_GENERATED = "GeneratedBackwardFor_"
_backwards: set[str] = set()
"""Names that ``torch.library`` generates for the backward of operators with a rule."""


def register_row_rule(function: Any, rule: Literal["row_wise", "all_rows"] = "row_wise") -> None:
    """Register the behavior of a function on tensors with one row per node or edge, if row semantics has no rule for it.

    Args:
        function: subclass of ``torch.autograd.Function``, or a function that torch dispatches, such as ``torch.ops.my.op`` or the
            result of ``torch.library.custom_op``.
        rule: ``"row_wise"``: each row of the result depends on the same row of the arguments, forward and backward.
            ``"all_rows"``: the function receives the rows of all ranks, on every rank; not for a ``torch.autograd.Function``.

    Raises:
        ValueError: another rule, or ``"all_rows"`` for a ``torch.autograd.Function``.
    """
    is_class = isinstance(function, type) and issubclass(function, torch.autograd.Function)
    if rule not in ("row_wise", "all_rows") or (is_class and rule != "row_wise"):
        raise ValueError(
            f"A rule must be 'row_wise', or 'all_rows' for functions that torch dispatches, got {rule!r} for {function}."
        )
    _is_trusted.cache_clear()
    if is_class:
        _row_wise.add(function)
        return
    for each in _dispatched_callables(function):
        RULES[each] = RULES[torch.add] if rule == "row_wise" else RowsMode.run_without_rule
        _backwards.add(f"{_GENERATED}{each}".replace(".", "_"))


def _dispatched_callables(function: Any) -> list[Any]:
    """Returns the callables that torch may dispatch for a function: for an operator, all overloads."""
    function = getattr(function, OPERATOR, function)
    packet = getattr(function, "overloadpacket", function)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else []
    return [packet, *(getattr(packet, name) for name in overloads)]


def unknown_origin(x: Tensor) -> str:
    """Returns the reason why the placement of a tensor is unknown, and a fix."""
    function = getattr(type(x.grad_fn), FORWARD_CLASS, None)
    made = (
        "by a function without a row rule (vmap, a custom or compiled operator), inside lightning_gnn.local_rows(), or "
        "outside of steps and hooks"
    )
    cure = "Register a rule with lightning_gnn.register_row_rule, or make the tensor in the step, or before the run"
    placement = x.__dict__.get(axis.attribute)
    if placement is not None and placement.view is not None and placement.view.is_stale:
        made, cure = "as a view of rows that later changed in place", "Index the rows again after the change"
    elif function is not None:
        name = function.__name__
        if name.startswith(_GENERATED):
            operator = name.removeprefix(_GENERATED).removesuffix("_default")
            name = f"torch.ops.{operator.replace('_', '.', 1)}"
        made = f"by {name}, whose backward has no row rule"
        cure = f"If it is row-wise, register it: lightning_gnn.register_row_rule({name})"
    return f"a tensor {tuple(x.shape)} of unknown origin: it was made {made}. {cure}."


def place(x: Any, placement: Placement) -> Any:
    """Set the placement of a tensor; returns the tensor."""
    x.__dict__[axis.attribute] = placement
    return x


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in arguments, which may be lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, Tensor):
                yield each
            elif isinstance(each, (list, tuple, dict)):
                yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns arguments with `change` applied to each tensor and number."""
    if isinstance(value, (list, tuple)):
        made = [map_leaves(each, change) for each in value]
        if isinstance(value, tuple):
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        return made
    if isinstance(value, dict):
        return {name: map_leaves(each, change) for name, each in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(each, change) for each in (value.start, value.stop, value.step)))
    return change(value)


def user_line() -> str:
    """Returns file and line of the innermost calling code outside of torch and other libraries."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@lru_cache(4096)  # a stack has few files, and is walked for each message
def _is_of_library(file: str) -> bool:
    return any(part in file for part in _SKIPPED)


_OWN = str(Path(__file__).parent.parent)
_SKIPPED = ("site-packages", _OWN, "<frozen", "<eval_with_key>", "/contextlib.py", "/threading.py", "/torch_geometric.")
"""Parts of file names that are skipped; PyG and torch.fx write code to files with different names in each process."""


def by_placement(args: Any, kwargs: Any) -> tuple[list[tuple[Tensor, RowPlacement]], list[Tensor], bool]:
    """Returns the row tensors in arguments, the tensors of unknown placement, and whether others were reduced from rows."""
    rows, unknown, from_rows = list[tuple[Tensor, RowPlacement]](), list[Tensor](), False
    for given in (args, kwargs) if kwargs else (args,):
        for x in tensors_in(given):
            placement = placement_of(x)
            if placement is None:
                unknown.append(x)
            elif isinstance(placement, RowPlacement):
                rows.append((x, placement))
            elif placement.from_rows:
                from_rows = True
    return rows, unknown, from_rows


class RowsMode(TorchFunctionMode):
    """Torch function mode with the semantics of the whole graph, in this thread.

    Args:
        ranks: ranks that have the rows.
        common_draws: context manager in which random numbers are equal on all ranks.
        expand: function that returns the local and halo rows of a tensor of node rows; None if local ids are not supported.
        reduce: function that sums values of local and halo rows over ranks at their owners.

    Attributes:
        lets_rows_leave: whether arrays and lists may contain the local rows, as in ``predict_step``, where results are combined.
        exports: arrays and lists made from rows in that case, with the rows, by object id.
        exact_draws: whether random numbers for rows equal the draws of one device; each rank then draws for all rows.
        see: function called with each function and its arguments before it runs, also if the mode is paused.
    """

    has_nodes = True
    """Whether rows are nodes or edges; otherwise, torch calls a mode of nodes after this mode."""
    shape_converter: Any = None
    """Class that converts shapes in reshapes; None for :class:`~lightning_gnn.rows.shapes.ShapeConverter`."""
    norms_by_rules = False
    """Whether layers that read all nodes, such as norms, run PyG's code by rules, as for several samples."""

    def __init__(
        self,
        ranks: Ranks,
        common_draws: Callable[[], AbstractContextManager[Any]] = nullcontext,
        expand: Callable[[Tensor], Tensor] | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.attribute = ranks.attribute
        self.ranks, self.common_draws, self.expand, self.reduce = ranks, common_draws, expand, reduce
        self.nodes: RowSet | None = None  # for a graph without types; halo rows follow the local rows
        self.halo_rows: RowSet | None = None
        self.paused = 0
        self.in_backward = self._has_views = False
        self.exact_draws = self.lets_rows_leave = False
        self.exports: dict[int, tuple[Any, Tensor]] = {}
        self.see: Callable[[Any, Any], None] | None = None
        self._axes: list[str] = []  # axes in use before this mode was entered
        self.twice_at = ""  # line of the last gradient with create_graph=True
        self.calling: tuple[RowsMode, ...] = ()  # mode of samples that runs torch's engine by the rule of this mode
        # Tensors from before the run by object id, and whether they were found to be equal on all ranks.
        self._constants: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        ranks._where = user_line

    def __enter__(self) -> RowsMode:
        self._open_modes().append(self)
        self._axes.append(axis.attribute)
        axis.attribute = self.attribute
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open_modes().pop()
        axis.attribute = self._axes.pop()

    def _open_modes(self) -> list[RowsMode]:
        return _open.modes if self.ranks.world.stand_ins else _everywhere

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager in which functions are torch's own."""
        self.paused += 1
        before, mode = axis.attribute, active_mode()
        axis.attribute = before if mode is None else mode.attribute
        try:
            yield
        finally:
            self.paused -= 1
            axis.attribute = before

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager that reads the placements of this mode."""
        before, axis.attribute = axis.attribute, self.attribute
        try:
            yield
        finally:
            axis.attribute = before

    @contextmanager
    def activate(self, in_backward: bool = False, in_rule: bool = False) -> Iterator[None]:
        """Context manager with row semantics, also if it was paused; `in_backward` for recomputations in a backward pass.

        Inside a rule, torch has removed the mode from its stack, so it is entered again.
        """
        before, self.paused, self.in_backward = (self.paused, self.in_backward), 0, in_backward
        is_open = self in (_open.modes or _everywhere) and not in_rule
        try:
            with nullcontext() if is_open else self, self._left_eager():
                yield
        finally:
            self.paused, self.in_backward = before

    def _left_eager(self) -> AbstractContextManager[Any]:
        """Returns a context manager in which torch.compile'd code runs eagerly: compiled code would use local rows."""
        set_stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6; applies to all threads
        if COMPILER not in sys.modules or self.ranks.world.stand_ins or set_stance is None:
            return nullcontext()
        found: AbstractContextManager[Any] = set_stance("force_eager")
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.see is not None:
            self.see(func, args)
        if self.paused:
            return func(*args, **kwargs)
        before, axis.attribute = axis.attribute, self.attribute
        try:
            return self._run(func, args, kwargs)
        finally:
            axis.attribute = before

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.in_backward and not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if func is Tensor.detach and (placement := args[0].__dict__.get(axis.attribute)) is not None:
                place(out, placement)  # for recomputations of a checkpoint
            return out
        if (kwargs or _is_in_place(func)) and _changes(func, args, kwargs):
            return self.change(func, args, kwargs)
        return self.apply_rule(func, args, kwargs)

    def apply_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function by its rule."""
        if kwargs.get("out") is not None:
            out, kwargs = kwargs["out"], {key: value for key, value in kwargs.items() if key != "out"}
            if isinstance(out, Tensor) and next(tensors_in((args, kwargs)), None) is None:
                kwargs.setdefault("dtype", out.dtype)  # for created values
            return self.write_out(out, self.apply_rule(func, args, kwargs))
        rule = RULES.get(func, RowsMode.run_without_rule)
        if self._has_views and rule is not RowsMode.run_unchanged:
            for x in tensors_in((args, kwargs)):
                self.refresh(x)
        try:
            return rule(self, func, args, kwargs)
        except OtherSizeError:  # a single row is broadcast; otherwise torch raises the error
            return self.on_all_rows(func, args, kwargs)

    def change(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an in-place function on its first argument.

        If the argument would be a view on one device, its base changes, too.
        """
        x = args[0]
        found = copied_for(x)
        self.refresh(x)
        out = self.apply_rule(func, args, kwargs)
        note_change(x)
        after, base = placement_of(x), base_of(x)
        if base is not None and not isinstance(base, torch.nn.Parameter):  # it changed with the view
            of = placement_of(base)
            if after is None:
                self.remove_placement(base)
            elif after.from_rows and of is not None and of.rows is None and of.view is None:
                base.__dict__[axis.attribute] = FROM_ROWS
        if found is not None:
            copy, placement = found
            view = placement.view
            assert view is not None
            copy.__dict__[axis.attribute] = placement
            if view.whole is None:
                self.change(Tensor.__setitem__, (view.base, view.index, copy), {})
            else:
                of = rows_of(view.base)
                assert of is not None
                if of.local_ids:
                    raise self.refuse(_WRITTEN_IDS)
                own = self.place(self.take(view.whole, of.dim, of.rows, "view"), of.rows.at(of.dim))
                self.change(Tensor.copy_, (view.base, own), {})
            view.version = version_of(view.base)
        return out

    def refresh(self, x: Tensor) -> None:
        """Update a copy that stands for a view on one device, if its base changed in place."""
        found = copied_for(x)
        copy, view = (x, None) if found is None else (found[0], found[1].view)
        if view is None or not view.is_stale:
            return
        self.refresh(view.base)
        if view.whole is None:
            now = RULES[Tensor.__getitem__](self, Tensor.__getitem__, (view.base, view.index), {})
        else:
            copy, now = view.whole, self.gather_rows(view.base, rows_of(view.base), "view")  # type: ignore[arg-type]
        copy.copy_(now)
        view.version = version_of(view.base)

    # Helpers of rules #######################################################

    def refuse(self, reason: str) -> NotExactError:
        """Returns the error for an operation at the user's line."""
        line = user_line()  # empty if the step is in a library
        return NotExactError(f"{line}: {reason}" if line else reason)

    def row_tensors(self, args: Any, kwargs: Any) -> list[tuple[Tensor, RowPlacement]]:
        """Returns the row tensors in arguments.

        Raises:
            NotExactError: there are rows, and tensors whose placement is unknown.
        """
        found, unknown, _ = by_placement(args, kwargs)
        for x in unknown if found else ():
            if self.placement_of_constant(x) is None:
                raise self.refuse(f"{found[0][1].rows.name} are combined with {unknown_origin(x)}")
        return found

    def note_constants(self, tensors: Iterable[Tensor], local_tensors: Iterable[Tensor] = ()) -> None:
        """Record tensors from before the run, see :func:`~lightning_gnn.heap.tensors_now`.

        `local_tensors` are tensors of this rank's part of the graph, which are skipped.
        """
        known = {id(x) for x in local_tensors}
        for x in tensors:
            if id(x) not in known:
                self.note_constant(x)

    def note_constant(self, x: Tensor) -> None:
        """Record a tensor that is a constant if it is equal on all ranks."""
        if axis.attribute not in x.__dict__ and not self.is_same(x):
            self._constants[id(x)] = weakref.ref(x), False

    def forget_constants(self) -> None:
        self._constants.clear()

    def is_same(self, x: Tensor) -> bool | None:
        """Returns whether a constant was compared and found equal on all ranks; None for other tensors."""
        known, is_same = self._constants.get(id(x), (None, False))
        return is_same if known is not None and known() is x else None

    def constants_of(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors from before the run from which a tensor of unknown placement was computed.

        Replicated inputs are not included. Empty if there were other inputs.
        """
        if self.is_same(x) is not None:
            return () if x.requires_grad else (x,)
        found: tuple[Tensor, ...] = x.__dict__.get(axis.attribute + _MADE_OF, (None, ()))[1]
        return found

    def placement_of_constant(self, x: Tensor) -> Placement | None:
        """Returns the placement of a tensor computed from tensors from before the run; None for others. Collective.

        Raises:
            NotExactError: the tensors differ between ranks.
        """
        if self.is_same(x):
            return REPLICATED
        constants = self.constants_of(x)
        if not constants:
            return None
        with self.pause():
            digests = torch.tensor([digest_of(each) for each in (x, *constants)], device=x.device)
            by_rank = self.ranks.gather(digests, "constant")
        if bool((by_rank != by_rank[0]).any()):
            raise self.refuse(
                f"rows are combined with a tensor of shape {tuple(x.shape)} from before the run, which differs between ranks. "
                "Make it equal on all ranks: seed random numbers with lightning.seed_everything(0)"
            )
        for each in constants:
            self._constants[id(each)] = weakref.ref(each), True
        placement, _ = x.__dict__.get(axis.attribute + _MADE_OF, (REPLICATED, ()))
        return placement if self.is_same(x) else placement_of(place(x, placement))

    def plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function without row tensors; its result is replicated if all its tensors are."""
        _, unknown, from_rows = by_placement(args, kwargs)
        constants = [self.constants_of(x) for x in unknown]
        out = func(*args, **kwargs)
        if not unknown:
            return self.place(out, FROM_ROWS if from_rows else REPLICATED)
        if all(constants) and any(out is x for x in unknown):
            return out
        self.remove_placement(out)
        if all(constants):
            made_of = tuple({id(each): each for of in constants for each in of}.values())
            for x in tensors_in((out,)):
                x.__dict__[axis.attribute + _MADE_OF] = FROM_ROWS if from_rows else REPLICATED, made_of
        return out

    def place(self, out: Any, placement: Placement) -> Any:
        """Set the placement of all tensors in a result; returns the result."""
        if type(out) is Tensor:
            out.__dict__[axis.attribute] = placement
        else:
            for x in tensors_in(out):
                if not isinstance(x, torch.nn.Parameter):
                    x.__dict__[axis.attribute] = placement
        return out

    def place_view(self, out: Tensor, placement: Placement, view: View) -> Tensor:
        """Set the placement of a copy that stands for a view on one device; returns it."""
        self._has_views = True
        return place(out, placement.with_view(view))

    def remove_placement(self, out: Any) -> Any:
        for x in tensors_in((out,)):
            self._constants.pop(id(x), None)
            for name in (axis.attribute, axis.attribute + _MADE_OF):
                x.__dict__.pop(name, None)
        return out

    def enter(self, x: Tensor, placement: Placement | None, operation: str) -> Tensor:
        """Returns a replicated tensor for use with rows."""
        if placement is not None and placement.from_rows and x.requires_grad and torch.is_grad_enabled():
            return self.send(EnterRows, x, self.ranks, operation)
        return x

    def send(self, function: type[torch.autograd.Function], x: Tensor, *args: Any, more_dims: int = 0) -> Tensor:
        """Returns the result of an autograd function that sends `x`; `more_dims` is the number of dimensions added in front."""
        out: Tensor = function.apply(x, *args)
        return out

    def take(self, x: Tensor, dim: int, rows: RowSet, operation: str) -> Tensor:
        """Returns this rank's rows of a replicated tensor that has the rows of all ranks along `dim`."""
        if dim == 0:
            return self.send(TakeRows, x, rows, operation)
        return self.send(TakeRows, x.movedim(dim, 0), rows, operation).movedim(0, dim).contiguous()

    def gather_rows(self, x: Tensor, placement: RowPlacement, operation: str) -> Tensor:
        """Returns the rows of all ranks in the order of the graph, on all ranks."""
        rows, dim = placement.rows, placement.dim
        if placement.local_ids:
            if self.halo_rows is None:
                raise self.refuse(LOCAL_IDS)
            x = self.halo_rows.positions[x.long()]  # positions in the whole graph
        if rows.ranks is not self.ranks:  # its messages would not be received
            raise self.refuse(
                f"{rows.name} of another run are used: the module stores them outside of its parameters and buffers."
            )
        self.check_room(x, rows, operation)
        if dim == 0:
            return self.send(GatherRows, x, rows, operation)
        return self.send(GatherRows, x.movedim(dim, 0), rows, operation).movedim(0, dim).contiguous()

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Context manager that converts errors about second derivatives, which bound layers lack, and names the user's line."""
        try:
            yield
        except RuntimeError as error:
            if "once_differentiable" not in str(error):
                raise
            raise NotExactError(
                f"{self.twice_at or user_line()}: convs on ranks compute first derivatives only, and a gradient "
                "with create_graph=True is differentiated again through a conv. Compute the gradient with respect to values "
                "after the last conv, or without create_graph"
            ) from error

    def check_room(self, x: Tensor, rows: RowSet, operation: str) -> None:
        """Raises MemoryError if gathered rows would not fit, before they are gathered."""
        from lightning_gnn.devices import available_bytes

        if rows.total < _LARGE or x.device.type != "cpu":
            return
        needed = x.nbytes // max(1, rows.count) * rows.total * 2
        free = available_bytes()
        if free is not None and needed > free:
            raise MemoryError(
                f"{user_line()}: {operation} needs the rows of all ranks on each rank, {needed / 1e9:.3g} GB, and "
                f"{free / 1e9:.3g} GB are available."
            )

    def drop_replicas(self, x: Tensor, placement: RowPlacement) -> Tensor:
        """Returns a row tensor without replicas."""
        rows = placement.rows
        return x if rows.owned == rows.count else x.narrow(placement.dim, 0, rows.owned)

    def sum(self, x: Tensor, operation: str) -> Tensor:
        if self.ranks.size == 1:  # a function that returns its argument would create a view
            return x
        return self.send(SumOverRanks, x, self.ranks, operation)

    def parts(self, x: Tensor, operation: str) -> Tensor:
        return self.send(GatherParts, x, self.ranks, operation, more_dims=1)

    def run_per_sample(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result of a function that computes each sample separately, in a mode of samples."""
        return run(*args, **kwargs)

    def places_of(self, selection: RowSet) -> Tensor:
        """Returns the positions of selected rows on this rank."""
        return selection.places

    def run_backward(self, outputs: Any, starts: Any, inputs: Any, options: Any, accumulate_grad: bool = False) -> Any:
        """Run torch's engine; recomputations, such as checkpoints, repeat the results of the forward pass."""
        starts = starts or (None,) * len(outputs)
        starts = tuple(torch.ones_like(out) if start is None else start for out, start in zip(outputs, starts))
        again, retain = bool(options.get("create_graph")), options.get("retain_graph")
        unused = accumulate_grad or bool(options.get("allow_unused", options.get("materialize_grads")))
        with ExitStack() as modes:
            for each in (self, *self.calling):
                each.twice_at = user_line() if again else each.twice_at
                modes.enter_context(each.activate(in_backward=True, in_rule=True))
                modes.enter_context(each.differentiating())
            retain = again if retain is None else retain
            return run_backward(outputs, starts, retain, again, inputs, unused, accumulate_grad=accumulate_grad)

    def run_unchanged(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that does not depend on values."""
        return func(*args, **kwargs)

    def run_without_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function without a rule, on the rows of all ranks."""
        if not self.row_tensors(args, kwargs) and not has_counts(args, kwargs):
            with self.common_draws():  # multinomial, dropout2d and similar functions draw
                return self.plain(func, args, kwargs)
        return self.on_all_rows(func, args, kwargs)

    def on_all_rows(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function on the rows of all ranks, gathered, on every rank; the result is replicated."""
        name, changes, into = name_of(func), _changes(func, args, kwargs), args[0] if args else kwargs
        if changes and (of := rows_of(into)) is not None and of.local_ids:
            raise self.refuse(_WRITTEN_IDS)
        wholes: list[tuple[Tensor, Tensor]] = []

        def change(value: Any) -> Any:
            placement = rows_of(value)
            if placement is None:
                return int(value) if is_count(value) else value
            wholes.append((value, self.gather_rows(value, placement, name)))
            return wholes[-1][1]

        args, kwargs = map_leaves(args, change), map_leaves(kwargs, change)
        with self.common_draws():
            out = func(*args, **kwargs)
        if changes and (of := rows_of(into)) is not None:
            if args[0].dim() != into.dim() or args[0].size(of.dim) != of.rows.total:
                raise self.refuse(f"{name} changes the shape of rows in place. Use {name[:-1]}, which returns its result.")
            into.copy_(self.take(args[0], of.dim, of.rows, name))
            return None if out is None else into
        self.place(out, FROM_ROWS)
        for x in tensors_in((out,)):
            for base, whole in wholes if base_of(x) is not None else ():
                root = whole if base_of(whole) is None else base_of(whole)
                if base_of(x) is root:
                    view = View(base, None, whole)
                    self.place_view(root, FROM_ROWS, view)
                    self.place_view(x, FROM_ROWS, view)
        return out

    def write_out(self, out: Any, results: Any) -> Any:
        """Copy results into tensors that were passed as ``out``."""
        for into, value in zip(tensors_in((out,)), tensors_in((results,))):
            if value.requires_grad:
                raise self.refuse("out=... is not supported for arguments that require gradients")
            of, before = placement_of(value), placement_of(into)
            if base_of(into) is not None or (before is not None and before.view is not None):
                self.change(Tensor.copy_, (into, value), {})
                continue
            with torch.no_grad():
                into.resize_(value.shape).copy_(value)
            note_change(into)
            self.remove_placement(into) if of is None else self.place(into, of.with_view(None))
        return out


_LARGE = 1 << 20
_MADE_OF = "_made_of"  # suffix of an attribute: a placement that holds if the constants are equal on all ranks, and the constants
LOCAL_IDS = (
    "edge_index holds local node ids of this rank, not ids of the whole graph. For batch.n_id[...] of sources, use "
    "lightning_gnn.gather_halo(batch.n_id)[batch.edge_index[0]], or a conv"
)


_WRITTEN_IDS = (
    "edge_index is changed in place, and holds local node ids of this rank. Make new edges with functions that return "
    "them, such as batch.edge_index[:, chosen] and torch_geometric.utils.add_self_loops"
)


def _changes(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a function changes its first argument in place."""
    return (_is_in_place(func) or bool(kwargs.get("inplace"))) and bool(args) and isinstance(args[0], Tensor)


@cache
def _is_in_place(func: Any) -> bool:
    name = name_of(func)
    if name.endswith("__"):
        is_operator = name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__iter__")
        return is_operator or name == "__setitem__"
    return name.endswith("_")


def name_of(func: Any) -> str:
    """Returns the name of a function, or of the property for a property's getter."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", name)
    return name


def is_count(value: Any) -> bool:
    """Returns whether a value is a number of rows on the axis in use."""
    return isinstance(value, RowCount) and value.rows.ranks.attribute == axis.attribute


def has_counts(args: Any, kwargs: Any) -> bool:
    """Returns whether numbers of rows are among the arguments, or in lists and tuples there."""
    values = (value if isinstance(value, (list, tuple)) else (value,) for value in (*args, *kwargs.values()))
    return any(is_count(each) for value in values for each in value)
