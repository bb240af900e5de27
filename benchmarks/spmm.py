"""Products on a process grid beside `dgcl`: epoch time, words and memory of a 2-layer GCN on three graphs.

    python benchmarks/spmm.py [--graphs planted github dense] [--ranks 2 4 8] [--epochs 10] [--json FILE]

*planted* is the common benchmark graph, *github* a real one, and in *dense*, 4 million edges drawn at random among 20,000 nodes,
each rank of an edge cut reads nearly all rows. 128 columns of features, 128 hidden ones; what travels from the second epoch on
are the columns of the second layer, 16 or 64 of them, forward and back. Words are exact; ranks share the cores,
one process each, and with more ranks than cores times are those of a crowd.

All strategies of a graph and a number of ranks run in the same processes, one after the other; before the first, an epoch that
is not measured cuts the graph and loads code. Losses are compared with those of the plain PyG loop on one device (of *planted*,
with what its generator states).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import real_graphs
import torch
from common import PLANTED_LOSSES, SHARED, load_planted, planted_file, report, run_row
from epoch_time import make_model, plain_loop, trained
from parity import GRAPHS as REAL
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, SpMM1DStrategy, SpMM2DStrategy, SpMM3DStrategy, SpMM15DStrategy
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.strategies.spmm.grid import ProcessCube, ProcessGrid
from lightning_gnn.strategy.base import GNNStrategy

COLUMNS = {"planted": 16, "github": 64, "dense": 64}
"""Of the second layer."""
DENSE_NODES, DENSE_EDGES = 20_000, 4_000_000

TABLE = [
    "graph", "ranks", "system", "s/epoch", "of dgcl", "MB sent/epoch", "MB of dgcl", "of formula", "of published", "peak MB",
    "later MB", "4 n f c / P, MB", "largest loss difference",
]  # fmt: skip


class System(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the strategy and its options.
        place: who stands where, for the formulas.
        strategy: not yet in use.
        whole: whether whole blocks travel.
    """

    name: str
    place: ProcessGrid | ProcessCube
    strategy: GNNStrategy
    whole: bool


def systems(ranks: int) -> list[System]:
    """Returns the strategies that so many ranks can follow; c is 1, 2 or 4."""
    options: dict[str, Any] = {"timeout": 600, "self_check": False}
    found = [System("dgcl", ProcessGrid(ranks), DGCLStrategy(**options), False)]
    for c in (1, 2, 4):
        for aware in (True, False):
            if ranks % c == 0:
                strategy = SpMM1DStrategy(aware, **options) if c == 1 else SpMM15DStrategy(c, aware, **options)
                name = ("spmm_1d" if c == 1 else f"spmm_15d, c={c}") + ("" if aware else ", blocks")
                found.append(System(name, ProcessGrid(ranks, c), strategy, not aware))
    for dimensions, kind in ((2, SpMM2DStrategy), (3, SpMM3DStrategy)):
        if round(ranks ** (1 / dimensions)) ** dimensions == ranks:
            strategy = kind(**options)
            found.append(System(f"spmm_{dimensions}d", ProcessCube.of(ranks, dimensions), strategy, True))
    return found


def load_graph(name: str, path: str) -> Data:
    """Returns a graph with masks; a source for GraphDataModule.

    Args:
        name: of :data:`COLUMNS`.
        path: of the planted graph's file, or of the real graph's folder.
    """
    if name == "planted":
        return load_planted(path)
    if name == "github":
        return real_graphs.load_graph(name, path)
    rng = np.random.default_rng(0)
    edge_index = torch.from_numpy(rng.integers(0, DENSE_NODES, (2, DENSE_EDGES)))
    x = torch.from_numpy(rng.standard_normal((DENSE_NODES, 128), np.float32))
    y = torch.from_numpy(rng.integers(0, COLUMNS[name], DENSE_NODES))
    return prepare_graph(Data(x=x, edge_index=edge_index, y=y), fractions=(0.5, 0.25, 0.25))


def make(name: str, path: str) -> torch.nn.Module:
    """Returns the GCN of a graph."""
    if name == "planted":
        return make_model("gcn", path)
    torch.manual_seed(0)
    return GCN(in_channels=128, hidden_channels=128, num_layers=2, out_channels=COLUMNS[name])


def formula_bytes(place: ProcessGrid | ProcessCube, counts: list[int], columns: int) -> int:
    """Returns what all ranks send in one product, forward or backward, if whole blocks of rows travel; the matrix's stay.

    Args:
        place: who stands where.
        counts: nodes of each rank.
        columns: f.
    """
    return 4 * place.words(np.cumsum([0, *counts]), columns)


def measure(name: str, path: str, ranks: int, epochs: int) -> dict[str, Any]:
    """Returns what every strategy took, on rank 0; on others, what they have of it."""
    train = partial(trained, partial(make, name, path), "spmm.load_graph", {"name": name, "path": path}, ranks)
    for kind in (DGCLStrategy, SpMM2DStrategy if ranks == 4 else partial(SpMM15DStrategy, 1, False)):
        train(1, kind(timeout=600, self_check=False))
    found = {}
    for system in systems(ranks):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # so that what others have freed is no memory for this one
        found[system.name] = train(epochs, system.strategy)
    return found


def table_rows(name: str, ranks: int, found: dict[str, Any], expected: list[float]) -> list[dict[str, Any]]:
    """Returns the lines of a graph and a number of ranks."""
    rows: list[dict[str, Any]] = []
    for system in systems(ranks):
        run, place, columns = found[system.name], system.place, COLUMNS[name]
        nodes = sum(run["counts"])
        row = {"graph": name, "ranks": ranks, "system": system.name, "s/epoch": median(run["seconds"][2:])}
        row |= {key: value for key, value in run.items() if key != "by_layer"}
        rows.append(row)
        row["of dgcl"] = row["s/epoch"] / rows[0]["s/epoch"]
        row["MB sent/epoch"] = run["bytes"] / 1e6
        row["MB of dgcl"] = run["bytes"] / rows[0]["bytes"]
        row["formula_bytes"] = 2 * formula_bytes(place, run["counts"], columns)
        row["of formula"] = run["bytes"] / row["formula_bytes"]
        if isinstance(place, ProcessGrid):
            row["of published"] = run["bytes"] / (8 * place.paper_words(nodes, columns))
            row["4 n f c / P, MB"] = 16 * nodes * columns * place.replication / ranks / 2**20
        if system.whole and run["bytes"] != row["formula_bytes"]:
            raise RuntimeError(
                f"{name}, {ranks} ranks, {system.name}: {run['bytes']} bytes, not {row['formula_bytes']}"
            )
        row["peak MB"], row["later MB"] = max(run["peak_mb"]), max(run["later_peak_mb"])
        row["largest loss difference"] = max(abs(a - b) for a, b in zip(run["losses"], expected))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=[*COLUMNS], choices=[*COLUMNS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        name, ranks, path = options.row.split(":")
        if ranks == "plain":
            row = plain_loop("gcn", partial(make, name, path), partial(load_graph, name, path), "csr", options.epochs)
        else:
            row = measure(name, path, int(ranks), options.epochs)
        if None not in row.values():
            print(json.dumps(row))
        return

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {"planted": str(planted_file()), "dense": ""}
        paths["github"] = str(shutil.copytree(SHARED / "data" / REAL["github"][0], f"{folder}/github"))
        os.environ["LIGHTNING_GNN_STORE"] = f"{folder}/store"
        for name in options.graphs:

            def run(what: str, epochs: int, name: str = name) -> dict[str, Any]:
                arguments = ["--row", f"{name}:{what}:{paths[name]}", "--epochs", str(epochs)]
                return run_row(str(Path(__file__)), arguments, 1)

            expected = list(PLANTED_LOSSES) if name == "planted" else run("plain", 5)["losses"]
            for ranks in options.ranks:
                rows += table_rows(name, ranks, run(str(ranks), options.epochs), expected)
                print(f"{name}, {ranks} ranks: done", file=sys.stderr, flush=True)
    report(f"2-layer GCN, 128 hidden columns; {os.cpu_count()} cores", rows, TABLE, options.json)


if __name__ == "__main__":
    main()
