"""Parameters that an optimizer trains and the module has not registered are refused, wherever the optimizer gets them from."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from common import FEATURES, Recorder, awkward_graph, quiet_trainer
from conftest import RankFailed
from lightning.pytorch.callbacks import BaseFinetuning
from test_replicas import Module
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn import GraphDataModule, SamplingStrategy


def scale() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))


class InAList(Module):
    """Scales the features by parameters that are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: Any = [scale(), scale()]

    def loss(self, batch: Data) -> Tensor:
        batch.x = batch.x * (1 + sum(self.scales))
        return super().loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), *self.scales], lr=0.5)


class Registered(InAList):
    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList(self.scales)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class OnRank1(InAList):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), *self.scales[: self.global_rank]], lr=0.5)


class InModulesOfADict(Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_type = {"paper": torch.nn.Embedding(60, FEATURES).double()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        self.automatic_optimization = False
        return [torch.optim.SGD(self.parameters(), lr=0.5), torch.optim.Adam(self.of_type["paper"].parameters())]


class OfTheGraph(Module):
    """Features that are to be learnt, as in PyG's loops."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), self.trainer.datamodule.source.x], lr=0.5)


class Later(InAList):
    """Trains them from the second epoch on."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": self.scales})


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.model.convs[0])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.convs[0], optimizer)


class LastOnly(Module):
    """Begins with one layer's parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.5)


class ByHand(InAList):
    """An optimizer of one's own, which the Trainer does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.own = torch.optim.Adam(self.scales)

    def training_step(self, batch: Data, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for each in (self.optimizers(), self.own):
            each.step()
            each.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Teacher(Module):
    """Parameters that nobody trains: one has a gradient, one is frozen and with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [scale(), scale().requires_grad_(False)]

    def loss(self, batch: Data) -> Tensor:
        return super().loss(batch) + self.hidden[0].sum() + self.hidden[1].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), self.hidden[1]], lr=0.5)


def fitted(rank: int, world_size: int, kind: type[Module], strategy: Any = "dgcl", callbacks: Any = ()) -> Any:
    graph, recorder, module = awkward_graph(), Recorder(), kind()
    if kind is OfTheGraph:
        graph.x = torch.nn.Parameter(graph.x)
    run = quiet_trainer(strategy, world_size, callbacks=[recorder, *(each() for each in callbacks)])
    run.fit(module, datamodule=GraphDataModule(graph))
    return recorder.epochs, module.state_dict()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (
            InAList,
            r"SGD, parameter group 0, .* shape \[12\] \(the first of 2\), self.scales\[0\], which InAList does not",
        ),
        (InModulesOfADict, r"Adam, parameter group 0, .* shape \[60, 12\], self.of_type\['paper'\].weight, which"),
        (OfTheGraph, r"SGD optimizes x of the graph.*DistributedEmbedding\(num_nodes, dim\), called with batch.n_id"),
        (Later, r"SGD, parameter group 1, .*self.scales\[0\], which Later does not register.*ParameterList"),
        (ByHand, r"Adam, parameter group 0, .*self.scales\[0\], which ByHand does not register"),
    ],
)
def test_what_ranks_would_not_sum_is_refused(ranks, kind, named):
    with pytest.raises(RankFailed) as raised:
        ranks.run(2, fitted, kind)
    assert len(raised.value.errors) == 2
    for error in raised.value.errors.values():
        assert error.startswith("ValueError: ") and re.search(named, error), error


def test_all_ranks_raise_where_one_must(ranks):
    with pytest.raises(RankFailed) as raised:
        ranks.run(2, fitted, OnRank1)
    assert (
        "ValueError: SGD, parameter group 0, trains a parameter of shape [12], self.scales[0]" in raised.value.errors[1]
    )
    assert "The optimizers cannot be used on ranks, see rank 1: ValueError: SGD" in raised.value.errors[0]


def test_samples_too(ranks):
    with pytest.raises(RankFailed, match=r"self.scales\[0\], which InAList does not register"):
        ranks.run(2, fitted, InAList, SamplingStrategy([3, 3], 8))


def test_workers_of_gossip_too(ranks):
    with pytest.raises(RankFailed, match=r"self.scales\[0\], which InAList does not register"):
        ranks.run(2, fitted, InAList, "gossip")


def test_one_device_refuses_to_train_the_graph():
    for strategy in ("auto", "dgcl"):
        with pytest.raises(ValueError, match="SGD optimizes x of the graph, but batches have copies of it"):
            fitted(0, 1, OfTheGraph, strategy)


@pytest.mark.parametrize(("kind", "callbacks"), [(Teacher, ()), (LastOnly, (Unfreezes,)), (Registered, ())])
def test_others_are_one_device(ranks, kind, callbacks):
    expected = fitted(0, 1, kind, "auto", callbacks)
    for found in ranks.run(2, fitted, kind, "dgcl", callbacks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
