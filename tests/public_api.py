"""The public API as a user's program has it; `mypy --strict` accepts it (test_packaging.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models import GCN

import lightning_gnn
from lightning_gnn import (
    AdaptiveThreshold,
    AutoStrategy,
    CachedVertexCutStrategy,
    ClusterAllReduceStrategy,
    CommNet,
    CommNetConv,
    CommunicationMonitor,
    CoverStrategy,
    DGCLStrategy,
    DistributedEmbedding,
    GNNStrategy,
    GossipStrategy,
    GraphDataModule,
    LinkPredictor,
    NodeClassifier,
    NotExactError,
    SamplingStrategy,
    SpMM1DStrategy,
    SpMM2DStrategy,
    SpMM3DStrategy,
    SpMM15DStrategy,
    SpMMStrategy,
    TopKChanges,
    UnsupportedModelError,
    VertexCutStrategy,
    advise,
    check_parity,
    compare,
    gather_global,
    gather_halo,
    gather_nodes,
    global_num_nodes,
    local_rows,
    patch_globals,
    planted_partition,
    reduce_halo,
    register_adapter,
    register_row_rule,
    select_edges,
    split_by_time,
    split_edges,
)


class Net(L.LightningModule):
    """One's own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GCN(8, 16, num_layers=2, out_channels=4)

    def training_step(self, batch: Data, _: int) -> Tensor:
        assert isinstance(batch.y, Tensor)
        out = self.model(batch.x, batch.edge_index)
        return torch.nn.functional.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Doubled(torch.autograd.Function):
    """A function whose backward only its author knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


register_row_rule(Doubled)
doubled: Any = Doubled.apply


class Ranks(L.LightningModule):
    """What ranks ask each other for, in a step."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.rows = DistributedEmbedding(num_rows, 8, optimizer="adam", lr=0.1)
        self.conv, self.model = CommNetConv(8, 8), CommNet(8, 16, num_layers=2, out_channels=4)

    def training_step(self, batch: Data, _: int) -> Tensor:
        assert isinstance(batch.edge_index, Tensor) and isinstance(batch.y, Tensor)
        x: Tensor = self.conv(self.rows(batch.n_id), batch.edge_index)
        sent = gather_halo(x)[batch.edge_index[0]]
        sums: Tensor = reduce_halo(torch.zeros_like(gather_halo(x)).index_add(0, batch.edge_index[0], sent))
        edges, *_weights = select_edges(batch, "edge_train_mask", ["edge_weight"])
        out: Tensor = self.model(x + sums / global_num_nodes(x), edges)
        far: Tensor = gather_nodes(out, torch.tensor([0]))
        mask: Tensor = batch.train_mask
        total: Tensor = gather_global(doubled(far)).sum(0)
        with local_rows():
            print(len(batch.y), "nodes of this rank")
        return torch.nn.functional.cross_entropy(out[mask], batch.y[mask]) + total.mean()


@register_adapter(MessagePassing)
def adapter(conv: MessagePassing, graph: Any, layer: str) -> dict[str, Any]:
    if layer == "unknown":
        raise UnsupportedModelError(f"{layer}: no")
    return {"forward": patch_globals(conv.forward, degree=graph.out_degree)}


def program(folder: Path) -> None:
    graph: Data = planted_partition(100, num_features=8, num_classes=4)
    data = GraphDataModule(graph, partition_dir=folder)
    classifier = NodeClassifier(GCN(8, 16, num_layers=2, out_channels=4), num_classes=4)
    callbacks: list[L.Callback] = [CommunicationMonitor()]
    strategies: list[GNNStrategy] = [
        AutoStrategy(),
        CoverStrategy(plan="p2p", refine=True),
        DGCLStrategy(codec="int8"),
        SpMMStrategy(),
        SpMM1DStrategy(),
        SpMM15DStrategy(),
        SpMM2DStrategy(),
        SpMM3DStrategy(),
        VertexCutStrategy(),
        CachedVertexCutStrategy(cache=AdaptiveThreshold(epsilon=0.01)),
        CachedVertexCutStrategy(cache=TopKChanges(share=0.2)),
        SamplingStrategy([15, 10], 1024, weight_attr="w"),
        GossipStrategy(),
        ClusterAllReduceStrategy(),
    ]
    trainer = L.Trainer(strategy=strategies[0], devices=2, accelerator="cpu", callbacks=callbacks)
    trainer.fit(classifier, datamodule=data)
    print(check_parity(Net(), data, ["dgcl"]), str(advise(classifier, data, devices=2)))
    try:
        trainer.fit(Ranks(100), datamodule=data)
    except NotExactError as error:
        print(error)
    links = LinkPredictor(GCN(8, 16, num_layers=2, out_channels=4))
    trainer.fit(links, datamodule=GraphDataModule(split_edges(graph)))
    samples = split_by_time([{"x": torch.rand(30, 4)} for _ in range(10)], (0.6, 0.2, 0.2))
    GraphDataModule(graph, samples=samples[0], val_samples=samples[1], batch_size=2)
    found = compare(Net, {"source": "a.b"}, ["dgcl", {"strategy": "auto", "devices": 1}], devices=2, epochs=3)
    print(found["runs"], lightning_gnn.__version__)
