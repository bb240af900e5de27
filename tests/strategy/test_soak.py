"""Descriptors, threads and shared memory of a process grow neither from epoch to epoch nor from fit to fit (gloo ranks).

Memory is measured, over many more epochs, by ``benchmarks/soak.py``.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from common import CLASSES, FEATURES, awkward_graph, quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GossipStrategy, GraphDataModule, NodeClassifier, SamplingStrategy

EPOCHS, ROUNDS = 6, 3
STRATEGIES: dict[str, Any] = {  # they have few threads, sockets and segments in common
    "dgcl": DGCLStrategy,
    "sampling": lambda **options: SamplingStrategy([2, 2], 8, **options),
    "gossip": lambda **options: GossipStrategy(num_clusters=6, average_every_n_batches=2, heartbeat_timeout=60, **options),
}


def held() -> dict[str, int]:
    """Returns how many of each this process holds, but for what waits in cycles."""
    gc.collect()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": sum("/memfd:" in line or "/dev/shm/" in line for line in mapped),
    }


def more(now: dict[str, int], before: list[dict[str, int]]) -> bool:
    """Returns whether more is held of anything than before."""
    return any(count > each[what] for each in before for what, count in now.items())


class Held(L.Callback):
    """Notes what is held in each epoch."""

    def __init__(self) -> None:
        self.notes: dict[str, list[int]] = defaultdict(list)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for what, count in held().items():
            self.notes[what].append(count)


class Reshapes(NodeClassifier):
    """A model whose sizes are those of the graph, as in many steps by hand: they differ from fit to fit."""

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch).view(batch.num_nodes, -1)


def fit(name: str, world_size: int, folder: Path, num_nodes: int = 60) -> dict[str, list[int]]:
    """Trains with a validation and a checkpoint in each epoch; returns what was held in each."""
    noting = Held()
    strategy = STRATEGIES[name](timeout=60, self_check=False)
    saving = ModelCheckpoint(folder / name)
    trainer = quiet_trainer(
        strategy, world_size, max_epochs=EPOCHS, enable_checkpointing=True, callbacks=[noting, saving]
    )
    module = Reshapes(GCN(FEATURES, 8, num_layers=2, out_channels=CLASSES), num_classes=CLASSES)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph(num_nodes, dtype=torch.float32)))
    return noting.notes


def in_turn(rank: int, world_size: int, folder: Path) -> tuple[list[tuple[str, dict[str, list[int]]]], list[Any]]:
    """Trains under each strategy, for several rounds; returns what was held in each epoch, and after each round."""
    gc.collect()
    gc.freeze()  # else each collection would look at all that was imported
    within, after = [], []
    try:
        for number in range(ROUNDS):
            within += [(name, fit(name, world_size, folder, 60 + 6 * number)) for name in STRATEGIES]
            deadline = time.monotonic() + 5  # threads may take a moment to end
            while more(now := held(), after[-1:]) and time.monotonic() < deadline:
                time.sleep(0.05)
            after.append(now)
    finally:
        gc.unfreeze()
    return within, after


@pytest.mark.campaign
def test_epochs_and_fits_leave_nothing_behind(ranks, tmp_path):
    for rank, (within, after) in enumerate(ranks.run(2, in_turn, tmp_path, timeout=300)):
        assert len(within) == ROUNDS * len(STRATEGIES)
        for name, notes in within:
            for what, counts in notes.items():
                half = EPOCHS // 2  # what comes and goes, or comes once, is no leak
                assert len(counts) == EPOCHS
                assert min(counts[half:]) <= max(counts[:half]), f"{what} of rank {rank} under {name}: {counts}"
        assert not more(after[2], [after[1]]), f"rank {rank} after each round: {after}"
