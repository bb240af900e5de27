"""Owners that follow the speed of ranks: which nodes move, when they move, and runs in which they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import REPOSITORY, Finished, run

from lightning_gnn import DGCLStrategy, SamplingStrategy
from lightning_gnn.extensions.elastic.balance import Decisions, level_works
from lightning_gnn.extensions.elastic.memory import Room, has_room
from lightning_gnn.extensions.elastic.ownership import move_work, work_of_nodes

SCRIPT = REPOSITORY / "tests" / "balancing.py"

# Which nodes move ############################################################


@st.composite
def cuts(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns edges, owners and shares."""
    size, nodes = draw(st.integers(2, 4)), draw(st.integers(8, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owners = np.concatenate([np.arange(size), rng.integers(0, size, nodes - size)])
    shares = np.array(draw(st.lists(st.floats(0.05, 1), min_size=size, max_size=size)))
    return rng.integers(0, nodes, (2, draw(st.integers(0, 5 * nodes)))), owners, shares / shares.sum()


NO_FIT_AT_BORDER = (
    np.array([[11, 13, 17, 14], [8, 1, 18, 2]]),
    np.array([0, 1, 2, 3, 1, 3, 2, 2, 0, 0, 3, 1, 2, 3, 1, 1, 0, 3, 2, 0, 0, 0]),
    np.array([1, 4, 2, 8]) / 15,
)


@settings(deadline=None, max_examples=200)
@given(cuts())
@example(NO_FIT_AT_BORDER)
def test_only_ranks_with_too_much_work_lose_nodes(cut):
    edges, owners, shares = cut
    work = work_of_nodes(edges, len(owners)) + 1e-3  # a graph without edges
    found, total = move_work(edges, owners, work, shares), work.sum()
    before, after = (np.bincount(each, work, len(shares)) for each in (owners, found))
    assert found.shape == owners.shape and found.min() >= 0 and np.bincount(found, minlength=len(shares)).min() > 0
    loses, gains = before > shares * total, before < shares * total
    moved = found != owners
    assert loses[owners[moved]].all() and gains[found[moved]].all()
    assert (after[loses] >= (shares * total)[loses] - 1e-6).all() and (after[gains] <= (shares * total)[gains] + 1e-6).all()
    # The remaining work is less than that of any node that a rank could give, or a rank has one node.
    for giver in np.flatnonzero(loses & (np.bincount(found, minlength=len(shares)) > 1)):
        heaviest = work[found == giver].max()
        assert min(after[giver] - shares[giver] * total, (shares * total - after)[gains].max(initial=0)) < heaviest + 1e-6


def grid(side: int, seed: int) -> np.ndarray:
    """Returns the edges of a square grid whose nodes have a random order."""
    ids = np.random.default_rng(seed).permutation(side * side).reshape(side, side)
    pairs = ((ids[:, :-1], ids[:, 1:]), (ids[:-1], ids[1:]))
    edges = np.concatenate([np.stack([one.ravel(), other.ravel()]) for one, other in pairs], 1)
    return np.concatenate([edges, edges[::-1]], 1)


@pytest.mark.parametrize("seed", range(3))
def test_regions_at_the_border_move(seed):
    """Half a grid shrinks to a fifth, and grows again: the cut stays close to a straight line."""
    side, edges = 40, grid(40, seed)
    owners = np.empty(side * side, np.int32)
    owners[edges[0, : side * (side - 1)].reshape(side, side - 1)] = np.arange(side - 1) >= side // 2
    last = np.setdiff1d(np.arange(side * side), edges[0, : side * (side - 1)])
    owners[last] = 1
    for share in (0.2, 0.5):
        owners = move_work(edges, owners, work_of_nodes(edges, side * side), np.array([1 - share, share]))
        assert abs((owners == 1).mean() - share) < 0.02
        assert (owners[edges[0]] != owners[edges[1]]).sum() / 2 < 1.5 * side


def test_the_rest_of_a_graph_without_edges_moves():
    found = move_work(np.zeros((2, 0), np.int64), np.zeros(10, np.int32), np.ones(10), np.array([0.3, 0.7]))
    assert (found == 1).sum() == 7


# When they move ##############################################################


def simulate(speeds: Any, epochs: int, noise: float, seed: int, fixed: float = 0.0) -> tuple[np.ndarray, list[int]]:
    """Returns the seconds of each epoch, and the epochs before which nodes moved.

    Args:
        speeds: function of the epoch; returns the speed of each rank.
        noise: standard deviation of the seconds, as a fraction.
        fixed: seconds that do not depend on work, at speed 1.
    """
    rng, decisions, size = np.random.default_rng(seed), Decisions(), len(speeds(0))
    work, seconds, moves, since = np.full(size, 100.0), list[np.ndarray](), list[int](), 0
    for epoch in range(epochs):
        count = epoch - since
        if count >= 4 and count % 2 == 0:
            shares = decisions.next_shares(work, np.array(seconds[-3:]), 3.0, epochs - epoch)
            if shares is not None:
                work, since = shares * work.sum(), epoch
                moves.append(epoch)
        slowness = (1 + noise * rng.standard_normal(size)).clip(0.5) / speeds(epoch)
        seconds.append((fixed + work / 100) * slowness)
    return np.array(seconds).max(1), moves


def quarter(epoch: int) -> np.ndarray:
    return np.array([1.0, 0.25 if 10 <= epoch < 70 else 1.0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fixed", [0.0, 0.2])
def test_a_slow_rank_loses_nodes_once_and_gets_them_back(fixed, seed):
    seconds, moves = simulate(quarter, 110, 0.05, seed, fixed)
    assert np.median(seconds[20:70]) < seconds[12] / 1.8
    during, after = [[each for each in moves if low <= each < high] for low, high in ((10, 70), (70, 110))]
    assert 1 <= len(during) <= 3 and max(during) < 30 and 1 <= len(after) <= 3
    assert np.median(seconds[90:]) < 1.15 * np.median(seconds[:10])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_balanced_ranks_keep_their_nodes(noise, seed):
    assert simulate(lambda _: np.ones(3), 200, noise, seed)[1] == []


def test_moves_in_opposite_directions_become_rare():
    """A speed that changes every ten epochs is not followed forever."""
    _, moves = simulate(lambda epoch: np.array([1.0, 0.7 if epoch // 10 % 2 else 1.0]), 400, 0.0, 0)
    assert 1 <= len(moves) <= 6 and moves[-1] < 120


def test_no_move_that_does_not_pay_off_or_fit():
    work, seconds = np.array([100.0, 100.0]), np.array([[1.0, 4.0]] * 3)
    assert Decisions().next_shares(work, seconds, 10.0, 4) is None  # 2.4 s saved in each of 4 epochs
    found = Decisions().next_shares(work, seconds, 10.0, 5)
    assert found == pytest.approx([0.8, 0.2])
    once = np.array([[1.0, 1.0], [1.0, 4.0], [1.0, 4.0]])
    assert Decisions().next_shares(work, once, 0.0, 50) is None
    full = Decisions()
    full.full = [0]
    assert full.next_shares(work, seconds, 0.0, 50) is None
    assert full.next_shares(work, seconds[:, ::-1], 0.0, 50) is not None


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0.1, 10), st.floats(0, 0.8)), min_size=2, max_size=6))
def test_levelled_ranks_take_equally_long(ranks):
    work, seconds, fraction = np.array(ranks).T
    found, level = level_works(work, seconds, fraction * seconds)
    after = fraction * seconds + (1 - fraction) * seconds / work * found
    low, high = 0.02 * work.mean(), np.maximum(2 * work, work.mean())
    bound = (found < low * (1 + 1e-9)) | (found > high * (1 - 1e-9))
    assert (found > low * (1 - 1e-9)).all() and (found < high * (1 + 1e-9)).all()
    assert after.max() == pytest.approx(level)
    if not bound.all():
        assert found.sum() == pytest.approx(work.sum()) and after[~bound] == pytest.approx(after[~bound].max())
    assert level <= seconds.max() * (1 + 1e-9) or bound.any()


def test_a_rank_with_little_work_grows_to_the_mean_first():
    """Its seconds, mostly noise, would promise a speed of 16."""
    found, _ = level_works(np.array([190.0, 10.0]), np.array([1.9, 0.006]), np.zeros(2))
    assert found == pytest.approx([100, 100])


# Options #####################################################################


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"balance": True}, "elastic=True only"),
        ({"balance": [1, 1]}, "elastic=True only"),
        ({"balance": "fast", "elastic": True}, "must be True, False or the relative speed"),
        ({"balance": [1, 0], "elastic": True}, "speeds above 0"),
        ({"balance": [1, float("nan")], "elastic": True}, "finite"),
    ],
)
def test_invalid_options(options, said):
    with pytest.raises(ValueError, match=said):
        DGCLStrategy(**options)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (lambda: DGCLStrategy(elastic=True, balance=[1, 2, 3]), "one speed for each of the 2 ranks"),
        (lambda: SamplingStrategy(elastic=True, balance=True), "full-graph steps"),
        (lambda: DGCLStrategy(elastic=True, balance=True, plan="replicate", num_hops=2), "without replicas"),
        (lambda: DGCLStrategy(elastic=True, balance=True, memory_limit="1GB"), "ranks compute in turns"),
    ],
)
def test_unsupported_runs(strategy, said):
    with pytest.raises(ValueError, match=said):
        L.Trainer(strategy=strategy(), devices=2, accelerator="cpu")


def test_memory_is_shared_by_ranks_of_a_machine():
    """Without a prediction: the ranks fit even if all their memory grows."""
    rooms = [Room("a", 100, 0, 20), Room("a", 100, 0, 20), Room("b", 50, 0, 20)]
    assert has_room(None, None, rooms, None, None, np.array([1.5, 0.5, 1.0]))
    with pytest.raises(AttributeError):  # needs the prediction, and there is no Trainer
        has_room(None, None, rooms, None, None, np.array([1.5, 1.5, 1.0]))


# Runs ########################################################################


def balance(folder: Path, **options: Any) -> Finished:
    return run(SCRIPT, folder, json.dumps(options), cwd=folder, timeout=55)


happening = pytest.mark.program(runs=balance)
SLEEPS = [0.0006, 0.0024]
EPOCHS = 10


def epochs_of(ran: tuple[Path, Finished], epochs: int) -> list[dict[str, Any]]:
    """Returns the lines of rank 0, after checks that each rank has had each epoch once, with equal losses."""
    folder, finished = ran
    finished.succeeded()
    of_ranks = [[json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()] for rank in range(2)]
    assert of_ranks[0] == of_ranks[1] and [line["epoch"] for line in of_ranks[0]] == list(range(epochs))
    assert all(sum(line["nodes"]) == 1000 for line in of_ranks[0])
    return of_ranks[0]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses without moves."""
    folder = tmp_path_factory.mktemp("still")
    lines = epochs_of((folder, balance(folder, balance=False, epochs=EPOCHS)), EPOCHS)
    assert len({tuple(line["nodes"]) for line in lines}) == 1
    return [line["loss"] for line in lines]


pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
@happening
@pytest.mark.parametrize(("balance", "epochs", "seconds_per_node"), [(True, EPOCHS, SLEEPS), (True, EPOCHS, SLEEPS[::-1])])
def test_a_rank_that_sleeps_loses_nodes(ran, balance, epochs, seconds_per_node, losses):
    lines = epochs_of(ran, epochs)
    slow = seconds_per_node.index(max(seconds_per_node))
    assert lines[0]["nodes"][slow] > 450 and 100 < lines[-1]["nodes"][slow] < 350
    assert 2 <= len({tuple(line["nodes"]) for line in lines}) <= 3
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-10)


@pytest.mark.slow
@happening
@pytest.mark.parametrize(("balance", "epochs", "seconds_per_node"), [(True, EPOCHS, [0.002, 0.002])])
def test_ranks_that_sleep_equally_keep_their_nodes(ran, balance, epochs, seconds_per_node, losses):
    lines = epochs_of(ran, epochs)
    assert len({tuple(line["nodes"]) for line in lines}) == 1
    assert [line["loss"] for line in lines] == losses


@pytest.mark.slow
@happening
@pytest.mark.parametrize(("balance", "epochs", "available"), [([3, 1], 3, 200_000_000), ([3, 1], 3, 1000)])
def test_given_speeds_and_memory(ran, balance, epochs, available, losses):
    """With little memory the exact prediction decides; without memory no node moves."""
    lines = epochs_of(ran, epochs)
    shares = [line["nodes"][0] for line in lines]
    warned = "the memory of ranks [0] is predicted not to suffice" in ran[1].output
    assert (min(shares) > 700 and not warned) if available > 1000 else (max(shares) < 550 and warned)
    assert [line["loss"] for line in lines] == pytest.approx(losses[:epochs], rel=1e-10)


@pytest.mark.slow
@happening
@pytest.mark.parametrize(("balance", "epochs", "ranks", "dies"), [([2, 1, 3], 4, 3, [3, 0, 2])])
def test_given_speeds_of_ranks_that_remain(ran, balance, epochs, ranks, dies, losses):
    """Rank 0 is killed, and ranks 1 and 2 become ranks 0 and 1."""
    folder, finished = ran
    lines = [json.loads(line) for line in (folder / "rank-0").read_text().splitlines()]
    assert [len(line["nodes"]) for line in lines] == [3, 3, 2, 2], finished.output
    for line in lines:
        expected = np.array([2, 1, 3] if len(line["nodes"]) == 3 else [1, 3])
        assert np.array(line["nodes"]) / 1000 == pytest.approx(expected / expected.sum(), abs=0.06)
    assert [line["loss"] for line in lines] == pytest.approx(losses[:epochs], rel=1e-10)
