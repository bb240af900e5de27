"""A rank that is lost ends the others soon, however they were started and whatever they are in. Real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from common import campaign
from conftest import SHARED
from processes import REPOSITORY, Finished, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

SCRIPT = REPOSITORY / "tests" / "dying.py"
NETLAB = SHARED / "netlab" / "netlab.py"
BOUND_S = 30.0
"""Against hangs; ``benchmarks/liveness.py`` measures."""

LAUNCHER, BY_HAND, TORCHRUN = "launcher", "by hand", "torchrun"
STUCK = "while others are stuck"


def die(
    folder: Path, start: str, event: str, memory: str = "shared", timeout: float = 100.0, ranks: int = 2, **more: str
) -> Finished:
    command = {
        LAUNCHER: [SCRIPT],
        BY_HAND: [SCRIPT, "by-hand"],
        TORCHRUN: ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, SCRIPT],
    }[start]
    variables = {"DYING_RANKS": str(ranks), **more}
    return run(*command, event, memory, timeout, folder, cwd=folder, timeout=50, variables=variables)


happening = pytest.mark.program(runs=die)


def last_lines(ran: tuple[Path, Finished]) -> dict[int, str]:
    """Returns the last line of each rank's stderr, after checks of the end of all processes."""
    folder, finished = ran
    files = sorted(folder.glob("stderr-*"))
    everything = "\n".join([finished.output, *(file.read_text() for file in files)])
    took = finished.ended - float((folder / "when").read_text())
    assert took < BOUND_S, f"took {took:.1f} s\n{everything}"
    assert finished.code != 0 and not finished.left_over and not finished.files, (finished, everything)
    if not files:  # all ranks share one stream
        return {0: finished.output.rstrip().splitlines()[-1]}
    return {int(file.name[-1]): ["", *file.read_text().rstrip().splitlines()][-1] for file in files}


PLACE = "in epoch 3, the epoch's start"


@happening
@pytest.mark.parametrize(
    ("start", "event", "memory", "ranks"),
    [
        (BY_HAND, "kill", "shared", 2),
        (TORCHRUN, "kill", "sockets", 2),
        (BY_HAND, "kill", "sockets", 3),
        (TORCHRUN, "kill", "shared", 3),
        (LAUNCHER, "kill", "sockets", 3),
    ],
)
def test_a_killed_rank(ran, start, event, memory, ranks):
    folder = ran[0]
    lines = last_lines(ran)
    assert f"ank 1 was ended by SIGKILL {PLACE}" in lines.pop(1, f"Rank 1 was ended by SIGKILL {PLACE}")
    for rank, line in lines.items():
        named = re.search(rf"[Rr]ank 1 (was ended by SIGKILL|has ended) {PLACE}", line)
        operation = start == LAUNCHER or re.match(rf"Rank {rank} (cannot go on in .*step|was asked to end)", line)
        assert named and operation, lines
        if start != TORCHRUN:  # which asks them to end before they notice
            assert (folder / f"on_exception-{rank}").exists()


@happening
@pytest.mark.parametrize(
    ("start", "event", "memory", "ranks"),
    [
        (LAUNCHER, f"kill {STUCK}", "shared", 2),
        (BY_HAND, f"kill {STUCK}", "sockets", 3),
        (TORCHRUN, f"kill {STUCK}", "shared", 2),
    ],
)
def test_a_killed_rank_while_others_are_in_a_call_that_never_returns(ran, start, event, memory, ranks):
    """They hold the interpreter lock: no thread of theirs could help."""
    for rank, line in last_lines(ran).items():
        if rank == 1:
            assert line == f"Rank 1 was ended by SIGKILL {PLACE}"
        else:
            assert re.fullmatch(rf"Rank {rank} cannot go on {PLACE}: rank 1 (was ended by SIGKILL|has ended) {PLACE}", line)


@happening
@pytest.mark.parametrize(("start", "event", "memory", "ranks"), [(BY_HAND, f"vanish {STUCK}", "sockets", 3)])
def test_a_rank_that_ends_with_its_helper(ran, start, event, memory, ranks):
    """As at the loss of a machine: no helper of that rank says so."""
    lines = last_lines(ran)
    for rank in (0, 2):
        assert re.fullmatch(rf"Rank {rank} cannot go on {PLACE}: rank 1 has ended, with its helper process: .*", lines[rank])


@pytest.mark.parametrize(
    ("ranks", "graph_ranks", "event"),
    [
        (2, 1, "kill"),
        (2, 2, "kill"),
        *campaign((4, 2, "kill"), (4, 2, f"kill {STUCK}"), (4, 2, "stop"), (4, 2, "raise"), (4, 1, "kill")),
    ],
)
def test_a_lost_rank_of_a_mesh(ranks, graph_ranks, event, tmp_path):
    """The ranks of all groups end, and name the rank, also those that exchange nothing with it."""
    variables = {"DYING_GRAPH_RANKS": str(graph_ranks)}
    timeout = 5.0 if event == "stop" else 100.0
    lines = last_lines((tmp_path, die(tmp_path, BY_HAND, event, "sockets", timeout, ranks, **variables)))
    how = {"stop": "has been stopped for 5 s", "raise": "ended with exit status 1"}.get(event, "was ended by SIGKILL|has ended")
    for rank in set(range(ranks)) - {1}:
        expected = rf"Rank {rank} cannot go on in epoch 3, .*: rank 1 (({how}) in epoch 3, backward|has not responded for 5 s).*"
        assert re.fullmatch(expected, lines[rank]), lines


ON_DEVICE = {"DYING_ON_DEVICE": "1", "LIGHTNING_GNN_TEST_NEVER_RETURNS": "1"}


@pytest.mark.parametrize("event", ["kill", *campaign("stop")])
def test_a_lost_rank_on_a_device_whose_waits_never_return(event, tmp_path):
    """As NCCL's: nothing raises in the other rank, and its main thread holds the interpreter lock."""
    lines = last_lines((tmp_path, die(tmp_path, BY_HAND, event, timeout=100.0 if event == "kill" else 5.0, **ON_DEVICE)))
    how = "was ended by SIGKILL|has ended" if event == "kill" else "has been stopped for 5 s|has not responded for 5 s.*"
    assert re.match(rf"Rank 0 cannot go on in epoch 3, .*, .*step \d+: rank 1 ({how})", lines[0]), lines


@pytest.mark.parametrize("event", ["kill", *campaign("stop")])
def test_a_lost_rank_on_a_device_whose_waits_end_when_communicators_are_aborted(event, tmp_path):
    """The other rank raises an error, which hooks receive. Afterwards, the emulated device cannot move the module to the CPU."""
    given = ON_DEVICE | {"LIGHTNING_GNN_TEST_NEVER_RETURNS": "abort"}
    last_lines((tmp_path, die(tmp_path, BY_HAND, event, timeout=100.0 if event == "kill" else 5.0, **given)))
    how = "was ended by SIGKILL|has ended" if event == "kill" else "has been stopped for 5 s|has not responded for 5 s.*"
    errors = (tmp_path / "stderr-0").read_text()
    assert re.search(rf"Rank 0 cannot go on in epoch 3, .*step \d+: rank 1 ({how})", errors), errors
    assert (tmp_path / "on_exception-0").exists()


@happening
@pytest.mark.parametrize(
    ("start", "event", "memory", "timeout", "ranks"),
    [
        (BY_HAND, "stop", "shared", 5.0, 2),
        (LAUNCHER, "stop", "sockets", 5.0, 2),
        (BY_HAND, f"stop {STUCK}", "shared", 5.0, 2),
        (TORCHRUN, "stop", "shared", 5.0, 3),
        (BY_HAND, "stop", "sockets", 5.0, 3),
    ],
)
def test_a_stopped_rank(ran, start, event, memory, timeout, ranks):
    for rank, line in last_lines(ran).items():
        assert "rank 1 has been stopped for 5 s" in line or "rank 1 has not responded for 5 s" in line, line
        assert start == LAUNCHER or re.match(rf"Rank {rank} (cannot go on|was asked to end by SIGTERM) in epoch 3, ", line), line


@pytest.mark.campaign
def test_a_machine_without_network(tmp_path):
    """Two network namespaces; rank 1 takes the interfaces of its own down, so that no connection is closed."""
    if not NETLAB.exists():
        pytest.skip(f"needs {NETLAB} (set LIGHTNING_GNN_SHARED to the folder that holds netlab/)")
    if os.name != "posix" or subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to make network namespaces")
    rank = f"NODE_RANK=$RANK LOCAL_RANK=0 exec {sys.executable} {SCRIPT} cut sockets 5 {tmp_path}"
    lab = (NETLAB, "run", REPOSITORY / "tests" / "two_machines.json", "--grace", 40, "--timeout", 50, "--", "sh", "-c", rank)
    ran = tmp_path, run(*lab, cwd=tmp_path, timeout=55, variables={"DYING_MACHINES": "2"}, warm=False)
    for rank, line in last_lines(ran).items():
        assert re.match(rf"Rank {rank} cannot go on in epoch 3, .*: rank {1 - rank} has not responded for 5 s", line), line


@happening
@pytest.mark.parametrize(("start", "event", "memory", "timeout"), [(BY_HAND, "sleep", "sockets", 5.0)])
def test_a_rank_that_sleeps_past_the_deadline_of_a_wait(ran, start, event, memory, timeout):
    for rank, line in last_lines(ran).items():
        assert line.startswith(f"Rank {rank} ") and PLACE in line and "Lightning's check" in line, line


@happening
@pytest.mark.parametrize(
    ("start", "event", "memory"),
    [(BY_HAND, "raise", "shared"), (LAUNCHER, "raise", "sockets"), (TORCHRUN, "raise", "shared")],
)
def test_a_rank_that_raises(ran, start, event, memory):
    lines = last_lines(ran)
    failure = f"Rank 1 failed {PLACE}: ValueError: the data of rank 1 is spoilt"
    assert lines.get(1, failure) == failure
    assert lines[0] == failure if start == LAUNCHER else "rank 1" in lines[0], lines


@happening
@pytest.mark.parametrize(
    ("start", "event", "memory", "timeout"), [(BY_HAND, "hold", "shared", 5.0), (TORCHRUN, "hold", "sockets", 5.0)]
)
def test_ranks_that_hold_the_interpreter_lock_are_not_lost(ran, start, event, memory, timeout):
    folder, finished = ran
    assert finished.succeeded().output.count("finished") == 2
    assert not any("Watchdog" in file.read_text() for file in folder.glob("stderr-*"))


@happening
@pytest.mark.parametrize(("start", "event", "memory"), [(LAUNCHER, "twice", "shared"), (BY_HAND, "twice", "sockets")])
def test_several_calls_of_a_trainer_leave_nothing_behind(ran, start, event, memory):
    assert ran[1].succeeded().output.count("finished") == 2


@happening
@pytest.mark.parametrize(("start", "event", "memory"), [(BY_HAND, "leave", "sockets")])
def test_a_rank_that_has_ended_normally_is_not_lost(ran, start, event, memory):
    """Rank 1 leaves some seconds after the end of rank 0."""
    assert ran[1].succeeded().output.count("finished") == 2
