"""Learnable rows of nodes: DistributedEmbedding against torch's sparse embeddings under DistributedDataParallel.

    python benchmarks/embeddings.py [--ranks 1 2] [--nodes 200000] [--columns 128] [--batches 10] [--json FILE]

A step looks up the rows of a sampled batch (1,000 seeds a rank; fan-outs 15, 10, 5 or other ones), takes gradients of a plain
loss of these rows and lets a sparse Adam step; there is no model beside. Making batches is not in the times. Every row of the
table runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from common import QUIET, load_planted, planted_file, report, run_row
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from typing_extensions import override

from lightning_gnn import DistributedEmbedding, GraphDataModule, SamplingStrategy
from lightning_gnn.strategies.sampling import NeighborSampler

SEEDS = 1000


def load(nodes: int) -> Data:
    """Returns the common graph without features; a source for GraphDataModule."""
    data = load_planted(str(planted_file(nodes)))
    data.x = torch.zeros(nodes, 1)
    return data


def loss_of(rows: Tensor) -> Tensor:
    return rows.square().mean()


def ddp_rank(
    rank: int, ranks: int, nodes: int, columns: int, num_neighbors: list[int], batches: int, answer: str, port: int
) -> None:
    """Every rank has the whole table; DDP sums sparse gradients."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if ranks > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    data = load(nodes)
    embedding: Any = torch.nn.Embedding(nodes, columns, sparse=True)
    if ranks > 1:
        embedding = torch.nn.parallel.DistributedDataParallel(embedding)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.01)
    sampler = NeighborSampler.from_data(data, num_neighbors)
    seeds = data.train_mask.nonzero().view(-1)[rank::ranks]
    found: dict[str, list[float]] = {"seconds": [], "rows": []}
    for step, batch in enumerate(NodeLoader(data, sampler, input_nodes=seeds, batch_size=SEEDS, shuffle=True)):
        if ranks > 1:
            dist.barrier()
        began = time.perf_counter()
        loss = loss_of(embedding(batch.n_id))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found["seconds"].append(time.perf_counter() - began)
        found["rows"].append(len(batch.n_id))
        if step + 1 == batches:
            break
    if rank == 0:
        Path(answer).write_text(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


def ddp_row(ranks: int, **sizes: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as answer:
        arguments = (ranks, *sizes.values(), answer.name, 20000 + os.getpid() % 20000)
        if ranks == 1:
            ddp_rank(0, *arguments)
        else:
            torch.multiprocessing.spawn(ddp_rank, arguments, ranks)
        return json.loads(Path(answer.name).read_text())


class Rows(L.LightningModule):
    """The embedding alone; keeps what its steps took."""

    def __init__(self, nodes: int, columns: int, staleness: int) -> None:
        super().__init__()
        self.embedding = DistributedEmbedding(nodes, columns, staleness=staleness)
        self.unused = torch.nn.Parameter(torch.zeros(1))  # so that there is an optimizer, after which rows step
        self.found: dict[str, list[float]] = {"seconds": [], "rows": []}

    @override
    def on_train_batch_start(self, batch: Data, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        strategy.barrier()
        self._began = time.perf_counter()

    @override
    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        self.found["rows"].append(len(batch.n_id))
        return loss_of(self.embedding(batch.n_id)) + 0 * self.unused.sum()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Data, batch_idx: int) -> None:
        self.found["seconds"].append(time.perf_counter() - self._began)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def our_row(
    ranks: int, nodes: int, columns: int, num_neighbors: list[int], batches: int, staleness: int
) -> dict[str, Any] | None:
    module = Rows(nodes, columns, staleness)
    trainer = L.Trainer(
        strategy=SamplingStrategy(num_neighbors, SEEDS, prefetch_batches=0, timeout=1200, self_check=False),
        devices=ranks,
        max_epochs=1,
        limit_train_batches=batches,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module, datamodule=GraphDataModule("embeddings.load", {"nodes": nodes}))
    return module.found if trainer.is_global_zero else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--fanouts", dest="num_neighbors", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        what, arguments = json.loads(options.row)
        row = {"torch": ddp_row, "ours": our_row}[what](**arguments)
        if row is not None:
            print(json.dumps(row))
        return
    rows = []
    sizes = {name: getattr(options, name) for name in ("nodes", "columns", "num_neighbors", "batches")}
    for ranks in options.ranks:
        theirs = "torch, sparse" + (", DDP" if ranks > 1 else "")
        cells: list[tuple[str, str, dict[str, int]]] = [(theirs, "torch", {})]
        cells += [(f"DistributedEmbedding, staleness={k}", "ours", {"staleness": k}) for k in (0, 1)]
        against = None
        for name, what, choices in cells:
            found = run_row(__file__, ["--row", json.dumps([what, {"ranks": ranks, **sizes, **choices}])], 1)
            seconds = median(found["seconds"][1:])
            against = against or seconds
            row = {"embedding": name, "ranks": ranks, "rows": mean(found["rows"]), "s/step": seconds}
            rows.append(
                {**row, "times torch's": against / seconds, "load": os.getloadavg()[0], "seconds": found["seconds"]}
            )
    title = f"Rows of {options.columns} columns for {options.nodes:,} nodes"
    report(title, rows, ["embedding", "ranks", "rows", "s/step", "times torch's", "load"], options.json)


if __name__ == "__main__":
    main()
