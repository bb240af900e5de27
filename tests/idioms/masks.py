"""Losses over masks as people write them, and what they log beside them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from idioms.harness import CLASSES, Case, graph
from idioms.plain import Net, idiom
from lightning_gnn import GraphDataModule

FIT = ("fit", "test")


def _losing(loss: Any, data: Any = None, **trainer: Any) -> Case:
    """`loss` is of the module, its output for all nodes, the batch and a mask."""

    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            value = loss(self, self(batch.x, batch.edge_index), batch, mask)
            self.log(f"{stage}_loss", value)
            return value

    return Case(Module(), graph() if data is None else data, trainer)


# Exact ########################################################################


@idiom(source="PyG examples: F.nll_loss of log_softmax", stages=FIT)
def negative_log_likelihood() -> Case:
    return _losing(lambda module, out, batch, mask: F.nll_loss(out.log_softmax(-1)[mask], batch.y[mask]))


@idiom(source="labels outside the mask replaced by ignore_index, loss over all rows", stages=FIT)
def ignored_labels() -> Case:
    return _losing(lambda module, out, batch, mask: F.cross_entropy(out, batch.y.where(mask, -100)))


@idiom(source="a sum divided by the number of rows, in place of a mean", stages=FIT)
def sum_divided_by_rows() -> Case:
    return _losing(
        lambda module, out, batch, mask: F.cross_entropy(out[mask], batch.y[mask], reduction="sum") / mask.sum()
    )


@idiom(source="rows of the mask by nonzero() and index_select", stages=FIT)
def rows_by_index() -> Case:
    def loss(module: Any, out: Tensor, batch: Any, mask: Tensor) -> Tensor:
        rows = mask.nonzero(as_tuple=True)[0]
        return F.cross_entropy(out.index_select(0, rows), batch.y.index_select(0, rows))

    return _losing(loss)


@idiom(source="a loss for each node times the mask, over the mask's sum", stages=FIT)
def masked_by_a_product() -> Case:
    def loss(module: Any, out: Tensor, batch: Any, mask: Tensor) -> Tensor:
        return (F.cross_entropy(out, batch.y, reduction="none") * mask).sum() / mask.sum()

    return _losing(loss)


@idiom(source="focal loss, label smoothing and a margin, a mean over nodes each", stages=FIT)
def focal_loss_with_margin() -> Case:
    def loss(module: Any, out: Tensor, batch: Any, mask: Tensor) -> Tensor:
        log = out[mask].log_softmax(-1).gather(1, batch.y[mask].view(-1, 1)).view(-1)
        smooth = F.cross_entropy(out[mask], batch.y[mask], label_smoothing=0.2)
        return -((1 - log.exp()) ** 2 * log).mean() + 0.5 * smooth + 0.1 * F.multi_margin_loss(out[mask], batch.y[mask])

    return _losing(loss)


@idiom(source="OGB proteins: several binary labels for each node", stages=FIT)
def several_binary_labels() -> Case:
    data = graph()
    data.y = F.one_hot(data.y, CLASSES).double()
    return _losing(lambda module, out, batch, mask: F.binary_cross_entropy_with_logits(out[mask], batch.y[mask]), data)


@idiom(source="regression of a node's value, Huber loss", stages=FIT)
def regression() -> Case:
    data = graph()
    data.y = data.x[:, 0].sin()
    return _losing(lambda module, out, batch, mask: F.smooth_l1_loss(out[mask, 0], batch.y[mask]), data)


@idiom(source="consistency: distance to the output of a second forward with scaled features", stages=FIT)
def consistency() -> Case:
    def loss(module: Any, out: Tensor, batch: Any, mask: Tensor) -> Tensor:
        other = module(batch.x * 0.9, batch.edge_index)
        return F.cross_entropy(out[mask], batch.y[mask]) + F.mse_loss(out[mask], other[mask])

    return _losing(loss)


@idiom(source="distillation from a frozen teacher in the module", stages=FIT)
def distillation() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.conv1), copy.deepcopy(self.conv2)
            for number, conv in enumerate(self.teacher):
                self.add_module(f"teacher{number}", conv.requires_grad_(False))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            first, second = self.teacher
            with torch.no_grad():
                soft = second(first(batch.x * 2, batch.edge_index).relu(), batch.edge_index)[batch.train_mask].softmax(
                    -1
                )
            out = self(batch.x, batch.edge_index)[batch.train_mask]
            return F.kl_div(out.log_softmax(-1), soft, reduction="batchmean")

    return Case(Module(), graph())


@idiom(source="a loss of several losses whose weights are learned (Kendall et al.)", stages=FIT)
def learned_weights_of_losses() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log_variances = torch.nn.Parameter(torch.zeros(2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self(batch.x, batch.edge_index)[batch.train_mask]
            y = batch.y[batch.train_mask]
            losses = torch.stack([F.cross_entropy(out, y), F.multi_margin_loss(out, y)])
            self.log_dict({f"weight{i}": each for i, each in enumerate(self.log_variances)})
            return (losses * (-self.log_variances).exp() + self.log_variances).sum()

    return Case(Module(), graph())


@idiom(source="the best weights kept in memory by the module, put back when training ends")
def best_weights_kept_in_memory() -> Case:
    class Module(Net):
        best = float("inf")

        def on_validation_end(self) -> None:
            loss = float(self.trainer.callback_metrics["val_loss"])
            if loss < self.best and not self.trainer.sanity_checking:
                self.best, self.kept = loss, copy.deepcopy(self.state_dict())

        def on_train_end(self) -> None:
            self.load_state_dict(self.kept)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.5)

    return Case(Module(), graph(), {"max_epochs": 6})


# Other rows than those of the mask ############################################


@idiom(source="README: loss_weight for a class left out", stages=FIT)
def class_left_out_with_loss_weight() -> Case:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            out = self(batch.x, batch.edge_index)
            chosen = batch.train_mask & (batch.y != 0)
            loss = F.cross_entropy(out[chosen], batch.y[chosen], reduction="sum") / chosen.sum().clamp(min=1)
            self.log("train_loss", loss, batch_size=int(chosen.sum()))
            return {"loss": loss, "loss_weight": chosen.sum()}

    return Case(Module(), graph())


@idiom(
    source="a class left out, without loss_weight",
    stages=("fit",),
)
def class_left_out() -> Case:
    def loss(module: Any, out: Tensor, batch: Any, mask: Tensor) -> Tensor:
        chosen = mask & (batch.y != 0)
        return F.cross_entropy(out[chosen], batch.y[chosen])

    return _losing(loss)


@idiom(
    source="a class left out from an epoch on",
    stages=("fit",),
)
def class_left_out_later() -> Case:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self(batch.x, batch.edge_index)
            chosen = batch.train_mask & ((batch.y != 0) | torch.tensor(self.current_epoch < 2))
            return F.cross_entropy(out[chosen], batch.y[chosen])

    return Case(Module(), graph(), {"max_epochs": 6})


@idiom(source="online hard example mining: the half with the largest losses", stages=("fit",))
def hardest_half() -> Case:
    def loss(module: Any, out: Tensor, batch: Any, mask: Tensor) -> Tensor:
        losses = F.cross_entropy(out[mask], batch.y[mask], reduction="none")
        return losses.topk((len(losses) + 1) // 2).values.mean()

    return _losing(loss)


@idiom(source="training and validation nodes together, for a last fit", stages=("fit",))
def trained_on_validation_nodes_too() -> Case:
    def loss(module: Any, out: Tensor, batch: Any, mask: Tensor) -> Tensor:
        rows = mask | batch.val_mask if module.training else mask
        return F.cross_entropy(out[rows], batch.y[rows])

    return _losing(loss)


@idiom(
    source="a mean over all nodes beside the one over the mask: entropy of all outputs",
    stages=("fit",),
)
def entropy_of_all_nodes() -> Case:
    def loss(module: Any, out: Tensor, batch: Any, mask: Tensor) -> Tensor:
        entropy = -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean()
        return F.cross_entropy(out[mask], batch.y[mask]) + 0.1 * entropy

    return _losing(loss)


@idiom(source="the same step's loss by a square root", stages=("fit",))
def root_of_the_loss() -> Case:
    return _losing(lambda module, out, batch, mask: F.cross_entropy(out[mask], batch.y[mask]).sqrt())


# What is logged beside ########################################################


@idiom(
    source="PyG examples: test() gives the accuracy of all three masks",
    stages=("test",),
)
def accuracy_of_all_masks() -> Case:
    class Module(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            right = self(batch.x, batch.edge_index).argmax(-1) == batch.y
            for name in ("train", "val", "test"):
                self.log(f"{name}_acc", right[batch[f"{name}_mask"]].double().mean())

    return Case(Module(), graph())


@idiom(source="the accuracy of all three masks, with batch_size of each", stages=FIT)
def accuracy_of_all_masks_with_batch_size() -> Case:
    class Module(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            right = self(batch.x, batch.edge_index).argmax(-1) == batch.y
            for name in ("train", "val", "test"):
                mask = batch[f"{name}_mask"]
                self.log(f"{name}_acc", right[mask].double().mean(), batch_size=int(mask.sum()))

    return Case(Module(), graph())


@idiom(
    source="Lightning with PyG: batch_size=1 given to self.log, one graph for each batch",
    stages=FIT,
)
def batch_size_of_one_graph() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            loss = F.cross_entropy(self(batch.x, batch.edge_index)[mask], batch.y[mask])
            self.log(f"{stage}_loss", loss, batch_size=1)
            return loss

    return Case(Module(), graph())


@idiom(
    source="Lightning with PyG: batch_size=batch.num_nodes beside a loss over a mask",
    stages=FIT,
)
def batch_size_of_all_nodes_beside_a_mask() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            loss = F.cross_entropy(self(batch.x, batch.edge_index)[mask], batch.y[mask])
            self.log(f"{stage}_loss", loss, batch_size=batch.num_nodes)
            return loss

    return Case(Module(), graph())


@idiom(source="the size of the batch logged", stages=FIT)
def number_of_nodes_logged() -> Case:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("nodes", float(batch.num_nodes))
            return super().training_step(batch, batch_idx)

    return Case(Module(), graph())


class _TwoLoaders(GraphDataModule):
    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), super().test_dataloader()]


@idiom(
    source="Lightning docs: several validation loaders, dataloader_idx",
    stages=("fit",),
)
def two_validation_loaders() -> Case:
    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            mask = batch.test_mask if dataloader_idx else batch.val_mask
            loss = F.cross_entropy(self(batch.x, batch.edge_index)[mask], batch.y[mask])
            self.log("other_loss" if dataloader_idx else "val_loss", loss, add_dataloader_idx=False)

    return Case(Module(), _TwoLoaders(graph()))
