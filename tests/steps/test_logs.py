"""What modules log, and what metrics they keep, on several ranks and on one device (gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, awkward_graph, build, campaign, quiet_trainer
from conftest import RankFailed
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch_geometric.data import Data
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MetricTracker,
    MinMetric,
    PearsonCorrCoef,
    R2Score,
    RunningMean,
    RunningSum,
    SumMetric,
)
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import ExplainedVariance
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

from lightning_gnn import DGCLStrategy, GraphDataModule


def graph_and_parts(world_size: int) -> tuple[Data, torch.Tensor]:
    """A graph in lopsided parts; of three, the last has no node of any mask, and 12 nodes."""
    graph = awkward_graph(seed=4)
    graph.y = graph.y.clamp(min=0)
    for name in ("train_mask", "val_mask", "test_mask"):
        graph[name][48:] = False
    part = torch.zeros(60, dtype=torch.long)
    part[40 if world_size == 3 else 30 :] = 1
    if world_size == 3:
        part[48:] = 2
    return graph, part


class Kept(Logger):
    """A logger that keeps what rank 0 logs."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    name = version = property(lambda self: "kept")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if ours := _ours(metrics):
            self.logged.append((step or 0, ours))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Logging(L.LightningModule):
    """Calls some of `IDIOMS` in each step, and at the end of epochs."""

    def __init__(self, idioms: tuple[str, ...], loss_weight: bool = False) -> None:
        super().__init__()
        self.model = build("sage", FEATURES, CLASSES)
        self.loss_weight = loss_weight
        self.idioms = {stage: [IDIOMS[name]() for name in idioms] for stage in ("train", "val", "test")}
        everything = (idiom for of in self.idioms.values() for idiom in of)
        self.parts = torch.nn.ModuleList(part for idiom in everything for part in idiom.parts())

    def step(self, batch: Any, stage: str) -> Any:
        mask = batch[f"{stage}_mask"]
        if self.loss_weight:
            mask = mask & (batch.y != 0)
        rows = self.model(batch.x, batch.edge_index)
        out, y = rows[mask], batch.y[mask]
        loss = F.cross_entropy(out, y, reduction="sum") / mask.sum().clamp(min=1)
        for idiom in self.idioms[stage]:
            idiom.step(self, stage, rows, out, y, mask, loss)
        return {"loss": loss, "loss_weight": mask.sum()} if self.loss_weight else loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "test")

    def end(self, stage: str) -> None:
        for idiom in self.idioms[stage]:
            idiom.end(self, stage)

    def on_train_epoch_end(self) -> None:
        self.end("train")

    def on_validation_epoch_end(self) -> None:
        self.end("val")

    def on_test_epoch_end(self) -> None:
        self.end("test")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Idiom:
    """A way of logging."""

    def parts(self) -> list[torch.nn.Module]:
        return [value for value in vars(self).values() if isinstance(value, torch.nn.Module)]

    def step(self, module: Any, stage: str, rows: Any, out: Any, y: Any, mask: Any, loss: Any) -> None:
        pass

    def end(self, module: Any, stage: str) -> None:
        pass


class Scalars(Idiom):
    """``self.log`` of numbers, in every way."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def step(self, module: Any, stage: str, rows: Any, out: Any, y: Any, mask: Any, loss: Any) -> None:
        log, right = module.log, (out.argmax(-1) == y).double()
        log(f"{stage}/plain", loss)
        log(f"{stage}/synced", loss, sync_dist=True)
        log(f"{stage}/forked", loss, True, True, True, True, sync_dist=True)
        log(f"{stage}/item", loss.item(), on_step=False, on_epoch=True)
        log(f"{stage}/one", loss, batch_size=1, sync_dist=True)
        log(f"{stage}/of_mask", right.mean(), batch_size=mask.sum(), sync_dist=True)
        log(f"{stage}/of_mask_len", right.mean(), batch_size=len(y))
        log(f"{stage}/of_rows", rows.mean(), batch_size=len(rows), sync_dist=True)
        log(f"{stage}/sum", right.sum(), reduce_fx="sum", sync_dist=True)
        log(f"{stage}/count_fx", right.sum(), reduce_fx=torch.sum)
        log(f"{stage}/nodes", float(len(rows)), reduce_fx="sum", sync_dist=True)
        log(f"{stage}/max", out.max(), reduce_fx="max", sync_dist=True)
        log(f"{stage}/min", out.min(), reduce_fx=min)
        log(f"{stage}/avg", loss, reduce_fx="AVG", sync_dist=True)
        log(f"{stage}/constant", 0.1)
        module.log_dict({f"{stage}/{k}": loss * k for k in range(6)}, sync_dist=True, on_epoch=True, on_step=False)
        self.losses.append(loss.detach())

    def end(self, module: Any, stage: str) -> None:
        mean = torch.stack(self.losses).mean()
        self.losses = []
        module.log(f"{stage}/end", mean, sync_dist=True)
        module.log(f"{stage}/end_plain", mean)


class Aggregators(Idiom):
    """Metrics that are given scalars, as in lightning-hydra-template."""

    def __init__(self) -> None:
        self.mean = MeanMetric()
        self.running, self.unchecked = RunningMean(3), MeanMetric(nan_strategy="disable")
        self.weighted, self.by_size = MeanMetric(), MeanMetric()
        self.highest, self.lowest, self.best = MaxMetric(), MinMetric(), MaxMetric()
        self.count, self.lately, self.per_row = SumMetric(), RunningSum(2), MeanMetric()
        self.acc, self.all = MulticlassAccuracy(CLASSES), CatMetric()

    def step(self, module: Any, stage: str, rows: Any, out: Any, y: Any, mask: Any, loss: Any) -> None:
        self.mean(loss)
        module.log(f"{stage}/mean", self.mean, on_step=False, on_epoch=True, prog_bar=True)
        right = out.argmax(-1) == y
        self.running(loss)
        self.weighted.update(loss, weight=mask.sum())
        self.by_size.update(loss.item(), len(y))
        self.unchecked.update(loss.detach())
        self.highest.update(loss)
        self.lowest(loss.item())
        self.all(loss)
        self.count.update(right.sum())
        self.lately.update(right.sum())
        self.per_row.update(F.cross_entropy(out, y, reduction="none"))
        self.acc(out, y)
        names = "running", "weighted", "by_size", "count", "lately", "per_row", "unchecked", "highest", "lowest"
        for name in names:
            module.log(f"{stage}/{name}", getattr(self, name), on_step=False, on_epoch=True)

    def end(self, module: Any, stage: str) -> None:
        acc = self.acc.compute()
        self.best(acc)
        module.log(f"{stage}/best_acc", self.best.compute(), sync_dist=True, prog_bar=True)
        module.log(f"{stage}/acc", acc)
        values = self.all.compute()
        module.log(f"{stage}/cat", values.mean())
        module.log(f"{stage}/cat_len", float(values.numel()))
        self.all.reset()
        self.acc.reset()


class OfRows(Idiom):
    """Metrics of rows, and wrappers of all kinds."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"num_classes": CLASSES}
        self.metrics = {
            "on_step": MulticlassF1Score(**options),
            "both": MulticlassAccuracy(average="micro", **options),
            "auroc": MulticlassAUROC(**options),
            "composed": MulticlassAccuracy(**options) + MulticlassF1Score(**options),
            "running_acc": Running(MulticlassAccuracy(**options), window=2),
            "synced": MulticlassF1Score(dist_sync_on_step=True, **options),
        }
        self.on_step = torch.nn.ModuleDict(self.metrics)
        self.collection = MetricCollection(
            {
                "top1": MulticlassAccuracy(**options),
                "top3": MulticlassAccuracy(top_k=3, **options),
                "f1": MulticlassF1Score(**options),
            }
        )
        self.shown = MetricCollection([MulticlassF1Score(**options), MulticlassAUROC(**options)], prefix="shown_")
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(average=None, **options))
        self.minmax = MinMaxMetric(MulticlassAccuracy(**options))
        self.tracker = MetricTracker(MulticlassF1Score(**options))
        self.multitask = MultitaskWrapper({"a": MulticlassAccuracy(**options), "b": MeanSquaredError()})
        self.multioutput = MultioutputWrapper(R2Score(), CLASSES)
        self.pearson, self.r2, self.explained = PearsonCorrCoef(), R2Score(), ExplainedVariance()
        self.map = RetrievalMAP()
        self.hidden = [MulticlassF1Score(**options), {"auroc": MulticlassAUROC(**options)}]
        self.f1, self.made = MulticlassF1Score(**options), MulticlassF1Score(**options)

    def step(self, module: Any, stage: str, rows: Any, out: Any, y: Any, mask: Any, loss: Any) -> None:
        log = module.log
        for name, metric in self.metrics.items():
            metric(out.softmax(-1), y)
            if name == "on_step":
                log(f"{stage}/{name}", metric, on_step=True)
            elif name == "both":
                log(f"{stage}/{name}", metric, on_step=True, on_epoch=True)
            else:
                log(f"{stage}/{name}", metric, on_step=False, on_epoch=True)
        log(f"{stage}/value", self.f1(out, y))
        log(f"{stage}/auroc_value", self.hidden[1]["auroc"](out.softmax(-1), y), on_step=True, on_epoch=True)
        self.hidden[0].update(out, y)
        module.log_dict(
            {f"{stage}/{k}": v for k, v in self.shown(out.softmax(-1), y).items()}, on_step=True, on_epoch=True
        )
        module.log_dict({f"{stage}/{k}": v for k, v in self.classwise(out, y).items()}, on_epoch=True, on_step=False)
        self.collection.update(out, y)
        module.log(f"{stage}/minmax", self.minmax(out, y)["raw"])
        if self.tracker.n_steps < 0 or not self.tracker._increment_called:
            self.tracker.increment()
        self.tracker.update(out, y)
        hot = F.one_hot(y, CLASSES).double()
        self.multitask.update({"a": out, "b": out[:, 0]}, {"a": y, "b": hot[:, 0]})
        self.multioutput.update(out, hot)
        for metric in (self.pearson, self.r2, self.explained):
            metric.update(out[:, 0].contiguous(), hot[:, 0].contiguous())
        self.map.update(out[:, 1].sigmoid(), y == 1, indexes=y // 3)
        made = MulticlassF1Score(CLASSES)  # made in the step
        made.update(out, y)
        log(f"{stage}/made", made.compute(), batch_size=1)

    def end(self, module: Any, stage: str) -> None:
        log = module.log
        module.log_dict({f"{stage}/{k}": v for k, v in self.collection.compute().items()}, sync_dist=True)
        values: dict[str, Any] = {
            "hidden": self.hidden[0],
            "hidden_auroc": self.hidden[1]["auroc"],
            "tracked": self.tracker,
            "pearson": self.pearson,
            "r2": self.r2,
            "explained": self.explained,
            "map": self.map,
        }
        for name, metric in values.items():
            log(f"{stage}/{name}", metric.compute(), sync_dist=True)
        log(f"{stage}/multioutput", self.multioutput.compute().nan_to_num(neginf=-1).mean())
        module.log_dict({f"{stage}/task_{k}": v for k, v in self.multitask.compute().items()})
        log(f"{stage}/best", float(self.tracker.best_metric()))
        for metric in (*values.values(), self.collection, self.multitask, self.multioutput, self.minmax):
            if metric is not self.tracker:
                metric.reset()
        self.tracker.increment()


class Lists(Idiom):
    """Rows that are kept in lists until the end of the epoch."""

    def __init__(self) -> None:
        self.outs: list[Any] = []
        self.f1 = MulticlassF1Score(CLASSES)

    def step(self, module: Any, stage: str, rows: Any, out: Any, y: Any, mask: Any, loss: Any) -> None:
        self.outs.append((out.detach(), y))

    def end(self, module: Any, stage: str) -> None:
        out, y = (torch.cat(each) for each in zip(*self.outs))
        module.log(f"{stage}/f1_of_list", self.f1(out, y))
        everything, labels = module.all_gather(out), module.all_gather(y)
        acc = (everything.view(-1, CLASSES).argmax(-1) == labels.view(-1)).double().mean()
        module.log(f"{stage}/gathered", acc)
        module.log(f"{stage}/reduced", module.trainer.strategy.reduce(F.cross_entropy(out, y)))
        module.log(f"{stage}/len", float(len(labels.view(-1))))
        self.outs = []


class OnRankZero(Idiom):
    """Values that rank 0 logs alone."""

    def step(self, module: Any, stage: str, rows: Any, out: Any, y: Any, mask: Any, loss: Any) -> None:
        if module.trainer.is_global_zero:
            module.log(f"{stage}/alone", 0.25, rank_zero_only=True)
        module.log(f"{stage}/beside", loss)
        if module.trainer.is_global_zero:
            module.log(f"{stage}/epoch", float(module.current_epoch), rank_zero_only=True, sync_dist=True)

    def end(self, module: Any, stage: str) -> None:
        if module.trainer.is_global_zero:
            module.log(f"{stage}/alone_at_end", 0.5, rank_zero_only=True)


IDIOMS: dict[str, Callable[[], Idiom]] = {
    "scalars": Scalars,
    "aggregators": Aggregators,
    "of_rows": OfRows,
    "lists": Lists,
    "rank_zero": OnRankZero,
}


class InCallback(L.Callback):
    """A callback with metrics of its own, which logs, too."""

    def __init__(self) -> None:
        self.f1, self.seen = MulticlassF1Score(CLASSES), [MeanMetric()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("callback/loss", outputs["loss"])
        self.log("callback/own_log", outputs["loss"], on_step=False, on_epoch=True, sync_dist=True)
        self.seen[0].to(outputs["loss"].device).update(outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("callback/mean", self.seen[0].compute())


def run(
    rank: int,
    world_size: int,
    idioms: tuple[str, ...],
    strategy: str,
    options: dict[str, Any],
    loss_weight: bool = False,
) -> Any:
    parts = options.pop("parts", world_size)
    graph, part = graph_and_parts(parts)
    data = GraphDataModule(graph, partition=part if world_size > 1 else None)
    module, logger = Logging(idioms, loss_weight).double(), Kept()
    trainer = quiet_trainer(
        strategy if strategy == "auto" else DGCLStrategy(timeout=60, self_check=False, **options),
        world_size,
        callbacks=[InCallback()],
        logger=logger,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, datamodule=data)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    [tested] = trainer.test(module, datamodule=data, verbose=False)
    return {"fit": _ours(fitted), "test": tested, "weights": module.model.state_dict(), "logged": logger.logged}


def _ours(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(("comm/", "throughput/"))}


def assert_same(found: Any, expected: Any, rank: int, only: Callable[[str], bool] = lambda name: True) -> None:
    """All values at once, so that a failure names all that differ."""
    wrong = []
    for stage in ("fit", "test"):
        ours, theirs = ({k: v for k, v in each[stage].items() if only(k)} for each in (found, expected))
        assert ours.keys() == theirs.keys()
        wrong += [
            f"{stage} {name}: {ours[name]} for {theirs[name]}"
            for name in theirs
            if ours[name] != pytest.approx(theirs[name], rel=2e-6, abs=1e-7, nan_ok=True)
        ]
    assert not wrong, "\n".join(wrong)
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-9, atol=1e-11)
    if rank == 0:
        assert len(found["logged"]) == len(expected["logged"])
        for (step, ours), (step_there, theirs) in zip(found["logged"], expected["logged"]):
            assert step == step_there and ours.keys() == theirs.keys()
            for name in filter(only, theirs):
                assert ours[name] == pytest.approx(theirs[name], rel=2e-6, abs=1e-7, nan_ok=True), f"{name} in a log"


@pytest.mark.parametrize("world_size", [2, *campaign(3)])
@pytest.mark.parametrize("idiom", ["scalars", "aggregators", "of_rows", "lists"])
def test_values_of_one_device(ranks, idiom, world_size):
    expected = run(0, 1, (idiom,), "auto", {"parts": world_size})
    for rank, found in enumerate(ranks.run(world_size, run, (idiom,), "dgcl", {})):
        assert_same(found, expected, rank)


def test_values_that_rank_zero_logs_alone(ranks):
    expected = run(0, 1, ("rank_zero",), "auto", {})
    first, second = ranks.run(2, run, ("rank_zero",), "dgcl", {})
    assert_same(first, expected, 0)
    assert "val/alone" in first["fit"] and "val/alone" not in second["fit"]
    assert_same({**second, **{k: {**expected[k], **second[k]} for k in ("fit", "test")}}, expected, 1)


@pytest.mark.parametrize("world_size", [2, *campaign(3)])
def test_a_loss_over_other_rows_than_the_mask_s(ranks, world_size):
    """The loss_weight that the step returns changes nothing."""
    options = {"parts": world_size}
    expected = run(0, 1, ("scalars", "aggregators"), "auto", options, True)
    for rank, found in enumerate(ranks.run(world_size, run, ("scalars", "aggregators"), "dgcl", {}, True)):
        assert_same(found, expected, rank)


class Summed(Logging):
    """A loss that is a sum."""

    def step(self, batch: Any, stage: str) -> Any:
        mask = batch[f"{stage}_mask"]
        loss = 0.01 * F.cross_entropy(self.model(batch.x, batch.edge_index)[mask], batch.y[mask], reduction="sum")
        self.log(f"{stage}/loss", loss, reduce_fx="mean" if stage == "train" else "sum")
        return loss


class Monitored(Logging):
    """What callbacks and schedulers look at is a ``MeanMetric``, a metric on a step, or a value in a hook."""

    def __init__(self, monitor: str) -> None:
        super().__init__(("aggregators", "of_rows"))
        self.monitor = monitor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}


def decided(rank: int, world_size: int, parts: int, monitor: str, folder: str, strategy: str) -> Any:
    graph, part = graph_and_parts(parts)
    module = Monitored(monitor).double()
    stopping, saver = EarlyStopping(monitor, patience=2), ModelCheckpoint(folder, monitor=monitor)
    trainer = quiet_trainer(
        strategy if strategy == "auto" else DGCLStrategy(timeout=60, self_check=False),
        world_size,
        callbacks=[stopping, saver],
        max_epochs=12,
        enable_checkpointing=True,
    )
    trainer.fit(module, datamodule=GraphDataModule(graph, partition=part if world_size > 1 else None))
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    best = saver.best_model_path.rpartition("/")[2].partition("-v")[0]
    return trainer.current_epoch, lr, best, float(stopping.best_score)


@pytest.mark.parametrize("monitor", [*campaign("val/mean", "val/value", "val/top1"), "train/on_step"])
def test_callbacks_and_schedulers_decide_alike(ranks, monitor, tmp_path):
    *expected, score = decided(0, 1, 3, monitor, str(tmp_path / "one"), "auto")
    for *found, best in ranks.run(3, decided, 3, monitor, str(tmp_path / "three"), "dgcl"):
        assert found == expected and best == pytest.approx(score, rel=2e-6)


def summed(rank: int, world_size: int, parts: int, strategy: str) -> Any:
    graph, part = graph_and_parts(parts)
    module = Summed(()).double()
    chosen: Any = strategy
    if strategy != "auto":
        chosen = DGCLStrategy(timeout=60, self_check=False)
    trainer = quiet_trainer(chosen, world_size)
    trainer.fit(module, datamodule=GraphDataModule(graph, partition=part if world_size > 1 else None))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"fit": _ours(values), "test": {}, "weights": module.state_dict(), "logged": []}


def test_a_loss_that_is_a_sum(ranks):
    expected = summed(0, 1, 3, "auto")
    for found in ranks.run(3, summed, 3, "dgcl"):
        assert_same(found, expected, 1)


# Refused ######################################################################


class Odd(Logging):
    """What cannot be told, or is not the same on all ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__(())
        self.kind, self.highest = kind, MaxMetric()
        if kind == "bootstrap":
            self.boot = BootStrapper(MulticlassAccuracy(CLASSES), sampling_strategy="multinomial")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch, "train")
        if self.kind == "some ranks":
            self.log("all", loss)
            if self.trainer.is_global_zero:
                self.log("first", loss)
        if self.kind == "group":
            self.log("grouped", loss, sync_dist=True, sync_dist_group=torch.distributed.group.WORLD)
        if self.kind == "early":
            self.highest.update(loss)
            self.log("highest", self.highest)
            return {"loss": loss, "loss_weight": len(batch.x)}
        if self.kind == "mixed":  # rank 2 has rows of the second mask only
            chosen = batch.train_mask | (batch.x[:, 0] > 1)
            out = self.model(batch.x, batch.edge_index)[chosen]
            return F.cross_entropy(out, batch.y[chosen])
        return loss


def fit_odd(rank: int, world_size: int, kind: str, strategy: str = "dgcl") -> Any:
    graph, part = graph_and_parts(3)
    module = Odd(kind).double()
    chosen: Any = DGCLStrategy(timeout=30, self_check=False) if strategy == "dgcl" else strategy
    trainer = quiet_trainer(chosen, world_size)
    trainer.fit(module, datamodule=GraphDataModule(graph, partition=part if world_size > 1 else None))
    return module.state_dict()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("some ranks", "Ranks log different values (rank 0: 'all', 'first'; rank 1: 'all'; rank 2: 'all')"),
        ("group", "self.log('grouped', ..., sync_dist_group=...)"),
        ("bootstrap", "sampling_strategy='poisson'"),
    ],
)
def test_refused_by_name(ranks, kind, words):
    with pytest.raises(RankFailed) as caught:
        ranks.run(3, fit_odd, kind)
    errors = caught.value.errors.values()
    assert all(line.startswith("ValueError") and words in line for line in errors), errors


@pytest.mark.parametrize("kind", ["mixed", "early"])
def test_masks_may_be_joined_and_metrics_given_the_loss(ranks, kind):
    expected = fit_odd(0, 1, kind, "auto")
    for found in ranks.run(3, fit_odd, kind):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
