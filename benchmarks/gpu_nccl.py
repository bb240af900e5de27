"""Ranks over NCCL, several on one GPU where there are fewer GPUs than ranks: the part `nccl` of gpu_acceptance.py.

NCCL 2.30.3 and later let ranks share a GPU with NCCL_MULTI_RANK_GPU_ENABLE=1. With an older torch, preload a newer library by
LD_PRELOAD.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.distributed as dist
from gpu_acceptance import Row, difference, prepare, row, trained
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_gnn as gnn
from lightning_gnn.devices import functions_of
from lightning_gnn.extensions.plans.wiring import topology_from_dict

NEEDED = (2, 30, 3)
START_S = 90.0
"""Limit of a process that reads the device's free memory, and of a case that loses a rank."""
DEADLINE_S = 8.0
"""Timeout of the strategy in cases that lose a rank."""
BOUND_S = {"killed": 30.0, "stopped": 60.0, "asleep": 60.0}
"""Seconds in which the other rank must end."""


@dataclass(frozen=True)
class Place:
    """Where a case runs: this rank, number of ranks, device type, and folder for files of all ranks."""

    rank: int
    size: int
    device: str
    folder: Path

    @property
    def apart(self) -> bool:
        """Whether each rank has a GPU of its own."""
        return self.device == "cuda" and torch.cuda.device_count() >= self.size

    @property
    def trainer(self) -> dict[str, Any]:
        """Arguments of the Trainer. Ranks that share a device are, to Lightning, machines of one device each."""
        return {"devices": self.size} if self.apart else {"devices": 1, "num_nodes": self.size}


@dataclass(frozen=True)
class Case:
    """A run whose result must equal the result of CPU ranks.

    Attributes:
        run: returns tensors, the losses first.
        sizes: numbers of ranks.
        tolerance: relative difference; None if runs differ, so that losses must only be finite and fall.
    """

    run: Callable[[Place], list[Tensor]]
    sizes: tuple[int, ...] = (2, 4)
    tolerance: float | None = 1e-9


def train(model: str, strategy: Callable[..., Any], place: Place, epochs: int = 3, **options: Any) -> list[Tensor]:
    # Without self-checks, which take most of the time; the part `ranks` has them.
    return trained(place.device, model, strategy(timeout=60.0, self_check=False, **options), epochs, **place.trainer)


def relay(place: Place) -> list[Tensor]:
    """Only neighbors of a chain have links, so that others' rows are relayed."""
    links = [{"a": rank, "b": rank + 1, "gb_per_s": 1.0} for rank in range(place.size - 1)]
    chain = topology_from_dict({"name": "chain", "devices": place.size, "links": links})
    return train("gcn", gnn.DGCLStrategy, place, plan="spst", topology=chain)


def resume(place: Place) -> list[Tensor]:
    """Two epochs, a checkpoint, and two more from it."""
    folder = place.folder / f"checkpoint-{place.size}-{place.device}"
    keep = ModelCheckpoint(folder, "half", save_weights_only=False)
    given = {**place.trainer, "callbacks": [keep], "enable_checkpointing": True}
    first, second = (gnn.DGCLStrategy(timeout=60.0, self_check=False) for _ in range(2))
    trained(place.device, "gcn, batch norm", first, 2, **given)
    return trained(place.device, "gcn, batch norm", second, 4, ckpt_path=folder / "half.ckpt", **place.trainer)


def two_groups(place: Place) -> list[Tensor]:
    """Sums of two groups at once, waited for in the other order, beside uneven sends and receives."""
    if place.device == "cpu":
        total = place.size * (place.size + 1) / 2
        arriving = [torch.full((1000 * (peer + 1), 3), peer + 1.0) for peer in range(place.size) if peer != place.rank]
        return [torch.tensor([3.0]), torch.full((1 << 16,), total), torch.full((1 << 14,), 2 * total), *arriving]
    from lightning_gnn.comm.group import World

    device = torch.device(place.device, place.rank if place.apart else 0)
    functions_of(device).set_device(device)
    world = World(place.rank, place.size, device, timedelta(seconds=60))
    try:
        peers = [peer for peer in range(place.size) if peer != place.rank]
        mine = torch.full((1000 * (place.rank + 1), 3), place.rank + 1.0, device=device)
        into = [torch.empty(1000 * (peer + 1), 3, device=device) for peer in peers]
        first = torch.full((1 << 16,), place.rank + 1.0, device=device)
        second = torch.full((1 << 14,), 2 * (place.rank + 1.0), device=device)
        operations = [dist.P2POp(dist.isend, mine, peer, world.graph_group) for peer in peers]
        operations += [dist.P2POp(dist.irecv, each, peer, world.graph_group) for each, peer in zip(into, peers)]
        works = [*dist.batch_isend_irecv(operations)]
        works += [dist.all_reduce(first, group=world.graph_group, async_op=True)]
        works += [dist.all_reduce(second, group=world.gradient_group, async_op=True)]
        for work in reversed(works):
            work.wait()
        return [each.cpu() for each in (torch.tensor([3.0]), first, second, *into)]
    finally:
        world.close()


SAMPLED = {"num_neighbors": [5, 5], "batch_size": 100}
CLUSTERS = {"num_clusters": 12, "average_every_n_batches": 1}
CASES = {
    "two groups in flight": Case(two_groups),
    "dgcl, gcn": Case(partial(train, "gcn", gnn.DGCLStrategy)),
    "dgcl, gat": Case(partial(train, "gat", gnn.DGCLStrategy)),
    "cover, gcn": Case(partial(train, "gcn", gnn.CoverStrategy)),
    "cover, gat": Case(partial(train, "gat", gnn.CoverStrategy)),
    "spmm, gcn": Case(partial(train, "gcn", gnn.SpMMStrategy)),
    "spmm_1d, gcn": Case(partial(train, "gcn", gnn.SpMM1DStrategy)),
    "spmm_15d, gcn": Case(partial(train, "gcn", gnn.SpMM15DStrategy)),
    "spmm_15d, gat": Case(partial(train, "gat", gnn.SpMM15DStrategy)),
    "spmm_2d, gcn": Case(partial(train, "gcn", gnn.SpMM2DStrategy), (4,)),
    "spmm_3d, gcn": Case(partial(train, "gcn", gnn.SpMM3DStrategy), (8,)),
    "vertex_cut, gcn": Case(partial(train, "gcn", gnn.VertexCutStrategy)),
    "vertex_cut, gat": Case(partial(train, "gat", gnn.VertexCutStrategy)),
    # Rounding may change which rows are sent, or one code of 8 bits.
    "cache": Case(partial(train, "gcn", gnn.CachedVertexCutStrategy, cache_within_hosts=True), tolerance=1e-3),
    "codec int8": Case(partial(train, "gcn", gnn.DGCLStrategy, codec="int8"), tolerance=1e-3),
    "codec bf16": Case(partial(train, "gcn", gnn.DGCLStrategy, codec="bf16"), tolerance=1e-3),
    "planned exchanges": Case(partial(train, "gat", gnn.DGCLStrategy, plan="spst", topology="dgx1")),
    "planned exchanges, cover": Case(partial(train, "gcn", gnn.CoverStrategy, plan="spst", topology="dgx1")),
    "planned relays": Case(relay, (4,)),
    "sampling": Case(partial(train, "gcn", gnn.SamplingStrategy, **SAMPLED)),
    "cluster_allreduce": Case(partial(train, "sage", gnn.ClusterAllReduceStrategy, **CLUSTERS)),
    "gossip": Case(partial(train, "sage", gnn.GossipStrategy, epochs=6, **CLUSTERS), tolerance=None),
    "checkpoints": Case(resume),
}
LOSSES = ("killed", "stopped", "asleep")
"""Cases of two ranks of which the last is lost; they run without MPS, where a lost rank would end the others."""


def nccl_version() -> tuple[int, int, int] | None:
    """Returns the version of NCCL that this process runs, which may be preloaded; None without NCCL."""
    for library in (None, "libnccl.so.2"):
        try:
            number = ctypes.c_int()
            ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
            return number.value // 10000, number.value // 100 % 100, number.value % 100
        except (AttributeError, OSError):
            continue
    return None


# Ranks ########################################################################


Ranks = list[subprocess.Popen[bytes]]


def start(size: int, device: str, cases: Sequence[str], options: argparse.Namespace, folder: Path) -> Ranks:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    shared |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    shared.setdefault("NCCL_MAX_CTAS", "2" if size <= 4 else "1")
    shared["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    if device != "cpu" and options.plugin and cases[0] in LOSSES:
        shared["LIGHTNING_GNN_TEST_NEVER_RETURNS"] = "1"  # as operations of NCCL
    processes = []
    for rank in range(size):
        local, node = (rank, 0) if Place(rank, size, device, folder).apart else (0, rank)
        given = {"rank": rank, "size": size, "device": device, "plugin": options.plugin, "folder": str(options.folder)}
        command = [sys.executable, __file__, json.dumps({**given, "files": str(folder), "cases": [*cases]})]
        environment = {**shared, "LOCAL_RANK": str(local), "NODE_RANK": str(node), "RANK": str(rank)}
        with open(log_of(folder, device, rank), "wb") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return processes


def log_of(folder: Path, device: str, rank: int) -> Path:
    return folder / f"{device}-{rank}.log"


def result_of(folder: Path, device: str, case: str, rank: int) -> Path:
    return folder / f"{device}-{case}-{rank}.pt"


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends these ranks, and the processes that they started."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        process.kill()
        process.wait()


def last_line(folder: Path, device: str, rank: int = 0) -> str:
    lines = log_of(folder, device, rank).read_text(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "no output"


def run_cases(
    size: int, device: str, cases: list[str], options: argparse.Namespace, folder: Path, failed: dict[str, str]
) -> None:
    """Writes the results of cases into the folder, and why others failed into `failed`.

    After a case that does not end within the limit, or ends a rank, the next one begins with new ranks.
    """
    pending, limit_s = cases, options.case_limit
    while pending:
        processes = start(size, device, pending, options, folder)
        try:
            since = time.monotonic()
            while pending:
                if all(result_of(folder, device, pending[0], rank).exists() for rank in range(size)):
                    pending, since = pending[1:], time.monotonic()
                    continue
                codes = [process.poll() for process in processes]
                missing = [rank for rank in range(size) if not result_of(folder, device, pending[0], rank).exists()]
                lost = [rank for rank in missing if codes[rank] is not None]
                late = time.monotonic() - since > limit_s
                if late or lost:
                    rank = lost[0] if lost else 0
                    how = f"exit status {codes[rank]}" if lost else f"no end within {limit_s:.0f} s"
                    failed[pending[0]] = f"{device} rank {rank}: {how}; {last_line(folder, device, rank)}"
                    pending = pending[1:]
                    break
                time.sleep(0.05)
        finally:
            end(processes)


def run_rank(given: dict[str, Any]) -> None:
    """Runs cases as one rank, and writes the result of each."""
    prepare(argparse.Namespace(folder=Path(given["folder"]), plugin=given["plugin"]))
    place = Place(given["rank"], given["size"], given["device"], Path(given["files"]))
    torch.set_num_threads(1)
    for name in given["cases"]:
        if name in LOSSES:
            lose(name, place)
            continue
        found = CASES[name].run(place)
        path = result_of(place.folder, place.device, name, place.rank)
        torch.save(found, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        print(f"{name}: done", flush=True)


# A lost rank ##################################################################


class Loss(L.Callback):
    def __init__(self, how: str, place: Place) -> None:
        self.how, self.place = how, place

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch != 5 or self.place.rank != self.place.size - 1:
            return
        time.sleep(1)  # the other rank waits in the first exchange of the step
        (self.place.folder / f"{self.how}-when").write_text(str(time.time()))
        if self.how == "asleep":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL if self.how == "killed" else signal.SIGSTOP)


def lose(how: str, place: Place) -> None:
    strategy = gnn.DGCLStrategy(timeout=DEADLINE_S, self_check=False)
    trained(place.device, "gcn", strategy, 400, callbacks=[Loss(how, place)], **place.trainer)


def free_megabytes(options: argparse.Namespace) -> float:
    """Returns the device's free memory, as a process of its own finds it."""
    given = {"free": options.device, "plugin": options.plugin, "folder": str(options.folder)}
    command = [sys.executable, __file__, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=True)
    return float(done.stdout.split()[-1])


def lost_rows(how: str, options: argparse.Namespace, folder: Path) -> list[Row]:
    before = free_megabytes(options)
    processes = start(2, options.device, [how], options, folder)
    when = folder / f"{how}-when"
    try:
        until = time.monotonic() + START_S
        while processes[0].poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        took = time.time() - float(when.read_text()) if when.exists() else float("nan")
        code = processes[0].poll()
    finally:
        end(processes)
    log = log_of(folder, options.device, 0).read_text(errors="replace")
    named = re.search(r"rank 1\b", log) is not None
    held = before - free_megabytes(options)
    check, bound = f"rank 1 is {how}", BOUND_S[how]
    said = last_line(folder, options.device)
    return [
        row(f"{check}: seconds until rank 0 ends", took, f"< {bound:.0f}", bool(code) and took < bound, said=said),
        row(f"{check}: rank 0 names it", named, "True", named, said=said),
        row(f"{check}: MB of the device not freed", held, "< 64", held < 64),
    ]


# MPS ##########################################################################


def mps(folder: Path) -> dict[str, str]:
    """Starts a daemon by which ranks compute on the GPU at the same time, if installed; returns variables for ranks."""
    tool = shutil.which("nvidia-cuda-mps-control")
    if tool is None:
        return {}
    given = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for path in given.values():
        Path(path).mkdir(exist_ok=True)
    done = subprocess.run([tool, "-d"], env={**os.environ, **given}, timeout=30)
    return given if done.returncode == 0 else {}


def stop_mps(folder: Path) -> None:
    """Ends the daemon that :func:`mps` has started in this folder."""
    tool, pipes = shutil.which("nvidia-cuda-mps-control"), folder / "mps"
    if tool is not None and pipes.exists():
        given = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
        subprocess.run([tool], input="quit\n", text=True, env=given, timeout=30)
        shutil.rmtree(pipes, ignore_errors=True)


# The part #####################################################################


def compare(case: Case, found: list[list[Tensor]], expected: list[list[Tensor]]) -> tuple[float, str, bool]:
    """Returns the value of a row, the required value, and whether the value meets it."""
    if case.tolerance is None:
        fall = max(float(each[0][-1] / each[0][0]) if each[0].isfinite().all() else float("nan") for each in found)
        return fall, "< 1", fall < 1
    off = float(torch.tensor([difference(here, there) for here, there in zip(found, expected, strict=True)]).max())  # or NaN
    return off, f"< {case.tolerance}", off < case.tolerance


def skip_reason(size: int, options: argparse.Namespace) -> str | None:
    """Returns why so many ranks cannot run here."""
    if options.plugin or functions_of(torch.device(options.device)).device_count() >= size:
        return None
    version = nccl_version()
    return None if version and version >= NEEDED else f"NCCL {'.'.join(map(str, version)) if version else 'is missing'}"


def nccl(options: argparse.Namespace) -> list[Row]:
    folder = options.folder / "nccl"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows, wanted = list[Row](), options.cases or [*CASES, *LOSSES]
    if options.device == "cuda":
        os.environ |= mps(options.folder)
    try:
        for size in (*options.ranks, *([8] if max(options.ranks) == 4 else [])):
            cases = [name for name in wanted if name in CASES and size in CASES[name].sizes]
            reason = skip_reason(size, options)
            if cases and reason is None:
                rows += compared(size, cases, options, folder)
            elif cases:
                needs = f"NCCL {'.'.join(map(str, NEEDED))} or later, or a GPU for each rank"
                rows.append(row(f"{size} ranks", reason, needs, True, skipped=True))
    finally:
        stop_mps(options.folder)
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(folder)  # where no daemon listens
    for how in LOSSES:
        if how in wanted and skip_reason(2, options) is None:
            rows += lost_rows(how, options, folder)
    return rows


def compared(size: int, cases: list[str], options: argparse.Namespace, folder: Path) -> list[Row]:
    """Returns a row for each case, which is in the part's file as soon as ranks on both devices have ended it."""
    own = folder / str(size)
    own.mkdir()
    rows, failed, devices = list[Row](), dict[str, str](), (options.device, "cpu")
    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(run_cases, size, device, cases, options, own, failed) for device in devices]
        for name in cases:
            files = [[result_of(own, device, name, rank) for rank in range(size)] for device in devices]
            while name not in failed and not all(file.exists() for each in files for file in each):
                for run in runs:
                    if run.done():
                        run.result()  # raises what it has raised
                time.sleep(0.05)
            check = f"{size} ranks, {name}: " + ("last / first loss" if CASES[name].tolerance is None else "off CPU ranks")
            if name in failed:
                rows.append(row(check, failed[name], "a result", False))
                continue
            found, expected = ([torch.load(file) for file in each] for each in files)
            value, wanted, ok = compare(CASES[name], found, expected)
            rows.append(row(check, value, wanted, ok))
    return rows


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    if "free" in arguments:
        prepare(argparse.Namespace(folder=Path(arguments["folder"]), plugin=arguments["plugin"]))
        print(functions_of(torch.device(arguments["free"])).mem_get_info()[0] / 2**20)
    else:
        run_rank(arguments)
