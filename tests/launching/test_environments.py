"""torchrun, SLURM and several machines start the ranks themselves, and are left in charge. Real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHARED
from launched import results
from processes import REPOSITORY, TORCHRUN, Finished, run

SCRIPT = REPOSITORY / "tests" / "launched.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RESTARTED = """
import os, lightning as L
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition


class FailsTheFirstTime(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2 and trainer.global_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("the first time")


data, model = GraphDataModule(planted_partition(1000)), NodeClassifier(GCN(32, 16, 2, 8))
options = dict(accelerator="cpu", max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = L.Trainer(strategy="dgcl", devices=2, callbacks=[FailsTheFirstTime()], **options)
trainer.fit(model, datamodule=data)
print("epochs", trainer.current_epoch, "in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def restarted(folder: Path) -> Finished:
    (folder / "restarted.py").write_text(RESTARTED)
    return run(*TORCHRUN, "--max-restarts", "1", folder / "restarted.py", cwd=folder)


@pytest.mark.campaign
@pytest.mark.program(runs=restarted)
def test_torchrun_restarts(ran):
    _, finished = ran
    assert finished.succeeded().output.count("epochs 4 in attempt 1") == 2
    assert "ValueError: the first time" in finished.output


TASKS = """
import os, subprocess, sys
command = [sys.executable, *sys.argv[1:]]
tasks = [subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}) for r in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""


_VALUES = {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NODELIST": "localhost", "NODEID": "0"}
SLURM = {f"SLURM_{name}": value for name, value in _VALUES.items()}


def slurm(folder: Path) -> Finished:
    (folder / "srun.py").write_text(TASKS)
    return run(folder / "srun.py", SCRIPT, "dgcl", 2, folder, cwd=folder, variables=SLURM)


@pytest.mark.program(runs=slurm)
def test_slurm(one_device, ran):
    folder, finished = ran
    assert finished.succeeded().output.count("finished") == 1
    torch.testing.assert_close(results(folder), one_device, rtol=1e-9, atol=1e-9)


REQUEUED = """
import os, signal, sys, torch, lightning as L
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

attempt = sys.argv[1]  # undisturbed, signalled or requeued


class Signals(L.Callback):
    # SLURM signals both ranks, which it reaches at different places: in the forward pass, and two epochs later in the backward.
    def setup(self, trainer, pl_module, stage):
        pl_module.model.convs[1].register_forward_pre_hook(lambda *_: self.at(trainer, 0, 4))

    def on_after_backward(self, trainer, pl_module):
        self.at(trainer, 1, 6)

    def at(self, trainer, rank, epoch):
        if attempt == "signalled" and (trainer.global_rank, trainer.current_epoch) == (rank, epoch) and trainer.training:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.is_global_zero:
            print("epoch", trainer.current_epoch, flush=True)


L.seed_everything(0)
graph = planted_partition(300, num_classes=4, num_features=8)
graph.x = graph.x.double()
model = NodeClassifier(GCN(8, 8, 2, 4), lr=0.02).double()
plugins = [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, plugins=plugins)
trainer = L.Trainer(strategy="dgcl", devices=2, max_epochs=9, callbacks=[Signals()], **options)
trainer.fit(model, datamodule=GraphDataModule(graph))
if trainer.is_global_zero:
    torch.save(model.state_dict(), f"{attempt}.pt")
"""


def test_a_job_that_slurm_requeues(tmp_path):
    """The signal before the end of a job reaches ranks at different places. They save at the same step, and the job resumes."""
    (tmp_path / "srun.py").write_text(TASKS)
    (tmp_path / "requeued.py").write_text(REQUEUED)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho scontrol $@ >> scontrol.txt\n")
    (tmp_path / "scontrol").chmod(0o755)
    variables = {**SLURM, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    output = {}
    for attempt in ("undisturbed", "signalled", "requeued"):
        finished = run(tmp_path / "srun.py", "requeued.py", attempt, cwd=tmp_path, variables=variables)
        output[attempt] = re.findall(r"^epoch (\d+)$", finished.succeeded().output, re.MULTILINE)
    assert (tmp_path / "scontrol.txt").read_text() == "scontrol requeue 4711\n"
    assert output["undisturbed"] == output["signalled"] == [str(epoch) for epoch in range(9)]
    assert output["requeued"][0] == "5"  # the signal came in epoch 4
    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    expected = torch.load(tmp_path / "undisturbed.pt", weights_only=True)
    for attempt in ("signalled", "requeued"):
        torch.testing.assert_close(torch.load(tmp_path / f"{attempt}.pt", weights_only=True), expected, rtol=1e-10, atol=1e-12)


NETLAB = SHARED / "netlab" / "netlab.py"


@pytest.fixture(scope="module")
def _namespaces() -> None:
    if not NETLAB.exists():
        pytest.skip(f"needs {NETLAB} (set LIGHTNING_GNN_SHARED to the folder that holds netlab/)")
    if os.name != "posix" or subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to make network namespaces")


def two_machines(folder: Path, how: str, store: str) -> Finished:
    topology, machine = (REPOSITORY / "tests" / name for name in ("two_machines.json", "machine.py"))
    command = [sys.executable, machine, how, store, SCRIPT, "dgcl", 2, folder, 2]
    variables = {"LIGHTNING_GNN_STORE": str(folder / "store")}
    lab = (NETLAB, "run", topology, "--timeout", 150, "--", *command)
    return run(*lab, cwd=folder, timeout=170, variables=variables, warm=False)


@pytest.mark.program(runs=two_machines)
@pytest.mark.campaign
@pytest.mark.parametrize(("how", "store"), [("lightning", "own"), ("torchrun", "shared")])
def test_two_machines(_namespaces, one_device, ran, how, store):
    """Two network namespaces with two ranks each; the store on a file system of both, or of each."""
    folder, finished = ran
    assert finished.succeeded().output.count("finished") == 1
    torch.testing.assert_close(results(folder), one_device, rtol=1e-9, atol=1e-9)
    assert finished.output.count("Sent edge_cut-4-") == (store == "own")
    stores = sorted(path.name for path in folder.glob("store*"))
    assert stores == (["store"] if store == "shared" else ["store-0", "store-1"])
