"""Where a run on parts of a graph first differs from that of one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_gnn.checks.record import Compared, compared, differing, largest, relative_difference
from lightning_gnn.checks.trial import Outcome

TOLERANCES: dict[torch.dtype | None, float] = {torch.float64: 1e-7, None: 1e-3}
"""Up to which difference numbers are the same: in float64, one node too many of a million is more than that. The dtypes are tried
in this order, None being those of the user: where the user's constants are float32, float64 may not mix with them."""
LOGGED_TOLERANCE = 1e-5
"""Of logged values: torchmetrics computes in float32."""


@dataclass(frozen=True)
class Difference:
    """A place where a run differs from that of one device.

    Attributes:
        group: ``"outputs"``, ``"predictions"``, ``"loss"``, ``"gradients"``, ``"buffers"`` or ``"metrics"``.
        where: what differs, in words that name the layer.
        size: the largest difference, of the largest value.
        name: of the parameter, the buffer or the logged value.
        values: that differ, where the group is ``"outputs"``.
    """

    group: str
    where: str
    size: float
    name: str = ""
    values: Compared | None = None


def first_difference(whole: Outcome, found: Outcome, tolerance: float) -> Difference | None:
    """Returns where `found` first differs from `whole` by more than `tolerance`, in order of time; None if nowhere."""
    return next(differences(whole, found, tolerance), None)


def differences(whole: Outcome, found: Outcome, tolerance: float) -> Iterator[Difference]:
    """Yields all places where `found` differs from `whole` by more than `tolerance`."""
    [(_, events)] = whole.parts
    for each in compared(events, found.parts):
        if each.difference > tolerance:
            yield Difference("outputs", each.event.where, each.difference, values=each)
    for expected, value in zip(whole.ranks[0].predicted, found.ranks[0].predicted):
        alike = value.shape == expected.shape
        size = relative_difference(value, expected, largest(expected)) if alike else float("inf")
        if size > tolerance:
            yield Difference("predictions", "what predict_step returns", size)
    for _, size in differing({"": found.loss}, {"": whole.loss}, tolerance):
        yield Difference("loss", "the loss", size)
    for name, size in list(differing(found.gradients, whole.gradients, tolerance))[::-1]:
        yield Difference("gradients", f"the gradient of '{name}'", size, name)
    for name, size in differing(found.buffers, whole.buffers, tolerance):
        yield Difference("buffers", f"the buffer '{name}'", size, name)
    least = tolerance if tolerance < 0 else max(tolerance, LOGGED_TOLERANCE)
    values = found.ranks[0].logged
    for name, value in whole.ranks[0].logged.items():
        if name in values and not (value.isnan().all() and values[name].isnan().all()):
            for _, size in differing({name: values[name]}, {name: value}, least):  # each is measured against itself
                yield Difference("metrics", f"the logged '{name}'", size, name)
