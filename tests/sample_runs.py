"""Samples on one graph, models of them, and training runs that tests share; importable in every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import quiet_trainer
from torch import Tensor
from torch.nn import BatchNorm2d, Conv2d
from torch_geometric.data import Data
from torch_geometric.nn import (
    MLP,
    BatchNorm,
    DirGNNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphNorm,
    LayerNorm,
    MessagePassing,
    SAGEConv,
    global_mean_pool,
)
from torch_geometric.utils import to_dense_adj

from lightning_gnn import DGCLStrategy, DistributedEmbedding, GraphDataModule, gather_halo, gather_nodes, reduce_halo

NODES, EDGES, SAMPLES, STEPS, FEATURES, TARGETS = 40, 200, 9, 4, 5, 3


def graph_of_samples() -> Data:
    """A graph with edge weights and edge features, without node features."""
    g = torch.Generator().manual_seed(1)
    return Data(
        edge_index=torch.randint(0, NODES, (2, EDGES), generator=g),
        edge_weight=torch.rand(EDGES, generator=g).double() + 0.1,
        edge_attr=torch.randn(EDGES, 2, generator=g).double(),
        num_nodes=NODES,
    )


class Samples(torch.utils.data.Dataset[Any]):
    """Random samples with node features ``x``, targets ``y``, a mask of sensors ``seen``, and one number ``hour``."""

    def __init__(self, steps: int | None = None, size: int = SAMPLES) -> None:
        g = torch.Generator().manual_seed(3)
        shape = (NODES, FEATURES) if steps is None else (steps, NODES, FEATURES)
        self.x = torch.randn(size, *shape, generator=g).double()
        self.y = torch.randn(size, NODES, TARGETS, generator=g).double()
        self.seen = torch.rand(size, NODES, generator=g) < 0.7

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "seen": self.seen[index], "hour": float(index % 24)}


# Models #######################################################################


class TwoConvs(torch.nn.Module):
    """Two convs of one kind."""

    def __init__(self, make: Callable[[int, int], torch.nn.Module], weights: bool) -> None:
        super().__init__()
        self.first, self.second, self.weights = make(FEATURES, 8), make(8, TARGETS), weights

    def forward(self, batch: Data) -> Tensor:
        edges = (batch.edge_index, batch.edge_weight) if self.weights else (batch.edge_index,)
        return self.second(self.first(batch.x, *edges).relu(), *edges)


class EdgeBlock(MessagePassing):
    """Block of MeshGraphNet: updates edges, then nodes."""

    def __init__(self, size: int) -> None:
        super().__init__(aggr="sum")
        self.of_edges = torch.nn.Sequential(torch.nn.Linear(3 * size, size), torch.nn.ReLU(), torch.nn.LayerNorm(size))
        self.of_nodes = torch.nn.Sequential(torch.nn.Linear(2 * size, size), torch.nn.ReLU(), torch.nn.LayerNorm(size))

    def forward(self, x: Tensor, edge_index: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        new_edges = self.edge_updater(edge_index, x=x, edges=edges)
        out = self.propagate(edge_index, x=x, edges=new_edges)
        return x + self.of_nodes(torch.cat([x, out], -1)), edges + new_edges

    def edge_update(self, x_i: Tensor, x_j: Tensor, edges: Tensor) -> Tensor:
        return self.of_edges(torch.cat([x_i, x_j, edges], -1))

    def message(self, edges: Tensor) -> Tensor:
        return edges


class MeshGraphNet(torch.nn.Module):
    """Encoder, two blocks and decoder."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.nodes, self.edges = torch.nn.Linear(FEATURES, size), torch.nn.Linear(2, size)
        self.blocks = torch.nn.ModuleList(EdgeBlock(size) for _ in range(2))
        self.out = torch.nn.Linear(size, TARGETS)

    def forward(self, batch: Data) -> Tensor:
        x, edges = self.nodes(batch.x), self.edges(batch.edge_attr)
        edges = edges.expand(x.size(0), *edges.shape)
        for block in self.blocks:
            x, edges = block(x, batch.edge_index, edges)
        return self.out(x)


class ConvGRU(torch.nn.Module):
    """Gated recurrent unit whose maps are graph convs, as in GConvGRU of PyG Temporal; over ``x [B, T, N, F]``."""

    def __init__(self, size: int = TARGETS) -> None:
        super().__init__()
        self.of_x = torch.nn.ModuleList(GraphConv(FEATURES, size) for _ in range(3))
        self.of_state = torch.nn.ModuleList(GraphConv(size, size) for _ in range(3))

    def forward(self, batch: Data) -> Tensor:
        x, edges = batch.x, (batch.edge_index, batch.edge_weight)
        state = x.new_zeros(x.size(0), x.size(2), TARGETS)
        for step in range(x.size(1)):
            update, reset, new = (conv(x[:, step], *edges) for conv in self.of_x)
            update = (update + self.of_state[0](state, *edges)).sigmoid()
            reset = (reset + self.of_state[1](state, *edges)).sigmoid()
            new = (new + self.of_state[2](state * reset, *edges)).tanh()
            state = update * state + (1 - update) * new
        return state


class ConvsOfTime(torch.nn.Module):
    """Convolutions over time, batch norm over samples, nodes and time, and a graph conv: STGCN."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(FEATURES, size, (1, 2)), torch.nn.Conv2d(size, TARGETS, (1, 2))
        self.norm, self.conv = torch.nn.BatchNorm2d(size), GraphConv(size, size)
        self.of_nodes = torch.nn.LayerNorm([NODES, size])

    def forward(self, batch: Data) -> Tensor:
        x = self.norm(self.first(batch.x.permute(0, 3, 2, 1))).relu()  # [B, C, N, T]
        x = self.of_nodes(self.conv(x.permute(0, 3, 2, 1), batch.edge_index, batch.edge_weight))
        return self.last(x.permute(0, 3, 2, 1)).mean(-1).transpose(1, 2)


class RNNOfTime(torch.nn.Module):
    """GRU over time for each sample and node, ``[B * N, T, F]``, then a graph conv; an embedding and a parameter per node."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.rnn, self.conv = torch.nn.GRU(FEATURES, size, batch_first=True), GCNConv(size, TARGETS)
        self.embedding = torch.nn.Embedding(NODES, size)
        self.bias = torch.nn.Parameter(torch.zeros(NODES, TARGETS))

    def forward(self, batch: Data) -> Tensor:
        samples, steps, nodes, features = batch.x.shape
        x = batch.x.permute(0, 2, 1, 3).reshape(samples * nodes, steps, features)
        x = self.rnn(x)[1][-1].view(samples, nodes, -1) + self.embedding.weight
        return self.conv(x, batch.edge_index) + self.bias


class GIN(torch.nn.Module):
    """GINConv with a network; einsum; an attention of each node over samples' time."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        net = torch.nn.Sequential(torch.nn.Linear(FEATURES, size), torch.nn.ReLU(), torch.nn.Linear(size, size))
        self.conv, self.map = GINConv(net), torch.nn.Parameter(torch.randn(size, TARGETS))

    def forward(self, batch: Data) -> Tensor:
        out = torch.einsum("bnf,ft->bnt", self.conv(batch.x, batch.edge_index), self.map)
        return out * (1 + batch.hour.view(-1, 1, 1) / 24)


class WaveNet(torch.nn.Module):
    """Gated convolutions over time, and two hops of diffusion over dense supports ``[N, N]``.

    The supports are walks along edges in both directions (DCRNN), and an adjacency that is learned (Graph WaveNet).
    """

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        of_nodes = torch.randn(NODES, 4), torch.randn(4, NODES)
        self.sources, self.targets = map(torch.nn.Parameter, of_nodes)
        adjacency = to_dense_adj(graph_of_samples().edge_index)[0].double()
        walks = [each / each.sum(1, keepdim=True).clamp(min=1) for each in (adjacency, adjacency.t())]
        self.register_buffer("walks", torch.stack(walks))
        self.start, self.values, self.gate = Conv2d(FEATURES, size, 1), Conv2d(size, size, (1, 2)), Conv2d(size, size, (1, 2))
        self.map, self.norm, self.out = Conv2d(7 * size, size, 1), BatchNorm2d(size), Conv2d(size, TARGETS, (1, STEPS - 1))

    def forward(self, batch: Data) -> Tensor:
        x = self.start(batch.x.permute(0, 3, 2, 1))  # [B, C, N, T]
        found = [h := self.values(x).tanh() * self.gate(x).sigmoid()]
        for support in (*self.walks, torch.softmax((self.sources @ self.targets).relu(), 1)):
            hop = h
            for _ in range(2):
                hop = torch.einsum("bcnt,nm->bcmt", hop, support)
                found.append(hop)
        return self.out(self.norm(self.map(torch.cat(found, 1)))).squeeze(-1).transpose(1, 2)


class OtherNodes(torch.nn.Module):
    """Reads nodes by original ids, and sources and targets of edges; over ``x [B, N, F]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(FEATURES, TARGETS)

    def forward(self, batch: Data) -> Tensor:
        h = self.conv(batch.x, batch.edge_index)
        hubs = gather_nodes(h.transpose(0, 1), torch.tensor([NODES - 1, 3, 3, 0]))  # [4, B, F]
        pairs = gather_nodes(h.movedim(-2, 0), torch.tensor([[1, 2], [3, 4]]))  # [2, 2, B, F]
        first = gather_nodes(batch.n_id, torch.arange(TARGETS)) / NODES
        rows, (source, target) = h.transpose(0, 1), batch.edge_index
        halo = gather_halo(rows)
        values = (halo[source] - rows[target]).tanh()
        back = torch.zeros(halo.size(0), *values.shape[1:], dtype=h.dtype).index_add(0, source, values)
        h = h + reduce_halo(back).transpose(0, 1)
        return h + hubs.sum(0).unsqueeze(1) + pairs.prod(1).mean(0).unsqueeze(1).tanh() + first


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: TwoConvs(GCNConv, True),
    "sage": lambda: TwoConvs(SAGEConv, False),
    "sage_max": lambda: TwoConvs(lambda *size: SAGEConv(*size, aggr="max"), False),
    "graph_conv": lambda: TwoConvs(GraphConv, True),
    "gin": GIN,
    "mesh_graph_net": MeshGraphNet,
    "conv_gru": ConvGRU,
    "convs_of_time": ConvsOfTime,
    "rnn_of_time": RNNOfTime,
    "wave_net": WaveNet,
    "other_nodes": OtherNodes,
    "both_ways": lambda: TwoConvs(lambda *size: DirGNNConv(SAGEConv(*size)), False),
}
OVER_TIME = {"conv_gru", "convs_of_time", "rnn_of_time", "wave_net"}
"""Models of samples with time steps."""


class GAT(torch.nn.Module):
    """Attention with and without edge features, and a mean over the nodes of each sample; over ``x [B * N, F]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GATConv(FEATURES, 4, heads=2), GATv2Conv(8, TARGETS, edge_dim=2)

    def forward(self, batch: Data) -> Tensor:
        h = F.elu(self.first(batch.x, batch.edge_index))
        of_samples = global_mean_pool(h, batch.batch, batch.num_graphs)[:, :TARGETS] * (1 + batch.hour.view(-1, 1) / 24)
        return self.second(h, batch.edge_index, batch.edge_attr) + of_samples[batch.batch]


class Norms(torch.nn.Module):
    """Norms in a conv and between convs, of all samples and of each sample; over ``x [B * N, F]``."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.first, self.last = GINConv(MLP([FEATURES, size, size], norm="batch_norm")), GraphConv(size, TARGETS)
        self.of_all, self.of_sample, self.layer = BatchNorm(size), GraphNorm(size), LayerNorm(size, mode="graph")

    def forward(self, batch: Data) -> Tensor:
        h = self.of_all(self.first(batch.x, batch.edge_index)).relu()
        h = h + self.layer(self.of_sample(h, batch.batch), batch.batch)
        return self.last(h, batch.edge_index)


class EdgeReader(torch.nn.Module):
    """Reads rows of sources and targets without a conv; over ``x [B * N, F]``."""

    def __init__(self) -> None:
        super().__init__()
        self.map = torch.nn.Linear(2 * FEATURES + 2, TARGETS)

    def forward(self, batch: Data) -> Tensor:
        source, target = batch.edge_index
        values = self.map(torch.cat([batch.x[source], batch.x[target], batch.edge_attr], -1)).tanh()
        return torch.zeros(len(batch.x), TARGETS, dtype=values.dtype).index_add(0, target, values)


CONCATENATED: dict[str, Callable[[], torch.nn.Module]] = {
    "gat": GAT,
    "edge_reader": EdgeReader,
    "norms": Norms,
    "concatenated_gcn": lambda: TwoConvs(GCNConv, True),
    "concatenated_sage": lambda: TwoConvs(lambda *size: SAGEConv(*size, aggr="max"), False),
}
"""Models of concatenated samples, as in batches of PyG."""


class OrderedConv(MessagePassing):
    """Conv that depends on the order of nodes and edges: weights in list order, of sorted edges; as DConv of PyG Temporal."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__(aggr="sum")
        self.map = torch.nn.Linear(size, out)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        order = (edge_index[0] * x.size(-2) + edge_index[1]).argsort(stable=True)
        return self.map(self.propagate(edge_index[:, order].flip(0), x=x, weight=weight))

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class OfNodes(torch.nn.Module):
    """Rows that each node learns, on the owner of the node; over stacked or concatenated samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.some = (DistributedEmbedding(NODES, FEATURES, name) for name in ("adam", "sgd"))
        self.conv = GraphConv(FEATURES, TARGETS)

    def forward(self, batch: Data) -> Tensor:
        rows = self.rows(batch.n_id) + self.some(batch.n_id[:NODES]).mean(0) * self.some(torch.arange(3))[0]
        return self.conv(batch.x + rows, batch.edge_index)


LEARNED = {"learned": OfNodes, "concatenated_learned": OfNodes}
"""Models with rows that are not parameters."""


IN_ORDER = {"ordered_conv": lambda: TwoConvs(OrderedConv, True)}
"""Models that depend on the order of nodes and edges, for graphs that are not divided."""


class SampleModule(L.LightningModule):
    """Masked errors, means, and a root of a mean over samples, which is not the mean of ranks' roots."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.losses, self.codec_errors = model, list[float](), list[Any]()

    def loss(self, batch: Data) -> Tensor:
        error = (self.model(batch) - batch.y).square().mean(-1)
        return ((error * batch.seen).sum() / batch.seen.sum()).sqrt() + 0.1 * error.mean()

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=batch.x.size(0), sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def on_after_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
        batch.x = batch.x - batch.x.mean()
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Data, batch_idx: int) -> None:
        self.log("end_loss", batch.y.mean(), on_step=False, on_epoch=True, batch_size=len(batch.hour))

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        loss = F.l1_loss(self.model(batch), batch.y)
        self.log("val_loss", loss, batch_size=len(batch.x))
        self.log("inferred_loss", loss)  # weighted by the batch size that Lightning infers on one device

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self.model(batch)

    def on_train_epoch_end(self) -> None:
        self.codec_errors.append(self.trainer.callback_metrics.get("codec/error"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train_samples(
    rank: int,
    world_size: int,
    names: Sequence[str],
    graph_ranks: int = 1,
    strategy: Any = DGCLStrategy,
    options: dict[str, Any] | None = None,
    global_batch_size: int = 4,
    partition: Any = "random",
    **trainer_options: Any,
) -> dict[str, dict[str, Any]]:
    """Trains, validates and predicts with each model on one rank; returns everything that must equal one device."""
    found = {}
    for name in names:
        L.seed_everything(0, verbose=False)
        module = SampleModule((MODELS | CONCATENATED | IN_ORDER | LEARNED)[name]()).double()
        samples = Samples(STEPS if name in OVER_TIME else None)
        data = GraphDataModule(
            graph_of_samples(),
            partition=partition,
            samples=samples,
            val_samples=samples,
            predict_samples=samples,
            global_batch_size=global_batch_size,
            concatenate=name in CONCATENATED or name.startswith("concatenated"),
        )
        of_ranks = "auto" if strategy == "auto" else strategy(graph_ranks=graph_ranks, timeout=60, **(options or {}))
        trainer = quiet_trainer(of_ranks, world_size, max_epochs=2, **trainer_options)
        trainer.fit(module, datamodule=data)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items() if key.endswith("_loss")}
        weights = {key: value.clone() for key, value in module.state_dict().items()}
        predictions = torch.cat(trainer.predict(module, datamodule=data))
        found[name] = {"losses": module.losses, "logged": logged, "weights": weights, "predictions": predictions}
        if options is not None and "codec" in options:
            found[name]["codec_errors"] = [float(each) for each in module.codec_errors]
    return found
