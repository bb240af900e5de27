"""Measures what draw.py draws of runs: python docs/figures/measure.py ROOT, some minutes; writes runs.json beside this file.

ROOT: the folder of real graphs that docs/numbers.md names.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch_geometric
from lightning.pytorch.profilers import PyTorchProfiler
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier, compare, planted_partition
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.strategies.cover.covers import cover_edges
from lightning_gnn.strategies.vertex_cut.cutters import vertex_cut_report

FEATURES, CLASSES = 32, 8


def make_model() -> NodeClassifier:
    return NodeClassifier(GCN(FEATURES, 64, num_layers=2, out_channels=CLASSES))


def compared(folder: Path, cells: list[Any], num_nodes: int, epochs: int) -> list[dict[str, Any]]:
    return compare(
        make_model,
        {
            "source": "lightning_gnn.planted_partition",
            "source_kwargs": {"num_nodes": num_nodes, "num_features": FEATURES, "num_classes": CLASSES},
            "store": str(folder),
        },
        cells,
        epochs=epochs,
        output=folder,
        trainer={"accelerator": "cpu"},
    )["runs"]


def losses(folder: Path) -> dict[str, list[float]]:
    """Training losses by epoch, of one device without this library, and of ranks of ``dgcl``."""
    ranks = ({"strategy": "dgcl", "devices": ranks, "label": f"{ranks} ranks"} for ranks in (2, 4))
    alone = {"strategy": "auto", "devices": 1, "label": "PyG, one device"}
    return {cell["name"]: cell["curves"]["train_loss"] for cell in compared(folder, [alone, *ranks], 10_000, 40)}


def losses_by_seconds(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Validation losses of strategies, and the seconds of training before each."""
    cells = [
        {"strategy": "dgcl", "devices": 2},
        {"strategy": "vertex_cut_cached", "devices": 2},
        {"strategy": "sampling", "num_neighbors": [10, 10], "batch_size": 1024, "devices": 2},
        {"strategy": "gossip", "devices": 2},
    ]
    found = compared(folder, cells, 50_000, 40)
    return {
        cell["strategy"]: {
            "seconds": np.cumsum(cell["epoch_seconds_by_epoch"]).tolist(),
            "loss": cell["curves"]["val_loss"],
        }
        for cell in found
    }


def rows_of_cover(root: Path) -> dict[str, dict[int, list[int]]]:
    """Rows that are sent of real graphs, by parts: halo rows, and those of a cover."""
    found: dict[str, dict[int, list[int]]] = {}
    for name in ("cnr-2000", "ego-twitter", "gowalla-bipartite", "soc-slashdot0902"):
        arrays = np.load(root / "edges" / f"{name}.npz")
        edges, num_nodes = np.stack([arrays["src"], arrays["dst"]]).astype(np.int64), int(arrays["num_nodes"])
        for parts in (2, 4, 8, 16, 32):
            owner = assign_nodes(edges, num_nodes, parts).part
            reports = (
                vertex_cut_report(edges, computed_by, owner, parts)
                for computed_by in (owner[edges[1]], cover_edges(edges, owner, parts))
            )
            counts = [int(each.copies.sum() + each.partials.sum()) for each in reports]
            found.setdefault(name, {})[parts] = counts
    return found


KINDS = {
    "training_step": "forward",
    "backward": "backward",
    "Optimizer.step": "optimizer",
    "send": "send",
    "wait": "wait",
}
KINDS |= {"Sum of gradients": "sum of gradients", "[pl][module]torch_geometric.nn.conv": "layer"}
"""What begins the names of spans, or ends those of the strategy's, and what it is drawn as."""


def schedule(step: int) -> torch.profiler.ProfilerAction:
    """The eleventh epoch, which begins in the tenth; of a module, for it is pickled."""
    return torch.profiler.schedule(wait=8, warmup=1, active=2, repeat=1)(step)


def trace(folder: Path) -> list[dict[str, Any]]:
    """The spans of one training epoch of two ranks, as a profiler writes them; communication on a track of its own."""
    trainer = L.Trainer(
        strategy="dgcl_spawn",
        devices=2,
        accelerator="cpu",
        max_epochs=20,
        profiler=PyTorchProfiler(folder, "trace", schedule=schedule),
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    graph = planted_partition(100_000, average_degree=20, num_features=FEATURES, num_classes=CLASSES)
    trainer.fit(make_model(), datamodule=GraphDataModule(graph, partition_dir=folder))
    found = []
    for file in sorted(folder.glob("*training_step*.json")):
        told = json.loads(file.read_text())
        spans = sorted((e for e in told["traceEvents"] if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
        begin, end = (span["ts"] for span in spans if span["name"].startswith("Optimizer.step"))
        for span in (each for each in spans if begin <= each["ts"] < end):
            name = span["name"]
            for words, kind in KINDS.items():
                if name.startswith(words) or name.endswith(f"Strategy.{words}"):
                    track = int(kind in ("send", "wait", "sum of gradients"))
                    layer = {"layer": name.split(": ")[-1]} if kind == "layer" else {}
                    times = {"ts": span["ts"], "dur": span["dur"]}
                    found.append(
                        {"pid": told["distributedInfo"]["rank"], "tid": track, "cat": kind, "args": layer, **times}
                    )
    return found


def main() -> None:
    versions = {"torch": torch.__version__, "torch_geometric": torch_geometric.__version__}
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": {"system": platform.platform(), "python": platform.python_version(), **versions},
            "losses": losses(Path(folder) / "comparison"),
            "losses_by_seconds": losses_by_seconds(Path(folder) / "by_seconds"),
            "rows_of_cover": rows_of_cover(Path(sys.argv[1])),
            "trace": trace(Path(folder) / "trace"),
        }
    Path(__file__).with_name("runs.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
