"""Bytes and seconds of graph traffic, counted once, by the sender."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.profiler import record_function

from lightning_gnn.devices import functions_of
from lightning_gnn.private_torch import profiler_is_on


@dataclass
class Traffic:
    """Traffic and waiting time of one rank; supports ``+`` and ``-``."""

    bytes_sent: int = 0
    """Payload bytes passed to the transport."""
    messages: int = 0
    """Messages sent to other ranks."""
    rows: int = 0
    """Node rows sent to other ranks."""
    seconds: float = 0.0
    """Wall seconds spent in packing, sending and waiting, without communication that computation hides."""
    to: Mapping[int, int] = field(default_factory=dict)
    """Bytes for each rank; without rows in memory that all ranks read."""

    def __add__(self, other: Traffic, sign: int = 1) -> Traffic:
        to = dict(self.to)
        for peer, count in other.to.items():
            to[peer] = to.get(peer, 0) + sign * count
        return Traffic(
            self.bytes_sent + sign * other.bytes_sent,
            self.messages + sign * other.messages,
            self.rows + sign * other.rows,
            self.seconds + sign * other.seconds,
            to,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return self.__add__(other, -1)


ByLayer: TypeAlias = Mapping[tuple[str, str], Traffic]
"""Traffic of one rank by (layer, direction)."""


def span(*words: str) -> AbstractContextManager[Any]:
    """Returns a context manager of a profiler span named by these words; without an active profiler, a no-op."""
    return record_function(" ".join(words)) if profiler_is_on() else nullcontext()


@dataclass(frozen=True)
class Moment:
    """Time on the host clock and, on a device, an event at the end of its queue.

    Attributes:
        span: profiler span that began at this time; None without an active profiler.
    """

    host: float
    device: Any = None
    span: AbstractContextManager[Any] | None = None

    @classmethod
    def now(cls, device: torch.device, word: str = "", layer: str = "", direction: str = "") -> Moment:
        """Returns the current time; does not wait for the device.

        Args:
            device: device of the rank.
            word: first word of a span that begins now: ``"send"`` for packing and starting messages, ``"wait"`` for waiting for
                messages and unpacking them. Empty for no span.
            layer, direction: layer and direction of the exchange.
        """
        opened = None
        if word and profiler_is_on():
            opened = span(word, layer, direction)
            opened.__enter__()
        return cls(time.perf_counter(), None if device.type == "cpu" else _event(device), opened)


def _event(device: torch.device) -> Any:
    """Returns a recorded event at the end of a device's current stream."""
    functions = functions_of(device)
    event = functions.Event(enable_timing=True)
    event.record(functions.current_stream(device))
    return event


@dataclass
class Meter:
    """Traffic of one rank by (layer, direction); direction is ``"forward"`` or ``"backward"``."""

    counted: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    _on_device: list[tuple[tuple[str, str], Any, Any]] = field(default_factory=list)
    """Device intervals that have not been read: layer and direction, start event, end event."""

    @property
    def by_layer(self) -> dict[tuple[str, str], Traffic]:
        """Recorded traffic; waits for a device with unread intervals."""
        for key, began, ended in self._on_device:
            ended.synchronize()
            self.record(*key, Traffic(seconds=began.elapsed_time(ended) / 1e3))
        self._on_device = []
        return self.counted

    def record(self, layer: str, direction: str, traffic: Traffic) -> None:
        """Add `traffic` to the traffic of a layer and direction."""
        known = self.counted.get((layer, direction))
        self.counted[layer, direction] = traffic if known is None else known + traffic

    def since(self, began: Moment, device: torch.device, layer: str, direction: str) -> float:
        """Returns the seconds since `began` on the CPU, and 0 on a device, whose time is counted later.

        Ends the span of `began`.
        """
        seconds = time.perf_counter() - began.host
        if began.device is not None:
            seconds = 0.0
            self._on_device.append(((layer, direction), began.device, _event(device)))
        if began.span is not None:
            began.span.__exit__(None, None, None)
        return seconds

    def total(self) -> Traffic:
        """Returns the sum over layers and directions."""
        return sum(self.by_layer.values(), Traffic())

    def take(self) -> dict[tuple[str, str], Traffic]:
        """Returns the traffic since the last call and resets it."""
        taken, self.counted = self.by_layer, {}
        return taken
