"""What a worker does outside its own memory, one atomic operation at a time.

The work pool and the pairing are generators that yield operations and are sent the answers. So what they do is written once:
between processes a store carries the operations out, and tests try them in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from lightning_gnn.strategies.gossip.peers import SharedKeys

T = TypeVar("T")


@dataclass(frozen=True)
class Get:
    """Answer: the text under `key`, ``""`` if there is none."""

    key: str


@dataclass(frozen=True)
class Add:
    """Adds to the number under `key`, 0 if there is none; answer: the sum."""

    key: str
    amount: int = 1


@dataclass(frozen=True)
class Swap:
    """Puts `new` under `key` if `expected` is there, ``""`` for nothing; answer: whether it was.

    No two workers ever write the same `new` under a key, so who finds it there has written it.
    """

    key: str
    expected: str
    new: str


@dataclass(frozen=True)
class Pick:
    """Answer: one of the options, at random."""

    options: tuple[int, ...]


@dataclass(frozen=True)
class IsAlive:
    """Answer: whether a worker has had a heartbeat lately."""

    worker: int


@dataclass(frozen=True)
class Notify:
    """Lets a worker know that it has been chosen; may get lost, then the worker sees it when it reads its key."""

    worker: int


@dataclass(frozen=True)
class Notified:
    """Answer: whether any worker has notified this one since the last time; may be wrong. Costs nothing."""


@dataclass(frozen=True)
class Await:
    """Waits, for a bounded time, until `partner`, who may be known to be on its way, visits; answer: whether something was
    exchanged."""

    partner: int
    meeting: int
    accepted: bool


@dataclass(frozen=True)
class Visit:
    """Goes to `partner`, who awaits this worker; answer: whether something was exchanged."""

    partner: int
    meeting: int


Operation: TypeAlias = Get | Add | Swap | Pick | IsAlive | Notify | Notified | Await | Visit
Steps: TypeAlias = Generator[Operation, Any, T]
"""Operations, and what they come to."""


def answer(store: SharedKeys, operation: Operation) -> Any:
    if isinstance(operation, Get):
        return store.get(operation.key)
    if isinstance(operation, Add):
        return store.add(operation.key, operation.amount)
    if isinstance(operation, Swap):
        return store.swap(operation.key, operation.expected, operation.new)
    raise TypeError(f"{operation} is not about keys")


def carry_out(steps: Steps[T], how: Callable[[Operation], Any]) -> T:
    """Carries out all operations of `steps` and returns what they come to."""
    try:
        operation = next(steps)
        while True:
            operation = steps.send(how(operation))
    except StopIteration as end:
        return end.value
