"""A user's script in which something happens to a rank in epoch 3, started by test_failures.py: STRATEGY EVENT FOLDER."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition, register_row_rule

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}


class Happens(L.Callback):
    """``WHAT RANK``; notes when it did, and this process's parent."""

    def __init__(self, event: str, folder: Path) -> None:
        self.what, _, rank = event.partition(" ")
        self.rank, self.folder = rank.removesuffix(" behind"), folder

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch != 3 or self.rank not in (str(trainer.global_rank), "main", "all"):
            return
        if self.what == "backward":
            trainer.lightning_module.killed = True
            return
        if self.rank == "main" and trainer.global_rank:
            return
        (self.folder / "when").write_text(str(time.time()))
        if self.what == "raise":
            raise ValueError(f"the data of rank {trainer.global_rank} is spoilt")
        if self.what == "raise-unheard":  # the other rank waits for nobody, and does not notice
            if trainer.global_rank == 1:
                raise ValueError("the data of rank 1 is spoilt")
        elif self.what == "exit":
            sys.exit(7)
        else:
            target = os.getpid()
            if self.rank == "main" and sys.argv[1] != "dgcl":
                target = os.getppid()  # the process that the user started is not a rank
            os.kill(target, SIGNALS[self.what])


class Kills(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        folder = Path(sys.argv[3])
        (folder / "when").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
        return gradient


register_row_rule(Kills)


class Module(NodeClassifier):
    killed = False  # in the next backward

    def forward(self, batch: Any) -> torch.Tensor:
        out = super().forward(batch)
        if sys.argv[2] in ("refused", "goes on alone"):
            out = out - torch.from_numpy(out.detach().numpy()).mean(0)
        return Kills.apply(out) if self.killed else out


def graph() -> Any:
    """Loaded by rank 0 while the others wait to start."""
    event, folder = sys.argv[2], Path(sys.argv[3])
    if event.endswith("in the check"):
        time.sleep(2)
        (folder / "when").write_text(str(time.time()))
        os.kill(os.getpid(), SIGNALS["kill" if event.startswith("kills") else "interrupt"])
        time.sleep(60)
    return planted_partition(2000)


class Sleeps(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 3 and trainer.global_rank == 0:
            time.sleep(60)


class Behind(L.Callback):
    """Rank 1 is asked to end a moment before it comes to where rank 0 waits for it."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 2 and trainer.global_rank == 1:
            while not trainer.received_sigterm:
                time.sleep(0.01)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    strategy, event, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    data, model = GraphDataModule(graph), Module(GCN(32, 16, 2, 8))
    callbacks = [Happens(event, folder)] + ([Sleeps()] if "unheard" in event else [])
    callbacks += [Behind()] if "behind" in event else []
    trainer = L.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=callbacks,
    )
    try:
        trainer.fit(model, datamodule=data)
    except ValueError:
        if event == "goes on alone":
            L.Trainer(devices=1, accelerator="cpu", max_epochs=1, logger=False).fit(model, datamodule=data)
            print("trained alone")
            return
        if "all" not in event:
            raise
        # all ranks raise and go on alike
        trainer = L.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=2, logger=False)
        trainer.fit(model, datamodule=data)
        if trainer.is_global_zero:
            print("went on")


if __name__ == "__main__":
    main()
