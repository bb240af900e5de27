"""torchrun, SLURM and several machines start the ranks themselves, and are left in charge. Real processes."""

from __future__ import annotations

import os
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


def slurm(folder: Path) -> Finished:
    (folder / "srun.py").write_text(TASKS)
    values = {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NODELIST": "localhost"}
    variables = {f"SLURM_{name}": value for name, value in {**values, "NODEID": "0"}.items()}
    return run(folder / "srun.py", SCRIPT, "dgcl", 2, folder, cwd=folder, variables=variables)


@pytest.mark.program(runs=slurm)
def test_slurm(one_device, ran):
    folder, finished = ran
    assert finished.succeeded().output.count("finished") == 1
    torch.testing.assert_close(results(folder), one_device, rtol=1e-9, atol=1e-9)


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
