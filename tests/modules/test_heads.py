"""Heads over edges and over the whole graph, equal one device (gloo ranks, float64)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, Recorder, awkward_graph, quiet_trainer
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, MeanAggregation, MultiAggregation
from torch_geometric.utils import scatter

from lightning_gnn import DGCLStrategy, GraphDataModule, gather_halo, reduce_halo


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = GCNConv(FEATURES, 8)

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        loss, count = self.loss(batch)
        self.log("train_loss", loss, batch_size=int(count))
        return loss

    def predict_step(self, batch: Data, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class EdgeClassifier(Base):
    """Whether an edge is of some kind, from both of its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(16 + 8, 1)

    def forward(self, batch: Data) -> torch.Tensor:
        x = self.conv(batch.x, batch.edge_index).relu()
        source, target = batch.edge_index
        rows = gather_halo(x)
        # and what all out-edges of the source have in common, which lie on several ranks
        attr = scatter(batch.edge_attr.norm(dim=1), source, 0, dim_size=len(rows), reduce="sum")
        common = gather_halo(reduce_halo(attr)).view(-1, 1).expand(-1, 8)
        return self.head(torch.cat([rows[source], rows[target], common[source]], 1)).view(-1)

    def loss(self, batch: Data) -> Any:
        out, chosen = self(batch), batch.edge_train_mask
        loss = F.binary_cross_entropy_with_logits(out[chosen], batch.edge_label[chosen], reduction="sum")
        return loss / chosen.sum().clamp(min=1), chosen.sum()


class GraphRegressor(Base):
    """One row for the whole graph, by PyG's aggregations and by a sum of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = MultiAggregation(["mean", "max"])
        self.mean = MeanAggregation()
        self.head = torch.nn.Linear(8 * 4, CLASSES)

    def forward(self, batch: Data) -> torch.Tensor:
        x = self.conv(batch.x, batch.edge_index).tanh()
        squares = x.square().sum(0, keepdim=True)
        return self.head(torch.cat([self.pool(x), self.mean(x), squares], 1))

    def loss(self, batch: Data) -> Any:
        return F.mse_loss(self(batch), batch.target), 1


def run(rank: int, world_size: int, kind: Any, graph: Data, strategy: Any = None) -> Any:
    module, recorder = kind().double(), Recorder()
    strategy = strategy or DGCLStrategy(timeout=60)
    trainer = quiet_trainer(strategy, world_size, callbacks=[recorder])
    data = GraphDataModule(graph, partition="random")
    trainer.fit(module, datamodule=data)
    [predicted] = trainer.predict(module, datamodule=data)
    return recorder.epochs, recorder.gradients, module.state_dict(), predicted


@pytest.mark.parametrize("kind", [EdgeClassifier, GraphRegressor])
@pytest.mark.parametrize("world_size", [2, 3])
def test_heads_equal_one_device(ranks, kind, world_size):
    graph = awkward_graph()
    g = torch.Generator().manual_seed(4)
    graph.edge_label = torch.rand(graph.edge_index.size(1), generator=g).round().double()
    graph.edge_train_mask = torch.rand(graph.edge_index.size(1), generator=g) < 0.4
    graph.target = torch.randn(1, CLASSES, generator=g, dtype=torch.float64)
    expected = run(0, 1, kind, graph, "auto")
    rows = {EdgeClassifier: graph.edge_index.size(1), GraphRegressor: 1}[kind]
    assert len(expected[3]) == rows
    for found in ranks.run(world_size, run, kind, graph):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
