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
from torch_geometric.nn.models import GCN

from lightning_gnn import CommunicationTrace, GraphDataModule, NodeClassifier, compare, planted_partition
from lightning_gnn.partition.cover import cover_edges
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.metrics import vertex_cut_report

FEATURES, CLASSES = 32, 8


def make_model() -> NodeClassifier:
    return NodeClassifier(GCN(FEATURES, 64, num_layers=2, out_channels=CLASSES))


def compared(folder: Path, cells: list[Any], num_nodes: int, epochs: int) -> list[dict[str, Any]]:
    return compare(
        make_model,
        {
            "source": "lightning_gnn.planted_partition",
            "source_args": {"num_nodes": num_nodes, "num_features": FEATURES, "num_classes": CLASSES},
            "store": str(folder),
        },
        cells,
        epochs=epochs,
        output=folder,
        trainer={"accelerator": "cpu"},
    )["cells"]


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
        {"strategy": "sampling", "fanouts": [10, 10], "batch_size": 1024, "devices": 2},
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


def trace(path: Path) -> list[dict[str, Any]]:
    """One epoch of two ranks, as :class:`~lightning_gnn.CommunicationTrace` writes it."""
    trainer = L.Trainer(
        strategy="dgcl_spawn",
        devices=2,
        accelerator="cpu",
        max_epochs=20,
        callbacks=[CommunicationTrace(path, first_epoch=10, epochs=1)],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    graph = planted_partition(100_000, average_degree=20, num_features=FEATURES, num_classes=CLASSES)
    trainer.fit(make_model(), datamodule=GraphDataModule(graph, store=path.parent))
    return json.loads(path.read_text())["traceEvents"]


def main() -> None:
    versions = {"torch": torch.__version__, "torch_geometric": torch_geometric.__version__}
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": {"system": platform.platform(), "python": platform.python_version(), **versions},
            "losses": losses(Path(folder) / "comparison"),
            "losses_by_seconds": losses_by_seconds(Path(folder) / "by_seconds"),
            "rows_of_cover": rows_of_cover(Path(sys.argv[1])),
            "trace": trace(Path(folder) / "trace.json"),
        }
    Path(__file__).with_name("runs.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
