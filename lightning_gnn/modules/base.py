"""What ready-made modules have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch_geometric.data import Data
from typing_extensions import override

OptimizerCallable = Callable[[Iterable], Optimizer]
"""As in ``lightning.pytorch.cli``, which takes long to import."""


class GraphModule(L.LightningModule):
    """A module whose stages look at one batch, a graph or a part of it.

    Attributes:
        optimizer, lr, weight_decay: see :class:`~lightning_gnn.modules.NodeClassifier`.
        takes_types: whether its steps take a ``HeteroData``.
    """

    takes_types = False

    optimizer: OptimizerCallable | None
    lr: float
    weight_decay: float

    @abstractmethod
    def _evaluate(self, batch: Data, stage: str) -> None:
        """Logs the metrics of a stage, ``"val"`` or ``"test"``."""

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
