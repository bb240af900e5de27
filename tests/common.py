"""Graphs, models and training runs that tests share; importable in every rank."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import any_models
import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing, RGCNConv
from torch_geometric.nn.models import GAT, GCN, GIN, PNA, GraphSAGE
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_gnn import CommNet, DGCLStrategy, GNNStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.group import World
from lightning_gnn.comm.transport import TransportWrapper
from lightning_gnn.extensions.zero_rows.transport import ZeroRowsTransport

CLASSES, FEATURES = 5, 12

CAMPAIGN = bool(os.environ.get("LIGHTNING_GNN_TEST_ALL"))
"""Whether these tests are ``make test-all``, in which every training begins with the self-check, which is most of its time."""


def campaign(*values: Any) -> list[Any]:
    """Returns parameters that only ``make test-all`` tries."""
    return [pytest.param(*(each if isinstance(each, tuple) else [each]), marks=pytest.mark.campaign) for each in values]


def examples(count: int) -> settings:
    """Has hypothesis try a quarter of so many examples, four times as many in ``make test-all``."""
    return settings(max_examples=4 * count if CAMPAIGN else max(5, count // 4), deadline=None)


@contextmanager
def all_rows_sent() -> Iterator[None]:
    """Rows that are zero are sent too, as where none is: how many there are at most, a scheme decides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZeroRowsTransport, "messages", TransportWrapper.messages)
        yield


def awkward_graph(num_nodes: int = 60, seed: int = 0, dtype: torch.dtype = torch.float64) -> Data:
    """A directed graph with self-loops, duplicate edges, isolated nodes, a hub, unlabelled nodes and edge weights."""
    g = torch.Generator().manual_seed(seed)
    busy = num_nodes * 5 // 6  # the rest is isolated
    edge_index = torch.randint(0, busy, (2, 5 * num_nodes), generator=g)
    loops = torch.randint(0, busy, (8,), generator=g).repeat(2, 1)
    hub = torch.stack([torch.arange(busy), torch.zeros(busy, dtype=torch.long)])
    edge_index = torch.cat([edge_index, loops, edge_index[:, :20], hub], 1)
    y = torch.randint(0, CLASSES, (num_nodes,), generator=g)
    y[3] = -1
    split = torch.rand(num_nodes, generator=g)
    return Data(
        x=torch.randn(num_nodes, FEATURES, generator=g).to(dtype),
        edge_index=edge_index,
        edge_weight=torch.rand(edge_index.size(1), generator=g).to(dtype) + 0.1,
        edge_attr=torch.randn(edge_index.size(1), 3, generator=g).to(dtype),
        y=y,
        train_mask=split < 0.5,
        val_mask=(split >= 0.5) & (split < 0.75),
        test_mask=split >= 0.75,
    )


def three_nodes() -> Data:
    """A graph of fewer nodes than ranks, each in every mask."""
    graph = awkward_graph(seed=6)
    graph.x, graph.y = graph.x[:3], torch.tensor([0, 1, 2])
    keep = (graph.edge_index < 3).all(0)
    for name in ("edge_weight", "edge_attr"):
        graph[name] = graph[name][keep]
    graph.edge_index = graph.edge_index[:, keep]
    graph.train_mask = graph.val_mask = graph.test_mask = torch.ones(3, dtype=torch.bool)
    return graph


def one_training_node() -> tuple[Data, torch.Tensor]:
    """A graph with one training node, and parts: rank 0 owns that node, 1 nothing, 3 the isolated nodes."""
    graph = awkward_graph(seed=5)
    graph.train_mask[:] = False
    graph.train_mask[7] = True
    graph.y[7] = 2
    part = torch.full((60,), 2)
    part[:20] = 0
    part[50:] = 3
    return graph, part


class OwnConv(MessagePassing):
    """A user's conv: messages depend on both ends, maximum over neighbours."""

    def __init__(self, in_channels: int, out_channels: int, aggr: str = "max") -> None:
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(2 * in_channels, out_channels)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        return self.lin(torch.cat([x_i, x_j - x_i], -1)).tanh()


class OwnModel(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int, aggr: str = "max") -> None:
        super().__init__()
        self.first, self.second = OwnConv(in_channels, 8, aggr), OwnConv(8, out_channels, aggr)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Relations(torch.nn.Module):
    """Two relations, by where an edge stands in the list: the same in parts of one rank only."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.second = RGCNConv(in_channels, 8, 2), RGCNConv(8, out_channels, 2)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        relation = torch.arange(edge_index.size(1)) % 2
        return self.second(self.first(x, edge_index, relation).relu(), edge_index, relation)


def build(name: str, in_channels: int = FEATURES, out_channels: int = CLASSES, seed: int = 1) -> torch.nn.Module:
    """Returns the model of that name with weights that depend on the seed only."""
    torch.manual_seed(seed)
    size: dict[str, Any] = {
        "in_channels": in_channels,
        "hidden_channels": 16,
        "out_channels": out_channels,
        "num_layers": 2,
    }
    models: dict[str, Any] = {
        "gcn": lambda: GCN(**size),
        "gcn_cached": lambda: GCN(**size, cached=True),
        "sage": lambda: GraphSAGE(**size),
        "gcn_batch_norm": lambda: GCN(**size, norm="batch_norm"),
        "gin_batch_norm": lambda: GIN(**size, norm="batch_norm"),
        "sage_graph_norm": lambda: GraphSAGE(**size, norm="graph_norm"),
        "sage_sum": lambda: GraphSAGE(**size, aggr="sum"),
        "sage_max": lambda: GraphSAGE(**size, aggr="max"),
        "sage_several": lambda: GraphSAGE(**size, aggr=["mean", "max", "std"]),
        "pna": lambda: PNA(
            **size,
            aggregators=["mean", "min", "max", "std"],
            scalers=["identity", "amplification"],
            deg=torch.arange(9),
        ),
        "gin": lambda: GIN(**size),
        "gat": lambda: GAT(**size, heads=4),
        "gat_dropout": lambda: GAT(**size, heads=4, dropout=0.5),
        "gat_edges": lambda: GAT(**size, heads=2, edge_dim=3),
        "transformer_edges": lambda: Transformer(in_channels, out_channels, edge_dim=3),
        "gatv2": lambda: GAT(**size, heads=4, v2=True),
        "commnet": lambda: CommNet(**size),
        "transformer": lambda: Transformer(in_channels, out_channels),
        "graphconv": lambda: GraphConvs(in_channels, out_channels),
        "own": lambda: OwnModel(in_channels, out_channels),
        "own_mean": lambda: OwnModel(in_channels, out_channels, "mean"),
        "own_sum": lambda: OwnModel(in_channels, out_channels, "sum"),
        "relations": lambda: Relations(in_channels, out_channels),
        **any_models.MODELS,
    }
    return models[name]()


class Transformer(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int, edge_dim: int | None = None) -> None:
        super().__init__()
        from torch_geometric.nn import TransformerConv

        self.supports_edge_attr = edge_dim is not None
        self.first = TransformerConv(in_channels, 8, heads=2, beta=True, edge_dim=edge_dim)
        self.second = TransformerConv(16, out_channels, heads=1, edge_dim=edge_dim)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor | None = None) -> torch.Tensor:
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class GraphConvs(torch.nn.Module):
    """GraphConv with weights, sum and then mean."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        from torch_geometric.nn import GraphConv

        self.first, self.second = GraphConv(in_channels, 16), GraphConv(16, out_channels, aggr="mean")

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, edge_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.second(self.first(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


class UserModule(L.LightningModule):
    """What a user writes: an ordinary mean over the mask, plain self.log, torchmetrics of several kinds."""

    def __init__(self, model: torch.nn.Module, classes: int = CLASSES, lr: float = 0.01) -> None:
        super().__init__()
        self.model, self.lr = model, lr
        options: dict[str, Any] = {"num_classes": classes, "ignore_index": -1}
        self.acc = MulticlassAccuracy(average="micro", **options)
        self.f1 = MulticlassF1Score(**options)
        self.auroc = MulticlassAUROC(**options)

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        out = self.model(batch.x, batch.edge_index)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)
        self.log("train_loss", loss)
        return loss

    def evaluate(self, batch: Data, mask: torch.Tensor, stage: str) -> None:
        out = self.model(batch.x, batch.edge_index)[mask].softmax(-1)
        self.log(f"{stage}_loss", F.nll_loss(out.log(), batch.y[mask], ignore_index=-1))
        for name in ("acc", "f1", "auroc"):
            metric = getattr(self, name)
            metric.update(out, batch.y[mask])
            self.log(f"{stage}_{name}", metric)

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.evaluate(batch, batch.val_mask, "val")

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.evaluate(batch, batch.test_mask, "test")

    def predict_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        return self.model(batch.x, batch.edge_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Together(L.LightningModule):
    """Models beside each other, by name, which share nothing: a run of all costs little more than that of one."""

    def __init__(self, names: Sequence[str], sizes: tuple[int, int]) -> None:
        super().__init__()
        self.names = list(names)
        self.kinds = torch.nn.ModuleList(NodeClassifier(build(name, *sizes), num_classes=sizes[1]) for name in names)

    def losses(self, batch: Data, stage: str) -> torch.Tensor:
        mask, found = batch[f"{stage}_mask"], []
        for name, kind in zip(self.names, self.kinds):
            found.append(F.cross_entropy(kind(batch)[mask], batch.y[mask], ignore_index=-1))
            self.log(f"{stage}_loss of {name}", found[-1])
        return torch.stack(found).sum()

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        return self.losses(batch, "train")

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.losses(batch, "val")

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.losses(batch, "test")

    def predict_step(self, batch: Data, batch_idx: int) -> dict[str, torch.Tensor]:
        return {name: kind(batch) for name, kind in zip(self.names, self.kinds)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Gradients of biases before a batch norm are rounding alone: with an epsilon of 1e-8, Adam makes steps of them.
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-6)


class Recorder(L.Callback):
    """Keeps the logged values of every epoch, and the gradients of the first step."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self.gradients: list[torch.Tensor | None] | None = None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if self.gradients is None:
            self.gradients = [None if p.grad is None else p.grad.clone() for p in pl_module.parameters()]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.append(
            {
                k: float(v)
                for k, v in trainer.callback_metrics.items()
                if not k.startswith(("comm/", "cache/", "codec/", "sampling/", "throughput/", "check/"))
            }
        )


def quiet_trainer(strategy: Any, devices: int, self_check: bool = CAMPAIGN, **options: Any) -> L.Trainer:
    """Returns a Trainer that says and leaves nothing; `self_check` turns its strategy's off, not on."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    trainer = L.Trainer(strategy=strategy, devices=devices, **{**defaults, **options})
    if not self_check and isinstance(trainer.strategy, GNNStrategy):
        trainer.strategy.self_check = False
    return trainer


def outcome(
    run: L.Trainer, module: L.LightningModule, data: L.LightningDataModule, recorder: Recorder, fit: bool = True
) -> dict[str, Any]:
    """Trains, unless `fit` says no, tests and predicts; returns what came of it."""
    if fit:
        run.fit(module, datamodule=data)
    weights = copy.deepcopy(module.state_dict())
    [tested] = run.test(module, datamodule=data, verbose=False)
    [predicted] = run.predict(module, datamodule=data)
    return {
        "epochs": recorder.epochs,
        "gradients": recorder.gradients,
        "weights": weights,
        "test": tested,
        "predictions": predicted,
    }


def train(
    rank: int,
    world_size: int,
    source: Any,
    model: str | Sequence[str],
    *,
    strategy: Any = "dgcl",
    options: dict[str, Any] | None = None,
    module: str = "library",
    sizes: tuple[int, int] = (FEATURES, CLASSES),
    dtype: torch.dtype = torch.float64,
    data: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    self_check: bool = CAMPAIGN,
) -> dict[str, Any]:
    """Trains, tests and predicts on one rank; returns everything that must equal one device.

    Args:
        model: of `build`; several are trained together, see `Together`.
        strategy: its class, or a name that Lightning knows; "dgcl" for DGCLStrategy.
        options: of the strategy's class.
    """
    recorder = Recorder()
    wrapped: L.LightningModule
    if not isinstance(model, str):
        wrapped = Together(model, sizes).to(dtype)
    else:
        built = build(model, *sizes)
        wrapped = (
            NodeClassifier(built, num_classes=sizes[1]) if module == "library" else UserModule(built, sizes[1])
        ).to(dtype)
    datamodule = GraphDataModule(source, **(data or {}))
    if strategy == "dgcl":
        strategy = DGCLStrategy
    if isinstance(strategy, type):
        strategy = strategy(timeout=60, **(options or {}))
    run = quiet_trainer(strategy, world_size, self_check, callbacks=[recorder], **(trainer or {}))
    return outcome(run, wrapped, datamodule, recorder)


@contextmanager
def ranks_apart(apart: bool = True) -> Iterator[None]:
    """While open, every rank takes itself for the only one of its machine; nothing changes if not `apart`."""
    ranks_here = World.ranks_here
    if apart:
        World.ranks_here = lambda world: [world.rank]  # type: ignore[method-assign]
    try:
        yield
    finally:
        World.ranks_here = ranks_here  # type: ignore[method-assign]


def strategy_of_config(path: Path, strategy: str) -> Any:
    """Returns the strategy that the command line makes of a YAML config with this entry, which is written to `path`."""
    return of_config(path, strategy).trainer.strategy


def of_config(path: Path, strategy: str, data: str = "") -> Any:
    """Returns the command line of a YAML config with this strategy and these arguments of the datamodule."""
    path.write_text(
        f"""
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy: {strategy}
model:
  class_path: lightning_gnn.NodeClassifier
  init_args:
    model:
      class_path: torch_geometric.nn.models.GCN
      init_args: {{in_channels: 2, hidden_channels: 2, num_layers: 1, out_channels: 2}}
    num_classes: 2
data: {{class_path: lightning_gnn.GraphDataModule, init_args: {{source: lightning_gnn.planted_partition{data}}}}}
"""
    )
    return of_file(path)


def of_file(path: Path) -> Any:
    """Returns the command line of a YAML config: trainer, model and datamodule, not run."""
    from lightning.pytorch.cli import LightningCLI

    return LightningCLI(
        L.LightningModule,
        GraphDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=["--config", str(path)],
    )


def single(source: Any, model: str | Sequence[str], **options: Any) -> dict[str, Any]:
    """The reference: the same run on one device with Lightning's own strategy."""
    return train(0, 1, source, model, strategy="auto", **options)


def assert_same(found: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> None:
    """Compares two results of :func:`train`, elementwise."""
    assert len(found["epochs"]) == len(expected["epochs"])
    for ours, reference in zip(found["epochs"], expected["epochs"]):
        assert ours.keys() == reference.keys()
        for name in reference:
            torch.testing.assert_close(
                ours[name], reference[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )
    for key in ("gradients", "weights", "test", "predictions"):
        torch.testing.assert_close(found[key], expected[key], rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


def random_cut(num_nodes: int, size: int, seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the first node of each rank and the end, and the nodes that each reads of others."""
    draw = np.random.default_rng(seed)
    offsets = np.sort(np.concatenate([[0, num_nodes], draw.integers(0, num_nodes + 1, size - 1)]))
    halos = []
    for rank in range(size):
        others = np.setdiff1d(np.arange(num_nodes), np.arange(offsets[rank], offsets[rank + 1]))
        halos.append(np.sort(draw.permutation(others)[: draw.integers(0, len(others) + 1)]))
    return offsets, halos
