"""Rows of zeros that the backward pass does not send: rows, bytes and epochs, with them and without.

    python benchmarks/zero_rows.py [--graphs cora dblp-20 dblp-60% physics-60%] [--layers 2 3] [--schemes NAME ...] [--json FILE]

A GCN of 64 hidden columns on 4 ranks of one thread. Labelled are the nodes of Cora's public split, 20 of each class; as many
of another graph; or a share of all. Both ways take turns in one run, ten epochs each, so that both meet what else the machine
does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from common import QUIET, SHARED, report, run_row
from torch_geometric import datasets
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, NodeClassifier, VertexCutStrategy
from lightning_gnn.comm.transport import TransportWrapper
from lightning_gnn.extensions.zero_rows.transport import ZeroRowsTransport

GRAPHS = {
    "cora": ("planetoid", "Planetoid", "Cora", 1433, 7),
    "physics": ("coauthor", "Coauthor", "Physics", 512, 5),
    "dblp": ("citation_full", "CitationFull", "DBLP", 1639, 4),
}
"""Folder, class and name; the columns that are taken of the features, the first ones, and classes."""
SCHEMES = {"dgcl": DGCLStrategy, "cover": CoverStrategy, "vertex_cut": VertexCutStrategy}
BLOCK = 10
"""Epochs of one way, before as many of the other."""


def load_graph(name: str, root: str) -> Data:
    """Returns a graph and which of its nodes are labelled; a source for GraphDataModule."""
    graph, _, labelled = name.partition("-")
    folder, kind, dataset, columns, _ = GRAPHS[graph]
    data = getattr(datasets, kind)(f"{root}/{folder}", dataset)[0]
    data.x = data.x[:, :columns].clone()
    if labelled:
        place = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(0))
        if labelled.endswith("%"):
            data.train_mask = place < int(labelled[:-1]) / 100
        else:
            data.train_mask = torch.zeros(data.num_nodes, dtype=torch.bool)
            for each in range(int(data.y.max()) + 1):
                nodes = (data.y == each).nonzero().view(-1)
                data.train_mask[nodes[place[nodes].argsort()[: int(labelled)]]] = True
        data.val_mask = data.test_mask = torch.ones(data.num_nodes, dtype=torch.bool)
    return data


class Turns(L.Callback):
    """Has all rows sent in every second block of epochs."""

    def __init__(self) -> None:
        self._messages = ZeroRowsTransport.messages
        self.found: list[dict[str, Any]] = []  # of all ranks
        self._found: dict[bool, list[Any]] = {True: [], False: []}

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._without = trainer.current_epoch // BLOCK % 2 == 1
        ZeroRowsTransport.messages = self._messages if self._without else TransportWrapper.messages  # type: ignore[method-assign]
        self._began = time.perf_counter(), time.process_time()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch < 2 * BLOCK:  # compiled, made once, allocated
            return
        seconds = [now - began for now, began in zip((time.perf_counter(), time.process_time()), self._began)]
        counted = [each for (_, way), each in trainer.callbacks[0].by_layer.items() if way == "backward"]
        sent = sum(each.rows for each in counted), sum(each.bytes_sent for each in counted)
        self._found[self._without].append([*seconds, *sent])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        ZeroRowsTransport.messages = self._messages  # type: ignore[method-assign]
        self.found = trainer.strategy.world.all_gather_object(
            {"with": self._found[False], "without": self._found[True]}
        )


def row(graph: str, layers: int, scheme: str, root: str, epochs: int) -> dict[str, Any] | None:
    L.seed_everything(0, verbose=False)
    *_, columns, classes = GRAPHS[graph.partition("-")[0]]
    module = NodeClassifier(GCN(columns, 64, layers, classes))
    strategy = SCHEMES[scheme](self_check=False, timeout=600)
    turns = Turns()
    trainer = L.Trainer(
        strategy=strategy, devices=4, max_epochs=epochs, limit_val_batches=0, callbacks=[turns], **QUIET
    )
    trainer.fit(module, datamodule=GraphDataModule("zero_rows.load_graph", {"name": graph, "root": root}))
    if trainer.global_rank:
        return None
    found = turns.found
    result: dict[str, Any] = {}
    for way in ("with", "without"):
        last = [each[way][-1] for each in found]
        result |= {f"rows {way}": sum(each[2] for each in last), f"kB {way}": sum(each[3] for each in last) / 1e3}
        result[f"ms {way}"] = 1e3 * median(each[0] for each in found[0][way])
        result[f"CPU ms {way}"] = 1e3 * sum(median(each[1] for each in rank[way]) for rank in found)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["cora", "dblp-20", "dblp-60%", "dblp-100%", "physics-60%"])
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES], choices=[*SCHEMES])
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        graph, layers, scheme, root = options.row.split(":")
        found = row(graph, int(layers), scheme, root, options.epochs)
        if found is not None:
            print(json.dumps(found))
        return

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_GNN_STORE"] = f"{folder}/store"
        for graph in options.graphs:
            source = GRAPHS[graph.partition("-")[0]][0]
            if not Path(folder, source).exists():
                shutil.copytree(SHARED / "data" / source, Path(folder, source))  # PyG writes beside the data
            for layers in options.layers:
                for scheme in options.schemes:
                    arguments = ["--row", f"{graph}:{layers}:{scheme}:{folder}", "--epochs", str(options.epochs)]
                    found = run_row(str(Path(__file__)), arguments, 1)
                    rows.append({"graph": graph, "layers": layers, "scheme": scheme, **found})
                    print(rows[-1], file=sys.stderr, flush=True)
    ways = [f"{what} {way}" for what in ("rows", "kB", "ms", "CPU ms") for way in ("with", "without")]
    report(
        "Rows of zeros in the backward, of all ranks",
        rows,
        ["graph", "layers", "scheme", *ways],
        options.json,
    )


if __name__ == "__main__":
    main()
