"""Ranks that do without those that are lost, and those that are started again. Processes without ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_gnn import ClusterAllReduceStrategy, GossipStrategy
from lightning_gnn.launching import InPlaceLauncher
from lightning_gnn.launching.processes import ProcessLauncher
from lightning_gnn.launching.script import ScriptLauncher
from lightning_gnn.launching.supervisor import Child, Reporter, Supervisor
from lightning_gnn.strategies.gossip.launcher import Losses, SurvivingProcessLauncher, SurvivingScriptLauncher, surviving

PLACE = "where they meet"


def child(rank: int, code: str) -> tuple[Child, Reporter]:
    ours, theirs = Pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    return Child(rank, process.pid, process.poll, ours), Reporter(rank, theirs)


def never(lost: Child, place: str) -> Child:
    pytest.fail("it is not to be started again")


def test_ranks_that_may_be_lost_do_not_concern_the_others(capfd):
    lost, tells = child(1, "import sys; sys.exit(3)")
    lives, _ = child(2, "import time; time.sleep(60)")
    supervisor = Supervisor([lost, lives])
    supervisor.begin(Losses(supervisor, never, 0).select_fatal)
    assert supervisor.wait_for(lambda: lost.exit_code() is not None, 10)
    assert [failure.rank for failure in supervisor.look()] == [1]  # the others would wait for it to meet them
    tells.send("independent", PLACE)
    assert supervisor.look() == [] and supervisor.look() == []
    told = capfd.readouterr().err
    assert told == "Rank 1 ended with exit status 3: see its output; the others go on.\n"
    assert lives.exit_code() is None
    strategy: Any = SimpleNamespace(most_restarts=0)
    for launcher in (SurvivingScriptLauncher(strategy), ScriptLauncher(strategy)):
        launcher._begin(supervisor, False)  # another call
        assert [failure.rank for failure in supervisor.look()] == [1]
    supervisor.end(grace=0.0)


KILLED = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("rank", "code", "again"), [(1, KILLED, True), (0, KILLED, False), (1, "import sys; sys.exit(3)", False)]
)
def test_ranks_that_were_killed_are_started_again_so_often(capfd, rank, code, again):
    first, tells = child(rank, code)
    supervisor, places = Supervisor([first]), list[str]()

    def start_again(lost: Child, place: str) -> Child:
        places.append(place)
        return child(lost.rank, code)[0]  # which is killed before it says anything

    supervisor.begin(Losses(supervisor, start_again, 2).select_fatal)
    tells.send("independent", PLACE)
    for expected in range(1, 4):
        [current] = supervisor.children
        assert supervisor.wait_for(lambda: current.exit_code() is not None, 10)  # noqa: B023
        assert supervisor.look() == [] and places == [PLACE] * (min(expected, 2) * again)
    told = capfd.readouterr().err.splitlines()
    told_again = [line.endswith("it is started again, and the others go on.") for line in told]
    assert told_again == ([True, True, False] if again else [False])
    supervisor.end(grace=0.0)


def test_none_is_started_again_once_all_are_ended():
    first, tells = child(1, "import time; time.sleep(60)")
    supervisor = Supervisor([first])
    supervisor.begin(Losses(supervisor, never, 2).select_fatal)
    tells.send("independent", PLACE)
    supervisor.end(grace=0.0)
    assert first.exit_code() == -signal.SIGTERM and supervisor.look() == []


def test_which_strategies_survive():
    """Each way to start ranks has a launcher of its own under gossip; what starts none stays."""
    gossip: Any = GossipStrategy()
    assert type(surviving(ScriptLauncher(gossip))) is SurvivingScriptLauncher
    assert type(surviving(ProcessLauncher(gossip, "spawn"))) is SurvivingProcessLauncher
    alone = InPlaceLauncher()
    assert surviving(alone) is alone
    for strategy, kind in ((gossip, SurvivingScriptLauncher), (ClusterAllReduceStrategy(), ScriptLauncher)):
        strategy.cluster_environment = LightningEnvironment()
        strategy.parallel_devices = [torch.device("cpu")] * 2
        strategy._configure_launcher()
        assert type(strategy._launcher) is kind
