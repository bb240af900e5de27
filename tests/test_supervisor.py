"""The supervisor of started ranks: what it hears, and how it ends them. Processes without ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from multiprocessing import Pipe

import pytest

from lightning_gnn.comm.group import CommunicationError
from lightning_gnn.launching.failures import Apart, Failure, RankFailedError, Reporter
from lightning_gnn.launching.supervisor import Child, Supervisor

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


def child(rank: int, code: str) -> tuple[Child, Reporter]:
    reader, writer = Pipe(duplex=False)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    if "ready" in code:
        assert process.stdout is not None
        process.stdout.readline()
    return Child(rank, process.pid, process.poll, reader), Reporter(rank, writer)


def test_ends_within_bounds_even_what_ignores_sigterm():
    children = [child(1, IGNORES_SIGTERM)[0], child(2, "import time; time.sleep(60)")[0], child(3, "pass")[0]]
    supervisor, began = Supervisor(children), time.monotonic()
    supervisor.end(grace=0.5)
    assert time.monotonic() - began < 5 and not supervisor.running()
    assert [c.exit_code() for c in children] == [-9, -15, 0]


def test_the_cause_comes_before_its_consequences():
    (first, tells), (second, also) = child(1, "import sys; sys.exit(3)"), child(2, "import sys; sys.exit(1)")
    supervisor = Supervisor([first, second])
    tells.failed(CommunicationError("rank 2 has ended"))
    try:
        raise ValueError("spoilt")
    except ValueError as error:
        also.failed(error)
    assert supervisor.wait_for(supervisor.all_failed, 10)
    failures = supervisor.look()
    assert [(f.rank, f.about_peers) for f in failures] == [(2, False), (1, True)]
    assert isinstance(failures[0].exception, ValueError) and "in test_the_cause" in failures[0].text
    with pytest.raises(RankFailedError, match=r"(?s)Rank 2 failed\..*ValueError: spoilt"):
        raise failures[0].error()
    supervisor.end()


def test_a_process_that_ends_without_a_word():
    silent, _ = child(4, "import os; os.kill(os.getpid(), 9)")
    supervisor = Supervisor([silent])
    assert supervisor.wait_for(supervisor.all_failed, 10)
    assert supervisor.look()[0].text.startswith("Its process was ended by SIGKILL.")


def test_ranks_that_may_be_lost_do_not_concern_the_others(capfd):
    lost, tells = child(1, "import sys; sys.exit(3)")
    lives, _ = child(2, "print('ready', flush=True); import time; time.sleep(60)")
    supervisor = Supervisor([lost, lives], survives_lost_ranks=True)
    assert supervisor.wait_for(lambda: lost.exit_code() is not None, 10)
    assert [failure.rank for failure in supervisor.look()] == [1]  # the others would wait for it to meet them
    tells.send(Apart())
    assert supervisor.look() == [] and supervisor.look() == []
    assert capfd.readouterr().err.count("Rank 1 failed; the others go on.") == 1
    assert lives.exit_code() is None
    supervisor.begin(survives_lost_ranks=True)
    assert [failure.rank for failure in supervisor.look()] == [1]
    supervisor.end(grace=0.0)


def test_what_cannot_be_sent_is_told_in_words():
    class Local(Exception):
        pass

    failure = Failure.of(1, Local("inside"))
    assert failure.exception is None and "inside" in failure.text
