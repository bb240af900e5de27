"""torchmetrics as its docs use it in a LightningModule: every wrapper, aggregations of losses, list states, functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics.functional as tmf
from torch import Tensor
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMetric,
    RunningMean,
    RunningSum,
    SumMetric,
)
from torchmetrics import wrappers as tmw
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
    MulticlassCohenKappa,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassMatthewsCorrCoef,
    MulticlassPrecision,
    MulticlassPrecisionRecallCurve,
    MulticlassRecall,
    MulticlassROC,
    MulticlassStatScores,
)
from torchmetrics.regression import (
    ExplainedVariance,
    MeanAbsoluteError,
    MeanSquaredError,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.utilities.compute import auc

from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.plain import Net, idiom


class Scored(Net):
    """Hands outputs and labels of each stage to :meth:`score`, which an idiom writes."""

    def score(self, out: Tensor, y: Tensor, stage: str) -> None:
        raise NotImplementedError

    def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
        out = self(batch.x, batch.edge_index)[mask]
        self.score(out.detach(), batch.y[mask], stage)
        return F.cross_entropy(out, batch.y[mask])


def _logged(make: Callable[[], Any], prepare: Callable[[Tensor, Tensor], tuple[Any, Any]] | None = None) -> Case:
    """A metric for each stage, updated and logged as an object."""

    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = torch.nn.ModuleDict({f"{stage}_": make() for stage in ("train", "val", "test")})

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            metric: Any = self.metrics[f"{stage}_"]
            metric.update(*(out, y) if prepare is None else prepare(out, y))
            if isinstance(metric, MetricCollection):
                self.log_dict(metric, on_step=False, on_epoch=True)
            else:
                self.log(f"{stage}_metric", metric, on_step=False, on_epoch=True)

    return Case(Module(), graph())


def _computed(make: Callable[[], Any], value: Callable[[Any], Any], prepare: Any = None) -> Case:
    """A metric whose result is no scalar, computed in the hook at the end of the epoch; `value` makes a dict of it."""

    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.val_metric, self.test_metric = make(), make()

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage != "train":
                getattr(self, f"{stage}_metric").update(*(out, y) if prepare is None else prepare(out, y))

        def on_validation_epoch_end(self) -> None:
            self.log_dict(value(self.val_metric.compute()))
            self.val_metric.reset()

        def on_test_epoch_end(self) -> None:
            self.log_dict(value(self.test_metric.compute()))
            self.test_metric.reset()

    return Case(Module(), graph())


FIT = ("fit", "test")


# Collections and wrappers #####################################################


@idiom(
    source="torchmetrics docs: MetricCollection in a LightningModule, clone(prefix), log_dict(collection)", stages=FIT
)
def collection_of_metrics() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            metrics = MetricCollection(
                [
                    MulticlassAccuracy(CLASSES),
                    MulticlassPrecision(CLASSES),
                    MulticlassRecall(CLASSES),
                    MulticlassAUROC(CLASSES),
                ]
            )
            self.train_metrics = metrics.clone(prefix="train_")
            self.val_metrics = metrics.clone(prefix="val_")
            self.test_metrics = metrics.clone(prefix="test_", postfix="_at_last")

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            metrics = getattr(self, f"{stage}_metrics")
            metrics.update(out, y)
            self.log_dict(metrics)

    return Case(Module(), graph())


@idiom(
    source="torchmetrics docs: output = self.train_metrics(y_hat, y); self.log_dict(output), values of a batch",
    stages=FIT,
)
def collection_called_and_its_output_logged() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = MetricCollection({"f1": MulticlassF1Score(CLASSES), "acc": MulticlassAccuracy(CLASSES)})

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            self.log_dict({f"{stage}_{name}": value for name, value in self.metrics(out, y).items()})

    return Case(Module(), graph())


@idiom(
    source="torchmetrics docs: MetricTracker of a collection over epochs, best_metric",
    stages=("fit",),
)
def tracker_over_epochs() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            metrics = MetricCollection([MulticlassF1Score(CLASSES), MulticlassAccuracy(CLASSES)])
            self.tracker = MetricTracker(metrics, maximize=[True, True])

        def on_validation_epoch_start(self) -> None:
            self.tracker.increment()

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "val":
                self.tracker.update(out, y)

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.tracker.compute())
            if self.tracker.n_steps > 1:
                best, epoch = self.tracker.best_metric(return_step=True)
                self.log("best_f1", best["MulticlassF1Score"])
                self.log("best_epoch", float(epoch["MulticlassF1Score"]))

    return Case(Module(), graph())


@idiom(source="torchmetrics docs: MinMaxMetric", stages=FIT)
def least_and_largest_value() -> Case:
    def make() -> Any:
        return tmw.MinMaxMetric(MulticlassAccuracy(CLASSES))

    return _computed(make, lambda found: {f"acc_{name}": value for name, value in found.items()})


@idiom(source="torchmetrics docs: ClasswiseWrapper in a collection", stages=FIT)
def values_by_class() -> Case:
    names = [f"class{i}" for i in range(CLASSES)]
    return _computed(
        lambda: MetricCollection(tmw.ClasswiseWrapper(MulticlassRecall(CLASSES, average=None), names)), dict
    )


@idiom(source="torchmetrics docs: BootStrapper, mean and deviation of resampled accuracies", stages=("fit",))
def bootstrapped_accuracy() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.boot = tmw.BootStrapper(MulticlassAccuracy(CLASSES, average="micro"), num_bootstraps=40)
            self.acc = MulticlassAccuracy(CLASSES, average="micro")

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "val":
                self.boot.update(out, y)
                self.acc.update(out, y)

        def on_validation_epoch_end(self) -> None:
            found = self.boot.compute()
            # Drawn at random: only that it is about the accuracy is the same.
            self.log("near", float(abs(found["mean"] - self.acc.compute()) < 3 * found["std"] + 1e-3))
            self.boot.reset()
            self.acc.reset()

    return Case(Module(), graph())


@idiom(source="torchmetrics docs: MultioutputWrapper(R2Score)", stages=FIT)
def several_outputs() -> Case:
    return _computed(
        lambda: tmw.MultioutputWrapper(R2Score(), CLASSES),
        lambda found: {f"r2_{i}": value for i, value in enumerate(found)},
        lambda out, y: (out, F.one_hot(y, CLASSES).to(out.dtype)),
    )


@idiom(source="torchmetrics docs: MultitaskWrapper with a dict of predictions", stages=FIT)
def several_tasks_of_a_wrapper() -> Case:
    def prepare(out: Tensor, y: Tensor) -> tuple[Any, Any]:
        return {"class": out, "size": out.sum(-1)}, {"class": y, "size": y.to(out.dtype)}

    def make() -> Any:
        return tmw.MultitaskWrapper({"class": MulticlassF1Score(CLASSES), "size": MeanSquaredError()})

    return _computed(make, dict, prepare)


@idiom(source="torchmetrics docs: Running(metric, window)", stages=("fit",))
def running_window() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.running = tmw.Running(MeanSquaredError(), window=2)

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "train":
                self.running.update(out.argmax(-1).to(out.dtype), y.to(out.dtype))

        def on_train_epoch_end(self) -> None:
            self.log("running_error", self.running.compute())

    return Case(Module(), graph())


@idiom(source="torchmetrics docs: metric arithmetic, 1 - acc and a weighted sum of two", stages=FIT)
def composed_metrics() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.error = 1 - MulticlassAccuracy(CLASSES)
            self.mixed = 0.5 * MulticlassF1Score(CLASSES) + 0.5 * MulticlassRecall(CLASSES)

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "val":
                self.error.update(out, y)
                self.mixed.update(out, y)

        def on_validation_epoch_end(self) -> None:
            self.log_dict({"val_error": self.error.compute(), "val_mixed": self.mixed.compute()})
            self.error.reset()
            self.mixed.reset()

    return Case(Module(), graph())


@idiom(source="torchmetrics docs: LambdaInputTransformer and BinaryTargetTransformer", stages=FIT)
def transformed_inputs() -> Case:
    def make() -> Any:
        return tmw.LambdaInputTransformer(MulticlassAccuracy(CLASSES), lambda preds: preds.flip(-1))

    return _computed(make, lambda found: {"flipped": found})


# Aggregations of losses #######################################################


@idiom(source="lightning-hydra-template: MeanMetric of the loss", stages=FIT)
def mean_metric_of_the_loss() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.losses = torch.nn.ModuleDict({f"of_{stage}": MeanMetric() for stage in ("train", "val", "test")})

        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            loss = super().shared_step(batch, mask, stage)
            metric = self.losses[f"of_{stage}"]
            metric(loss)
            self.log(f"{stage}/loss", metric, on_step=False, on_epoch=True, prog_bar=True)
            return loss

    return Case(Module(), graph())


@idiom(source="torchmetrics docs: MeanMetric with the batch's size as weight", stages=FIT)
def mean_metric_with_weights() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.shared_step(batch, batch.val_mask, "val")
            self.mean.update(loss, weight=batch.val_mask.sum())

        def on_validation_epoch_end(self) -> None:
            self.log("val_mean", self.mean.compute())
            self.mean.reset()

    return Case(Module(), graph())


@idiom(
    source="torchmetrics docs: Sum, Min, Max, RunningMean and RunningSum of the loss",
    stages=("fit",),
)
def aggregations_of_the_loss() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.found = torch.nn.ModuleDict(
                {
                    "sum": SumMetric(),
                    "min": MinMetric(),
                    "max": MaxMetric(),
                    "running_mean": RunningMean(window=2),
                    "running_sum": RunningSum(window=2),
                }
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            for metric in self.found.values():
                metric.update(loss)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log_dict({f"loss_{name}": metric.compute() for name, metric in self.found.items()})

    return Case(Module(), graph())


@idiom(source="torchmetrics docs: MeanMetric and CatMetric of values per node", stages=FIT)
def aggregations_of_values_per_node() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.all, self.worst, self.total = MeanMetric(), CatMetric(), MaxMetric(), SumMetric()

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "val":
                losses = F.cross_entropy(out, y, reduction="none")
                for metric in (self.mean, self.all, self.worst, self.total):
                    metric.update(losses)

        def on_validation_epoch_end(self) -> None:
            self.log_dict({"mean": self.mean.compute(), "median": self.all.compute().median()})
            self.log_dict({"worst": self.worst.compute(), "total": self.total.compute()})
            for metric in (self.mean, self.all, self.worst, self.total):
                metric.reset()

    return Case(Module(), graph())


# List states, curves, regression ##############################################


@idiom(source="torchmetrics docs: AUROC and average precision, exact ones with lists as states", stages=FIT)
def list_states() -> Case:
    return _logged(lambda: MetricCollection([MulticlassAUROC(CLASSES), MulticlassAveragePrecision(CLASSES)]))


@idiom(source="torchmetrics docs: AUROC(thresholds=20), calibration error", stages=FIT)
def binned_states() -> Case:
    def make() -> Any:
        return MetricCollection([MulticlassAUROC(CLASSES, thresholds=20), MulticlassCalibrationError(CLASSES)])

    return _logged(make, lambda out, y: (out.softmax(-1), y))


@idiom(source="torchmetrics docs: ROC and precision-recall curves, areas logged at the end of the epoch", stages=FIT)
def curves() -> Case:
    def areas(found: dict[str, Any]) -> dict[str, Tensor]:
        false, true, _ = found["MulticlassROC"]
        precision, recall, _ = found["MulticlassPrecisionRecallCurve"]
        rocs = torch.stack([auc(x, y) for x, y in zip(false, true)])
        return {"roc": rocs.mean(), "pr": -torch.stack([auc(x, y) for x, y in zip(recall, precision)]).mean()}

    return _computed(lambda: MetricCollection([MulticlassROC(CLASSES), MulticlassPrecisionRecallCurve(CLASSES)]), areas)


@idiom(source="torchmetrics docs: confusion matrix and stat scores in on_validation_epoch_end", stages=FIT)
def confusion_matrix() -> Case:
    def values(found: dict[str, Tensor]) -> dict[str, Tensor]:
        matrix, scores = found["MulticlassConfusionMatrix"], found["MulticlassStatScores"]
        return {"right": matrix.diag().sum() / matrix.sum(), "rows": matrix.sum().float(), "false": scores[1].float()}

    def make() -> MetricCollection:
        return MetricCollection([MulticlassConfusionMatrix(CLASSES), MulticlassStatScores(CLASSES, average="micro")])

    return _computed(make, values)


@idiom(source="torchmetrics docs: metrics that are no means, Matthews, kappa, top-2, macro precision", stages=FIT)
def metrics_that_are_no_means() -> Case:
    return _logged(
        lambda: MetricCollection(
            {
                "mcc": MulticlassMatthewsCorrCoef(CLASSES),
                "kappa": MulticlassCohenKappa(CLASSES),
                "top2": MulticlassAccuracy(CLASSES, top_k=2),
                "precision": MulticlassPrecision(CLASSES, average="macro", ignore_index=0),
            }
        )
    )


@idiom(source="torchmetrics docs: regression metrics", stages=FIT)
def regression_metrics() -> Case:
    def prepare(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return out[:, 0].float(), y.float()

    def make() -> MetricCollection:
        errors = MeanSquaredError(), MeanAbsoluteError(), R2Score(), ExplainedVariance()
        return MetricCollection([*errors, PearsonCorrCoef(), SpearmanCorrCoef()])

    return _logged(make, prepare)


@idiom(source="binary metrics of one class against the rest", stages=FIT)
def binary_metrics() -> Case:
    def make() -> Any:
        return MetricCollection([BinaryAccuracy(), BinaryAveragePrecision()])

    return _logged(make, lambda out, y: (out.softmax(-1)[:, 0], (y == 0).long()))


@idiom(source="torchmetrics docs: a metric of one's own with add_state", stages=FIT)
def own_metric() -> Case:
    class Confident(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("right", default=torch.tensor(0), dist_reduce_fx="sum")
            self.add_state("worst", default=torch.tensor(1.0), dist_reduce_fx="min")
            self.add_state("all", default=[], dist_reduce_fx="cat")

        def update(self, preds: Tensor, target: Tensor) -> None:
            confidence = preds.softmax(-1).max(-1).values.float()
            self.right += ((preds.argmax(-1) == target) & (confidence > 0.25)).sum()
            self.worst = torch.minimum(self.worst, confidence.min())
            self.all.append(confidence)

        def compute(self) -> Tensor:
            return (
                self.right + self.worst + torch.cat([*self.all] if isinstance(self.all, list) else [self.all]).median()
            )

    return _logged(Confident)


# Forward, functions, and metrics that are no submodules #######################


@idiom(
    source="torchmetrics docs: self.accuracy(preds, y); self.log('acc', self.accuracy, on_step=True, on_epoch=True)",
    stages=FIT,
)
def metric_called_and_logged() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.val_acc = MulticlassF1Score(CLASSES)

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "val":
                self.val_acc(out, y)
                self.log("val_f1", self.val_acc)

    return Case(Module(), graph())


@idiom(
    source="torchmetrics docs: a metric logged on each step, whose value is of the batch",
    stages=("fit",),
)
def metric_logged_on_steps() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.acc = MulticlassAccuracy(CLASSES, average="micro")

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "train":
                self.acc(out, y)
                self.log("train_acc", self.acc, on_step=True, on_epoch=True)

    return Case(Module(), graph())


@idiom(source="Lightning docs: functional accuracy in self.log", stages=FIT)
def functional_accuracy() -> Case:
    class Module(Scored):
        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            self.log(f"{stage}_acc", tmf.accuracy(out, y, "multiclass", num_classes=CLASSES, average="micro"))

    return Case(Module(), graph())


@idiom(
    source="functional F1 in self.log of the training step",
    stages=FIT,
)
def functional_f1_in_training() -> Case:
    class Module(Scored):
        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "train":
                self.log("train_f1", tmf.f1_score(out, y, "multiclass", num_classes=CLASSES, average="macro"))

    return Case(Module(), graph())


@idiom(
    source="functional AUROC in self.log of the validation step",
    stages=FIT,
)
def functional_auroc_in_validation() -> Case:
    class Module(Scored):
        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "val":
                self.log("val_auroc", tmf.auroc(out, y, "multiclass", num_classes=CLASSES))

    return Case(Module(), graph())


@idiom(
    source="a count logged as it is, without reduce_fx='sum'",
    stages=FIT,
)
def count_logged_as_a_mean() -> Case:
    class Module(Scored):
        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            self.log(f"{stage}_right", (out.argmax(-1) == y).sum().float())

    return Case(Module(), graph())


@idiom(source="a count logged with reduce_fx='sum'", stages=FIT)
def count_logged_as_a_sum() -> Case:
    class Module(Scored):
        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            self.log(f"{stage}_right", (out.argmax(-1) == y).sum().float(), reduce_fx="sum")
            self.log(f"{stage}_rows", float(len(y)), reduce_fx="sum")

    return Case(Module(), graph())


@idiom(source="accuracy by hand in plain self.log", stages=FIT)
def accuracy_by_hand() -> Case:
    class Module(Scored):
        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            self.log(f"{stage}_acc", float((out.argmax(-1) == y).sum()) / len(y))

    return Case(Module(), graph())


@idiom(
    source="root mean square error by hand, not a mean over rows",
    stages=FIT,
)
def root_of_a_mean() -> Case:
    class Module(Scored):
        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            self.log(f"{stage}_rmse", (out[:, 0] - y).square().mean().sqrt())

    return Case(Module(), graph())


@idiom(
    source="accuracy of each class by hand, a mean over the rows of a class",
    stages=FIT,
)
def accuracy_of_each_class_by_hand() -> Case:
    class Module(Scored):
        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            for c in range(CLASSES):
                own = y == c
                self.log(f"{stage}_class{c}", (out.argmax(-1) == y)[own].float().sum() / own.sum().clamp(min=1))

    return Case(Module(), graph())


@idiom(
    source="metrics kept in a plain dict, computed at the end of the epoch",
    stages=FIT,
)
def metrics_in_a_dict() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.scores = {stage: MulticlassF1Score(CLASSES) for stage in ("train", "val", "test")}

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            self.scores[stage].update(out, y)

        def on_train_epoch_end(self) -> None:
            self.log("train_f1", self.scores["train"].compute())
            self.scores["train"].reset()

        def on_validation_epoch_end(self) -> None:
            self.log("val_f1", self.scores["val"].compute())
            self.scores["val"].reset()

        def on_test_epoch_end(self) -> None:
            self.log("test_f1", self.scores["test"].compute())

    return Case(Module(), graph())


@idiom(
    source="a callback with a metric of its own",
    stages=("fit",),
)
def metric_in_a_callback() -> Case:
    class Scores(L.Callback):
        def __init__(self) -> None:
            self.f1 = MulticlassF1Score(CLASSES)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                out = pl_module(batch.x, batch.edge_index)[batch.train_mask]
            self.f1.update(out, batch.y[batch.train_mask])

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("train_f1", self.f1.compute())
            self.f1.reset()

    return Case(Net(), graph(), {"callbacks": [Scores()]})


@idiom(
    source="sklearn-style: numpy arrays of all batches in a list, macro F1 of them at the end",
    refused="gather_global",
    stages=FIT,
)
def f1_of_collected_arrays() -> Case:
    class Module(Scored):
        def on_validation_epoch_start(self) -> None:
            self.preds: list[np.ndarray] = []
            self.targets: list[np.ndarray] = []

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "val":
                self.preds.append(out.argmax(-1).cpu().numpy())
                self.targets.append(y.cpu().numpy())

        def on_validation_epoch_end(self) -> None:
            preds, target = np.concatenate(self.preds), np.concatenate(self.targets)
            right = [(preds == c) & (target == c) for c in range(CLASSES)]
            sizes = [max(((preds == c).sum() + (target == c).sum()) / 2, 1) for c in range(CLASSES)]
            self.log("val_f1", float(np.mean([each.sum() / size for each, size in zip(right, sizes)])))

    return Case(Module(), graph())


@idiom(source="a metric computed every second epoch only, over all of them", stages=("fit",))
def metric_over_several_epochs() -> Case:
    class Module(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.f1 = MulticlassF1Score(CLASSES)

        def score(self, out: Tensor, y: Tensor, stage: str) -> None:
            if stage == "train":
                self.f1.update(out, y)

        def on_train_epoch_end(self) -> None:
            if self.current_epoch % 2 == 1:
                self.log("train_f1", self.f1.compute())
                self.f1.reset()

    return Case(Module(), graph(), {"max_epochs": 5})


@idiom(source="a metric that looks at features, over all rows and over a mask of another stage", stages=("fit",))
def metric_over_all_rows() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.acc_of_all, self.acc_of_test = MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)
            self.norm = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            out = self(batch.x, batch.edge_index)
            self.acc_of_all(out, batch.y)
            self.acc_of_test(out[batch.test_mask], batch.y[batch.test_mask])
            self.norm.update(batch.x.norm(dim=1) / FEATURES)
            self.log_dict({"all": self.acc_of_all, "test": self.acc_of_test, "norm": self.norm})

    return Case(Module(), graph())
