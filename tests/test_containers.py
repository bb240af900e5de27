"""The Dockerfile and the job for Kubernetes, linted and read; and limits of containers, in namespaces and control groups."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import REPOSITORY, environment

DOCKERFILE, JOB = REPOSITORY / "Dockerfile", REPOSITORY / "configs" / "pytorchjob.yaml"


def test_the_dockerfile_passes_its_linter():
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", DOCKERFILE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert not found.returncode, found.stdout + found.stderr


def test_the_dockerfile_copies_what_the_build_reads():
    """Sources exist, and .dockerignore does not leave them out."""
    copied = [each for line in re.findall(r"^COPY (.*)", DOCKERFILE.read_text(), re.MULTILINE) for each in line.split()[:-1]]
    kept = re.findall(r"^!(.*)", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)
    assert all((REPOSITORY / each).exists() for each in copied)
    extras = re.search(r"^ARG EXTRAS=(.*)", DOCKERFILE.read_text(), re.MULTILINE)[1].split(",")  # type: ignore[index]
    known = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras) <= set(known)


def test_the_job_starts_the_ranks_of_its_comment():
    """Two pods with two ranks each, which torchrun starts; each rank has a CPU."""
    job: dict[str, Any] = yaml.safe_load(JOB.read_text())
    pods = job["spec"]["pytorchReplicaSpecs"]
    assert (job["kind"], sorted(pods)) == ("PyTorchJob", ["Master", "Worker"])
    ranks = int(job["spec"]["nprocPerNode"])
    assert (sum(each["replicas"] for each in pods.values()), ranks) == (2, 2)
    for each in pods.values():
        spec = each["template"]["spec"]
        [container] = spec["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        assert container["command"][0] == "torchrun" and int(container["resources"]["limits"]["cpu"]) == ranks
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert spec["securityContext"]["runAsUser"] == 1000
    assert "USER 1000" in DOCKERFILE.read_text()


# Limits ######################################################################

SCRIPT = """
import sys, torch, lightning as L
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition


class Large(L.Callback):  # 80 MB, which ranks receive
    def __init__(self):
        self.values = torch.arange(10_000_000)
        self.again = self.values[1:]

    def on_train_start(self, trainer, pl_module):
        assert self.values.sum() == 49_999_995_000_000 and self.again.data_ptr() == self.values.data_ptr() + 8


if __name__ == "__main__":
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    model, data = NodeClassifier(GCN(32, 16, 2, 8)), GraphDataModule(planted_partition(400))
    strategy, *callbacks = sys.argv[1], *([Large()] if sys.argv[2:] else [])
    trainer = L.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=2, callbacks=callbacks, **options)
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        print("trained", flush=True)
"""


@pytest.fixture
def namespace() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to make mount namespaces (root, or CAP_SYS_ADMIN)")


def run_in(folder: Path, prepare: str, command: str) -> str:
    """Returns the output of commands of a shell in a mount namespace of their own."""
    (folder / "train.py").write_text(SCRIPT)
    env = {**environment(), "PYTHON": sys.executable, "FOLDER": str(folder), "TMPDIR": str(folder), "PACKAGE": str(REPOSITORY)}
    command = f"set -e; {prepare}\ncd $FOLDER; exec {command}"
    finished = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command], capture_output=True, text=True, env=env, cwd=folder, timeout=100
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["dgcl", "dgcl_spawn"])
def test_little_shared_memory(namespace, tmp_path, strategy):
    """Ranks exchange rows in memfds; what spawned ranks receive, torch has in /dev/shm, if there is space."""
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    output = run_in(tmp_path, small, f"$PYTHON train.py {strategy} large")
    assert "trained" in output
    assert output.count("/dev/shm has no space for the tensors") == (strategy == "dgcl_spawn")


# Python may be in root's home, which nobody else may enter.
READ_ONLY = """
mkdir $FOLDER/site $FOLDER/tmp; cp -r $PACKAGE/lightning_gnn $FOLDER/site/
find $FOLDER/site -name __pycache__ -prune -exec rm -r {} +
mount --bind $FOLDER/site $FOLDER/site; mount -o remount,ro,bind $FOLDER/site
HOME_OF_PYTHON=$($PYTHON -c 'import sys; print(sys.base_prefix)')
case $HOME_OF_PYTHON in /root/*)
    mkdir $FOLDER/python; mount --bind $HOME_OF_PYTHON $FOLDER/python; mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p $HOME_OF_PYTHON; mount --bind $FOLDER/python $HOME_OF_PYTHON;; esac
chmod 777 $FOLDER/tmp; each=$FOLDER; while [ $each != / ]; do chmod o+rx $each; each=$(dirname $each); done
"""
NOBODY = "setpriv --reuid 54321 --regid 54321 --clear-groups env -i PATH=$PATH PYTHONPATH=$FOLDER/site TMPDIR=$FOLDER/tmp"


@pytest.mark.campaign
@pytest.mark.parametrize("home", ["", "HOME=/nonexistent"])
def test_read_only_package_and_no_home(namespace, tmp_path, home):
    """Another user than root, with or without a name of a home: kernels are cached in TMPDIR."""
    variables = f"{NOBODY} {home} LIGHTNING_GNN_STORE=$FOLDER/tmp/store"
    output = run_in(tmp_path, READ_ONLY, f"{variables} $PYTHON train.py dgcl")
    place = tmp_path / "tmp" / "lightning_gnn-54321"
    assert "trained" in output and output.count(f"Compiled kernels are cached in {place}, since") == 1
    assert list(place.glob("kernels_*/*.nbi")) and not (tmp_path / "~").exists()


@pytest.mark.campaign
def test_no_home_for_the_store(namespace, tmp_path):
    code = "import lightning_gnn.data.store as store; store.default_root()"
    with pytest.raises(
        AssertionError, match=r"StoreError: The partition directory must be a given folder, .*LIGHTNING_GNN_STORE"
    ):
        run_in(tmp_path, READ_ONLY, f"{NOBODY} $PYTHON -c '{code}'")


MEMORY = "from lightning_gnn.tools.commands.doctor import *; print(available_bytes(), *check_devices())"


def limited(output: str, limit: int) -> bool:
    """Returns whether the package and its doctor report less memory than the limit of 1 GB."""
    count, shown = re.search(r"^(\d+) ", output, re.MULTILINE), re.search(r"([\d.]+) GB available here", output)
    return bool(count and shown) and 0 < int(count[1]) <= limit and float(shown[1]) <= limit / 1e9  # type: ignore[index]


@pytest.fixture
def groups() -> Iterator[tuple[Path, Path]]:
    """A memory group of version 1, and one inside it, which has no limit of its own."""
    own = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line]
    outer = Path(f"/sys/fs/cgroup/memory{own[0] if own else ''}") / f"lightning_gnn-{os.getpid()}"
    try:
        (outer / "task").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"needs the right to make memory groups of version 1 ({error})")
    yield outer, outer / "task"
    for group in (outer / "task", outer):
        with suppress(OSError):
            group.rmdir()


@pytest.mark.campaign
def test_memory_groups_of_version_1(groups, tmp_path):
    """As under SLURM: the process is in a group without limit, inside that of its job."""
    outer, task = groups
    (outer / "memory.limit_in_bytes").write_text("1000000000")
    command = ["bash", "-c", f"echo $$ > {task}/cgroup.procs; exec {sys.executable} -c '{MEMORY}'"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=60)
    assert limited(finished.stdout, 1_000_000_000), finished.stdout + finished.stderr


@pytest.mark.campaign
def test_memory_groups_of_version_2(namespace, tmp_path):
    """The files of a container with a group of version 2, which the system has only without groups of version 1."""
    prepare = """
        mount -t tmpfs tmpfs /sys/fs/cgroup; cd /sys/fs/cgroup
        echo 1000000000 > memory.max; echo 300000000 > memory.current; echo 'inactive_file 100000000' > memory.stat
    """
    assert limited(run_in(tmp_path, prepare, f"$PYTHON -c '{MEMORY}'"), 800_000_000)
