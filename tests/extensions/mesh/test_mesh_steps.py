"""Steps on samples of a mesh that reshape, select and differentiate samples and nodes, compared with one device (gloo ranks).

Data ranks have other numbers of samples in the last batch: 7 samples are batches of 4 and 3, 5 are batches of 4 and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import campaign, quiet_trainer
from sample_runs import FEATURES, NODES, TARGETS, Samples, graph_of_samples
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GraphConv
from torchmetrics import PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.classification import BinaryAUROC

from lightning_gnn import DGCLStrategy, GraphDataModule


class Net(L.LightningModule):
    """Two convs, whose output ``[B, N, F]`` a function turns into a loss."""

    def __init__(self, loss: Callable[[Net, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = GraphConv(FEATURES, 6), GraphConv(6, TARGETS)
        self.dense, self.readout = torch.nn.Linear(TARGETS, 4), torch.nn.Linear(NODES * TARGETS, 3)
        self.metrics = torch.nn.ModuleList([PearsonCorrCoef(), SpearmanCorrCoef(), BinaryAUROC()])
        self.loss, self.losses = loss, list[float]()

    def encode(self, x: Tensor, batch: Any) -> Tensor:
        return self.first(x, batch.edge_index).tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.second(self.encode(batch.x, batch), batch.edge_index)
        loss = self.loss(self, batch, out)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def centered(net: Net, batch: Any, out: Tensor) -> Tensor:
    values = out.flatten(1)
    return (values - values.mean(0)).square().mean()


def distances(net: Net, batch: Any, out: Tensor) -> Tensor:
    values = out.flatten(1)
    return torch.cdist(values, values).mean() + (values.softmax(1) @ values.t().softmax(0)).mean()


def readout(net: Net, batch: Any, out: Tensor) -> Tensor:
    return F.cross_entropy(net.readout(out.flatten(1)), batch.hour.long() % 3)


def joined(net: Net, batch: Any, out: Tensor) -> Tensor:
    pairs = out.reshape(-1, TARGETS)[:, 0].abs().mean() + out.permute(1, 0, 2).flatten(1).mean(0).square().sum()
    again = out.flatten(0, 1).view(out.size(0), NODES, TARGETS) - batch.y
    return pairs + again.square().mean() + out.permute(2, 1, 0).reshape(TARGETS, -1).std(1).sum()


def masked(net: Net, batch: Any, out: Tensor) -> Tensor:
    error = out - batch.y
    return error[batch.seen].abs().mean() + error[..., 0][batch.seen].square().sum()


def selected(net: Net, batch: Any, out: Tensor) -> Tensor:
    backwards = out[torch.arange(len(out) - 1, -1, -1)]
    return (out[0] - batch.y[0]).square().mean() + out[:2].square().mean() + (backwards - batch.y).square().mean()


def selected_nodes(net: Net, batch: Any, out: Tensor) -> Tensor:
    return out[:, :5].sum().square() / 100 + out[:, 3].mean()


def measured(net: Net, batch: Any, out: Tensor) -> Tensor:
    """Functions without a rule, and metrics that store all values."""
    values, targets = out.detach().flatten(), batch.y.flatten()
    found = [metric(values, targets) for metric in net.metrics[:2]]
    found.append(net.metrics[2](values.sigmoid(), (targets > 0).long()))
    net.losses += [float(each) for each in found]
    return (out - batch.y).square().mean() + torch.quantile(out.flatten(), 0.3)


def forces(net: Net, batch: Any, out: Tensor) -> Tensor:
    x = batch.x.detach().clone().requires_grad_()
    [found] = torch.autograd.grad(net.encode(x, batch).square().sum(), x)
    return (out - batch.y).square().mean().sqrt() + 0.1 * found.square().mean()


def recomputed_forces(net: Net, batch: Any, out: Tensor) -> Tensor:
    x = batch.x.detach().clone().requires_grad_()
    energy = checkpoint(lambda x: net.encode(x, batch), x, use_reentrant=False).square().sum()
    [found] = torch.autograd.grad(energy, x)
    return (out - batch.y).square().mean().sqrt() + 0.1 * found.square().mean()


def gradients_of_weights(net: Net, batch: Any, out: Tensor) -> Tensor:
    [of_out] = torch.autograd.grad(out.square().sum(), out, retain_graph=True)
    [of_weight] = torch.autograd.grad(out.square().mean(), net.second.lin_rel.weight, retain_graph=True)
    return (out - batch.y).square().mean().sqrt() * (1 + of_out.abs().mean() + of_weight.abs().sum())


def penalty(net: Net, batch: Any, out: Tensor) -> Tensor:
    values = net.dense(out).tanh()
    [of_out] = torch.autograd.grad(values.sum(), out, create_graph=True)
    [of_weight] = torch.autograd.grad(values.mean((0, 1)).square().sum(), net.dense.weight, create_graph=True)
    return (out - batch.y).square().mean() + of_out.square().mean() + of_weight.square().sum()


def hooks(net: Net, batch: Any, out: Tensor) -> Tensor:
    out.register_hook(lambda grad: grad.clamp(-0.01, 0.01) + grad.mean())
    mean = out.mean()
    mean.register_hook(lambda grad: 2 * grad)
    return (out - batch.y).square().mean().sqrt() + mean


def assigned(net: Net, batch: Any, out: Tensor) -> Tensor:
    """Assignments to samples, to nodes, and to rows of both."""
    values = out.clone()
    values[0] = 1.0
    values[1:3] = values[1:3] * 2
    values[-1] = out[0]
    values[batch.hour.argmax(), 2:9] = 3.0
    rows = out.flatten(0, 1).clone()
    rows[5:45] = 2.0
    rows[rows[:, 0].argsort()[:5]] = 4.0
    return (values * out).square().mean() + (rows * batch.y.flatten(0, 1)).mean()


def changed_views(net: Net, batch: Any, out: Tensor) -> Tensor:
    """In-place changes of views of a conv's result, which is contiguous on one device."""
    values = out.clone()
    values.view(-1, TARGETS).mul_(batch.hour.repeat_interleave(NODES).view(-1, 1))
    values.flatten(0, 1)[:, 0] = 7.0
    values.view(-1, TARGETS)[3] = 5.0
    out.view(-1, TARGETS).add_(1.0)
    return (values - batch.y).square().mean() + out.square().mean()


LOSSES = {each.__name__: each for each in (centered, distances, readout, joined, masked, selected, selected_nodes, measured)}
LOSSES |= {each.__name__: each for each in (assigned, changed_views)}
LOSSES |= {each.__name__: each for each in (forces, recomputed_forces, gradients_of_weights, penalty, hooks)}


def train(rank: int, world_size: int, graph_ranks: int, names: list[str], size: int) -> dict[str, Any]:
    """Trains an epoch with each loss; returns losses, logged metrics and weights."""
    found = {}
    for name in names:
        L.seed_everything(0, verbose=False)
        net = Net(LOSSES[name]).double()
        data = GraphDataModule(graph_of_samples(), samples=Samples(size=size), global_batch_size=4)
        strategy: Any = DGCLStrategy(graph_ranks=graph_ranks, timeout=60, self_check=False) if graph_ranks else "auto"
        quiet_trainer(strategy, world_size, max_epochs=1).fit(net, datamodule=data)
        weights = {name: value.detach().clone() for name, value in net.named_parameters()}
        found[name] = {"losses": torch.tensor(net.losses, dtype=torch.float64), **weights}
    return found


@cache
def on_one_device(name: str, size: int) -> dict[str, Any]:
    return train(0, 1, 0, [name], size)[name]


@pytest.mark.parametrize("size", [7, 5])
@pytest.mark.parametrize(("world_size", "graph_ranks"), [(4, 2), *campaign((2, 1), (2, 2))])
def test_steps(ranks, world_size, graph_ranks, size):
    for found in ranks.run(world_size, train, graph_ranks, [*LOSSES], size, timeout=280):
        for name, ours in found.items():
            torch.testing.assert_close(
                ours, on_one_device(name, size), rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
