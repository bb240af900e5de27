"""Workers of the gossip protocol as a state machine that a test moves step by step.

A worker's state is where its generator stands and with which local values, so states can be compared: an exploration visits each
once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_gnn.gossip.operations import (
    Await,
    Get,
    InProcess,
    IsAlive,
    Knock,
    Knocked,
    Pick,
    Visit,
    answer,
    carry_out,
)
from lightning_gnn.gossip.pairing import Pairing, Rule
from lightning_gnn.gossip.pool import Pool


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
    """

    workers: int
    size: int
    epochs: int = 1
    interval: int = 1
    rule: Rule = "any"
    late: bool = False
    mortal: tuple[int, ...] = ()


def worker(pairing: Pairing, case: Case) -> Generator[Any, Any, None]:
    """What a worker of a run does, as the strategy has it: see lightning_gnn/strategies/gossip.py."""
    me, pool = pairing.me, Pool(case.size, case.size * case.epochs)
    batches = 0
    while True:
        item = (yield from pool.take(me)) if case.epochs else (batches if batches < case.size else None)
        if item is None:
            break
        yield Train(item)
        batches += 1
        if case.interval:
            yield from pairing.meet(due=batches % case.interval == 0)
        if case.epochs:
            yield from pool.done(me, item)
    if case.interval:
        yield from pairing.leave()
    while case.epochs:
        mine, others = yield from pool.take_over(me)
        for item in mine:
            yield Train(item)
            yield from pool.done(me, item)
        if not others:
            return
        if not mine:
            yield Rest()


@dataclass
class _Worker:
    steps: Generator[Any, Any, None]
    pending: Any = None  # the operation that it waits for; None once it has ended
    dead: bool = False
    rested: bool = False  # nobody else has done anything since it rested
    where: Any = None  # cached state of the generator


@dataclass
class Model:
    """All workers, the store, and what has happened.

    Moves are ``(worker, answer)``; ``(worker, "meets")`` is an exchange with the one that awaits it, ``(worker, "dies")``
    its end.
    """

    case: Case
    store: InProcess = field(default_factory=InProcess)
    trained: list[tuple[int, int]] = field(default_factory=list)  # item, worker
    met: list[tuple[int, int, int]] = field(default_factory=list)  # meeting, who chose, who was chosen
    alone: bool = True  # no worker may die, so what concerns one worker only need not be interleaved

    def __post_init__(self) -> None:
        pairings = [Pairing(me, self.case.workers, self.case.rule) for me in range(self.case.workers)]
        for pairing in pairings:
            carry_out(pairing.enter(), lambda operation: answer(self.store, operation))
        self.workers = [_Worker(worker(pairing, self.case)) for pairing in pairings]
        for each in self.workers:
            each.pending = next(each.steps)
        self.alone = not self.case.mortal

    def moves(self) -> list[tuple[int, Any]]:
        """Returns what may happen next."""
        found: list[tuple[int, Any]] = []
        somebody_died = any(each.dead for each in self.workers)
        for me, each in enumerate(self.workers):
            if each.dead or each.pending is None:
                continue
            if self.alone and isinstance(each.pending, (Train, IsAlive, Knock)):
                return [(me, True)]  # comes to the same before and after any move of another
            found += [(me, move) for move in self._moves_of(me, each.pending)]
            if me in self.case.mortal and not somebody_died:
                found.append((me, "dies"))
        return found

    def _moves_of(self, me: int, pending: Any) -> Iterable[Any]:
        if isinstance(pending, Pick):
            return pending.options
        if isinstance(pending, Knocked):
            return (True, False)  # a knock may be late, or of one that has gone
        if isinstance(pending, IsAlive):
            return (True, False) if self.workers[pending.worker].dead else (True,)
        if isinstance(pending, (Await, Visit)):
            partner = self.workers[pending.partner]
            late = self.case.late or partner.dead
            meets = (
                isinstance(pending, Visit) and not partner.dead and self._awaits(partner.pending, me, pending.meeting)
            )
            return (["meets"] if meets else []) + ([False] if late else [])
        if isinstance(pending, Rest):
            return () if self.workers[me].rested else (None,)
        return (None,)

    @staticmethod
    def _awaits(pending: Any, visitor: int, meeting: int) -> bool:
        return isinstance(pending, Await) and (pending.partner, pending.meeting) == (visitor, meeting)

    def move(self, me: int, what: Any) -> None:
        """Lets one of :meth:`moves` happen."""
        each = self.workers[me]
        operation = each.pending
        if what == "dies" or not isinstance(operation, (Get, IsAlive, Knock, Knocked, Pick, Rest)):
            for other in self.workers:
                other.rested = other is each and other.rested
        if what == "dies":
            each.dead, each.pending, each.where = True, None, None
            each.steps.close()
        elif what == "meets":
            self.met.append((operation.meeting, operation.partner, me))
            self._send(operation.partner, True)
            self._send(me, True)
        elif isinstance(operation, (Pick, IsAlive, Knock, Knocked, Await, Visit)):
            self._send(me, what)
            if isinstance(operation, IsAlive) and self.workers[operation.worker].dead:
                each.rested = False  # that a worker is dead is noticed later, without anybody's doing
        elif isinstance(operation, Train):
            self.trained.append((operation.item, me))
            self._send(me, None)
        elif isinstance(operation, Rest):
            self._send(me, None)
        else:
            self._send(me, answer(self.store, operation))

    def _send(self, me: int, value: Any) -> None:
        each = self.workers[me]
        # Looking around once more changes nothing unless another has moved.
        each.rested = each.rested or isinstance(each.pending, Rest)
        each.where = None
        try:
            each.pending = each.steps.send(value)
        except StopIteration:
            each.pending = None

    def state(self) -> Any:
        """Returns what decides about everything that may still happen."""
        for each in self.workers:
            if each.where is None:
                frames, steps = [], None if each.pending is None else each.steps
                while steps is not None:
                    frame = steps.gi_frame
                    frames += [frame.f_code.co_name, frame.f_lasti, repr(sorted(frame.f_locals.items(), key=_name))]
                    steps = steps.gi_yieldfrom  # type: ignore[attr-defined]
                each.where = tuple(frames), each.dead, each.pending
        where = tuple((each.where, each.rested) for each in self.workers)
        return frozenset(self.store.values.items()), where, frozenset(self.trained)

    def check_now(self) -> None:
        """What must hold at any time."""
        meetings = [meeting for meeting, *_ in self.met]
        assert len(set(meetings)) == len(meetings), f"more than two in a meeting: {self.met}"
        awaits = {me: each.pending for me, each in enumerate(self.workers) if isinstance(each.pending, Await)}
        for me, pending in awaits.items():
            assert pending.partner != me
            # Nobody waits for a worker that waits itself: no circle.
            assert self.case.late or pending.partner not in awaits, awaits
        if not self.case.late:
            partners = [pending.partner for pending in awaits.values()]
            assert len(set(partners)) == len(partners), f"two wait for one: {awaits}"
        if self.case.rule == "active_passive":
            assert all(chose % 2 == 0 and chosen % 2 == 1 for _, chose, chosen in self.met)

    def check_end(self) -> None:
        """What must hold when nothing can happen any more."""
        stuck = [(me, each.pending) for me, each in enumerate(self.workers) if each.pending is not None]
        assert not stuck, f"deadlock: {stuck}"
        if not self.case.epochs:
            return
        items = [item for item, me in self.trained if not self.workers[me].dead]
        if not any(each.dead for each in self.workers):
            assert sorted(items) == list(range(self.case.size * self.case.epochs))
        elif not all(each.dead for each in self.workers):
            assert len(set(items)) == len(items)
            assert {item for item, _ in self.trained} == set(range(self.case.size * self.case.epochs))


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


def explore(case: Case, most: int = 2_000_000) -> dict[str, int]:
    """Visits every state that can be reached, checks each, and returns how many there were, and what was seen."""
    seen: set[int] = set()
    counts = {"states": 0, "ends": 0, "meetings": 0}
    path: list[tuple[int, Any]] = []
    model = Model(case)
    todo = [(0, move) for move in model.moves()]
    while todo:
        depth, move = todo.pop()
        if depth < len(path):  # another branch: from the start again, for generators cannot be copied
            del path[depth:]
            model = Model(case)
            for each in path:
                model.move(*each)
        model.move(*move)
        counts["meetings"] += move[1] == "meets"
        path.append(move)
        model.check_now()
        state = hash(model.state())
        if state in seen:
            continue
        seen.add(state)
        counts["states"] += 1
        assert counts["states"] < most, "too many states: a worker may go on for ever"
        moves = model.moves()
        if not moves:
            model.check_end()
            counts["ends"] += 1
        todo += [(len(path), each) for each in moves]
    return counts
