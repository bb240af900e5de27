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


happening = pytest.mark.program(runs=fail)


def ended(ran: tuple[Path, Finished], within: float = 10.0) -> Finished:
    folder, finished = ran
    took = finished.ended - float((folder / "when").read_text())
    assert took < within, f"took {took:.1f} s\n{finished.output}"
    assert not finished.left_over and not finished.files, (finished.left_over, finished.files)
    finished.output = re.sub(r"\[rank\d\]: ", "", finished.output)  # torch's mark on the lines of errors
    return finished


def failed(ran: tuple[Path, Finished], within: float = 10.0) -> Finished:
    finished = ended(ran, within)
    assert finished.code != 0, finished.output
    return finished


def last_line(output: str) -> str:
    return output.rstrip().splitlines()[-1]


# Ranks of dgcl_spawn differ from those of dgcl_notebook in how they start; that one failure ends them is enough.


@happening
@pytest.mark.parametrize(
    ("strategy", "event"),
    [("dgcl", "raise 0"), ("dgcl", "raise 1"), ("dgcl_spawn", "raise 1"), ("dgcl_notebook", "raise 1")],
)
def test_what_a_rank_raises_is_shown_once_and_last(ran, strategy, event):
    """One traceback, that of the user's code, and then a line that says which rank, where and why."""
    output = failed(ran).output
    said = f"ValueError: the data of rank {event[-1]} is spoilt"
    assert output.count("Traceback (most recent call last)") == output.count("in on_train_epoch_start\n") == 1
    assert output.count(said) == 2 and "CommunicationError" not in output
    assert last_line(output) == f"Rank {event[-1]} failed in epoch 3, the epoch's start: {said}"


@happening
@pytest.mark.parametrize(
    ("strategy", "event"),
    [("dgcl", "kill 1"), ("dgcl_spawn", "kill 1"), ("dgcl_notebook", "kill 1"), ("dgcl", "backward 1")],
)
def test_a_rank_that_is_killed_is_named(ran, strategy, event):
    output = failed(ran).output
    assert "Traceback" not in output
    place = f"epoch 3, {'backward' if event == 'backward 1' else 'the epoch.s start'}"
    assert re.fullmatch(rf"Rank 1 was ended by SIGKILL in {place}: if this was not .* run out of memory", last_line(output))


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "kill main"), ("dgcl_notebook", "kill main")])
def test_ranks_end_with_the_process_that_started_them(ran, strategy, event):
    assert failed(ran).code == -signal.SIGKILL


@happening
@pytest.mark.parametrize(
    ("strategy", "event"),
    [
        ("dgcl", "term main"),
        ("dgcl", "term main behind"),
        ("dgcl_notebook", "term main"),
        ("dgcl", "interrupt main"),
        ("dgcl_notebook", "interrupt main"),
    ],
)
def test_asked_to_end(ran, strategy, event):
    code = ended(ran, within=15.0).code
    assert (code == 0) == (event.startswith("term main") and strategy == "dgcl")  # Lightning's own end


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "term 1")])
def test_asked_to_end_a_rank(ran, strategy, event):
    assert last_line(failed(ran, within=15.0).output).startswith("Rank 1 was asked to end by SIGTERM in epoch ")


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "exit 1")])
def test_a_rank_that_leaves(ran, strategy, event):
    output = failed(ran).output
    assert output.count("Traceback (most recent call last)") == output.count("in on_train_epoch_start\n") == 1
    assert last_line(output) == "Rank 1 left in epoch 3, the epoch's start: sys.exit(7)"


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "raise-unheard all")])
def test_a_failure_that_rank_0_does_not_notice(ran, strategy, event):
    output = failed(ran).output
    assert "This process did not detect the failure of another rank, and ends." in output
    assert output.count("Traceback (most recent call last)") == 1
    assert re.fullmatch(r"Rank 1 failed in .*: ValueError: the data of rank 1 is spoilt", last_line(output))


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "raise all")])
def test_ranks_that_all_raise_may_go_on(ran, strategy, event):
    _, finished = ran
    assert finished.succeeded().output.count("went on") == 1


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "refused"), ("dgcl_spawn", "refused")])
def test_a_run_that_is_refused_ends_its_other_ranks_without_noise(ran, strategy, event):
    _, finished = ran
    assert finished.code == 1 and not finished.left_over and not finished.files, finished
    assert finished.output.count("Traceback (most recent call last)") == 1
    assert "UnsupportedModelError" in finished.output and "rank: 1" not in finished.output


@happening
@pytest.mark.parametrize(
    ("strategy", "event"), [("dgcl", "kills itself in the check"), ("dgcl", "interrupted in the check")]
)
def test_ranks_that_wait_to_start_end_with_the_process_that_started_them(ran, strategy, event):
    folder, finished = ran
    took = finished.ended - float((folder / "when").read_text())
    assert took < 10 and finished.code != 0 and not finished.left_over and not finished.files, (took, finished)
    assert finished.output.count("Traceback (most recent call last)") <= 1


@happening
@pytest.mark.parametrize(("strategy", "event"), [("dgcl", "goes on alone")])
def test_who_catches_a_refusal_may_go_on_on_one_device(ran, strategy, event):
    _, finished = ran
    assert finished.succeeded().output.count("trained alone") == 1
