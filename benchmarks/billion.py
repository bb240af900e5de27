"""A billion edges on one small machine: written as files, partitioned into 8, and trained on.

python benchmarks/billion.py --edges 10e6 --folder FOLDER --json billion.json
python benchmarks/billion.py --edges 1e9 --kind rmat --folder FOLDER --partition streaming

Prints by step: seconds, edges a second, and the most memory that the processes of a step had of their own at once (anonymous
pages, which cannot be dropped) and in all (with pages of mapped files, which can). Each step runs in a process of its own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import psutil
from numpy.lib.format import open_memmap

from benchmarks.common import report

CLASSES, FEATURES, COMMUNITIES, INSIDE = 16, 32, 4096, 0.8
PIECE = 1 << 22


@numba.njit(cache=True, nogil=True)
def bits(number):  # type: ignore[no-untyped-def]
    """Splitmix64: a random number of each number."""
    number = (np.uint64(number) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def planted(first, num_nodes, communities, inside, out):  # type: ignore[no-untyped-def]
    """Edges whose ends are in one community, nodes of equal rest, with the odds `inside`, else anywhere."""
    size, limit = num_nodes // communities, np.uint64(inside * 2.0**32)
    for edge in range(out.shape[1]):
        one, two = bits(3 * (first + edge)), bits(3 * (first + edge) + 1)
        source = one % np.uint64(num_nodes)
        target = two % np.uint64(num_nodes)
        if (bits(3 * (first + edge) + 2) >> np.uint64(32)) < limit:
            target = (two % np.uint64(size)) * np.uint64(communities) + source % np.uint64(communities)
        out[0, edge], out[1, edge] = source, target


@numba.njit(cache=True, nogil=True)
def rmat(first, num_nodes, levels, out):  # type: ignore[no-untyped-def]
    """R-MAT (Chakrabarti et al., SDM 2004) with a = 0.57, b = c = 0.19; ids beyond the nodes are taken modulo their number."""
    for edge in range(out.shape[1]):
        source = target = np.uint64(0)
        for level in range(levels):
            if level % 4 == 0:
                random = bits(8 * (first + edge) + level // 4)
            draw = random & np.uint64(0xFFFF)
            random >>= np.uint64(16)
            source = source << np.uint64(1) | np.uint64(draw >= 49807)
            target = target << np.uint64(1) | np.uint64((37356 <= draw < 49807) or draw >= 62259)
        out[0, edge] = bits(source) % np.uint64(num_nodes)
        out[1, edge] = bits(target) % np.uint64(num_nodes)


@numba.njit(cache=True, nogil=True)
def features(first, communities, classes, out, y, train):  # type: ignore[no-untyped-def]
    for row in range(len(out)):
        kind = ((first + row) % communities) % classes
        y[row], train[row] = kind, bits(first + row) % np.uint64(100) == 0
        for column in range(out.shape[1]):
            noise = np.float32(bits((first + row) * out.shape[1] + column) >> np.uint64(40)) / np.float32(1 << 24)
            out[row, column] = noise + np.float32(0.3) * (column % classes == kind)


def write(folder: Path, kind: str, num_nodes: int, num_edges: int) -> None:
    """Writes a graph as files; each edge has its opposite."""
    folder.mkdir(parents=True)
    half = num_edges // 2
    edges = open_memmap(folder / "edge_index.npy", "w+", np.int32, (2, num_edges))
    for begin in range(0, half, PIECE):
        piece = np.empty((2, min(PIECE, half - begin)), np.int32)
        if kind == "rmat":
            rmat(begin, num_nodes, int(np.ceil(np.log2(num_nodes))), piece)
        else:
            planted(begin, num_nodes, COMMUNITIES, INSIDE, piece)
        edges[:, begin : begin + piece.shape[1]] = piece
        edges[:, half + begin : half + begin + piece.shape[1]] = piece[::-1]
    x = open_memmap(folder / "x.npy", "w+", np.float16, (num_nodes, FEATURES))
    y, train = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.bool_)
    for begin in range(0, num_nodes, PIECE):
        rows = np.empty((min(PIECE, num_nodes - begin), FEATURES), np.float32)
        end = begin + len(rows)
        features(begin, COMMUNITIES, CLASSES, rows, y[begin:end], train[begin:end])
        x[begin:end] = rows
    np.save(folder / "y.npy", y)
    np.save(folder / "train_mask.npy", train)


class Peak:
    """The most memory that a process and those that it started had at once, in bytes; looked at ten times a second."""

    def __init__(self, process: psutil.Process) -> None:
        self.own = self.in_all = 0
        self._process, self._over = process, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            own = in_all = 0
            try:
                for each in (self._process, *self._process.children(recursive=True)):
                    memory = each.memory_full_info()
                    own, in_all = own + memory.uss, in_all + memory.rss
            except psutil.Error:
                continue
            self.own, self.in_all = max(self.own, own), max(self.in_all, in_all)

    @classmethod
    @contextmanager
    def of(cls, process: psutil.Process) -> Iterator[Peak]:
        peak = cls(process)
        peak._thread.start()
        try:
            yield peak
        finally:
            peak._over.set()
            peak._thread.join()


def measured(name: str, command: list[str], num_edges: int) -> dict[str, Any]:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    with Peak.of(psutil.Process(process.pid)) as peak:
        output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{output}")
    print(output, file=sys.stderr)
    seconds = time.perf_counter() - began
    return {"step": name, "edges": num_edges, "s": seconds, "own GB": peak.own / 1e9, "GB in all": peak.in_all / 1e9}


TRAIN = """
import json, sys, time, lightning as L
from torch_geometric.nn.models import GraphSAGE
from lightning_gnn import GraphDataModule, NodeClassifier, SamplingStrategy
source, store, ranks, batches = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if __name__ == "__main__":
    data = GraphDataModule(source, store=store, partition=sys.argv[5], fanouts=[10, 5], batch_size=1024)
    model = NodeClassifier(GraphSAGE(32, 64, num_layers=2, out_channels=16))
    trainer = L.Trainer(strategy="sampling", devices=ranks, accelerator="cpu", max_epochs=1, limit_train_batches=batches or None,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0, precision="16-true" if 0 else 32)
    began = time.perf_counter()
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        print({k: float(v) for k, v in trainer.callback_metrics.items()}, "fit", time.perf_counter() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=float, default=10e6, help="directed")
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--kind", choices=["planted", "rmat"], default="planted")
    parser.add_argument("--partition", default="streaming")
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", nargs="+", default=["write", "partition"])
    parser.add_argument("--json")
    options = parser.parse_args()
    num_edges = int(options.edges)
    num_nodes = num_edges // options.degree
    graph, store = options.folder / f"{options.kind}-{num_edges}", options.folder / "store"
    rows = []
    if "write" in options.steps:
        shutil.rmtree(graph, ignore_errors=True)
        call = f"from pathlib import Path; from benchmarks.billion import write; write(Path({str(graph)!r}), {options.kind!r}, {num_nodes}, {num_edges})"
        rows.append(measured("write", ["-c", call], num_edges))
    if "partition" in options.steps:
        command = ["-m", "lightning_gnn", "partition", "--data.source", str(graph), "--data.store", str(store)]
        command += [
            "--parts",
            str(options.parts),
            "--data.partition",
            options.partition,
            "--data.partition_memory",
            options.memory,
        ]
        rows.append(measured("partition", command, num_edges))
    for row in rows:
        row["M edges/s"] = row["edges"] / row["s"] / 1e6
        row["bytes/edge"] = 1e9 * row["own GB"] / row["edges"]
    columns = ["step", "edges", "s", "M edges/s", "own GB", "GB in all", "bytes/edge"]
    report(f"{options.kind}, {num_nodes:,} nodes", rows, columns, options.json)


if __name__ == "__main__":
    main()
