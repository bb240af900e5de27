"""Mini-batches whose features come from memory, through the page cache, and from the disk, with the near cache and without.

python benchmarks/sampling_disk.py --folder FOLDER [--limit 1] [--json FILE]

An R-MAT graph in one part; batches are made, not trained on, in a process per row. "disk": pages of the store are dropped
before, and a control group (version 1) of so many GB, pages of files that it reads among them, has no room for all features. In
the first epoch those rows are kept that most edges read; in the third, as in the second, those that the first read most often.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from benchmarks.billion import limited, rmat
from benchmarks.common import report
from lightning_gnn import GraphDataModule
from lightning_gnn.data.shards import Cut
from lightning_gnn.data.store import read_cut
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.loader import BatchMaker, SampledBatches, SeedBatches, SplitSeeds
from lightning_gnn.strategies.sampling.strategy import SamplingScheme

FANOUTS, BATCH_SIZE = [15, 10], 1024
SHARES = (0.05, 0.1, 0.25)


def graph(num_nodes: int, num_edges: int, columns: int) -> Data:
    """Each edge has its opposite; nodes to train on are 1 in 100."""
    ends = np.empty((2, num_edges // 2), np.int64)
    rmat(0, num_nodes, int(np.ceil(np.log2(num_nodes))), ends)
    random = torch.Generator().manual_seed(0)
    data = Data(x=torch.rand(num_nodes, columns, generator=random), y=torch.zeros(num_nodes, dtype=torch.long))
    data.edge_index = torch.from_numpy(np.concatenate([ends, ends[::-1]], 1))
    data.train_mask = torch.rand(num_nodes, generator=random) < 0.01
    return data


def own_bytes() -> int:
    """Returns the memory of this process that is of no file: its own, and that which it shares."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


def read_bytes() -> int:
    """Returns what this process has read from disks."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])


def row(folder: Path, source: str, cache_bytes: int) -> dict[str, Any]:
    """Makes the batches of three epochs."""
    torch.set_num_threads(2)
    cut: Cut = read_cut(folder, by_rows=True)
    if source == "memory":
        of_nodes = {**cut.attributes["node"], "x": cut.attributes["node"]["x"].clone()}
        cut = replace(cut, attributes={**cut.attributes, "node": of_nodes})
    alone: Any = SimpleNamespace(rank=0, size=1)
    split = SplitSeeds.of(cut, "node", "train_mask")
    began, found, epoch = time.perf_counter(), dict[str, Any](), iter(range(3))
    store = GraphStore(cut, alone, [0], near_bytes=cache_bytes)
    found["filling, s"] = time.perf_counter() - began
    maker, own = BatchMaker(store, {ONE_TYPE: FANOUTS}), split.seeds(0)
    if source != "disk":  # else nothing is read before
        maker.make(own[:BATCH_SIZE], [0])
    steps = SeedBatches(split.sizes, BATCH_SIZE)
    loader = SampledBatches([maker], steps, own, split.first, 0, 0, 0, lambda: next(epoch))
    for number in ("1st", "2nd", "3rd"):
        running = iter(loader)  # fills the cache
        store.take_counts()
        began, before = time.perf_counter(), read_bytes()
        nodes, batches = sum(len(batch.n_id) for batch in running), len(loader)
        seconds, counts = time.perf_counter() - began, store.take_counts()
        found[f"{number}: batches/s"] = batches / seconds
        found[f"{number}: MB/batch from disk"] = (read_bytes() - before) / batches / 1e6
        if cache_bytes:
            found[f"{number}: hits, %"] = 100 * counts.near_hits / nodes
    return {**found, "nodes/batch": nodes / batches, "own, MB": own_bytes() / 1e6}


def asked(folder: Path, source: str, cache_bytes: int, limit: int) -> dict[str, Any]:
    """Runs a row in a process of its own, after what it may find in memory has been read, or dropped."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            if source == "disk":
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(1 << 24):
                    pass
    command = [sys.executable, __file__, "--row", json.dumps([str(folder), source, cache_bytes])]
    with limited(limit if source == "disk" else 0) as enter:
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=enter)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=float, default=10e6)
    parser.add_argument("--degree", type=int, default=5)
    parser.add_argument("--columns", type=int, default=128, help="of float32 features")
    parser.add_argument("--limit", type=float, default=1.0, help="of memory, in GB, where features come from the disk")
    parser.add_argument("--folder", type=Path, help="for the store")
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        folder, *rest = json.loads(options.row)
        print(json.dumps(row(Path(folder), *rest)))
        return
    num_edges = int(options.edges)
    num_nodes = num_edges // options.degree
    made = GraphDataModule(
        "benchmarks.sampling_disk.graph",
        {"num_nodes": num_nodes, "num_edges": num_edges, "columns": options.columns},
        partition_dir=options.folder,
    )
    folder = options.folder / made.partition_for(SamplingScheme().layout(1))
    size, rows = 4 * options.columns * num_nodes, []
    for source in ("memory", "page cache", "disk"):
        for share in (0, *(SHARES if source != "memory" else ())):
            found = asked(folder, source, int(share * size), int(options.limit * 1e9))
            rows.append({"features from": source, "local_cache, %": 100 * share, **found})
            print(rows[-1], file=sys.stderr, flush=True)
    title = (
        f"R-MAT, {num_nodes:,} nodes, {num_edges:,} edges, {size / 1e6:.0f} MB of features; fan-outs {FANOUTS}, {BATCH_SIZE} "
        f"seeds; disk: within {options.limit} GB"
    )
    report(title, rows, [name for name in rows[1] if "2nd" not in name], options.json)


if __name__ == "__main__":
    main()
