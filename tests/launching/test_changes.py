"""What a rank changes on module and callbacks comes back to the caller, or is named. No processes: the rank is a copy."""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import lightning as L
import pytest
import torch
from common import FEATURES, build, quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn.utils import parametrizations, prune, weight_norm
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn.launching import changes
from lightning_gnn.launching.changes import Shared
from lightning_gnn.launching.processes import _load, _tensors


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 0.1})
        self.model, self.head, self.last = build("gcn_cached"), torch.nn.Linear(FEATURES, 4), torch.nn.Linear(4, 4)
        self.metric, self.seen, self.graph = MulticlassAccuracy(4), [], torch.arange(10**6)
        self.register_buffer("steps", torch.zeros(2), persistent=False)


class Keep(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.layers: Any = None
        self.lock: Any = threading.Lock()
        self.made = lambda: None


def begin() -> tuple[L.Trainer, Net]:
    callbacks = [Keep(), EarlyStopping("loss"), ModelCheckpoint()]
    trainer, module = quiet_trainer("auto", 1, callbacks=callbacks, enable_checkpointing=True), Net()
    trainer.strategy.connect(module)
    return trainer, module


def returned(caller: L.Trainer, change: Any) -> tuple[int, dict[str, str]]:
    """Changes a copy of the caller's objects, and the caller's with it; returns how many bytes were sent, and what is lost."""
    rank = begin()[0]
    for callback, of_rank in zip(caller.callbacks, rank.callbacks):
        vars(of_rank).update({k: copy.deepcopy(v) for k, v in vars(callback).items() if k not in ("lock", "made")})
    rank.strategy.connect(copy.deepcopy(caller.lightning_module))
    module, shared = rank.lightning_module, Shared(rank)
    before = shared.digests()
    change(rank, module)
    data, lost = shared.changes(before)
    Shared(caller).apply(data)
    weights = module.state_dict()
    lost |= _load(caller.lightning_module, weights, {n: t for n, t in _tensors(module) if n not in weights})
    assert {name: type(each) for name, each in module.named_modules()}.keys() == dict(
        caller.lightning_module.named_modules()
    ).keys()
    torch.testing.assert_close(dict(_tensors(caller.lightning_module)), dict(_tensors(module)), rtol=0, atol=0)
    return len(data), lost


def test_nothing_is_sent_where_weights_alone_have_changed():
    caller, module = begin()

    def change(trainer: L.Trainer, module: Any) -> None:
        with torch.no_grad():
            for tensor in (*module.parameters(), module.steps):
                tensor.add_(1.0)

    size, lost = returned(caller, change)
    assert size < 100 and not lost and float(module.steps[0]) == 1.0


def test_attributes_come_back_into_the_objects_that_the_caller_holds():
    caller, module = begin()
    keep, stop, saver = caller.callbacks[:3]
    of_module, of_callback, hparams, head = module.seen, keep.seen, module.hparams, module.head.weight

    def change(trainer: L.Trainer, module: Any) -> None:
        keep, stop, saver = trainer.callbacks[:3]
        module.seen.append(1.5)
        module.hparams.lr = 0.2
        module.metric.update(torch.eye(4), torch.arange(4))
        module.best = copy.deepcopy(module.model)
        keep.seen += [2.5, 3.5]
        keep.layers = [(module.head, "weight"), (module.head.weight, trainer, keep)]
        stop.stopped_epoch, stop.best_score = 7, torch.tensor(0.5)
        saver.best_model_path, saver.best_k_models = "some.ckpt", {"some.ckpt": torch.tensor(1.0)}
        trainer.callbacks.append(Second())

    size, lost = returned(caller, change)
    assert size < 50_000 and not lost  # without the graph
    assert of_module == [1.5] and of_callback == [2.5, 3.5] and hparams.lr == 0.2
    assert module.seen is of_module and keep.seen is of_callback and float(module.metric.compute()) == 1.0
    assert keep.layers == [(module.head, "weight"), (head, caller, keep)]  # its own objects
    assert (stop.stopped_epoch, float(stop.best_score), saver.best_model_path) == (7, 0.5, "some.ckpt")
    assert caller.callbacks[:3] == [keep, stop, saver] and type(caller.callbacks[-1]) is Second


class Second(L.Callback):
    pass


def pruned(module: Any) -> None:
    prune.l1_unstructured(module.head, "weight", amount=0.5)
    with torch.no_grad():
        module.head.weight_orig.add_(1.0)


def pruned_for_good(module: Any) -> None:
    pruned(module)
    prune.remove(module.head, "weight")


def normed_by_hook(module: Any) -> None:
    weight_norm(module.head)
    with torch.no_grad():
        module.head.weight_g.add_(1.0)


def parametrized(module: Any) -> None:
    parametrizations.weight_norm(module.head)
    parametrizations.orthogonal(module.last)
    with torch.no_grad():
        module.head.parametrizations.weight.original0.add_(1.0)


def grown(module: Any) -> None:
    module.head = torch.nn.Linear(FEATURES, 6)
    module.last.bias = torch.nn.Parameter(torch.ones(4))
    del module.metric


@pytest.mark.parametrize("change", [pruned, pruned_for_good, normed_by_hook, parametrized, grown])
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*")
def test_layers_that_callbacks_change_come_back(change):
    caller, module = begin()
    rows, of_rank = torch.randn(3, FEATURES), []

    def in_rank(trainer: L.Trainer, module: Any) -> None:
        change(module)
        of_rank.append(module)

    assert not returned(caller, in_rank)[1]
    with torch.no_grad():
        for name, columns in (("head", FEATURES), ("last", 4)):
            expected = getattr(of_rank[0], name)(rows[:, :columns])
            torch.testing.assert_close(getattr(module, name)(rows[:, :columns]), expected)
    module.load_state_dict(of_rank[0].state_dict())
    assert not returned(caller, lambda *_: None)[1]  # of the next call


def test_attributes_that_are_deleted_are_gone():
    """A pruned weight is an attribute, which would hide the parameter once pruning is made permanent."""
    caller, module = begin()
    returned(caller, lambda _, module: pruned(module))
    with torch.no_grad():
        module.head(torch.randn(3, FEATURES))
    assert "weight" in vars(module.head)
    returned(caller, lambda _, module: prune.remove(module.head, "weight"))
    assert "weight" not in vars(module.head) and isinstance(module.head.weight, torch.nn.Parameter)


def test_what_cannot_be_sent_is_named(monkeypatch, recwarn):
    caller, module = begin()
    keep = caller.callbacks[0]

    def change(trainer: L.Trainer, module: Any) -> None:
        keep = trainer.callbacks[0]
        keep.seen.append(1.0)
        keep.layers = [sys.stderr]
        module.seen.append(lambda: None)
        module.large = torch.zeros(1000)
        module.model.convs[0].note = threading.Lock()

    monkeypatch.setattr(changes, "MOST_BYTES", 3000)
    _, lost = returned(caller, change)
    changes.warn_of_lost(lost, "dgcl")
    assert keep.seen == [1.0] and keep.layers is None and module.seen == []
    assert lost.keys() == {"Keep.layers", "Net.seen", "Net.large", "Net.model.convs.0.note"}
    [told] = [str(each.message) for each in recwarn if "could not be sent" in str(each.message)]
    assert "Keep.layers (cannot pickle" in told and "Net.large (it is larger than" in told
    assert "strategy='dgcl'" in told


def test_weights_that_do_not_fit_are_named():
    module = torch.nn.Linear(2, 2)
    lost = _load(module, {"weight": torch.ones(2, 2), "bias": torch.ones(3), "scale": torch.ones(1)}, {})
    assert lost.keys() == {"bias", "scale"} and bool((module.weight == 1).all())
