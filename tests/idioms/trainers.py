"""Options of the Trainer, several runs in a row, checkpoints, and lightning-hydra-template's module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models import GAT, GCN
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.plain import Net, idiom
from lightning_gnn import GraphDataModule

FIT = ("fit", "test")


def _trained_with(**options: Any) -> Case:
    return Case(Net(), graph(), options)


# Loops ########################################################################


@idiom(source="Lightning docs: fast_dev_run", stages=FIT)
def fast_dev_run() -> Case:
    return _trained_with(fast_dev_run=True)


@idiom(source="Lightning docs: limit_val_batches=0", stages=FIT)
def without_validation() -> Case:
    return _trained_with(limit_val_batches=0)


@idiom(source="Lightning docs: num_sanity_val_steps=0 and check_val_every_n_epoch", stages=FIT)
def validated_every_other_epoch() -> Case:
    return _trained_with(num_sanity_val_steps=0, check_val_every_n_epoch=2, max_epochs=5)


@idiom(source="Lightning docs: val_check_interval=1.0 and max_steps", stages=FIT)
def limited_by_steps() -> Case:
    return _trained_with(max_steps=4, max_epochs=-1, val_check_interval=1.0)


@idiom(source="Lightning docs: max_time, min_epochs, num_sanity_val_steps=-1", stages=FIT)
def limited_by_time() -> Case:
    return _trained_with(max_time={"minutes": 30}, min_epochs=2, num_sanity_val_steps=-1)


@idiom(source="Lightning docs: overfit_batches=1", stages=FIT)
def overfit_one_batch() -> Case:
    return _trained_with(overfit_batches=1)


@idiom(source="Lightning docs: limit_train_batches as a fraction, limit_test_batches", stages=FIT)
def limited_batches() -> Case:
    return _trained_with(limit_train_batches=1.0, limit_test_batches=1, limit_predict_batches=1)


@idiom(source="Lightning docs: reload_dataloaders_every_n_epochs", stages=FIT)
def loaders_made_anew() -> Case:
    return _trained_with(reload_dataloaders_every_n_epochs=1)


@idiom(source="Lightning docs: detect_anomaly and profiler='simple'", stages=("fit",))
def anomalies_and_profiler() -> Case:
    return _trained_with(detect_anomaly=True, profiler="simple")


@idiom(source="Lightning docs: deterministic=True, benchmark, use_distributed_sampler", stages=FIT)
def deterministic() -> Case:
    return _trained_with(deterministic=True, benchmark=False, use_distributed_sampler=True)


@idiom(source="Lightning docs: inference_mode=False; gradients of inputs in the test step", stages=FIT)
def gradients_in_the_test_step() -> Case:
    class Module(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                x = batch.x.clone().requires_grad_()
                out = self(x, batch.edge_index)[batch.test_mask]
                loss = F.cross_entropy(out, batch.y[batch.test_mask], reduction="sum")
                [saliency] = torch.autograd.grad(loss, x)
            self.log("saliency", saliency.abs().sum(), reduce_fx="sum")

    return Case(Module(), graph(), {"inference_mode": False})


@idiom(source="Lightning docs: barebones=True", stages=("fit",))
def barebones() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            return F.cross_entropy(self(batch.x, batch.edge_index)[mask], batch.y[mask])

    nothing: dict[str, Any] = dict.fromkeys(
        ("logger", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    )
    return Case(Module(), graph(), {"barebones": True, **nothing})


# Precision ####################################################################


class Single(Net):
    """Stays float32, and makes the graph so."""

    def double(self) -> Any:
        return self

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch.x = batch.x.float()
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


@idiom(source="Lightning docs: precision='64-true'", stages=FIT)
def double_precision() -> Case:
    return _trained_with(precision="64-true")


@idiom(source="Lightning docs: precision='bf16-mixed'", stages=("fit",), rtol=0.05)
def bfloat16_mixed() -> Case:
    return Case(Single(), graph(), {"precision": "bf16-mixed"})


@idiom(source="Lightning docs: precision='32-true' and a float32 graph", stages=FIT)
def single_precision() -> Case:
    return Case(Single(), graph(), {"precision": "32-true"})


@idiom(
    source="Lightning docs: precision='bf16-true', features converted by the module",
    warns="could not run Module",
    stages=("fit",),
    rtol=0.1,
)
def bfloat16_true() -> Case:
    class Module(Single):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            batch.x = batch.x.bfloat16()
            return batch

    return Case(Module(), graph(), {"precision": "bf16-true"})


# Several runs #################################################################


@idiom(source="Lightning docs: fit with ckpt_path of a run that ended earlier")
def resumed_from_a_checkpoint() -> Case:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        saver = ModelCheckpoint(save_last=True)
        trainer_with(callbacks=[saver], enable_checkpointing=True).fit(module, datamodule=data)
        again = Module().double()
        trainer = trainer_with(max_epochs=6)
        trainer.fit(again, datamodule=data, ckpt_path=saver.last_model_path)
        return trainer.test(again, datamodule=data, verbose=False), again.state_dict(), trainer.global_step

    return Case(Module(), graph(), program=program)


@idiom(source="fit twice with one Trainer, more epochs the second time")
def fitted_twice() -> Case:
    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        trainer = trainer_with()
        trainer.fit(module, datamodule=data)
        trainer.fit_loop.max_epochs = 5
        trainer.fit(module, datamodule=data)
        return trainer.current_epoch, trainer.validate(module, datamodule=data, verbose=False)

    return Case(Net(), graph(), program=program)


@idiom(source="train, then a Trainer of its own for validate, test and predict; weights by load_state_dict")
def a_trainer_for_each_stage() -> Case:
    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        trainer_with().fit(module, datamodule=data)
        other = Net().double()
        other.load_state_dict(module.state_dict())
        found = [trainer_with().validate(other, datamodule=data, verbose=False)]
        found.append(trainer_with(logger=False).test(other, datamodule=data, verbose=False))
        return [*found, trainer_with().predict(other, datamodule=data)]

    return Case(Net(), graph(), program=program)


@idiom(source="cross-validation: a fit for each of several seeds of the split, results averaged")
def cross_validation() -> Case:
    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        scores = []
        for fold in range(2):
            folded = GraphDataModule(graph(), split=(0.5, 0.25, 0.25), seed=fold, partition=data.partition)
            net = Net().double()
            trainer_with(max_epochs=2).fit(net, datamodule=folded)
            [result] = trainer_with().test(net, datamodule=folded, verbose=False)
            scores.append(result["test_loss"])
        return scores

    return Case(Net(), graph(), program=program)


@idiom(source="Lightning docs: save_checkpoint by hand, load_from_checkpoint with hyperparameters")
def loaded_from_a_checkpoint() -> Case:
    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        trainer = trainer_with()
        trainer.fit(module, datamodule=data)
        path = data.partition_dir / "by_hand.ckpt"  # a folder that all ranks see
        trainer.save_checkpoint(path)
        kept = torch.load(path, weights_only=False)
        return kept["state_dict"], kept["epoch"], Sized.load_from_checkpoint(path, weights_only=False).state_dict()

    return Case(Sized(hidden=6), graph(), program=program)


class Sized(Net):
    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(2)
        self.conv1 = GCN(FEATURES, hidden, 1, 8)


@idiom(source="Lightning docs: strict=False, weights of one layer taken from another checkpoint", stages=FIT)
def weights_taken_from_a_state_dict() -> Case:
    class Module(Net):
        def on_fit_start(self) -> None:
            torch.manual_seed(9)
            taken = {name: torch.randn_like(value) for name, value in self.state_dict().items() if "conv2" in name}
            self.load_state_dict(taken, strict=False)

    return Case(Module(), graph())


# Compiled models, datamodules #################################################


@idiom(source="PyTorch docs: torch.compile of a layer", stages=FIT, schemes=("dgcl",))
def compiled_head() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.compile(
                torch.nn.Sequential(torch.nn.Linear(CLASSES, CLASSES), torch.nn.Tanh()), backend="eager"
            )

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.head(super().forward(x, edge_index))

    return Case(Module(), graph())


class OwnData(GraphDataModule):
    """A datamodule of one's own, with what people override."""

    def prepare_data(self) -> None:
        super().prepare_data()
        self.prepared = True

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.stages = [*getattr(self, "stages", []), stage]

    def on_before_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
        batch.x = batch.x / 2
        return batch

    def on_after_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
        batch.x = batch.x + 0.1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"stages": self.stages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stages = state_dict["stages"]

    def teardown(self, stage: str) -> None:
        super().teardown(stage)


@idiom(source="Lightning docs: a LightningDataModule with its own hooks, derived from GraphDataModule")
def datamodule_with_hooks() -> Case:
    class Module(Net):
        def on_train_start(self) -> None:
            self.stages = self.trainer.datamodule.stages

    return Case(Module(), OwnData(graph()))


@idiom(source="PyG loop: fit(model, DataLoader([data]))", refused="GraphDataModule", stages=("fit",))
def loaders_of_ones_own() -> Case:
    from torch_geometric.loader import DataLoader

    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        trainer_with().fit(module, DataLoader([graph()]), DataLoader([graph()]))

    return Case(Net(), graph(), program=program)


@idiom(source="a datamodule of one's own, not derived from GraphDataModule", refused="GraphDataModule", stages=("fit",))
def datamodule_of_ones_own() -> Case:
    class Own(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([graph()], collate_fn=lambda batch: batch[0])

    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        trainer_with().fit(module, datamodule=Own())

    return Case(Net(), graph(), program=program)


@idiom(source="Lightning docs: train_dataloader in the LightningModule", refused="GraphDataModule", stages=("fit",))
def loaders_in_the_module() -> Case:
    class Module(Net):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([graph()], collate_fn=lambda batch: batch[0])

    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        trainer_with(limit_val_batches=0).fit(module)

    return Case(Module(), graph(), program=program)


# lightning-hydra-template #####################################################


class LitModule(L.LightningModule):
    """src/models/mnist_module.py of lightning-hydra-template, whose batch is a graph and a mask."""

    def __init__(self, net: torch.nn.Module, optimizer: Any, scheduler: Any, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc = MulticlassAccuracy(CLASSES)
        self.val_acc = MulticlassAccuracy(CLASSES)
        self.test_acc = MulticlassAccuracy(CLASSES)
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()
        self.test_loss = MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(x, edge_index)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.forward(batch.x, batch.edge_index)[mask]
        y = batch.y[mask]
        loss = self.criterion(logits, y)
        preds = torch.argmax(logits, dim=1)
        return loss, preds, y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, preds, targets = self.model_step(batch, batch.train_mask)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch, batch.val_mask)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        acc = self.val_acc.compute()
        self.val_acc_best(acc)
        # Logged as a value and not as a metric, which would be reset after each epoch.
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch, batch.test_mask)
        self.test_loss(loss)
        self.test_acc(preds, targets)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net, backend="eager")

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is not None:
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            config = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
            return {"optimizer": optimizer, "lr_scheduler": config}
        return {"optimizer": optimizer}


def _hydra(net: torch.nn.Module, compile: bool = False) -> Case:
    adam = partial(torch.optim.Adam, lr=0.05, weight_decay=0.0)
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=1)
    return Case(LitModule(net, adam, plateau, compile), graph(), {"max_epochs": 5, "min_epochs": 1})


@idiom(source="lightning-hydra-template: src/models/mnist_module.py", stages=FIT)
def hydra_template() -> Case:
    return _hydra(GCN(FEATURES, 8, 2, CLASSES))


@idiom(
    source="lightning-hydra-template: src/models/mnist_module.py with compile: true",
    stages=FIT,
    schemes=("dgcl",),
)
def hydra_template_compiled() -> Case:
    return _hydra(GAT(FEATURES, 8, 2, CLASSES, heads=2), compile=True)


@idiom(
    source="lightning-hydra-template: EarlyStopping and ModelCheckpoint on val/acc, best weights tested",
)
def hydra_template_with_callbacks() -> Case:
    def program(trainer_with: Callable[..., L.Trainer], module: Any, data: Any) -> Any:
        saver = ModelCheckpoint(monitor="val/acc", mode="max", save_last=True, auto_insert_metric_name=False)
        trainer = trainer_with(
            callbacks=[saver, L.pytorch.callbacks.EarlyStopping("val/acc", mode="max", patience=3)],
            enable_checkpointing=True,
        )
        trainer.fit(module, datamodule=data)
        return trainer.test(module, datamodule=data, ckpt_path=saver.best_model_path, weights_only=False, verbose=False)

    case = _hydra(GCN(FEATURES, 8, 2, CLASSES))
    case.program = program
    return case
