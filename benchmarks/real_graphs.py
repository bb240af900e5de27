"""Epoch time and memory of GCN, SAGE and GAT on real graphs: `dgcl` on 1, 2 and 4 ranks against the plain PyG loop.

    python benchmarks/real_graphs.py [--graphs physics github] [--models gcn sage gat] [--ranks 1 2 4] [--json FILE]

2 layers, 64 hidden columns, one thread a rank, random splits. The plain loop has a ``torch.sparse_csr`` adjacency for GCN and
SAGE, and ``edge_index`` for GAT, which takes no other. Every row runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import SHARED, report, run_row
from epoch_time import dgcl, plain_loop
from parity import GRAPHS, build
from torch_geometric.data import Data

from lightning_gnn.data.sources import prepare_graph

SIZES = {"physics": (8415, 5), "github": (128, 2)}


def load_graph(name: str, root: str) -> Data:
    """Returns a real graph with all its columns and masks; a source for GraphDataModule."""
    return prepare_graph(GRAPHS[name][1](root)[0], fractions=(0.5, 0.25, 0.25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--models", nargs="+", default=["gcn", "sage", "gat"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        graph, model, system, root = options.row.split(":")

        def make() -> torch.nn.Module:
            return build(model, *SIZES[graph])

        row = (
            plain_loop(model, make, lambda: load_graph(graph, root), system, options.epochs)
            if system in ("csr", "coo")
            else dgcl(make, "real_graphs.load_graph", {"name": graph, "root": root}, int(system), options.epochs, "")
        )
        if row is not None:
            print(json.dumps(row))
        return

    rows: list[dict[str, Any]] = []
    reference: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_GNN_STORE"] = f"{folder}/store"
        for graph in options.graphs:
            root = shutil.copytree(
                SHARED / "data" / GRAPHS[graph][0], f"{folder}/{graph}"
            )  # PyG writes beside the data
            for model in options.models:
                plain = "coo" if model == "gat" else "csr"
                for system in (plain, *map(str, options.ranks)):
                    arguments = ["--row", f"{graph}:{model}:{system}:{root}", "--epochs", str(options.epochs)]
                    found = run_row(str(Path(__file__)), arguments, 1)
                    name = f"PyG, {plain}" if system == plain else f"dgcl, {system} rank" + "s" * (system != "1")
                    seconds = median(found["seconds"][1:])
                    rows.append({"graph": graph, "model": model, "system": name, "s/epoch": seconds, **found})
                    if system == plain:
                        reference = rows[-1]
                    rows[-1]["of PyG"] = seconds / reference["s/epoch"]
                    rows[-1]["peak MB/rank"] = max(found["peak_mb"])
                    rows[-1]["of PyG's"] = max(found["peak_mb"]) / reference["peak_mb"][0]
                    rows[-1]["MB sent/epoch"] = found["bytes"] / 1e6
                    rows[-1]["largest loss difference"] = max(
                        abs(a - b) for a, b in zip(found["losses"], reference["losses"])
                    )
                    print(f"{graph} {model} {name}: {seconds:.3f} s", file=sys.stderr, flush=True)
    columns = [
        "graph",
        "model",
        "system",
        "s/epoch",
        "of PyG",
        "peak MB/rank",
        "of PyG's",
        "MB sent/epoch",
        "largest loss difference",
    ]
    report("2 layers, 64 hidden columns", rows, columns, options.json)


if __name__ == "__main__":
    main()
