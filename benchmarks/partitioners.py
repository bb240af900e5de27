"""Partitioners of nodes beside each other: cut, halo, balance, CPU seconds and memory.

    python benchmarks/partitioners.py [--graphs cnr-2000 planted-2 ...] [--methods metis kaminpar ...] [--parts 8] [--json FILE]

Graphs are edge lists of the data folder (LIGHTNING_GNN_SHARED), or ``planted-M``: planted partitions of about M million directed
edges, ``planted-M-D`` of D per node (20). Each method runs in a process of its own, after a run on a small graph that loads and
compiles what it needs. Memory is what the process then takes beside the graph at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.partition.edge_cut import assign_nodes

SHARED = Path(os.environ.get("LIGHTNING_GNN_SHARED", Path(__file__).resolve().parents[2] / "shared"))
METHODS = ("metis", "kaminpar", "kaminpar_compressed", "random")


def edges_of(name: str) -> tuple[np.ndarray, int]:
    """Returns the edges, int64 ``[2, E]``, and the number of nodes."""
    planted = re.fullmatch(r"planted-(\d+)(?:-(\d+))?", name)
    if planted:
        millions, degree = int(planted[1]), int(planted[2] or 20)
        data = planted_partition(millions * 1_000_000 // degree, degree, num_features=1, num_classes=16)
        return data.edge_index.numpy(), int(data.num_nodes)
    arrays = np.load(SHARED / "data" / "edges" / f"{name}.npz")
    return np.stack([arrays["src"], arrays["dst"]]).astype(np.int64), int(arrays["num_nodes"])


def peak_bytes() -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(path: str, method: str, parts: int) -> None:
    """Prints one run as JSON; in a process of its own."""
    edge_index = np.load(path)
    num_nodes = int(edge_index.max()) + 1
    rng = np.random.default_rng(0)
    assign_nodes(rng.integers(0, 1000, (2, 10_000)), 1000, parts, method)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = peak_bytes(), cpu_s()
    found = assign_nodes(edge_index, num_nodes, parts, method)
    report = found.report
    row = {
        "balance": found.balance,
        "cut": report.cut_fraction,
        "halo": report.replication - 1,
        "nodes": report.node_balance,
        "edges": report.edge_balance,
        "cpu_s": cpu_s() - began,
        "bytes": peak_bytes() - before,
    }
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--graphs", nargs="+", default=["cnr-2000", "ego-twitter", "soc-slashdot0902", "planted-2", "planted-10"]
    )
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options.parts)
        return
    rows = []
    print(
        "| graph | method | balanced | cut | halo rows per node | nodes, heaviest / mean | edges | CPU s | bytes per edge |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.graphs:
        edge_index, num_nodes = edges_of(name)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/edges.npy"
            np.save(path, edge_index)
            for method in options.methods:
                command = [sys.executable, __file__, "--measure", path, method, "--parts", str(options.parts)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                row = {"graph": name, "num_nodes": num_nodes, "num_edges": edge_index.shape[1], "method": method}
                row |= json.loads(done.stdout.splitlines()[-1])
                rows.append(row)
                numbers = f"{row['cut']:.4f} | {row['halo']:.3f} | {row['nodes']:.2f} | {row['edges']:.2f} | {row['cpu_s']:.1f}"
                print(
                    f"| {name} | {method} | {row['balance']} | {numbers} | {row['bytes'] / row['num_edges']:.1f} |",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
