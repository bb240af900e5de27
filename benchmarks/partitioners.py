"""Partitioners of nodes beside each other: cut, halo, rows of covers, balance, CPU seconds and memory.

    python benchmarks/partitioners.py [--graphs cnr-2000 planted-2 ...] [--methods metis kaminpar ...] [--parts 8] [--json FILE]

Graphs are those of ``cover.py``, ``all`` of them; ``planted-M``: planted partitions of about M million directed edges,
``planted-M-D`` of D per node (20); ``common-N``: the common benchmark graph with N nodes; ``rmat-M-D``: R-MAT of M million edges,
D per node, skewed and without structure. Each method runs in a process of its own, after a run on a small graph that loads and
compiles what it needs. Cut edges are a share of all; the halo, and rows that ``cover`` sends, are per node. Bytes are what the
process then takes beside the edges at its peak; *predicted* is what :mod:`lightning_gnn.partition.budget` says, over them, and
*predicted s* the same of CPU seconds.
``--all`` tries all balance settings, where the first would do. Of ``streaming``, also millions of entries of the symmetric graph
that a pass over it reads in a second.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import SHARED, PeakMemory, report, run_row
from cover import DATASETS, LISTS, edges_of, rows_sent

from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.extensions.graph_files import partitioner
from lightning_gnn.extensions.graph_files.partitioner import Block, RowBlocks, streaming_candidates
from lightning_gnn.partition import edge_cut
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.budget import predictions
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.strategies.cover.covers import cover_edges

METHODS = ("metis", "kaminpar", "kaminpar_compressed", "streaming", "random")
COLUMNS = [
    "graph",
    "method",
    "balanced",
    "cut",
    "halo per node",
    "cover per node",
    "nodes max/mean",
    "edges max/mean",
    "CPU s",
    "bytes/edge",
    "bytes/node",
    "predicted",
    "predicted s",
    "M/s",
]
RMAT = np.array([0.57, 0.19, 0.19, 0.05])
"""Of each quarter of the matrix (Chakrabarti, Zhan and Faloutsos, SDM 2004; Graph500's numbers)."""


def edges(name: str, root: str) -> np.ndarray:
    """Returns the edges, int64 ``[2, E]``."""
    if name.startswith("common-"):
        make, num_nodes = runpy.run_path(str(SHARED / "tools" / "planted_graph.py")), int(name.removeprefix("common-"))
        arrays = make["planted_graph"](num_nodes, int(2_050_000 * num_nodes / 200_000), features=1)
        return np.stack([arrays["src"], arrays["dst"]])
    skewed = re.fullmatch(r"rmat-(\d+)-(\d+)", name)
    if skewed:
        return rmat(int(skewed[1]) * 1_000_000, int(skewed[2]))
    planted = re.fullmatch(r"planted-(\d+)(?:-(\d+))?", name)
    if not planted:
        return edges_of(name, root)[0]
    millions, degree = int(planted[1]), int(planted[2] or 20)
    return planted_partition(millions * 1_000_000 // degree, degree, num_features=1, num_classes=16).edge_index.numpy()


def rmat(num_edges: int, degree: int) -> np.ndarray:
    draws, num_nodes = np.random.default_rng(0), num_edges // degree
    bits = int(num_nodes - 1).bit_length()
    ends = np.zeros((2, num_edges), np.int64)
    for _ in range(bits):
        quarter = np.searchsorted(np.cumsum(RMAT)[:-1], draws.random(num_edges, np.float32), "right")
        ends = 2 * ends + np.stack(np.divmod(quarter, 2))
    return draws.permutation(1 << bits)[ends] % num_nodes


class Timed:
    """Blocks that count how often they are read, and the CPU seconds of that and of what is done with them."""

    def __init__(self, blocks: RowBlocks) -> None:
        self.blocks, self.num_nodes, self.passes, self.seconds = blocks, blocks.num_nodes, 0, 0.0

    def __iter__(self) -> Iterator[Block]:
        began = time.process_time()
        yield from self.blocks
        self.passes, self.seconds = self.passes + 1, self.seconds + time.process_time() - began


def pass_speed(edge_index: np.ndarray, num_nodes: int, parts: int) -> float:
    """Returns millions of entries per second of a pass of ``streaming``, on average."""
    graph, in_degree = Adjacency.of(edge_index, num_nodes), np.bincount(edge_index[1], minlength=num_nodes)
    blocks = Timed(RowBlocks(((graph.indptr, graph.indices),)))
    weights = np.stack([np.ones_like(in_degree), in_degree], 1).astype(np.int32)
    next(streaming_candidates(blocks, weights, tuple(range(parts)), 0))
    return blocks.passes * len(graph.indices) / blocks.seconds / 1e6


def measured(path: str, method: str, parts: int, try_all: bool) -> dict[str, Any]:
    """Returns one row; in a process of its own."""
    edge_index = np.load(path)
    num_nodes, num_edges = int(edge_index.max()) + 1, edge_index.shape[1]
    if try_all:
        edge_cut.GOOD_EDGE_BALANCE = 0.0
    usual, partitioner.LEAST_PAIRS = partitioner.LEAST_PAIRS, 100  # so few that what drops the others is compiled, too
    assign_nodes(np.random.default_rng(0).integers(0, 1000, (2, 10_000)), 1000, parts, method)
    partitioner.LEAST_PAIRS = usual
    memory, began = PeakMemory(), time.process_time()
    found = assign_nodes(edge_index, num_nodes, parts, method)
    seconds, peak = time.process_time() - began, memory.megabytes() * 2**20
    rest, owner = dict[str, Any](), found.part.astype(np.int64)
    if method != "random":
        found_costs = predictions(edge_index, num_nodes, parts)
        predicted = next(each for each in found_costs if each.method == method)
        rest |= {"predicted": predicted.bytes / peak, "predicted s": predicted.seconds / seconds}
    if method == "streaming":
        rest["M/s"] = pass_speed(edge_index, num_nodes, parts)
    return {
        "balanced": found.balance,
        "cut": found.report.cut_fraction,
        "halo per node": found.report.replication - 1,
        "cover per node": rows_sent(edge_index, cover_edges(edge_index, owner, parts), owner, parts).sum() / num_nodes,
        "nodes max/mean": found.report.node_balance,
        "edges max/mean": found.report.edge_balance,
        "CPU s": seconds,
        "bytes/edge": peak / num_edges,
        "bytes/node": peak / num_nodes,
        **rest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["cnr-2000", "ego-twitter", "soc-slashdot0902", "planted-2", "planted-10"]
    parser.add_argument("--graphs", nargs="+", default=usual)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measured(*options.row, options.parts, options.all)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/edges.npy"
        for name in (*DATASETS, *LISTS) if options.graphs == ["all"] else options.graphs:
            np.save(path, edges(name, folder))
            for method in options.methods:
                asked = ["--row", path, method, "--parts", str(options.parts), *["--all"] * options.all]
                row = run_row(__file__, asked, threads=1)
                rows.append({"graph": name, "method": method, **row})
                print(rows[-1], flush=True)
    report(f"{options.parts} parts, one thread", rows, COLUMNS, options.json)


if __name__ == "__main__":
    main()
