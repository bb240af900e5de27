"""What the defaults of gossip rest on: accuracy by assignment, halo, clusters in a batch, average and interval.

    python benchmarks/gossip_defaults.py [--graphs cora dblp computers github] [--assignments random metis]
        [--averages gradients parameters] [--halos none history] [--per-batch 1] [--intervals 5 20 50] [--seeds 3] [--workers 4]
        [--epochs 30] [--clusters 40] [--json FILE]

2-layer GraphSAGE of 64, learning rate 0.01, dropout 0.2; splits of 60/20/20 %. Two results of each run are tested on the whole
graph: the weights of the worker that was best in validation, and the mean of all workers' weights. Beside them the same model on
one device (``--alone``), and on the full graph by ``dgcl``: after as many steps as ``--steps`` says,
and in each row what it had come to in as many CPU seconds as all workers took together for their epochs, validation left out.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from bisect import bisect
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import QUIET, SHARED, report
from sampling_epochs import load
from torch_geometric.data import Data
from torch_geometric.datasets import CitationFull, FacebookPagePage, Planetoid
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import DGCLStrategy, GossipStrategy, GraphDataModule, NodeClassifier

HIDDEN = 64


OTHERS: dict[str, tuple[str, Any]] = {
    "cora": ("planetoid", lambda root: Planetoid(root, "Cora")),
    "dblp": ("citation_full", lambda root: CitationFull(root, "DBLP")),
    "facebook": ("facebook_page_page", FacebookPagePage),
}


def graph(name: str) -> Data:
    """Returns a graph by name, without its split."""
    if name not in OTHERS:
        return load(name)
    folder, make = OTHERS[name]
    with tempfile.TemporaryDirectory() as scratch:  # PyG writes beside the raw files
        shutil.copytree(SHARED / "data" / folder, f"{scratch}/{folder}")
        found = make(f"{scratch}/{folder}")[0]
    return Data(x=F.normalize(found.x), edge_index=found.edge_index, y=found.y)


class Clock(L.Callback):
    """CPU seconds of this process's training, validation and tests left out; begins with the second epoch's, when all is loaded,
    and counts that twice."""

    def __init__(self) -> None:
        self.seconds = self.began = 0.0
        self.epochs = 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = time.process_time()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop()
        self.epochs += 1
        if self.epochs == 1:
            self.seconds = 0.0
        elif self.epochs == 2:
            self.seconds *= 2

    def stop(self) -> None:
        self.seconds += time.process_time() - self.began
        self.began = time.process_time()


class Kept(Clock):
    """Each worker's own weights, before there is one result, and its seconds."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save((pl_module.state_dict(), self.seconds), self.folder / f"{trainer.global_rank}.pt")


class Curve(Clock):
    """Of full-graph training: after some steps, the seconds until then and test accuracy, of the best in validation so far."""

    def __init__(self, every: int = 5) -> None:
        super().__init__()
        self.every, self.best, self.points = every, -1.0, list[tuple[float, float]]()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self.epochs % self.every:
            return
        batch = trainer.datamodule.shard.batch  # type: ignore[attr-defined]
        pl_module.eval()
        with torch.no_grad():
            right = pl_module(batch).argmax(1) == batch.y
        pl_module.train()
        validated = float(right[batch.val_mask].float().mean())
        tested = 100 * float(right[batch.test_mask].float().mean())
        if validated <= self.best:
            tested = self.points[-1][1]
        self.best = max(self.best, validated)
        self.points.append((self.seconds, tested))

    def at(self, seconds: float) -> float:
        """Returns the accuracy after so many seconds."""
        return self.points[max(bisect(self.points, (seconds, 100.0)) - 1, 0)][1]


def full_graph(data: GraphDataModule, seed: int, steps: int) -> Curve:
    L.seed_everything(seed, verbose=False)
    curve = Curve()
    trainer = L.Trainer(
        strategy=DGCLStrategy(self_check=False),
        devices=1,
        max_epochs=steps,
        callbacks=[curve],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(new_module(data), datamodule=data)
    return curve


def new_module(data: GraphDataModule) -> NodeClassifier:
    source: Any = data.source
    classes = int(source.y.max()) + 1
    return NodeClassifier(
        GraphSAGE(source.num_features, HIDDEN, num_layers=2, out_channels=classes, dropout=0.2), lr=0.01
    )


def fitted(data: GraphDataModule, seed: int, workers: int, epochs: int, options: dict[str, Any]) -> dict[str, float]:
    """Trains; returns accuracies in per cent, how far the workers were apart, and the CPU seconds of all of them."""
    L.seed_everything(seed, verbose=False)
    module = new_module(data)
    strategy = GossipStrategy(start_method="fork", seed=seed, timeout=600, self_check=False, **options)
    with tempfile.TemporaryDirectory() as folder:
        run = {"devices": workers, "max_epochs": epochs, "check_val_every_n_epoch": epochs, "num_sanity_val_steps": 0}
        trainer = L.Trainer(strategy=strategy, callbacks=[Kept(folder)], **run, **QUIET)
        trainer.fit(module, datamodule=data)
        own, seconds = zip(*(torch.load(path) for path in Path(folder).glob("*.pt")))
    alone = L.Trainer(devices=1, **QUIET)

    def accuracy() -> float:
        return 100 * alone.test(module, datamodule=data, verbose=False)[0]["test_acc"]

    found = {"best": accuracy(), "apart": 100 * strategy.consensus, "seconds": sum(seconds)}
    module.load_state_dict({name: torch.stack([each[name] for each in own]).mean(0) for name in own[0]})
    return {**found, "mean": accuracy()}


MEANS = {"CPU s": "seconds", "apart, %": "apart"}


def spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}, %": mean(values), f"{name} +-": stdev(values) if len(values) > 1 else 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=["cora", "dblp", "computers", "github"])
    parser.add_argument("--assignments", nargs="*", default=["random", "metis"])
    parser.add_argument("--averages", nargs="*", default=["gradients", "parameters"])
    parser.add_argument("--halos", nargs="*", default=["none", "history"])
    parser.add_argument("--per-batch", type=int, nargs="*", default=[1], help="clusters in a batch")
    parser.add_argument("--intervals", type=int, nargs="*", default=[5, 20, 50])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200, help="of full-graph training; 0 leaves it out")
    parser.add_argument("--alone", action="store_true", help="each assignment on one device, too")
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in asked.graphs:
        source = graph(name)
        data = GraphDataModule(source, split=(0.6, 0.2, 0.2), seed=0)
        curves = [full_graph(data, seed, asked.steps) for seed in range(asked.seeds)] if asked.steps else []
        if curves:
            ends = [curve.points[-1] for curve in curves]
            rows.append({"graph": name, "trained": "full graph", **spread("best", [accuracy for _, accuracy in ends])})
            rows[-1]["CPU s"] = mean(seconds for seconds, _ in ends)
            print(rows[-1], flush=True)

        def add(words: dict[str, Any], workers: int, options: dict[str, Any]) -> None:
            data = GraphDataModule(source, split=(0.6, 0.2, 0.2), seed=0)  # noqa: B023
            runs = [fitted(data, seed, workers, asked.epochs, options) for seed in range(asked.seeds)]
            row = {**words, **{column: mean(each[what] for each in runs) for column, what in MEANS.items()}}
            for what in ("best", "mean"):
                row |= spread(what, [each[what] for each in runs])
            if curves:  # noqa: B023
                row["full graph, %"] = mean(curve.at(run["seconds"]) for curve, run in zip(curves, runs))  # noqa: B023
            rows.append(row)
            print(row, flush=True)

        for assignment, halo, per_batch in product(asked.assignments, asked.halos, asked.per_batch):
            words = {"graph": name, "assignment": assignment, "halo": halo, "per batch": per_batch}
            options = {"assignment": assignment, "num_clusters": asked.clusters, "clusters_per_batch": per_batch}
            options["historical_embeddings"] = halo != "none"
            if asked.alone:
                add({"trained": "one device", **words}, 1, options)
            for average, interval in product(asked.averages, asked.intervals):
                of_workers = {"average": average, "average_every_n_batches": interval}
                add(
                    {"trained": "gossip", **words, "average": average, "interval": interval},
                    asked.workers,
                    {**options, **of_workers},
                )
    title = f"{asked.clusters} clusters, {asked.epochs} epochs, {asked.workers} workers, {asked.seeds} seeds"
    columns = [
        "graph",
        "trained",
        "assignment",
        "halo",
        "per batch",
        "average",
        "interval",
        "CPU s",
        "best, %",
        "best +-",
        "mean, %",
        "mean +-",
        "full graph, %",
        "apart, %",
    ]
    report(title, rows, [name for name in columns if any(name in row for row in rows)], asked.json)


if __name__ == "__main__":
    main()
