"""Atomic operations of a worker outside its own memory.

The pool and the pairing are generators that yield operations and receive the answers. Their code is therefore written once:
between processes a store executes the operations, and tests run them in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from lightning_gnn.strategies.gossip.peers import SharedKeys

T = TypeVar("T")


@dataclass(frozen=True)
class Get:
    """Read the text of `key`; answer: the text, ``""`` if there is none."""

    key: str


@dataclass(frozen=True)
class Add:
    """Add to the number of `key`, 0 if there is none; answer: the sum."""

    key: str
    amount: int = 1


@dataclass(frozen=True)
class Swap:
    """Set `key` to `new` if its value is `expected`, ``""`` for none; answer: whether it was.

    No two workers ever write the same `new` to a key, so a worker that finds it there has written it.
    """

    key: str
    expected: str
    new: str


@dataclass(frozen=True)
class Pick:
    """Choose an option at random; answer: the option."""

    options: tuple[int, ...]


@dataclass(frozen=True)
class IsAlive:
    """Check for recent heartbeats of a worker; answer: whether there are any."""

    worker: int


@dataclass(frozen=True)
class Notify:
    """Notify a worker that it was chosen; may get lost, then the worker finds out when it reads its key."""

    worker: int


@dataclass(frozen=True)
class Notified:
    """Check for notifications since the last time; answer: whether there are any, which may be wrong. Takes no time."""


@dataclass(frozen=True)
class Await:
    """Wait, for a bounded time, until `partner` visits; answer: whether vectors were exchanged.

    Attributes:
        partner: worker to wait for.
        meeting: number of the meeting.
        accepted: whether the partner has already accepted.
    """

    partner: int
    meeting: int
    accepted: bool


@dataclass(frozen=True)
class Visit:
    """Connect to `partner`, which awaits this worker; answer: whether vectors were exchanged."""

    partner: int
    meeting: int


Operation: TypeAlias = Get | Add | Swap | Pick | IsAlive | Notify | Notified | Await | Visit
Steps: TypeAlias = Generator[Operation, Any, T]
"""Generator of operations, with its return type."""


def answer(store: SharedKeys, operation: Operation) -> Any:
    if isinstance(operation, Get):
        return store.get(operation.key)
    if isinstance(operation, Add):
        return store.add(operation.key, operation.amount)
    if isinstance(operation, Swap):
        return store.swap(operation.key, operation.expected, operation.new)
    raise TypeError(f"{operation} is not about keys")


def carry_out(steps: Steps[T], how: Callable[[Operation], Any]) -> T:
    """Execute all operations of `steps`; returns the return value of `steps`."""
    try:
        operation = next(steps)
        while True:
            operation = steps.send(how(operation))
    except StopIteration as end:
        return end.value
