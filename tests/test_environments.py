"""torchrun, SLURM and several machines start the ranks themselves, and are left in charge. Real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHARED
from processes import REPOSITORY, run
from test_launch import TORCHRUN, one_device, results  # noqa: F401  (a fixture)

SCRIPT = REPOSITORY / "tests" / "launched.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

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


def test_torchrun_restarts(tmp_path):
    (tmp_path / "restarted.py").write_text(RESTARTED)
    finished = run(*TORCHRUN, "--max-restarts", "1", tmp_path / "restarted.py", cwd=tmp_path).succeeded()
    assert finished.output.count("epochs 4 in attempt 1") == 2
    assert "ValueError: the first time" in finished.output


def slurm(monkeypatch: pytest.MonkeyPatch, tasks: int) -> None:
    """The environment that SLURM gives each of its tasks, less their numbers."""
    values = {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": tasks, "NODELIST": "localhost", "NODEID": 0}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


TASKS = """
import os, subprocess, sys
command = [sys.executable, *sys.argv[1:]]
tasks = [subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}) for r in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""


def test_slurm(one_device, tmp_path, monkeypatch):  # noqa: F811
    slurm(monkeypatch, 2)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    (tmp_path / "srun.py").write_text(TASKS)
    finished = run(tmp_path / "srun.py", SCRIPT, "dgcl", 2, tmp_path, cwd=tmp_path).succeeded()
    assert finished.output.count("finished") == 1
    torch.testing.assert_close(results(tmp_path), one_device, rtol=1e-5, atol=1e-5)


def test_one_task_of_slurm_for_two_ranks_is_refused(tmp_path, monkeypatch):
    slurm(monkeypatch, 1)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    finished = run(SCRIPT, "dgcl", 2, tmp_path, cwd=tmp_path)
    assert finished.code != 0
    assert "num_nodes=1 x devices=2 = 2 ranks, but SLURMEnvironment says that there are 1" in finished.output
    assert "#SBATCH --ntasks-per-node=2" in finished.output


def can_make_namespaces() -> bool:
    return subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(("how", "store"), [("lightning", "own"), ("torchrun", "shared")])
def test_two_machines(one_device, tmp_path, how, store):  # noqa: F811
    """Two network namespaces with two ranks each; the store on a file system of both, or of each."""
    netlab = SHARED / "netlab" / "netlab.py"
    if not netlab.exists():
        pytest.skip(f"needs {netlab} (set LIGHTNING_GNN_SHARED to the folder that holds netlab/)")
    if os.name != "posix" or not can_make_namespaces():
        pytest.skip("needs the right to make network namespaces")
    topology, machine = (REPOSITORY / "tests" / name for name in ("two_machines.json", "machine.py"))
    command = [sys.executable, machine, how, store, SCRIPT, "dgcl", 2, tmp_path, 2]
    os.environ["LIGHTNING_GNN_STORE"] = str(tmp_path / "store")
    finished = run(netlab, "run", topology, "--timeout", 90, "--", *command, cwd=tmp_path, timeout=120).succeeded()
    assert finished.output.count("finished") == 1
    torch.testing.assert_close(results(tmp_path), one_device, rtol=1e-5, atol=1e-5)
    stores = sorted(path.name for path in Path(tmp_path).glob("store*"))
    assert stores == (["store"] if store == "shared" else ["store-0", "store-1"])
