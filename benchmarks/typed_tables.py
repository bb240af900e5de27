"""Peak memory of partitioning a graph with types in Parquet tables with string ids, for several numbers of edges.

python benchmarks/typed_tables.py --millions 2 8 16 32

Each size runs in a process of its own, with partition_memory_limit="64MB". Memory is the maximum of RssAnon, without file pages
that the system can drop, above its value after imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import re
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pyarrow
import pyarrow.parquet

from lightning_gnn import GraphDataModule
from lightning_gnn.partition.layout import LayoutSpec

NODES = {"author": 300_000, "paper": 200_000}
KINDS = ("author:writes:paper", "paper:written_by:author", "paper:cites:paper")


def write_tables(folder: Path, num_edges: int) -> None:
    """Writes edges between near positions, so that the graph has a small cut."""
    rng, ids = np.random.default_rng(0), {}
    for name, size in NODES.items():
        ids[name] = pyarrow.array([f"https://graph.example/{name}/{number:09d}" for number in rng.permutation(size)])
        x = pyarrow.FixedSizeListArray.from_arrays(rng.random(size * 16, np.float32), 16)
        columns = {"id": ids[name], "x": x, "y": rng.integers(0, 5, size), "train_mask": rng.random(size) < 0.5}
        if name == "author":
            del columns["y"], columns["train_mask"]
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")
    for number, kind in enumerate(KINDS):
        source, _, target = kind.split(":")
        place, count = rng.random(num_edges // len(KINDS)), num_edges // len(KINDS)
        with pyarrow.parquet.ParquetWriter(
            folder / f"edges{number}.parquet", pyarrow.schema([("a", "string"), ("b", "string")])
        ) as out:
            for begin in range(0, count, 1 << 20):
                near = place[begin : begin + (1 << 20)]
                ends = [
                    ids[name].take((np.clip(near + rng.normal(0, 0.001, len(near)), 0, 0.999999) * NODES[name]).astype(int))
                    for name in (source, target)
                ]
                out.write_table(pyarrow.table(dict(zip("ab", ends))))
    nodes = {"author": ["id", "x"], "paper": ["id", "x", "y", "train_mask"]}
    described = {
        "nodes": {name: {"files": f"{name}.parquet", "columns": {each: each for each in of}} for name, of in nodes.items()},
        "edges": {kind: {"edge_index": f"edges{number}.parquet"} for number, kind in enumerate(KINDS)},
    }
    (folder / "graph.json").write_text(json.dumps(described))


def anonymous_mb() -> float:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3


def build(folder: str, store: str, partition: str, out: mp.SimpleQueue) -> None:
    before, peak, done = anonymous_mb(), [0.0], Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous_mb())

    Thread(target=watch, daemon=True).start()
    began = time.perf_counter()
    data = GraphDataModule(folder, partition_dir=store, partition=partition, partition_memory_limit="64MB")
    data.build(LayoutSpec.edge_cut(4))
    done.set()
    out.put((peak[0] - before, time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=float, nargs="+", default=[2, 4, 8])
    parser.add_argument("--partition", default="streaming")
    options = parser.parse_args()
    for millions in options.millions:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "graph").mkdir()
            write_tables(Path(folder) / "graph", int(millions * 1e6))
            out: mp.SimpleQueue = mp.get_context("spawn").SimpleQueue()
            process = mp.get_context("spawn").Process(
                target=build, args=(f"{folder}/graph", f"{folder}/store", options.partition, out)
            )
            process.start()
            process.join()
            memory, seconds = out.get()
            print(
                f"{millions:g} million edges: {memory:,.0f} MB above imports, {seconds:.0f} s ({options.partition})", flush=True
            )


if __name__ == "__main__":
    main()
