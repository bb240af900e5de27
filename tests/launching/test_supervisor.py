"""The supervisor of started ranks: what it hears, and how it ends them. Processes without ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

import pytest
import torch

from lightning_gnn import DGCLStrategy
from lightning_gnn.comm.group import CommunicationError
from lightning_gnn.comm.processes import REPORTED, Progress, current_progress
from lightning_gnn.launching import RankFailedError
from lightning_gnn.launching.failures import Failure
from lightning_gnn.launching.processes import ProcessLauncher
from lightning_gnn.launching.supervisor import Child, Reporter, Supervisor

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


def child(rank: int, code: str) -> tuple[Child, Reporter]:
    ours, theirs = Pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    if "ready" in code:
        assert process.stdout is not None
        process.stdout.readline()
    return Child(rank, process.pid, process.poll, ours), Reporter(rank, theirs)


def test_ends_within_bounds_even_what_ignores_sigterm():
    children = [child(1, IGNORES_SIGTERM)[0], child(2, "import time; time.sleep(60)")[0], child(3, "pass")[0]]
    supervisor, began = Supervisor(children), time.monotonic()
    supervisor.end(grace=0.5)
    assert time.monotonic() - began < 5 and not supervisor.running()
    assert [c.exit_code() for c in children] == [-9, -15, 0]


def test_helpers_of_ended_ranks_write_no_line():
    """The supervisor marks a rank before it ends it; a rank that ends by itself has its own mark."""
    children = [child(1, "import time; time.sleep(60)")[0], child(2, "pass")[0]]
    children[1].exit_code = lambda: 0
    for each in children:
        each.progress = Progress()
    Supervisor(children).end(grace=0.1)
    assert [each.progress.ending == REPORTED for each in children] == [True, False]


def test_the_cause_comes_before_its_consequences():
    current_progress().at("")  # an earlier test may have failed in its place
    (first, tells), (second, also) = child(1, "import sys; sys.exit(3)"), child(2, "import sys; sys.exit(1)")
    supervisor = Supervisor([first, second])
    tells.send_failure(CommunicationError("rank 2 has ended"))
    try:
        raise ValueError("spoilt")
    except ValueError as error:
        also.send_failure(error)
    assert supervisor.wait_for(supervisor.all_failed, 10)
    failures = supervisor.look()
    assert [(f.rank, f.about_peers) for f in failures] == [(2, False), (1, True)]
    assert isinstance(failures[0].exception, ValueError) and "in test_the_cause" in failures[0].traceback
    with pytest.raises(RankFailedError, match=r"(?s)ValueError: spoilt\n\nRank 2 failed: ValueError: spoilt$"):
        raise failures[0].error()
    supervisor.end()


def _fails_as_it_is_asked_to_end(connection: Connection) -> None:
    def fail() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises, as Lightning's does
        raise ValueError("spoilt")

    Reporter.send_failure = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[method-assign]
    launcher = ProcessLauncher(DGCLStrategy(), "fork")
    launcher._run(0, os.getppid(), connection, None, None, fail, (), {})


def test_a_rank_that_is_ended_while_it_says_why_it_failed_is_quiet(capfd):
    process = get_context("fork").Process(target=_fails_as_it_is_asked_to_end, args=(Pipe()[1],))
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGTERM
    assert "Traceback" not in capfd.readouterr().err


def test_a_process_that_ends_without_a_word():
    silent, _ = child(4, "import os; os.kill(os.getpid(), 9)")
    supervisor = Supervisor([silent])
    assert supervisor.wait_for(supervisor.all_failed, 10)
    assert str(supervisor.look()[0]).startswith("Rank 4 was ended by SIGKILL: ")


def test_where_a_process_was_that_ends_without_a_word():
    code = """
import os
from lightning_gnn.comm.processes import current_progress
current_progress().at("backward", 3)
print("ready", current_progress().address, flush=True)
input()
os.kill(os.getpid(), 9)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    address = process.stdout.readline().partition(" ")[2]
    ours, theirs = Pipe()
    supervisor = Supervisor([Child(1, process.pid, process.poll, ours)])
    Reporter(1, theirs).send("arrived", address)
    assert not supervisor.look()
    process.stdin.write("\n")
    process.stdin.flush()
    assert supervisor.wait_for(supervisor.all_failed, 10)
    assert str(supervisor.look()[0]).startswith("Rank 1 was ended by SIGKILL in epoch 3, backward: ")
    assert Progress.of(address) is None  # too late, for others


def test_what_cannot_be_sent_is_told_in_words():
    class Local(Exception):
        pass

    failure = Failure.of(1, Local("inside"))
    assert failure.exception is None and failure.reason == "Local: inside"


WAITS = """
import sys
from multiprocessing.connection import Connection
from lightning_gnn.launching.supervisor import Reporter
print("ready", flush=True)
if sys.argv[2:]:
    input()
print(Reporter(1, Connection(int(sys.argv[1]))).wait_for_start(), flush=True)
"""


def waiting(*arguments: str) -> tuple[Child, subprocess.Popen[bytes]]:
    ours, theirs = Pipe()
    command = [sys.executable, "-c", WAITS, str(theirs.fileno()), *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    return Child(1, process.pid, process.poll, ours), process


def test_a_rank_that_waits_gets_what_it_runs_with():
    child, process = waiting()
    Supervisor([child]).start_all({"lines": [1, 2]}, 120)
    assert process.stdout is not None
    assert process.stdout.read() == b"ready\n{'lines': [1, 2]}\n" and process.wait() == 0


@pytest.mark.parametrize("how", ["closed", "ended"])
def test_a_rank_that_is_not_started_ends_silently(how):
    child, process = waiting()
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    if how == "closed":  # as if this process had ended
        child.connection.close()
    else:
        Supervisor([child]).end(grace=0.0)
    assert process.wait(10) != 0 and not process.stdout.read()


def test_a_rank_that_does_not_arrive_is_named():
    late, process = waiting("later")
    with pytest.raises(RuntimeError, match=r"Rank.s. 1 did not reach this call of the Trainer within 1 s"):
        Supervisor([late]).start_all(None, 1)
    process.kill()
    with pytest.raises(RankFailedError, match="Rank 1 was ended by SIGKILL"):
        Supervisor([late]).start_all(None, 30)
    gone, _ = child(2, "pass")
    with pytest.raises(RankFailedError, match="Rank 2 ended: it did not reach this call of the Trainer"):
        Supervisor([gone]).start_all(None, 30)


def receives(local_rank: int, connection: Connection) -> None:
    reporter = Reporter(local_rank, connection)
    given = reporter.wait_for_start()
    given["tensors"][7][0] = -1.0
    right = all(float(tensor[1]) == index for index, tensor in enumerate(given["tensors"]))
    reporter.send("result", right and given["lock"].acquire(timeout=1))


def test_many_tensors_are_shared_with_a_process_that_runs():
    """And locks, which multiprocessing gives only to a process that is being started."""
    context = get_context("spawn")
    given = {"tensors": [torch.full((2,), float(index)) for index in range(300)], "lock": context.Lock()}
    ours, theirs = context.Pipe()
    process = context.Process(target=receives, args=(1, theirs))
    process.start()
    assert process.pid is not None
    supervisor = Supervisor([Child(1, process.pid, lambda: process.exitcode, ours)])
    supervisor.start_all(given, 200)
    assert supervisor.wait_for(lambda: process.exitcode is not None, 200) and not supervisor.look()
    assert supervisor.children[0].received["result"] is True
    assert given["tensors"][7][0] == -1.0 and not given["lock"].acquire(timeout=0.1)  # the same memory, the same lock
