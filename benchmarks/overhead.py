"""What Lightning and `dgcl` cost per epoch on a graph that is too small to need them: Cora, 2-layer GCN.

    python benchmarks/overhead.py [--epochs 200] [--json FILE]

The same module, callbacks and data under ``strategy="auto"``, ``dgcl`` on 1 and on 2 ranks, and a plain loop.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import QUIET, SHARED, report, run_row
from torch_geometric.datasets import Planetoid
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ends.append(time.perf_counter())


def model() -> GCN:
    torch.manual_seed(0)
    return GCN(in_channels=1433, hidden_channels=16, num_layers=2, out_channels=7)


def plain(root: str, epochs: int) -> dict[str, Any]:
    data, gcn = Planetoid(root, "Cora")[0], model()
    optimizer = torch.optim.Adam(gcn.parameters(), lr=0.01, weight_decay=5e-4)
    ends = []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = gcn(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return {"ends": ends}


def trained(root: str, strategy: str, ranks: int, epochs: int) -> dict[str, Any] | None:
    clock = Clock()
    trainer = L.Trainer(
        strategy=DGCLStrategy() if strategy == "dgcl" else strategy,
        devices=ranks,
        max_epochs=epochs,
        **QUIET,
        callbacks=[clock],
        limit_val_batches=0,
    )
    trainer.fit(NodeClassifier(model()), datamodule=GraphDataModule(Planetoid(root, "Cora")))
    return {"ends": clock.ends} if trainer.is_global_zero else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        kind, _, ranks = options.row.partition(":")
        found = (
            plain(options.root, options.epochs)
            if kind == "plain"
            else trained(options.root, kind, int(ranks), options.epochs)
        )
        if found is not None:
            print(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = shutil.copytree(SHARED / "data" / "planetoid", Path(folder) / "planetoid")
        Planetoid(root, "Cora")
        for name, row in (
            ("plain loop", "plain:1"),
            ("auto", "auto:1"),
            ("dgcl, 1 rank", "dgcl:1"),
            ("dgcl, 2 ranks", "dgcl:2"),
        ):
            arguments = ["--row", row, "--root", str(root), "--epochs", str(options.epochs)]
            ends = run_row(str(Path(__file__)), arguments, threads=1)["ends"]
            epochs = [after - before for before, after in pairwise(ends[10:])]
            rows.append({"run": name, "ms/epoch": 1e3 * median(epochs)})
    auto = rows[1]["ms/epoch"]
    for row in rows:
        row["over auto, ms"] = row["ms/epoch"] - auto
    report(f"Cora, 2-layer GCN, {options.epochs} epochs", rows, ["run", "ms/epoch", "over auto, ms"], options.json)


if __name__ == "__main__":
    main()
