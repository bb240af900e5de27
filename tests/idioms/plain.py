"""A plain module for idioms that are about Lightning: two convs, one step for each stage."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GCNConv, SAGEConv

from idioms import harness
from idioms.harness import CLASSES, FEATURES, TWO

HIDDEN = 8


idiom = partial(harness.idiom, schemes=TWO)
"""As the harness has it, under two schemes: what is around the model depends little on the scheme."""


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv1, self.conv2 = GCNConv(FEATURES, HIDDEN), SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
        out = self(batch.x, batch.edge_index)
        loss = F.cross_entropy(out[mask], batch.y[mask])
        self.log(f"{stage}_loss", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch, batch.train_mask, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch, batch.val_mask, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch, batch.test_mask, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch.x, batch.edge_index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
