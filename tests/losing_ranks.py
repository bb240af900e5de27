"""A small elastic training of which ranks are lost: ``losing_ranks.py DEVICES MEMORY TIMEOUT [EVENT ...]``.

An event is ``RANK:PLACE:EPOCH:SIGNAL``; RANK is its number at the begin, and PLACE "forward", "fit's end", "before the test" or
"set-up again", which is the first set-up of the rank after one was lost. In place of a signal, SLEEP is six seconds without
communication, and ERROR an error as from a lost connection. Each rank prints the losses of its steps and of the test.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, planted_partition
from lightning_gnn.comm.watchdog import CommunicationError

EPOCHS = 5


class Events:
    """Signals to this rank."""

    def __init__(self, events: list[str]) -> None:
        self._events, self._rank = [each.split(":") for each in events], os.environ.get("LOCAL_RANK", "")

    def reach(self, place: str, epoch: int = 0) -> None:
        for rank, where, when, name in self._events:
            sign = Path(f"lost-{rank}")
            if (rank, where, int(when)) == (self._rank, place, epoch) and not sign.exists():
                sign.touch()
                if name == "ERROR":
                    raise CommunicationError("A connection is lost.")
                if name == "SLEEP":
                    time.sleep(6)
                else:
                    os.kill(os.getpid(), signal.Signals[name])


class Strategy(DGCLStrategy):
    events, set_ups = Events([]), 0

    def setup_environment(self) -> None:
        self.set_ups += 1
        if self.set_ups == 2:
            self.events.reach("set-up again")
        super().setup_environment()


class Losses(L.Callback):
    def __init__(self, events: Events) -> None:
        self.events = events
        self.found: dict[int, float] = {}

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.events.reach("forward", trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.keep(trainer, trainer.current_epoch, float(outputs["loss"]))

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.events.reach("fit's end")

    def keep(self, trainer: Any, epoch: int, loss: float) -> None:
        self.found[epoch] = loss
        os.write(1, f"loss {trainer.global_rank}/{trainer.world_size} {epoch} {loss.hex()}\n".encode())


def train(folder: Path, devices: int = 1, memory: str = "shared", timeout: float = 100, *given: str) -> dict[int, float]:
    """Returns the loss of each epoch, and of the test in place of one more."""
    events, before = Events(list(given)), torch.get_default_dtype()
    losses, options = Losses(events), {} if devices == 1 else {"elastic": True, "self_check": False}
    torch.set_default_dtype(torch.float64)
    try:
        L.seed_everything(1, verbose=False)
        graph = planted_partition(1000)
        graph.x = graph.x.double()
        strategy = Strategy(timeout=timeout, shared_memory=memory == "shared", **options)
        strategy.events = events
        trainer = L.Trainer(
            strategy=strategy,
            devices=devices,
            accelerator="cpu",
            precision="64-true",
            max_epochs=EPOCHS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            callbacks=[losses],
        )
        module = NodeClassifier(GCN(32, 16, 2, 8), lr=0.05)
        datamodule = GraphDataModule(graph, partition_dir=folder / "store")
        trainer.fit(module, datamodule=datamodule)
        events.reach("before the test")
        losses.keep(trainer, EPOCHS, trainer.test(module, datamodule=datamodule, verbose=False)[0]["test_loss"])
        return losses.found
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    train(Path.cwd(), int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
