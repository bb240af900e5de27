"""Captured training steps: equal to steps that run as usual, bit by bit, or not captured, with the reason."""

from __future__ import annotations

import functools
import logging
import random
import re
import time
import types
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import changing_steps
import emulated
import lightning as L
import numpy as np
import on_device
import pytest
import torch
import torch.nn.functional as F
from common import CAMPAIGN, CLASSES, FEATURES, assert_same, awkward_graph, build, campaign, quiet_trainer
from conftest import RankFailed, RankPool

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.extensions.graphs import source
from lightning_gnn.extensions.graphs.steps import StepGraphs

EPOCHS = 9


def begin() -> None:
    """Has the emulated device count as a part of torch, which it replaces."""
    on_device.begin()
    source.KNOWN.extend(["emulated", "queued", "on_device"])


@pytest.fixture(scope="module")
def ranks() -> Any:
    pool = RankPool(begin)
    yield pool
    pool.close()


class Seen(L.Callback):
    """Keeps the losses of all steps and the graphs of a fit."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.graphs: StepGraphs | None = None

    def on_train_batch_end(self, trainer: L.Trainer, _: Any, outputs: Any, *others: Any) -> None:
        self.losses.append(outputs["loss"].detach().cpu())
        self.graphs = trainer.strategy.steps.graphs


class Plain(L.LightningModule):
    """A classifier; `optimizer` makes its optimizers from its parameters."""

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None) -> None:
        super().__init__()
        self.model = build("gcn") if model is None else model
        self.make_optimizer = optimizer or functools.partial(torch.optim.Adam, lr=0.01)

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.model(batch.x, batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


Result = tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]


def fitted(make: Callable[[], L.LightningModule], size: int, cuda_graph: Any, **options: Any) -> tuple[Result, Seen, L.Trainer]:
    """Returns losses, weights and logged values of a fit."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    module, seen = make().double(), Seen()
    callbacks = [*options.pop("callbacks", []), seen]
    plan, ckpt_path = options.pop("plan", "auto"), options.pop("ckpt_path", None)
    defaults: dict[str, Any] = {"max_epochs": EPOCHS, "limit_val_batches": 0, "num_sanity_val_steps": 0, "callbacks": callbacks}
    strategy = DGCLStrategy(plan=plan, cuda_graph=cuda_graph, timeout=60)
    trainer = quiet_trainer(strategy, size, False, **{**defaults, **options})
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()), ckpt_path=ckpt_path)
    logged = {name: value.clone() for name, value in trainer.callback_metrics.items() if not name.endswith(("seconds", "per_s"))}
    return (seen.losses, [each.detach().clone() for each in module.parameters()], logged), seen, trainer


def assert_bits(found: Result, expected: Result) -> None:
    for place, (losses, others) in enumerate(zip(found[:2], expected[:2])):
        assert len(losses) == len(others)
        for one, other in zip(losses, others):
            assert torch.equal(one, other), (place, one, other)
    assert found[2].keys() == expected[2].keys()
    for name, value in found[2].items():
        assert torch.equal(value, expected[2][name]), name


def compared(rank: int, size: int, make: Callable[[], L.LightningModule], least: int, **options: Any) -> tuple[int, str]:
    """Compares a fit with captured steps to a fit without; returns the number of replays and the obstacle."""
    expected, _, _ = fitted(make, size, False, **options)
    found, seen, trainer = fitted(make, size, "auto", **options)
    assert_bits(found, expected)
    graphs = seen.graphs
    assert graphs is not None and graphs.replays >= least, (graphs.replays, graphs.obstacle)
    return graphs.replays, graphs.obstacle


OPTIMIZERS: dict[str, Any] = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=5e-4),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, maximize=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=1e-3),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
}


def of_model(model: str, optimizer: str) -> L.LightningModule:
    return Plain(build(model), OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("gcn", "adam"), ("sage", "adamw"), ("gat", "momentum"), ("gcn_batch_norm", "sgd"), ("gcn", "amsgrad"), ("sage", "dampening")]
    + campaign(*((model, optimizer) for model in ("gcn", "sage", "gat") for optimizer in OPTIMIZERS)),
)
def test_captured_steps_equal_others(ranks, model, optimizer):
    [(replays, obstacle)] = ranks.run(1, compared, functools.partial(of_model, model, optimizer), EPOCHS - 4)
    assert (replays, obstacle) == (EPOCHS - 4, "")


@pytest.mark.parametrize(("model", "plan"), [("gcn", "auto"), ("gat", "auto"), *campaign(("sage", "auto"), ("gcn", "spst"))])
def test_ranks_replay_together(ranks, model, plan):
    for replays, obstacle in ranks.run(2, compared, functools.partial(of_model, model, "adam"), EPOCHS - 4, plan=plan):
        assert (replays, obstacle) == (EPOCHS - 4, "")


# What Lightning does around steps ##############################################


class Full(Plain):
    """Logs on steps and epochs, numbers and tensors; evaluates between steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": 2 * loss.detach(), "constant": 0.5}, on_step=False, on_epoch=True)
        return {"loss": loss, "more": loss.detach() + 1}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(batch.x, batch.edge_index)
        self.log("val_loss", F.cross_entropy(out[batch.val_mask], batch.y[batch.val_mask], ignore_index=-1))


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Dropping(Plain):
    def __init__(self) -> None:
        super().__init__(build("gcn"))

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.model(F.dropout(batch.x, 0.3), batch.edge_index) + 0.1 * torch.randn_like(batch.x[:, :CLASSES])
        return F.cross_entropy(F.dropout(out, 0.5)[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)


class Hooks(L.Callback):
    """Counts hooks, and changes gradients in one of them; the optimizer has hooks, too."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        [optimizer] = trainer.optimizers
        optimizer.register_step_pre_hook(lambda *_: self.seen.append("before step"))
        optimizer.register_step_post_hook(lambda *_: self.seen.append("after step"))

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append("batch")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.seen.append("zero")

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: torch.Tensor) -> None:
        self.seen.append(("backward", float(loss), loss.requires_grad))

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(1 + trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.seen.append(float(sum(each.grad.sum() for each in module.parameters())))


class Kept(L.Callback):
    """Keeps outputs of steps, which later steps must not overwrite."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)


def classifier(model: str) -> L.LightningModule:
    return NodeClassifier(build(model), num_classes=CLASSES)


def hooks_are_called(rank: int, size: int) -> None:
    expected, found = Hooks(), Hooks()
    assert_bits(fitted(Plain, size, "auto", callbacks=[found])[0], fitted(Plain, size, False, callbacks=[expected])[0])
    assert found.seen == expected.seen and found.seen.count("after step") == EPOCHS


def outputs_stay(rank: int, size: int) -> None:
    expected, found = Kept(), Kept()
    fitted(Full, size, False, callbacks=[expected])
    fitted(Full, size, "auto", callbacks=[found])
    assert len(found.outputs) == EPOCHS
    for one, other in zip(found.outputs, expected.outputs):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("function", "size"), [(hooks_are_called, 1), (hooks_are_called, 2), (outputs_stay, 1)])
def test_hooks_and_outputs(ranks, function, size):
    ranks.run(size, function)


@pytest.mark.parametrize(
    ("make", "size", "options"),
    [
        (Scheduled, 1, {"gradient_clip_val": 0.1}),
        (Scheduled, 2, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Plain, 1, {"accumulate_grad_batches": 3}),
        (Full, 1, {"limit_val_batches": 1, "num_sanity_val_steps": 1}),
        (Full, 2, {"limit_val_batches": 1, "check_val_every_n_epoch": 2}),
        (Dropping, 1, {}),
        (functools.partial(classifier, "gcn"), 1, {"limit_val_batches": 1}),
        (functools.partial(classifier, "sage"), 2, {}),
    ],
)
def test_the_trainers_features(ranks, make, size, options):
    for replays, obstacle in ranks.run(size, compared, make, EPOCHS - 4, **options):
        assert (replays, obstacle) == (EPOCHS - 4, "")


def resumed(rank: int, size: int, first: Any, then: Any) -> tuple[Result, dict[str, Any]]:
    """A fit of six epochs that is continued from its checkpoint."""
    with TemporaryDirectory() as folder:
        _, _, trainer = fitted(Scheduled, size, first, max_epochs=6)
        path = str(Path(folder) / "last.ckpt")
        trainer.strategy.barrier = lambda *_: None  # type: ignore[method-assign]
        trainer.save_checkpoint(path)
        checkpoint = torch.load(path, weights_only=False)
        result, seen, _ = fitted(Scheduled, size, then, max_epochs=12, ckpt_path=path)
    if then:
        assert seen.graphs is not None and seen.graphs.replays == 2, seen.graphs.obstacle
    return result, checkpoint


def checkpoints_equal(rank: int, size: int) -> None:
    expected, plain = resumed(rank, size, False, False)
    for first, then in ((True, True), (True, False), (False, True)):
        found, checkpoint = resumed(rank, size, first, then)
        assert_bits(found, expected)
        for name in ("optimizer_states", "lr_schedulers", "state_dict"):
            assert repr(checkpoint[name]) == repr(plain[name]), name
        options = checkpoint["optimizer_states"][0]["param_groups"][0]
        assert options["capturable"] is False and type(options["lr"]) is float


def test_checkpoints_equal_those_without_graphs(ranks):
    ranks.run(1, checkpoints_equal)


# Steps that change #############################################################


def changing(rank: int, size: int, names: list[str]) -> dict[str, str]:
    """Compares fits of these steps; returns what is wrong, by step."""
    wrong: dict[str, str] = {}
    for name in names:
        make, least, most = changing_steps.CASES[name]
        results, replays, obstacle = [], 0, ""
        for cuda_graph in (False, "auto"):
            torch.manual_seed(1)
            module, callbacks = make()
            changing_steps.Base.kind = 1.0
            result, seen, _ = fitted(lambda: module, size, cuda_graph, callbacks=callbacks, max_epochs=changing_steps.EPOCHS)
            results.append(result)
            if seen.graphs is not None:
                replays, obstacle = seen.graphs.replays, seen.graphs.obstacle
        try:
            assert_bits(*results[::-1])
        except AssertionError as error:
            wrong[name] = f"differs: {error}"
        if not least <= replays <= most or (most == 0) != bool(obstacle):
            wrong[name] = f"{wrong.get(name, '')} {replays} replays; {obstacle}"
        print(f"{name}: {replays} replays; {obstacle}")
    return wrong


DAILY = ["late_epochs", "counter_that_matters_late", "closure_that_counts", "switched_layer", "features_changed_in_place", "average_in_place"]


@pytest.mark.parametrize("names", [*campaign([[name] for name in changing_steps.CASES if name not in DAILY]), DAILY])
def test_changing_steps_equal_others(ranks, names):
    assert ranks.run(1, changing, names, timeout=250) == [{}]
