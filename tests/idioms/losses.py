"""Losses as people write them: over the mask, over other rows, weighted, of targets of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import Data
from torchmetrics import MeanSquaredError

from idioms.convs import HIDDEN, two
from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.plain import idiom
from idioms.steps import Classifier

LossOf = Callable[[Tensor, Any], Any]


class Trains(L.LightningModule):
    """A GCN with a loss of its outputs and the batch; the same loss is logged in validation."""

    def __init__(self, loss: LossOf, columns: int = CLASSES, validates: bool = True) -> None:
        super().__init__()
        self.model, self.loss, self.validates = two(nn.GCNConv), loss, validates
        self.model.convs[1] = nn.GCNConv(HIDDEN, columns)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.model(batch.x, batch.edge_index), batch)
        self.log("loss", loss["loss"] if isinstance(loss, dict) else loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(batch.x, batch.edge_index)[batch.val_mask]
        if self.validates:
            self.log("val_norm", out.square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch.x, batch.edge_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def case(loss: LossOf, data: Data | None = None, columns: int = CLASSES, **options: Any) -> Case:
    return Case(Trains(loss, columns), graph() if data is None else data, **options)


def over_mask(loss: Callable[..., Tensor], *args: Any, **options: Any) -> LossOf:
    """Returns a loss of the training nodes' outputs and labels."""
    return lambda out, batch: loss(out[batch.train_mask], batch.y[batch.train_mask], *args, **options)


def mean_over(chosen: Callable[[Any], Tensor]) -> LossOf:
    """Returns the cross-entropy of chosen nodes, and over how many it is, as the README has it."""

    def loss(out: Tensor, batch: Any) -> Any:
        rows = chosen(batch)
        total = F.cross_entropy(out[rows], batch.y[rows], reduction="sum")
        return {"loss": total / rows.sum().clamp(min=1), "loss_weight": rows.sum()}

    return loss


def plain(chosen: Callable[[Any], Tensor]) -> LossOf:
    """Returns the same as one writes it on one device."""
    return lambda out, batch: F.cross_entropy(out[chosen(batch)], batch.y[chosen(batch)])


OTHER_ROWS = "loss_weight"

# Over the mask ################################################################


@idiom(source="cross_entropy with label smoothing")
def label_smoothing() -> Case:
    return case(over_mask(F.cross_entropy, label_smoothing=0.1))


@idiom(source="cross_entropy of soft targets")
def soft_targets() -> Case:
    return case(lambda out, b: F.cross_entropy(out[b.train_mask], F.one_hot(b.y[b.train_mask], CLASSES).to(out.dtype)))


@idiom(source="cross_entropy with a weight of each class: its mean is over the weights")
def class_weights() -> Case:
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5]).double()
    return case(over_mask(F.cross_entropy, weight))


@idiom(source="cross_entropy with a weight of each class, and loss_weight")
def class_weights_with_loss_weight() -> Case:
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5]).double()

    def loss(out: Tensor, batch: Any) -> Any:
        rows, y = batch.train_mask, batch.y[batch.train_mask]
        total = weight[y].sum()
        return {"loss": F.cross_entropy(out[rows], y, weight, reduction="sum") / total, "loss_weight": total}

    return case(loss)


@idiom(source="weights of classes counted in the step: of this rank's nodes")
def class_weights_counted_in_the_step() -> Case:
    def loss(out: Tensor, batch: Any) -> Tensor:
        y = batch.y[batch.train_mask]
        weight = 1 / torch.bincount(y, minlength=CLASSES).clamp(min=1).to(out.dtype)
        return (F.cross_entropy(out[batch.train_mask], y, reduction="none") * weight[y]).mean()

    return case(loss)


@idiom(source="focal loss")
def focal_loss() -> Case:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        log_p = out.log_softmax(-1).gather(1, y.view(-1, 1)).view(-1)
        return (-((1 - log_p.exp()) ** 2) * log_p).mean()

    return case(over_mask(loss))


@idiom(source="multi_margin_loss")
def margin_loss() -> Case:
    return case(over_mask(F.multi_margin_loss))


@idiom(source="ogb's log-scaled loss, log(eps + loss)")
def log_loss() -> Case:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return ((F.cross_entropy(out, y, reduction="none") + 0.3).log() - torch.log(torch.tensor(0.3).double())).mean()

    return case(over_mask(loss))


@idiom(source="the sum over training nodes")
def sum_over_nodes() -> Case:
    return case(over_mask(F.cross_entropy, reduction="sum"))


@idiom(source="a penalty on weights beside the loss")
def penalty_beside_the_loss() -> Case:
    class Penalised(Trains):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx) + 0.01 * sum(p.square().sum() for p in self.parameters())
            self.log("with_penalty", loss)
            return loss

    return Case(Penalised(over_mask(F.cross_entropy)), graph())


@idiom(source="an auxiliary loss on hidden rows of the training nodes")
def auxiliary_loss() -> Case:
    def loss(out: Tensor, batch: Any) -> Tensor:
        rows = out[batch.train_mask]
        return (
            F.cross_entropy(rows, batch.y[batch.train_mask])
            + 0.1 * rows.square().sum(-1).mean()
            + 0.1 * rows.abs().mean()
        )

    return case(loss)


@idiom(
    source="a loss clamped from below: flooding",
)
def flooding() -> Case:
    return case(lambda out, b: (F.cross_entropy(out[b.train_mask], b.y[b.train_mask]) - 1.7).abs() + 1.7)


@idiom(source="the root of a mean")
def square_root_of_the_loss() -> Case:
    return case(lambda out, b: F.cross_entropy(out[b.train_mask], b.y[b.train_mask]).sqrt())


@idiom(source="an entropy over all nodes beside the loss")
def entropy_of_all_nodes() -> Case:
    def loss(out: Tensor, batch: Any) -> Tensor:
        p = out.softmax(-1)
        entropy = -(p * p.log()).sum(-1).mean()
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask]) + 0.1 * entropy

    return case(loss)


@idiom(source="a contrastive loss of pairs in the batch")
def contrastive() -> Case:
    def loss(out: Tensor, batch: Any) -> Tensor:
        z = F.normalize(out[batch.train_mask], dim=-1)
        return F.cross_entropy(z @ z.t() / 0.5, torch.arange(len(z)))

    return case(loss)


@idiom(source="the hardest tenth of the training nodes")
def hard_examples() -> Case:
    def loss(out: Tensor, batch: Any) -> Tensor:
        each = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], reduction="none")
        return each.topk(max(len(each) // 10, 1)).values.mean()

    return case(loss)


# Over other rows ##############################################################


@idiom(source="a class left out")
def class_left_out() -> Case:
    return case(plain(lambda b: b.train_mask & (b.y != 2)))


@idiom(source="a class left out, by the README")
def class_left_out_with_loss_weight() -> Case:
    return case(mean_over(lambda b: b.train_mask & (b.y != 2)))


@idiom(source="a twentieth of the nodes left out")
def few_nodes_left_out() -> Case:
    return case(plain(lambda b: b.train_mask & (b.n_id % 20 != 3)))


@idiom(source="a twentieth of the nodes left out, by the README")
def few_nodes_left_out_with_loss_weight() -> Case:
    return case(mean_over(lambda b: b.train_mask & (b.n_id % 20 != 3)))


@idiom(source="training on all nodes")
def all_nodes() -> Case:
    return case(lambda out, b: F.cross_entropy(out, b.y))


@idiom(source="training on all nodes, with loss_weight")
def all_nodes_with_loss_weight() -> Case:
    return case(lambda out, b: {"loss": F.cross_entropy(out, b.y), "loss_weight": len(b.y)})


@idiom(source="training on training and validation nodes")
def train_and_val() -> Case:
    return case(plain(lambda b: b.train_mask | b.val_mask))


@idiom(source="a mask of another name")
def other_mask() -> Case:
    data = graph()
    data.my_mask = torch.rand(80, generator=torch.Generator().manual_seed(3)) < 0.5
    return case(plain(lambda b: b.my_mask), data)


@idiom(source="a mask of another name, with loss_weight")
def other_mask_with_loss_weight() -> Case:
    data = graph()
    data.my_mask = torch.rand(80, generator=torch.Generator().manual_seed(3)) < 0.5
    return case(mean_over(lambda b: b.my_mask), data)


@idiom(source="pseudo-labels: nodes of which the model is sure")
def pseudo_labels() -> Case:
    def loss(out: Tensor, batch: Any) -> Tensor:
        sure = (out.softmax(-1).max(-1).values > 0.3) & ~batch.train_mask
        y = torch.where(batch.train_mask, batch.y, out.argmax(-1))
        rows = batch.train_mask | sure
        return F.cross_entropy(out[rows], y[rows])

    return case(loss)


@idiom(source="ignore_index: labels of -1 are no labels")
def ignore_index() -> Case:
    data = graph()
    data.y[data.train_mask & (data.y == 1)] = -1
    return case(over_mask(F.cross_entropy, ignore_index=-1), data)


@idiom(source="a mean over validation nodes with and without a label")
def logged_mean_over_unlabelled_nodes() -> Case:
    data = graph()
    data.y[data.val_mask & (data.y == 1)] = -1
    return case(over_mask(F.cross_entropy), data)


@idiom(source="index splits of a dict in the module")
def rows_by_ids_of_the_module() -> Case:
    ids = graph().train_mask.nonzero().view(-1)
    return case(lambda out, b: F.cross_entropy(out[ids], b.y[ids]))


@idiom(source="a weight of each node")
def weight_of_each_node() -> Case:
    data = graph()
    data.w = torch.linspace(0.2, 2, 80).double()

    def loss(out: Tensor, batch: Any) -> Tensor:
        each = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], reduction="none")
        return (each * batch.w[batch.train_mask]).sum() / batch.w[batch.train_mask].sum()

    return case(loss, data)


@idiom(source="PyG examples/graph_saint.py: normalised by node_norm and edge_norm", stages=("fit",))
def graph_saint_norms() -> Case:
    class Saint(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = two(lambda i, o: nn.GraphConv(i, o, aggr="add"))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self.model(batch.x, batch.edge_index, batch.edge_norm * batch.edge_weight).log_softmax(-1)
            loss = F.nll_loss(out, batch.y, reduction="none")
            return (loss * batch.node_norm)[batch.train_mask].sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    data = graph()
    data.node_norm = torch.linspace(0.5, 1.5, 80).double() / 30
    data.edge_weight = torch.ones(data.num_edges).double()
    data.edge_norm = torch.linspace(0.5, 1.5, data.num_edges).double()
    return Case(Saint(), data)


# Targets ######################################################################


def with_targets(y: Tensor) -> Data:
    data = graph()
    data.y = y
    return data


def _numbers(*columns: int) -> Tensor:
    return torch.randn(80, *columns, generator=torch.Generator().manual_seed(6)).double()


@idiom(source="regression: MSE of y [N]")
def mse() -> Case:
    return case(
        lambda out, b: F.mse_loss(out[b.train_mask].squeeze(-1), b.y[b.train_mask]), with_targets(_numbers()), 1
    )


@idiom(source="regression: L1 and Huber of y [N, 2]")
def l1_and_huber() -> Case:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.l1_loss(out, y) + F.huber_loss(out, y) + F.smooth_l1_loss(out, y, beta=0.5)

    return case(over_mask(loss), with_targets(_numbers(2)), 2)


@idiom(source="regression: y [N, 1] beside out [N, 1]")
def mse_of_a_column() -> Case:
    def loss(out: Tensor, batch: Any) -> Tensor:
        assert out.shape == batch.y.shape, (out.shape, batch.y.shape)
        return F.mse_loss(out[batch.train_mask], batch.y[batch.train_mask])

    return case(loss, with_targets(_numbers(1)), 1)


@idiom(source="OGB: y [N, 1], squeezed in the step")
def ogb_labels() -> Case:
    return case(
        lambda out, b: F.cross_entropy(out[b.train_mask], b.y.squeeze(1)[b.train_mask]),
        with_targets(graph().y.view(-1, 1)),
    )


@idiom(source="multi-label: BCE of y [N, C]")
def multi_label() -> Case:
    return case(over_mask(F.binary_cross_entropy_with_logits), with_targets((_numbers(CLASSES) > 0).double()))


@idiom(source="multi-label: BCE with pos_weight")
def multi_label_with_pos_weight() -> Case:
    weight = torch.linspace(1, 3, CLASSES).double()
    loss = over_mask(F.binary_cross_entropy_with_logits, pos_weight=weight)
    return case(loss, with_targets((_numbers(CLASSES) > 0).double()))


@idiom(source="binary: BCE of y [N]")
def binary() -> Case:
    data = with_targets((graph().y > 2).long())
    return case(
        lambda out, b: F.binary_cross_entropy_with_logits(out[b.train_mask].view(-1), b.y[b.train_mask].to(out.dtype)),
        data,
        1,
    )


@idiom(source="several tasks: a label and a number of each node")
def a_label_and_a_number() -> Case:
    data = graph()
    data.z = _numbers()

    def loss(out: Tensor, batch: Any) -> Tensor:
        rows = batch.train_mask
        return F.cross_entropy(out[rows, :CLASSES], batch.y[rows]) + 0.5 * F.mse_loss(out[rows, CLASSES], batch.z[rows])

    return case(loss, data, CLASSES + 1)


@idiom(source="self-supervised: reconstruct the features, as GraphMAE", stages=("fit",))
def masked_features() -> Case:
    return case(lambda out, b: F.mse_loss(out, b.x), None, FEATURES)


@idiom(source="self-supervised, with loss_weight", stages=("fit",))
def reconstruction_with_loss_weight() -> Case:
    return case(lambda out, b: {"loss": F.mse_loss(out, b.x), "loss_weight": len(b.x)}, None, FEATURES)


@idiom(source="regression, with a torchmetrics value", stages=("fit", "test"))
def a_number_of_each_node() -> Case:
    class Regresses(Classifier):
        def __init__(self) -> None:
            super().__init__(two(nn.GCNConv))
            self.mse = MeanSquaredError()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.mse_loss(self(batch)[batch.train_mask, 0], batch.y[batch.train_mask])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mse(self(batch)[batch.val_mask, 0], batch.y[batch.val_mask])
            self.log("val_mse", self.mse)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_l1", F.l1_loss(self(batch)[batch.test_mask, 0], batch.y[batch.test_mask]))

    return Case(Regresses(), with_targets(_numbers()))
