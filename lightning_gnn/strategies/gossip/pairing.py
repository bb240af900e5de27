"""Pairing: which workers average with each other.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021): Algorithm 6, any pair of workers, and Algorithm 5,
active workers choose passive ones (Lian et al., AD-PSGD, 2018). There, two arrays under two locks store who is available and who
chose whom. A worker that dies with a lock, or while its partner waits, stops all workers; and the clean-up averages while it
holds both locks. Here each worker has one key, which changes by compare-and-swap only, and no worker holds a lock while it waits:

    free --(others: chosen by c)--> chosen --(self: accepts)--> met --(self: has exchanged)--> free
     |  <--(c: has waited enough)---'
     '--(self: chooses)--> off --(self: has exchanged, or waited enough)--> free

A worker that waits is *off*, so no worker waits for it. The worker that it waits for is computing, or about to connect. Therefore
there are no deadlocks. A worker is chosen, or chooses, once at a time: three workers never meet.

The waiting time depends on when the chosen worker checks: at its own next interval (Algorithm 6), or after its next batch
(Algorithm 5). The worker that chooses also notifies the other, so that no worker needs to read a key after each batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_gnn.arguments import check_choice
from lightning_gnn.strategies.gossip.operations import Add, Await, Get, IsAlive, Notified, Notify, Pick, Steps, Swap, Visit

Rule = Literal["any", "prompt", "active_passive"]

_FREE, _CHOSEN, _MET, _OFF, _LEFT = "free", "chosen", "met", "off", "left"


@dataclass
class Meeting:
    """Result of an attempt to meet a partner.

    Attributes:
        partner: the partner; None if there was none.
        exchanged: whether vectors were exchanged.
        waited: whether this worker chose the partner and waited for it.
    """

    partner: int | None = None
    exchanged: bool = False
    waited: bool = False


@dataclass
class Pairing:
    """One worker's side of the pairing.

    Attributes:
        me, size: this worker and the number of workers.
        rule: which workers may meet, and when a worker checks whether it was chosen.

            - ``"any"``: any two; checks at its interval.
            - ``"prompt"``: any two; checks after every batch.
            - ``"active_passive"``: workers of even number choose workers of odd number, which check after every batch.
        life: number of restarts of this worker.
        turns: number of times that it became free since its restart; `life` and `turns` make the values of its key distinct.
    """

    me: int
    size: int
    rule: Rule = "any"
    life: int = 0
    turns: int = 0

    def __post_init__(self) -> None:
        check_choice("pairing", self.rule, get_args(Rule))

    @property
    def chooses(self) -> bool:
        return self.rule != "active_passive" or self.me % 2 == 0

    @property
    def is_chosen(self) -> bool:
        return self.rule != "active_passive" or self.me % 2 == 1

    @property
    def is_prompt(self) -> bool:
        """Whether this worker checks after every batch whether it was chosen."""
        return self.rule != "any" and self.is_chosen

    def enter(self) -> Steps[Meeting | None]:
        """Join, before any meeting or after a restart; then meet a worker that still waits for the previous process."""
        to = self._free() if self.is_chosen else _OFF
        while True:
            state = yield Get(_key(self.me))
            if state.startswith((_CHOSEN, _MET)):
                served = yield from self._serve(state, then=to)
                if served is not None:
                    return served
            elif (yield Swap(_key(self.me), state, to)):
                return None

    def meet(self, due: bool) -> Steps[Meeting]:
        """Meet another worker after a batch, if possible.

        The partner is a worker that chose this worker. Without such a worker, if `due`, this worker chooses a free worker and
        waits for the meeting.
        """
        if self.size == 1 or not ((self.is_prompt and (yield Notified())) or due):
            return Meeting()
        while self.is_chosen:
            state = yield Get(_key(self.me))
            if state.startswith(_CHOSEN):
                served = yield from self._serve(state)
                if served is not None:
                    return served
            elif not (due and self.chooses):
                return Meeting()
            elif (yield Swap(_key(self.me), state, _OFF)):
                break
        chosen = yield from self._choose()
        found = Meeting() if chosen is None else (yield from self._wait(*chosen))
        yield from self.come_back()
        return found

    def _serve(self, state: str, then: str | None = None) -> Steps[Meeting | None]:
        """Meet the worker that chose this worker, then become free, or `then`; returns None if the other has just withdrawn."""
        _, _, who = state.partition(" by ")
        if not (yield Swap(_key(self.me), state, f"{_MET} by {who}")):
            return None
        partner, meeting = map(int, who.split(" in "))
        exchanged = yield Visit(partner, meeting)
        yield Swap(_key(self.me), f"{_MET} by {who}", then or self._free())
        return Meeting(partner, exchanged)

    def leave(self, for_good: bool = True) -> Steps[Meeting | None]:
        """Become unavailable, for good or until :meth:`come_back`; meet a worker that waits for this worker at that moment.

        This is the clean-up of Algorithms 5 and 6.
        """
        to = _LEFT if for_good else _OFF
        while True:
            state = yield Get(_key(self.me))
            if state.startswith(_CHOSEN):
                served = yield from self._serve(state, then=to)
                if served is not None:
                    return served
            elif state == to or (yield Swap(_key(self.me), state, to)):
                return None

    def come_back(self) -> Steps[None]:
        if self.is_chosen:
            yield Swap(_key(self.me), _OFF, self._free())

    def any_other(self) -> Steps[int | None]:
        """Returns a random worker that participates, without an agreement with it; None if there is no other."""
        found = yield from self._pick_free([worker for worker in range(self.size) if worker != self.me])
        return None if found is None else found[0]

    def _pick_free(self, candidates: list[int]) -> Steps[tuple[int, str] | None]:
        """Returns a free worker and the value of its key; removes it, and the workers that are not free, from `candidates`."""
        while candidates:
            worker = yield Pick(tuple(candidates))
            candidates.remove(worker)
            state = yield Get(_key(worker))
            if state.startswith(_FREE) and (yield IsAlive(worker)):
                return worker, state
        return None

    def _choose(self) -> Steps[tuple[int, int, str] | None]:
        """Choose a random free worker; returns it, the number of the meeting, and the value of its key."""
        all_ = self.rule != "active_passive"
        candidates = [worker for worker in range(self.size) if worker != self.me and (all_ or worker % 2 == 1)]
        while (found := (yield from self._pick_free(candidates))) is not None:
            worker, state = found
            meeting = yield Add("meetings")
            claim = f"{_CHOSEN} by {self.me} in {meeting}"
            if (yield Swap(_key(worker), state, claim)):
                if self.rule != "any":
                    yield Notify(worker)
                return worker, meeting, claim
        return None

    def _wait(self, partner: int, meeting: int, claim: str) -> Steps[Meeting]:
        """Wait for the partner; after a timeout, withdraw, unless the partner has already accepted."""
        exchanged = yield Await(partner, meeting, accepted=False)
        if not exchanged and not (yield Swap(_key(partner), claim, f"{_FREE} again {self.me} {meeting}")):
            exchanged = yield Await(partner, meeting, accepted=True)
        return Meeting(partner, exchanged, waited=True)

    def _free(self) -> str:
        self.turns += 1
        return f"{_FREE} {self.life}.{self.turns}"


def _key(worker: int) -> str:
    return f"worker/{worker}"
