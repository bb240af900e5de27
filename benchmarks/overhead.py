"""What Lightning and `dgcl` cost per epoch: on Cora, too small to need them, and on 200,000 nodes; 2-layer GCN.

    python benchmarks/overhead.py [--epochs 200] [--large-epochs 20] [--json FILE]
    python benchmarks/overhead.py --against CHECKOUT [--pairs 8]    # "by hand" on 2 ranks, this version and another in turn

The same module, callbacks and data under ``strategy="auto"``, ``dgcl`` on 1 and on 2 ranks, and a plain loop. "by hand" is a
module that users write: its loss, metric and logs are followed by row semantics, which those of ``NodeClassifier`` are, too.
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
from common import QUIET, ROOT, SHARED, report, run_row
from torch_geometric.datasets import Planetoid
from torch_geometric.nn.models import GCN
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, planted_partition


class ByHand(L.LightningModule):
    """A module as users write it: a loss, a metric and logs."""

    def __init__(self, gcn: GCN, num_classes: int) -> None:
        super().__init__()
        self.gcn, self.accuracy = gcn, MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.gcn(batch.x, batch.edge_index)[batch.train_mask]
        y = batch.y[batch.train_mask]
        loss = F.cross_entropy(out, y)
        self.accuracy(out, y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ends.append(time.perf_counter())


def model(in_channels: int = 1433, out_channels: int = 7) -> GCN:
    torch.manual_seed(0)
    return GCN(in_channels, hidden_channels=16, num_layers=2, out_channels=out_channels)


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


def large_graph() -> Any:
    return planted_partition(200_000)


def trained(
    root: str, strategy: str, ranks: int, epochs: int, by_hand: bool = False, large: bool = False
) -> dict[str, Any] | None:
    clock = Clock()
    trainer = L.Trainer(
        strategy=DGCLStrategy() if strategy == "dgcl" else strategy,
        devices=ranks,
        max_epochs=epochs,
        **QUIET,
        callbacks=[clock],
        limit_val_batches=0,
    )
    if by_hand and large:
        trainer.fit(ByHand(model(32, 8), 8), datamodule=GraphDataModule(large_graph))
    else:
        module = ByHand(model(), 7) if by_hand else NodeClassifier(model())
        trainer.fit(module, datamodule=GraphDataModule(Planetoid(root, "Cora")))
    return {"ends": clock.ends} if trainer.is_global_zero else None


def median_epoch(root: Path, row: str, epochs: int, package: Path = ROOT) -> float:
    """Returns ms of the median epoch of a row, without the first ones, with `lightning_gnn` of a checkout."""
    arguments = ["--row", row, "--root", str(root), "--epochs", str(epochs)]
    ends = run_row(str(Path(__file__)), arguments, threads=1, package=package)["ends"]
    return 1e3 * median(after - before for before, after in pairwise(ends[min(10, epochs // 4) :]))


def in_pairs(root: Path, options: argparse.Namespace) -> None:
    """Prints ms of this version over those of another, in runs that alternate."""
    rows = []
    for name, row, epochs in (
        ("Cora", "dgcl:2:by hand", options.epochs),
        ("200,000 nodes", "dgcl:2:large", options.large_epochs),
    ):
        there, here = [], []
        for number in range(options.pairs):
            for version in (there, here) if number % 2 else (here, there):
                package = ROOT if version is here else options.against.resolve()
                version.append(median_epoch(root, row, epochs, package))
        more = sorted(after - before for before, after in zip(there, here))
        rows.append(
            {
                "graph": name,
                "there, ms/epoch": median(there),
                "here, ms/epoch": median(here),
                "median of differences, ms": median(more),
                "differences, ms": " ".join(f"{each:.2f}" for each in more),
            }
        )
    report(f"A module by hand under dgcl, 2 ranks, {options.pairs} pairs", rows, list(rows[0]), options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--large-epochs", type=int, default=20)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="time a module by hand with both versions, in turn")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        kind, ranks, *how = options.row.split(":")
        found = (
            plain(options.root, options.epochs)
            if kind == "plain"
            else trained(options.root, kind, int(ranks), options.epochs, bool(how), "large" in how)
        )
        if found is not None:
            print(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(SHARED / "data" / "planetoid", Path(folder) / "planetoid"))
        Planetoid(root, "Cora")
        if options.against is not None:
            in_pairs(root, options)
            return
        for name, row in (
            ("plain loop", "plain:1"),
            ("auto", "auto:1"),
            ("dgcl, 1 rank", "dgcl:1"),
            ("dgcl, 2 ranks", "dgcl:2"),
            ("by hand, auto", "auto:1:by hand"),
            ("by hand, dgcl, 2 ranks", "dgcl:2:by hand"),
            ("200,000 nodes, by hand, auto", "auto:1:large"),
            ("200,000 nodes, by hand, dgcl, 2 ranks", "dgcl:2:large"),
        ):
            epochs = options.large_epochs if "large" in row else options.epochs
            rows.append({"run": name, "ms/epoch": median_epoch(root, row, epochs)})
    for row, auto in zip(rows, (1, 1, 1, 1, 4, 4, 6, 6)):
        row["over auto, ms"] = row["ms/epoch"] - rows[auto]["ms/epoch"]
    report(
        f"Cora and 200,000 nodes, 2-layer GCN, {options.epochs} and {options.large_epochs} epochs",
        rows,
        ["run", "ms/epoch", "over auto, ms"],
        options.json,
    )


if __name__ == "__main__":
    main()
