"""Identifiers of steps and halo exchanges, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

Phase = Literal["train", "validation", "test", "predict"]
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True)
class Step:
    """Position in a run.

    Attributes:
        phase: phase of the step.
        epoch: training epoch, from 0.
        number: steps of this phase before this step, since the call of `fit`, `validate`, `test` or `predict`.
    """

    phase: Phase = "train"
    epoch: int = 0
    number: int = 0


def halo_exchange(layer: str, direction: str) -> str:
    """Returns the name of a layer's halo exchange in errors and watchdog output."""
    return f"Halo exchange ({direction}) of layer '{layer}'"


@dataclass(frozen=True)
class Call:
    """Identifier of one exchange of a step, equal on every rank and in every step that runs the same code.

    Attributes:
        layer: name of the layer in the module.
        index: exchanges that the layer has started before this exchange in the forward passes of this step.
        direction: pass of the exchange; a backward exchange has the index of its forward exchange.
        operation: reduction of values at the owner.
    """

    layer: str
    index: int = 0
    direction: Direction = "forward"
    operation: Literal["sum", "max"] = "sum"

    def backward(self) -> Call:
        """Returns the identifier of the backward exchange."""
        return known_call(self.layer, self.index, "backward", self.operation)

    @cached_property
    def name(self) -> str:
        """Name in errors and watchdog output."""
        return halo_exchange(self.layer, self.direction)


known_call = lru_cache(maxsize=4096)(Call)
"""Returns an exchange identifier, the same object in every step."""
