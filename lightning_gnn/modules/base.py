"""Base class and helpers of the modules of this package."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN
from typing_extensions import override

from lightning_gnn.nn.commnet import CommNet

OptimizerCallable = Callable[[Iterable], Optimizer]
"""Type of ``lightning.pytorch.cli``, repeated here because that import is slow."""


class GraphModule(L.LightningModule):
    """Base module whose phases use one batch, a graph or a part of it.

    Attributes:
        optimizer, lr, weight_decay: see :class:`~lightning_gnn.modules.NodeClassifier`.
        is_ready_made: marker of modules whose arguments define the supported graphs; see
            :func:`~lightning_gnn.datamodules.graph.check_fits`.
    """

    is_ready_made = True
    optimizer: OptimizerCallable | None
    lr: float
    weight_decay: float

    @abstractmethod
    def _evaluate(self, batch: Data, stage: str) -> None:
        """Log the metrics of a stage, ``"val"`` or ``"test"``."""

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


def check_width(model: torch.nn.Module, num_features: int) -> None:
    """Raises ``ValueError`` if the ``in_channels`` of a library model differ from the graph's number of features."""
    # In a user's model, in_channels may have another meaning.
    width = model.in_channels if isinstance(model, (BasicGNN, CommNet)) else None
    if isinstance(width, int) and 0 < width != num_features:
        raise ValueError(
            f"{type(model).__name__} takes {width} features (in_channels), but x of the graph has {num_features} columns. "
            f"Make the model with in_channels={num_features}."
        )


def edge_inputs(model: torch.nn.Module, by_type: bool) -> list[str]:
    """Returns which of ``edge_weight`` and ``edge_attr`` the model accepts, or accepts as dicts (``edge_attr_dict``)."""
    names = "edge_weight", "edge_attr"
    if not by_type:
        return [name for name in names if _accepts(model, name)]
    taken = inspect.signature(model.forward).parameters
    return [name for name in names if f"{name}_dict" in taken]


def _accepts(model: torch.nn.Module, name: str) -> bool:
    """Returns whether the model accepts `name`; PyG's models declare it, since not every conv accepts the forward arguments."""
    if hasattr(model, f"supports_{name}"):
        # A GAT accepts edge features only if its convs have an edge_dim.
        wanted = name != "edge_attr" or any(getattr(child, "edge_dim", None) is not None for child in model.modules())
        return bool(getattr(model, f"supports_{name}")) and wanted
    return name in inspect.signature(model.forward).parameters
