"""A rank that fails ends the run within 10 s, says why once, and leaves nothing behind. Real processes."""

from __future__ import annotations

import re
import signal

import pytest
from processes import REPOSITORY, Finished, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

SCRIPT = REPOSITORY / "tests" / "failing.py"
METHODS = ["dgcl", "dgcl_spawn", "dgcl_notebook"]


def happen(strategy, event, folder, within=10.0) -> Finished:
    finished = run(SCRIPT, strategy, event, folder, cwd=folder)
    assert (finished.code == 0) == (event == "term main" and strategy == "dgcl"), finished.output  # Lightning's own end
    took = finished.ended - float((folder / "when").read_text())
    assert took < within, f"took {took:.1f} s\n{finished.output}"
    assert not finished.left_over and not finished.files, (finished.left_over, finished.files)
    finished.output = re.sub(r"\[rank\d\]: ", "", finished.output)  # torch's mark on the lines of errors
    return finished


@pytest.mark.parametrize(("strategy", "rank"), [("dgcl", 0), *((method, 1) for method in METHODS)])
def test_what_a_rank_raises_is_shown_once(tmp_path, strategy, rank):
    output = happen(strategy, f"raise {rank}", tmp_path).output
    assert output.count(f"ValueError: the data of rank {rank} is spoilt") <= 2  # in its traceback, and as a cause
    assert output.count("in on_train_epoch_start") == 1
    assert "CommunicationError" not in output.split("noticed so")[0] or strategy != "dgcl"


@pytest.mark.parametrize(
    ("strategy", "rank"), [("dgcl", "main"), ("dgcl_notebook", "main"), *((method, "1") for method in METHODS)]
)
def test_killed(tmp_path, strategy, rank):
    finished = happen(strategy, f"kill {rank}", tmp_path)
    if rank == "1":
        assert "Rank 1 failed.\nIts process was ended by SIGKILL." in finished.output
    else:
        assert finished.code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("strategy", "what"),
    [("dgcl", "term"), ("dgcl_spawn", "term"), ("dgcl", "interrupt"), ("dgcl_notebook", "interrupt")],
)
def test_asked_to_end(tmp_path, strategy, what):
    happen(strategy, f"{what} main", tmp_path, within=15.0)


def test_asked_to_end_a_rank(tmp_path):
    assert "Rank 1 failed.\nIt was asked to end, by SIGTERM" in happen("dgcl", "term 1", tmp_path, within=15.0).output


def test_a_rank_that_leaves(tmp_path):
    assert "Its process ended with exit status 7" in happen("dgcl", "exit 1", tmp_path).output


def test_a_failure_that_rank_0_does_not_notice(tmp_path):
    output = happen("dgcl", "raise-unheard all", tmp_path).output
    assert "This process did not notice, and ends." in output
    assert output.count("ValueError: the data of rank 1 is spoilt") == 1


def test_ranks_that_all_raise_may_go_on(tmp_path):
    finished = run(SCRIPT, "dgcl", "raise all", tmp_path, cwd=tmp_path).succeeded()
    assert finished.output.count("went on") == 1
