"""Full-graph training of a HeteroData over ranks equals one device: losses, gradients, weights, metrics, predictions; and bytes.

Test tiers: without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import Recorder, assert_same, quiet_trainer
from test_hetero_sampling import AWARDS, BY, CITES, CLASSES, SIZES, TAGS, WRITES, Typed, typed_graph, uneven
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    HANConv,
    HeteroConv,
    HGTConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
    to_hetero,
)
from torch_geometric.nn.models import GAT, GraphSAGE

from lightning_gnn import DGCLStrategy, GNNStrategy, GraphDataModule, SpMM1DStrategy, UnsupportedModelError, VertexCutStrategy

STRATEGIES: dict[str, type[GNNStrategy]] = {
    "dgcl": DGCLStrategy,
    "vertex_cut": VertexCutStrategy,
    "spmm_1d": SpMM1DStrategy,
}
METADATA = typed_graph().metadata()


class Own(MessagePassing):
    """A user's conv of two ends, whose messages are its own; it draws no numbers and counts no rows."""

    def __init__(self, columns: int) -> None:
        super().__init__(aggr="max")
        self.lin = torch.nn.LazyLinear(columns)
        self.of_target = torch.nn.LazyLinear(columns)

    def forward(self, x: Any, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = (x, x) if isinstance(x, torch.Tensor) else x
        return self.propagate(edge_index, x=(self.lin(source), self.of_target(target)))

    def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        return (x_i - x_j).tanh()


class Layers(torch.nn.Module):
    """Layers of all types, of which `make` makes one, given the columns that it returns."""

    def __init__(self, make: Any, count: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(make(6 if number + 1 < count else CLASSES) for number in range(count))

    def forward(self, x: dict[str, torch.Tensor], edges: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
        for number, layer in enumerate(self.layers):
            x = {**x, **{name: rows for name, rows in layer(x, edges).items() if rows is not None}}
            if number + 1 < len(self.layers):
                x = {name: rows.relu() for name, rows in x.items()}
        return x


def mixed(columns: int) -> HeteroConv:
    """GATConv, SAGEConv and GCNConv beside each other; authors and papers are read by several."""
    return HeteroConv(
        {
            WRITES: GATConv((-1, -1), columns, heads=2, concat=False, add_self_loops=False),
            CITES: GCNConv(-1, columns),
            TAGS: SAGEConv((-1, -1), columns, aggr="max"),
            BY: SAGEConv((-1, -1), columns),
            AWARDS: TransformerConv((-1, -1), columns),
        },
        "sum",
    )


def others(columns: int) -> HeteroConv:
    return HeteroConv(
        {
            WRITES: GATv2Conv((-1, -1), columns, add_self_loops=False),
            CITES: GATConv(-1, columns),
            TAGS: GraphConv((-1, -1), columns),
            BY: Own(columns),
            AWARDS: SAGEConv((-1, -1), columns, aggr=["mean", "std"]),
        },
        "mean",
    )


class AllTypes(torch.nn.Module):
    """A conv of all types, between linear maps to and from equal widths."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.maps = torch.nn.ModuleDict({name: torch.nn.LazyLinear(6) for name in SIZES})
        self.convs = torch.nn.ModuleList(conv(6, 6, METADATA, heads=2) for _ in range(2))
        self.last = torch.nn.Linear(6, CLASSES)

    def forward(self, x: dict[str, torch.Tensor], edges: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = {name: self.maps[name](rows).relu() for name, rows in x.items()}
        for conv in self.convs:
            x = {**x, **{name: rows for name, rows in conv(x, edges).items() if rows is not None}}
        return {name: self.last(rows) for name, rows in x.items()}


MODELS: dict[str, Any] = {
    "sage": lambda: to_hetero(GraphSAGE((-1, -1), 6, 2, CLASSES, norm="batch_norm"), METADATA),
    "gat": lambda: to_hetero(GAT((-1, -1), 6, 2, CLASSES, add_self_loops=False, norm="graph_norm"), METADATA, aggr="mean"),
    "mixed": lambda: Layers(mixed),
    "others": lambda: Layers(others),
    "hgt": lambda: AllTypes(HGTConv),
    "han": lambda: AllTypes(HANConv),
}


class OfAll(torch.nn.Module):
    """A model of x_dict and edge_index_dict, with learned rows for topics, which have no features."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.topics, self.model = torch.nn.Embedding(SIZES["topic"], 4), model

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = {**batch.x_dict, "topic": self.topics(batch["topic"].n_id)}
        return self.model(x, batch.edge_index_dict)["paper"]


class Trained(Typed):
    """Without Adam, which makes much of the rounding in gradients that are 0, as of what a batch norm takes away."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def module(name: str) -> Trained:
    torch.manual_seed(1)
    made = Trained(OfAll(MODELS[name]())).double()
    graph = typed_graph()
    graph["topic"].n_id = torch.arange(SIZES["topic"])
    with torch.no_grad():
        made.model(graph)  # now it knows its columns
    return made


def trained(
    rank: int,
    world_size: int,
    graph: HeteroData,
    name: str,
    strategy: str | None = None,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains, tests and predicts on one rank; without a strategy on one device of Lightning's own."""
    recorder, wrapped = Recorder(), module(name)
    source = GraphDataModule(graph, **(data or {}))
    chosen = "auto" if strategy is None else STRATEGIES[strategy](timeout=60, self_check=False, **options)
    run = quiet_trainer(chosen, world_size, callbacks=[recorder])
    run.fit(wrapped, datamodule=source)
    weights = copy.deepcopy(wrapped.state_dict())
    [tested] = run.test(wrapped, datamodule=source, verbose=False)
    [predicted] = run.predict(wrapped, datamodule=source)
    return {
        "epochs": recorder.epochs,
        "gradients": recorder.gradients,
        "weights": weights,
        "test": tested,
        "predictions": predicted,
    }


@cache
def on_one_device(name: str) -> dict[str, Any]:
    return trained(0, 1, typed_graph(), name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_models(ranks, name, strategy, world_size):
    for found in ranks.run(world_size, trained, typed_graph(), name, strategy):
        assert_same(found, on_one_device(name), rtol=1e-9, atol=1e-10)


def awkward() -> torch.Tensor:
    """Parts of 4: rank 0 has all authors, rank 1 the papers that train and topics, rank 2 one paper, rank 3 the other papers."""
    part = torch.zeros(71, dtype=torch.long)
    papers = torch.where(typed_graph()["paper"].train_mask, 1, 3)
    papers[-1] = 2
    part[25:65], part[65:] = papers, 1
    return part


PARTS = {"no paper on rank 2": (3, uneven), "no author on three of four": (4, awkward)}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", ["sage", "mixed", "hgt", "han"])
def test_ranks_without_nodes_of_some_type(ranks, parts, name):
    world_size, make = PARTS[parts]
    for found in ranks.run(world_size, trained, typed_graph(), name, "dgcl", {"partition": make()}):
        assert_same(found, on_one_device(name), rtol=1e-9, atol=1e-10)
