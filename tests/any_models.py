"""Models beyond the plain stacks: what users combine, by name; importable in every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, ReLU
from torch_geometric import nn
from torch_geometric.nn import models

from lightning_gnn import CommNetConv

FEATURES, HIDDEN, CLASSES = 12, 16, 5


def basic(kind: Any, **options: Any) -> Any:
    return lambda: kind(FEATURES, HIDDEN, num_layers=options.pop("num_layers", 3), out_channels=CLASSES, **options)


class DeeperGCN(torch.nn.Module):
    """Residual layers whose activations are computed again in the backward pass."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.encode, self.decode = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES)
        self.layers = torch.nn.ModuleList(
            models.DeepGCNLayer(
                nn.GENConv(HIDDEN, HIDDEN, aggr="softmax", learn_t=True, num_layers=2, norm="layer"),
                LayerNorm(HIDDEN),
                ReLU(),
                block=block,
                dropout=0.0,
                ckpt_grad=layer % 2 == 0,
            )
            for layer in range(3)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.decode(x)


class SharedConv(torch.nn.Module):
    """One conv in two layers."""

    def __init__(self, conv: Any, act: Any = torch.relu) -> None:
        super().__init__()
        self.encode, self.conv, self.decode = Linear(FEATURES, HIDDEN), conv, Linear(HIDDEN, CLASSES)
        self.act = act

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        return self.decode(self.conv(self.act(self.conv(x, edge_index)), edge_index))


class CommNetAndSAGE(torch.nn.Module):
    """A mean with self-loops beside one without, of the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.heard = nn.SAGEConv(FEATURES, HIDDEN), CommNetConv(FEATURES, HIDDEN)
        self.last = nn.SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last((self.mean(x, edge_index) + self.heard(x, edge_index)).relu(), edge_index)


class TwoEdgeSets(torch.nn.Module):
    """The same convs on all edges, on every other node's edges, and with self-loops of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GCNConv(FEATURES, HIDDEN), nn.SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        heavy = edge_weight > 0.5
        x = self.first(x, edge_index) + self.first(x, edge_index[:, heavy], edge_weight[heavy])
        return self.second(x.relu(), edge_index[:, ~heavy]) + self.second(x, edge_index)


class LearnsEdgeWeights(torch.nn.Module):
    """Edge weights that are an output of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.score = Linear(3, 1)
        self.first, self.second = nn.GCNConv(FEATURES, HIDDEN), nn.GraphConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        weight = self.score(edge_attr).sigmoid().view(-1)
        return self.second(self.first(x, edge_index, weight).relu(), edge_index, weight)


class Hetero(torch.nn.Module):
    """`to_hetero` on one node type with two edge types."""

    def __init__(self) -> None:
        super().__init__()
        metadata = (["node"], [("node", "heavy", "node"), ("node", "light", "node")])
        self.model = nn.to_hetero(models.GraphSAGE(FEATURES, HIDDEN, 2, CLASSES), metadata, aggr="sum")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        heavy = edge_weight > 0.5
        edges = {("node", "heavy", "node"): edge_index[:, heavy], ("node", "light", "node"): edge_index[:, ~heavy]}
        return self.model({"node": x}, edges)["node"]


class Relations(torch.nn.Module):
    """`HeteroConv` of several convs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.HeteroConv(
            {("n", "a", "n"): nn.GCNConv(FEATURES, HIDDEN), ("n", "b", "n"): nn.GATConv(FEATURES, HIDDEN)}
        )
        self.decode = Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.decode(self.conv({"n": x}, {("n", "a", "n"): edge_index, ("n", "b", "n"): edge_index})["n"])


class Readout(torch.nn.Module):
    """Adds statistics of the whole graph to every node."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.decode = nn.GCNConv(FEATURES, HIDDEN), Linear(5 * HIDDEN, CLASSES)
        self.pools = torch.nn.ModuleList(
            [
                nn.SumAggregation(),
                nn.MeanAggregation(),
                nn.MaxAggregation(),
                nn.MultiAggregation(["min"], mode="cat"),
            ]
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index).tanh()
        return self.decode(torch.cat([x, *(pool(x).expand(len(x), -1) for pool in self.pools)], -1))


class GPS(torch.nn.Module):
    """A local conv beside attention over all nodes."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.encode, self.decode = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES)
        self.layers = torch.nn.ModuleList(
            nn.GPSConv(HIDDEN, nn.GCNConv(HIDDEN, HIDDEN), heads=2, attn_type=attention) for _ in range(2)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x, edge_index, torch.zeros(len(x), dtype=torch.long))
        return self.decode(x)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def lazily_initialised() -> torch.nn.Module:
    model = models.GraphSAGE(-1, HIDDEN, 2, CLASSES)
    model(torch.randn(4, FEATURES), torch.tensor([[0, 1], [1, 2]]))
    return model


DEGREES = torch.tensor([10, 5, 5, 10, 20, 5, 2, 2])
MODELS: dict[str, Any] = {
    **{f"gcn, jk={mode}": basic(models.GCN, jk=mode) for mode in ("last", "cat", "max", "lstm")},
    "sage, act first, batch norm": basic(models.GraphSAGE, act_first=True, norm="batch_norm", act="elu"),
    "sage, several aggregations": basic(models.GraphSAGE, aggr=["mean", "max", "std"]),
    "gin, pair norm": basic(models.GIN, norm="pair_norm", train_eps=True),
    "gat, one layer": basic(models.GAT, num_layers=1, heads=1),
    "gat, jk=cat": basic(models.GAT, heads=2, jk="cat"),
    "gcn, no out_channels": lambda: models.GCN(FEATURES, CLASSES, num_layers=2),
    "edge cnn": basic(models.EdgeCNN),
    "pna": basic(models.PNA, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"], deg=DEGREES),
    **{f"deeper gcn, {block}": (lambda block=block: DeeperGCN(block)) for block in ("res+", "res", "plain")},
    "shared gcn": lambda: SharedConv(nn.GCNConv(HIDDEN, HIDDEN, cached=True)),
    "shared gat": lambda: SharedConv(nn.GATConv(HIDDEN, HIDDEN)),
    "commnet beside sage": CommNetAndSAGE,
    "two edge sets": TwoEdgeSets,
    "edge weights that learn": LearnsEdgeWeights,
    "to_hetero": Hetero,
    "hetero conv": Relations,
    "readouts": Readout,
    **{
        f"gps, {attention}, batch norm": (lambda attention=attention: GPS(attention))
        for attention in ("multihead", "performer")
    },
    "compiled gcn": lambda: compiled(basic(models.GCN)()),
    "compiled own layers": lambda: compiled(SharedConv(nn.GATConv(HIDDEN, HIDDEN))),
    "lazily initialised": lazily_initialised,
    "group of reversible layers": lambda: SharedConv(
        models.GroupAddRev(nn.SAGEConv(HIDDEN // 2, HIDDEN // 2), num_groups=2), torch.nn.Identity()
    ),
}
