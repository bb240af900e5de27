"""Where a run is, and which of its exchanges one is: alike on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

Phase = Literal["train", "validation", "test", "predict"]
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True)
class Step:
    """Where a run is.

    Attributes:
        phase: what the step is for.
        epoch: of the training, from 0.
        number: steps of this phase before this one, since `fit`, `validate`, `test` or `predict` was called.
    """

    phase: Phase = "train"
    epoch: int = 0
    number: int = 0


def halo_exchange(layer: str, direction: str) -> str:
    """Returns what the exchange of a layer's rows is called, in errors and by the watchdog."""
    return f"Halo exchange ({direction}) of layer '{layer}'"


@dataclass(frozen=True)
class Call:
    """One exchange of a step, the same on every rank and in every step that runs the same code.

    Attributes:
        layer: whose rows travel: its name in the module.
        index: how many exchanges the layer has begun in the forward passes of this step before this one.
        direction: the pass that it belongs to; that of the backward has the index of its forward.
        operation: how rows that meet at their owner become one.
    """

    layer: str
    index: int = 0
    direction: Direction = "forward"
    operation: Literal["sum", "max"] = "sum"

    def backward(self) -> Call:
        """Returns the exchange of the backward pass."""
        return known_call(self.layer, self.index, "backward", self.operation)

    @cached_property
    def name(self) -> str:
        """What it is called in errors and by the watchdog."""
        return halo_exchange(self.layer, self.direction)


known_call = lru_cache(maxsize=4096)(Call)
"""Returns a call, the same object in every step."""
