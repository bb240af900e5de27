"""Training in mini-batches on one device: batches/s by number of sampling threads, beside a loop by PyG on the same graph.

    python benchmarks/sampling_steps.py [--rounds 3] [--before CHECKOUT] [--json FILE]

Systems take turns, each in a process of its own. PyG's NeighborLoader needs pyg-lib or torch-sparse; where neither can be
imported, its row has no numbers, and a sampler of torch's functions alone, in the same loop, stands for it. *Ready batches*: the
same loop, without making batches. `--before` adds another version of the package.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import QUIET, ROOT, report, run_row
from torch_geometric import typing as pyg
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule, NodeClassifier, SamplingStrategy, planted_partition

NODES, FANOUTS, BATCH_SIZE, BATCHES = 300_000, [10, 10], 1024, 30


def load() -> Data:
    """Returns the graph; a source for GraphDataModule."""
    graph = planted_partition(NODES, 20, num_classes=16, num_features=128, seed=1)
    graph.train_mask = torch.arange(NODES) < BATCH_SIZE * BATCHES
    return graph


class TorchSampler:
    """Neighbors drawn with replacement, by torch's functions."""

    def __init__(self, data: Data) -> None:
        order = data.edge_index[1].argsort()
        self.data, self.source = data, data.edge_index[0][order]
        self.degree = torch.bincount(data.edge_index[1], minlength=NODES)
        self.first = self.degree.cumsum(0) - self.degree

    def __iter__(self) -> Any:
        for seeds in self.data.train_mask.nonzero().view(-1)[torch.randperm(BATCH_SIZE * BATCHES)].split(BATCH_SIZE):
            rows, cols, targets = [], [], seeds
            for fanout in FANOUTS:
                targets = targets[self.degree[targets] > 0]
                draws = (torch.rand(len(targets), fanout) * self.degree[targets, None]).long()
                rows.append(self.source[self.first[targets, None] + draws].view(-1))
                cols.append(targets.repeat_interleave(fanout))
                targets = rows[-1].unique()
            others = torch.cat(rows).unique()
            nodes = torch.cat([seeds, others[~torch.isin(others, seeds)]])
            place = torch.empty(NODES, dtype=torch.long)
            place[nodes] = torch.arange(len(nodes))
            edges = place[torch.stack([torch.cat(rows), torch.cat(cols)])]
            yield Data(self.data.x[nodes], edges, y=self.data.y[nodes], batch_size=len(seeds))


def loop_rows() -> dict[str, Any]:
    """Returns seconds per batch, by epoch, of loops with PyG's layers over several loaders."""
    data, found = load(), dict[str, Any]({"NeighborLoader": None})
    loaders: dict[str, Any] = {"torch sampler": TorchSampler(data)}
    if pyg.WITH_PYG_LIB or pyg.WITH_TORCH_SPARSE:
        loaders["NeighborLoader"] = NeighborLoader(data, FANOUTS, data.train_mask, batch_size=BATCH_SIZE, shuffle=True)
    loaders["ready batches"] = list(islice(loaders["torch sampler"], 8))
    for name, batches in loaders.items():
        torch.manual_seed(0)
        model, seconds = GraphSAGE(128, 128, 2, 16), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            began, count = time.perf_counter(), 0
            for batch in batches:
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                optimizer.zero_grad()
                F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
                optimizer.step()
                count += 1
            seconds.append((time.perf_counter() - began) / count)
        found[name] = {"seconds": seconds}
    return {f"PyG, {name}": each for name, each in found.items()}


class Clock(L.Callback):
    """Seconds per batch of each epoch, and CPU seconds of this process."""

    def __init__(self) -> None:
        self.seconds, self.cpu = list[float](), list[float]()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        count = int(trainer.num_training_batches)
        self.seconds.append((time.perf_counter() - self._began[0]) / count)
        self.cpu.append((time.process_time() - self._began[1]) / count)


def strategy_rows(name: str, epochs: int) -> dict[str, Any]:
    data, found = GraphDataModule("sampling_steps.load"), dict[str, Any]()
    for workers in (1, 2, 4):
        torch.manual_seed(0)
        clock, more = Clock(), {"num_workers": workers, "prefetch_batches": 2 * workers}
        options: dict[str, Any] = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "callbacks": [clock], **QUIET}
        strategy = SamplingStrategy(FANOUTS, BATCH_SIZE, self_check=False, **more)
        trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=epochs, **options)
        trainer.fit(NodeClassifier(GraphSAGE(128, 128, 2, 16)), datamodule=data)
        found[f"{name}, num_workers={workers}"] = {"seconds": clock.seconds, "cpu": clock.cpu}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--before", type=Path, help="a checkout of another version")
    parser.add_argument("--json")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.cell:
        what, arguments = json.loads(options.cell)
        print(json.dumps({"loop": loop_rows, "strategy": strategy_rows}[what](**arguments)))
        return
    versions = {"sampling, before": options.before, "sampling": ROOT}
    cells: list[tuple[Any, str, dict[str, Any]]] = [
        (package, "strategy", {"name": name, "epochs": options.epochs})
        for name, package in versions.items()
        if package is not None
    ]
    cells.append((ROOT, "loop", {}))
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for package, *cell in cells:
            results = run_row(__file__, ["--cell", json.dumps(cell)], options.threads, package=package)
            for name, result in results.items():
                found.setdefault(name, []).append(result or {})
                print(name, result, flush=True)
    rows = []
    for name, each in found.items():
        times = [second for result in each for second in result.get("seconds", [])[1:]]
        cpu = [second for result in each for second in result.get("cpu", [])[1:]]
        row = {"system": name, "batches/s": 1 / median(times) if times else None}
        row |= {"best": 1 / min(times) if times else None, "CPU ms/batch": 1e3 * median(cpu) if cpu else None}
        rows.append({**row, "results": each})
    title = f"2-layer SAGE 128, {FANOUTS}, {BATCH_SIZE} seeds, {NODES:,} nodes, mean degree 20, {options.threads} threads"
    report(title, rows, ["system", "batches/s", "best", "CPU ms/batch"], options.json)


if __name__ == "__main__":
    main()
