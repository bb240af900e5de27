"""Lightning's callbacks, each of them, and what people write in callbacks of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as plc
from lightning.pytorch.callbacks.progress import RichProgressBar, TQDMProgressBar
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch_geometric.nn import GCNConv

from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.plain import HIDDEN, Net, idiom


class Quick(Net):
    """Learns, and overfits, within a few epochs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.2)


class Normed(Quick):
    """With a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GCNConv(FEATURES, HIDDEN, bias=False)  # which the norm would take away
        self.norm = torch.nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.norm(self.conv1(x, edge_index)).relu(), edge_index)


def _with(callback: L.Callback, module: L.LightningModule | None = None, **trainer: Any) -> Case:
    return Case(module or Quick(), graph(), {"callbacks": [callback], "max_epochs": 5, **trainer})


# Checkpoints and stopping #####################################################


@idiom(source="Lightning docs: ModelCheckpoint(monitor, save_top_k=2, save_last), then test with ckpt_path='best'")
def best_checkpoint_is_tested() -> Case:
    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        saver = plc.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.4f}")
        trainer = trainer_with(callbacks=[saver], enable_checkpointing=True)
        trainer.fit(module, datamodule=data)
        tested = trainer.test(datamodule=data, ckpt_path="best", verbose=False)
        predicted = trainer.predict(datamodule=data, ckpt_path=saver.last_model_path)
        kept = sorted(path.rsplit("/", 1)[-1] for path in saver.best_k_models)
        return tested, predicted, kept, saver.best_model_score

    return Case(Quick(), graph(), {"max_epochs": 6}, program=program)


@idiom(source="Lightning docs: ModelCheckpoint(every_n_epochs=2) and on training steps", stages=("fit",))
def checkpoints_on_epochs_and_steps() -> Case:
    savers = [
        plc.ModelCheckpoint(every_n_epochs=2, save_top_k=-1),
        plc.ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, filename="{step}-{train_loss:.5f}"),
    ]

    def kept() -> Any:
        return [sorted(path.rsplit("/", 1)[-1] for path in each.best_k_models) for each in savers]

    return Case(Quick(), graph(), {"callbacks": savers, "max_epochs": 5, "enable_checkpointing": True}, also=kept)


@idiom(source="Lightning docs: EarlyStopping on val_loss with patience, min_delta", stages=("fit",))
def early_stopping() -> Case:
    stopper = plc.EarlyStopping("val_loss", patience=1, min_delta=0.001)
    return Case(
        Quick(),
        graph(),
        {"callbacks": [stopper], "max_epochs": 40},
        also=lambda: (stopper.stopped_epoch, stopper.best_score),
    )


@idiom(source="Lightning docs: EarlyStopping on the training loss with a threshold", stages=("fit",))
def early_stopping_on_the_training_loss() -> Case:
    stopper = plc.EarlyStopping("train_loss", stopping_threshold=1.2, check_on_train_epoch_end=True)
    return Case(Quick(), graph(), {"callbacks": [stopper], "max_epochs": 40}, also=lambda: stopper.stopped_epoch)


@idiom(source="Lightning docs: OnExceptionCheckpoint; the module's own error in epoch 1", refused=None, stages=("fit",))
def checkpoint_on_exception() -> Case:
    class Module(Quick):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                raise KeyboardInterrupt

    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        with TemporaryDirectory() as folder:
            trainer = trainer_with(callbacks=[plc.OnExceptionCheckpoint(folder)], enable_checkpointing=True)
            try:
                trainer.fit(module, datamodule=data)
            except BaseException as error:
                return type(error).__name__, trainer.current_epoch
        return None

    return Case(Module(), graph(), program=program)


# Weights ######################################################################


@idiom(source="Lightning docs: StochasticWeightAveraging", stages=("fit", "test"))
def stochastic_weight_averaging() -> Case:
    return _with(plc.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2), max_epochs=6)


@idiom(source="Lightning docs: StochasticWeightAveraging of a model with BatchNorm, whose statistics are taken anew")
def stochastic_weight_averaging_with_batch_norm() -> Case:
    return _with(plc.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=0.5), Normed(), max_epochs=6)


@idiom(source="Lightning docs: WeightAveraging, validation with the averaged weights", stages=("fit", "test"))
def weight_averaging() -> Case:
    return _with(plc.WeightAveraging(), Normed())


@idiom(source="Lightning docs: EMAWeightAveraging", stages=("fit", "test"))
def moving_average_of_weights() -> Case:
    return _with(plc.EMAWeightAveraging(decay=0.6, update_starting_at_step=1))


@idiom(
    source="Lightning docs: ModelPruning('l1_unstructured', amount=0.3)",
    stages=("fit", "test"),
)
def pruning_callback() -> Case:
    return _with(plc.ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=True))


@idiom(
    source="Lightning docs: ModelPruning of named layers, lottery ticket",
    stages=("fit", "test"),
)
def pruning_of_one_layer() -> Case:
    module = Quick()
    names = [(module.conv1.lin, "weight"), (module.conv2.lin_l, "weight")]
    pruner = plc.ModelPruning(
        "random_structured",
        names,
        amount=lambda epoch: 0.2 * (epoch == 1),
        pruning_dim=0,
        use_global_unstructured=False,
    )
    return _with(pruner, module)


class Backbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = GCNConv(FEATURES, HIDDEN)
        del self.conv1

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.backbone(x, edge_index).relu(), edge_index)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.05)


@idiom(source="Lightning docs: BackboneFinetuning, the backbone is trained from epoch 2 on", stages=("fit", "test"))
def backbone_finetuning() -> Case:
    return _with(plc.BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=0.01), Backbone())


@idiom(source="Lightning docs: BaseFinetuning of one's own", stages=("fit", "test"))
def own_finetuning() -> Case:
    class Finetuning(plc.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.1)

    return _with(Finetuning(), Backbone())


@idiom(source="weights written by a callback: largest norms bounded after each step", stages=("fit", "test"))
def norms_bounded_by_a_callback() -> Case:
    class MaxNorm(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            with torch.no_grad():
                for p in pl_module.parameters():
                    p.mul_(p.norm().clamp(max=0.8) / p.norm().clamp(min=1e-9))

    return _with(MaxNorm())


# Learning rates and batches ###################################################


@idiom(source="Lightning docs: GradientAccumulationScheduler", stages=("fit",))
def accumulation_scheduler() -> Case:
    return _with(plc.GradientAccumulationScheduler({0: 1, 2: 3}))


@idiom(source="Lightning docs: LearningRateMonitor on steps with momentum", stages=("fit",))
def learning_rate_monitor() -> Case:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return _with(plc.LearningRateMonitor("epoch", log_momentum=True), Module())


class Tuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@idiom(source="Lightning docs: Tuner(trainer).lr_find", stages=("fit",))
def tuner_finds_a_learning_rate() -> Case:
    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        trainer = trainer_with()
        found = Tuner(trainer).lr_find(module, datamodule=data, num_training=15, min_lr=1e-3, max_lr=1.0)
        assert found is not None
        losses = found.results["loss"]
        trainer.fit(module, datamodule=data)
        return losses, module.lr

    return Case(Tuned(), graph(), program=program)


@idiom(source="Lightning docs: LearningRateFinder as a callback", stages=("fit", "test"))
def learning_rate_finder() -> Case:
    return _with(plc.LearningRateFinder(num_training_steps=15, min_lr=1e-3, max_lr=1.0), Tuned())


# Watching #####################################################################


@idiom(source="Lightning docs: TQDMProgressBar with metrics of its own", stages=("fit",))
def tqdm_progress_bar() -> Case:
    class Bar(TQDMProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            shown = super().get_metrics(trainer, pl_module)
            seen.append({name: value for name, value in shown.items() if name != "v_num"})
            return shown

    class Module(Quick):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss_on_the_bar", loss, prog_bar=True)
            return loss

    seen: list[Any] = []
    return Case(
        Module(),
        graph(),
        {"callbacks": [Bar(refresh_rate=1)], "enable_progress_bar": True},
        also=lambda: seen and seen[-1],
    )


@idiom(
    source="Lightning docs: RichProgressBar and RichModelSummary",
    stages=("fit",),
)
def rich_progress_bar_and_summary() -> Case:
    class Module(Quick):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.randn(4, FEATURES).double(), torch.tensor([[0, 1, 2], [1, 2, 3]])

    watching = [RichProgressBar(), plc.RichModelSummary(max_depth=2)]
    return Case(Module(), graph(), {"callbacks": watching, "enable_progress_bar": True, "enable_model_summary": True})


@idiom(source="Lightning docs: Timer, DeviceStatsMonitor", stages=("fit",))
def timer_and_device_statistics() -> Case:
    return Case(Quick(), graph(), {"callbacks": [plc.Timer({"minutes": 5}), plc.DeviceStatsMonitor()], "logger": None})


@idiom(source="Lightning docs: SpikeDetection", stages=("fit",))
def spike_detection() -> Case:
    from lightning.pytorch.callbacks.spike import SpikeDetection

    with TemporaryDirectory() as folder:
        return _with(SpikeDetection(exclude_batches_path=folder))


@idiom(source="Lightning docs: ThroughputMonitor with the number of nodes as batch size", stages=("fit",))
def throughput_monitor() -> Case:
    from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor

    monitor = ThroughputMonitor(lambda batch: batch.num_nodes, window_size=3)
    return Case(Quick(), graph(), {"callbacks": [monitor]}, apart=("train/", "validate/", "train|", "validate|"))


@idiom(source="Lightning docs: LambdaCallback", stages=("fit",))
def lambda_callback() -> Case:
    seen: list[Any] = []

    def keep(trainer: Any, pl_module: Any) -> None:
        seen.append(trainer.callback_metrics["val_loss"].clone())

    case = _with(plc.LambdaCallback(on_validation_end=keep, on_train_epoch_end=keep), num_sanity_val_steps=0)
    case.also = lambda: list(seen)
    return case


@idiom(source="Lightning docs: ModelSummary, a callback's state_dict kept in the checkpoint")
def state_of_a_callback() -> Case:
    class Counter(L.Callback):
        def __init__(self) -> None:
            self.epochs = 0

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.epochs += 1

        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.epochs = state_dict["epochs"]

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["twice"] = 2 * self.epochs

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            pl_module.twice = checkpoint["twice"]

    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        saver, first, second = plc.ModelCheckpoint(save_last=True), Counter(), Counter()
        trainer_with(callbacks=[saver, first], enable_checkpointing=True).fit(module, datamodule=data)
        trainer = trainer_with(callbacks=[second], max_epochs=5)
        trainer.fit(module, datamodule=data, ckpt_path=saver.last_model_path)
        return first.epochs, second.epochs, module.twice, trainer.global_step

    return Case(Quick(), graph(), program=program)


# Predictions ##################################################################


@idiom(source="Lightning docs: BasePredictionWriter on the epoch, every rank writes its file", stages=("predict",))
def prediction_writer() -> Case:
    class Writer(plc.BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            written.append(torch.cat(list(predictions)))

        def write_on_batch_end(
            self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, *_: Any
        ) -> None:
            written.append(prediction)

    written: list[Tensor] = []
    case = Case(Net(), graph(), {"callbacks": [Writer("batch_and_epoch")]})
    case.also = lambda: written
    return case


@idiom(
    source="forum: predictions collected by a callback in on_predict_batch_end, written as JSON", stages=("predict",)
)
def predictions_collected_by_a_callback() -> Case:
    class Collect(L.Callback):
        def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            classes.extend(outputs.argmax(-1).tolist())

    classes: list[int] = []
    case = Case(Net(), graph(), {"callbacks": [Collect()]})
    case.also = lambda: json.dumps(classes)
    return case


# Callbacks of one's own #######################################################


@idiom(
    source="Lightning docs: every hook of a Callback, counted and logged by pl_module.log",
    stages=("fit", "validate", "test", "predict"),
)
def every_callback_hook() -> Case:
    class Hooks(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.conv1.bias.data += 0.1

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("epoch_begins", float(trainer.current_epoch))

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batch.x = batch.x.clamp(-2, 2)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            pl_module.log("before_backward", loss)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            norm = torch.stack([p.grad.norm() for p in pl_module.parameters()]).norm()
            pl_module.log("gradient", norm)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            torch.nn.utils.clip_grad_value_(pl_module.parameters(), 0.02)

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pl_module.log("weights", pl_module.conv2.lin_l.weight.norm())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log("loss_again", outputs["loss"])

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            pl_module.log("val_loss_again", outputs)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("val_epochs", float(trainer.current_epoch))

        def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            pl_module.log("test_loss_again", outputs)

        def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("test_done", 1.0)

        def on_predict_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
            batch.x = batch.x * 2

    return _with(Hooks())


@idiom(source="forum: the training accuracy of the whole batch computed by a callback in no_grad", stages=("fit",))
def second_forward_in_a_callback() -> Case:
    class Evaluate(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.eval()
            with torch.no_grad():
                out = pl_module(batch.x, batch.edge_index)[batch.train_mask]
            pl_module.train()
            pl_module.log("loss_after_the_step", F.cross_entropy(out, batch.y[batch.train_mask]))

    return _with(Evaluate(), Normed())


@idiom(source="stops by itself: trainer.should_stop set in a callback when a logged value is low", stages=("fit",))
def stopped_by_a_callback() -> Case:
    class Stop(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = float(trainer.callback_metrics["val_loss"]) < 1.5

    case = _with(Stop(), max_epochs=30)
    case.also = lambda: case.module.trainer.current_epoch
    return case


@idiom(source="stops by itself when the step's own loss is low", stages=("fit",))
def stopped_by_the_loss_of_a_step() -> Case:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = float(outputs["loss"]) < 1.3

    case = _with(Stop(), max_epochs=30)
    case.also = lambda: case.module.trainer.current_epoch
    return case


@idiom(source="representation kept by a forward hook in a callback, its mean logged each epoch", stages=("fit",))
def activations_watched_by_a_callback() -> Case:
    class Watch(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.handle = pl_module.conv1.register_forward_hook(self.keep)

        def keep(self, module: Any, args: Any, output: Tensor) -> None:
            self.share = (output > 0).double().mean()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log("active", self.share, batch_size=len(batch.x))

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self.handle.remove()

    return _with(Watch())


@idiom(source="confidence of each class by a callback that reads the module's outputs", stages=("fit",))
def class_means_by_a_callback() -> Case:
    class Module(Quick):
        def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            out = self(batch.x, batch.edge_index)[batch.val_mask].softmax(-1)
            return {"confidence": out.max(-1).values, "y": batch.y[batch.val_mask]}

    class Means(L.Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            for c in range(CLASSES):
                own = outputs["y"] == c
                pl_module.log(f"sum{c}", outputs["confidence"][own].sum(), reduce_fx="sum")
                pl_module.log(f"rows{c}", own.sum().double(), reduce_fx="sum")

    return _with(Means(), Module())


@idiom(source="Lightning docs: hooks of a Callback around stages", stages=("fit", "validate", "test", "predict"))
def hooks_around_stages() -> Case:
    class Around(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.append(stage)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.kept = [p.detach().clone() for p in pl_module.parameters()]

        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.conv1.bias.data += 1

        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.conv1.bias.data -= 1

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.scale(pl_module, 0.5)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.scale(pl_module, 2.0)

        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            for p, kept in zip(pl_module.parameters(), self.kept):
                p.data.lerp_(kept, 0.5)

        def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.conv2.lin_l.bias.data += 1

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.append(f"after {stage}")

        def scale(self, pl_module: Any, by: float) -> None:
            with torch.no_grad():
                for p in pl_module.conv2.parameters():
                    p.mul_(by)

    seen: list[str] = []
    return Case(Quick(), graph(), {"callbacks": [Around()]}, also=lambda: list(seen))


@idiom(source="Lightning docs: AsyncCheckpointIO as a plugin, the last weights tested")
def checkpoints_written_by_a_thread() -> Case:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        saver = plc.ModelCheckpoint(monitor="val_loss")
        trainer = trainer_with(callbacks=[saver], enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
        trainer.fit(module, datamodule=data)
        return saver.best_model_score, trainer.test(module, datamodule=data, verbose=False)

    return Case(Quick(), graph(), program=program)
