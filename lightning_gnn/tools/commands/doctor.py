"""``lightning-gnn doctor``: checks that this machine can train, and suggests fixes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock
from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

import lightning_gnn
from lightning_gnn.comm.group import available_backends
from lightning_gnn.comm.shared_memory import machine_key
from lightning_gnn.console import text_console, text_table
from lightning_gnn.data.store import default_root
from lightning_gnn.devices import available_bytes
from lightning_gnn.kernels import CSR, cache_folder
from lightning_gnn.tools.advising.machine import available_cores
from lightning_gnn.tools.commands.exchange import time_exchange
from lightning_gnn.tools.local_ranks import LAUNCHER_VARIABLES
from lightning_gnn.tools.parser import Parser

PACKAGES = ("torch", "lightning", "torch_geometric", "torchmetrics", "numba", "pymetis")
LITTLE_SPACE = 2e9
"""Bytes; a partitioned graph of a few million edges takes more."""


@dataclass(frozen=True)
class Check:
    """Result of a check. ``"warning"``: training works with limitations; ``"failed"``: training does not work."""

    name: str
    status: Literal["ok", "warning", "failed"]
    result: str
    advice: str = ""


def doctor(arguments: Sequence[str]) -> None:
    """Run ``lightning-gnn doctor`` with these arguments; the exit status is 1 if a required check fails."""
    about = "Check that this machine can train: versions, devices, exchange between two processes, store."
    parser = Parser(prog="lightning-gnn doctor", description=about)
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    parser.add_argument("--store", type=str, help="Folder for partitioned graphs, if not the default one.")
    parser.add_argument("--timeout", type=float, default=60.0, help="Seconds that the exchange may take.")
    options = parser.parse_args(list(arguments))
    store = Path(options.store) if options.store else default_root()
    console = text_console(highlight=False)
    with text_console(stderr=True).status("Checking"):
        checks = [
            *check_versions(),
            *check_devices(),
            *check_backends(),
            check_store(store),
            check_numba_cache(),
            check_launcher_variables(),
            *check_exchange(options.timeout),
        ]
    failed = [check.name for check in checks if check.status == "failed"]
    if options.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        console.print(_table(checks))
        console.print(f"Does not work: {', '.join(failed)}" if failed else "All that is needed works.")
    sys.exit(1 if failed else 0)


def _table(checks: Sequence[Check]) -> Table:
    table = text_table("check", "result", "what to do", title="lightning-gnn doctor", num_left=3)
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}
    for check in checks:
        table.add_row(check.name, f"{marks[check.status]}  {escape(check.result)}", escape(check.advice))
    return table


def check_versions() -> Iterator[Check]:
    """Check that Python and the packages have supported versions."""
    yield Check("lightning_gnn", "ok", lightning_gnn.__version__)
    yield Check("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("lightning-gnn") or ()]
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        wanted = []
    specifiers = {need.name.lower().replace("-", "_"): need.specifier for need in wanted if need.marker is None}
    for package in PACKAGES:
        version, specifier = _version(package), specifiers.get(package)
        if version is None:
            yield Check(package, "failed", "not installed", f"pip install {package}")
        elif specifier is None or specifier.contains(version, prereleases=True):
            yield Check(package, "ok", version)
        else:
            yield Check(package, "failed", f"{version} is not supported", f'pip install "{package}{specifier}"')
    name, version = "pytorch_lightning", _version("pytorch_lightning")
    is_equal = version in (None, _version("lightning"))
    advice = "install the version of lightning; import the Trainer, modules and callbacks of a script from one of the two"
    yield Check(name, "ok" if is_equal else "warning", version or "not installed", advice)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_devices() -> Iterator[Check]:
    cores, threads = available_cores(), torch.get_num_threads()
    few = "" if threads <= cores else "more threads than cores: set OMP_NUM_THREADS lower"
    yield Check("CPU", "warning" if few else "ok", f"{cores} cores, {threads} threads per process by default", few)
    if (free := available_bytes()) is not None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Check("memory", "ok", f"{total / 1e9:,.1f} GB, {free / 1e9:,.1f} GB available here")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield Check(f"CUDA device {index}", "ok", f"{properties.name}, {properties.total_memory / 1e9:,.1f} GB")
    elif torch.version.cuda is not None:
        yield Check("CUDA devices", "ok", "none", "if there is one: nvidia-smi tells whether its driver works")
    else:
        yield Check("CUDA devices", "ok", "none; this torch is for CPU only")


def check_backends() -> Iterator[Check]:
    """Check for torch's backends: gloo is required, NCCL only with CUDA devices, MPI never."""
    needed = {"gloo": True, "nccl": torch.cuda.is_available(), "mpi": False}
    for name, there in available_backends().items():
        if there or not needed[name]:
            yield Check(name, "ok", "available" if there else "not in this torch; not needed")
        else:
            yield Check(name, "failed", "not in this torch", "install a torch from pytorch.org that has it")


def check_store(folder: Path) -> Check:
    """Check that the folder of partitioned graphs is writable, and how much space is free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor.", dir=folder) as scratch, FileLock(Path(scratch) / "lock"):
            free = shutil.disk_usage(scratch).free
    except (OSError, NotImplementedError) as error:
        advice = "set LIGHTNING_GNN_STORE to a folder that you can write to and lock files in"
        return Check("store", "failed", f"{folder}: {error}", advice)
    entries = len(list(folder.glob("*/manifest.json")))
    result = f"{folder}: {entries} graph{'' if entries == 1 else 's'}, {free / 1e9:,.1f} GB free"
    if free < LITTLE_SPACE:
        return Check("store", "warning", result, "free some space, or set LIGHTNING_GNN_STORE to another disk")
    return Check("store", "ok", result)


def check_numba_cache() -> Check:
    try:
        CSR.from_coo(torch.tensor([0]), torch.tensor([0]), 1, 1)
    except Exception as error:  # any error of numba or LLVM
        return Check("numba kernels", "failed", f"{type(error).__name__}: {error}", "reinstall numba and llvmlite")
    folder = cache_folder()
    if os.access(folder, os.W_OK):
        return Check("numba kernels", "ok", f"kept in {folder}")
    advice = "set NUMBA_CACHE_DIR to a folder that you can write to"
    return Check("numba kernels", "warning", f"compiled anew by every process: {folder} cannot be written", advice)


def check_launcher_variables() -> Check:
    """Check for variables that make this process look like a rank started by a launcher."""
    found = sorted(n for n in os.environ if n in LAUNCHER_VARIABLES or n in ("SLURM_NTASKS", "SLURM_PROCID"))
    if not found:
        return Check("launcher", "ok", "no variables of torchrun or SLURM are set")
    result = f"set: {', '.join(f'{name}={os.environ[name]}' for name in found)}"
    advice = "right under torchrun or srun only; otherwise ranks wait for others that nobody starts: unset them"
    return Check("launcher", "warning", result, advice)


def check_exchange(timeout: float) -> Iterator[Check]:
    """Time exchanges between two processes, through shared memory and through sockets."""
    try:
        speed = time_exchange(timeout)
    except RuntimeError as error:
        advice = "look whether the host name resolves and loopback is open; GLOO_SOCKET_IFNAME=lo picks the interface"
        yield Check("exchange", "failed", str(error), advice)
        return
    memory, sockets = speed["shared_memory"], speed["sockets"]
    if memory is not None:
        yield Check("shared memory", "ok", f"two processes, {memory / 1e9:.2f} GB/s each way")
    else:
        why = "Linux on x86-64 only" if machine_key() is None else "processes may not open each other's memory"
        advice = "sockets are used: slower" if machine_key() is None else "allow ptrace among the container's processes"
        yield Check("shared memory", "warning", f"not available: {why}", advice)
    assert sockets is not None
    yield Check("sockets", "ok", f"two processes, {sockets / 1e9:.2f} GB/s each way")
