"""Peak memory of a rank against the number of ranks, kept and recomputed: predicted, and measured in training.

    python benchmarks/memory.py [--models gcn sage gat] [--ranks 1 2 4] [--others spmm_1d ...] [--nodes 20000] [--json FILE]

A planted partition graph of 128 features and mean degree 20; 3 layers of 128 columns, one thread a rank, `dgcl` and METIS. Other
strategies train the first model on the most ranks.

Every row runs in processes of its own, in which malloc gives large blocks back at once. They first train on 200 nodes, so that
python, libraries and compiled kernels are there; measured is what the peak from the third epoch on is above that, where memory
that ranks share counts once. Predicted are the tensors of a training step, as by ``lightning-gnn plan``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import report, run_row
from epoch_time import trained
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.checks.footprint import Sizes
from lightning_gnn.strategies import SpMM1DStrategy, SpMM15DStrategy, VertexCutStrategy
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.strategy.memory import memory_advice

FEATURES, CLASSES = 128, 16
SOURCE = "lightning_gnn.planted_partition"
FEW = 200
"""Nodes of the graph that is trained on first."""

STRATEGIES: dict[str, Callable[..., GNNStrategy]] = {
    "dgcl": DGCLStrategy,
    "spmm_1d": SpMM1DStrategy,
    "spmm_15d": partial(SpMM15DStrategy, replication_factor=2),
    "spmm_15d blocks": partial(SpMM15DStrategy, replication_factor=2, sparsity_aware=False),
    "vertex_cut": VertexCutStrategy,
}
COLUMNS = ["model", "strategy", "ranks", "checkpoint_convs", "predicted MB/rank", "measured MB/rank", "predicted / measured"]
COLUMNS += ["of kept", "MB sent/epoch", "s/epoch", "loss difference"]

_MMAP_THRESHOLD = -3  # see `man mallopt`


def graph_of(num_nodes: int) -> dict[str, Any]:
    return {"num_nodes": num_nodes, "average_degree": 20.0, "num_classes": CLASSES, "num_features": FEATURES}


def make_model(kind: str) -> torch.nn.Module:
    """Returns the model of that name, from one seed."""
    torch.manual_seed(0)
    sizes = {"in_channels": FEATURES, "hidden_channels": 128, "num_layers": 3, "out_channels": CLASSES}
    if kind == "gat":
        return GAT(**sizes, heads=4)
    return (GraphSAGE if kind == "sage" else GCN)(**sizes)


def make_strategy(name: str, recompute: bool) -> GNNStrategy:
    return STRATEGIES[name](timeout=3600, reuse_buffers=False, self_check=False, checkpoint_convs=recompute)


def predicted_mb(kind: str, strategy: GNNStrategy, ranks: int, nodes: int) -> float:
    """Returns the peak of the rank that holds most in a training step, as ``lightning-gnn plan`` predicts it."""
    data, layout = GraphDataModule(SOURCE, graph_of(nodes)), strategy.scheme.layout(ranks)
    data.prepare_for(layout)
    cut = data.stored_cut()
    module = NodeClassifier(make_model(kind))
    steps = memory_advice(strategy.scheme).steps(module, cut.shard(0).batch)
    row_bytes = cut.attributes["node"]["x"][:1].nbytes
    working = memory_advice(strategy.scheme).working_bytes(np.diff(cut.offsets).tolist(), row_bytes)
    sizes = Sizes.from_cut(cut, module, layout.replicas)
    peaks = [steps.footprint(each, working).peak(strategy.checkpoint_convs) for each in sizes]
    return max(max(peak.forward, peak.backward) for peak in peaks) / 2**20


def train_row(kind: str, name: str, ranks: int, recompute: bool, nodes: int, epochs: int) -> dict[str, Any] | None:
    """Returns what training takes, on rank 0."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 17)  # else glibc raises it as blocks are freed, and keeps these
    row = None
    for count in (FEW, nodes):
        row = trained(lambda: make_model(kind), SOURCE, graph_of(count), ranks, epochs, make_strategy(name, recompute))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gcn", "sage", "gat"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    others = [name for name in STRATEGIES if name != "dgcl"]
    parser.add_argument("--others", nargs="*", default=others, choices=others, help="strategies other than dgcl")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=4, help="at least 3")
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        kind, name, ranks, recompute = options.row.split(":")
        row = train_row(kind, name, int(ranks), recompute == "True", options.nodes, options.epochs)
        if row is not None:
            print(json.dumps(row))
        return

    runs = [(kind, "dgcl", ranks) for kind in options.models for ranks in options.ranks]
    runs += [(options.models[0], name, max(options.ranks)) for name in options.others]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_GNN_STORE"] = folder
        for kind, name, ranks in runs:
            kept: dict[str, Any] = {}
            for recompute in (False, True) if name == "dgcl" else (False,):
                predicted = predicted_mb(kind, make_strategy(name, recompute), ranks, options.nodes)
                arguments = ["--row", f"{kind}:{name}:{ranks}:{recompute}", "--nodes", str(options.nodes)]
                found = run_row(str(Path(__file__)), [*arguments, "--epochs", str(options.epochs)], 1)
                measured = max(a - b for a, b in zip(found["later_peak_mb"], found["of_others_mb"]))
                row = {
                    "model": kind,
                    "strategy": name,
                    "ranks": ranks,
                    "checkpoint_convs": "yes" if recompute else "no",
                    "predicted MB/rank": predicted,
                    "measured MB/rank": measured,
                    "predicted / measured": predicted / measured,
                    "of kept": measured / kept.get("measured MB/rank", measured),
                    "MB sent/epoch": found["bytes"] / 1e6,
                    "s/epoch": median(found["seconds"][1:]),
                    "loss difference": max(
                        abs(a - b) for a, b in zip(found["losses"], kept.get("losses", found["losses"]))
                    ),
                    **found,
                }
                rows.append(row)
                kept = kept or row
                shown = f"{kind} {name} {ranks} {recompute}: {predicted:.0f} {measured:.0f} MB"
                print(shown, file=sys.stderr, flush=True)
    report(f"3 layers of 128 columns, {options.nodes:,} nodes", rows, COLUMNS, options.json)


if __name__ == "__main__":
    main()
