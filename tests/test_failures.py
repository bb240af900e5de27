"""A rank that fails ends the run within 10 s, says why once, and leaves nothing behind. Real processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from processes import REPOSITORY, Finished, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

SCRIPT = REPOSITORY / "tests" / "failing.py"


def fail(folder: Path, strategy: str, event: str) -> Finished:
    return run(SCRIPT, strategy, event, folder, cwd=folder)


happening = pytest.mark.ahead(runs=fail)


def ended(ahead: tuple[Path, Finished], within: float = 10.0) -> Finished:
    folder, finished = ahead
    took = finished.ended - float((folder / "when").read_text())
    assert took < within, f"took {took:.1f} s\n{finished.output}"
    assert not finished.left_over and not finished.files, (finished.left_over, finished.files)
    finished.output = re.sub(r"\[rank\d\]: ", "", finished.output)  # torch's mark on the lines of errors
    return finished


def failed(ahead: tuple[Path, Finished], within: float = 10.0) -> Finished:
    finished = ended(ahead, within)
    assert finished.code != 0, finished.output
    return finished


# Ranks of dgcl_spawn differ from those of dgcl_notebook in how they start; that one failure ends them is enough.


@happening
@pytest.mark.parametrize(
    ("strategy", "event"),
    [("dgcl", "raise 0"), ("dgcl", "raise 1"), ("dgcl_spawn", "raise 1"), ("dgcl_notebook", "raise 1")],
)
def test_what_a_rank_raises_is_shown_once(ahead, strategy, event):
    output = failed(ahead).output
    assert output.count(f"ValueError: the data of rank {event[-1]} is spoilt") <= 2  # in its traceback, and as a cause
    assert output.count("in on_train_epoch_start") == 1
    assert "CommunicationError" not in output.split("noticed so")[0] or strategy != "dgcl"


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "kill 1"), ("dgcl_notebook", "kill 1")])
def test_a_rank_that_is_killed_is_named(ahead, strategy, event):
    output = failed(ahead).output
    assert "Rank 1 failed.\nIts process was ended by SIGKILL." in output
    assert "on rank 0: rank 1 has ended" in output or strategy != "dgcl"


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "kill main"), ("dgcl_notebook", "kill main")])
def test_ranks_end_with_the_process_that_started_them(ahead, strategy, event):
    assert failed(ahead).code == -signal.SIGKILL


@happening
@pytest.mark.parametrize(
    ("strategy", "event"),
    [
        ("dgcl", "term main"),
        ("dgcl_notebook", "term main"),
        ("dgcl", "interrupt main"),
        ("dgcl_notebook", "interrupt main"),
    ],
)
def test_asked_to_end(ahead, strategy, event):
    code = ended(ahead, within=15.0).code
    assert (code == 0) == (event == "term main" and strategy == "dgcl")  # Lightning's own end


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "term 1")])
def test_asked_to_end_a_rank(ahead, strategy, event):
    assert "Rank 1 failed.\nIt was asked to end, by SIGTERM" in failed(ahead, within=15.0).output


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "exit 1")])
def test_a_rank_that_leaves(ahead, strategy, event):
    assert "Its process ended with exit status 7" in failed(ahead).output


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "raise-unheard all")])
def test_a_failure_that_rank_0_does_not_notice(ahead, strategy, event):
    output = failed(ahead).output
    assert "This process did not notice, and ends." in output
    assert output.count("ValueError: the data of rank 1 is spoilt") == 1


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "raise all")])
def test_ranks_that_all_raise_may_go_on(ahead, strategy, event):
    _, finished = ahead
    assert finished.succeeded().output.count("went on") == 1
