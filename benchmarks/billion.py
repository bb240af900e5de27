"""A billion edges on one small machine: written as files, partitioned into 8, and trained on.

python benchmarks/billion.py --edges 10e6 100e6 1e9 --folder FOLDER --limit 12 --json billion.json
python benchmarks/billion.py --edges 1e9 --kind rmat --folder FOLDER --limit 12
python benchmarks/billion.py --edges 100e6 --folder FOLDER --limit 4 --steps write partition full-graph

Prints by step: seconds, edges a second, and the most memory that the processes of a step had of their own at once (anonymous
pages, which cannot be dropped) and in all (with pages of mapped files, which can). Each step runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import numba
import numpy as np
import psutil
from torch_geometric.nn.models import GCN, GraphSAGE

from benchmarks.common import report
from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, SamplingStrategy
from lightning_gnn.data.store import write_header
from lightning_gnn.extensions.out_of_core.paging import own_bytes

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


def write(
    folder: Path,
    kind: str,
    num_nodes: int,
    num_edges: int,
    columns: int = FEATURES,
    dtype: str = "float16",
    inside: float = INSIDE,
) -> None:
    """Writes a graph as files; each edge has its opposite."""
    folder.mkdir(parents=True)
    half = num_edges // 2
    with (folder / "edge_index.npy").open("wb") as file:
        write_header(file, (2, num_edges), np.dtype(np.int32))
        first = file.tell()
        file.truncate(first + 8 * num_edges)

    def put(column: int, begin: int, ids: np.ndarray) -> None:
        with (folder / "edge_index.npy").open("r+b") as file:
            file.seek(first + 4 * (column * num_edges + begin))
            ids.tofile(file)

    for begin in range(0, half, PIECE):
        piece = np.empty((2, min(PIECE, half - begin)), np.int32)
        if kind == "rmat":
            rmat(begin, num_nodes, int(np.ceil(np.log2(num_nodes))), piece)
        else:
            planted(begin, num_nodes, COMMUNITIES, inside, piece)
        for column in range(2):
            put(column, begin, piece[column])
            put(1 - column, half + begin, piece[column])
    y, train = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.bool_)
    with (folder / "x.npy").open("wb") as file:
        write_header(file, (num_nodes, columns), np.dtype(dtype))
        for begin in range(0, num_nodes, PIECE // 4):
            rows = np.empty((min(PIECE // 4, num_nodes - begin), columns), np.float32)
            end = begin + len(rows)
            features(begin, COMMUNITIES, CLASSES, rows, y[begin:end], train[begin:end])
            rows.astype(dtype).tofile(file)
    np.save(folder / "y.npy", y)
    np.save(folder / "train_mask.npy", train)


class Peak:
    """The most memory that a process and those that it started had at once, in bytes; looked at ten times a second, more seldom
    where a look takes longer than 5 ms: the kernel walks through all pages, and the process waits."""

    def __init__(self, process: psutil.Process) -> None:
        self.own = self.in_all = 0
        self._process, self._over = process, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        took = 0.0
        while not self._over.wait(max(0.1, 20 * took)):
            began, own, in_all = time.perf_counter(), 0, 0
            try:
                for each in (self._process, *self._process.children(recursive=True)):
                    own, in_all = own + own_bytes(each.pid), in_all + each.memory_info().rss
            except (psutil.Error, OSError):
                continue
            took = time.perf_counter() - began
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


def group_of_this_process() -> Path:
    """Returns the control group that :func:`limited` makes."""
    return Path(f"/sys/fs/cgroup/memory/lightning_gnn-{os.getpid()}")


@contextmanager
def limited(num_bytes: int) -> Iterator[Callable[[], None] | None]:
    """Yields what a new process calls to be limited to so many bytes, pages of files that it reads included; 0 for no limit."""
    group = group_of_this_process()
    if not num_bytes:
        yield None
        return
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(f"--limit needs control groups of version 1 whose folder can be written ({error}).") from error
    (group / "memory.limit_in_bytes").write_text(str(num_bytes))
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        group.rmdir()


def measured(name: str, command: list[str], num_edges: int, limit: int) -> dict[str, Any]:
    with limited(limit) as enter:
        return _measured(name, command, num_edges, enter)


def _measured(name: str, command: list[str], num_edges: int, enter: Callable[[], None] | None) -> dict[str, Any]:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    with Peak.of(psutil.Process(process.pid)) as peak:
        output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{output}")
    print(output, file=sys.stderr)
    seconds = time.perf_counter() - began
    return {"step": name, "edges": num_edges, "s": seconds, "own GB": peak.own / 1e9, "GB in all": peak.in_all / 1e9}


def train(step: str, graph: str, store: str, partition: str, ranks: int, memory: str, limit: float) -> None:
    """One epoch."""
    strategy: Any = SamplingStrategy(evaluation="minibatch")
    if step == "full-graph":
        given = {"memory_limit": int(0.75e9 * limit), "spill_dir": store} if limit else {}
        strategy = DGCLStrategy(start_method="fork", **given)
    options: dict[str, Any] = {"num_neighbors": [10, 5], "batch_size": 1024} if step == "sampling" else {}
    data = GraphDataModule(
        graph, partition_dir=store, partition=partition, partition_memory_limit=memory, feature_dtype="float32", **options
    )
    kind, hidden = (GraphSAGE, 64) if step == "sampling" else (GCN, 16)
    model = NodeClassifier(kind(FEATURES, hidden, num_layers=2, out_channels=CLASSES))
    trainer = L.Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=float, nargs="+", default=[10e6], help="directed")
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--kind", choices=["planted", "rmat"], default="planted")
    parser.add_argument("--partition", default="streaming")
    parser.add_argument("--memory", default="4GB", help="that sorting may take")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--steps",
        nargs="+",
        metavar="STEP",
        help="write, partition, sampling, full-graph",
        default=["write", "partition", "sampling"],
    )
    parser.add_argument("--limit", type=float, default=0, help="of memory, in GB")
    parser.add_argument("--json")
    parser.add_argument("--train", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        step, graph, store, partition, ranks, memory, limit = options.train
        train(step, graph, store, partition, int(ranks), memory, float(limit))
        return
    rows = []
    for num_edges in map(int, options.edges):
        num_nodes = num_edges // options.degree
        graph, store = options.folder / f"{options.kind}-{num_edges}", options.folder / "store"
        for step in options.steps:
            if step == "write":
                shutil.rmtree(graph, ignore_errors=True)
                values = f"Path({str(graph)!r}), {options.kind!r}, {num_nodes}, {num_edges}"
                command = ["-c", f"from pathlib import Path; from benchmarks.billion import write; write({values})"]
            elif step == "partition":
                command = ["-m", "lightning_gnn", "partition", "--parts", str(options.parts)]
                command += ["--trainer.strategy", "sampling"] if "sampling" in options.steps else []
                of_data = {
                    "source": graph,
                    "store": store,
                    "partition": options.partition,
                    "partition_memory_limit": options.memory,
                }
                command += [word for name, value in of_data.items() for word in (f"--data.{name}", str(value))]
            else:
                arguments = [step, graph, store, options.partition, options.parts, options.memory, options.limit]
                command = [__file__, "--folder", str(options.folder), "--train", *map(str, arguments)]
            rows.append(measured(step, command, num_edges, int(options.limit * 1e9)))
    for row in rows:
        row["M edges/s"] = row["edges"] / row["s"] / 1e6
        row["bytes/edge"] = 1e9 * row["own GB"] / row["edges"]
    columns = ["step", "edges", "s", "M edges/s", "own GB", "GB in all", "bytes/edge"]
    report(f"{options.kind}, {options.parts} parts, limit {options.limit} GB", rows, columns, options.json)


if __name__ == "__main__":
    main()
