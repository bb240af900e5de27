"""A run that a second Trainer continues from its checkpoint, under another strategy: docs/stages.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from common import Recorder, UserModule, awkward_graph, build, quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnn import (
    CachedVertexCutStrategy,
    CoverStrategy,
    DGCLStrategy,
    GraphDataModule,
    SamplingStrategy,
    SpMM1DStrategy,
    VertexCutStrategy,
)

FIRST, ALL = 2, 5
QUICK = {"timeout": 60, "self_check": False}


class Scheduled(UserModule):
    """Adam, whose step gets smaller every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Watch(L.Callback):
    """Keeps Adam's step and the Trainer's after each epoch."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        [*_, state] = trainer.optimizers[0].state.values()
        self.steps.append((int(state["step"]), trainer.global_step))


def fit(rank: int, world_size: int, runs: list[tuple[Any, int]], folder: Path, last: str = "") -> dict[str, Any]:
    """Trains under each strategy until so many epochs are done; each Trainer resumes the checkpoint of the one before."""
    module, data = Scheduled(build("gcn_batch_norm")).double(), GraphDataModule(awkward_graph())
    recorder, watch = Recorder(), Watch()
    for number, (strategy, epochs) in enumerate(runs):
        saver = ModelCheckpoint(folder / str(number), save_last=True)
        trainer = quiet_trainer(
            strategy, world_size, max_epochs=epochs, callbacks=[recorder, watch, saver], enable_checkpointing=True
        )
        trainer.fit(module, datamodule=data, ckpt_path=last or None)
        last = saver.last_model_path
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    [tested] = trainer.test(module, datamodule=data, verbose=False)
    found = {"weights": weights, "optimizer": trainer.optimizers[0].state_dict(), "test": tested}
    return {**found, "epochs": recorder.epochs, "steps": watch.steps}


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("weights", "optimizer", "test", "epochs"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


def test_two_exact_strategies_equal_one_device(ranks, tmp_path):
    expected = fit(0, 1, [("auto", ALL)], tmp_path / "alone")
    runs = [(CoverStrategy(**QUICK), FIRST), (SpMM1DStrategy(**QUICK), ALL)]
    for found in ranks.run(2, fit, runs, tmp_path / "ranks"):
        check_same(found, expected)
        assert found["steps"] == expected["steps"] == [(step, step) for step in range(1, ALL + 1)]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (SamplingStrategy([4, 4], 6, **QUICK), DGCLStrategy(**QUICK)),
        (CachedVertexCutStrategy(0.3, cache_within_hosts=True, **QUICK), VertexCutStrategy(**QUICK)),
    ],
    ids=["sampling", "cached"],
)
def test_the_exact_epochs_after_approximate_ones_equal_one_device(ranks, tmp_path, first, then):
    """Epochs, steps, Adam's moments and the schedule continue where the approximate strategy stopped."""
    for found in ranks.run(2, fit, [(first, FIRST), (then, ALL)], tmp_path / "ranks"):
        expected = fit(0, 1, [("auto", ALL)], tmp_path / "alone", str(tmp_path / "ranks" / "0" / "last.ckpt"))
        assert len(found["epochs"]) == ALL and len(expected["epochs"]) == ALL - FIRST
        check_same({**found, "epochs": found["epochs"][FIRST:]}, expected)
        in_first = found["steps"][FIRST - 1][0]
        assert found["steps"][FIRST:] == [(in_first + step, in_first + step) for step in range(1, ALL - FIRST + 1)]
        assert in_first > FIRST or isinstance(first, CachedVertexCutStrategy)
