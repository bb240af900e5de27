"""Ranks as threads of one process: one runs at a time, until it must wait for another.

All schemes run on it unchanged, without process groups. The self-check uses it.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Step
from lightning_gnn.comm.group import World
from lightning_gnn.comm.transport import Receive, Transport, UpTo
from lightning_gnn.comm.watchdog import PeerError, Watchdog
from lightning_gnn.registry import wrap_transport

T = TypeVar("T")


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Context manager that restores the random states of Python, numpy and torch."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (what users draw from)
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        torch.set_rng_state(state[2])


class Meeting:
    """Mailboxes and scheduler of threads that simulate ranks.

    One thread runs at a time, so code that is not thread-safe is safe. Each rank keeps its own random state across waits.

    Args:
        size: number of ranks.

    Attributes:
        observer: function called with the sender and each message, in the sender's thread.
    """

    observer: Callable[[int, Any], None] | None = None

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Condition()
        self._mail: dict[tuple[int, int], deque[Any]] = {(a, b): deque() for a in range(size) for b in range(size)}
        self._waits_for: dict[int, int] = {}
        self._alive = set(range(size))

    def run(self, work: Callable[[int], T]) -> list[T | BaseException]:
        """Returns the result or exception of ``work(rank)`` for each rank, each in its own thread."""
        results: list[Any] = [None] * self.size

        def run_rank(rank: int) -> None:
            with self._turn:
                try:
                    with kept_random_state():
                        results[rank] = work(rank)
                except BaseException as error:
                    results[rank] = error
                finally:
                    self._alive.discard(rank)
                    self._turn.notify_all()

        threads = [threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def post(self, sender: int, receiver: int, value: Any) -> None:
        """Store `value` for `receiver`."""
        if self.observer is not None:
            self.observer(sender, value)
        self._mail[sender, receiver].append(value)
        self._turn.notify_all()

    def take(self, receiver: int, sender: int) -> Any:
        """Returns the next value of `sender`; other threads run until it is there.

        Raises:
            PeerError: no value will arrive, because `sender` has ended or all ranks wait.
        """
        mail = self._mail[sender, receiver]
        if mail:
            return mail.popleft()
        self._waits_for[receiver] = sender
        try:
            with kept_random_state():
                while not mail:
                    if sender not in self._alive:
                        raise PeerError(sender, f"rank {sender} has ended its step already")
                    if self._all_wait():
                        self._turn.notify_all()
                        raise PeerError(sender, f"rank {sender} waits for something else")
                    self._turn.wait()
        finally:
            del self._waits_for[receiver]
        return mail.popleft()

    def _all_wait(self) -> bool:
        return all(rank in self._waits_for and not self._mail[self._waits_for[rank], rank] for rank in self._alive)


class InProcessTransport(Transport):
    """:class:`~lightning_gnn.comm.transport.ProcessTransport` between the threads of a :class:`Meeting`.

    Attributes:
        most_bytes: maximum of bytes sent and received by one call. A transport between processes allocates about as much: each
            rank has two buffers for the most that it sends, either rows or gradients of received rows.
    """

    all_local, device = True, torch.device("cpu")

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting
        self._expected: dict[int, deque[Callable[[], None]]] = {peer: deque() for peer in range(meeting.size)}
        self.most_bytes = 0

    @override
    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    @override
    def start_each(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Receive]]) -> Callable[[], None]:
        coming = sum(rows.most_bytes if isinstance(rows, UpTo) else rows.nbytes for _, rows in receives)
        self.most_bytes = max(self.most_bytes, coming + sum(rows.nbytes for _, rows in sends))
        waits = [self._expect(peer, into) for peer, into in receives]
        for peer, rows in sends:
            self._meeting.post(self._rank, peer, rows.detach().clone())

        def wait() -> None:
            for each in waits:
                each()

        return wait

    @override
    def start_varied(self, sends: Sequence[tuple[int, Tensor]], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
        waits = {peer: self._expect(peer) for peer in senders}
        self.start_each(sends, [])
        return lambda: {peer: wait() for peer, wait in waits.items()}

    def _expect(self, peer: int, into: Receive | None = None) -> Callable[[], Any]:
        """Registers a receiver for the next unclaimed message of `peer`; returns a function that waits for the message."""
        found: list[Any] = []

        def accept() -> None:
            message = self._meeting.take(self._rank, peer)
            if isinstance(into, UpTo):
                _check_varied(message, into, peer)
                into.accept(message)
            elif into is not None:
                _check(message, into, peer)
                into.detach().copy_(message)
            found.append(message)

        self._expected[peer].append(accept)

        def wait() -> Any:
            while not found:  # messages of a peer arrive in the order of registration
                self._expected[peer].popleft()()
            return found[0]

        return wait

    def take(self, peer: int) -> Any:
        """Returns the next unclaimed value of `peer`."""
        return self._expect(peer)()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks in rank order."""
        peers = [peer for peer in range(self._meeting.size) if peer != self._rank]
        own = tensor.detach().clone()
        parts = {peer: torch.empty_like(own) for peer in peers} | {self._rank: tensor}
        waits = [self._expect(peer, parts[peer]) for peer in peers]
        for peer in peers:
            self._meeting.post(self._rank, peer, own)
        for wait in waits:
            wait()
        return [parts[rank] for rank in sorted(parts)]


def _check(message: Any, into: Tensor, peer: int) -> None:
    """Raises PeerError unless `message` has the shape and dtype of `into`."""
    if not isinstance(message, Tensor) or message.shape != into.shape or message.dtype != into.dtype:
        what = f"{tuple(message.shape)} of {message.dtype}" if isinstance(message, Tensor) else type(message).__name__
        text = f"rank {peer} sent {what} where {tuple(into.shape)} of {into.dtype} was expected, and is elsewhere"
        raise PeerError(peer, text)


def _check_varied(message: Any, into: UpTo, peer: int) -> None:
    """Raises PeerError unless `message` is a uint8 tensor of at most ``into.most_bytes`` bytes."""
    if not isinstance(message, Tensor) or message.dtype != torch.uint8 or message.numel() > into.most_bytes:
        what = f"{message.nbytes} bytes of {message.dtype}" if isinstance(message, Tensor) else type(message).__name__
        raise PeerError(peer, f"rank {peer} sent {what} where {into.most_bytes} bytes at most were expected, and is elsewhere")


class InProcessWorld(World):
    """:class:`World` whose ranks are threads of one process; has the members that exchanges use.

    Args:
        rank: rank of this thread.
        meeting: mailboxes, shared by all ranks.
    """

    stand_ins = True

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self.device = rank, meeting.size, torch.device("cpu")
        self.timeout = timedelta(seconds=0)  # waits end without a timeout: see Meeting.take
        self.watch = Watchdog(rank, meeting.size, 0.0)  # not started
        self._ranks: Any = InProcessTransport(rank, meeting)
        self.transport = wrap_transport(self._ranks)
        self.gradient_group = None
        self.step, self.calls = Step(), Counter()
        self._meeting = meeting

    @property
    @override
    def is_connected(self) -> bool:
        return True

    @override
    def all_gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the rows of all ranks in rank order."""
        return torch.cat(self.all_gather_object(rows.clone()))  # the sender may change its rows before others read them

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the values of all ranks in rank order."""
        for peer in range(self.size):
            if peer != self.rank:
                self._meeting.post(self.rank, peer, value)
        return [value if peer == self.rank else self._ranks.take(peer) for peer in range(self.size)]

    @override
    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Returns the value of `source` on every rank."""
        if self.rank != source:
            return self._ranks.take(source)
        for peer in range(self.size):
            if peer != source:
                self._meeting.post(source, peer, value)
        return value
