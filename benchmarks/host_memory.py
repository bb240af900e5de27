"""Training a graph that is larger than memory: ranks that compute in turns, with what there is no room for in files.

python benchmarks/host_memory.py --folder FOLDER --nodes 2.45e6 --edges 124e6 --memory none 20GB 3GB --json host_memory.json

Each run has `--devices` ranks; those with a memory are in a control group of `--limit` times as much, pages of files counted.
Prints seconds of an epoch beside those of the run before that has all in memory, bytes written and read, what the
disk alone would take for them at the rate that it is measured to have, and the most memory; and whether the weights are equal,
bit for bit.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

from benchmarks.billion import CLASSES, group_of_this_process, limited, write
from benchmarks.common import report
from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier

CONVS = {
    "gcn": GCNConv,
    "sage": SAGEConv,
    "gin": lambda i, o: GINConv(torch.nn.Sequential(torch.nn.Linear(i, o), torch.nn.ReLU(), torch.nn.Linear(o, o))),
    "gat": GATConv,
}


class Net(torch.nn.Module):
    """As in PyG's examples of ogbn-products: three layers."""

    def __init__(self, kind: str, columns: int, hidden: int) -> None:
        super().__init__()
        make, widths = CONVS[kind], [columns, hidden, hidden, CLASSES]
        self.convs = torch.nn.ModuleList(make(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(F.relu(conv(x, edge_index)), 0.5, self.training)
        return self.convs[-1](x, edge_index)


class Epochs(L.Callback):
    """Prints when epochs end, what this rank has written, and read from the disk."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        counts = psutil.Process().io_counters()
        world: Any = trainer.strategy.world  # type: ignore[attr-defined]
        values = [time.perf_counter() - self.began, counts.read_bytes / 1e9, counts.write_bytes / 1e9]
        by_rank = torch.tensor(world.all_gather_object(values))
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["train_loss"])
            print(json.dumps([float(by_rank[:, 0].max()), *by_rank[:, 1:].sum(0).tolist(), loss]), flush=True)


def train(options: argparse.Namespace, memory: str) -> None:
    L.seed_everything(0, verbose=False)
    graph = options.folder / "graph"
    data = GraphDataModule(str(graph), partition_dir=options.folder / "store", partition=options.partition)
    given: dict[str, Any] = {} if memory == "none" else {"memory_limit": memory, "spill_dir": options.folder}
    trainer = L.Trainer(
        strategy=DGCLStrategy(start_method="fork", self_check=False, **given),
        devices=options.devices,
        accelerator="cpu",
        max_epochs=options.epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Epochs()],
    )
    module = NodeClassifier(Net(options.kind, options.columns, options.hidden), num_classes=CLASSES)
    trainer.fit(module, datamodule=data)
    torch.save(module.state_dict(), options.folder / f"{options.kind}-{memory}.pt")


def disk_rates(folder: Path, num_bytes: int = 1 << 31) -> tuple[float, float]:
    """Returns the bytes a second that a file is written and read with, past the system's memory."""
    piece, path, rates = mmap.mmap(-1, 1 << 24), folder / "rate", []
    for flags, go in ((os.O_WRONLY | os.O_CREAT, os.write), (os.O_RDONLY, lambda file, into: os.readv(file, [into]))):
        file = os.open(path, flags | os.O_DIRECT)
        began = time.perf_counter()
        for _ in range(num_bytes // len(piece)):
            go(file, piece)
        rates.append(num_bytes / (time.perf_counter() - began))
        os.close(file)
    path.unlink()
    return rates[0], rates[1]


def run(options: argparse.Namespace, memory: str) -> dict[str, Any]:
    given = [
        f"--{name}={getattr(options, name)}" for name in ("folder", "devices", "kind", "hidden", "columns", "epochs")
    ]
    command = [sys.executable, __file__, *given, f"--partition={options.partition}", f"--train={memory}"]
    limit = int(1e9 * (1000 if memory == "none" else options.limit * float(memory.removesuffix("GB"))))
    most = 0
    with limited(limit) as enter, tempfile.TemporaryFile("w+") as file:
        huge = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}  # of torch, as docs/memory.md says
        process = subprocess.Popen(command, stdout=file, text=True, preexec_fn=enter, env=huge)
        while process.poll() is None:
            time.sleep(0.1)
            found = re.search(r"^total_rss (\d+)", (group_of_this_process() / "memory.stat").read_text(), re.MULTILINE)
            assert found is not None
            most = max(most, int(found[1]))
        in_all = int((group_of_this_process() / "memory.max_usage_in_bytes").read_text())
        file.seek(0)
        output = file.read()
    if process.returncode:
        raise SystemExit(f"{memory} failed:\n{output}")
    epochs = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    (_, *before), (seconds, *after) = epochs[-2:]
    read, written = (late - early for early, late in zip(before[:2], after[:2]))
    write_rate, read_rate = disk_rates(options.folder)
    weights = torch.load(options.folder / f"{options.kind}-{memory}.pt")
    return {
        "conv": options.kind,
        "memory": memory,
        "epoch s": seconds,
        "GB read": read,
        "GB written": written,
        "disk s": read * 1e9 / read_rate + written * 1e9 / write_rate,
        "own GB": most / 1e9,
        "GB in all": in_all / 1e9,
        "loss": after[2],
        "weights": weights,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nodes", type=float, default=2.45e6)
    parser.add_argument("--edges", type=float, default=124e6, help="directed")
    parser.add_argument(
        "--inside", type=float, default=0.98, help="the share of edges within communities, at the least"
    )
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--kind", choices=[*CONVS], default="gcn")
    parser.add_argument("--partition", default="streaming")
    parser.add_argument("--memory", nargs="+", default=["none", "3GB"])
    parser.add_argument("--limit", type=float, default=4 / 3, help="of a control group, in units of the memory")
    parser.add_argument("--json")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options, options.train)
        return
    sizes = int(options.nodes), int(options.edges), options.columns, "float32", options.inside
    options.folder /= "-".join(map(str, sizes))
    graph = options.folder / "graph"
    if not graph.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        write(graph.with_suffix(".part"), "planted", *sizes)
        shutil.move(graph.with_suffix(".part"), graph)
    rows = [run(options, memory) for memory in options.memory]
    for row in rows:
        weights, first = row.pop("weights"), rows[0]
        if row is first:
            expected = weights
            continue
        row["same weights"] = all(torch.equal(weights[name], expected[name]) for name in expected)
        row["of the first"] = row["epoch s"] / first["epoch s"]
        row["of the larger"] = row["epoch s"] / max(first["epoch s"], row["disk s"])
    columns = [*rows[-1]]
    report(f"{options.devices} ranks, {options.edges:.3g} edges, {options.hidden} columns", rows, columns, options.json)


if __name__ == "__main__":
    main()
