"""Epochs of 2 ranks while a control group limits rank 1 to a quarter of a CPU, with owners that stay and that follow.

python benchmarks/balance.py [--nodes 200000] [--quiet-epochs 8] [--limited-epochs 50] [--free-epochs 60]
    [--cpus 0.2] [--json FILE]

The quota is set on the process of rank 1 from outside while it trains, and removed later. "own": the seconds of a rank without
waits. "times as fast": as the median epoch with the quota and owners that stay. The losses of both runs are compared in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import QUIET, ROOT, report

PERIOD_US = 100_000
QUOTA = 0.25
GROUPS = Path("/sys/fs/cgroup")


def train(folder: str, nodes: int, degree: float, features: int, epochs: int, balance: bool) -> None:
    """Trains on one rank; appends a line of JSON for each epoch to a file of the rank."""
    import lightning as L
    from torch_geometric.nn.models import GCN

    from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, planted_partition

    class Times(L.Callback):
        since = waited = 0.0

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.since, self.waited = time.time(), trainer.strategy.world.waited_s

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            shard, now = trainer.datamodule.shard, time.time()
            line = {
                "epoch": trainer.current_epoch,
                "pid": os.getpid(),
                "end": now,
                "seconds": now - self.since,
                "own": now - self.since - (trainer.strategy.world.waited_s - self.waited),
                "loss": float(outputs["loss"]),
                "nodes": shard.counts,
                "edges": shard.edge_counts,
                "halo": [len(halo) for halo in shard.halos],
            }
            with (Path(folder) / f"rank-{trainer.global_rank}").open("a") as file:
                file.write(json.dumps(line) + "\n")

    L.seed_everything(1)
    graph = planted_partition(nodes, degree, num_features=features)
    graph.x = graph.x.double()
    model = NodeClassifier(GCN(features, 64, 2, 8))
    strategy = DGCLStrategy(elastic=True, balance=balance)
    trainer = L.Trainer(
        strategy=strategy, devices=2, max_epochs=epochs, precision="64-true", callbacks=[Times()], num_sanity_val_steps=0,
        limit_val_batches=0, **QUIET,
    )  # fmt: skip
    trainer.fit(model, datamodule=GraphDataModule(graph, partition_dir=Path(folder).parent / "store"))


class CpuGroup:
    """New control group of version 1 or 2.

    Args:
        name: its name.
        cpus: CPUs of its processes without a quota of a quarter; None for no limit. A group with a limit has four times the
            weight of others, so that it has these CPUs on a busy machine, too.
    """

    def __init__(self, name: str, cpus: float | None) -> None:
        self._first, self._cpus = (GROUPS / "cpu" / "cpu.cfs_quota_us").exists(), cpus
        self._folder = (GROUPS / "cpu" if self._first else GROUPS) / f"lightning_gnn-{os.getpid()}-{name}"
        self._folder.mkdir()
        if cpus is not None:
            file, weight = ("cpu.shares", 4096) if self._first else ("cpu.weight", 400)
            (self._folder / file).write_text(str(weight))

    def limit(self, is_limited: bool) -> None:
        """Set or remove the quota of a quarter."""
        whole = None if self._cpus is None and not is_limited else self._cpus or 1.0
        quota = None if whole is None else int(whole * (QUOTA if is_limited else 1) * PERIOD_US)
        if self._first:
            (self._folder / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
        else:
            (self._folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")

    def add(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        with suppress(OSError):
            self._folder.rmdir()


def read_lines(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(arguments: argparse.Namespace, folder: Path, balance: bool) -> list[list[dict[str, Any]]]:
    """Returns the epochs of each rank of a run in which rank 1 is limited and set free."""
    folder.mkdir()
    ends = arguments.quiet_epochs, arguments.quiet_epochs + arguments.limited_epochs
    total = ends[1] + arguments.free_epochs
    settings = [folder, arguments.nodes, arguments.degree, arguments.features, total, balance]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    command = [sys.executable, __file__, "--train", json.dumps([str(folder), *settings[1:]])]
    groups = [CpuGroup(f"{rank}", arguments.cpus) for rank in range(2)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    states = [-1, -1]
    while process.poll() is None:
        for rank, group in enumerate(groups):
            epochs = read_lines(folder / f"rank-{rank}")
            state = int(rank == 1 and ends[0] <= epochs[-1]["epoch"] + 1 < ends[1]) if epochs else -1
            if state != states[rank]:
                group.limit(bool(state))
                group.add(epochs[-1]["pid"])
                states[rank] = state
        time.sleep(0.05)
    for group in groups:
        group.remove()
    if process.returncode:
        raise RuntimeError(f"The run failed with status {process.returncode}")
    return [read_lines(folder / f"rank-{rank}") for rank in range(2)]


def median(lines: list[dict[str, Any]], low: int, high: int, key: str = "seconds") -> float:
    return statistics.median([line[key] for line in lines if low <= line["epoch"] < high])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--degree", type=float, default=20.0)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--quiet-epochs", type=int, default=8)
    parser.add_argument("--limited-epochs", type=int, default=50)
    parser.add_argument("--free-epochs", type=int, default=60)
    parser.add_argument("--stay-epochs", type=int, default=8, help="epochs with the quota and owners that stay")
    parser.add_argument("--cpus", type=float, help="CPUs of each rank, on a busy machine; the quota is a quarter of them")
    parser.add_argument("--json")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*json.loads(options.train))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        follow = run(options, folder / "follow", True)
        quota = options.quiet_epochs, options.quiet_epochs + options.limited_epochs
        free = options.limited_epochs + options.free_epochs - options.stay_epochs
        short = argparse.Namespace(**{**vars(options), "limited_epochs": options.stay_epochs, "free_epochs": free})
        stay = run(short, folder / "stay", False)
    if options.json:
        Path(options.json).with_suffix(".epochs.json").write_text(json.dumps({"follow": follow, "stay": stay}))
    losses = [{line["epoch"]: line["loss"] for line in lines[0]} for lines in (stay, follow)]
    common = sorted({*losses[0]} & {*losses[1]})
    difference = max(abs(losses[1][each] / losses[0][each] - 1) for each in common)
    unbalanced = median(stay[0], quota[0] + 2, quota[0] + options.stay_epochs)
    rows: list[dict[str, Any]] = []
    spans = {
        "before the quota": (2, quota[0]),
        "quota, epochs 0 to 9": (quota[0], quota[0] + 10),
        "quota, epochs 10 to 19": (quota[0] + 10, quota[0] + 20),
        "quota, epochs 20 to the end": (quota[0] + 20, quota[1]),
        "after the quota, last half": ((quota[1] + quota[1] + options.free_epochs) // 2, quota[1] + options.free_epochs),
    }
    for name, (low, high) in spans.items():
        lines = [each for each in follow[0] if low <= each["epoch"] < high]
        kept = [(each["epoch"], tuple(each["nodes"])) for each in follow[0]]
        moves = [epoch for (_, before), (epoch, after) in pairwise(kept) if before != after and low <= epoch < high]
        row = {"epochs": name, "seconds": median(lines, low, high), "moves": len(moves), "in epochs": str(moves)}
        before = next((each["end"] for each in reversed(follow[0]) if each["epoch"] < low), lines[0]["end"])
        row["mean with moves"] = (lines[-1]["end"] - before) / len(lines)
        row |= {f"own {rank}": median(follow[rank], low, high, "own") for rank in range(2)}
        row["nodes of 1 (%)"] = 100 * lines[-1]["nodes"][1] / sum(lines[-1]["nodes"])
        row["times as fast"] = unbalanced / row["seconds"] if name.startswith("quota") else None
        rows.append(row)
    title = (
        f"Owners that follow the speed, {options.nodes:,} nodes; owners that stay: {median(stay[0], 2, quota[0]):.2f} s without "
        f"and {unbalanced:.2f} s with the quota; losses differ by at most {difference:.1e} in {len(common)} common epochs"
    )
    report(title, rows, [*rows[0]], options.json)


if __name__ == "__main__":
    main()
