"""What the defaults of gossip rest on: accuracy by assignment, average and interval, at equal epochs.

    python benchmarks/gossip_defaults.py [--graphs cora dblp computers github] [--intervals 5 20 50] [--seeds 3] [--workers 4]
        [--epochs 30] [--clusters 40] [--json FILE]

2-layer GraphSAGE of 64, learning rate 0.01, dropout 0.2; splits of 60/20/20 %. Two results of each run are tested on the whole
graph: the weights of the worker that was best in validation, and the mean of all workers' weights. Beside them the same model on
one device, by Cluster-GCN (all clusters in one worker), and by as many full-graph steps as ``--steps`` says.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
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
from torch_geometric.datasets import CitationFull, Planetoid
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GossipStrategy, GraphDataModule, NodeClassifier

HIDDEN = 64


CITATIONS: dict[str, tuple[str, Any]] = {
    "cora": ("planetoid", lambda root: Planetoid(root, "Cora")),
    "dblp": ("citation_full", lambda root: CitationFull(root, "DBLP")),
}


def graph(name: str) -> Data:
    """Returns a graph by name, without its split."""
    if name not in CITATIONS:
        return load(name)
    folder, make = CITATIONS[name]
    with tempfile.TemporaryDirectory() as scratch:  # PyG writes beside the raw files
        shutil.copytree(SHARED / "data" / folder, f"{scratch}/{folder}")
        found = make(f"{scratch}/{folder}")[0]
    return Data(x=F.normalize(found.x), edge_index=found.edge_index, y=found.y)


class Kept(L.Callback):
    """Each worker's own weights, before there is one result."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(pl_module.state_dict(), self.folder / f"{trainer.global_rank}.pt")


def fitted(
    data: GraphDataModule, seed: int, workers: int, epochs: int, options: dict[str, Any] | None
) -> dict[str, float]:
    """Trains, on the full graph without `options`; returns accuracies in per cent, and how far the workers were apart."""
    L.seed_everything(seed, verbose=False)
    source = data.source
    classes = int(source.y.max()) + 1
    model = GraphSAGE(source.num_features, HIDDEN, num_layers=2, out_channels=classes, dropout=0.2)
    module = NodeClassifier(model, lr=0.01)
    strategy: Any = "auto"
    if options is not None:
        strategy = GossipStrategy(start_method="fork", seed=seed, timeout=600, self_check=False, **options)
    with tempfile.TemporaryDirectory() as folder:
        run = {"devices": workers, "max_epochs": epochs, "check_val_every_n_epoch": epochs, "num_sanity_val_steps": 0}
        trainer = L.Trainer(strategy=strategy, callbacks=[Kept(folder)], **run, **QUIET)
        trainer.fit(module, datamodule=data)
        own = [torch.load(path) for path in Path(folder).glob("*.pt")]
    alone = L.Trainer(devices=1, **QUIET)

    def accuracy() -> float:
        return 100 * alone.test(module, datamodule=data, verbose=False)[0]["test_acc"]

    found = {"best": accuracy(), "apart": 100 * getattr(strategy, "consensus", 0.0)}
    module.load_state_dict({name: torch.stack([each[name] for each in own]).mean(0) for name in own[0]})
    return {**found, "mean": accuracy()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=["cora", "dblp", "computers", "github"])
    parser.add_argument("--intervals", type=int, nargs="*", default=[5, 20, 50])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200, help="of full-graph training; 0 leaves it out")
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.graphs:
        source = graph(name)
        rows: list[dict[str, Any]] = []

        def add(words: dict[str, Any], workers: int, epochs: int, options: dict[str, Any] | None) -> None:
            runs = []
            for seed in range(asked.seeds):
                data = GraphDataModule(source, split=(0.6, 0.2, 0.2), seed=0)  # noqa: B023
                runs.append(fitted(data, seed, workers, epochs, options))
            row = {**words, "apart, %": mean(each["apart"] for each in runs)}
            for what in ("best", "mean"):
                values = [each[what] for each in runs]
                row |= {f"{what}, %": mean(values), f"{what} +-": stdev(values) if len(values) > 1 else 0.0}
            rows.append(row)  # noqa: B023
            print(name, row, flush=True)  # noqa: B023

        if asked.steps:
            add({"trained": "full graph, one device"}, 1, asked.steps, None)
        for assignment in ("random", "metis"):
            clusters = {"clusters": asked.clusters, "assignment": assignment}
            add({"trained": "one device", "assignment": assignment}, 1, asked.epochs, clusters)
            for average, interval in product(("gradients", "parameters"), asked.intervals):
                options = {**clusters, "average": average, "averaging_interval": interval}
                words = {"trained": "gossip", "assignment": assignment, "average": average, "interval": interval}
                add(words, asked.workers, asked.epochs, options)
        title = (
            f"{name}: {asked.clusters} clusters, {asked.epochs} epochs, {asked.workers} workers, {asked.seeds} seeds"
        )
        columns = [
            "trained",
            "assignment",
            "average",
            "interval",
            "best, %",
            "best +-",
            "mean, %",
            "mean +-",
            "apart, %",
        ]
        report(title, rows, columns, asked.json and asked.json.replace(".json", f"-{name}.json"))


if __name__ == "__main__":
    main()
