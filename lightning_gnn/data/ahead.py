"""Batches that are made by threads, ahead of who takes them, and copied to the device while it computes.

Source: DistDGL section III-D: sampling and fetching of later batches overlap training of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import torch

from lightning_gnn.data.shards import Graph
from lightning_gnn.devices import can_pin, functions_of

T = TypeVar("T")

Sent: TypeAlias = tuple[Graph, Any]
"""A batch, and the event after which it is on the device; None: it is on the CPU."""


class Copies:
    """Copies batches to a device on a stream of its own, while the device computes, where memory can be pinned for it; elsewhere
    when they arrive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = functions_of(device).Stream(device) if can_pin(device) else None

    def send(self, batch: Graph) -> Sent:
        """Returns the batch on the device, where the copy may be under way; from any thread."""
        if self._stream is None:
            return batch, None
        functions = functions_of(self._device)
        with functions.stream(self._stream):  # and so on its device, which is not a new thread's own
            batch, copied = batch.pin_memory().to(self._device, non_blocking=True), functions.Event()
            copied.record(self._stream)
        return batch, copied

    def arrived(self, sent: Sent) -> Graph:
        """Returns the batch on the device: what the device does next waits for the copy, the host does not."""
        batch, copied = sent
        if copied is None:
            return batch.to(self._device)
        stream = functions_of(self._device).current_stream(self._device)
        stream.wait_event(copied)
        return batch.record_stream(stream)  # else its memory is the next copy's as soon as the host lets it go


class Background:
    """A thread that runs functions, one after the other, in the order in which they are begun.

    It is a daemon, which an executor's thread is not: after a failure it may wait for ranks that are gone.

    Args:
        stops: none is run after one that failed.
    """

    def __init__(self, name: str, stops: bool = True) -> None:
        self._begun = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self._stops = stops
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, make: Callable[[], T]) -> Future[T]:
        """Has a function run; returns at once, with the future of what it returns or raises."""
        made = Future[T]()
        self._begun.put((make, made))
        return made

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            make, made = begun
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
                if self._stops:
                    return

    def end(self) -> None:
        """Takes no more; what was begun is run."""
        self._begun.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Returns once it has come to its end, or after so many seconds."""
        self._thread.join(seconds)
