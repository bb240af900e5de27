"""Measures what draw.py draws of runs: python docs/figures/measure.py, a minute or two; writes runs.json beside this file."""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch_geometric
from torch_geometric.nn.models import GCN

from lightning_gnn import CommunicationTrace, GraphDataModule, NodeClassifier, compare, planted_partition

FEATURES, CLASSES = 32, 8


def make_model() -> NodeClassifier:
    return NodeClassifier(GCN(FEATURES, 64, num_layers=2, out_channels=CLASSES))


def losses(folder: Path) -> dict[str, list[float]]:
    """Training losses by epoch, of one device without this library, and of ranks of ``dgcl``."""
    found = compare(
        make_model,
        {
            "source": "lightning_gnn.planted_partition",
            "source_args": {"num_nodes": 10_000, "num_features": FEATURES, "num_classes": CLASSES},
            "store": str(folder),
        },
        [
            {"strategy": "auto", "devices": 1, "label": "PyG, one device"},
            *({"strategy": "dgcl", "devices": ranks, "label": f"{ranks} ranks"} for ranks in (2, 4)),
        ],
        epochs=40,
        output=folder,
        trainer={"accelerator": "cpu"},
    )
    return {cell["name"]: cell["curves"]["train_loss"] for cell in found["cells"]}


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
            "trace": trace(Path(folder) / "trace.json"),
        }
    Path(__file__).with_name("runs.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
