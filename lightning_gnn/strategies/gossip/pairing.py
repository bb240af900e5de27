"""Who averages with whom.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021): Algorithm 6, any pair of workers, and Algorithm 5,
active workers choose passive ones (Lian et al., AD-PSGD, 2018). There two arrays under two locks say who is available and who was
chosen by whom; a worker that dies with a lock, or while its partner waits, stops all, and the clean-up averages while it
holds both. Here each worker has one key, which changes by compare-and-swap only, and nobody holds anything while it waits:

    free --(others: chosen by c)--> chosen --(self: accepts)--> met --(self: has exchanged)--> free
     |  <--(c: has waited enough)---'
     '--(self: chooses)--> off --(self: has exchanged, or waited enough)--> free

A worker that waits is *off*, so nobody waits for it, and whom it waits for is computing, or on its way: no circle of waiting
workers can close. A worker is chosen, or chooses, once at a time: no three meet.

How long one waits depends on when the chosen one looks: at its own next interval (Algorithm 6), or after its next batch
(Algorithm 5). Who chooses also notifies, so that nobody needs to read a key after each batch.
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
    """What came of trying to meet a partner, None if there was none; whether this worker chose it, and waited for it."""

    partner: int | None = None
    exchanged: bool = False
    waited: bool = False


@dataclass
class Pairing:
    """One worker's side of the pairing.

    Attributes:
        me, size: this worker and how many there are.
        rule: ``"any"``: any two may meet, and each looks at its interval; ``"prompt"``: any two may meet, and each looks after
            every batch; ``"active_passive"``: workers of even number choose, those of odd number are chosen, and look after
            every batch.
        life: how often this worker has been killed and started again.
        turns: how often it has become free in this life; both make the values of its key distinct.
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
        """Whether this worker looks after every batch whether it was chosen."""
        return self.rule != "any" and self.is_chosen

    def enter(self) -> Steps[Meeting | None]:
        """Takes part from now on, before any worker meets, or anew in the place of one that was killed: then meets who may still
        wait for that one."""
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
        """After a batch: meets who has chosen this worker; else, if it is `due` to choose, chooses one that is free, waits for
        it, and meets it; else goes on alone.
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

    def _serve(self, chosen: str, then: str | None = None) -> Steps[Meeting | None]:
        """Meets who has chosen this worker, which is free again thereafter, or `then`; None if it has waited enough just now."""
        _, _, who = chosen.partition(" by ")
        if not (yield Swap(_key(self.me), chosen, f"{_MET} by {who}")):
            return None
        partner, meeting = map(int, who.split(" in "))
        exchanged = yield Visit(partner, meeting)
        yield Swap(_key(self.me), f"{_MET} by {who}", then or self._free())
        return Meeting(partner, exchanged)

    def leave(self, for_good: bool = True) -> Steps[Meeting | None]:
        """Is not chosen from now on, or until :meth:`come_back`; meets who waits for this worker at that moment (the clean-up of
        Algorithms 5 and 6)."""
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
        """Returns one that takes part, at random, and asks no more of it; None if nobody else does."""
        found = yield from self._one_of([worker for worker in range(self.size) if worker != self.me])
        return None if found is None else found[0]

    def _one_of(self, others: list[int]) -> Steps[tuple[int, str] | None]:
        """Returns a worker that is free, and what its key holds; takes it, and those that are not, out of `others`."""
        while others:
            worker = yield Pick(tuple(others))
            others.remove(worker)
            state = yield Get(_key(worker))
            if state.startswith(_FREE) and (yield IsAlive(worker)):
                return worker, state
        return None

    def _choose(self) -> Steps[tuple[int, int, str] | None]:
        """Chooses one of those that are free, at random; returns it, the meeting's number and what its key holds now."""
        all_ = self.rule != "active_passive"
        others = [worker for worker in range(self.size) if worker != self.me and (all_ or worker % 2 == 1)]
        while (found := (yield from self._one_of(others))) is not None:
            worker, state = found
            meeting = yield Add("meetings")
            chosen = f"{_CHOSEN} by {self.me} in {meeting}"
            if (yield Swap(_key(worker), state, chosen)):
                if self.rule != "any":
                    yield Notify(worker)
                return worker, meeting, chosen
        return None

    def _wait(self, partner: int, meeting: int, chosen: str) -> Steps[Meeting]:
        """Waits for the partner. If that took too long, withdraws, unless the partner is on its way by now."""
        exchanged = yield Await(partner, meeting, accepted=False)
        if not exchanged and not (yield Swap(_key(partner), chosen, f"{_FREE} again {self.me} {meeting}")):
            exchanged = yield Await(partner, meeting, accepted=True)
        return Meeting(partner, exchanged, waited=True)

    def _free(self) -> str:
        self.turns += 1
        return f"{_FREE} {self.life}.{self.turns}"


def _key(worker: int) -> str:
    return f"worker/{worker}"
