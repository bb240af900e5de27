"""Elastic trainings that torchrun or ``lightning-gnn launch`` starts: they lose ranks and hosts, and hosts join."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SHARED
from joining import train
from offline_runs import offline_runs
from processes import REPOSITORY, TORCHRUN, environment, run

SCRIPT = REPOSITORY / "tests" / "joining.py"
NETLAB = SHARED / "netlab" / "netlab.py"


def check_losses(folder: Path, epochs: int) -> dict[int, set[int]]:
    """Returns the numbers of ranks of each epoch, after the losses were compared with one device's."""
    alone = folder / "alone"
    alone.mkdir()
    train(epochs, alone, devices=1)
    sizes: dict[int, set[int]] = {epoch: set() for epoch in range(epochs)}
    for file in folder.glob("*-*-*"):
        epoch, _, size = map(int, file.name.split("-"))
        sizes[epoch].add(size)
        expected = float.fromhex((alone / f"{epoch}-0-1").read_text())
        assert float.fromhex(file.read_text()) == pytest.approx(expected, rel=1e-10), (epoch, size)
    assert all(sizes.values()), sizes
    return sizes


@pytest.mark.campaign
@pytest.mark.timeout(150)
def test_torchrun_restarts_ranks(tmp_path):
    """States are in memory outside of the ranks: the epochs before the loss are not computed again."""
    command = (*TORCHRUN, "--max-restarts", "1", SCRIPT, 5, tmp_path, 1, 3)
    began = time.time()
    run(*command, cwd=tmp_path, timeout=140).succeeded()
    check_losses(tmp_path, 5)
    lost = (tmp_path / "lost").stat().st_mtime
    assert began < lost
    assert [(tmp_path / f"{epoch}-0-2").stat().st_mtime > lost for epoch in range(5)] == [False] * 3 + [True] * 2


@pytest.mark.campaign
@pytest.mark.timeout(100)
def test_the_supervisor_has_the_run_of_wandb(tmp_path):
    """Rank 0 is lost: what it logged is in the run, which the next rank 0 continues."""
    finished = run(SCRIPT, 6, tmp_path, 0, 3, cwd=tmp_path, variables={"WANDB_MODE": "offline"}, timeout=90)
    assert finished.code == 0 and not finished.left_over, finished.output  # W&B's temporary files of the lost rank remain
    check_losses(tmp_path, 6)
    [found] = offline_runs(tmp_path)
    assert [row["trainer/global_step"] for row in found.history if "train_loss" in row] == [*range(6)]


class Launched:
    """Hosts of a run on the loopback interface; :meth:`wait_for` waits for a file, whose name is EPOCH-RANK-RANKS."""

    def __init__(self, folder: Path, epochs: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.epochs = folder, epochs
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, ranks: int, counts: str) -> None:
        of_host = ["--nproc-per-node", ranks, "--node-rank", number, "--master-port", self.port]
        command = ["-m", "lightning_gnn", "launch", "--nnodes", counts, "--timeout", 20, "--start-timeout", 25, *of_host]
        everything = [sys.executable, *map(str, [*command, SCRIPT, self.epochs, self.folder])]
        given = {**environment(), "LIGHTNING_GNN_TOKEN": "word"}
        with open(self.folder / f"host{number}.log", "w") as log:
            self.processes[number] = subprocess.Popen(everything, env=given, cwd=self.folder, stdout=log, stderr=log)

    def logs(self) -> list[str]:
        return [file.read_text()[-3000:] for file in sorted(self.folder.glob("host*.log"))]

    def wait_for(self, pattern: str) -> None:
        end = time.monotonic() + 100
        while not list(self.folder.glob(pattern)):
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)

    def wait_for_end(self, hosts: set[int]) -> None:
        assert [self.processes[host].wait(120) for host in hosts] == [0] * len(hosts), self.logs()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.processes.values():
            host.kill()
            host.wait()


@pytest.mark.campaign
@pytest.mark.timeout(200)
def test_a_host_joins_a_single_rank(tmp_path):
    with Launched(tmp_path, 100) as hosts:
        hosts.start(0, 1, "1:2")
        hosts.wait_for("*-0-1")
        hosts.start(1, 1, "1:2")
        hosts.wait_for("*-0-2")
        hosts.wait_for_end({0, 1})
    check_losses(tmp_path, 100)


@pytest.mark.campaign
@pytest.mark.timeout(280)
@pytest.mark.parametrize("lost", [0, 1])
def test_hosts_join_and_are_lost(tmp_path, lost):
    """Three hosts of 2, 1 and 1 ranks: the third joins, then one is lost, perhaps the first."""
    epochs, remaining = 150, 2 if lost == 0 else 3
    with Launched(tmp_path, epochs) as hosts:
        hosts.start(0, 2, "2:3")
        hosts.start(1, 1, "2:3")
        hosts.wait_for("*-0-3")
        hosts.start(2, 1, "2:3")
        hosts.wait_for("*-0-4")
        os.kill(hosts.processes[lost].pid, signal.SIGKILL)
        hosts.wait_for(f"1[0-9]*-0-{remaining}")
        hosts.wait_for_end({0, 1, 2} - {lost})
    sizes = check_losses(tmp_path, epochs)
    assert max(sizes[epochs - 1]) == remaining


@pytest.mark.campaign
@pytest.mark.timeout(280)
@pytest.mark.parametrize("seconds", [25, 1000])
def test_a_host_without_network(tmp_path, seconds):
    """Three hosts in network namespaces: the others continue, and the second writes nothing more, also if it is reached again."""
    if not NETLAB.exists():
        pytest.skip(f"needs {NETLAB} (set LIGHTNING_GNN_SHARED to the folder that holds netlab/)")
    if os.name != "posix" or subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to make network namespaces")
    links = [{"a": a, "b": b, "bandwidth_mbit": 400} for a, b in ((0, 1), (0, 2), (1, 2))]
    (tmp_path / "hosts.json").write_text(json.dumps({"ranks": 3, "links": links}))
    of_netlab = " ".join(f"-u {name}" for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "RANK"))
    options = "--nnodes 3 --nproc-per-node 1 --node-rank $RANK --master-addr $MASTER_ADDR --master-port 29400"
    command = f"exec env {of_netlab} {sys.executable} -m lightning_gnn launch {options} --timeout 10 --start-timeout 60"
    lab = [NETLAB, "run", tmp_path / "hosts.json", "--grace", 100, "--timeout", 200, "--", "sh", "-c"]
    given = {"LIGHTNING_GNN_TOKEN": "word", "HEALED_AFTER_S": str(seconds)}
    finished = run(*lab, f"{command} {SCRIPT} 30 {tmp_path} 1 3", cwd=tmp_path, timeout=220, variables=given, warm=False)
    sizes = check_losses(tmp_path, 30)
    assert sizes[2] == {3} and all(size == {2} for epoch, size in sizes.items() if epoch > 3), finished.output
    saved = r"found no quorum .*The state at the start of epoch 3 is in .*elastic\.ckpt"
    end = f"was late, stopped or cut off|{saved}" if seconds < 100 else saved  # it may give up before
    assert finished.code and re.search(rf"\[1\].*({end})", finished.output), finished.output
