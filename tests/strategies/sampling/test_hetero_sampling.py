"""Graphs with node and edge types in mini-batches: batches as PyG's, and with all neighbours the numbers of one device.

Test tiers: without ranks; gloo ranks in the pool, also ``apart``, as if each were on a machine of its own.
"""

from __future__ import annotations

import copy
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import Recorder, assert_same, campaign, examples, outcome, quiet_trainer, ranks_apart, strategy_of_config
from conftest import SHARED
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import WordNet18RR
from torch_geometric.nn import FastRGCNConv, GATConv, HeteroConv, HGTConv, RGCNConv, SAGEConv, to_hetero
from torch_geometric.nn.models import GraphSAGE
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn import DistributedEmbedding, GraphDataModule, NodeClassifier, SamplingStrategy, UnsupportedModelError
from lightning_gnn.data.store import read_cut, read_manifest
from lightning_gnn.partition.layout import Types
from lightning_gnn.strategies.sampling.strategy import SamplingScheme
from lightning_gnn.tools.commands.partition import _report

CLASSES = 3
SIZES = {"author": 25, "paper": 40, "topic": 6}
WRITES, CITES, TAGS, BY, AWARDS = (
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("topic", "tags", "paper"),
    ("paper", "by", "author"),
    ("author", "awards", "topic"),
)
WHOLE: dict[str, Any] = {"num_neighbors": [-1, -1], "batch_size": 1000}
SMALL: dict[str, Any] = {
    "num_neighbors": {WRITES: [3, 2], CITES: [2, 2], TAGS: [-1, 0], BY: [2, 1], AWARDS: [1, 1]},
    "batch_size": 4,
}


def typed_graph(seed: int = 0) -> HeteroData:
    """Types of several widths, one without features, edge features, an edge type without edges, duplicates, unlabelled nodes."""
    g = torch.Generator().manual_seed(seed)
    data = HeteroData()
    data["author"].x = torch.randn(SIZES["author"], 5, generator=g, dtype=torch.float64)
    data["paper"].x = torch.randn(SIZES["paper"], 8, generator=g, dtype=torch.float64)
    data["topic"].num_nodes = SIZES["topic"]
    for kind, count in ((WRITES, 90), (CITES, 120), (TAGS, 50), (BY, 70), (AWARDS, 0)):
        ends = [torch.randint(0, SIZES[kind[row]] * 9 // 10, (count,), generator=g) for row in (0, 2)]
        data[kind].edge_index = torch.stack(ends)
    data[WRITES].edge_attr = torch.randn(90, 2, generator=g, dtype=torch.float64)
    paper = data["paper"]
    paper.y = torch.randint(0, CLASSES, (SIZES["paper"],), generator=g)
    paper.y[3] = -1
    draws = torch.rand(SIZES["paper"], generator=g)
    paper.train_mask, paper.val_mask, paper.test_mask = draws < 0.5, (draws >= 0.5) & (draws < 0.75), draws >= 0.75
    return data


class Convs(torch.nn.Module):
    """Two layers of a conv per relation, one of which reads edge features; learned rows for topics."""

    def __init__(self) -> None:
        super().__init__()
        self.topics = torch.nn.Embedding(SIZES["topic"], 4)
        widths = {"author": 5, "paper": 8, "topic": 4}
        self.first = self._layer(widths, 6)
        self.second = self._layer(dict.fromkeys(widths, 6), CLASSES)

    @staticmethod
    def _layer(widths: dict[str, int], out: int) -> HeteroConv:
        convs: dict[Any, Any] = {
            kind: SAGEConv((widths[kind[0]], widths[kind[2]]), out) for kind in (CITES, TAGS, BY, AWARDS)
        }
        sizes = (widths["author"], widths["paper"])
        return HeteroConv({**convs, WRITES: GATConv(sizes, out, edge_dim=2, add_self_loops=False)}, "sum")

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = {**batch.x_dict, "topic": self.topics(batch["topic"].n_id)}
        attributes = {WRITES: batch[WRITES].edge_attr}
        for layer in (self.first, self.second):
            x = {
                name: rows.relu() if layer is self.first else rows
                for name, rows in layer(x, batch.edge_index_dict, edge_attr_dict=attributes).items()
            }
        return x["paper"]


class Typed(L.LightningModule):
    """What a user writes; `name` is the type that is predicted."""

    def __init__(self, model: torch.nn.Module, name: str = "paper", classes: int = CLASSES) -> None:
        super().__init__()
        self.model, self.name = model, name
        self.acc = MulticlassAccuracy(classes, average="micro", ignore_index=-1)

    def _loss(self, batch: HeteroData, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        out, y = self.model(batch)[mask], batch[self.name].y[mask]
        return F.cross_entropy(out, y, ignore_index=-1), out, y, int((y >= 0).sum())

    def training_step(self, batch: HeteroData, batch_idx: int) -> torch.Tensor:
        loss, _, _, count = self._loss(batch, batch[self.name].train_mask)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=count)
        return loss

    def _evaluate(self, batch: HeteroData, stage: str) -> None:
        loss, out, y, count = self._loss(batch, batch[self.name][f"{stage}_mask"])
        self.acc.update(out, y)
        self.log(f"{stage}_loss", loss, batch_size=count)
        self.log(f"{stage}_acc", self.acc, batch_size=count)

    def validation_step(self, batch: HeteroData, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: HeteroData, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: HeteroData, batch_idx: int) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Batches(L.Callback):
    """Keeps the batches of training."""

    def __init__(self) -> None:
        self.seen: list[HeteroData] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: HeteroData, batch_idx: int) -> None:
        self.seen.append(copy.copy(batch))


def trained(
    rank: int,
    world_size: int,
    graph: Any,
    module: L.LightningModule,
    options: dict[str, Any] | None,
    apart: bool = False,
    data: dict[str, Any] | None = None,
    fit: bool = True,
    **trainer: Any,
) -> dict[str, Any]:
    """Trains, tests and predicts on one rank; without options on one device of Lightning's own strategy, the whole graph."""
    recorder, batches = Recorder(), Batches()
    module = copy.deepcopy(module).double()
    source = GraphDataModule(graph, **(data or {}))
    strategy = "auto" if options is None else SamplingStrategy(timeout=60, **options)
    run = quiet_trainer(strategy, world_size, callbacks=[recorder, batches], **trainer)
    with ranks_apart(apart):
        found = outcome(run, module, source, recorder, fit)
    return {**found, "batches": batches.seen, "report": source.shard.report}


def module(seed: int = 1) -> Typed:
    torch.manual_seed(seed)
    return Typed(Convs())


@cache
def on_one_device() -> dict[str, Any]:
    return trained(0, 1, typed_graph(), module(), None)


# Without ranks ################################################################


@examples(100)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4))
def test_rows_and_ids_of_types(seed, parts, kinds):
    """A part's rows are its nodes type after type; ids of a type count part after part."""
    counts = np.random.default_rng(seed).integers(0, 4, (parts, kinds))
    types = Types({str(kind): counts[:, kind] for kind in range(kinds)}, {}, "0")
    listed = [(part, kind) for part in range(parts) for kind in range(kinds) for _ in range(counts[part, kind])]
    seen = dict.fromkeys(range(kinds), 0)
    expected = []
    for _, kind in listed:
        expected.append(seen[kind])
        seen[kind] += 1
    assert types.ids(np.arange(len(listed))).tolist() == expected
    first = np.cumsum([0, *counts.sum(1)])
    for kind in range(kinds):
        for part, (begin, count) in enumerate(zip(types.begins(str(kind)), counts[:, kind])):
            rows = np.arange(begin, begin + count) + first[part]
            assert types.ids(rows).tolist() == list(range(*types.offsets(str(kind))[part : part + 2]))


def test_a_part_in_the_store_holds_what_it_owns(tmp_path):
    graph = typed_graph()
    data = GraphDataModule(graph, partition_dir=tmp_path, partition=torch.arange(71) % 3)
    folder = data.partition_for(SamplingScheme().layout(3))
    cut = read_cut(folder)
    for name in graph.node_types:
        assert torch.equal(cut.ids_of(name).sort().values, torch.arange(SIZES[name]))
    for number, kind in enumerate(graph.edge_types):
        ids = cut.ids_of(kind)
        assert torch.equal(ids.sort().values, torch.arange(graph[kind].edge_index.size(1)))
        if kind == WRITES:
            assert torch.equal(cut.attributes[f"edge{number}"]["edge_attr"], graph[kind].edge_attr[ids])
    for rank in range(3):
        batch = cut.shard(rank).batch
        assert batch.metadata() == graph.metadata()
        assert torch.equal(batch["paper"].x, graph["paper"].x[batch["paper"].n_id])
        assert "x" not in batch["topic"]
        owned = (batch["paper"].n_id + 25) % 3  # papers stand behind the authors
        assert (owned == rank).all()
    shown = Console(width=200, record=True)
    shown.print(*_report(folder, None))
    text = shown.export_text()
    counts = cut.types.nodes["topic"]
    assert "topic nodes" in text and "author writes paper" in text and "train nodes" in text
    assert f"{counts[0]} │" in next(line for line in text.splitlines() if "topic nodes" in line)
    report = read_manifest(folder)["report"]["types"]
    assert [sum(each) for each in report.values()] == [25, 40, 6, 90, 120, 50, 70, 0]
    assert report["paper cites paper"] == cut.types.edges[CITES].tolist()


def changed(**changes: Any) -> HeteroData:
    """The graph with attributes of papers changed; None removes."""
    graph = typed_graph()
    for name, value in changes.items():
        if value is None:
            del graph["paper"][name]
        else:
            graph["paper"][name] = value
    return graph


def with_edges(kind: Any, edge_index: torch.Tensor) -> HeteroData:
    graph = typed_graph()
    graph[kind].edge_index = edge_index
    return graph


def without_size() -> HeteroData:
    graph = typed_graph()
    del graph["topic"].num_nodes
    return graph


def two_masks() -> HeteroData:
    graph = typed_graph()
    graph["author"].train_mask = torch.ones(25, dtype=torch.bool)
    return graph


BAD_GRAPHS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no_mask": (lambda: changed(train_mask=None, y=None), {}, "No node type of .* has a train_mask"),
    "no_mask_but_labels": (lambda: changed(train_mask=None), {}, "'paper': The graph has no train_mask"),
    "two_masks": (two_masks, {}, r"\['author', 'paper'\] have a train_mask.*input_type='author'"),
    "input_type": (typed_graph, {"input_type": "venue"}, "input_type='venue', but the graph's node types are"),
    "short_mask": (
        lambda: changed(train_mask=torch.ones(7, dtype=torch.bool)),
        {},
        "'paper': train_mask has 7 entries",
    ),
    "short_y": (lambda: changed(y=torch.zeros(7)), {}, "'paper': x and y must have num_nodes=40 rows, one per node, got .40, 7."),
    "nan": (lambda: changed(x=torch.full((40, 2), float("nan"))), {}, "'paper': x holds NaN"),
    "no_size": (without_size, {}, "'topic': it has neither x nor num_nodes"),
    "unknown_end": (
        lambda: with_edges(("venue", "of", "paper"), torch.zeros(2, 1).long()),
        {},
        "Edge type .*venue.*the graph has no node type 'venue'",
    ),
    "out_of_range": (lambda: with_edges(WRITES, torch.tensor([[30], [1]])), {}, "ids up to 30, but there are 25 nodes"),
    "float_edges": (lambda: with_edges(CITES, torch.zeros(2, 1)), {}, "'cites'.*edge_index must hold integers"),
    "no_types": (lambda: Data(x=torch.ones(2, 1)), {"input_type": "paper"}, "the graph has no types"),
}


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_refused_graphs(case, tmp_path):
    make, options, words = BAD_GRAPHS[case]
    with pytest.raises(ValueError, match=f"(?s){words}"):
        GraphDataModule(make(), partition_dir=tmp_path, **options).partition_for(SamplingScheme().layout(2))
    assert not list(tmp_path.iterdir())


def test_a_stored_graph_with_types_is_for_strategies_that_take_them(tmp_path):
    data = GraphDataModule("test_hetero_sampling.typed_graph", partition_dir=tmp_path, partition=torch.arange(71) % 2)
    folder = data.partition_for(SamplingScheme().layout(2))
    assert data.partition_for(SamplingScheme().layout(2)) == folder
    with pytest.raises(ValueError, match='strategy="sampling"'):
        data.partition_for(quiet_trainer("cover", 2).strategy.layout())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_neighbors": {WRITES: [3, 2], CITES: [3]}}, "the same number of hops"),
        ({"num_neighbors": {WRITES: [3, -2]}}, "-2"),
        ({"num_neighbors": {}}, r"one number per layer .*got \{\}"),
    ],
)
def test_refused_fanouts(options, words):
    with pytest.raises(ValueError, match=words):
        SamplingStrategy(**options)


def test_yaml(tmp_path):
    entry = "{class_path: lightning_gnn.SamplingStrategy, init_args: {num_neighbors: {a__to__b: [4, 0], b__of__a: [1, -1]}}}"
    found = strategy_of_config(tmp_path / "config.yaml", entry)
    assert found.num_neighbors == {("a", "to", "b"): [4, 0], ("b", "of", "a"): [1, -1]}


class Lazy(Typed):
    def __init__(self) -> None:
        super().__init__(to_hetero(GraphSAGE((-1, -1), 8, 2, CLASSES), typed_graph().metadata()))


class Embedded(Typed):
    def __init__(self) -> None:
        super().__init__(Convs())
        self.rows = DistributedEmbedding(71, 4)


REFUSED: dict[str, tuple[Any, dict[str, Any], Any, type[Exception], str]] = {
    "edge_type": (typed_graph, {"num_neighbors": {WRITES: [3]}}, module, ValueError, "the edge types are .*cites"),
    "homogeneous": (
        lambda: typed_graph().to_homogeneous(),
        {"num_neighbors": {WRITES: [3]}},
        module,
        ValueError,
        "num_neighbors must be a list for a graph without types",
    ),
    "library_module": (
        typed_graph,
        WHOLE,
        lambda: NodeClassifier(GraphSAGE(8, 8, 2, CLASSES)),
        ValueError,
        "NodeClassifier calls model.x, edge_index.*Use NodeClassifier.model, node_type='paper'.",
    ),
    "another_type": (
        typed_graph,
        WHOLE,
        lambda: NodeClassifier(GraphSAGE(8, 8, 2, CLASSES), node_type="author"),
        ValueError,
        "NodeClassifier has node_type='author', but the input_type of this HeteroData is 'paper'",
    ),
    "no_types": (
        lambda: homogeneous(),
        {"num_neighbors": [3]},
        lambda: NodeClassifier(GraphSAGE(8, 8, 2, CLASSES), node_type="paper"),
        ValueError,
        "node_type='paper'. needs a HeteroData, but the graph has no types",
    ),
    "embedding": (
        typed_graph,
        WHOLE,
        Embedded,
        ValueError,
        "with node_type=None, but the graph has node types",
    ),
    "lazy": (typed_graph, WHOLE, Lazy, UnsupportedModelError, "has an unknown number of input columns"),
}


def homogeneous() -> Data:
    graph = typed_graph()["paper"]
    return Data(**{name: graph[name] for name in ("x", "y", "train_mask")}, edge_index=typed_graph()[CITES].edge_index)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(case, tmp_path):
    make, options, chosen, kind, words = REFUSED[case]
    source = homogeneous() if case == "homogeneous" else make()
    trainer = quiet_trainer(SamplingStrategy(**options), 1, self_check=True)
    with pytest.raises(kind, match=words):
        trainer.fit(chosen(), datamodule=GraphDataModule(source, partition_dir=tmp_path))


# Ranks ########################################################################


@pytest.mark.parametrize(("world_size", "apart", "prefetch"), [(2, True, 2), *campaign((1, False, 0), (3, False, 2))])
def test_whole_neighbourhoods_in_one_batch_are_one_device(ranks, world_size, apart, prefetch):
    options = {**WHOLE, "prefetch_batches": prefetch}
    for found in ranks.run(world_size, trained, typed_graph(), module(), options, apart):
        assert_same(found, on_one_device(), rtol=1e-8, atol=1e-10)


def uneven() -> torch.Tensor:
    """Parts: rank 0 owns all authors and the papers that train, rank 1 the other papers and no topic, rank 2 the topics."""
    part = torch.full((71,), 2)
    part[:25] = 0
    part[25:65] = (~typed_graph()["paper"].train_mask).long()
    return part


def test_parts_without_some_types_and_without_training_nodes(ranks):
    data = {"partition": uneven()}
    for found in ranks.run(3, trained, typed_graph(), module(), WHOLE, True, data):
        assert_same(found, on_one_device(), rtol=1e-8, atol=1e-10)


LAYERS = {**WHOLE, "evaluation": "layerwise", "self_check": False}


@pytest.mark.parametrize("data", [{}, *campaign({"partition": uneven()})])
def test_layer_by_layer_evaluation_is_one_device(ranks, data):
    for found in ranks.run(3, trained, typed_graph(), module(), LAYERS, True, data):
        assert_same(found, on_one_device(), rtol=1e-8, atol=1e-10)


def check_conventions(batch: HeteroData, graph: HeteroData) -> None:
    """A batch is what PyG's NeighborLoader would make of the graph."""
    assert batch.metadata() == graph.metadata()
    paper, size = batch["paper"], batch["paper"].batch_size
    assert torch.equal(paper.n_id[:size], paper.input_id) and graph["paper"].train_mask[paper.input_id].all()
    assert torch.equal(paper.y, graph["paper"].y[paper.n_id]) and paper.train_mask.nonzero().view(-1).tolist() == list(
        range(size)
    )
    assert batch["topic"].num_nodes == len(batch["topic"].n_id) and "x" not in batch["topic"]
    for name in graph.node_types:
        nodes = batch[name]
        assert len(nodes.n_id.unique()) == len(nodes.n_id) == sum(nodes.num_sampled_nodes)
        if name != "topic":
            assert torch.equal(nodes.x, graph[name].x[nodes.n_id])
    for kind in graph.edge_types:
        edges, (source, target) = batch[kind], batch[kind].edge_index
        found = torch.stack([batch[kind[0]].n_id[source], batch[kind[2]].n_id[target]])
        assert torch.equal(found, graph[kind].edge_index[:, edges.e_id])
        assert len(edges.e_id.unique()) == len(edges.e_id) == sum(edges.num_sampled_edges)
        for fanout, (low, high) in zip(SMALL["num_neighbors"][kind], pairwise(np.cumsum([0, *edges.num_sampled_edges]))):
            assert fanout == -1 or target[low:high].bincount(minlength=1).max() <= fanout
    assert torch.equal(batch[WRITES].edge_attr, graph[WRITES].edge_attr[batch[WRITES].e_id])


@pytest.mark.parametrize("apart", [*campaign(False), True])
def test_small_batches_train_and_are_what_pyg_makes(ranks, apart):
    graph = typed_graph()
    everyone = ranks.run(2, trained, graph, module(), SMALL, apart, max_epochs=8)
    labelled = (graph["paper"].train_mask & (graph["paper"].y >= 0)).nonzero().view(-1).tolist()
    steps = len(everyone[0]["batches"]) // 8
    assert steps > 1
    first = [
        seed for each in everyone for batch in each["batches"][:steps] for seed in batch["paper"].input_id.tolist()
    ]
    assert sorted(first) == labelled
    for found in everyone:
        assert found["epochs"] == everyone[0]["epochs"]
        assert found["epochs"][-1]["train_loss"] < found["epochs"][0]["train_loss"]
        torch.testing.assert_close(found["weights"], everyone[0]["weights"], rtol=0, atol=0)
        for batch in found["batches"][:6]:
            check_conventions(batch, graph)
        # In batches of 4 seeds, with all neighbours: as one device sees the whole graph with these weights.
        module_ = module().double()
        module_.load_state_dict(found["weights"])
        expected = trained(0, 1, graph, module_, None, fit=False)
        torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found["test"], expected["test"], rtol=1e-6, atol=1e-8)


def test_samples_do_not_depend_on_who_holds_the_parts(ranks):
    together, away = (
        ranks.run(2, trained, typed_graph(), module(), SMALL, apart, max_epochs=1) for apart in (False, True)
    )
    for one, other in zip(together, away):
        for batch, again in zip(one["batches"], other["batches"]):
            assert all(torch.equal(batch[kind].e_id, again[kind].e_id) for kind in batch.edge_types)


class HGT(torch.nn.Module):
    """A conv that no exchange is exact for: samples are whole, so it may be used."""

    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.conv = HGTConv({"author": 5, "paper": 8, "topic": 4}, CLASSES, metadata)
        self.topics = torch.nn.Embedding(SIZES["topic"], 4)

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = {**batch.x_dict, "topic": self.topics(batch["topic"].n_id)}
        return self.conv(x, batch.edge_index_dict)["paper"]


def test_any_conv_and_a_random_split_of_a_type(ranks):
    torch.manual_seed(2)
    graph = changed(train_mask=None, val_mask=None, test_mask=None)
    chosen, data = Typed(HGT(graph.metadata())), {"split": (0.5, 0.25, 0.25), "input_type": "paper"}
    options = {"num_neighbors": [-1], "batch_size": 100, "predictions": "rank0"}
    expected = trained(0, 1, graph, chosen, None, data=data)
    one, other = ranks.run(2, trained, graph, chosen, options, data=data)
    assert_same(one, expected, rtol=1e-8, atol=1e-10)
    assert other["predictions"] is None


# Relations of WordNet #########################################################


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Its words and relations with made-up features; the label says of which kinds a word's in-edges are."""
    if not (SHARED / "data" / "wordnet18rr").is_dir():
        pytest.skip(f"needs the data folder {SHARED / 'data'}")
    folder: Path = tmp_path_factory.mktemp("wordnet")
    shutil.copytree(SHARED / "data" / "wordnet18rr" / "raw", folder / "raw")
    graph = WordNet18RR(str(folder))[0]
    generator = torch.Generator().manual_seed(0)
    into = torch.zeros(graph.num_nodes, 11).index_put_(
        (graph.edge_index[1], graph.edge_type), torch.ones(graph.num_edges), accumulate=True
    )
    y = into.argmax(1)
    draws = torch.rand(graph.num_nodes, generator=generator)
    return Data(
        x=torch.randn(graph.num_nodes, 8, generator=generator, dtype=torch.float64),
        edge_index=graph.edge_index,
        edge_type=graph.edge_type,
        y=torch.where(into.sum(1) > 0, y, -1),
        train_mask=draws < 0.03,
        val_mask=(draws >= 0.03) & (draws < 0.05),
        test_mask=(draws >= 0.05) & (draws < 0.07),
    )


def by_relation(graph: Data) -> HeteroData:
    data = HeteroData()
    for name in ("x", "y", "train_mask", "val_mask", "test_mask"):
        data["word"][name] = graph[name]
    for relation in range(11):
        data["word", f"relation_{relation}", "word"].edge_index = graph.edge_index[:, graph.edge_type == relation]
    return data


class TwoConvs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(8, 8), SAGEConv(8, 11)

    def forward(self, x, edge_index):  # without annotations: torch.fx cannot send them to ranks
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Relations(torch.nn.Module):
    """`to_hetero` of two layers: a conv per relation, summed."""

    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.model = to_hetero(TwoConvs(), metadata)

    def forward(self, batch: HeteroData) -> torch.Tensor:
        return self.model(batch.x_dict, batch.edge_index_dict)["word"]


class RGCN(torch.nn.Module):
    def __init__(self, kind: type[RGCNConv]) -> None:
        super().__init__()
        self.first, self.second = kind(8, 8, 11, num_bases=4), kind(8, 11, 11, num_bases=4)

    def forward(self, batch: Data) -> torch.Tensor:
        hidden = self.first(batch.x, batch.edge_index, batch.edge_type).relu()
        return self.second(hidden, batch.edge_index, batch.edge_type)


class OfOneType(Typed):
    """The same of a graph whose relations are an attribute of its edges."""

    def _loss(self, batch: Any, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        out, y = self.model(batch)[mask], batch.y[mask]
        return F.cross_entropy(out, y, ignore_index=-1), out, y, int((y >= 0).sum())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, _, _, count = self._loss(batch, batch.train_mask)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=count)
        return loss

    def _evaluate(self, batch: Any, stage: str) -> None:
        loss, out, y, count = self._loss(batch, batch[f"{stage}_mask"])
        self.acc.update(out, y)
        self.log(f"{stage}_loss", loss, batch_size=count)
        self.log(f"{stage}_acc", self.acc, batch_size=count)


def relations_of(graph: Data, kind: str) -> tuple[Any, L.LightningModule]:
    torch.manual_seed(3)
    if kind == "types":
        typed = by_relation(graph)
        return typed, Typed(Relations(typed.metadata()), "word", 11)
    return graph, OfOneType(RGCN({"rgcn": RGCNConv, "fast": FastRGCNConv}[kind]), classes=11)


@pytest.mark.parametrize(("kind", "apart"), campaign(("types", True), ("rgcn", False), ("fast", False)))
def test_relations_of_wordnet_are_those_of_one_device(ranks, wordnet, kind, apart):
    graph, chosen = relations_of(wordnet, kind)
    expected = trained(0, 1, graph, chosen, None, max_epochs=1)
    options = {"num_neighbors": [-1, -1], "batch_size": 20_000, "self_check": True}
    for found in ranks.run(2, trained, graph, chosen, options, apart, max_epochs=1):
        assert_same(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.campaign
def test_relations_of_wordnet_are_learnt_from_samples(ranks, wordnet):
    graph, chosen = relations_of(wordnet, "types")
    options = {"num_neighbors": [5, 5], "batch_size": 200}
    found, other = ranks.run(2, trained, graph, chosen, options, max_epochs=6)
    assert found["epochs"] == other["epochs"]
    share = (
        torch.bincount(wordnet.y[wordnet.test_mask & (wordnet.y >= 0)]).max()
        / (wordnet.test_mask & (wordnet.y >= 0)).sum()
    )
    assert found["test"]["test_acc"] > float(share) + 0.05
    assert sum(found["report"]["types"]["word relation_3 word"]) == 37_221
