"""Training steps that differ between epochs in what Python code reads or does: captured only where each change is noticed."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
import types
from collections import deque
from collections.abc import Callable
from random import random as drawn
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES
from torch import Tensor
from torch_geometric.nn import GCNConv

from lightning_gnn import register_row_rule

EPOCHS = 14
SWITCH = 8
"""Epoch from which on something is another."""

CASES: dict[str, tuple[Callable[[], tuple[L.LightningModule, list[L.Callback]]], int, int]] = {}
"""Makes a module and callbacks; the least and the largest number of replays."""

FACTOR = 1.0
TABLE = {"factor": [1.0]}


class Base(L.LightningModule):
    """Two convs; :meth:`setting` is called first."""

    kind = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.drop = GCNConv(FEATURES, 8), GCNConv(8, CLASSES), torch.nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(()))
        self.factor: Any = 1.0
        self.count = 0
        self.setting()

    def setting(self) -> None:
        pass

    def plain(self, batch: Any) -> Tensor:
        out = self.second(self.first(batch.x, batch.edge_index).relu(), batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Late(L.Callback):
    """Calls a function with the module at the start of an epoch; or of each."""

    def __init__(self, change: Callable[[Any], Any], always: bool = False) -> None:
        self.change, self.always = change, always

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.always or trainer.current_epoch == SWITCH:
            self.change(module)


def case(
    least: int = 0, most: int = 0, change: Callable[[Any], Any] | None = None, always: bool = False, **attributes: Any
) -> Any:
    """Adds a step; `attributes` are further methods of its module."""

    def added(step: Any) -> Any:
        def make() -> tuple[L.LightningModule, list[L.Callback]]:
            kind = type(step.__name__, (Base,), {"training_step": step, **attributes})
            return kind(), [] if change is None else [Late(change, always)]

        CASES[step.__name__] = make, least, most
        return step

    return added


def given(**values: Any) -> Any:
    def setting(self: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value() if callable(value) else value)

    return setting


SOME = {"least": 6, "most": 9}
"""Of steps that are captured before and after the epoch from which on they are different."""

# Values that change with each step ############################################


@case()
def factor_of_the_epoch(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * (1 + self.current_epoch / 10)


@case()
def branch_on_the_global_step(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * 2 if self.global_step == 9 else self.plain(batch)


@case()
def late_epochs(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) if self.current_epoch < 10 else 2 * self.plain(batch)


@case()
def late_epochs_of_the_trainer(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * (0.5 if self.trainer.current_epoch >= 10 else 1.0)


@case()
def counter(self: Any, batch: Any) -> Tensor:
    self.count += 1
    return self.plain(batch) * self.count


@case()
def counter_that_matters_late(self: Any, batch: Any) -> Tensor:
    self.count += 1
    return self.plain(batch) * (3 if self.count > 10 else 1)


@case()
def python_draws(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * random.random()


@case()
def python_draws_by_a_function(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * drawn()


@case()
def numpy_draws(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * np.random.rand()  # noqa: NPY002


@case(setting=given(numbers=lambda: np.random.default_rng(0)))
def numpy_generator(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * float(self.numbers.random())


@case(setting=given(numbers=lambda: random.Random(0)))
def own_generator(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.numbers.random()


@case()
def clock(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * (1.0 if time.monotonic() > 0 else 2.0)


@case(setting=given(seen=list))
def list_that_grows(self: Any, batch: Any) -> Tensor:
    self.seen.append(self.global_rank)
    return self.plain(batch) * len(self.seen)


@case(setting=given(seen=lambda: deque(maxlen=3)))
def queue_of_losses(self: Any, batch: Any) -> Tensor:
    loss = self.plain(batch)
    self.seen.append(loss.detach())
    return loss * sum(self.seen)


@case(setting=given(seen=lambda: itertools.count(1)))
def iterator(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * next(self.seen)


def counting() -> Callable[[], int]:
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count

    return call


@case(setting=lambda self: setattr(self, "seen", counting()))
def closure_that_counts(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.seen()


def with_default(loss: Tensor, known: dict[str, int] = {"count": 0}) -> Tensor:  # noqa: B006
    known["count"] = known["count"] % EPOCHS + 1
    return loss * known["count"]


@case()
def default_that_changes(self: Any, batch: Any) -> Tensor:
    return with_default(self.plain(batch))


@case(last=None)
def last_loss(self: Any, batch: Any) -> Tensor:
    loss = self.plain(batch)
    before, self.last = self.last, loss.detach()
    return loss if before is None else loss * (1 + before)


@case(ema=0.0)
def moving_average(self: Any, batch: Any) -> Tensor:
    loss = self.plain(batch)
    self.ema = 0.9 * self.ema + 0.1 * loss.detach()
    return loss + self.ema * loss


@case(change=lambda module: setattr(module, "factor", module.factor + 0.5), always=True)
def attribute_set_by_a_callback(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.factor


@case(change=lambda module: setattr(module, "factor", module.factor + 0.5), always=True)
def attribute_by_a_dynamic_name(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * getattr(self, "fac" + "tor")


@case(
    configure_optimizers=lambda self: (
        lambda optimizer: ([optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)])
    )(torch.optim.SGD(self.parameters(), lr=0.1))
)
def learning_rate(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.optimizers().param_groups[0]["lr"]


@case(
    configure_optimizers=lambda self: (
        lambda optimizer: ([optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)])
    )(torch.optim.SGD(self.parameters(), lr=0.1))
)
def learning_rate_by_the_trainer(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.trainer.optimizers[0].param_groups[0]["lr"]


@case()
def branch_on_a_loss(self: Any, batch: Any) -> Tensor:
    loss = self.plain(batch)
    return loss * 2 if loss.item() > 1.5 else loss


@case()
def rows_by_prediction(self: Any, batch: Any) -> Tensor:
    out = self.first(batch.x, batch.edge_index)
    return self.plain(batch) + out[out[:, 0] > 0].mean()


@case()
def logged_counter(self: Any, batch: Any) -> Tensor:
    self.count += 1
    self.log("count", float(self.count))
    return self.plain(batch)


@case()
def drawn_on_the_cpu(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * float(torch.rand(()))


@case()
def seeded_in_the_step(self: Any, batch: Any) -> Tensor:
    torch.manual_seed(self.global_rank)
    return self.plain(batch) + F.dropout(batch.x, 0.5).mean()


class Doubled(torch.autograd.Function):
    """Its backward pass counts."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Doubled.calls = Doubled.calls % EPOCHS + 1
        return grad * Doubled.calls


register_row_rule(Doubled)


@case()
def backward_that_counts(self: Any, batch: Any) -> Tensor:
    return Doubled.apply(self.plain(batch))


@case()
def hook_that_counts(self: Any, batch: Any) -> Tensor:
    loss = self.plain(batch)
    middle = loss * 1.0
    self.count += 1
    middle.register_hook(lambda grad: grad * self.count)
    return middle


# Values that change once ######################################################


@case(**SOME, change=lambda module: setattr(module, "factor", 2.0))
def switched_attribute(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.factor


@case(**SOME, change=lambda module: setattr(type(module), "kind", 3.0))
def switched_class_attribute(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.kind


def _set_global(_: Any) -> None:
    global FACTOR
    FACTOR = 3.0 if FACTOR == 1.0 else 1.0


@case(**SOME, change=_set_global)
def switched_global(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * (FACTOR + 1.0 / FACTOR) ** 0


@case(**SOME, change=lambda _: TABLE.update(factor=[2.0 if TABLE["factor"] == [1.0] else 1.0]))
def switched_entry_of_a_global(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * sum(TABLE["factor"]) ** 0


@case(**SOME, setting=given(table=lambda: {"a": [1.0, {"b": 2.0}]}), change=lambda module: module.table["a"][1].update(b=5.0))
def switched_entry(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.table["a"][1]["b"]


@case(**SOME, change=lambda module: setattr(module.drop, "p", 0.1))
def switched_layer(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) + self.drop(self.first(batch.x, batch.edge_index)).mean()


@case(**SOME, change=lambda module: module.first.requires_grad_(False))
def frozen_layer(self: Any, batch: Any) -> Tensor:
    return self.plain(batch)


@case(**SOME, change=lambda module: module.drop.eval())
def layer_in_evaluation(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) + self.drop(self.first(batch.x, batch.edge_index)).mean()


@case(**SOME, change=lambda module: module.first.register_forward_hook(lambda _, given, out: 2 * out))
def hook_on_a_layer(self: Any, batch: Any) -> Tensor:
    return self.plain(batch)


def thrice(self: Any, batch: Any) -> Tensor:
    return 3 * Base.plain(self, batch)


@case(**SOME, change=lambda module: setattr(module, "plain", types.MethodType(thrice, module)))
def replaced_method(self: Any, batch: Any) -> Tensor:
    return self.plain(batch)


@case(
    **SOME,
    setting=given(change=lambda: functools.partial(torch.mul, torch.tensor(2.0))),
    change=lambda module: setattr(module, "change", lambda x: x * 4),
)
def replaced_function(self: Any, batch: Any) -> Tensor:
    return self.change(self.plain(batch))


@case(**SOME, change=lambda module: setattr(module, "scale", module.scale * 2))
def replaced_buffer(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.scale


@case(**SOME, change=lambda module: module.scale.mul_(2))
def changed_buffer(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * self.scale


@case(EPOCHS - 4, EPOCHS - 4, change=lambda module: module.optimizers().param_groups[0].update(betas=(0.8, 0.9)))
def switched_option(self: Any, batch: Any) -> Tensor:
    return self.plain(batch)


@case(**SOME, change=lambda module: module.trainer.datamodule.shard.batch.x.mul_(1.5))
def features_changed_in_place(self: Any, batch: Any) -> Tensor:
    return self.plain(batch)


@case(**SOME, change=lambda module: setattr(module.trainer.datamodule.shard.batch, "weight", 2.0))
def attribute_of_the_batch(self: Any, batch: Any) -> Tensor:
    return self.plain(batch) * batch.get("weight", 1.0)


# Steps that do not change ######################################################


@case(EPOCHS - 4, EPOCHS - 4)
def average_in_place(self: Any, batch: Any) -> Tensor:
    loss = self.plain(batch)
    with torch.no_grad():
        self.scale.mul_(0.9).add_(0.1 * loss.detach())
    return loss * self.scale.clone()


@case(EPOCHS - 4, EPOCHS - 4)
def constants(self: Any, batch: Any) -> Tensor:
    weights = [self.factor / (1 + layer) for layer, _ in enumerate((self.first, self.second))]
    total = self.plain(batch) * sum(weights) * math.sqrt(2.0)
    for parameter in self.parameters():
        total = total + 1e-3 * parameter.square().sum()
    return total * (self.trainer.max_epochs / len(batch.x) if self.training else 0.0)
