"""Where a run on parts of a graph first differs from that of one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_gnn.checks.record import compared, differing, largest, relative_difference
from lightning_gnn.checks.trial import Outcome, Parted

TOLERANCES: dict[torch.dtype | None, float] = {torch.float64: 1e-7, None: 1e-3}
"""Up to which difference numbers are the same: in float64, one node too many of a million is more than that. The dtypes are tried
in this order, None being those of the user: where the user's constants are float32, float64 may not mix with them."""
LOGGED_TOLERANCE = 1e-5
"""Of logged values: torchmetrics computes in float32."""
STATE = (
    "Run a second time on the same graph with the same seeds, one device gives something else: the module keeps "
    "something outside of its parameters and buffers, such as a count or the last output"
)
UNKNOWN = (
    "Its code computes something that is not followed, such as the backward of a torch.autograd.Function, or uses the "
    "number of ranks, as in loss / self.trainer.world_size: leave that out, a loss is that of all ranks. Compare a few "
    "epochs with devices=1, or use functions of torch"
)


@dataclass(frozen=True)
class Difference:
    """A place where a run differs from that of one device.

    Attributes:
        group: ``"outputs"``, ``"predictions"``, ``"loss"``, ``"gradients"``, ``"buffers"`` or ``"metrics"``.
        where: what differs, in words that name the layer.
        size: the largest difference, of the largest value.
        name: of the parameter, the buffer or the logged value.
    """

    group: str
    where: str
    size: float
    name: str = ""


@dataclass(frozen=True)
class Finding:
    """Where a run differs from that of one device.

    Attributes:
        step: the module's method.
        where: what differs first, in words that name the layer.
        difference: the largest, of the largest value; None where the run ended there.
        why: what makes it differ, and what to do.
    """

    step: str
    where: str
    difference: float | None
    why: str

    @classmethod
    def of_error(cls, error: Parted, step: str) -> Finding:
        """Returns the finding of a run on parts that ended before its time."""
        return cls(step, f"on a part of the graph, {error}", None, str(error.__cause__ or error))

    @property
    def what(self) -> str:
        """What differs, and by how much."""
        if self.difference is None:
            return self.where
        return f"{self.where} differs by {self.difference:.1e} of the largest value"

    def __str__(self) -> str:
        return f"{self.step}: {self.what}. {self.why}"


def first_difference(whole: Outcome, found: Outcome, tolerance: float) -> Difference | None:
    """Returns where `found` first differs from `whole` by more than `tolerance`, in order of time; None if nowhere."""
    return next(differences(whole, found, tolerance), None)


def differences(whole: Outcome, found: Outcome, tolerance: float) -> Iterator[Difference]:
    """Yields all places where `found` differs from `whole` by more than `tolerance`."""
    for event, size in compared(whole.ranks[0].events, [each.events for each in found.ranks]):
        if size > tolerance:
            yield Difference("outputs", event.where, size)
    for expected, value in zip(whole.ranks[0].predicted, found.ranks[0].predicted):
        alike = value.shape == expected.shape
        size = relative_difference(value, expected, largest(expected)) if alike else float("inf")
        if size > tolerance:
            yield Difference("predictions", "what predict_step returns", size)
    for _, size in differing({"": found.loss}, {"": whole.loss}, tolerance):
        yield Difference("loss", "the loss", size)
    for name, size in list(differing(found.gradients, whole.gradients, tolerance))[::-1]:
        yield Difference("gradients", f"the gradient of '{name}'", size, name)
    usual = max((largest(event.value) for event in whole.ranks[0].events), default=0.0)
    for name, size in differing(found.buffers, whole.buffers, tolerance, usual):
        yield Difference("buffers", f"the buffer '{name}'", size, name)
    least = tolerance if tolerance < 0 else max(tolerance, LOGGED_TOLERANCE)
    values = found.ranks[0].logged
    for name, value in whole.ranks[0].logged.items():
        if name in values and not (value.isnan().all() and values[name].isnan().all()):
            for _, size in differing({name: values[name]}, {name: value}, least):  # each is measured against itself
                yield Difference("metrics", f"the logged '{name}'", size, name)
