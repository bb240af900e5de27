"""The pool and the pairing, tried in every order of their operations for a few workers, and in random orders for more.

Test tier: without ranks.
"""

from __future__ import annotations

import random
from typing import get_args

import gossip_model
import pytest
from common import campaign, examples
from gossip_model import Case, InProcess, Model, explore
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.strategies.gossip.operations import Add, Get, Swap, answer, carry_out
from lightning_gnn.strategies.gossip.pairing import Meeting, Pairing, Rule
from lightning_gnn.strategies.gossip.pool import Pool

EVERY_ORDER = [
    Case(2, 2),
    Case(2, 2, late=True),
    Case(2, 1, late=True, mortal=(0,)),
    Case(2, 2, late=True, mortal=(1,)),
    Case(2, 2, rule="active_passive"),
    Case(2, 3, interval=2, rule="prompt"),
    *campaign(Case(2, 3, interval=2, rule="prompt", late=True, mortal=(0,))),
    Case(2, 3, epochs=0, interval=2, rule="prompt", late=True),
    Case(2, 1, epochs=2, interval=2, mortal=(0,)),
    *campaign(Case(2, 1, late=True, mortal=(0,), returns=True), Case(2, 2, late=True, mortal=(1,), returns=True)),
    Case(2, 1, interval=0, mortal=(0,), returns=True),
    Case(2, 1, epochs=0, late=True, mortal=(0,), returns=True),
    Case(2, 1, epochs=0, rule="active_passive", late=True, mortal=(1,), returns=True),
    *campaign(Case(2, 2, epochs=0, interval=2, rule="prompt", late=True, mortal=(0,), returns=True)),
    Case(3, 1),
    *campaign(Case(3, 1, late=True, mortal=(0,))),
    Case(3, 1, epochs=0),
    *campaign(Case(3, 2, epochs=0, interval=2, rule="prompt")),
    Case(3, 1, epochs=0, rule="active_passive", late=True, mortal=(1,)),
    Case(4, 1, interval=0),
    *campaign(Case(4, 1), Case(4, 1, rule="prompt")),
    Case(4, 1, epochs=0, rule="active_passive"),
]


@pytest.mark.parametrize("case", EVERY_ORDER, ids=str)
def test_every_order(case):
    found = explore(case)
    assert found["ends"] and bool(found["meetings"]) == bool(case.interval)


def test_names_make_no_difference(monkeypatch):
    """What is left out of an exploration is what differs by the workers' names only: of each meeting, all but one of 3!."""
    case = Case(3, 1, epochs=0)
    by_kind = explore(case)
    monkeypatch.setattr(gossip_model.Names, "state", lambda self, model: hash(model.state()))
    assert explore(case)["meetings"] == 6 * by_kind["meetings"]


def take_in_two_steps(self, me):
    """ "While the pool is not empty: take", Algorithm 6."""
    if self.begin + (yield Add("pool/taken", 0)) >= self.end:
        return None
    item = self.begin + (yield Add("pool/taken")) - 1
    yield Swap(f"pool/item/{item}", "", str(me))
    return item


def leave_without_serving(self):
    state = yield Get(f"worker/{self.me}")
    if state.startswith("free"):
        yield Swap(f"worker/{self.me}", state, "left")


def choose_without_comparing(store, operation):
    if isinstance(operation, Swap) and operation.new.startswith("chosen"):
        store.values[operation.key] = operation.new
        return True
    return answer(store, operation)


def give_nothing_back(self, me):
    yield Get("pool/taken")


@pytest.mark.parametrize(
    ("what", "fault", "case"),
    [
        ((Pool, "take"), take_in_two_steps, Case(2, 2, interval=0)),
        ((Pairing, "leave"), leave_without_serving, Case(2, 2)),
        ((gossip_model, "answer"), choose_without_comparing, Case(3, 1, epochs=0)),
        ((Pool, "give_back_all"), give_nothing_back, Case(2, 1, interval=0, mortal=(0,), returns=True)),
    ],
    ids=["take", "leave", "choose", "give back"],
)
def test_the_exploration_finds_faults(monkeypatch, what, fault, case):
    """An exploration that passes those of the thesis's pseudocode and the like would prove nothing."""
    monkeypatch.setattr(*what, fault)
    with pytest.raises(AssertionError):
        explore(case)


@examples(150)
@given(
    workers=st.integers(1, 5),
    size=st.integers(1, 6),
    epochs=st.integers(1, 3),
    interval=st.integers(1, 3),
    rule=st.sampled_from(get_args(Rule)),
    late=st.booleans(),
    dies=st.booleans(),
    returns=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_orders(workers, size, epochs, interval, rule, late, dies, returns, seed):
    rng = random.Random(seed)
    mortal = (rng.randrange(workers),) if dies and workers > 1 else ()
    case = Case(workers, size, epochs, interval, rule, late or (returns and bool(mortal)), mortal, returns)
    model = Model(case)
    for _ in range(20_000):
        moves = model.moves()
        if not moves:
            break
        deaths = [each for each in moves if each[1] == "dies"]
        others = [each for each in moves if each[1] != "dies"]
        model.move(*rng.choice(deaths if deaths and (rng.random() < 0.02 or not others) else others))
        model.check_now()
    model.check_end()


@examples(50)
@given(st.integers(2, 5), st.integers(0, 2**32))
def test_one_that_dies_delays_its_partner_by_one_wait(workers, seed):
    """Nobody waits for a worker twice for one meeting, once it is dead: it is withdrawn from, or known to be dead."""
    rng = random.Random(seed)
    model = Model(Case(workers, 6, 2, 1, late=False, mortal=(0,)))
    ended: dict[tuple[int, int], int] = {}
    while moves := model.moves():
        me, what = rng.choice(moves)
        pending = model.pending(me)
        if what is False and hasattr(pending, "meeting") and pending.partner == 0:
            ended[me, pending.meeting] = ended.get((me, pending.meeting), 0) + 1
        model.move(me, what)
    model.check_end()
    # Twice where it died on its way: the wait, and the exchange.
    assert all(count <= 2 for count in ended.values())


def test_a_resumed_pool_does_what_is_left():
    store, pool = InProcess(), Pool(4, 12)

    def how(operation):
        return answer(store, operation)

    taken = [carry_out(pool.take(0), how) for _ in range(7)]
    assert taken == list(range(7))
    for item in (0, 1, 2, 3, 5):
        carry_out(pool.mark_done(0, item), how)
    begin, done = carry_out(pool.position(), how)
    assert (begin, done) == (4, [5])
    again, store = Pool(4, 12, begin, frozenset(done)), InProcess()
    items = []
    while (item := carry_out(again.take(1), how)) is not None:
        items.append(item)
        carry_out(again.mark_done(1, item), how)
    assert items == [4, 6, 7, 8, 9, 10, 11]
    assert carry_out(again.take_over(1), how) == ([], [])
    assert carry_out(again.position(), how) == (12, [])


def test_what_is_done_meanwhile_hides_nothing():
    """Item 1 is taken and done after `position` has asked how many are taken: item 0 is still at work."""
    store, pool = InProcess(), Pool(3, 3)

    def how(operation):
        return answer(store, operation)

    assert carry_out(pool.take(0), how) == 0
    position = pool.position()
    taken = how(next(position))
    assert carry_out(pool.take(1), how) == 1
    carry_out(pool.mark_done(1, 1), how)
    operation = position.send(taken)
    with pytest.raises(StopIteration) as end:
        while True:
            operation = position.send(how(operation))
    assert end.value.value == (0, [])


def test_what_is_given_back_is_taken_over():
    store, pool = InProcess(), Pool(3, 3)
    mine = [carry_out(pool.take(0), lambda operation: answer(store, operation)) for _ in range(4)]
    assert mine == [0, 1, 2, None]
    carry_out(pool.give_back(0, 1), lambda operation: answer(store, operation))

    def all_alive(operation):
        return answer(store, operation) if hasattr(operation, "key") else True

    assert carry_out(pool.take_over(1), all_alive) == ([1], [0, 2])


def test_alone_nobody_meets():
    for rule in get_args(Rule):
        # Not even the store is asked.
        assert carry_out(Pairing(0, 1, rule).meet(due=True), pytest.fail) == Meeting(None, False, False)
    with pytest.raises(ValueError, match="'any', 'prompt' or 'active_passive' .got 'some'"):
        Pairing(0, 2, "some")
