"""What the fuzzer has found to be silently wrong, or refused though it is exact."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.functional.classification import multiclass_auroc

from idioms.harness import CLASSES, FEATURES, Case, directed, graph
from idioms.plain import Net, idiom
from lightning_gnn import GraphDataModule


@idiom(source="fuzzer: nodes mixed only while the Trainer is validating", stages=("fit",))
def mixes_while_validating() -> Case:
    class Module(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x / len(x) if self.trainer.validating else x, edge_index)

    return Case(Module(), graph())


@idiom(source="fuzzer: places of nodes among all, predicted as integers", stages=("predict",))
def order_of_nodes_predicted() -> Case:
    class Module(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch.x, batch.edge_index).argsort(0)

    return Case(Module(), graph())


@idiom(source="fuzzer: a layer made anew in an epoch hook, of random numbers")
def layer_drawn_anew_in_a_hook() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(5, 5)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.head(super().forward(x, edge_index))

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.head.reset_parameters()

    return Case(Module(), graph())


@idiom(
    source="fuzzer: labels of training nodes as inputs from the second step on",
    stages=("fit",),
)
def labels_fed_later() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            known = batch.train_mask if self.global_step else torch.zeros_like(batch.train_mask)
            x = batch.x + F.one_hot(batch.y, batch.x.size(1)) * known.unsqueeze(1)
            loss = F.cross_entropy(self(x, batch.edge_index)[mask], batch.y[mask])
            self.log(f"{stage}_loss", loss)
            return loss

    return Case(Module(), graph())


@idiom(
    source="fuzzer: rows counted in a hook after the step, logged in one after the epoch",
    stages=("fit",),
)
def counted_in_one_hook_logged_in_another() -> Case:
    class Module(Net):
        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.rows = float(batch.val_mask.sum())

        def on_validation_epoch_end(self) -> None:
            self.log("rows", self.rows)

    return Case(Module(), graph())


@idiom(
    source="fuzzer: a score of ranks' rows, many of which tie",
    stages=("fit",),
)
def score_of_rows_that_tie() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(FEATURES, CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out, y, mask = self.lin(batch.x), batch.y, batch.train_mask
            self.log("auroc", multiclass_auroc(out[mask].softmax(-1), y[mask], CLASSES))
            return F.cross_entropy(out[mask], y[mask])

    data = graph()
    data.x[data.y == 1] = 0.0
    return Case(Module(), data)


@idiom(
    source="fuzzer: a class that one rank has all of, left out of a loss that is weighed by hand",
    schemes=("vertex_cut",),
    stages=("fit",),
)
def class_of_one_rank_left_out_by_hand() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            rows = batch.train_mask & (batch.y != 1)
            loss = F.cross_entropy(self(batch.x, batch.edge_index)[rows], batch.y[rows], reduction="sum")
            loss = loss / rows.sum().clamp(min=1)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return {"loss": loss, "loss_weight": rows.sum()}

    return Case(Module(), directed(80))


@idiom(
    source="fuzzer: what is no mean over rows, logged around the backward",
    stages=("fit",),
)
def logged_before_the_backward() -> Case:
    class Module(Net):
        def on_before_backward(self, loss: Tensor) -> None:
            self.log("before_backward", loss.exp())

    return Case(Module(), graph())


@idiom(
    source="as the one above, of rows that the step has left, before the optimizer's step",
    stages=("fit",),
)
def logged_before_the_optimizer_steps() -> Case:
    class Module(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            self.out = super().forward(x, edge_index)
            return self.out

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.log("largest", self.out.detach().max())

    return Case(Module(), graph())


@idiom(source="Lightning's documentation: norms of gradients, logged before the optimizer's step", stages=("fit",))
def norms_of_gradients_logged() -> Case:
    class Module(Net):
        def on_after_backward(self) -> None:
            self.log("norm", torch.stack([each.grad.norm() for each in self.parameters()]).norm())

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.log_dict(grad_norm(self.conv1, norm_type=2))

    return Case(Module(), graph())


@idiom(source="as above, in manual optimisation", stages=("fit",))
def logged_before_the_backward_by_hand() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()
            self.manual_backward(self.shared_step(batch, batch.train_mask, "train"))
            self.optimizers().step()

        def on_before_backward(self, loss: Tensor) -> None:
            self.log("before_backward", loss.exp())

    return Case(Module(), graph())


@idiom(
    source="fuzzer: a share of the mask's rows, gathered until the epoch's end, beside a loss over others",
    schemes=("dgcl",),
    stages=("fit",),
)
def share_gathered_beside_a_loss_over_others() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.right: list[Tensor] = []
            with torch.no_grad():
                self.conv2.lin_l.bias.copy_(torch.tensor([0.0, -9.0, 0.0, 0.0, 0.0]))

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            out, y, mask = self(batch.x, batch.edge_index), batch.y, batch.train_mask
            rows = batch.n_id % 3 == 0
            self.right.append((out[mask].argmax(-1) == y[mask]).double() * (y[mask] == 1))
            return {"loss": F.cross_entropy(out[rows], y[rows]), "loss_weight": rows.sum()}

        def on_train_epoch_end(self) -> None:
            self.log("right", torch.cat(self.right).mean())
            self.right.clear()

    return Case(Module(), graph())


@idiom(
    source="fuzzer: the best loss of all epochs, kept by the step and logged at the epoch's end",
    stages=("fit",),
)
def best_loss_kept() -> Case:
    class Module(Net):
        best = float("inf")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.best = min(self.best, float(self.shared_step(batch, batch.val_mask, "val")))

        def on_validation_epoch_end(self) -> None:
            self.log("best", self.best)

    return Case(Module(), graph())


@idiom(source="the mean loss of an epoch, gathered and logged at its end", stages=("fit",))
def losses_gathered() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.losses.append(self.shared_step(batch, batch.val_mask, "val"))

        def on_validation_epoch_end(self) -> None:
            self.log("mean", torch.stack(self.losses).mean())
            self.losses.clear()

    return Case(Module(), graph())


@idiom(
    source="fuzzer: nodes of the training mask changed from epoch 1 on, where a rank has none",
    stages=("fit",),
)
def changed_by_a_mask_later() -> Case:
    class Module(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if self.current_epoch == 1:
                x = torch.where(self.mask.unsqueeze(1), 2 * x, x)
            return super().forward(x, edge_index)

        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            self.mask = batch.train_mask
            return super().shared_step(batch, mask, stage)

    return Case(Module(), graph())


@idiom(
    source="fuzzer: scores that torchmetrics takes for probabilities on one rank, and for logits on the other",
    stages=("fit",),
)
def logits_that_look_like_probabilities() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = BinaryAccuracy()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(batch.score[batch.val_mask], batch.y[batch.val_mask] % 2)
            self.log("val_acc", self.accuracy, on_step=False, on_epoch=True)

    data = graph()
    first = torch.arange(80) < 50
    data.score = torch.where(first, torch.linspace(-3, 3, 80), 0.4).double()
    return Case(Module(), GraphDataModule(data, partition=(~first).long().numpy()))


@idiom(
    source="fuzzer: rows chosen by what the model says of them, whose number may be that of a mask's",
    stages=("predict",),
)
def chosen_rows_predicted() -> Case:
    class Module(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self(batch.x, batch.edge_index)
            return out[out[:, 0] > out[:, 1]]

    return Case(Module(), graph())


@idiom(
    source="fuzzer: as many rows as a mask has, but others",
    stages=("predict",),
)
def as_many_rows_as_a_mask_predicted() -> Case:
    class Module(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self(batch.x, batch.edge_index)
            return out[out[:, 0].topk(int(batch.val_mask.sum())).indices]

    return Case(Module(), graph())


@idiom(source="fuzzer: a sum over rows that a hook logs once more, automatic optimisation", stages=("fit",))
def sum_logged_by_a_hook() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            return F.cross_entropy(self(batch.x, batch.edge_index)[mask], batch.y[mask], reduction="sum")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("again", outputs["loss"])

    return Case(Module(), graph())


@idiom(
    source="fuzzer: what the step returns is not a mean over rows, and a hook logs half of it",
    stages=("fit",),
)
def half_a_sum_logged_by_a_hook() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            return F.cross_entropy(self(batch.x, batch.edge_index)[mask], batch.y[mask], reduction="sum")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("half", outputs["loss"] / 2)

    return Case(Module(), graph())


@idiom(
    source="fuzzer: a count that is 0 whatever the features are, as a norm undoes them",
    stages=("fit",),
)
def count_behind_a_norm() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(CLASSES, affine=False)
            self.bias = torch.nn.Parameter(100.0 * torch.arange(CLASSES))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.norm(super().forward(x, edge_index)) + self.bias

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            is_first = batch.val_mask & (batch.y == 0)
            self.log("right", (self(batch.x, batch.edge_index)[is_first].argmax(-1) == 0).double().sum())

    return Case(Module(), graph())


class Keeping(Net):
    """Keeps rows of steps and norms of gradients, and logs both at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.right: list[Tensor] = []
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch.x, batch.edge_index)
        self.right.append((out.argmax(-1) == batch.y)[batch.train_mask].double())
        return {"loss": out.pow(2).mean(), "loss_weight": len(out)}

    def on_after_backward(self) -> None:
        self.norms.append(torch.stack([each.grad.norm() for each in self.parameters() if each.grad is not None]).sum())

    def on_train_epoch_end(self) -> None:
        self.log("right", torch.cat(self.right).mean())
        self.log("norm", torch.stack(self.norms).mean())
        self.right.clear()
        self.norms.clear()


@idiom(
    source="fuzzer: a hook at the epoch's end logs what another one has kept after the backward, and rows of a mask",
    stages=("fit",),
)
def norms_of_gradients_kept() -> Case:
    return Case(Keeping(), graph())


@idiom(
    source="a hook at the epoch's end logs what is there in training only",
    warns="could not run Module.on_train_epoch_end on a small graph .* the values that it logs on . ranks were not compared",
    stages=("fit",),
)
def hook_that_cannot_be_tried_out() -> Case:
    class Module(Net):
        def on_train_epoch_end(self) -> None:
            assert len(self.mask) == len(self.places)  # of the run, not of the small graphs
            self.log("half", 0.5)

        def setup(self, stage: str) -> None:
            self.mask = torch.ones(80)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.places = torch.ones(len(batch.x))
            return super().training_step(batch, batch_idx)

    return Case(Module(), graph())


@idiom(
    source="a hook at the epoch's end reads the learning rate and what is logged, then logs a mean of its own",
    stages=("fit",),
)
def hook_that_reads_optimizers_and_metrics() -> Case:
    class Module(Net):
        def on_train_epoch_end(self) -> None:
            self.log("lr", self.optimizers().param_groups[0]["lr"])
            self.log("next_lr", self.lr_schedulers().get_last_lr()[0])
            self.log("again", self.trainer.callback_metrics["train_loss"])
            self.log("exp", self.last.exp())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.last = super().training_step(batch, batch_idx)
            return self.last

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    return Case(Module(), graph())
