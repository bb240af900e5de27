"""A run leaves torch, Lightning, torchmetrics and PyG as they are, and the user's objects as they were, also after a failure.

Test tiers: gloo ranks in the pool.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from common import CLASSES, FEATURES, awkward_graph, build, quiet_trainer
from torch.overrides import _get_current_function_mode_stack
from torchmetrics import MeanMetric, MetricTracker
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from torchmetrics.wrappers import BootStrapper

from lightning_gnn import DGCLStrategy, GossipStrategy, GraphDataModule, SamplingStrategy

PART = (torch.arange(60) >= 40).long()
"""In batches, rank 1 has fewer seeds."""
STRATEGIES: dict[str, Any] = {
    "dgcl": lambda: DGCLStrategy(timeout=60),
    "sampling": lambda: SamplingStrategy([-1, -1], batch_size=6, timeout=60),
    "gossip": lambda: GossipStrategy(num_clusters=6, timeout=60, seed=1),
}
_LIBRARIES = ("torch", "lightning", "torchmetrics", "torch_geometric")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, property, classmethod, staticmethod)
_FOR_A_SECOND_TRAINER = ("MASTER_", "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE")


def of_libraries() -> dict[tuple[str, str], Any]:
    """Returns the functions and classes in modules of the libraries, and all attributes of these classes, by owner and name."""
    found: dict[tuple[str, str], Any] = {}
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in _LIBRARIES]:
        for name, value in [*vars(module).items()]:
            if not isinstance(value, _FUNCTIONS):
                continue
            found[module.__name__, name] = value
            if isinstance(value, type) and (value.__module__ or "").partition(".")[0] in _LIBRARIES:
                owner = f"{value.__module__}.{value.__qualname__}"
                found.update(
                    ((owner, name), each) for name, each in vars(value).items() if isinstance(each, _FUNCTIONS)
                )
                found[owner, ""] = value
    return found


def changed(before: dict[tuple[str, str], Any], now: dict[tuple[str, str], Any]) -> list[str]:
    """Names what has been replaced or removed since, and what classes have got."""
    differ = {key for key, value in before.items() if now.get(key) is not value}
    differ |= {(owner, name) for owner, name in now.keys() - before.keys() if (owner, "") in before}
    return sorted(".".join(key) for key in differ)


def of_user(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, Any]:
    """Returns what a run may change on a user's objects, and process-wide."""
    loop = trainer.fit_loop.epoch_loop
    owners = {"trainer.profiler": trainer.profiler, "fit_loop": trainer.fit_loop, "epoch_loop": loop}
    owners |= {
        "optimization": loop.automatic_optimization,
        "strategy": trainer.strategy,
        **dict(module.named_modules()),
    }
    hooks = {
        f"{name or 'module'}.{attribute}": {**value}
        for name, each in module.named_modules()
        for attribute, value in vars(each).items()
        if "_hooks" in attribute
    }
    of_parameters = {
        f"{name}.{attribute}": {**(getattr(each, attribute, None) or {})}
        for name, each in module.named_parameters()
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks")
    }
    of_all = {
        name: {**value}
        for name, value in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    return {
        "methods": {
            (name, attribute): getattr(value, "__func__", value)
            for name, each in owners.items()
            for attribute, value in vars(each).items()
            if callable(value) and not isinstance(value, (torch.nn.Module, type(trainer)))
        },
        "metrics": {
            (name, attribute)
            for name, each in module.named_modules()
            if isinstance(each, torchmetrics.Metric)
            for attribute in vars(each)
            if attribute != "_whole"  # its states are of all rows, also when the next run begins
        },
        "log": module.log.__func__,
        "hooks": {**hooks, **of_parameters, **of_all},
        "callbacks": [*trainer.callbacks],
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(_FOR_A_SECOND_TRAINER)},
        "modes": _get_current_function_mode_stack(),
        "filters": [*warnings.filters],
    }


class Model(pl.LightningModule):
    """Has metrics that are kept, made in a step and copied there; notes in each step what of the libraries has changed."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net = build("gcn", FEATURES, CLASSES)
        self.f1, self.auroc, self.tracker = (
            MulticlassF1Score(CLASSES),
            MulticlassAUROC(CLASSES),
            MetricTracker(MulticlassF1Score(CLASSES)),
        )
        self.mean, self.of_epoch = MeanMetric(), MulticlassF1Score(CLASSES, ignore_index=-1)
        self.fails, self.changed, self.stages = fails, list[str](), list[str]()
        self.configure_optimizers()  # torch and PyG change classes themselves, as soon as there is an object of them
        self.before = of_libraries()

    def step(self, batch: Any, stage: str) -> Any:
        mask = batch[f"{stage}_mask"] & (batch.y >= 0)
        out, y = self.net(batch.x, batch.edge_index)[mask], batch.y[mask]
        if stage not in self.stages:
            self.note(stage)
        scores = out.softmax(-1)
        made, auroc = MulticlassF1Score(CLASSES).to(out), MulticlassAUROC(CLASSES)
        self.log(f"{stage}/kept", self.f1(scores, y), on_step=False, on_epoch=True)
        self.log(f"{stage}/made", made(scores, y), on_step=False, on_epoch=True)
        if len(y):  # a batch of gossip may have none
            copied = self.f1.clone()
            copied.reset()
            copied.update(scores, y)
            self.log(f"{stage}/copied", copied.compute(), on_step=False, on_epoch=True)
            self.log(f"{stage}/auroc_now", self.auroc(scores, y), on_step=False, on_epoch=True)
            self.auroc.reset()
            self.auroc.update(scores, y)
            auroc.update(scores, y)
            self.log(f"{stage}/auroc_kept", self.auroc.compute(), on_step=False, on_epoch=True)
            self.log(f"{stage}/auroc_made", auroc.compute(), on_step=False, on_epoch=True)
        self.log(f"{stage}/f1", self.f1)
        loss = F.cross_entropy(out, y, reduction="sum") / max(1, len(y))
        self.mean.reset()
        for name, mean in (("copied", self.mean.clone()), ("kept", self.mean)):
            mean.update(loss)
            self.log(f"{stage}/mean_{name}", mean.compute(), on_step=False, on_epoch=True)
        if self.fails and self.global_step:
            raise ArithmeticError("on purpose")
        return loss

    def note(self, stage: str) -> None:
        self.stages.append(stage)
        self.changed += changed(self.before, of_libraries())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch.x, batch.edge_index)[batch.train_mask]
        self.of_epoch.update(out, batch.y[batch.train_mask])
        return self.step(batch, "train")

    def on_validation_epoch_end(self) -> None:
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.log("epoch/validated", self.of_epoch.compute())

    def on_train_epoch_end(self) -> None:
        self.of_epoch._computed = None
        self.log("epoch/trained", self.of_epoch.compute())
        self.of_epoch.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("predict")
        return self.net(batch.x, batch.edge_index)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def run(rank: int, world_size: int, name: str, way: str) -> Any:
    graph = awkward_graph()
    data = GraphDataModule(graph, partition=None if name == "gossip" else PART)
    strategy = STRATEGIES[name]()  # which imports what it needs
    module = Model(fails=way == "a failing step").double()
    if way == "a failing setup":
        module.boot = BootStrapper(MulticlassF1Score(CLASSES), sampling_strategy="multinomial")
    trainer = quiet_trainer(strategy, world_size, max_epochs=2)
    before = of_user(module, trainer)
    values: dict[str, float] = {}
    if way:
        with pytest.raises((ArithmeticError, ValueError), match="on purpose|does not support sampling_strategy"):
            trainer.fit(module, datamodule=data)
    else:
        for stage in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
            stage(module, datamodule=data)
            values |= {key: float(value) for key, value in trainer.callback_metrics.items() if "/" in key}
    after = of_user(module, trainer)
    outlived = [f"{key}: {before[key]} is now {after[key]}" for key in before if before[key] != after[key]]
    outlived += (
        [f"metrics have {before['metrics'] ^ after['metrics']}"] if before["metrics"] != after["metrics"] else []
    )
    return module.changed, changed(module.before, of_libraries()), outlived, module.stages, values


@pytest.mark.parametrize("way", ["a failing setup", "a failing step", ""])
def test_nothing_is_patched_and_nothing_outlives_a_run(ranks, way):
    for name in STRATEGIES:
        if name == "gossip" and way == "a failing setup":
            continue  # each of its workers trains as if alone
        for found in ranks.run(2, run, name, way):
            during, after, outlived, stages, values = found
            assert not during and not after and not outlived, (name, during, after, outlived)
            if way:
                continue
            # float32 is summed in another order where memory begins elsewhere
            assert values["epoch/trained"] == pytest.approx(values["epoch/validated"], rel=1e-6)
            assert {*stages} == {"train", "val", "test", "predict"}
            for stage in ("train", "val", "test"):
                assert values[f"{stage}/made"] == values[f"{stage}/copied"] == values[f"{stage}/kept"], name
                assert values[f"{stage}/mean_copied"] == values[f"{stage}/mean_kept"], name
                assert values[f"{stage}/auroc_made"] == values[f"{stage}/auroc_kept"] == values[f"{stage}/auroc_now"], (
                    name
                )
