"""An elastic training that other launchers start: ``joining.py EPOCHS FOLDER [RANK EPOCH]``; the rank kills itself once.

With HEALED_AFTER_S in the environment, its host loses all links to other hosts for so many seconds instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, planted_partition


def cut_network(seconds: str) -> None:
    """Take the interfaces of netlab down, and up again after some seconds; routes are lost in between."""
    links = [name for name in os.listdir("/sys/class/net") if name.startswith("p")]
    routes = subprocess.run(["ip", "route"], check=True, capture_output=True, text=True).stdout.splitlines()
    for link in links:
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
    again = [f"ip link set {link} up" for link in links] + [f"ip route replace {route}" for route in routes]
    subprocess.Popen(["sh", "-c", "; ".join([f"sleep {seconds}", *again])])


class Writes(L.Callback):
    """Writes the loss of each epoch, with the number of ranks."""

    def __init__(self, folder: Path, rank: int, epoch: int) -> None:
        self.folder, self.loss = folder, (rank, epoch)

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if (trainer.global_rank, trainer.current_epoch) == self.loss and not (self.folder / "lost").exists():
            (self.folder / "lost").touch()
            if "HEALED_AFTER_S" in os.environ:
                return cut_network(os.environ["HEALED_AFTER_S"])
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        name = f"{trainer.current_epoch}-{trainer.global_rank}-{trainer.world_size}"
        (self.folder / name).write_text(float(outputs["loss"]).hex())


def train(epochs: int, folder: Path, rank: int = -1, epoch: int = -1, **trainer: Any) -> None:
    L.seed_everything(1, verbose=False)
    graph = planted_partition(1000)
    graph.x = graph.x.double()
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = {"num_sanity_val_steps": 0, "enable_checkpointing": False, "precision": "64-true", **options, **trainer}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        L.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=[Writes(folder, rank, epoch)], **trainer).fit(
            NodeClassifier(GCN(32, 16, 2, 8), lr=0.05), datamodule=GraphDataModule(graph, partition_dir=folder / "store")
        )
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    strategy, folder = DGCLStrategy(elastic=True, timeout=20.0, self_check=False), Path(sys.argv[2])
    logs: dict[str, Any] = {"logger": WandbLogger(save_dir=folder), "log_every_n_steps": 1} if "WANDB_MODE" in os.environ else {}
    train(int(sys.argv[1]), folder, *map(int, sys.argv[3:]), strategy=strategy, devices=2, **logs)
