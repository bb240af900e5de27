"""Workers of the gossip protocol as a state machine that a test moves step by step.

States can be compared and copied: an exploration visits each once, and of those that differ by the workers' names only, one.

    python tests/gossip_model.py

explores the cases that take too long for the test suite, and prints how many states each has.
"""

from __future__ import annotations

import copy
import itertools
import re
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_gnn.strategies.gossip.operations import (
    Add,
    Await,
    Get,
    IsAlive,
    Notified,
    Notify,
    Pick,
    Swap,
    Visit,
    answer,
    carry_out,
)
from lightning_gnn.strategies.gossip.pairing import Pairing, Rule
from lightning_gnn.strategies.gossip.pool import Pool


class InProcess:
    """A key-value store as SharedKeys, whose values can be seen and copied."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def get(self, key: str) -> str:
        return str(self.values.get(key, ""))

    def add(self, key: str, amount: int) -> int:
        self.values[key] = int(self.values.get(key, 0)) + amount
        return self.values[key]

    def swap(self, key: str, expected: str, new: str) -> bool:
        if self.get(key) == expected:
            self.values[key] = new
        return self.get(key) == new


@dataclass(frozen=True)
class Train:
    """A batch."""

    item: int


@dataclass(frozen=True)
class Rest:
    """Waits until another worker has moved."""


@dataclass(frozen=True)
class Case:
    """What is tried.

    Attributes:
        workers: how many.
        size: batches of an epoch.
        epochs: of the pool; 0 for no pool: then each worker does `size` batches of its own, which leaves fewer states.
        interval: batches between meetings; 0 for none.
        late: any wait may end before the partner comes.
        mortal: workers of which one may die, at any time.
        returns: the one that has died may be started again, once, at any time.
    """

    workers: int
    size: int
    epochs: int = 1
    interval: int = 1
    rule: Rule = "any"
    late: bool = False
    mortal: tuple[int, ...] = ()
    returns: bool = False


def worker(pairing: Pairing, case: Case) -> Generator[Any, Any, None]:
    """What a worker of a run does, as the strategy has it: see lightning_gnn/strategies/gossip/strategy.py."""
    me, pool = pairing.me, Pool(case.size, case.size * case.epochs)
    batches = 0
    if pairing.life:
        if case.epochs:
            yield from pool.give_back_all(me)
        yield from pairing.enter()
    while True:
        item = (yield from pool.take(me)) if case.epochs else (batches if batches < case.size else None)
        if item is None:
            break
        yield Train(item)
        batches += 1
        if case.interval:
            yield from pairing.meet(due=batches % case.interval == 0)
        if case.epochs:
            yield from pool.mark_done(me, item)
    if case.interval:
        yield from pairing.leave()
    while case.epochs:
        mine, others = yield from pool.take_over(me)
        for item in mine:
            yield Train(item)
            yield from pool.mark_done(me, item)
        if not others:
            return
        if not mine:
            yield Rest()


class Program:
    """What one worker does: the states that it may be in, and where each answer leads.

    A state is where its generator stands and with which local values. Generators cannot be copied, so to each new state one is
    sent from the start, once.

    Attributes:
        pending: by state, the operation that the worker waits for; None if it has ended.
        came_by: by state, a state before it and the answer that led on; None for the first.
    """

    def __init__(self, me: int, case: Case) -> None:
        self._me, self._case = me, case
        self._numbers: dict[Any, int] = {}
        self.came_by: list[tuple[int, Any] | None] = []
        self._answers: list[tuple[Any, ...]] = []  # the life, and what has led there
        self._next: dict[tuple[int, Any], int] = {}
        self.pending: list[Any] = []
        self.first, self.first_again = (self._state((life,)) for life in range(2))

    def after(self, state: int, value: Any) -> int:
        """Returns the state after an answer."""
        found = self._next.get((state, value))
        if found is None:
            found = self._next[state, value] = self._state((*self._answers[state], value), (state, value))
        return found

    def _state(self, lived: tuple[Any, ...], came_by: tuple[int, Any] | None = None) -> int:
        life, *answers = lived
        pairing = Pairing(self._me, self._case.workers, self._case.rule, life)
        if not life:
            store = InProcess()
            carry_out(pairing.enter(), lambda operation: answer(store, operation))
        first = worker(pairing, self._case)
        frames: list[Any] = []
        try:
            pending = next(first)
            for value in answers:
                pending = first.send(value)
            steps: Any = first
            while steps is not None:
                frame = steps.gi_frame
                frames += [frame.f_code.co_name, frame.f_lasti, repr(sorted(frame.f_locals.items(), key=_name))]
                steps = steps.gi_yieldfrom
        except StopIteration:
            pending = None
        where = life, tuple(frames), pending
        if where not in self._numbers:
            self._numbers[where] = len(self.pending)
            self.pending.append(pending)
            self._answers.append(lived)
            self.came_by.append(came_by)
        return self._numbers[where]


@dataclass
class Model:
    """All workers, the store, and what has happened.

    Moves are ``(worker, answer)``; ``(worker, "meets")`` is an exchange with the one that awaits it, ``(worker, "dies")``
    its end, ``(worker, "returns")`` the beginning of its other life.
    """

    case: Case
    store: InProcess = field(default_factory=InProcess)
    trained: list[tuple[int, int]] = field(default_factory=list)  # item, worker
    met: list[tuple[int, int, int]] = field(default_factory=list)  # meeting, who chose, who was chosen
    dead: int | None = None
    returned: int | None = None

    def __post_init__(self) -> None:
        everyone = range(self.case.workers)
        for me in everyone:
            pairing = Pairing(me, self.case.workers, self.case.rule)
            carry_out(pairing.enter(), lambda operation: answer(self.store, operation))
        self.programs = [Program(me, self.case) for me in everyone]
        self.at = [program.first for program in self.programs]
        self.rested = [False for _ in everyone]  # nobody else has done anything since it rested
        self.chose = [0 for _ in everyone]  # meetings

    def copy(self) -> Model:
        """Returns a model in the same state, which moves independently of this."""
        found = copy.copy(self)
        found.store = InProcess()
        found.store.values = dict(self.store.values)
        found.trained, found.met = [*self.trained], [*self.met]
        found.at, found.rested, found.chose = [*self.at], [*self.rested], [*self.chose]
        return found

    def pending(self, me: int) -> Any:
        """Returns the operation that a worker waits for; None if it has ended."""
        return None if me == self.dead else self.programs[me].pending[self.at[me]]

    def moves(self) -> list[tuple[int, Any]]:
        """Returns what may happen next; of moves that come to the same in every order, one order only."""
        found: list[tuple[int, Any]] = []
        if self.dead is not None and self.case.returns:
            found.append((self.dead, "returns"))
        for me in range(self.case.workers):
            pending = self.pending(me)
            if pending is None:
                continue
            moves = [(me, move) for move in self._moves_of(me, pending)]
            if self._concerns_only(me, pending):
                return moves
            found += moves
            if self._may_die(me):
                found.append((me, "dies"))
        return found

    def _may_die(self, me: int) -> bool:
        return self.dead is None and self.returned is None and me in self.case.mortal

    def _concerns_only(self, me: int, pending: Any) -> bool:
        """Returns whether an operation comes to the same before and after any move of another, and its end."""
        if isinstance(pending, IsAlive):
            return not self._may_die(pending.worker) and not (pending.worker == self.dead and self.case.returns)
        if isinstance(pending, Train):
            return not self._may_die(me)
        if isinstance(pending, (Get, Swap)) and self.store.get(pending.key) == "left" and not self.case.returns:
            return True  # that stays for ever
        return isinstance(pending, (Notify, Notified, Pick)) or _is_new_meeting(pending)

    def _moves_of(self, me: int, pending: Any) -> Iterable[Any]:
        if isinstance(pending, Pick):
            return pending.options
        if isinstance(pending, Notified):
            return (True, False)  # a notification may be late, or of one that has gone
        if isinstance(pending, IsAlive):
            return (True, False) if pending.worker == self.dead else (True,)
        if isinstance(pending, (Await, Visit)):
            partner = self.pending(pending.partner)
            # In its other life, a worker may be met for, or visit for, a meeting that is over.
            late = self.case.late or pending.partner == self.dead or self.returned in (me, pending.partner)
            meets = isinstance(pending, Visit) and self._awaits(partner, me, pending.meeting)
            return (["meets"] if meets else []) + ([False] if late else [])
        if isinstance(pending, Rest):
            return () if self.rested[me] else (None,)
        return (None,)

    @staticmethod
    def _awaits(pending: Any, visitor: int, meeting: int) -> bool:
        return isinstance(pending, Await) and (pending.partner, pending.meeting) == (visitor, meeting)

    def move(self, me: int, what: Any) -> None:
        """Lets one of :meth:`moves` happen."""
        operation = self.pending(me)
        looks = isinstance(operation, Add) and operation.amount == 0
        if what in ("dies", "returns") or (isinstance(operation, (Add, Swap, Train, Await, Visit)) and not looks):
            self.rested = [other == me and rested for other, rested in enumerate(self.rested)]
        if what == "dies":
            self.dead = me
        elif what == "returns":
            self.dead, self.returned, self.at[me] = None, me, self.programs[me].first_again
        elif what == "meets":
            self.met.append((operation.meeting, operation.partner, me))
            self._send(operation.partner, True)
            self._send(me, True)
        elif isinstance(operation, (Pick, IsAlive, Notify, Notified, Await, Visit)):
            if isinstance(operation, IsAlive) and operation.worker == self.dead:
                self.rested[me] = False  # that a worker is dead is noticed later, without anybody's doing
            self._send(me, what)
        elif isinstance(operation, Train):
            self.trained.append((operation.item, me))
            self._send(me, None)
        elif isinstance(operation, Rest):
            self.rested[me] = True  # looking around once more changes nothing unless another has moved
            self._send(me, None)
        elif _is_new_meeting(operation):
            # Any number that no other meeting has; so the order of those who choose makes no difference.
            self.chose[me] += 1
            self._send(me, self.chose[me] * self.case.workers + me)
        else:
            self._send(me, answer(self.store, operation))

    def _send(self, me: int, value: Any) -> None:
        self.at[me] = self.programs[me].after(self.at[me], value)

    def state(self) -> Any:
        """Returns what decides about everything that may still happen."""
        # Of those that have ended, nothing else counts.
        where = [
            None if self.pending(me) is None else (self.at[me], self.rested[me], self.chose[me])
            for me in range(self.case.workers)
        ]
        dead = self.dead, self.returned
        return tuple(where), dead, frozenset(self.store.values.items()), frozenset(self.trained)

    def kinds(self) -> list[Any]:
        """Returns of each worker something that does not depend on who is called what."""
        return [
            (
                (me == self.dead, me == self.returned),
                type(self.pending(me)).__name__,
                self.chose[me],
                self.store.get(f"worker/{me}").split()[:1],
            )
            for me in range(self.case.workers)
        ]

    def check_now(self) -> None:
        """What must hold at any time."""
        meetings = [meeting for meeting, *_ in self.met]
        assert len(set(meetings)) == len(meetings), f"more than two in a meeting: {self.met}"
        pending = {me: self.pending(me) for me in range(self.case.workers)}
        awaits = {me: each for me, each in pending.items() if isinstance(each, Await)}
        for me, each in awaits.items():
            assert each.partner != me
            # Nobody waits for a worker that waits itself: no circle.
            assert self.case.late or each.partner not in awaits, awaits
        if not self.case.late:
            partners = [each.partner for each in awaits.values()]
            assert len(set(partners)) == len(partners), f"two wait for one: {awaits}"
        if self.case.rule == "active_passive":
            assert all(chose % 2 == 0 and chosen % 2 == 1 for _, chose, chosen in self.met)

    def check_end(self) -> None:
        """What must hold when nothing can happen any more."""
        stuck = [(me, self.pending(me)) for me in range(self.case.workers) if self.pending(me) is not None]
        assert not stuck, f"deadlock: {stuck}"
        if not self.case.epochs:
            return
        lost = self.dead if self.returned is None else self.returned
        items = [item for item, me in self.trained if me != lost]
        if lost is None:
            assert sorted(items) == list(range(self.case.size * self.case.epochs))
        else:
            assert len(set(items)) == len(items)
            assert {item for item, _ in self.trained} == set(range(self.case.size * self.case.epochs))


class Renaming:
    """Workers called otherwise. The protocol does not care, so of states that differ by that only, one need be visited.

    Args:
        programs: of all workers.
        to: by worker, its new name.
    """

    def __init__(self, programs: list[Program], to: tuple[int, ...]) -> None:
        self._programs, self.to = programs, to
        self._states: list[dict[int, int]] = [
            {program.first: programs[new].first, program.first_again: programs[new].first_again}
            for program, new in zip(programs, to, strict=True)
        ]
        self._texts: dict[tuple[str, Any], tuple[str, Any]] = {}

    def state(self, model: Model) -> Any:
        """Returns :meth:`Model.state` as it would be."""
        where: list[Any] = [None] * len(self.to)
        for me, new in enumerate(self.to):
            if model.pending(me) is not None:
                where[new] = self._at(me, model.at[me]), model.rested[me], model.chose[me]
        lost = [-1 if each is None else self.to[each] for each in (model.dead, model.returned)]
        store = frozenset(self._entry(key, value) for key, value in model.store.values.items())
        return (
            tuple(where),
            tuple(lost),
            store,
            frozenset((item, self.to[me]) for item, me in model.trained),
        )

    def _at(self, me: int, state: int) -> int:
        """Returns where the worker of the new name is, having had the same answers but for names."""
        found = self._states[me].get(state)
        if found is None:
            came_by = self._programs[me].came_by[state]
            assert came_by is not None
            before, value = came_by
            value = self._answer(self._programs[me].pending[before], value)
            found = self._states[me][state] = self._programs[self.to[me]].after(self._at(me, before), value)
        return found

    def _answer(self, operation: Any, value: Any) -> Any:
        if isinstance(operation, Pick):
            return self.to[value]
        if isinstance(operation, Get):
            return self._entry(operation.key, value)[1]
        return self._meeting(value) if _is_new_meeting(operation) else value

    def _meeting(self, number: int) -> int:
        times, me = divmod(number, len(self.to))
        return times * len(self.to) + self.to[me]

    def _entry(self, key: str, value: Any) -> tuple[str, Any]:
        found = self._texts.get((key, value))
        if found is None:
            found = self._texts[key, value] = self._renamed(key, value)
        return found

    def _renamed(self, key: str, value: Any) -> tuple[str, Any]:
        if key.startswith("pool/item/"):
            return key, re.sub(r"\d+$", lambda name: str(self.to[int(name[0])]), value)
        if not key.startswith("worker/"):
            return key, value
        who_and_when = re.compile(r"(by|again) (\d+)( in)? (\d+)$")
        value = who_and_when.sub(
            lambda at: f"{at[1]} {self.to[int(at[2])]}{at[3] or ''} {self._meeting(int(at[4]))}", value
        )
        return f"worker/{self.to[int(key[7:])]}", value


class Names:
    """All ways to call the workers of a case that leave it as it is: what is even stays so where that counts, and the mortal are.

    Args:
        model: any state.
    """

    def __init__(self, model: Model) -> None:
        case = model.case
        everyone = range(case.workers)

        def role(worker: int) -> Any:
            return case.rule == "active_passive" and worker % 2, worker in case.mortal

        self._all = [
            Renaming(model.programs, to)
            for to in itertools.permutations(everyone)
            if all(role(me) == role(to[me]) for me in everyone)
        ]
        self._by_order: dict[Any, list[Renaming]] = {}

    def state(self, model: Model) -> int:
        """Returns the same number for all states that differ by names only."""
        kinds = model.kinds()
        different = sorted({repr(kind) for kind in kinds})
        order = tuple(different.index(repr(kind)) for kind in kinds)
        renamings = self._by_order.get(order)
        if renamings is None:
            # Those that sort the workers by kind: there is one at least where roles do not forbid it.
            sorted_ = [self._sorted(order, renaming) for renaming in self._all]
            best = min(sorted_)
            renamings = [renaming for renaming, each in zip(self._all, sorted_, strict=True) if each == best]
            self._by_order[order] = renamings
        return min(hash(renaming.state(model)) for renaming in renamings)

    @staticmethod
    def _sorted(order: tuple[int, ...], renaming: Renaming) -> tuple[int, ...]:
        new = [0] * len(order)
        for me, kind in enumerate(order):
            new[renaming.to[me]] = kind
        return tuple(new)


def _is_new_meeting(operation: Any) -> bool:
    return isinstance(operation, Add) and operation.key == "meetings"


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


def explore(case: Case, most: int = 2_000_000) -> dict[str, int]:
    """Visits every state that can be reached, checks each, and returns how many there were, and what was seen."""
    seen: set[int] = set()
    counts = {"states": 0, "ends": 0, "meetings": 0}
    todo = [Model(case)]
    names = Names(todo[0])
    while todo:
        model = todo.pop()
        model.check_now()
        state = names.state(model)
        if state in seen:
            continue
        seen.add(state)
        counts["states"] += 1
        assert counts["states"] < most, "too many states: a worker may go on for ever"
        moves = model.moves()
        if not moves:
            model.check_end()
            counts["ends"] += 1
        for move in moves:
            counts["meetings"] += move[1] == "meets"
            after = model.copy()
            after.move(*move)
            todo.append(after)
    return counts


LONG = [
    Case(3, 2),
    Case(3, 2, interval=2, late=True, mortal=(0,)),
    Case(4, 1, late=True),
    Case(4, 2, interval=2, rule="prompt"),
    Case(4, 1, epochs=0),
    # Case(4, 2, epochs=0, interval=2, rule="prompt") had not ended after an hour.
]

if __name__ == "__main__":
    for case in LONG:
        began = time.perf_counter()
        print(case, explore(case, most=50_000_000), f"{time.perf_counter() - began:.0f} s", flush=True)
