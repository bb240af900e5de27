"""Background threads that prepare batches ahead of use, and copies to the device that overlap with computation.

Source: DistDGL section III-D: sampling and fetching of later batches overlap training of the current batch.
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
"""Batch, and the event after which it is on the device; None if it is on the CPU."""


class Copies:
    """Copies of batches to a device on a separate stream that overlaps with computation.

    If memory cannot be pinned for the device, batches are copied on arrival.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = functions_of(device).Stream(device) if can_pin(device) else None

    def send(self, batch: Graph) -> Sent:
        """Returns the batch on the device, and an event of the copy, which may be in progress; callable from any thread."""
        if self._stream is None:
            return batch, None
        functions = functions_of(self._device)
        with functions.stream(self._stream):  # also selects the device, which a new thread does not inherit
            batch, copied = batch.pin_memory().to(self._device, non_blocking=True), functions.Event()
            copied.record(self._stream)
        return batch, copied

    def receive(self, message: Sent) -> Graph:
        """Returns the batch on the device; the device's stream waits for the copy, the host does not."""
        batch, copied = message
        if copied is None:
            return batch.to(self._device)
        stream = functions_of(self._device).current_stream(self._device)
        stream.wait_event(copied)
        return batch.record_stream(stream)  # otherwise the next copy could reuse its memory once the host releases it


class Background:
    """Daemon thread that runs functions in the order in which they are submitted.

    An executor's thread is not a daemon: after a failure, it could wait for ranks that have ended.

    Args:
        name: name of the thread.
        stops: whether a failed function is the last.
    """

    def __init__(self, name: str, stops: bool = True) -> None:
        self._queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self._stops = stops
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, make: Callable[[], T]) -> Future[T]:
        """Submit a function; returns at once, with the future of its result or exception."""
        future = Future[T]()
        self._queue.put((make, future))
        return future

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            make, future = task
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
                if self._stops:
                    return

    def end(self) -> None:
        """End the thread after all submitted functions."""
        self._queue.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread, at most `seconds`."""
        self._thread.join(seconds)
