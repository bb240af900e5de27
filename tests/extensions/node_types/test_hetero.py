"""Full-graph training of a HeteroData over ranks equals one device: losses, gradients, weights, metrics, predictions; and bytes.

Test tiers: without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import Recorder, all_rows_sent, assert_same, awkward_graph, campaign, outcome, quiet_trainer
from conftest import RankFailed
from test_hetero_sampling import AWARDS, BY, CITES, CLASSES, SIZES, TAGS, WRITES, Typed, typed_graph, uneven
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    DirGNNConv,
    FastRGCNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    HANConv,
    HeteroBatchNorm,
    HeteroConv,
    HGTConv,
    MessagePassing,
    RGCNConv,
    SAGEConv,
    TransformerConv,
    to_hetero,
)
from torch_geometric.nn.models import GAT, GraphSAGE

import lightning_gnn
from lightning_gnn import (
    CoverStrategy,
    DGCLStrategy,
    GNNStrategy,
    GossipStrategy,
    GraphDataModule,
    NodeClassifier,
    SamplingStrategy,
    SpMM1DStrategy,
    SpMM15DStrategy,
    VertexCutStrategy,
)
from lightning_gnn.nn.context import UnsupportedModelError

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
    "gat": lambda: to_hetero(
        GAT((-1, -1), 6, 2, CLASSES, add_self_loops=False, norm="graph_norm"), METADATA, aggr="mean"
    ),
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
    return outcome(run, wrapped, source, recorder)


@cache
def on_one_device(name: str) -> dict[str, Any]:
    return trained(0, 1, typed_graph(), name)


NAMES = [*MODELS]


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("dgcl", 3), ("vertex_cut", 2), *campaign(("dgcl", 1), ("vertex_cut", 3), ("spmm_1d", 3))],
)
@pytest.mark.parametrize("name", NAMES)
def test_models(ranks, name, strategy, world_size):
    for found in ranks.run(world_size, trained, typed_graph(), name, strategy):
        assert_same(found, on_one_device(name), rtol=1e-9, atol=1e-10)


def evaluated(rank: int, world_size: int, graph: HeteroData, name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Tests and predicts under sampling, layer by layer; on one device without it."""
    options: dict[str, Any] = {"num_neighbors": [1], "batch_size": 3, "evaluation": "layerwise", "self_check": False}
    chosen = "auto" if world_size == 1 else SamplingStrategy(timeout=60, **options)
    recorder, source = Recorder(), GraphDataModule(graph, **data)
    return outcome(quiet_trainer(chosen, world_size, callbacks=[recorder]), module(name), source, recorder, fit=False)


@pytest.mark.parametrize("name", ["mixed", "hgt", *campaign("sage", "gat", "others", "han")])
def test_sampling_evaluates_layer_by_layer(ranks, name):
    """Also convs that look at the degrees of sources, and more layers than there are fan-outs."""
    expected = evaluated(0, 1, typed_graph(), name, {})
    for found in ranks.run(3, evaluated, typed_graph(), name, {"partition": uneven()}):
        assert_same(found, expected, rtol=1e-9, atol=1e-10)


def featured() -> HeteroData:
    """The graph, with features of all types and of two edge types, one of which weighs."""
    graph = typed_graph()
    g = torch.Generator().manual_seed(3)
    graph["topic"].x = torch.randn(SIZES["topic"], 4, generator=g).double()
    graph[CITES].edge_weight = torch.rand(graph[CITES].edge_index.size(1), generator=g).double()
    return graph


class WithWeights(Layers):
    def forward(self, x_dict: Any, edge_index_dict: Any, edge_weight_dict: Any) -> Any:  # type: ignore[override]
        for layer in self.layers:
            x_dict = layer(x_dict, edge_index_dict, edge_weight_dict=edge_weight_dict)
        return x_dict


def classifier(name: str) -> NodeClassifier:
    torch.manual_seed(1)
    models = {"to_hetero": MODELS["sage"], "HeteroConv": lambda: WithWeights(mixed)}
    made = NodeClassifier(models[name](), CLASSES, node_type="paper", optimizer=sgd).double()
    with torch.no_grad():
        made(featured())
    return made


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def classified(rank: int, world_size: int, name: str, strategy: Any) -> dict[str, Any]:
    recorder, wrapped = Recorder(), classifier(name)
    options: dict[str, Any] = {"timeout": 60, "self_check": False}
    if strategy is SamplingStrategy:
        options |= {"num_neighbors": [-1, -1, -1], "batch_size": 1000}
    chosen = "auto" if strategy is None else strategy(**options)
    return outcome(
        quiet_trainer(chosen, world_size, callbacks=[recorder]), wrapped, GraphDataModule(featured()), recorder
    )


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("to_hetero", DGCLStrategy),
        ("HeteroConv", SamplingStrategy),
        *campaign(("HeteroConv", VertexCutStrategy), ("HeteroConv", SpMM1DStrategy)),
    ],
)
def test_node_classifier(ranks, name, strategy):
    expected = classified(0, 1, name, None)
    assert {"test_loss", "test_acc", "test_f1"} <= set(expected["test"])
    for found in ranks.run(3, classified, name, strategy):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


def test_a_node_classifier_gives_its_model_what_edges_have():
    made, graph = classifier("HeteroConv"), featured()
    weights = {CITES: graph[CITES].edge_weight}
    torch.testing.assert_close(made(graph), made.model(graph.x_dict, graph.edge_index_dict, weights)["paper"])
    assert not torch.allclose(made(graph), made.model(graph.x_dict, graph.edge_index_dict, {})["paper"])


def test_a_node_classifier_needs_logits_of_its_type():
    made = NodeClassifier(Mean(lambda conv, x, edges: conv(x, edges)["paper"]), CLASSES, node_type="paper").double()
    with pytest.raises(UnsupportedModelError, match=r"Mean returned a Tensor, .* a dict with logits of 'paper'"):
        made(featured())


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


# Bytes ########################################################################


def sages(columns: int) -> HeteroConv:
    return HeteroConv({kind: SAGEConv((-1, -1), columns) for kind in (WRITES, CITES, TAGS, BY, AWARDS)}, "sum")


def gats(columns: int) -> HeteroConv:
    attention = {kind: GATConv((-1, -1), columns, heads=2, add_self_loops=False) for kind in (WRITES, BY, AWARDS, TAGS)}
    return HeteroConv({**attention, CITES: GATConv((-1, -1), columns, heads=2)}, "mean")


MODELS.update(sages=lambda: Layers(sages), gats=lambda: Layers(gats))


class Sent(L.Callback):
    """Keeps the bytes of each epoch."""

    def __init__(self) -> None:
        self.bytes: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bytes.append(float(trainer.callback_metrics["comm/bytes_sent"]))


def sent_by(rank: int, world_size: int, wrapped: Any, graph: Any, chosen: Any) -> tuple[list[float], Any]:
    """Returns the bytes that all ranks send in each epoch of three, and the rank's shard."""
    sent, source = Sent(), GraphDataModule(graph)
    chosen = chosen(timeout=60, self_check=False)
    with all_rows_sent():
        quiet_trainer(chosen, world_size, callbacks=[sent], limit_val_batches=0).fit(wrapped, datamodule=source)
    return sent.bytes, source.shard


def halo_rows(shard: Any, name: str) -> int:
    number = list(shard.types.nodes).index(name)
    return sum(int((shard.types.numbers(halo) == number).sum()) for halo in shard.halos)


@pytest.mark.parametrize("strategy", ["dgcl", "spmm_1d"])
def test_rows_that_several_edge_types_read_travel_once(ranks, strategy):
    """In the first layer, features travel in the first step only, and learned rows of topics in each; in the second, hidden rows
    of authors and papers do, for two edge types each, and those of topics after their map."""
    for (sent, shard), (of_gats, _) in zip(
        ranks.run(3, sent_by, module("sages"), typed_graph(), STRATEGIES[strategy]),
        ranks.run(3, sent_by, module("gats"), typed_graph(), STRATEGIES[strategy]),
    ):
        author, paper, topic = (halo_rows(shard, name) for name in ("author", "paper", "topic"))
        assert min(author, paper, topic) > 0
        constant = 5 * author + 8 * paper
        step = 2 * 4 * topic + 2 * (6 * author + 6 * paper + CLASSES * topic)
        assert sent == [8.0 * (constant + step), 8.0 * step, 8.0 * step]
        # 12 hidden columns. Two maps of 2 x 3 have as many: the rows themselves travel, once.
        step = 2 * 12 * topic + 2 * (12 * author + 12 * paper + 2 * CLASSES * topic)
        assert of_gats == [8.0 * (constant + step), 8.0 * step, 8.0 * step]


class OneType(L.LightningModule):
    """Relations as an attribute of edges."""

    def __init__(self, kind: type[RGCNConv]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = kind(12, 8, 3).double(), kind(8, 5, 3).double()

    def forward(self, batch: Data) -> torch.Tensor:
        hidden = self.first(batch.x, batch.edge_index, batch.edge_type).relu()
        return self.second(hidden, batch.edge_index, batch.edge_type)

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch)[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [RGCNConv, FastRGCNConv])
def test_rows_of_relations_travel_once(ranks, kind):
    graph = awkward_graph()
    graph.edge_type = torch.arange(graph.edge_index.size(1)) % 3
    alone = OneType(kind)
    quiet_trainer("auto", 1, limit_val_batches=0).fit(alone, datamodule=GraphDataModule(graph))
    for (sent, shard), weights in ranks.run(3, with_weights, OneType(kind), graph):
        halo = sum(map(len, shard.halos))
        assert sent == [8.0 * halo * (12 + 2 * 8)] + 2 * [8.0 * halo * 2 * 8]
        torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=1e-10, atol=1e-12)


def with_weights(rank: int, world_size: int, wrapped: Any, graph: Any) -> Any:
    wrapped = copy.deepcopy(wrapped)  # ranks are given one that they share
    return sent_by(rank, world_size, wrapped, graph, DGCLStrategy), dict(wrapped.state_dict())


# What steps return, checkpoints, refusals #####################################


class Dicts(Trained):
    def predict_step(self, batch: HeteroData, batch_idx: int) -> Any:
        x = {**batch.x_dict, "topic": self.model.topics(batch["topic"].n_id)}
        out = self.model.model(x, batch.edge_index_dict)
        return {"out": out, "papers": {"n_id": batch["paper"].n_id[::2], "rows": out["paper"][::2]}}


def saved(rank: int, world_size: int, folder: str, strategy: str | None, then: str | None) -> Any:
    """Trains for two epochs and goes on for two under another strategy; returns weights, and predictions from files."""
    made = module("mixed")
    wrapped = Dicts(made.model).double()
    for number, name in enumerate((strategy, then)):
        chosen: Any = "auto" if name is None else STRATEGIES[name](timeout=60, self_check=False, predictions="file")
        trainer = quiet_trainer(chosen, world_size, max_epochs=2 * (number + 1), default_root_dir=folder)
        path = f"{folder}/{strategy}.ckpt" if number else None
        trainer.fit(wrapped, datamodule=GraphDataModule(typed_graph()), ckpt_path=path)
        if not number:
            trainer.save_checkpoint(f"{folder}/{strategy}.ckpt")
    [predicted] = trainer.predict(wrapped, datamodule=GraphDataModule(typed_graph()))
    return dict(wrapped.state_dict()), predicted


def test_checkpoints_and_predictions_by_type(ranks, tmp_path):
    weights, predicted = saved(0, 1, str(tmp_path), None, None)
    for found, rows in ranks.run(3, saved, str(tmp_path), "dgcl", "vertex_cut"):
        assert (tmp_path / "predictions" / "out_paper.npy").exists()
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(rows["out"], predicted["out"], rtol=1e-9, atol=1e-11)
        ids = rows["papers"]["n_id"]  # every second row of each rank
        assert len(ids) and torch.equal(ids, ids.sort().values)
        torch.testing.assert_close(rows["papers"]["rows"], predicted["out"]["paper"][ids], rtol=1e-9, atol=1e-11)


class Mean(torch.nn.Module):
    """Convs and something else, which `look` does with a batch."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.conv, self.look = sages(CLASSES), look

    def forward(self, x: Any, edges: Any) -> Any:
        return self.look(self.conv, x, edges)


def some_edges(conv: Any, x: Any, edges: Any) -> Any:
    return conv(x, {**edges, CITES: edges[CITES][:, ::2]})


def expanded(conv: Any, x: Any, edges: Any) -> Any:
    lightning_gnn.gather_halo(x["paper"])
    return conv(x, edges)


def looped(conv: Any, x: Any, edges: Any) -> Any:
    conv.convs[WRITES].add_self_loops = True
    return conv(x, edges)


STEPS: dict[str, tuple[Any, str]] = {
    "some edges": (
        some_edges,
        r"'model.model.conv.convs.<paper___cites___paper>' was called with other edges than the batch's",
    ),
    "expand": (expanded, "gather_halo does not support graphs with types"),
    "self-loops": (looped, r"does not support self-loops on edges \('author', 'writes', 'paper'\), whose ends have two types"),
}
MODELS.update({f"refused: {name}": (lambda look=look: Mean(look)) for name, (look, _) in STEPS.items()})


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_are_refused(ranks, name):
    with pytest.raises(RankFailed) as raised:
        ranks.run(2, trained, typed_graph(), f"refused: {name}", "dgcl")
    for error in raised.value.errors.values():
        assert re.search(f"UnsupportedModelError: .*{STEPS[name][1]}", error), error


LAYOUTS: dict[str, GNNStrategy] = {
    "replicas": DGCLStrategy(plan="replicate", num_hops=2),
    "cover": CoverStrategy(),
    "cache": VertexCutStrategy(cache=0.1),
    "blocks": SpMM1DStrategy(sparsity_aware=False),
    "products on a grid": SpMM15DStrategy(replication_factor=2),
    "gossip": GossipStrategy(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strategies_that_take_no_types(name, tmp_path):
    layout = quiet_trainer(LAYOUTS[name], 2).strategy.layout()
    with pytest.raises(ValueError, match=r'strategy="dgcl".*strategy="sampling".*to_homogeneous'):
        GraphDataModule(typed_graph(), partition_dir=tmp_path).partition_for(layout)


class Batched(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = HeteroBatchNorm(4, 3)


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = DirGNNConv(SAGEConv(8, CLASSES))


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (Batched, {}, "'model.norm' .HeteroBatchNorm. computes statistics over all nodes"),
        (Both, {}, "'model.conv' .DirGNNConv. does not support graphs with types"),
        (lambda: to_hetero(GraphSAGE((-1, -1), 4, 1), METADATA), {}, "has an unknown number of input columns"),
        (lambda: sages(3), {"checkpoint_convs": True}, "checkpoint_convs=True does not support HeteroData"),
    ],
)
def test_refused_before_training(make, options, words, tmp_path):
    trainer = quiet_trainer(DGCLStrategy(**options), 1, self_check=True)
    model = make()
    if options:
        model = module("sages").model
    data = GraphDataModule(typed_graph(), partition_dir=tmp_path)
    with pytest.raises(ValueError, match=words):
        trainer.fit(Trained(model), datamodule=data)
    if not options:
        trainer = quiet_trainer(SamplingStrategy(evaluation="layerwise"), 2, self_check=True)
        with pytest.raises(ValueError, match=words):
            trainer.fit(Trained(model), datamodule=data)


def test_sampling_with_layers_is_checked_before(tmp_path):
    def centred(conv: Any, x: Any, edges: Any) -> Any:
        return {name: rows - torch.tensor(rows.tolist()).mean(0) for name, rows in conv(x, edges).items()}

    MODELS["centred"] = lambda: Mean(centred)
    trainer = quiet_trainer(SamplingStrategy(evaluation="layerwise"), 2, self_check=True)
    with pytest.raises(ValueError, match=r"test_hetero.py:\d+: x.tolist\(\) would see this rank's rows only"):
        trainer.fit(module("centred"), datamodule=GraphDataModule(typed_graph(), partition_dir=tmp_path))
