"""NodeClassifier: a ready LightningModule around any PyG model."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch_geometric.data import Data
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelF1Score,
)
from typing_extensions import override

UNLABELLED = -1


class NodeClassifier(L.LightningModule):
    """Trains a PyG model to classify nodes: cross-entropy for integer labels, binary cross-entropy for ``[N, C]`` targets.

    Logs ``train_loss``, ``val_loss``, ``val_acc``, ``val_f1``, ``test_loss``, ``test_acc``, ``test_f1``; predicts logits.

    Args:
        model: called as ``model(x, edge_index)``, with ``edge_weight`` and ``edge_attr`` where the graph has them and the
            model takes them; returns logits ``[N, C]``.
        num_classes: C; default ``model.out_channels``.
        task: ``"multiclass"`` for labels ``y [N]``, ``"multilabel"`` for targets ``y [N, C]``.
        optimizer: makes the optimizer from the parameters; default Adam with `lr` and `weight_decay`.
        lr, weight_decay: of the default optimizer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        num_classes: int | None = None,
        task: Literal["multiclass", "multilabel"] = "multiclass",
        optimizer: OptimizerCallable | None = None,
        lr: float = 0.01,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__()
        # A module among the hyperparameters could not be loaded with weights_only.
        self.save_hyperparameters(ignore=["model", "optimizer"])
        num_classes = num_classes or getattr(model, "out_channels", None)
        if num_classes is None:
            raise ValueError(f"{type(model).__name__} has no out_channels: say NodeClassifier(model, num_classes=...).")
        self.model, self.task, self.optimizer = model, task, optimizer
        self.lr, self.weight_decay = lr, weight_decay
        kinds: dict[str, tuple[Any, Any]] = {
            "multiclass": (MulticlassAccuracy, MulticlassF1Score),
            "multilabel": (MultilabelAccuracy, MultilabelF1Score),
        }
        if task not in kinds:
            raise ValueError(f"task must be 'multiclass' or 'multilabel' (got {task!r}).")
        accuracy, f1 = kinds[task]
        for stage in ("val", "test"):
            setattr(self, f"{stage}_acc", accuracy(num_classes, average="micro", ignore_index=UNLABELLED))
            setattr(self, f"{stage}_f1", f1(num_classes, average="macro", ignore_index=UNLABELLED))
        self._takes = [name for name in ("edge_weight", "edge_attr") if _accepts(model, name)]

    @override
    def forward(self, batch: Data) -> Tensor:
        extra = {name: batch[name] for name in self._takes if batch.get(name) is not None}
        return self.model(batch.x, batch.edge_index, **extra)

    def _loss(self, out: Tensor, y: Tensor) -> Tensor:
        if self.task == "multilabel":
            return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))
        return F.cross_entropy(out, y, ignore_index=UNLABELLED)

    def _num_labelled(self, y: Tensor) -> int:
        return len(y) if self.task == "multilabel" else int((y >= 0).sum())

    @override
    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        out, y = self(batch)[batch.train_mask], batch.y[batch.train_mask]
        loss = self._loss(out, y)
        self.log("train_loss", loss, prog_bar=True, batch_size=self._num_labelled(y))
        return loss

    def _evaluate(self, batch: Data, stage: str) -> None:
        mask = batch[f"{stage}_mask"]
        out, y = self(batch)[mask], batch.y[mask]
        count = self._num_labelled(y)
        self.log(f"{stage}_loss", self._loss(out, y), prog_bar=True, batch_size=count)
        for name in ("acc", "f1"):
            metric = getattr(self, f"{stage}_{name}")
            metric.update(out, y)
            self.log(f"{stage}_{name}", metric, prog_bar=name == "acc", batch_size=count)

    @override
    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Data, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self(batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer(self.parameters())
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)


def _accepts(model: torch.nn.Module, name: str) -> bool:
    """Returns whether the model takes `name`; PyG's ready models say so, their forwards take what not every conv does."""
    if hasattr(model, f"supports_{name}"):
        # A GAT takes edge features only where its convs were told how many columns they have.
        wanted = name != "edge_attr" or any(getattr(child, "edge_dim", None) is not None for child in model.modules())
        return bool(getattr(model, f"supports_{name}")) and wanted
    return name in inspect.signature(model.forward).parameters
