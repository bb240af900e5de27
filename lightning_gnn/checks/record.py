"""Recorded outputs of a model's modules, and differences between two runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gnn.private_torch import graph_task, tree_leaves
from lightning_gnn.rows import active_mode, gather_global, placement_of

TOLERANCES: dict[torch.dtype | None, float] = {torch.float64: 1e-7, None: 1e-3}
"""Maximal relative difference of equal results by dtype, in the order in which dtypes are tried.

In float64, a difference of one node in a million is larger. None stands for the dtypes of the user: float64 may not combine with
float32 constants of the user.
"""
LOGGED_TOLERANCE = 1e-5
"""Tolerance of logged values: torchmetrics computes in float32."""
STATE = (
    "A second run on one device, with the same graph and seeds, returned other values: the module keeps state outside "
    "of its parameters and buffers, such as a count or the last output"
)
UNKNOWN = (
    "Its code uses a function without a row rule, such as the backward of a torch.autograd.Function, or the number of "
    "ranks, as in loss / self.trainer.world_size. Use functions of torch, and remove the number of ranks: a loss covers "
    "all ranks. Or compare a few epochs with devices=1"
)


@dataclass(frozen=True)
class Event:
    """Tensor of the whole graph that a module, or a step, returned.

    Attributes:
        where: description of the source.
        key: key that is equal in runs of copies of one model.
        value: the tensor.
    """

    where: str
    key: tuple[Any, ...]
    value: Tensor


@dataclass
class OnRank:
    """Run of the step on one rank.

    Attributes:
        events: outputs of its modules, in order of time.
        loss: loss of the whole graph.
        logged: values by name, at the end of the epoch.
        predicted: combined output of ``predict_step``; empty if it is unknown.
    """

    events: Sequence[Event]
    loss: Tensor | None = None
    logged: Mapping[str, Tensor] = field(default_factory=dict)
    predicted: Sequence[Tensor] = ()


@dataclass
class Outcome:
    """Run of the step on all ranks."""

    ranks: Sequence[OnRank]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]

    @property
    def loss(self) -> Tensor | None:
        loss = self.ranks[0].loss
        return None if loss is None else loss.detach().double()


class Parted(Exception):
    """Raised if a run on parts fails; the message has place and reason, `__cause__` is the error."""


class Recorder:
    """Records the floating-point tensors that the modules of a model return, in order of time; its hooks stay.

    On a rank, rows are gathered from all ranks. Outputs inside layers that communicate themselves are omitted, and outputs of
    unknown placement. A recorder that is not `active` only tracks the running module.
    """

    def __init__(self, module: torch.nn.Module, on_rank: bool, active: bool = True) -> None:
        self.events: list[Event] = []
        self._on_rank, self._active = on_rank, active
        # Running calls: description of the module, key, and number of calls of its modules by name.
        self._calls: list[tuple[str, tuple[Any, ...], Counter[str]]] = [("", (), Counter())]
        for name, child in module.named_modules():
            # States of a metric are not outputs of the model.
            if child is not module and not isinstance(child, Metric):
                child.register_forward_pre_hook(self._before(name, child))
                child.register_forward_hook(self._after)

    @property
    def inside(self) -> str | None:
        """Description of the innermost running module; None outside of modules."""
        return self._calls[-1][0] or None

    def _before(self, name: str, child: torch.nn.Module) -> Any:
        def hook(*_: Any) -> None:
            if _in_backward():
                return
            call, made = self._calls[-1][1:]
            made[name] += 1
            self._calls.append((f"'{name}' ({type(child).__name__})", (*call, name, made[name]), Counter()))

        return hook

    def _after(self, _: Any, args: Any, output: Any) -> None:
        if _in_backward():
            return
        who, key = self._calls.pop()[:2]
        self.record(f"the output of {who}", key, output)

    def record(self, where: str, key: tuple[Any, ...], values: Any, whole_numbers: bool = False) -> None:
        """Record the floating-point tensors in `values`, with `whole_numbers` integer and boolean tensors too."""
        if not self._active or (self._on_rank and active_mode() is None):
            return
        for index, value in enumerate(tree_leaves(values)):
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_complex():
                continue
            if not (value.is_floating_point() or whole_numbers) or (self._on_rank and placement_of(value) is None):
                continue
            with torch.no_grad():
                whole = gather_global(value.detach())
            self.events.append(Event(where, (*key, index), whole.clone()))


def _in_backward() -> bool:
    """Returns whether the module runs in a backward pass, as in checkpoints, which may stop before a module returns."""
    return graph_task() != -1


def compare_events(whole: Sequence[Event], ranks: Sequence[Sequence[Event]]) -> Iterator[tuple[Event, float]]:
    """Yields the events of the whole run that ranks recorded too, in order, with the maximal difference on any rank."""
    found = [{event.key: event.value for event in events} for events in ranks]
    floor = _floor([event.value for event in whole])
    for event in whole:
        values = [each[event.key] for each in found if event.key in each]
        size = max(largest(event.value), floor)
        alike = [each for each in values if each.shape == event.value.shape]
        if len(alike) < len(values):
            yield event, float("inf")
        elif values:
            yield event, max(relative_difference(each, event.value, size) for each in values)


# Values that cancel out, such as the gradient of a bias before a norm, consist of rounding errors. Values below this share of the
# largest value are compared relative to that share: in float64, and in coarser dtypes.
_FLOOR, _COARSE_FLOOR = 1e-6, 1e-2


def _floor(values: Sequence[Tensor]) -> float:
    """Returns the minimal reference size of differences."""
    is_coarse = any(value.is_floating_point() and value.dtype != torch.float64 for value in values)
    return (_COARSE_FLOOR if is_coarse else _FLOOR) * max(map(largest, values), default=0.0)


def largest(values: Tensor) -> float:
    """Returns the largest finite magnitude, 0 if there is none."""
    finite = values[values.isfinite()].double()
    return float(finite.abs().max()) if finite.numel() else 0.0


def relative_difference(actual: Tensor, expected: Tensor, size: float) -> float:
    """Returns the maximal absolute difference over `size`; infinite if only one tensor is finite at some position."""
    actual, expected = actual.double(), expected.double()
    difference = float((actual - expected).abs().max()) if actual.numel() else 0.0
    if not math.isfinite(difference):
        finite = expected.isfinite()
        if not torch.equal(finite, actual.isfinite()):
            return float("inf")
        difference = largest(actual[finite] - expected[finite])
    return difference / (size or 1.0)


def differing(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float, usual: float = 0.0
) -> Iterator[tuple[str, float]]:
    """Yields names and differences of floating-point tensors that differ; None counts as zeros.

    `usual` is a typical magnitude of values.
    """
    floor = max(_floor([value for value in expected.values() if value is not None]), _FLOOR * usual)
    for name, reference in expected.items():
        value = actual.get(name)
        if reference is None and value is None:
            continue
        value = torch.zeros_like(reference) if value is None else value  # type: ignore[arg-type]
        reference = torch.zeros_like(value) if reference is None else reference
        if value.shape == reference.shape and value.is_floating_point():
            difference = relative_difference(value, reference, max(largest(reference), floor))
            if difference > tolerance:
                yield name, difference


@dataclass(frozen=True)
class Difference:
    """Difference between a run and the run of one device.

    Attributes:
        group: ``"outputs"``, ``"predictions"``, ``"loss"``, ``"gradients"``, ``"buffers"`` or ``"metrics"``.
        where: description of the value, with the name of the layer.
        size: maximal difference, relative to the largest value.
        name: name of the parameter, the buffer or the logged value.
    """

    group: str
    where: str
    size: float
    name: str = ""


@dataclass(frozen=True)
class Finding:
    """First difference between a run and the run of one device.

    Attributes:
        step: method of the module.
        where: description of the first value that differs, with the name of the layer.
        difference: maximal difference, relative to the largest value; None if the run failed there.
        why: cause and fix.
    """

    step: str
    where: str
    difference: float | None
    why: str

    @classmethod
    def from_error(cls, error: Parted, step: str) -> Finding:
        """Returns the finding for a run on parts that failed."""
        return cls(step, f"on a part of the graph, {error}", None, str(error.__cause__ or error))

    @property
    def description(self) -> str:
        """Description of the difference and its size."""
        if self.difference is None:
            return self.where
        return f"{self.where} differs by {self.difference:.1e} of the largest value"

    def __str__(self) -> str:
        return f"{self.step}: {self.description}. {self.why}"


def first_difference(whole: Outcome, parts: Outcome, tolerance: float) -> Difference | None:
    """Returns the first difference between `parts` and `whole` above `tolerance`, in order of time; None if there is none."""
    return next(differences(whole, parts, tolerance), None)


def differences(whole: Outcome, parts: Outcome, tolerance: float) -> Iterator[Difference]:
    """Yields all differences between `parts` and `whole` above `tolerance`."""
    for event, size in compare_events(whole.ranks[0].events, [each.events for each in parts.ranks]):
        if size > tolerance:
            yield Difference("outputs", event.where, size)
    for expected, value in zip(whole.ranks[0].predicted, parts.ranks[0].predicted):
        alike = value.shape == expected.shape
        size = relative_difference(value, expected, largest(expected)) if alike else float("inf")
        if size > tolerance:
            yield Difference("predictions", "the output of predict_step", size)
    for _, size in differing({"": parts.loss}, {"": whole.loss}, tolerance):
        yield Difference("loss", "the loss", size)
    for name, size in list(differing(parts.gradients, whole.gradients, tolerance))[::-1]:
        yield Difference("gradients", f"the gradient of '{name}'", size, name)
    usual = max((largest(event.value) for event in whole.ranks[0].events), default=0.0)
    for name, size in differing(parts.buffers, whole.buffers, tolerance, usual):
        yield Difference("buffers", f"the buffer '{name}'", size, name)
    least = tolerance if tolerance < 0 else max(tolerance, LOGGED_TOLERANCE)
    values = parts.ranks[0].logged
    for name, value in whole.ranks[0].logged.items():
        if name in values and not (value.isnan().all() and values[name].isnan().all()):
            for _, size in differing({name: values[name]}, {name: value}, least):  # relative to the value itself
                yield Difference("metrics", f"the logged '{name}'", size, name)
