"""Steps that ranks cannot compute from their own rows alone are exact. No ranks."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, UserModule, awkward_graph, build, campaign
from test_self_check import Model, any_trainer, shard, verdict
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

from lightning_gnn import gather_nodes, global_num_nodes
from lightning_gnn.checks.self_check import SelfCheck, self_check
from lightning_gnn.checks.small_graph import FORM, small_graph
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import split_graph
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.scheme import bind_module

BIND = partial(bind_module, DGCLScheme(), meter=Meter())


def part_of(seed: int, num_nodes: int = 400) -> Data:
    """Half of a graph with five classes, a mask of two fifths of its nodes, and an attribute that one node in 20 has not."""
    g = torch.Generator().manual_seed(seed)
    graph = awkward_graph(num_nodes, seed)
    graph.y[4] = -1
    graph.keep = torch.rand(num_nodes, generator=g) > 0.05
    return split_graph(prepare_graph(graph), np.arange(num_nodes) % 2, LayoutSpec("edge_cut", 2))[0].batch


def check(module: Any, stage: str = "fit", batch: Data | None = None, **options: Any) -> SelfCheck:
    return self_check(module, shard().batch if batch is None else batch, BIND, stage, **options)


# Small graphs #################################################################


@pytest.mark.parametrize("seed", range(5))
def test_small_graphs_are_lopsided_and_have_every_class_on_both_sides(seed):
    batch = part_of(seed)
    small = small_graph(batch, ["train_mask"], FORM, seed)
    graph, part = small.graph, torch.from_numpy(small.part)
    labelled = graph.train_mask & (graph.y >= 0)
    assert tuple(torch.bincount(part).tolist()) == FORM.nodes
    assert tuple(torch.bincount(part[graph.edge_index[1]]).tolist()) == FORM.edges
    assert tuple(int((labelled & (part == rank)).sum()) for rank in (0, 1)) == FORM.num_labeled
    assert not (graph.edge_index[0] == graph.edge_index[1]).any() and small.holders.any()
    for rank in (0, 1):
        assert len(graph.y[labelled & (part == rank)].unique()) == CLASSES
    assert (graph.y == -1).any()


# Losses over other rows #######################################################


class OverSome(UserModule):
    """A mean over some rows, or more than there are, and no word of it."""

    def __init__(self, rows: str) -> None:
        super().__init__(build("gcn"))
        self.rows = rows

    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)
        chosen = batch.train_mask & (batch.y >= 0)
        if self.rows == "without a class":
            chosen &= batch.y != 2
        elif self.rows == "of most ids":
            chosen &= batch.n_id % 20 != 0
        elif self.rows == "of an attribute":
            chosen &= batch.keep
        elif self.rows == "and pseudo-labels":
            sure = ~batch.train_mask & (out.softmax(-1).amax(-1) > 0.3)
            return F.cross_entropy(out[chosen | sure], torch.where(sure, out.argmax(-1), batch.y)[chosen | sure])
        return F.cross_entropy(out[chosen], batch.y[chosen])


@pytest.mark.parametrize("rows", ["without a class", "of an attribute", "of most ids", "and pseudo-labels"])
def test_losses_over_other_rows_are_exact(rows):
    for seed in range(3):
        assert verdict(check(OverSome(rows), batch=part_of(seed))) == (None, None, None)


class ClassWeights(UserModule):
    def training_step(self, batch, batch_idx):
        out, weight = self.model(batch.x, batch.edge_index), torch.arange(1.0, CLASSES + 1).to(batch.x.dtype)
        rows = batch.train_mask & (batch.y >= 0)
        return F.cross_entropy(out[rows], batch.y[rows], weight=weight)


class TwoMeans(UserModule):
    """Cross-entropy over the mask, and a divergence over all nodes."""

    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index).log_softmax(-1)
        apart = F.kl_div(out, out.detach().roll(1, -1), log_target=True, reduction="none").sum(-1)
        rows = batch.train_mask & (batch.y >= 0)
        return F.nll_loss(out[rows], batch.y[rows]) + apart.mean()


class HalfHinge(UserModule):
    """Rows that are right have no gradient."""

    def training_step(self, batch, batch_idx):
        out, rows = self.model(batch.x, batch.edge_index), batch.train_mask & (batch.y >= 0)
        return F.multi_margin_loss(out[rows], batch.y[rows], margin=0.01)


@pytest.mark.parametrize("kind", [ClassWeights, TwoMeans, HalfHinge])
def test_weights_and_several_means_are_exact(kind):
    assert verdict(check(kind(build("gcn")))) == (None, None, None)


# Logged values ################################################################


class Logs(UserModule):
    """Logs something in a step, or in the hook at its epoch's end."""

    def __init__(self, what: str, stage: str = "val") -> None:
        super().__init__(build("gcn"))
        self.what, self.stage = what, stage
        self.f1, self.auroc = MulticlassF1Score(CLASSES, average="macro"), MulticlassAUROC(CLASSES)
        self.outputs: list[Any] = []
        self.best = 0.0

    def _log(self, batch: Any, mask: Tensor) -> None:
        out = self.model(batch.x, batch.edge_index)
        rows = mask & (batch.y >= 0)
        out, y = out[rows], batch.y[rows]
        values = {
            "loss": lambda: F.cross_entropy(out, y),
            "acc": lambda: (out.argmax(-1) == y).float().mean(),
            "f1": lambda: multiclass_f1_score(out, y, CLASSES, average="macro"),
            "auroc": lambda: multiclass_auroc(out, y, CLASSES),
            "count": lambda: float(len(y)),
            "norm": lambda: out.norm(),
            "largest": lambda: out.max(),
            "all_nodes": lambda: batch.x.mean(),
            "constant": lambda: 3.0,
            "lr": lambda: 0.1,
        }
        if self.what in values:
            self.log(self.what, values[self.what]())
        elif self.what == "count as a sum":
            self.log("count", float(len(y)), reduce_fx="sum")
        elif self.what == "largest as max":
            self.log("largest", out.max(), reduce_fx="max")
        elif self.what == "rank zero's":
            self.log("loss", F.cross_entropy(out, y), rank_zero_only=True)
        elif self.what == "f1 as a metric":
            self.f1(out, y)
            self.auroc.update(out, y)
            self.log_dict({"f1": self.f1, "auroc": self.auroc})
        elif self.what == "f1 of a metric's call":
            self.log("f1", self.f1(out, y))
        elif self.what == "best":
            self.best = max(self.best, float(self.f1(out, y)))
        else:
            self.outputs.append((out.detach(), y))

    def _end(self, name: str) -> None:
        if self.outputs:
            out, y = (torch.cat(each) for each in zip(*self.outputs))
            self.log(name, multiclass_f1_score(out, y, CLASSES, average="macro"))
            self.outputs.clear()

    def training_step(self, batch, batch_idx):
        if self.stage == "train":
            self._log(batch, batch.train_mask)
        return F.cross_entropy(
            self.model(batch.x, batch.edge_index)[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1
        )

    def validation_step(self, batch, batch_idx):
        self._log(batch, batch.val_mask)

    def test_step(self, batch, batch_idx):
        self._log(batch, batch.test_mask)

    def on_train_epoch_end(self):
        self._end("train_f1")

    def on_validation_epoch_end(self):
        self._end("val_f1")

    def on_test_epoch_end(self):
        self._end("test_f1")


RIGHT = (
    "f1",
    "auroc",
    "count",
    "norm",
    "largest",
    "all_nodes",
    "rank zero's",
    "f1 of a list",
    "loss",
    "acc",
    "constant",
    "lr",
    "count as a sum",
    "largest as max",
    "f1 as a metric",
    "f1 of a metric's call",
    "best",
)
STAGE_OF = {"fit": "train", "validate": "val", "test": "test"}


@pytest.mark.parametrize("stage", ["fit", *campaign("validate", "test")])
@pytest.mark.parametrize("what", RIGHT)
def test_values_of_the_whole_graph_pass(what, stage):
    assert verdict(check(Logs(what, STAGE_OF[stage]), stage, part_of(1), trainer=any_trainer())) == (None, None, None)


class Gathers(UserModule):
    """The mean of what all ranks have, as DDP users write it, in a step or given to the logger."""

    def __init__(self, how: str) -> None:
        super().__init__(build("gcn"))
        self.how = how

    def validation_step(self, batch, batch_idx):
        rows = batch.val_mask & (batch.y >= 0)
        loss = F.cross_entropy(self.model(batch.x, batch.edge_index)[rows], batch.y[rows])
        if self.how == "all_gather":
            self.log("loss", self.all_gather(loss).mean())
        elif self.how == "reduce":
            self.log("loss", self.trainer.strategy.reduce(loss))
        elif self.how == "logger":
            self.logger.log_metrics({"loss": float(loss)})
        elif self.how == "experiment":
            self.logger.experiment.add_scalar("loss", loss, 0)
        elif self.how == "settings":
            self.trainer.strategy.barrier()
            self.logger.log_metrics({"rate": 0.1, "steps": self.trainer.estimated_stepping_batches})


@pytest.mark.parametrize("how", ["all_gather", "logger", "experiment", "reduce", "settings"])
def test_what_is_gathered_or_given_to_the_logger(how):
    assert verdict(check(Gathers(how), "validate", part_of(3), trainer=any_trainer())) == (None, None, None)


class ByHand(UserModule):
    """Manual optimisation that reads gradients and writes weights."""

    def __init__(self, how: str) -> None:
        super().__init__(build("gcn"))
        self.how, self.automatic_optimization = how, False

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def _loss(self, batch):
        rows = batch.train_mask & (batch.y >= 0)
        return F.cross_entropy(self.model(batch.x, batch.edge_index)[rows], batch.y[rows])

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if self.how == "by itself":
            self._loss(batch).backward()
            return
        self.manual_backward(self._loss(batch))
        gradients = [parameter.grad.clone() for parameter in self.parameters()]
        if self.how == "sharpness":
            length = torch.stack([gradient.norm() for gradient in gradients]).norm()
            with torch.no_grad():
                for parameter, gradient in zip(self.parameters(), gradients):
                    parameter.add_(0.05 * gradient / length)
        optimizer.zero_grad()
        self.manual_backward(self._loss(batch) / torch.stack([gradient.norm() for gradient in gradients]).norm())
        optimizer.step()
        self.lr_schedulers().step()


@pytest.mark.parametrize("how", ["sharpness", "balanced"])
def test_manual_optimisation_may_read_gradients_and_write_weights(how):
    assert verdict(check(ByHand(how), batch=part_of(0), trainer=any_trainer())) == (None, None, None)


def test_a_backward_past_lightning_is_named():
    found = check(ByHand("by itself"), batch=part_of(0), trainer=any_trainer())
    assert re.search(
        r"test_lopsided_checks.py:\d+: loss.backward\(\) .* Call self.manual_backward", str(found.refused)
    ), found


class Interrupts(UserModule):
    def on_train_epoch_start(self):
        raise KeyboardInterrupt


def test_a_hook_that_interrupts_is_left_out():
    assert verdict(check(Interrupts(build("gcn")), trainer=any_trainer())) == (None, None, None)


class ResetsAnEpochsWeights(UserModule):
    """Draws outside steps, which all ranks share in training."""

    def __init__(self) -> None:
        super().__init__(build("gcn"))
        self.head = torch.nn.Linear(CLASSES, CLASSES)

    def on_train_epoch_start(self):
        self.head.reset_parameters()
        self.rate = torch.rand(())

    def training_step(self, batch, batch_idx):
        rows = batch.train_mask & (batch.y >= 0)
        return F.cross_entropy(self.head(self.model(batch.x, batch.edge_index) * self.rate)[rows], batch.y[rows])


def test_hooks_of_epochs_draw_the_same_on_all_ranks():
    assert verdict(check(ResetsAnEpochsWeights(), batch=part_of(0), trainer=any_trainer())) == (None, None, None)


class WritesWeights(UserModule):
    """In hooks, in place: once for each model, of which ranks have one each."""

    def __init__(self) -> None:
        super().__init__(build("gcn"))

    def _halve(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)

    on_train_start = on_validation_epoch_start = _halve

    def validation_step(self, batch, batch_idx):
        rows = batch.val_mask & (batch.y >= 0)
        self.log("loss", F.cross_entropy(self.model(batch.x, batch.edge_index)[rows], batch.y[rows]))


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_hooks_may_write_weights(stage):
    assert verdict(check(WritesWeights(), stage, part_of(0), trainer=any_trainer())) == (None, None, None)


class MixesWhere(UserModule):
    """Mixes nodes in one stage only, which it asks its Trainer for."""

    def __init__(self, stage: str) -> None:
        super().__init__(build("gcn"))
        self.stage = stage

    def forward(self, batch):
        x = batch.x - batch.x.mean(0) if getattr(self.trainer, self.stage) else batch.x
        return self.model(x, batch.edge_index)

    def training_step(self, batch, batch_idx):
        rows = batch.train_mask & (batch.y >= 0)
        return F.cross_entropy(self(batch)[rows], batch.y[rows])

    def validation_step(self, batch, batch_idx):
        self.log("mean", self(batch)[batch.val_mask & (batch.y >= 0)].mean())

    def test_step(self, batch, batch_idx):
        self.log("mean", self(batch)[batch.test_mask & (batch.y >= 0)].mean())

    def predict_step(self, batch, batch_idx):
        return self(batch)


@pytest.mark.parametrize("mixes", ["training", "validating", "testing", "predicting"])
def test_a_step_may_ask_which_stage_it_is_in(mixes):
    stages = {"training": "fit", "validating": "validate", "testing": "test", "predicting": "predict"}
    for name, stage in stages.items():
        assert verdict(check(MixesWhere(mixes), stage, part_of(0), trainer=any_trainer())) == (None, None, None), name


class Remembers(UserModule):
    """Its metric is of several epochs."""

    def __init__(self) -> None:
        super().__init__(build("gcn"))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        rows = batch.train_mask & (batch.y >= 0)
        out = self.model(batch.x, batch.edge_index)[rows]
        self.accuracy.update(out, batch.y[rows])
        return F.cross_entropy(out, batch.y[rows])

    def on_train_epoch_end(self):
        self.log("accuracy", self.accuracy.compute())


def test_metrics_have_seen_nothing_in_the_check():
    module = Remembers()
    module.accuracy.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]))
    assert verdict(check(module, batch=part_of(0), trainer=any_trainer())) == (None, None, None)
    assert module.accuracy.compute() == pytest.approx(2 / 3)


class LogsAClock(UserModule):
    """Nothing that is another number in each run, nor what a hook raises that finds no Trainer, is held against a module."""

    clock: random.Random

    def on_train_epoch_start(self):
        raise RuntimeError("no such value yet")

    def training_step(self, batch, batch_idx):
        self.log("random", self.clock.random())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("missing", self.trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("seed", [2, 13])  # with these, runs of one device differ less than those of ranks
def test_what_differs_from_run_to_run_is_not_compared(seed, monkeypatch):
    monkeypatch.setattr(LogsAClock, "clock", random.Random(seed), raising=False)
    assert verdict(check(LogsAClock(build("gcn")), trainer=any_trainer())) == (None, None, None)


class Ties(UserModule):
    """Of nodes without edges and features, all scores are one number, up to rounding."""

    def validation_step(self, batch, batch_idx):
        out = self.model(batch.x * 0 + 1, batch.edge_index)
        rows = batch.val_mask & (batch.y >= 0)
        self.auroc.update(out[rows], batch.y[rows])
        self.log("auroc", self.auroc)

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.auroc = MulticlassAUROC(CLASSES)


def test_ties_are_no_difference():
    assert verdict(check(Ties(build("gcn")), "validate", part_of(2))) == (None, None, None)


# Draws ########################################################################


class Drops(Model):
    """A layer is left out now and then."""

    how = "torch"

    def between(self, x, edge_index):
        drawn = {
            "torch": lambda: torch.rand(1),
            "python": lambda: random.random(),
            "numpy": lambda: np.random.rand(),  # noqa: NPY002
            "generator": lambda: torch.rand(1, generator=GENERATOR),
            "seeded": lambda: (torch.manual_seed(3), torch.rand(1))[1],
            "beta": lambda: torch.distributions.Beta(2.0, 2.0).sample(),
        }[self.how]()
        return x if drawn < 0.5 else x.tanh()


GENERATOR = torch.Generator().manual_seed(5)


class NoisyWeights(Model):
    def between(self, x, edge_index):
        weight = self.second.lin.weight
        return x @ (torch.eye(8).to(x) + 0.1 * torch.randn(8, 8).to(x)) + 0 * weight.sum()


class MasksColumns(Model):
    def between(self, x, edge_index):
        return x * (torch.rand(x.size(1)) > 0.2)


class Unused(Model):
    def between(self, x, edge_index):
        return x.tanh() if torch.rand(1) < 0 else x


class Shuffled(Model):
    def between(self, x, edge_index):
        return x + 0.1 * x[torch.randperm(x.size(0))]


class Chosen(Model):
    def between(self, x, edge_index):
        return x + 0.1 * x[torch.randint(0, x.size(0), (1,))]


class PerRow(Model):
    """One number per node, edge or labelled node, by whatever function."""

    def between(self, x, edge_index):
        x = x + torch.randint(0, 3, (x.size(0), 1)) + torch.normal(0.0, 1.0, (x.size(0), 8))
        x = x * F.gumbel_softmax(x, hard=True) + torch.empty_like(x).exponential_()
        return x + torch.multinomial(x.detach().softmax(-1), 1) + torch.rand(2, x.size(0)).t().sum(1, keepdim=True)


class OfAllNodes(Model):
    """An order, and noise, of all nodes of the graph, the same on all ranks."""

    step = 0
    n_id: Tensor

    def between(self, x, edge_index):
        g = torch.Generator().manual_seed(self.step)
        order, noise = torch.randperm(global_num_nodes(x), generator=g), torch.rand(global_num_nodes(x), generator=g)
        return gather_nodes(x, order[self.n_id]) + noise[self.n_id].view(-1, 1)


class WithIds(UserModule):
    def training_step(self, batch, batch_idx):
        self.model.n_id = batch.n_id
        return super().training_step(batch, batch_idx)


class LabelsIn(UserModule):
    """Label tricks: some training nodes are told their labels, the loss is over the others."""

    def training_step(self, batch, batch_idx):
        rows = (batch.train_mask & (batch.y >= 0)).nonzero().view(-1)
        told = torch.rand(len(rows)) < 0.5
        x = batch.x.clone()
        x[rows[told], 0] = x[rows[told], 0] + 1.0 + batch.y[rows[told]]
        out, left = self.model(x, batch.edge_index), rows[~told]
        return {"loss": F.cross_entropy(out[left], batch.y[left]), "loss_weight": len(left)}


def module_of(kind: type[Model], how: str = "torch") -> UserModule:
    torch.manual_seed(0)
    module = UserModule(kind())
    module.model.how = how  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("kind", "how"),
    [(Drops, "torch"), (Drops, "beta"), (NoisyWeights, ""), (MasksColumns, ""), (Shuffled, ""), (Chosen, "")],
)
def test_draws_that_all_nodes_share_are_the_same_on_all_ranks(kind, how):
    assert verdict(check(module_of(kind, how))) == (None, None, None)


@pytest.mark.parametrize("how", ["python", "numpy", "generator", "seeded"])
def test_draws_that_ranks_share_pass(how):
    before = GENERATOR.get_state()
    for seed in range(4):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        assert verdict(check(module_of(Drops, how))) == (None, None, None)
    assert torch.equal(GENERATOR.get_state(), before)


def test_draws_per_row_and_those_that_change_nothing_pass():
    assert verdict(check(module_of(PerRow))) == (None, None, None)
    assert verdict(check(module_of(Unused))) == (None, None, None)
    assert verdict(check(WithIds(OfAllNodes()))) == (None, None, None)
    assert verdict(check(LabelsIn(build("gcn")), batch=part_of(0))) == (None, None, None)


class ComputesAgain(UserModule):
    """A checkpoint that goes on behind a module, which therefore returns twice."""

    def __init__(self) -> None:
        super().__init__(build("gcn"))
        self.head = torch.nn.Linear(CLASSES, CLASSES)

    def training_step(self, batch, batch_idx):
        out, rows = self.model(batch.x, batch.edge_index), batch.train_mask & (batch.y >= 0)
        out = checkpoint(lambda x: self.head(x).relu(), out, use_reentrant=False)
        return F.cross_entropy(out[rows], batch.y[rows])


class KeepsTheLoss(UserModule):
    """A hook reads what another one has kept."""

    def __init__(self) -> None:
        super().__init__(build("gcn"))

    def on_before_backward(self, loss):
        self.kept = loss.detach() * 2

    def on_after_backward(self):
        first = next(self.parameters())
        first.grad.mul_(0.5)
        self.log("kept", self.kept)


class WritesWeightsAfterwards(UserModule):
    """A rank writes its own weights while another is in its backward."""

    def __init__(self) -> None:
        super().__init__(build("gcn"))

    def on_train_epoch_end(self):
        first = next(self.parameters())
        first.data.mul_(0.9)
        self.log("norm", first.norm())


@pytest.mark.parametrize("kind", [ComputesAgain, KeepsTheLoss, WritesWeightsAfterwards])
def test_what_runs_around_a_backward_is_no_difference(kind):
    assert verdict(check(kind(), batch=part_of(0), trainer=any_trainer())) == (None, None, None)
