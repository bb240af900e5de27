"""A user's script in which a rank leaves the others in step 3, started by test_watchdog.py: EVENT shared|sockets TIMEOUT."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GCNConv

from lightning_gnn import DGCLStrategy, GraphDataModule, planted_partition

EVENT, MEMORY, TIMEOUT = sys.argv[1], sys.argv[2], float(sys.argv[3])


class Strays(L.LightningModule):
    """Layers ``first`` and ``second`` could stand for each other: their messages are of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = GCNConv(16, 16), GCNConv(16, 16), GCNConv(16, 4)
        self.steps = 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        strays = self.trainer.global_rank == 1 and self.trainer.training and self.steps == 3
        if strays and EVENT == "sleep":
            time.sleep(600)
        layers = [self.first, self.second]
        if strays and EVENT == "swap":
            layers.reverse()
        if strays and EVENT == "skip":
            layers.pop()
        for layer in layers:
            x = layer(x, edge_index).relu()
        return self.last(x, edge_index)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return cross_entropy(self(batch.x, batch.edge_index)[batch.train_mask], batch.y[batch.train_mask])

    def on_train_epoch_start(self) -> None:
        if EVENT == "hook" and self.trainer.global_rank == 0 and self.steps == 3:
            print(f"asleep at {time.time()}", flush=True)
            time.sleep(600)

    def on_train_epoch_end(self) -> None:
        if EVENT == "uneven" and self.trainer.global_rank == 1 and self.steps == 3:
            self.trainer.fit_loop.max_epochs = 3  # the others train a step more

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def main() -> None:
    strategy = DGCLStrategy(
        start_method="fork", shared_memory=MEMORY == "shared", timeout=TIMEOUT, self_check=False, reuse_buffers=False
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Strays(), datamodule=GraphDataModule(planted_partition(600, 8, 4, 16)))


if __name__ == "__main__":
    main()
