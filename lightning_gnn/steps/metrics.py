"""torchmetrics over ranks: placeholder rows are not counted, scalars are weighted, and states are sent in one message.

Only this file uses private names of torchmetrics. Tested with torchmetrics 1.9.0 and 1.7.0; `tests/test_private_names.py` checks
that they exist, and that no other file uses any. They are:

- for a metric: its initial states by name (``_defaults``), their reductions (``_reductions``), the number of updates
(``_update_count``), its cached result (``_computed``) and its cached value on the batch (``_forward_cache``);
- the wrapper of ``update`` (``_wrap_update``) and the reduction of states over ranks (``_sync_dist``);
- for a collection: whether two metrics have equal states (``_equal_metric_states``); for a running metric: the number of its
values (``_num_vals_seen``).
"""

from __future__ import annotations

import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain, islice
from numbers import Number
from traceback import walk_stack
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.compute import normalize_logits_if_needed
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import BootStrapper, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_gnn.comm.group import World
from lightning_gnn.nn.patches import Patches
from lightning_gnn.private_lightning import TRAINER
from lightning_gnn.private_torch import MODULES, tree_leaves
from lightning_gnn.rows.graph import GraphRows, place_replicated
from lightning_gnn.rows.mode import active_mode, local_rows, placement_of
from lightning_gnn.rows.placement import REPLICATED
from lightning_gnn.steps.weights import RowWeights

FORWARD = "_forward_cache"
"""Attribute of a metric with its value on the batch."""


class _Current(threading.local):
    """Object of the ranks that the metrics of a thread belong to."""

    metrics: StandInMetrics | None = None


_current = _Current()


class _Watch(TorchFunctionMode):
    """Mode that calls `see` with each torch function that runs in this thread, and with its arguments."""

    def __init__(self, see: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see(func, args)
        return func(*args, **(kwargs or {}))


def _check_default_device() -> None:
    """Raises ValueError for a default device with an index: all ranks would share it, and new metrics could not be detected."""
    seen = list[Any]()
    with _Watch(lambda func, _: seen.append(func)):
        device = torch.get_default_device()
    if not seen:
        raise ValueError(
            f"torch.set_default_device({str(device)!r}) sets the same device on each rank. Remove its number, as in "
            f"torch.set_default_device({device.type!r}), or the call: the Trainer moves modules and batches."
        )


def _see_guess(attributes: dict[str, Any], func: Any, args: Any) -> None:
    """Count the calls in which torchmetrics treats scores as logits, because one is outside of [0, 1], and the other calls."""
    asks = func in (Tensor.ge, Tensor.lt) and sys._getframe(2).f_code is normalize_logits_if_needed.__code__
    if asks and args[0].numel():
        are_logits = ((args[0] < 0) | (args[0] > 1)).any()
        attributes["_guesses"] = attributes["_guesses"] + torch.stack([are_logits, ~are_logits]).long()


@dataclass
class _Forward:
    """Call of a metric in this step; its value, and whether the value covers the rows of all ranks."""

    metric: Metric
    args: tuple[Any, ...]
    options: dict[str, Any]
    value: Any
    is_global: bool


class StandInMetrics:
    """Wrapper of a module's metrics that makes their values cover the rows of all ranks.

    - Many metrics raise an error for an empty update, so a rank without labeled nodes has a placeholder row in its mask. An
    update on this rank with no more rows is skipped.
    - A scalar without a weight in a ``MeanMetric`` or ``SumMetric`` (or a running one) counts as a mean. The mean is over the
    rank's labeled rows in the mask of the stage. ``MaxMetric``, ``MinMetric`` and ``CatMetric`` get the mean of such scalars over
    ranks. ``SumMetric`` adds whole numbers as counts.
    - States of ranks without updates are left out when states are reduced: they may have another form.
    - The value of a metric on a batch covers the rows of all ranks if it is logged, and the local rows otherwise.

    The metrics of the module and of callbacks are wrapped until :meth:`release`, including metrics in lists and dicts.

    Raises:
        ValueError: a ``BootStrapper`` with multinomial sampling, which draws as many rows as a rank has.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        world: World,
        weights: RowWeights,
        callbacks: Sequence[pl.Callback] = (),
        rows: GraphRows | None = None,
    ) -> None:
        self._world, self._weights, self._rows = world, weights, rows
        self._patches = Patches()
        self._updates: list[tuple[Metric, Callable[..., Any]]] = []
        self._new: list[weakref.ref[Metric]] = []
        self._forwards: dict[int, tuple[Tensor, _Forward, int]] = {}
        self._last: dict[int, _Forward] = {}
        self._means: list[tuple[MeanMetric | SumMetric, Tensor, float]] = []
        self._too_early: tuple[str, list[float]] | None = None
        self._running: dict[int, Running] = {}
        self._counts_all = False
        if world.size == 1:
            return
        _check_default_device()
        for metric in metrics_in([module, *callbacks]):
            if isinstance(metric, BootStrapper) and metric.sampling_strategy == "multinomial":
                self.release()
                raise ValueError(
                    "BootStrapper does not support sampling_strategy='multinomial' on ranks: each would draw from its own rows "
                    "only. Use sampling_strategy='poisson', which draws each row independently."
                )
            if isinstance(metric, MetricCollection):
                self._patches.put(metric, {"_equal_metric_states": _equal_states})
            else:
                self._updates.append((metric, metric.update))
                metric.update = self.wrap(metric, _own_update(metric))
        if rows is not None:
            rows.modes[-1].see = self._see_new
        _current.metrics = self

    def release(self) -> None:
        if _current.metrics is self:
            _current.metrics = None
        if self._rows is not None:
            self._rows.modes[-1].see = None
        self._patches.release()
        for metric, update in self._updates:
            metric.update = update  # type: ignore[method-assign]
        for new in [reference() for reference in self._new]:
            if new is not None:
                vars(new).pop("_whole", None)
                new.update = _own_update(new)  # type: ignore[method-assign]
        self._updates, self._new = [], []

    def leave(self) -> None:
        now = self._weights.share
        if self._too_early is not None and self._too_early[1] != self._weights.shares:
            raise ValueError(
                f"{self._too_early[0]} was given a number in a step that returns loss_weight, before the weight of that "
                "number was known. Update it in on_train_batch_end, which receives the output of the step."
            )
        for metric, value, share in self._means:
            if share != now:  # the step returned the weight of its values
                owner, place = self._running.get(id(metric), metric), ""
                if isinstance(owner, Running):  # position of the last value in its window
                    place = f"_{(owner._num_vals_seen - 1) % owner.window}"
                # A number instead of a tensor of the default dtype, for metrics in float64.
                more, is_mean = now - share, isinstance(metric, MeanMetric)
                added = {"mean_value": value * more, "weight": more} if is_mean else {"sum_value": value * more}
                for name in added:
                    setattr(owner, name + place, getattr(owner, name + place) + added[name])
        self.enter()

    def enter(self) -> None:
        self._forwards, self._last, self._means = {}, {}, []
        self._too_early = None
        self._new = [reference for reference in self._new if reference() is not None]

    @property
    def acts(self) -> bool:
        """True if ranks can communicate here; False in copies that a check runs on."""
        return _current.metrics is self and self._world.is_connected

    def _has_others(self, metric: Metric) -> bool:
        """Returns whether states must be reduced over ranks; not if they cover all rows on every rank."""
        own = vars(metric)
        return not own.get("_whole") and (self.acts or own["_available"]())

    @contextmanager
    def _counting_all(self) -> Iterator[None]:
        """Context manager in which updates count all rows, as on one device."""
        self._counts_all = True
        try:
            yield
        finally:
            self._counts_all = False

    def seeing_new(self) -> AbstractContextManager[Any]:
        """Context manager that wraps new metrics, too; under row semantics, their mode does it."""
        return nullcontext() if self._world.size == 1 else _Watch(self._see_new)

    def _see_new(self, func: Any, args: Any) -> None:
        """Wrap the metric under construction that called a torch function: its ``__init__`` requests the default device."""
        if func in (torch.device, torch.tensor) and not torch.compiler.is_compiling():
            for frame, _ in islice(walk_stack(sys._getframe(2)), 8):  # including frames of other modes
                if frame.f_code is Metric.__init__.__code__:
                    metric = frame.f_locals["self"]
                    # Lightning stores logged values in its own metrics.
                    if not type(metric).__module__.startswith("lightning."):
                        self._patches.put(metric, self._wrapping_new(metric))

    def _wrapping_new(self, metric: Metric) -> dict[str, Any]:
        """Returns attributes that wrap `metric`, which is under construction, or its copies, as torchmetrics wraps ``update``."""

        def wrap(of: Metric, update: Callable[..., Any]) -> Callable[..., Any]:
            self._new.append(weakref.ref(of))
            return self.wrap(of, type(of)._wrap_update(of, update))

        return {} if isinstance(metric, WrapperMetric) else {"_wrap_update": MethodType(wrap, metric)}

    def wrap(self, metric: Metric, update: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the methods of a metric; returns the wrapped `update`, which torchmetrics leaves out of copies."""
        # Bound to the metric: a copy has its own bound methods.
        own = vars(metric)
        attributes: dict[str, Any] = {
            "forward": MethodType(lambda of, *args, **options: self._forward(of, args, options), metric),
            "_available": own.get("_available", metric.distributed_available_fn),  # outside of runs
            "distributed_available_fn": MethodType(lambda of: self._has_others(of), metric),
            "_guesses": own.get("_guesses", 0),
            **self._wrapping_new(metric),
        }
        if type(metric)._sync_dist is Metric._sync_dist:
            sync = MethodType(lambda of, *args, **options: self._sync(of, *args, **options), metric)
            attributes["_sync_dist"] = sync
        if self._rows is not None:
            tracked = MethodType(partial(self._compute, self._rows, own.get("compute", metric.compute)), metric)
            attributes["compute"] = tracked
        self._patches.put(metric, attributes)
        if isinstance(metric, Running):
            self._running[id(metric.base_metric)] = metric
        if isinstance(metric, (WrapperMetric, CompositionalMetric)) and not isinstance(metric, BootStrapper):
            return update  # its metrics count; the metrics of a BootStrapper get draws

        @wraps(update)
        def counting(*args: Any, **options: Any) -> None:
            if active_mode() is not None:
                own["_whole"] = True
                _place_states(metric, self._rows)
                update(*args, **options)
            elif self.acts and not self._counts_all:
                if not metric._update_count:
                    own["_guesses"] = 0
                    own.pop("_whole", None)
                with _Watch(partial(_see_guess, own)):
                    self._update(metric, update, args, options)
            else:
                update(*args, **options)

        return counting

    def _update(self, metric: Metric, update: Callable[..., Any], args: Any, options: Any) -> None:
        value = args[0] if args else options.get("value")
        if not _is_scalar(value):
            if self._stands_in((*args, *options.values())):
                _skip(metric)
            else:
                update(*args, **options)
        elif isinstance(metric, MeanMetric):
            self._update_mean(metric, update, value, args[1] if len(args) > 1 else options.get("weight"))
        elif isinstance(metric, (MaxMetric, MinMetric, CatMetric)):
            value = self._mean(metric, value)
            if isinstance(metric, CatMetric) and self._world.rank:
                _skip(metric)
            else:
                update(value)
        elif isinstance(metric, SumMetric) and not float(value).is_integer():
            self._update_share(metric, update, value)
        elif isinstance(metric, SumMetric) and abs(float(value)) <= self._weights.stand_ins:
            _skip(metric)
        else:
            update(*args, **options)

    def _update_mean(self, metric: MeanMetric, update: Callable[..., Any], value: Any, weight: Any) -> None:
        stand_ins = self._weights.stand_ins
        if weight is not None and stand_ins and _is_scalar(weight) and float(weight) <= stand_ins:
            _skip(metric)
        elif weight is not None:
            update(value, weight)
        elif metric.nan_strategy == "disable":
            update(self._mean(metric, value))  # it ignores weights
        else:
            self._update_share(metric, update, value)

    def _update_share(self, metric: MeanMetric | SumMetric, update: Callable[..., Any], value: Any) -> None:
        """Update with this rank's share as weight: the weights of all ranks add up to 1, the weight on one device."""
        share = self._weights.share
        if self._weights.in_step:
            self._means.append((metric, torch.as_tensor(value).detach(), share))
        if not share:
            _skip(metric)
        elif isinstance(metric, MeanMetric):
            update(value, share)
        else:
            update(value * share)

    def _mean(self, metric: Metric, value: Any) -> Tensor:
        if self._weights.in_step:
            self._too_early = type(metric).__name__, self._weights.shares
        value = torch.as_tensor(value, dtype=torch.float64, device=self._world.device)
        return self._weights.mean(value, f"A value for {type(metric).__name__}")

    def _stands_in(self, values: Sequence[Any]) -> bool:
        """Returns whether the arguments of a metric have only placeholder rows, or none."""
        rows = next((each.size(0) for each in values if isinstance(each, Tensor) and each.dim()), None)
        return rows is not None and rows <= self._weights.stand_ins

    def _forward(self, metric: Metric, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        forward = MethodType(type(metric).forward, metric)
        if active_mode() is not None or not self.acts or self._counts_all:
            return forward(*args, **options)
        counts_itself = not isinstance(metric, (WrapperMetric, CompositionalMetric))
        if counts_itself and not metric.dist_sync_on_step and self._stands_in((*args, *options.values())):
            # The value has the form that it has on other ranks, with weight 0.
            with self._counting_all(), begun_anew([metric]):
                value = forward(*args, **options)
            _skip(metric)
            setattr(metric, FORWARD, value)
        else:
            attributes = vars(metric)
            guesses = attributes["_guesses"] if metric._update_count else 0
            value = forward(*args, **options)
            attributes["_guesses"] = attributes["_guesses"] + guesses  # forward resets the metric, then adds the earlier state
        is_global = all(each.dist_sync_on_step for each in _parts(metric))
        self._last[id(metric)] = call = _Forward(metric, args, options, value, is_global)
        for number, leaf in enumerate(tree_leaves(value)):
            if isinstance(leaf, Tensor):
                self._forwards[id(leaf)] = leaf, call, number
        return value

    def make_global(self, value: Any) -> Any:
        """Returns `value`; if a metric returned it in this step, the value over the rows of all ranks. Collective."""
        if id(value) not in self._forwards:
            return value
        _, call, place = self._forwards[id(value)]
        return tree_leaves(self._global_value(call))[place]

    def make_forward_global(self, metric: Metric) -> None:
        """Replace a metric's cached value on the batch by the value over the rows of all ranks. Collective."""
        call = self._last.get(id(metric))
        if call is not None and getattr(metric, FORWARD) is not None:
            setattr(metric, FORWARD, self._global_value(call))

    def _global_value(self, call: _Forward) -> Any:
        """Returns the result of a call whose states are reduced over ranks in the call, as in later calls."""
        if not call.is_global:
            parts = _parts(call.metric)
            for each in parts:
                self._patches.put(each, {"dist_sync_on_step": True})
            with begun_anew(parts):
                call.value, call.is_global = call.metric(*call.args, **call.options), True
        return call.value

    def _compute(self, rows: GraphRows, compute: Callable[..., Any], metric: Metric, *args: Any, **options: Any) -> Any:
        """Returns the value of a metric, whose states may have one row per local node."""
        _place_states(metric, rows)
        is_open = active_mode() is not None or not vars(metric).get("_whole")
        with nullcontext() if is_open else rows.activate():
            return compute(*args, **options)

    def _sync(self, metric: Metric, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        """Reduce states as torchmetrics does, but in one message, and without ranks that have no updates."""
        if not self.acts or dist_sync_fn is not gather_all_tensors or process_group or metric.process_group:
            Metric._sync_dist(metric, dist_sync_fn, process_group)
            return
        with local_rows():
            ranks = states_of_ranks(metric, self._world)
            for name, reduce in metric._reductions.items():
                joined: Any = [states[name] for states in ranks]
                joined = list(chain(*joined)) if isinstance(metric._defaults[name], list) else torch.stack(joined)
                setattr(metric, name, reduce(joined) if callable(reduce) and len(joined) else joined)
        _place_states(metric, self._rows)


def _place_states(metric: Metric, rows: GraphRows | None) -> None:
    """Mark states that a metric reset outside of steps as replicated."""
    for name in metric._defaults:
        state = getattr(metric, name)
        if isinstance(state, Tensor):
            place_replicated(state, rows)


def _own_update(metric: Metric) -> Callable[..., Any]:
    """Returns the unwrapped `update` of a metric."""
    return type(metric)._wrap_update(metric, MethodType(type(metric).update, metric))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.dim() == 0)


def _skip(metric: Metric) -> None:
    metric._update_count += 1  # counts as updated, so that compute() does not warn
    metric._computed = None


def _parts(metric: Metric) -> list[Metric]:
    return [each for each in metric.modules() if isinstance(each, Metric)]


def _equal_states(first: Metric, second: Metric) -> bool:
    """Returns whether states are equal, as in torchmetrics, which merges such metrics for good; False without updates."""
    return not is_new(first) and MetricCollection._equal_metric_states(first, second)


_Form = tuple[torch.dtype, tuple[int, ...]]

_MOST_KEPT = 100_000
"""Maximal number of objects that are searched for metrics."""

_LIBRARIES = {"builtins", "lightning", "lightning_gnn", "numpy", "pytorch_lightning", "torch", "torch_geometric", "weakref"}

_NOT_KEPT = {TRAINER, "_defaults", *vars(torch.nn.Module())} - {MODULES}
"""Attributes of a module that contain no metrics."""


_GUESSED = (
    "{0} treats its scores as logits if one of a call is outside 0 to 1. Ranks {1} treated theirs as probabilities, other ranks "
    "as logits. Pass probabilities: metric.update(out[mask].softmax(-1), y[mask]), or sigmoid()."
)


def states_of_ranks(metric: Metric, world: World) -> list[dict[str, Any]]:
    """Returns the states of the ranks with updates, or of all ranks if no rank has any.

    Raises:
        ValueError: in the same calls, some ranks treated scores as logits and others as probabilities.
    """
    states = {name: getattr(metric, name) for name in metric._reductions}
    for name, reduce in metric._reductions.items():
        if reduce is dim_zero_cat and isinstance(states[name], list) and states[name]:
            states[name] = [dim_zero_cat(states[name])]
    parts = {name: state if isinstance(state, list) else [state] for name, state in states.items()}
    form = {name: [(each.dtype, tuple(each.shape)) for each in part] for name, part in parts.items()}
    raw = [each.detach().to(world.device).reshape(-1).view(torch.uint8) for each in chain(*parts.values())]
    packed = torch.cat([*raw, torch.empty(0, dtype=torch.uint8, device=world.device)])
    operation = f"States of {type(metric).__name__}"
    own = torch.tensor([zlib.crc32(repr(form).encode()), is_new(metric), 0, 0], dtype=torch.int64, device=world.device)
    own[2:] += getattr(metric, "_guesses", 0)
    digests, new, logits, probabilities = world.all_gather(own, operation).cpu().unbind(1)
    if probabilities.any() and (logits[(logits + probabilities) > 0].unique().numel()) > 1:
        raise ValueError(_GUESSED.format(type(metric).__name__, probabilities.nonzero().view(-1).tolist()))
    if bool((digests == digests[0]).all()):
        forms = [form] * world.size
        pieces: Sequence[Tensor] = world.all_gather(packed, operation).unbind(0)
    else:
        forms = world.all_gather_object(form)
        sizes = [sum(_num_bytes(each) for each in chain(*of.values())) for of in forms]
        pieces = world.all_gather_rows(packed, sizes).split(sizes)
    found = [_unpack_states(piece, form_of, metric) for piece, form_of in zip(pieces, forms)]
    return [states for states, nothing in zip(found, new.tolist()) if not nothing] or found


def _unpack_states(packed: Tensor, form: dict[str, list[_Form]], metric: Metric) -> dict[str, Any]:
    """Returns states from their bytes."""
    raw = iter(packed.split([_num_bytes(each) for each in chain(*form.values())]))
    states: dict[str, Any] = {}
    for name, parts in form.items():
        # Copies, for the alignment of the dtype.
        tensors = [next(raw).clone().view(dtype).view(shape).to(metric.device) for dtype, shape in parts]
        states[name] = tensors if isinstance(metric._defaults[name], list) else tensors[0]
    return states


def _num_bytes(form: _Form) -> int:
    dtype, shape = form
    return dtype.itemsize * torch.Size(shape).numel()


def states_across_epochs(metrics: Sequence[Metric]) -> list[dict[str, Any] | None]:
    """Returns the states of metrics that were not reset after an epoch, equal on all ranks; None for other metrics.

    Raises:
        ValueError: such a metric has a state of its own on each rank.
    """
    found = list[dict[str, Any] | None]()
    for metric in metrics:
        states = {name: getattr(metric, name) for name in metric._defaults} if metric._update_count else None
        if states and not is_new(metric):
            leaves = tree_leaves(states)
            if not vars(metric).get("_whole") or any(each.dim() and placement_of(each) != REPLICATED for each in leaves):
                raise ValueError(
                    f"{type(metric).__name__} was not reset after the last epoch, and its state differs between ranks, so it "
                    "would be lost with a rank. Call its reset() in on_train_epoch_end or on_validation_epoch_end, pass the "
                    "metric itself to self.log, which resets it, or set elastic=False."
                )
            states |= {"_update_count": metric._update_count}
        found.append(states)
    return found


def set_states(metrics: Sequence[Metric], states: Sequence[dict[str, Any] | None]) -> None:
    """Reset metrics, and set the result of :func:`states_across_epochs`."""
    for metric, kept in zip(metrics, states):
        metric.reset()
        vars(metric).pop("_whole", None)
        for name, value in (kept or {}).items():
            setattr(metric, name, value)
            vars(metric)["_whole"] = True


@contextmanager
def begun_anew(metrics: Sequence[Metric]) -> Iterator[None]:
    """Context manager in which metrics have initial states; restores their states at the end."""
    # No copies: states may be part of an autograd graph.
    before = [dict(vars(metric)) for metric in metrics]
    for metric in metrics:
        for name, default in metric._defaults.items():
            setattr(metric, name, [] if isinstance(default, list) else default.clone().to(metric.device))
        metric._update_count, metric._computed = 0, None
    try:
        yield
    finally:
        for metric, known in zip(metrics, before):
            vars(metric).clear()
            vars(metric).update(known)


def is_new(metric: Metric) -> bool:
    """Returns whether a metric has its initial states."""
    states = [(getattr(metric, name), default) for name, default in metric._defaults.items()]
    return all(
        not state if isinstance(default, list) else isinstance(state, Tensor) and torch.equal(state, default.to(state))
        for state, default in states
    )


def metrics_in(roots: Sequence[Any]) -> Iterator[Any]:
    """Yields the metrics and collections of modules and callbacks once each, including parts, lists and objects."""
    seen: set[int] = set()
    waiting = list(reversed(roots))
    while waiting and len(seen) < _MOST_KEPT:
        value = waiting.pop()
        if id(value) in seen:
            continue
        if isinstance(value, (list, tuple, dict)):
            inside: Sequence[Any] = list(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, torch.nn.Module) or (hasattr(value, "__dict__") and _is_of_user(type(value))):
            if isinstance(value, (Metric, MetricCollection)):
                yield value
            inside = [each for name, each in vars(value).items() if name not in _NOT_KEPT]
        else:
            continue
        seen.add(id(value))
        waiting += reversed(inside[:_MOST_KEPT])


def _is_of_user(kind: type) -> bool:
    """Returns whether objects of a class may contain metrics: callbacks, and classes outside of the libraries."""
    is_callback = issubclass(kind, pl.Callback)
    return is_callback or (kind.__module__.partition(".")[0] not in _LIBRARIES and not issubclass(kind, type))
