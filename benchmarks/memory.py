"""Peak memory of a rank against the number of ranks, kept and recomputed: predicted, and measured in training.

    python benchmarks/memory.py [--models gcn sage gat] [--ranks 1 2 4] [--nodes 50000] [--json FILE]

A planted partition graph of 128 features and mean degree 20; 3 layers of 128 columns, one thread a rank, `dgcl` and METIS.
Every row runs in processes of its own, in which malloc gives large blocks back at once. Measured is the peak from the second
epoch on, less that of the same run on a graph of 200 nodes: python, libraries and compiled kernels. Predicted are the tensors
of a training step, as by ``lightning-gnn plan``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import report, run_row
from epoch_time import trained
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.checks.footprint import Predicted, Sizes

FEATURES, CLASSES = 128, 16
SOURCE = "lightning_gnn.planted_partition"
FEW = 200
"""Nodes of the graph whose peak is that of all else than tensors."""

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


def predicted_mb(kind: str, ranks: int, nodes: int, recompute: bool) -> float:
    """Returns the peak of the rank that holds most in a training step, as ``lightning-gnn plan`` predicts it."""
    data = GraphDataModule(SOURCE, graph_of(nodes))
    data.prepare_for(DGCLStrategy().scheme.layout(ranks))
    cut = data.stored_cut()
    module = NodeClassifier(make_model(kind))
    steps = Predicted(module, cut.shard(0).batch)
    peaks = [steps.footprint(sizes).peak(recompute) for sizes in Sizes.of_ranks(cut, module)]
    return max(max(peak.forward, peak.backward) for peak in peaks) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gcn", "sage", "gat"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        kind, ranks, recompute = options.row.split(":")
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 17)  # else glibc raises it as blocks are freed, and keeps these
        strategy = DGCLStrategy(timeout=3600, keep_memory=False, self_check=False, recompute=recompute == "True")
        row = trained(lambda: make_model(kind), SOURCE, graph_of(options.nodes), int(ranks), options.epochs, strategy)
        if row is not None:
            print(json.dumps(row))
        return

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_GNN_STORE"] = folder
        for kind in options.models:
            for ranks in options.ranks:
                kept: dict[str, Any] = {}
                for recompute in (False, True):
                    predicted = predicted_mb(kind, ranks, options.nodes, recompute)
                    arguments = ["--row", f"{kind}:{ranks}:{recompute}", "--epochs", str(options.epochs), "--nodes"]
                    few, found = (
                        run_row(str(Path(__file__)), [*arguments, str(nodes)], 1) for nodes in (FEW, options.nodes)
                    )
                    measured = max(found["later_peak_mb"]) - max(few["later_peak_mb"])
                    row = {
                        "model": kind,
                        "ranks": ranks,
                        "recompute": "yes" if recompute else "no",
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
                    print(f"{kind} {ranks} {recompute}: {predicted:.0f} {measured:.0f} MB", file=sys.stderr, flush=True)
    columns = [
        "model",
        "ranks",
        "recompute",
        "predicted MB/rank",
        "measured MB/rank",
        "predicted / measured",
        "of kept",
    ]
    columns += ["MB sent/epoch", "s/epoch", "loss difference"]
    report(f"3 layers of 128 columns, {options.nodes:,} nodes", rows, columns, options.json)


if __name__ == "__main__":
    main()
