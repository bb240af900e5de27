"""Programs that switch a part of the scheme off, so that ranks give other numbers: the harness must say so."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch_geometric.nn.models import GCN

from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.steps import Classifier


class NoHalo(L.Callback):
    """The rows of other ranks are zero."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size > 1:
            strategy: Any = trainer.strategy
            strategy.steps.binding.context.exchange.start_expand = _expand_to_zeros


def _expand_to_zeros(x: Tensor, halo: Tensor, call: Any) -> Any:
    halo.zero_()
    return lambda: None


class _NoSum(L.Callback):
    """Gradients stay each rank's own."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size > 1:
            strategy: Any = trainer.strategy
            strategy.world.start_all_reduce_ = lambda flat, operation: lambda: None


def _case(callback: L.Callback) -> Case:
    torch.manual_seed(0)
    return Case(Classifier(GCN(FEATURES, 8, 2, CLASSES)), graph(), {"callbacks": [callback]})


def without_halo() -> Case:
    return _case(NoHalo())


def without_sums() -> Case:
    return _case(_NoSum())


def intact() -> Case:
    return _case(L.Callback())


def not_refused() -> Case:
    return intact()


def foreign_error() -> Case:
    class Indexes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.world_size > 1:
                ["one"][self.trainer.world_size]
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    return Case(Indexes(GCN(FEATURES, 8, 2, CLASSES)), graph(), strategy={"self_check": False})
