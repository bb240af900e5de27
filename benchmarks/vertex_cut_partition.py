"""Vertex cuts: how fast edges and masters are assigned, what is replicated, what is sent, with and without knowing hosts.

python benchmarks/vertex_cut_partition.py [--large] [--json FILE]
python benchmarks/vertex_cut_partition.py --graphs NAME ... [--methods ne streaming ...] [--parts 8] [--json FILE]

With ``--graphs``, names as ``partitioners.py`` knows them: parts of one host, each cut in a process of its own, whose memory at
its peak is told beside what :mod:`lightning_gnn.strategies.vertex_cut.cutters` predicts, over it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import SHARED, PeakMemory, report, run_row
from partitioners import edges

from lightning_gnn.strategies.vertex_cut.cutters import METHODS, assign_edges, cut_edges, edge_predictions

Graph = tuple[np.ndarray, int]
HOSTS = [[0, 1, 2, 3], [4, 5, 6, 7]]
CUTS = [("ebv", 0.0), ("ebv", 0.1), *((method, 0.1) for method in METHODS if method not in ("ebv", "auto"))]


def edge_list(name: str) -> Graph:
    arrays = np.load(SHARED / f"data/edges/{name}.npz")
    return np.stack([arrays["src"], arrays["dst"]]).astype(np.int64), int(arrays["num_nodes"])


def power_law(num_edges: int) -> Graph:
    """Ends drawn in proportion to Pareto weights, 20 edges a node: hubs, and no structure besides."""
    rng, num_nodes = np.random.default_rng(0), num_edges // 20
    weight = np.cumsum(np.minimum(rng.random(num_nodes) ** (-1 / 1.8), 2000))
    return np.stack([np.searchsorted(weight, rng.random(num_edges) * weight[-1]) for _ in range(2)]), num_nodes


def cpu_seconds(function: Callable[[], Any], rounds: int = 3) -> tuple[Any, float]:
    """Returns the result and the least CPU time of rounds: others may use the machine. Stops after ten seconds."""
    least, began = float("inf"), time.process_time()
    for _ in range(rounds):
        start = time.process_time()
        result = function()
        least = min(least, time.process_time() - start)
        if time.process_time() - began > 10:
            break
    return result, least


def measured(name: str, graph: Graph, method: str, weight: float) -> dict[str, Any]:
    edge_index, num_nodes = graph
    groups = tuple(map(tuple, HOSTS))
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would else be used again, and not count
    peak = PeakMemory()
    found, whole = cpu_seconds(
        lambda: assign_edges(edge_index, num_nodes, 8, method, groups=groups, host_weight=weight)
    )
    memory = peak.megabytes()
    _, cutting = cpu_seconds(lambda: cut_edges(edge_index, num_nodes, HOSTS, method, weight))
    cut, million = found.report, edge_index.shape[1] / 1e6
    return {
        "cut": f"{name}: {method} {weight:g}",
        "M edges/s": million / cutting,
        "with masters": million / whole,
        "memory / graph": memory / (edge_index.nbytes / 2**20),
        "RF": cut.replication_factor,
        "edge balance": cut.edge_balance,
        "loaded": cut.loaded_balance,
        "row balance": cut.replica_balance,
        "masters": cut.master_balance,
        "sent": cut.sent_balance,
        "most inner": int(cut.inner.max()),
        "most outer": int(cut.outer.max()),
        "all outer": int(cut.outer.sum()),
    }


def beside(path: str, method: str, parts: int) -> dict[str, Any]:
    """Returns a row of ``--graphs``; in a process of its own."""
    edge_index = np.load(path)
    num_nodes, num_edges = int(edge_index.max()) + 1, edge_index.shape[1]
    assign_edges(np.random.default_rng(0).integers(0, 1000, (2, 10_000)), 1000, parts, method)
    memory, began = PeakMemory(), time.process_time()
    cut = assign_edges(edge_index, num_nodes, parts, method).report
    seconds, peak = time.process_time() - began, memory.megabytes() * 2**20
    predicted = {each.method: each.bytes / peak for each in edge_predictions(edge_index, num_nodes, parts)}
    return {
        "RF": cut.replication_factor,
        "edge balance": cut.edge_balance,
        "row balance": cut.replica_balance,
        "masters": cut.master_balance,
        "loaded": cut.loaded_balance,
        "CPU s": seconds,
        "bytes/edge": peak / num_edges,
        "bytes/node": peak / num_nodes,
        "predicted": predicted.get(method),
    }


def compare(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/edges.npy"
        for name in options.graphs:
            np.save(path, edges(name, folder))
            for method in options.methods:
                row = run_row(__file__, ["--row", path, method, "--parts", str(options.parts)], threads=1)
                rows.append({"graph": name, "method": method, **row})
                print(rows[-1], flush=True)
    report(f"Vertex cuts, {options.parts} parts, one thread", rows, list(rows[0]), options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="only EBV, HDRF and NE on a power-law graph of 20 M edges")
    parser.add_argument("--graphs", nargs="+")
    parser.add_argument("--methods", nargs="+", default=("ne", "ebv", "hdrf", "dbh", "streaming"))
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(beside(*options.row, options.parts)))
        return
    if options.graphs:
        compare(options)
        return
    graphs: dict[str, Callable[[], Graph]] = {
        "ego-twitter": lambda: edge_list("ego-twitter"),
        "cnr-2000": lambda: edge_list("cnr-2000"),
        "power law, 2 M": lambda: power_law(2_000_000),
        "power law, 10 M": lambda: power_law(10_000_000),
    }
    cuts = CUTS
    if options.large:
        graphs = {"power law, 20 M": lambda: power_law(20_000_000)}
        cuts = [("ebv", 0.0), ("ebv", 0.1), ("hdrf", 0.1), ("ne", 0.1)]
    small = power_law(1000)
    for method, _ in CUTS:
        assign_edges(*small, 8, method)  # loads the compiled loops
    rows: list[dict[str, Any]] = []
    for name, load in graphs.items():
        graph = load()
        rows.extend(measured(name, graph, method, weight) for method, weight in cuts)
    report("Vertex cuts, 8 parts on 2 hosts, one core", rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
