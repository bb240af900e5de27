"""Every hook of a LightningModule, doing something with numbers in it."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torchmetrics.functional import f1_score

from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.plain import HIDDEN, Net, idiom


@idiom(source="Lightning docs: on_fit_start, on_train_start, on_train_end, on_fit_end")
def weights_set_when_training_starts_and_ends() -> Case:
    class Module(Net):
        def on_fit_start(self) -> None:
            with torch.no_grad():
                self.conv1.lin.weight.mul_(0.5)

        def on_train_start(self) -> None:
            torch.nn.init.constant_(self.conv2.lin_l.bias, 0.1)

        def on_train_end(self) -> None:
            with torch.no_grad():
                self.conv2.lin_l.bias.add_(1.0)

        def on_fit_end(self) -> None:
            self.conv1.bias.data.zero_()

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_train_batch_start, return -1 to skip the rest of the epoch")
def every_other_epoch_skipped() -> Case:
    class Module(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch % 2 else None

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_train_epoch_start; learning rate set by hand")
def learning_rate_set_each_epoch() -> Case:
    class Module(Net):
        def on_train_epoch_start(self) -> None:
            for group in self.optimizers().param_groups:
                group["lr"] = 0.3 / (1 + self.current_epoch)
            self.log("lr", self.optimizers().param_groups[0]["lr"])

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_before_batch_transfer, rows normalised as T.NormalizeFeatures does")
def features_normalised_before_transfer() -> Case:
    class Module(Net):
        def on_before_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
            batch.x = batch.x / batch.x.abs().sum(-1, keepdim=True).clamp(min=1.0)
            return batch

    return Case(Module(), graph())


@idiom(
    source="Lightning docs: on_after_batch_transfer, features of the whole batch standardised",
)
def features_standardised_over_the_batch() -> Case:
    class Module(Net):
        def on_after_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
            batch.x = (batch.x - batch.x.mean(0)) / batch.x.std(0)
            return batch

    return Case(Module(), graph())


@idiom(source="Lightning docs: transfer_batch_to_device and on_after_batch_transfer")
def columns_added_in_transfer() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = GCNConv(FEATURES + 1, HIDDEN)

        def transfer_batch_to_device(self, batch: Data, device: torch.device, dataloader_idx: int) -> Data:
            return batch.to(device)

        def on_after_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
            batch.x = torch.cat([batch.x, batch.x.norm(dim=1, keepdim=True)], 1)
            return batch

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_before_backward")
def loss_logged_before_backward() -> Case:
    class Module(Net):
        def on_before_backward(self, loss: Tensor) -> None:
            self.log("loss_before_backward", loss)

    return Case(Module(), graph())


@idiom(source="a training loop moved into hooks: norm logged and clipped in on_after_backward")
def clipped_after_backward() -> Case:
    class Module(Net):
        def on_after_backward(self) -> None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            self.log("grad_norm", norm)

    return Case(Module(), graph())


@idiom(source="forum: NaN gradients replaced, sign of gradients taken in on_after_backward")
def sign_of_gradients() -> Case:
    class Module(Net):
        def on_after_backward(self) -> None:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad = torch.nan_to_num(p.grad).sign() * 0.01

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_before_optimizer_step, log_dict(grad_norm(self.layer, norm_type=2))")
def gradient_norms_of_layers() -> Case:
    class Module(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self.conv1, norm_type=2))
            self.log_dict(grad_norm(self, norm_type="inf"))

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_before_zero_grad, gradients of the last step kept as a running mean")
def gradients_kept_before_they_are_zeroed() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running", torch.zeros_like(self.conv1.lin.weight))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.conv1.lin.weight.grad is not None:
                self.running.mul_(0.5).add_(self.conv1.lin.weight.grad)

    return Case(Module(), graph())


@idiom(source="Lightning docs: optimizer_zero_grad override; momentum of gradients kept between steps")
def gradients_not_zeroed_but_decayed() -> Case:
    class Module(Net):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)

    return Case(Module(), graph())


@idiom(source="Lightning docs: optimizer_step override, learning rate warm-up")
def warm_up_in_optimizer_step() -> Case:
    class Module(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if self.trainer.global_step < 3:
                for group in optimizer.param_groups:
                    group["lr"] = 0.2 * (self.trainer.global_step + 1) / 3
            optimizer.step(closure=optimizer_closure)

    return Case(Module(), graph())


@idiom(source="Lightning docs: optimizer_step every other step only, closure run by hand")
def optimizer_steps_every_other_batch() -> Case:
    class Module(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if epoch % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    return Case(Module(), graph())


@idiom(source="Lightning docs: configure_gradient_clipping override")
def clipping_that_changes_with_the_epoch() -> Case:
    class Module(Net):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(
                optimizer, gradient_clip_val=0.2 / (1 + self.current_epoch), gradient_clip_algorithm="norm"
            )

    return Case(Module(), graph())


@idiom(source="Lightning docs: lr_scheduler_step override")
def scheduler_stepped_by_epoch() -> Case:
    class Module(Net):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=self.current_epoch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)]

    return Case(Module(), graph())


@idiom(source="Lightning docs: backward override")
def backward_by_hand() -> Case:
    class Module(Net):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(retain_graph=True)

    return Case(Module(), graph())


@idiom(
    source="Lightning migration guide: training_epoch_end becomes on_train_epoch_end, list of outputs",
)
def outputs_of_training_steps_collected() -> Case:
    class Module(Net):
        def on_train_epoch_start(self) -> None:
            self.outputs: list[Tensor] = []

        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.outputs.append(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("train_epoch_loss", torch.stack(self.outputs).mean())

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_train_batch_end(outputs), loss as a moving average")
def moving_average_of_the_loss() -> Case:
    class Module(Net):
        average = 0.0

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.average = 0.5 * self.average + 0.5 * outputs["loss"]
            self.log("moving_average", self.average)

    return Case(Module(), graph())


@idiom(source="Lightning docs: training_step returns a dict, on_train_batch_end reads its other keys")
def dict_of_outputs() -> Case:
    class Module(Net):
        def training_step(self, batch: Data, batch_idx: int) -> dict[str, Tensor]:
            out = self(batch.x, batch.edge_index)[batch.train_mask]
            y = batch.y[batch.train_mask]
            return {"loss": F.cross_entropy(out, y), "preds": out.argmax(-1).detach(), "target": y}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("train_acc", (outputs["preds"] == outputs["target"]).double().mean())

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_validation_epoch_end, predictions of all batches concatenated; accuracy by hand")
def accuracy_of_collected_predictions() -> Case:
    class Module(Net):
        def on_validation_epoch_start(self) -> None:
            self.outputs: list[tuple[Tensor, Tensor]] = []

        def validation_step(self, batch: Data, batch_idx: int) -> None:
            out = self(batch.x, batch.edge_index)[batch.val_mask]
            self.outputs.append((out.argmax(-1), batch.y[batch.val_mask]))

        def on_validation_epoch_end(self) -> None:
            preds, target = (torch.cat(each) for each in zip(*self.outputs))
            self.log("val_acc", (preds == target).double().mean())

    return Case(Module(), graph())


@idiom(
    source="Lightning docs: on_validation_epoch_end, F1 of all predictions by torchmetrics.functional",
)
def f1_of_collected_predictions() -> Case:
    class Module(Net):
        def on_validation_epoch_start(self) -> None:
            self.outputs: list[tuple[Tensor, Tensor]] = []

        def validation_step(self, batch: Data, batch_idx: int) -> None:
            out = self(batch.x, batch.edge_index)[batch.val_mask]
            self.outputs.append((out.argmax(-1), batch.y[batch.val_mask]))

        def on_validation_epoch_end(self) -> None:
            preds, target = (torch.cat(each) for each in zip(*self.outputs))
            self.log("val_f1", f1_score(preds, target, "multiclass", num_classes=CLASSES, average="macro"))

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_validation_start/end, on_validation_batch_start/end with outputs")
def validation_hooks() -> Case:
    class Module(Net):
        def on_validation_start(self) -> None:
            self.seen = 0.0

        def on_validation_batch_start(self, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
            batch.x = batch.x * 0.9

        def on_validation_batch_end(self, outputs: Any, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen += outputs
            self.log("val_loss_again", outputs)

        def on_validation_epoch_end(self) -> None:
            self.log("val_seen", self.seen)

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_test_* hooks; worst node kept by reduce_fx")
def test_hooks() -> Case:
    class Module(Net):
        def on_test_epoch_start(self) -> None:
            self.losses: list[Tensor] = []

        def on_test_batch_start(self, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.scale = 2.0

        def test_step(self, batch: Data, batch_idx: int) -> Tensor:
            out = self(batch.x, batch.edge_index)[batch.test_mask]
            losses = F.cross_entropy(out, batch.y[batch.test_mask], reduction="none")
            self.log("test_worst", losses.max(), reduce_fx="max")
            return losses.mean()

        def on_test_batch_end(self, outputs: Any, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.losses.append(outputs * self.scale)

        def on_test_epoch_end(self) -> None:
            self.log("test_twice", torch.stack(self.losses).mean())

        def on_test_end(self) -> None:
            self.losses.clear()

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_predict_* hooks")
def predict_hooks() -> Case:
    class Module(Net):
        def on_predict_start(self) -> None:
            self.temperature = 2.0

        def on_predict_batch_start(self, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
            batch.x = batch.x.clamp(-1, 1)

        def predict_step(self, batch: Data, batch_idx: int) -> dict[str, Tensor]:
            out = self(batch.x, batch.edge_index) / self.temperature
            return {"probabilities": out.softmax(-1), "classes": out.argmax(-1)}

        def on_predict_batch_end(self, outputs: Any, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
            outputs["confidence"] = outputs["probabilities"].max(-1).values

    return Case(Module(), graph())


@idiom(source="Lightning docs: on_validation_model_eval override, statistics of the batch in validation")
def batch_norm_in_training_mode_when_validating() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(HIDDEN)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv2(self.norm(self.conv1(x, edge_index)).relu(), edge_index)

        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            self.norm.train()

        def on_validation_model_train(self) -> None:
            super().on_validation_model_train()

    return Case(Module(), graph())


@idiom(source="Lightning docs: configure_model, layers made when the Trainer runs")
def layers_made_in_configure_model() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = self.conv2 = None

        def configure_model(self) -> None:
            if self.conv1 is None:
                torch.manual_seed(3)
                self.conv1 = GCNConv(FEATURES, HIDDEN).double()
                self.conv2 = SAGEConv(HIDDEN, CLASSES).double()

    return Case(Module(), graph())


@idiom(source="Lightning docs: setup(stage), sizes from the datamodule; teardown")
def layers_made_in_setup_from_the_datamodule() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = self.conv2 = None

        def setup(self, stage: str) -> None:
            if self.conv1 is None:
                data = self.trainer.datamodule
                torch.manual_seed(3)
                self.conv1 = GCNConv(data.num_features, HIDDEN).double()
                self.conv2 = SAGEConv(HIDDEN, data.num_classes).double()

        def teardown(self, stage: str) -> None:
            self.last_stage = stage

    return Case(Module(), graph())


@idiom(source="Lightning docs: prepare_data and setup of the LightningModule; class weights from the graph")
def prepare_data_in_the_module() -> Case:
    class Module(Net):
        def prepare_data(self) -> None:
            self.prepared = True

        def setup(self, stage: str) -> None:
            self.class_weights = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0], dtype=self.dtype)

        def shared_step(self, batch: Data, mask: Tensor, name: str) -> Tensor:
            out = self(batch.x, batch.edge_index)
            losses = F.cross_entropy(out[mask], batch.y[mask], self.class_weights, reduction="none")
            self.log(f"{name}_loss", losses.mean())
            return losses.mean()

    return Case(Module(), graph())


@idiom(
    source="PyTorch docs: CrossEntropyLoss(weight=...) for unbalanced classes, a mean over weights and not over nodes",
)
def class_weights_in_cross_entropy() -> Case:
    class Module(Net):
        def shared_step(self, batch: Data, mask: Tensor, name: str) -> Tensor:
            out = self(batch.x, batch.edge_index)
            weight = torch.tensor([1.0, 2.0, 5.0, 1.0, 0.5], dtype=self.dtype)
            loss = F.cross_entropy(out[mask], batch.y[mask], weight=weight)
            self.log(f"{name}_loss", loss)
            return loss

    return Case(Module(), graph())


@idiom(source="Lightning docs: configure_callbacks")
def callbacks_of_the_module() -> Case:
    class Module(Net):
        def configure_callbacks(self) -> Any:
            return [EarlyStopping("val_loss", patience=2), ModelCheckpoint(monitor="val_loss")]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.5)

    return Case(Module(), graph(), trainer={"max_epochs": 12, "enable_checkpointing": True})


@idiom(
    source="Lightning docs: self.print, self.trainer.num_training_batches, is_global_zero, estimated_stepping_batches",
)
def numbers_of_the_trainer() -> Case:
    class Module(Net):
        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.print("loss of the step")
            self.log("batches", float(self.trainer.num_training_batches))
            self.log("progress", self.global_step / self.trainer.estimated_stepping_batches)
            return loss * (1 - self.current_epoch / self.trainer.max_epochs)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=int(self.trainer.estimated_stepping_batches)
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Case(Module(), graph())


@idiom(
    source="Lightning docs: self.all_gather of predictions in on_validation_epoch_end",
)
def predictions_gathered_from_all_ranks() -> Case:
    class Module(Net):
        def validation_step(self, batch: Data, batch_idx: int) -> None:
            out = self(batch.x, batch.edge_index)[batch.val_mask]
            self.right = (out.argmax(-1) == batch.y[batch.val_mask]).double()

        def on_validation_epoch_end(self) -> None:
            right = self.all_gather(self.right)
            if isinstance(right, Tensor):
                right = right.flatten()
            self.log("val_acc", right.mean())

    return Case(Module(), graph())


@idiom(
    source="Lightning forum: loss averaged over ranks by self.all_gather(loss).mean()",
)
def mean_over_ranks_by_all_gather() -> Case:
    class Module(Net):
        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mean_loss", self.all_gather(loss.detach()).mean(), rank_zero_only=True)
            return loss

    return Case(Module(), graph())


@idiom(source="Lightning docs: save_hyperparameters, self.hparams in steps")
def hyperparameters() -> Case:
    class Module(Net):
        def __init__(self, lr: float = 0.1, smoothing: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()

        def shared_step(self, batch: Data, mask: Tensor, name: str) -> Tensor:
            out = self(batch.x, batch.edge_index)
            loss = F.cross_entropy(out[mask], batch.y[mask], label_smoothing=self.hparams.smoothing)
            self.log(f"{name}_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])

    return Case(Module(), graph())


@idiom(source="Lightning docs: freeze and unfreeze in an epoch hook")
def layer_frozen_for_an_epoch() -> Case:
    class Module(Net):
        def on_train_epoch_start(self) -> None:
            self.conv1.requires_grad_(self.current_epoch > 0)

    return Case(Module(), graph())


@idiom(source="transfer learning: backbone frozen before fit, unfrozen in an epoch hook")
def layer_unfrozen_in_an_epoch_hook() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv1.requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.conv1.requires_grad_(True)

    return Case(Module(), graph())


@idiom(source="PyTorch docs: state dict hooks")
def state_dict_hooks() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self._register_state_dict_hook(lambda module, state, prefix, meta: state.update(extra=torch.ones(2)))
            self._register_load_state_dict_pre_hook(lambda state, *args: state.pop("extra", None))

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["epochs_seen"] = self.current_epoch

    return Case(Module(), graph(), trainer={"enable_checkpointing": True})


@idiom(source="Lightning docs: a module with predict_step left to its default, which calls forward(batch)")
def forward_takes_the_batch() -> Case:
    class Module(Net):
        def forward(self, batch: Data) -> Tensor:
            return self.conv2(self.conv1(batch.x, batch.edge_index).relu(), batch.edge_index)

        def shared_step(self, batch: Data, mask: Tensor, name: str) -> Tensor:
            loss = F.cross_entropy(self(batch)[mask], batch.y[mask])
            self.log(f"{name}_loss", loss)
            return loss

        predict_step = L.LightningModule.predict_step

    return Case(Module(), graph())


@idiom(source="a model trained elsewhere: no training_step, predict only", stages=("predict",))
def forward_only() -> Case:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.conv = GCNConv(FEATURES, CLASSES)

        def forward(self, batch: Data) -> Tensor:
            return self.conv(batch.x, batch.edge_index).log_softmax(-1)

    return Case(Module(), graph())


@idiom(source="training_step without batch_idx; validation_step with dataloader_idx")
def other_signatures() -> Case:
    class Module(Net):
        def training_step(self, batch: Data) -> Tensor:
            return self.shared_step(batch, batch.train_mask, "train")

        def validation_step(self, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.shared_step(batch, batch.val_mask, "val")

        def predict_step(self, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            return self(batch.x, batch.edge_index)

    return Case(Module(), graph())
