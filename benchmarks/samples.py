"""Samples on one graph: memory, messages and time against graph ranks and batch sizes, beside plain PyG with DDP.

    python benchmarks/samples.py [--nodes 20000] [--features 16] [--samples 16] [--sizes 4 8] [--json FILE]

The graph has nodes in the unit square, each with edges from its 8 nearest nodes, as in weather and traffic. A sample has random
features and targets of each node. The model has three GraphConv layers of 64 columns. A mesh DxG has D data ranks, G graph ranks;
"lean" has ``reuse_buffers=False``. "ddp" is Lightning's strategy, with PyG's layers and the whole graph on each rank. A row runs
in processes of its own with one thread per rank. Times are medians of epochs after the first.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from common import QUIET, PeakMemory, report, run_row
from scipy.spatial import cKDTree
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv

from lightning_gnn import DGCLStrategy, GraphDataModule
from lightning_gnn.callbacks.communication import CommunicationMetrics
from lightning_gnn.checks.footprint import Sizes
from lightning_gnn.strategy.memory_checks import predicted_steps

COLUMNS = ["mesh", "global batch", "ms/sample", "of ddp", "peak MB/rank", "predicted MB/rank", "features MB/rank"]
COLUMNS += ["MB sent/step", "messages/step"]
TARGETS, HIDDEN, EPOCHS = 4, 64, 4


def graph_of(num_nodes: int, dimensions: int = 2) -> Data:
    """Returns a graph of nearest neighbors in the unit square, or in the unit cube of more dimensions."""
    places = np.random.default_rng(0).random((num_nodes, dimensions))
    _, nearest = cKDTree(places).query(places, 9)
    edges = np.stack([nearest[:, 1:].ravel(), np.repeat(np.arange(num_nodes), 8)])
    return Data(edge_index=torch.from_numpy(edges), edge_weight=torch.full((edges.shape[1],), 1 / 8), num_nodes=num_nodes)


class Samples(torch.utils.data.Dataset[Any]):
    """Random samples, drawn when they are read."""

    def __init__(self, size: int, nodes: int, features: int) -> None:
        self.size, self.nodes, self.features = size, nodes, features

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(index)
        x = torch.rand(self.nodes, self.features, generator=g)
        return {"x": x, "y": x[:, :TARGETS].square()}


class Model(L.LightningModule):
    def __init__(self, features: int, graph: Data | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [features, HIDDEN, HIDDEN, TARGETS]
        self.convs = torch.nn.ModuleList(GraphConv(*each) for each in pairwise(sizes))
        self.graph, self.losses, self.seconds = graph, list[float](), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        graph, x, y = (batch, batch.x, batch.y) if self.graph is None else (self.graph, batch["x"], batch["y"])
        for conv in self.convs[:-1]:
            x = conv(x, graph.edge_index, graph.edge_weight).relu()
        loss = torch.nn.functional.mse_loss(self.convs[-1](x, graph.edge_index, graph.edge_weight), y)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_start(self) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        self.seconds.append(time.perf_counter() - self.began)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Measure(L.Callback):
    """Peaks and traffic of all ranks, while they are connected."""

    def __init__(self) -> None:
        self.memory, self.found = PeakMemory(), dict[str, Any]()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = next((each.epoch for each in trainer.callbacks if isinstance(each, CommunicationMetrics)), None)
        sent = (0, 0) if epoch is None else (epoch.bytes_sent, epoch.messages)
        mine = self.memory.megabytes() - self.memory.of_others(), *sent
        every: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(every, mine)
        peaks, num_bytes, messages = zip(*every)
        self.found = {"peak": max(peaks), "bytes": sum(num_bytes), "messages": sum(messages)}


def predicted_megabytes(module: Model, trainer: L.Trainer, data: GraphDataModule) -> float:
    """Returns the predicted peak of the largest rank, on rank 0."""
    if trainer.global_rank:
        return 0.0
    run, cut = trainer.strategy._run_for_checks(module, trainer, data), data.stored_cut()
    steps = predicted_steps(run, cut.shard(0))
    return max(steps.footprint(each).peak().max_bytes for each in Sizes.from_cut(cut, module)) / 2**20


def train_row(mesh: str, size: int, nodes: int, features: int, samples: int) -> dict[str, Any] | None:
    """Returns the figures of a run, on rank 0."""
    measure, graph, dataset = Measure(), graph_of(nodes), Samples(samples, nodes, features)
    options: dict[str, Any] = {**QUIET, "max_epochs": EPOCHS, "callbacks": [measure]}
    if mesh.startswith("ddp"):
        ranks = int(mesh[3:])
        module = Model(features, graph)
        trainer = L.Trainer(strategy="ddp", devices=ranks, **options)
        trainer.fit(module, torch.utils.data.DataLoader(dataset, batch_size=size // ranks))
        shares, steps, predicted = nodes * (size // ranks), -(-samples // size), None
    else:
        data_ranks, graph_ranks = map(int, mesh.removesuffix(" lean").split("x"))
        module = Model(features)
        strategy = DGCLStrategy(graph_ranks=graph_ranks, reuse_buffers="lean" not in mesh, timeout=600)
        trainer = L.Trainer(strategy=strategy, devices=data_ranks * graph_ranks, **options)
        data = GraphDataModule(graph, samples=dataset, global_batch_size=size, shuffle=False)
        trainer.fit(module, datamodule=data)
        shares, steps = max(data.shard.counts) * (size // data_ranks), -(-samples // size)
        predicted = predicted_megabytes(module, trainer, data)
    if not trainer.is_global_zero:
        return None
    found = measure.found
    return {
        "mesh": mesh,
        "global batch": size,
        "ms/sample": 1e3 * median(module.seconds[1:]) / samples,
        "peak MB/rank": found["peak"],
        "predicted MB/rank": predicted,
        "features MB/rank": shares * features * 4 / 2**20,
        "MB sent/step": found["bytes"] / 2**20 / steps,
        "messages/step": found["messages"] / steps,
        "losses": module.losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--meshes", nargs="+", default=["1x1", "1x1 lean", "2x1", "1x2", "1x2 lean", "2x2", "1x4"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = ["--nodes", options.nodes, "--features", options.features, "--samples", options.samples]
    if options.row:
        mesh, size = options.row.split(":")
        row = train_row(mesh, int(size), options.nodes, options.features, options.samples)
        if row is not None:
            print(json.dumps(row))
        return
    rows, ddp = [], dict[int, dict[str, Any]]()
    for size in options.sizes:
        for mesh in ("ddp2", *options.meshes):
            row = run_row(str(Path(__file__)), ["--row", f"{mesh}:{size}", *map(str, sizes)], 1)
            base = ddp.setdefault(size, row)
            row["of ddp"] = row["ms/sample"] / base["ms/sample"]
            rows.append(row)
    report(f"{options.samples} samples, {options.nodes:,} nodes", rows, COLUMNS, options.json)


if __name__ == "__main__":
    main()
