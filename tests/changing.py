"""One datamodule whose graph changes between calls of Trainers, and what each call gives; as a script: STRATEGY DEVICES FOLDER.

What ranks give must be what one device gives, in every call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import ClusterAllReduceStrategy, GraphDataModule, SamplingStrategy

NODES, FEATURES, CLASSES, EPOCHS = 80, 6, 3, 2


def graph() -> Data:
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(0, NODES, (2, 3 * NODES), generator=draw)
    data = Data(
        x=torch.randn(NODES, FEATURES, generator=draw, dtype=torch.double),
        edge_index=torch.cat([ends, ends.flip(0)], 1),
        y=torch.randint(0, CLASSES, (NODES,), generator=draw),
    )
    part = torch.arange(NODES) % 4
    data.train_mask, data.val_mask, data.test_mask = part == 1, part == 2, part == 3
    return data


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = GraphSAGE(FEATURES, 8, 2, CLASSES).double()

    def loss(self, batch: Data, mask: str) -> Tensor:
        loss = F.cross_entropy(self.model(batch.x, batch.edge_index)[batch[mask]], batch.y[batch[mask]])
        self.log(mask, loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self.loss(batch, "train_mask")

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.loss(batch, "val_mask")

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.loss(batch, "test_mask")

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self.model(batch.x, batch.edge_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


# Neighbourhoods are whole, and one batch has all seeds of a rank: the numbers of one device, in training too.
STRATEGIES: dict[str, Callable[[], Any]] = {
    "sampling": lambda: SamplingStrategy([-1, -1], batch_size=NODES),
    "sampling in batches": lambda: SamplingStrategy([-1, -1], batch_size=NODES, evaluation="minibatch"),
    "cluster_allreduce": lambda: ClusterAllReduceStrategy(num_clusters=4, final_weights="average"),
}


class Calls:
    """Calls of Trainers with one datamodule, and what each gave: the values that it logged, or its predictions.

    Args:
        strategies: names, of which each new Trainer has the next.
        one_trainer: for all calls.
    """

    def __init__(self, data: Data, strategies: Sequence[str], devices: int, one_trainer: bool) -> None:
        self.datamodule, self.module, self.found = GraphDataModule(data), Classifier(), list[Any]()
        self._strategies, self._devices, self._one = cycle(strategies), devices, one_trainer
        self._trainer: L.Trainer | None = None

    def _new_trainer(self) -> L.Trainer:
        name = next(self._strategies)
        return L.Trainer(
            strategy="auto" if self._devices == 1 else STRATEGIES.get(name, lambda: name)(),
            devices=self._devices,
            accelerator="cpu",
            max_epochs=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def __call__(self, *names: str) -> Any:
        for name in names:
            self._trainer = trainer = self._trainer if self._one and self._trainer else self._new_trainer()
            if name == "fit":
                trainer.fit_loop.max_epochs += EPOCHS
            returned = getattr(trainer, name)(self.module, datamodule=self.datamodule)
            logged = {key: value.clone() for key, value in trainer.callback_metrics.items() if key.endswith("_mask")}
            self.found.append(returned[0].clone() if name == "predict" else logged)
        return self.found[-1]


def folds(calls: Calls, data: Data) -> None:
    """Cross-validation with predictions of each fold that was left out: the masks change in place."""
    for fold in range(3):
        left_out = torch.arange(NODES) % 3 == fold
        data.train_mask[:], data.val_mask[:] = ~left_out, left_out
        calls("fit", "predict")


def active_learning(calls: Calls, data: Data) -> None:
    """Nodes of which the model is least sure are trained on next."""
    for _ in range(3):
        calls("fit")
        sure = calls("predict").softmax(-1).amax(-1).masked_fill(data.train_mask, 2.0)
        data.train_mask[sure.argsort()[:6]] = True


def everything(calls: Calls, data: Data) -> None:
    """Each call finds another part of the graph changed, in place or replaced."""
    calls("test")
    data.x.mul_(1.5)
    calls("test")
    data.edge_index = data.edge_index[:, ::2].clone()
    calls("test")
    data.y[data.test_mask] = 0
    calls("test")
    data.test_mask = data.val_mask.clone()
    calls("test", "predict")
    data.edge_index[:, :7] = data.edge_index[:, :7].flip(0)
    calls("predict")


def training(calls: Calls, data: Data) -> None:
    """Calls of one kind: each trains on the features as they are."""
    for scale in (1.0, 2.0, 0.3, 1.7, 0.5):
        data.x.mul_(scale)
        calls("fit")


SEQUENCES = {each.__name__: each for each in (training, everything, active_learning, folds)}


def values(
    rank: int, world_size: int, strategies: Sequence[str], sequence: str, one_trainer: bool = False
) -> list[Any]:
    data = graph()
    calls = Calls(data, strategies, world_size, one_trainer)
    SEQUENCES[sequence](calls, data)
    return calls.found


if __name__ == "__main__":
    strategy, devices, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.save(values(0, devices, [strategy], "folds"), folder / f"{os.environ.get('LOCAL_RANK', 0)}.pt")
