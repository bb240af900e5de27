"""A user's script, started by test_launch.py in every way that ranks can be started: STRATEGY DEVICES FOLDER [MACHINES].

Fits, tests, predicts, fits on with more epochs, and then uses one device in the same script.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier

GRAPH = {"num_nodes": 400, "num_features": 12, "num_classes": 5, "seed": 3}
EPOCHS, MORE_EPOCHS = 3, 2


def results(folder: Path) -> dict[str, Any]:
    """Returns what a run has left in its folder."""
    epochs = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    losses = [{name: line[name] for name in ("epoch", "train_loss", "val_loss", "val_acc")} for line in epochs]
    return {"losses": losses, **torch.load(folder / "results.pt", weights_only=True)}


class Writer(L.Callback):
    """Appends a line per epoch, in the process that trains: a second rank that took itself for rank 0 would show."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            values = {name: float(value) for name, value in trainer.callback_metrics.items()}
            with self.path.open("a") as lines:
                lines.write(json.dumps({"epoch": trainer.current_epoch, **values}) + "\n")


class Doubled(GCN):
    """In float64: Adam turns the rounding of float32 into differences that look like mistakes."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x.double(), *args, **kwargs)


def new_trainer(strategy: str, devices: int, **options) -> L.Trainer:
    return L.Trainer(
        strategy=strategy,
        devices=devices,
        num_nodes=int(sys.argv[4]) if len(sys.argv) > 4 and devices > 1 else 1,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, **options},
    )


def main() -> None:
    strategy, devices, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    L.seed_everything(0)
    data = GraphDataModule("lightning_gnn.planted_partition", GRAPH)
    model = NodeClassifier(Doubled(GRAPH["num_features"], 16, num_layers=2, out_channels=GRAPH["num_classes"])).double()
    trainer = new_trainer(strategy, devices, max_epochs=EPOCHS, callbacks=[Writer(folder / "epochs.jsonl")])
    trainer.fit(model, datamodule=data)
    fitted = {name: value.clone() for name, value in model.state_dict().items()}
    train_loss = float(trainer.callback_metrics["train_loss"])
    # Each call of a spawning strategy starts Python anew: one that returns something is enough.
    [tested] = trainer.test(model, datamodule=data, verbose=False) if not strategy.endswith("_spawn") else [None]
    [logits] = trainer.predict(model, datamodule=data)
    trainer.fit_loop.max_epochs = EPOCHS + MORE_EPOCHS
    trainer.fit(model, datamodule=data)

    if trainer.is_global_zero:
        alone = new_trainer("auto", 1, max_epochs=1)
        [tested_alone] = alone.test(model, datamodule=data, verbose=False)
        alone.fit(model, datamodule=data)
        results = {
            "train_loss": train_loss,
            "fitted": fitted,
            "tested": tested,
            "logits": logits,
            "epoch": trainer.current_epoch,
            "tested_alone": tested_alone,
            "weights": model.state_dict(),
        }
        torch.save(results, folder / "results.pt")
        print("finished")


if __name__ == "__main__":
    main()
