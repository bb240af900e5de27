"""Ranks that others have started say which rank of their machine was gone. Processes without ranks, but for one test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gnn.comm import processes
from lightning_gnn.comm.group import World
from lightning_gnn.comm.processes import Progress
from lightning_gnn.launching import script
from lightning_gnn.launching.script import ScriptLauncher
from lightning_gnn.strategies.gossip.launcher import SurvivingScriptLauncher

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:14052: Connection reset by peer.")


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """The process of rank 1, as this process, rank 0, has met it; rank 2 is on another machine."""
    monkeypatch.setattr(processes, "_current", None)
    monkeypatch.setattr(processes, "_pids", {})
    monkeypatch.setattr(processes, "_progress", {})
    process, store = subprocess.Popen(["sleep", "60"]), dist.HashStore()
    progress = Progress()
    progress.at("backward", 3)
    store.set("process/1", json.dumps([process.pid, "here", progress.address]))
    store.set("process/2", json.dumps([process.pid, "there", ""]))
    processes.meet(store, 0, 3, "here")
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> ScriptLauncher:
    monkeypatch.setattr(script, "set_num_threads", lambda num_processes: None)
    monkeypatch.setattr(script, "end_after", lambda seconds, code: None)
    monkeypatch.setattr(script, "show_once", lambda: None)
    environment = SimpleNamespace(validate_settings=lambda **_: None, creates_processes_externally=True)
    strategy: Any = SimpleNamespace(cluster_environment=environment, num_processes=3, num_nodes=1, global_rank=0)
    return ScriptLauncher(strategy)


def fails(error: Exception) -> None:
    raise error


def test_a_lost_connection_names_the_rank_that_ended(other, launcher, capfd):
    def loses() -> None:
        other.kill()
        raise GLOO

    with pytest.raises(RuntimeError, match="Connection reset"):
        launcher.launch(loses)
    assert "Rank 0 cannot go on: rank 1 was ended by SIGKILL in epoch 3, backward: " in capfd.readouterr().err


def test_torchrun_is_told_why(other, launcher, tmp_path, monkeypatch):
    """And that a consequence is none of its first failures."""
    file, began = tmp_path / "error.json", int(time.time())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(ValueError, match="spoilt"):
        launcher.launch(lambda: fails(ValueError("spoilt\nin two lines")))
    told = json.loads(file.read_text())
    assert told["message"] == "Rank 0 failed: ValueError: spoilt"
    other.kill()
    with pytest.raises(RuntimeError, match="Connection reset"):
        launcher.launch(lambda: fails(GLOO))
    consequence = json.loads(file.read_text())
    assert (
        "rank 1 was ended by SIGKILL" in consequence["message"]
        and began <= told["timestamp"] < consequence["timestamp"]
    )


def test_nobody_is_named_who_runs_nor_for_an_error_of_ones_own(other, launcher, capfd, monkeypatch):
    monkeypatch.setattr(script, "SETTLE_S", 0.05)
    with pytest.raises(RuntimeError, match="Connection reset"):
        launcher.launch(lambda: fails(GLOO))
    other.kill()
    with pytest.raises(ValueError, match="spoilt"):
        launcher.launch(lambda: fails(ValueError("spoilt")))
    assert "ended" not in capfd.readouterr().err


def test_one_that_is_asked_to_end_names_the_rank_that_ended(other, launcher, capfd):
    launcher.kill(signal.SIGTERM)
    assert not capfd.readouterr().err
    other.kill()
    other.wait()  # as torchrun does before it ends the others: nobody can tell how it ended any more
    with pytest.raises(SystemExit):  # it does not ask the others whether all should end
        launcher.kill(signal.SIGTERM)
    assert capfd.readouterr().err == "Rank 0 was asked to end by SIGTERM: rank 1 has ended in epoch 3, backward\n"
    survivor = SurvivingScriptLauncher(launcher._strategy)
    launcher._strategy.survives_lost_ranks = False
    with pytest.raises(SystemExit):
        survivor.kill(signal.SIGTERM)
    launcher._strategy.survives_lost_ranks = True
    survivor.kill(signal.SIGTERM)


def test_exit_status():
    assert processes.exit_status(os.getpid()) is None
    failing = subprocess.Popen(["false"])
    while (status := processes.exit_status(failing.pid)) is None:
        time.sleep(0.01)
    assert status == 1
    failing.wait()
    assert processes.exit_status(failing.pid) == 0


def met(rank: int, world_size: int) -> tuple[int, dict[int, int]]:
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30))
    world.close()
    return os.getpid(), dict(processes._pids)


def test_ranks_that_have_met_know_the_processes(ranks):
    pids = [pid for pid, _ in ranks.run(3, met)]
    for rank, (_, known) in enumerate(ranks.run(3, met)):
        assert known == {other: pid for other, pid in enumerate(pids) if other != rank}
