"""Trains on ranks that sleep in proportion to their nodes; each writes its epochs. Called by test_balance.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, devices, planted_partition

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])


class Sleeps(NodeClassifier):
    def training_step(self, batch: Any, *args: Any) -> Any:
        slow = options.get("seconds_per_node", [0, 0, 0])[self.trainer.global_rank]
        time.sleep(slow * self.trainer.datamodule.shard.counts[self.trainer.global_rank])
        return super().training_step(batch, *args)


class Lines(L.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if [trainer.world_size, trainer.global_rank, trainer.current_epoch] == options.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if "available" in options:
            devices.available_bytes = lambda: options["available"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        line = {"epoch": trainer.current_epoch, "loss": float(outputs["loss"]), "nodes": trainer.datamodule.shard.counts}
        with (folder / f"rank-{trainer.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        trainer.should_stop = trainer.current_epoch + 1 == options["epochs"]


if __name__ == "__main__":
    L.seed_everything(1)
    torch.set_default_dtype(torch.float64)
    graph = planted_partition(1000)
    graph.x = graph.x.double()
    trainer = L.Trainer(
        strategy=DGCLStrategy(elastic=True, balance=options["balance"], timeout=30.0, self_check=False),
        devices=options.get("ranks", 2),
        accelerator="cpu",
        max_epochs=1000,  # a move pays off, however long it takes on a busy machine
        precision="64-true",
        callbacks=[Lines()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Sleeps(GCN(32, 16, 2, 8)), datamodule=GraphDataModule(graph, partition_dir=folder / "store"))
