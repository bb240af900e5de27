"""Ordinary steps, for idioms that are about the model or the data."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from idioms.harness import CLASSES


class Classifier(L.LightningModule):
    """Classes of nodes, as PyG's examples train them: cross-entropy over masks, Adam with weight decay.

    Args:
        model: called with ``x`` and ``edge_index``, and with `passed` of the batch.
    """

    def __init__(self, model: torch.nn.Module, *passed: str, lr: float = 0.01) -> None:
        super().__init__()
        self.model, self.passed, self.lr = model, passed, lr
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.test_acc = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, batch: Any) -> Tensor:
        return self.model(batch.x, batch.edge_index, *(batch[name] for name in self.passed))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch)[batch.val_mask]
        self.log("val_loss", F.cross_entropy(out, batch.y[batch.val_mask]))
        self.val_acc(out, batch.y[batch.val_mask])
        self.log("val_acc", self.val_acc)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch)[batch.test_mask]
        self.test_acc(out, batch.y[batch.test_mask])
        self.log("test_loss", F.cross_entropy(out, batch.y[batch.test_mask]))
        self.log("test_acc", self.test_acc)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=5e-4)
