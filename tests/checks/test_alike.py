"""Ranks that were given different hyperparameters, models, optimizers or Trainers are told so, before training."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import CLASSES, FEATURES, awkward_graph, quiet_trainer
from conftest import RankFailed
from processes import Finished, run
from test_replicas import Module
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

import lightning_gnn
from lightning_gnn import GraphDataModule, SamplingStrategy


class Own(Module):
    """A module of a rank, which `change` makes another one; the optimizer's options and the scheduler are attributes, too."""

    def __init__(
        self, change: Callable[[Any], Any] | None = None, hyperparameters: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {"lr": 0.1}
        self.alpha = 0.1
        self._gamma, self._kind, self._reversed = 0.5, torch.optim.Adam, False
        self.save_hyperparameters(hyperparameters or {})
        if change is not None:
            change(self)

    def configure_optimizers(self) -> Any:
        parameters = [each for each in self.parameters() if each.requires_grad]
        optimizer = self._kind(parameters[:: -1 if self._reversed else 1], **self._options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self._gamma)]


def wider(module: Own) -> None:
    module.model = GCN(FEATURES, 24, 2, CLASSES).double()


def with_a_layer(module: Own) -> None:
    module.model.act = torch.nn.Tanh()


DIFFERS: dict[str, tuple[Callable[[Own], Any], str]] = {
    "learning rate": (
        lambda m: m._options.update(lr=0.2),
        "lr of Adam's parameter group 0 is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "betas": (
        lambda m: m._options.update(betas=(0.8, 0.999)),
        "betas.0 of Adam's parameter group 0 is 0.9 on rank 0 and 0.8",
    ),
    "optimizer": (
        lambda m: setattr(m, "_kind", torch.optim.AdamW),
        "optimizer 0 is Adam on rank 0 and AdamW on rank 1",
    ),
    "order": (
        lambda m: setattr(m, "_reversed", True),
        "list of parameters of Adam's parameter group 0 is model.convs.0.bias, ",
    ),
    "schedule": (lambda m: setattr(m, "_gamma", 0.9), "gamma of StepLR is 0.5 on rank 0 and 0.9 on rank 1"),
    "width": (
        wider,
        r"'model.hidden_channels' is 16 on rank 0 and 24 on rank 1; \d+ more differ, the attribute 'model.convs.0",
    ),
    "layer": (with_a_layer, "the layer 'model.act' is ReLU on rank 0 and Tanh on rank 1"),
    "dropout": (
        lambda m: setattr(m.model.dropout, "p", 0.4),
        "the attribute 'model.dropout.p' is 0.0 on rank 0 and 0.4",
    ),
    "attribute": (lambda m: setattr(m, "alpha", 0.3), "the attribute 'alpha' is 0.1 on rank 0 and 0.3 on rank 1"),
    "frozen": (
        lambda m: m.model.convs[0].bias.requires_grad_(False),
        r"'model.convs.0.bias' is \[16\] float64 .* float64, frozen",
    ),
    "dtype": (
        lambda m: m.float(),
        r"the parameter 'model.convs.0.bias' is \[16\] float64 on rank 0 and \[16\] float32 on rank 1",
    ),
    "buffer": (
        lambda m: m.register_buffer("of", torch.zeros(3)),
        r"the buffer 'of' is missing on rank 0 and \[3\] float32",
    ),
    "hyperparameter": (
        lambda m: m.hparams.update(net={"heads": 4}),
        "the hyperparameter 'net.heads' is missing on rank 0 and 4",
    ),
}


def fitted(rank: int, world_size: int, changes: str = "", **options: Any) -> None:
    module = Own(DIFFERS[changes][0] if changes and rank else None)
    quiet_trainer("dgcl", world_size, **{"max_epochs": 1, **options}).fit(
        module, datamodule=GraphDataModule(awkward_graph())
    )


@pytest.mark.parametrize("changes", DIFFERS)
def test_what_differs_is_named_on_all_ranks(ranks, changes):
    with pytest.raises(RankFailed) as raised:
        ranks.run(2, fitted, changes)
    first, second = raised.value.errors.values()
    assert first == second and first.startswith("ValueError: The run must be the same on all ranks: ")
    assert re.search(DIFFERS[changes][1], first), first
    assert "lightning_gnn.optuna.create_study" in first


def fit_with_other_arguments(rank: int, world_size: int, of: str) -> None:
    data = GraphDataModule(awkward_graph(), batch_size=8 + rank if of == "batch" else 8)
    trainer = quiet_trainer(SamplingStrategy([3, 3]), world_size, max_epochs=2 + rank if of == "epochs" else 2)
    trainer.fit(Own(), datamodule=data)


@pytest.mark.parametrize(
    ("of", "named"),
    [
        ("batch", "batch_size of the GraphDataModule is 8 on rank 0 and 9 on rank 1"),
        ("epochs", "max_epochs of the Trainer is 2 on rank 0 and 3 on rank 1"),
    ],
)
def test_arguments_that_differ_are_named(ranks, of, named):
    with pytest.raises(RankFailed, match=named):
        ranks.run(2, fit_with_other_arguments, of)


class KeepsItsOwn(Own):
    """Values that are of a rank, and that no step computes with; steps leave one behind."""

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with lightning_gnn.local_rows():
            self.last = float(batch.x.sum())
        return loss


def fit_with_its_own(rank: int, world_size: int) -> dict[str, Any]:
    of_rank = {
        "run_dir": f"runs/{time.time_ns()}",
        "args": {"local_rank": rank, "seed": rank},
        "notes": f"on 12:0{rank}",
    }
    module = KeepsItsOwn(None, of_rank)
    if rank == 0:
        module.counted = 3
    module.began, module.clock, module.is_main, module._own = time.time(), time.perf_counter(), rank == 0, rank
    for _ in range(2):
        data = GraphDataModule(awkward_graph())
        quiet_trainer("dgcl", world_size, max_epochs=1).fit(module, datamodule=data)
    return {"last": module.last, **module.hparams}


def test_what_is_of_a_rank_may_differ(ranks):
    first, second = ranks.run(2, fit_with_its_own)
    assert first["last"] != second["last"] and first["args"] != second["args"]


SEARCH = """
import random, os
import lightning as L
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

lr = random.Random(os.getpid()).random()
trainer = L.Trainer(strategy="dgcl", devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(NodeClassifier(GCN(32, 16, 2, 8), lr=lr), datamodule=GraphDataModule(planted_partition(200)))
"""


def search(folder: Path) -> Finished:
    (folder / "search.py").write_text(SEARCH)
    return run(folder / "search.py", cwd=folder)


@pytest.mark.slow
@pytest.mark.program(runs=search)
def test_a_script_that_draws_in_each_rank_ends_with_the_cause(ran):
    _, finished = ran
    assert finished.code == 1 and not finished.left_over
    last = finished.output.rstrip().splitlines()[-1]
    assert re.search(
        r"The run must be the same on all ranks: the hyperparameter 'lr' is 0\.\d+ on rank 0 and 0\.\d+ on rank 1", last
    )
