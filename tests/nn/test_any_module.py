"""Every registered strategy trains an ordinary LightningModule: one that logs nothing, or names of its own (gloo ranks)."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import awkward_graph, build, quiet_trainer
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn import GNNStrategy, GraphDataModule
from lightning_gnn.strategies import registered

RANKS = {"spmm_2d": 4, "spmm_3d": 8}
"""Of strategies that two ranks are no grid for."""

NAMES = [name for name in registered() if not name.endswith(("_spawn", "_notebook"))]


class Bare(L.LightningModule):
    """The least that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("sage")

    def loss(self, batch: Data) -> Tensor:
        out = self.model(batch.x, batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class OwnNames(Bare):
    """Logs, and no name that this package knows."""

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("Loss/in training", loss)
        return {"loss": loss}

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        out = self.model(batch.x, batch.edge_index)
        self.log("quality", (out.argmax(1) == batch.y)[batch.val_mask].double().mean())


class Manual(Bare):
    """Returns nothing: its loss is seen in the backward only."""

    automatic_optimization = False

    def training_step(self, batch: Data, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def trained(rank: int, world_size: int, strategy: str, kinds: tuple[type[Bare], ...]) -> list[Tensor]:
    found = []
    for kind in kinds:
        module = kind().double()
        quiet_trainer(strategy, world_size, max_epochs=4).fit(module, datamodule=GraphDataModule(awkward_graph()))
        found.append(torch.nn.utils.parameters_to_vector(module.parameters()).detach())
    return found


@cache
def on_one_device() -> Tensor:
    return trained(0, 1, "auto", (Bare,))[0]


def is_exact(name: str) -> bool:
    kind: type[GNNStrategy] = registered()[name]
    return not kind().approximation and name != "sampling"


@pytest.mark.parametrize("name", NAMES)
def test_any_module_trains(ranks, name):
    kinds = (Bare, OwnNames) if name in ("gossip", "cluster_allreduce") else (Bare, OwnNames, Manual)
    everyone = ranks.run(RANKS.get(name, 2), trained, name, kinds)
    for found in everyone:
        torch.testing.assert_close(found, everyone[0], rtol=0, atol=0)
        assert all(weights.isfinite().all() for weights in found)
        if is_exact(name):
            torch.testing.assert_close(found, [on_one_device()] * len(kinds), rtol=1e-10, atol=1e-12)


def test_all_strategies_are_there():
    assert {"dgcl", "vertex_cut_cached", "gossip", "cluster_allreduce", "sampling", "auto_gnn", *RANKS} <= {*NAMES}
