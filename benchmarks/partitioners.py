"""Partitioners of nodes beside each other: cut, halo, balance, CPU seconds and memory.

    python benchmarks/partitioners.py [--graphs cnr-2000 planted-2 ...] [--methods metis kaminpar ...] [--parts 8] [--json FILE]

Graphs are those of ``cover.py``, or ``planted-M``: planted partitions of about M million directed edges, ``planted-M-D`` of D per
node (20). Each method runs in a process of its own, after a run on a small graph that loads and compiles what it needs. Bytes are
what the process then takes beside the graph at its peak, per directed edge.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from typing import Any

import numpy as np
from common import PeakMemory, report, run_row
from cover import edges_of

from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.partition.edge_cut import assign_nodes

METHODS = ("metis", "kaminpar", "kaminpar_compressed", "random")
COLUMNS = [
    "graph",
    "method",
    "balanced",
    "cut",
    "halo per node",
    "nodes max/mean",
    "edges max/mean",
    "CPU s",
    "bytes/edge",
]


def edges(name: str, root: str) -> np.ndarray:
    """Returns the edges, int64 ``[2, E]``."""
    planted = re.fullmatch(r"planted-(\d+)(?:-(\d+))?", name)
    if not planted:
        return edges_of(name, root)[0]
    millions, degree = int(planted[1]), int(planted[2] or 20)
    return planted_partition(millions * 1_000_000 // degree, degree, num_features=1, num_classes=16).edge_index.numpy()


def measured(path: str, method: str, parts: int) -> dict[str, Any]:
    """Returns one row; in a process of its own."""
    edge_index = np.load(path)
    num_nodes = int(edge_index.max()) + 1
    assign_nodes(np.random.default_rng(0).integers(0, 1000, (2, 10_000)), 1000, parts, method)
    memory, began = PeakMemory(), time.process_time()
    found = assign_nodes(edge_index, num_nodes, parts, method)
    seconds = time.process_time() - began
    return {
        "balanced": found.balance,
        "cut": found.report.cut_fraction,
        "halo per node": found.report.replication - 1,
        "nodes max/mean": found.report.node_balance,
        "edges max/mean": found.report.edge_balance,
        "CPU s": seconds,
        "bytes/edge": memory.megabytes() * 2**20 / edge_index.shape[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["cnr-2000", "ego-twitter", "soc-slashdot0902", "planted-2", "planted-10"]
    parser.add_argument("--graphs", nargs="+", default=usual)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measured(*options.row, options.parts)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/edges.npy"
        for name in options.graphs:
            np.save(path, edges(name, folder))
            for method in options.methods:
                row = run_row(__file__, ["--row", path, method, "--parts", str(options.parts)], threads=1)
                rows.append({"graph": name, "method": method, **row})
                print(rows[-1], flush=True)
    report(f"{options.parts} parts, one thread", rows, COLUMNS, options.json)


if __name__ == "__main__":
    main()
