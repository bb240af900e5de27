"""The public API as a user's program has it; `mypy --strict` accepts it (test_packaging.py)."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

import lightning_gnn
from lightning_gnn import (
    AdaptiveThreshold,
    CachedVertexCutStrategy,
    CommunicationMonitor,
    CommunicationTrace,
    DGCLStrategy,
    GossipStrategy,
    GraphDataModule,
    LinkPredictor,
    NodeClassifier,
    SamplingStrategy,
    StagedStrategy,
    advise,
    check_parity,
    compare,
    planted_partition,
    split_edges,
)


class Net(L.LightningModule):
    """One's own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GCN(8, 16, num_layers=2, out_channels=4)

    def training_step(self, batch: Data, _: int) -> Tensor:
        out = self.model(batch.x, batch.edge_index)
        return torch.nn.functional.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def program(folder: Path) -> None:
    graph: Data = planted_partition(100, num_features=8, num_classes=4)
    data = GraphDataModule(graph, store=folder)
    classifier = NodeClassifier(GCN(8, 16, num_layers=2, out_channels=4), num_classes=4)
    callbacks: list[L.Callback] = [CommunicationMonitor(), CommunicationTrace(folder / "trace.json")]
    strategies: list[lightning_gnn.GNNStrategy] = [
        DGCLStrategy(codec="int8"),
        CachedVertexCutStrategy(cache=AdaptiveThreshold(epsilon=0.01)),
        SamplingStrategy([15, 10], 1024, weight_attr="w"),
        GossipStrategy(),
        StagedStrategy([{"strategy": "gossip", "epochs": 5}, "dgcl"]),
    ]
    trainer = L.Trainer(strategy=strategies[0], devices=2, accelerator="cpu", callbacks=callbacks)
    trainer.fit(classifier, datamodule=data)
    print(check_parity(Net(), data, ["dgcl"]), str(advise(classifier, data, devices=2)))
    links = LinkPredictor(GCN(8, 16, num_layers=2, out_channels=4))
    trainer.fit(links, datamodule=GraphDataModule(split_edges(graph)))
    found = compare(Net, {"source": "a.b"}, ["dgcl", {"strategy": "auto", "devices": 1}], devices=2, epochs=3)
    print(found["cells"], lightning_gnn.__version__)
