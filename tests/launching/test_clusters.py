"""Environments of clusters, by the variables and commands of their launchers: two real processes, found by Lightning itself."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHARED
from processes import REPOSITORY, Finished, environment, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SCRIPT = """
import sys, torch, lightning as L
from lightning.pytorch.plugins import environments
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

strategy, devices, machines, *plugins = sys.argv[1:]
L.seed_everything(0)
graph = planted_partition(300, num_classes=4, num_features=8)
graph.x = graph.x.double()
model = NodeClassifier(GCN(8, 8, 2, 4)).double()
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=3)
plugins = [getattr(environments, name)() for name in plugins]
trainer = L.Trainer(strategy=strategy, devices=int(devices), num_nodes=int(machines), plugins=plugins, **options)
trainer.fit(model, datamodule=GraphDataModule(graph))
[logits] = trainer.predict(model, datamodule=GraphDataModule(graph))
if trainer.is_global_zero:
    torch.save([model.state_dict(), logits], f"{strategy}.pt")
    print("trained by", type(trainer._accelerator_connector.cluster_environment).__name__, "on", trainer.world_size, flush=True)
"""
TASKS = """
import json, os, subprocess, sys
ranks = [{**os.environ, **variables} for variables in json.loads(sys.argv[1])]
tasks = [subprocess.Popen([sys.executable, *sys.argv[2:]], env=variables) for variables in ranks]
sys.exit(max(abs(task.wait()) for task in tasks))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, and what it gives on one device."""
    folder = tmp_path_factory.mktemp("clusters")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "tasks.py").write_text(TASKS)
    finished = run("train.py", "auto", 1, 1, cwd=folder)
    assert finished.code == 0, finished.output
    return folder


def check(finished: Finished, folder: Path, environment: str) -> None:
    assert finished.code == 0 and finished.output.count(f"trained by {environment} on 2") == 1, finished.output
    assert not finished.left_over and finished.output.count("Seed set to 0") == 2, finished.output  # no further processes
    found, expected = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("dgcl", "auto"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (folder / "dgcl.pt").unlink()


def variables_of(name: str, folder: Path) -> list[dict[str, str]]:
    """Returns the environment variables that a launcher sets, for each of two ranks."""
    if name == "LSFEnvironment":  # jsrun; the first host of the file is the launch node
        (folder / "hosts").write_text(f"launch\n{platform.node()}\n{platform.node()}\n")
        job = {"LSB_JOBID": str(os.getpid()), "LSB_DJOB_RANKFILE": str(folder / "hosts"), "JSM_NAMESPACE_SIZE": "2"}
        return [{**job, "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_LOCAL_RANK": str(rank)} for rank in range(2)]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000), "WORLD_SIZE": "2"}
    return [{**job, "RANK": str(rank)} for rank in range(2)]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "arguments"), [("LSFEnvironment", [2, 1]), ("KubeflowEnvironment", [1, 2, "KubeflowEnvironment"])]
)
def test_variables(folder, name, arguments):
    """Lightning finds LSF by its variables; Kubeflow's are those of other launchers, too, so it is passed as a plugin."""
    ranks = json.dumps(variables_of(name, folder))
    check(run("tasks.py", ranks, "train.py", "dgcl", *arguments, cwd=folder), folder, name)


def mpirun(folder: Path) -> subprocess.CompletedProcess[str]:
    prefix = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    command = [*prefix, sys.executable, "train.py", "dgcl", "2", "1"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100)


@pytest.mark.campaign
def test_mpi(folder):
    """With mpi4py, Lightning finds the ranks of mpirun."""
    pytest.importorskip("mpi4py")
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun (Open MPI)")
    finished = mpirun(folder)
    output = finished.stdout + finished.stderr
    check(Finished(finished.returncode, output, [], [], 0.0), folder, "MPIEnvironment")


def test_mpi_without_mpi4py(folder):
    """Otherwise each process would start all ranks."""
    finished = run("train.py", "dgcl", 2, 1, cwd=folder, variables={"OMPI_COMM_WORLD_SIZE": "2"})
    assert finished.code and "which Lightning detects only with mpi4py" in finished.output and "torchrun" in finished.output


NETLAB = SHARED / "netlab" / "netlab.py"
MACHINE = """
import os, sys
rank = os.environ["RANK"]
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
values = {"NTASKS": "2", "NTASKS_PER_NODE": "1", "NNODES": "2", "NODEID": rank, "PROCID": rank, "LOCALID": "0"}
names = {"NODELIST": "rank[0-1]", "JOB_ID": "4711", "JOB_NAME": "train"}
os.environ.update({f"SLURM_{name}": value for name, value in {**values, **names}.items()})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.campaign
def test_slurm_on_two_machines(folder):
    """Two network namespaces with one task each, which meet at the first host of SLURM's list."""
    if not NETLAB.exists():
        pytest.skip(f"needs {NETLAB} (set LIGHTNING_GNN_SHARED to the folder that holds netlab/)")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to make network namespaces")
    (folder / "machine.py").write_text(MACHINE)
    topology = REPOSITORY / "tests" / "two_machines.json"
    command = (sys.executable, "machine.py", "train.py", "dgcl", 1, 2)
    finished = run(NETLAB, "run", topology, "--timeout", 90, "--", *command, cwd=folder, timeout=100, warm=False)
    check(finished, folder, "SLURMEnvironment")
