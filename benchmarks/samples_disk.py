"""Reading samples from disk: the converted folder of a rank beside a plain loader of the same arrays.

    python benchmarks/samples_disk.py [--nodes 200000] [--features 16] [--samples 32] [--parts 2 4] [--json FILE]

A folder has ``x.npy [S, N, F]``, float32, of a nearest-neighbor graph. *plain* is ``torch.utils.data.DataLoader`` over the memory
map, in which a rank reads whole samples and selects its rows; *converted* is the loader of `GraphDataModule`, for one rank. Both
read batches of 4 in random order, one rank at a time, without workers. *cold* has no pages in the cache of the system; *warm*
repeats the epoch. *read* is the number of bytes from the disk (``/proc/self/io``), as a multiple of the rank's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import report, run_row
from samples import graph_of

from lightning_gnn import GraphDataModule
from lightning_gnn.partition.layout import LayoutSpec

COLUMNS = ["loader", "ranks", "cold ms/sample", "warm ms/sample", "of plain, cold", "of plain, warm", "read, cold"]
BATCH = 4


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of a rank in the samples of a memory map."""

    def __init__(self, file: Path, rows: np.ndarray) -> None:
        self.array, self.rows = np.load(file, "r"), rows

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.array[index][self.rows])


def read_bytes() -> int:
    """Returns the bytes that this process has read from disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def drop_pages(folder: Path) -> None:
    """Write all files of a folder to the disk, and drop their pages from the cache of the system."""
    for file in folder.rglob("*.npy"):
        with file.open("r+b") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loader_row(loader: str, parts: int, folder: Path, nodes: int) -> dict[str, Any]:
    """Returns the times of a loader, and the bytes that it reads, for an epoch from disk and one from memory."""
    file = folder / "samples" / "x.npy"
    _, _, features = shape = np.load(file, "r").shape
    data = GraphDataModule(
        graph_of(nodes), samples=file.parent, global_batch_size=BATCH, shuffle=True, partition_dir=folder / "partition"
    )
    mesh_shape = SimpleNamespace(data_rank=0, data_ranks=1, graph_rank=0)
    data.trainer = SimpleNamespace(strategy=SimpleNamespace(mesh_shape=mesh_shape), current_epoch=0, optimizers=[])
    data.prepare_for(LayoutSpec("edge_cut", parts, method="metis"))
    shard = data._shard = data.stored_cut().shard(0)
    if loader == "converted":
        data.sample_data.check_strategy(data.trainer.strategy)
        data.sample_data.setup(0, shard, "fit", data.partition_dir / data._folder, data._lock)
        batches = data.train_dataloader()
    else:
        rows = Rows(file, shard.batch.n_id.numpy())
        batches = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)
    row: dict[str, Any] = {"loader": loader, "ranks": parts}
    if loader != "convert":
        drop_pages(folder)
        for name in ("cold", "warm"):
            before, began = read_bytes(), time.perf_counter()
            for _ in batches:
                pass
            row[f"{name} ms/sample"] = 1e3 * (time.perf_counter() - began) / shape[0]
            row[f"read, {name}"] = (read_bytes() - before) / (shape[0] * len(shard.batch.n_id) * features * 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        loader, parts, folder = options.row.split(":")
        print(json.dumps(loader_row(loader, int(parts), Path(folder), options.nodes)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "samples").mkdir()
        x = np.random.default_rng(0).random((options.samples, options.nodes, options.features), np.float32)
        np.save(folder / "samples" / "x.npy", x)
        for parts in options.parts:
            plain = dict[str, Any]()
            for loader in ("convert", "plain", "converted"):  # a process that has mapped pages cannot drop them
                given = ["--row", f"{loader}:{parts}:{folder}", "--nodes", str(options.nodes)]
                row = run_row(str(Path(__file__)), given, 1)
                if loader == "convert":
                    continue
                plain = plain or row
                for kind in ("cold", "warm"):
                    row[f"of plain, {kind}"] = row[f"{kind} ms/sample"] / plain[f"{kind} ms/sample"]
                rows.append(row)
    title = f"Reading samples [{options.nodes:,}, {options.features}] from disk, one rank"
    report(title, rows, COLUMNS, options.json)


if __name__ == "__main__":
    main()
