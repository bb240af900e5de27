"""Ranks of an elastic training are lost by signals, and the others compute what one device does. Real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from losing_ranks import EPOCHS, train
from processes import REPOSITORY, Finished, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

SCRIPT = REPOSITORY / "tests" / "losing_ranks.py"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one device."""
    return train(tmp_path_factory.mktemp("one"))


def losses(finished: Finished, size: int) -> list[tuple[int, float]]:
    """Returns the epochs and losses of ranks of a run of `size` ranks."""
    lines = re.findall(rf"^loss \d/{size} (\d+) (\S+)$", finished.output, re.MULTILINE)
    return [(int(epoch), float.fromhex(value)) for epoch, value in lines]


def lose(folder: Path, expected: dict[int, float], ranks: int, memory: str, timeout: float, *events: str) -> Finished:
    """Runs the script, of which ranks are lost, and compares with one device."""
    finished = run(SCRIPT, ranks, memory, timeout, *events, cwd=folder, timeout=50).succeeded()
    assert len(list(folder.glob("lost-*"))) == len(events)
    everything = [each for size in range(1, ranks + 1) for each in losses(finished, size)]
    assert {epoch for epoch, _ in everything} == set(expected) == set(range(EPOCHS + 1))
    for epoch, loss in everything:
        assert loss == pytest.approx(expected[epoch], rel=1e-10, abs=0), (epoch, finished.output)
    return finished


def test_a_killed_rank_in_the_middle(tmp_path, expected):
    finished = lose(tmp_path, expected, 3, "shared", 1800, "1:forward:2:SIGKILL")
    assert [epoch for epoch, _ in losses(finished, 3)] == [0, 0, 0, 1, 1, 1]
    assert [epoch for epoch, _ in losses(finished, 2)] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert re.search(r"^Rank 1 was ended by SIGKILL in epoch 2, ", finished.output, re.MULTILINE)


def test_killed_first_ranks(tmp_path, expected):
    """The second is lost while the others meet without the first."""
    finished = lose(tmp_path, expected, 3, "sockets", 1800, "0:forward:3:SIGKILL", "1:set-up again:0:SIGKILL")
    assert [epoch for epoch, _ in losses(finished, 1)] == [3, 4, 5]


def test_a_stopped_rank(tmp_path, expected):
    finished = lose(tmp_path, expected, 3, "sockets", 5, "2:forward:2:SIGSTOP")
    assert [epoch for epoch, _ in losses(finished, 2)] == [2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    "event", ["0:fit's end:0:SIGKILL", pytest.param("1:before the test:0:SIGKILL", marks=pytest.mark.campaign)]
)
def test_a_rank_killed_after_its_last_step(event, tmp_path, expected):
    """No step is repeated, and the others test without it."""
    finished = lose(tmp_path, expected, 3, "shared", 1800, event)
    assert [epoch for epoch, _ in losses(finished, 3)] == [epoch for epoch in range(5) for _ in range(3)]
    assert [epoch for epoch, _ in losses(finished, 2)] == [5, 5]


@pytest.mark.campaign
def test_a_rank_that_computes_while_another_is_lost(tmp_path, expected):
    """Its helper process does not end it."""
    finished = lose(tmp_path, expected, 3, "shared", 1800, "1:forward:2:SIGKILL", "2:forward:2:SLEEP")
    assert [epoch for epoch, _ in losses(finished, 2)] == [2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.campaign
def test_ranks_that_end_a_fit_wait_for_one_that_cannot(tmp_path, expected):
    finished = lose(tmp_path, expected, 3, "shared", 1800, "2:fit's end:0:SIGKILL", "1:fit's end:0:ERROR")
    assert [epoch for epoch, _ in losses(finished, 2)] == [4, 4, 5, 5]


@pytest.mark.campaign
@pytest.mark.timeout(1500)
def test_signals_at_random_moments(tmp_path):
    benchmark, file = REPOSITORY / "benchmarks" / "elastic.py", tmp_path / "trials.json"
    run(benchmark, "--kills", 20, "--seed", 1, "--json", file, cwd=tmp_path, timeout=1400).succeeded()
    assert [trial["problems"] for trial in json.loads(file.read_text())["trials"]] == [[]] * 20
