"""Links: rows of any nodes, splits of edges, and a LinkPredictor whose numbers are those of one device.

Tiers: no ranks, ranks as threads, gloo ranks in the pool.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import FEATURES, Recorder, awkward_graph, build, campaign, examples, quiet_trainer, ranks_apart
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.nn import GINEConv
from torch_geometric.nn.models import GraphSAGE
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR

from lightning_gnn import (
    CoverStrategy,
    DGCLStrategy,
    GraphDataModule,
    LinkPredictor,
    SamplingStrategy,
    SpMM2DStrategy,
    SpMM15DStrategy,
    VertexCutStrategy,
    gather_halo,
    gather_nodes,
    planted_partition,
    split_edges,
)
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.draws import draw_others
from lightning_gnn.nn.helpers import graph_in_use, select_edges

WIDTH = 7


def graph_with_links() -> Data:
    graph = split_edges(awkward_graph(), val=0.15, test=0.15)
    graph.edge_type = graph.edge_index.sum(0) % 3
    return graph


# Rows of any nodes ############################################################


@examples(25)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 10_000))
def test_push_is_the_transpose_of_pull(num_ranks, num_nodes, seed):
    rng = np.random.default_rng(seed)
    part = rng.integers(0, num_ranks, num_nodes)  # some ranks may own nothing
    n_id = torch.from_numpy(np.argsort(part, kind="stable"))
    counts = np.bincount(part, minlength=num_ranks).tolist()
    x = torch.from_numpy(rng.standard_normal((num_nodes, 3)))
    ids = [torch.from_numpy(rng.integers(0, num_nodes, (rng.integers(0, 6), 2))) for _ in range(num_ranks)]
    wanted = [torch.from_numpy(rng.standard_normal((*each.shape, 3))) for each in ids]
    meeting, own = Meeting(num_ranks), x[n_id].split(counts)

    def on_rank(rank: int) -> Any:
        rows = AnyRows(n_id, counts, InProcessWorld(rank, meeting), Meter())
        mine = own[rank].clone().requires_grad_()
        found = rows.fetch(mine, ids[rank], "rows")
        (found * wanted[rank]).sum().backward()
        return found.detach(), mine.grad

    results = meeting.run(on_rank)
    for result in results:
        assert not isinstance(result, BaseException), result
    for (found, _), each in zip(results, ids):
        assert torch.equal(found, x[each])
    forward = sum(float((found * y).sum()) for (found, _), y in zip(results, wanted))
    backward = sum(float((grad * mine).sum()) for (_, grad), mine in zip(results, own))
    np.testing.assert_allclose(forward, backward, rtol=1e-12, atol=1e-12)
    expected = torch.zeros_like(x)
    for each, y in zip(ids, wanted):
        expected.index_add_(0, each.view(-1), y.view(-1, 3))
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), expected[n_id], rtol=1e-12, atol=1e-12)


def test_a_row_travels_once_and_ids_must_be_of_nodes():
    meeting, meters = Meeting(2), [Meter(), Meter()]
    ids = [torch.tensor([3, 3, 0, 3]), torch.tensor([], dtype=torch.long)]

    def on_rank(rank: int) -> Any:
        rows = AnyRows(torch.arange(4), [2, 2], InProcessWorld(rank, meeting), meters[rank])
        return rows.fetch(torch.ones(2, 5), ids[rank], "rows")

    assert [len(found) for found in meeting.run(on_rank)] == [4, 0]
    assert [meter.total().rows for meter in meters] == [0, 1]
    alone = AnyRows(torch.arange(4), [4], InProcessWorld(0, Meeting(1)), Meter())
    with pytest.raises(ValueError, match="ids run from 1 to 4, but there are 4 nodes"):
        alone.fetch(torch.ones(4, 5), torch.tensor([1, 4]), "rows")


def test_on_one_device_fetching_is_indexing():
    x = torch.randn(5, 2)
    ids = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(gather_nodes(x, ids), x[ids])


# Draws ########################################################################


def test_draws_are_uniform_over_the_other_nodes_and_belong_to_their_keys():
    keys, nodes = torch.arange(20_000), torch.arange(20_000) % 10
    drawn = draw_others(keys, nodes, 3, 10, 0, 5)
    assert not (drawn == nodes.view(-1, 1)).any()
    counts = torch.zeros(10, 10).index_put_(
        (nodes.repeat_interleave(3), drawn.view(-1)), torch.tensor(1.0), accumulate=True
    )
    expected = 60_000 / 90
    statistic = float(((counts - expected).square() / expected).sum()) - 10 * expected  # 10 cells are empty by design
    assert statistic < 124.8  # chi-square with 80 degrees of freedom, p = 0.001
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))[:50]
    assert torch.equal(draw_others(keys[order], nodes[order], 3, 10, 0, 5), drawn[order])
    assert not torch.equal(draw_others(keys, nodes, 3, 10, 0, 6), drawn)
    assert not torch.equal(draw_others(keys, nodes, 3, 10, 1, 5), drawn)


# Splits #######################################################################


@pytest.mark.parametrize("undirected", [True, False])
def test_split_keeps_what_is_one_edge_together(undirected):
    graph = planted_partition(200, seed=1) if undirected else awkward_graph()
    split = split_edges(graph, val=0.1, test=0.2, seed=3)
    masks = torch.stack([split[f"edge_{name}_mask"] for name in ("train", "val", "test")])
    assert "edge_train_mask" not in graph
    assert (masks.sum(0) == 1).all()
    where = masks.int().argmax(0)
    found: dict[tuple[int, int], int] = {}
    for (source, target), number in zip(graph.edge_index.t().tolist(), where.tolist()):
        key = (min(source, target), max(source, target)) if undirected else (source, target)
        assert found.setdefault(key, number) == number
        assert source != target or number == 0
    different = [number for (source, target), number in found.items() if source != target]
    assert [different.count(number) for number in (1, 2)] == [round(share * len(different)) for share in (0.1, 0.2)]
    again = split_edges(graph, val=0.1, test=0.2, seed=3)
    assert torch.equal(again.edge_val_mask, split.edge_val_mask)
    assert not torch.equal(split_edges(graph, val=0.1, test=0.2, seed=4).edge_val_mask, split.edge_val_mask)


# Numbers of one device ########################################################


class Scores(torch.nn.Module):
    """A decoder that learns, and tells sources from targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lin = torch.nn.Linear(2 * WIDTH, 1)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.lin(torch.cat([source, target.tanh()], -1)).squeeze(-1)


def trained(
    rank: int, world_size: int, model: str, strategy: Any, options: Any, data: Any = None, choices: Any = None
) -> dict[str, Any]:
    if isinstance(strategy, type):
        strategy = strategy(timeout=60, **options)
    recorder = Recorder()
    counts = {"num_negatives": 2, "eval_negatives": 9}
    choices = {"decoder": Scores() if model == "gcn" else "dot", **counts, **(choices or {})}
    module = LinkPredictor(build(model, FEATURES, WIDTH), **choices).double()
    datamodule = GraphDataModule(graph_with_links(), **(data or {}))
    trainer = quiet_trainer(strategy, world_size, callbacks=[recorder])
    trainer.fit(module, datamodule=datamodule)
    weights = copy.deepcopy(module.state_dict())
    [tested] = trainer.test(module, datamodule=datamodule, verbose=False)
    [rows] = trainer.predict(module, datamodule=datamodule)
    return {
        "epochs": recorder.epochs,
        "gradients": recorder.gradients,
        "weights": weights,
        "test": tested,
        "rows": rows,
    }


@cache
def on_one_device(model: str) -> dict[str, Any]:
    return trained(0, 1, model, "auto", {})


# The isolated nodes on a rank of their own, which then has no edges at all.
BARE_RANK = {"partition": [min(node // 25, 2) for node in range(60)]}


@pytest.mark.parametrize(
    ("world_size", "model", "strategy", "options", "data"),
    [
        *campaign((1, "sage", DGCLStrategy, {}, None)),
        (2, "gat", DGCLStrategy, {}, None),
        (3, "gcn", DGCLStrategy, {"shared_memory": False}, BARE_RANK),
        *campaign(
            (2, "sage", DGCLStrategy, {"plan": "replicate", "num_hops": 3}, None),
            (2, "gcn", SpMM15DStrategy, {}, None),
            (3, "gat", VertexCutStrategy, {}, None),
            (3, "gat", CoverStrategy, {}, None),
        ),
        (4, "sage", SpMM2DStrategy, {}, None),
    ],
)
def test_training_and_metrics_equal_one_device(ranks, world_size, model, strategy, options, data):
    expected = on_one_device(model)
    assert {"train_loss", "val_loss", "val_mrr", "val_hits@1", "val_hits@10"} <= expected["epochs"][0].keys()
    for found in ranks.run(world_size, trained, model, strategy, options, data):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_metrics_are_those_of_torchmetrics_retrieval():
    found, graph = on_one_device("sage"), graph_with_links()
    source, target = graph.edge_index[:, graph.edge_test_mask]
    edges = graph.edge_test_mask.nonzero().view(-1)
    others = draw_others(edges, target, 9, graph.num_nodes, 0, -1)
    z = found["rows"]
    # Positive: torchmetrics takes scores of 0 and less for misses.
    scores = (z[source].unsqueeze(1) * z[torch.cat([target.view(-1, 1), others], 1)]).sum(-1).sigmoid()
    label = torch.zeros_like(scores, dtype=torch.long)
    label[:, 0] = 1
    query = torch.arange(len(edges)).view(-1, 1).expand_as(scores)
    for name, metric in {"mrr": RetrievalMRR(), **{f"hits@{k}": RetrievalHitRate(top_k=k) for k in (1, 3)}}.items():
        assert found["test"][f"test_{name}"] == pytest.approx(float(metric(scores, label, query)), abs=1e-6), name


RELATIONS = {"decoder": "distmult", "num_relations": 3, "loss": "margin", "margin": 0.4, "filtered": True}


@cache
def with_relations() -> dict[str, Any]:
    return trained(0, 1, "sage", "auto", {}, None, RELATIONS)


@pytest.mark.parametrize(
    ("world_size", "strategy", "options", "data"),
    [
        (2, VertexCutStrategy, {}, None),
        *campaign((1, DGCLStrategy, {}, None), (3, DGCLStrategy, {"shared_memory": False}, BARE_RANK)),
    ],
)
def test_relations_margin_and_filter_equal_one_device(ranks, world_size, strategy, options, data):
    for found in ranks.run(world_size, trained, "sage", strategy, options, data, RELATIONS):
        torch.testing.assert_close(found, with_relations(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("typed", [True, False])
def test_margin_and_filtered_ranks_by_hand(typed):
    choices = RELATIONS if typed else {"loss": "margin", "margin": 0.4, "filtered": True}
    found = with_relations() if typed else trained(0, 1, "sage", "auto", {}, None, choices)
    graph, z = graph_with_links(), found["rows"]
    weight = found["weights"]["relations.weight"] if typed else torch.ones(3, WIDTH, dtype=torch.float64)
    kinds = (graph.edge_type if typed else torch.zeros_like(graph.edge_type)).tolist()
    edges = set(zip(*graph.edge_index.tolist(), kinds))
    chosen = graph.edge_test_mask.nonzero().view(-1)
    others = draw_others(chosen, graph.edge_index[1, chosen], 9, 60, 0, -1)
    costs, ranks, plain, left_out = [], [], [], 0
    for edge, against in zip(chosen.tolist(), others.tolist()):
        source, target = graph.edge_index[:, edge].tolist()
        row = z[source] * weight[graph.edge_type[edge]]
        score, rank, all_ranks = float((row * z[target]).sum()), 1, 1
        for other in against:
            value = float((row * z[other]).sum())
            costs.append(max(0.0, 0.4 - score + value))
            known = (source, other, kinds[edge]) in edges
            left_out += known
            rank, all_ranks = rank + (value >= score and not known), all_ranks + (value >= score)
        ranks.append(rank)
        plain.append(all_ranks)
    assert left_out > 0 and ranks != plain
    assert found["test"]["test_loss"] == pytest.approx(np.mean(costs))
    assert found["test"]["test_mrr"] == pytest.approx(np.mean(1 / np.array(ranks)))
    assert found["test"]["test_hits@3"] == pytest.approx(np.mean(np.array(ranks) <= 3))


class Seen(torch.nn.Module):
    """Keeps the edges that messages pass over."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.edges = torch.nn.Linear(FEATURES, WIDTH), list[torch.Tensor]()

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        self.edges.append(edge_index)
        return self.lin(x)


def test_messages_pass_over_training_edges_only():
    model, graph = Seen(), graph_with_links()
    trainer = quiet_trainer("auto", 1, max_epochs=1)
    data = GraphDataModule(graph)
    trainer.fit(LinkPredictor(model).double(), datamodule=data)
    trainer.test(LinkPredictor(model).double(), datamodule=data, verbose=False)
    assert len(model.edges) >= 3
    for edges in model.edges:
        assert torch.equal(edges, graph.edge_index[:, graph.edge_train_mask])


def test_layers_keep_what_they_make_of_chosen_edges(context):
    batch = Data(edge_index=context.edge_index, chosen=torch.arange(context.edge_index.size(1)) % 3 > 0)
    with graph_in_use(context):
        [edges] = select_edges(batch, "chosen")
        assert select_edges(batch, "chosen")[0] is edges
    assert torch.equal(edges, context.edge_index[:, batch.chosen])
    assert context.split_edges(edges) is not None
    normalised = [context.gcn_norm("conv", each, None, 60, False, True, torch.float64) for each in (edges, edges)]
    assert normalised[0][0] is normalised[1][0]
    assert normalised[0][0].size(1) < context.gcn_norm(
        "conv", context.edge_index, None, 60, False, True, torch.float64
    )[0].size(1)


def test_links_between_communities_are_learnt():
    torch.manual_seed(0)
    graph = split_edges(planted_partition(400, num_classes=8, homophily=0.95, noise=1.0), val=0.1, test=0.1)
    for name in ("y", "train_mask", "val_mask", "test_mask"):
        del graph[name]
    module = LinkPredictor(GraphSAGE(32, 32, num_layers=2, out_channels=16), lr=0.01)
    trainer = quiet_trainer("auto", 1, max_epochs=40, check_val_every_n_epoch=40)
    data = GraphDataModule(graph)
    trainer.fit(module, datamodule=data)
    [result] = trainer.test(module, datamodule=data, verbose=False)
    random = sum(1 / rank for rank in range(1, 52)) / 51
    assert result["test_mrr"] > 2 * random
    assert result["test_hits@10"] > 2 * 10 / 51


# Bad input ####################################################################


def fit(graph: Data, module: LinkPredictor) -> None:
    quiet_trainer("auto", 1, max_epochs=1).fit(module.double(), datamodule=GraphDataModule(graph))


def sage(**options: Any) -> LinkPredictor:
    return LinkPredictor(build("sage"), **options)


def test_what_cannot_work_is_refused():
    graph = graph_with_links()
    bare = awkward_graph()
    with pytest.raises(ValueError, match="no edges in edge_train_mask.*split_edges"):
        fit(bare, sage())
    for name in ("train_mask", "val_mask", "test_mask"):
        del bare[name]
    with pytest.raises(ValueError, match="no train_mask.*To predict links, split the edges"):
        fit(bare, sage())
    overlapping = copy.copy(graph)
    overlapping.edge_test_mask = graph.edge_test_mask | graph.edge_val_mask
    with pytest.raises(ValueError, match=r"\d+ edges are in more than one of edge_train_mask"):
        fit(overlapping, sage())
    short = copy.copy(graph)
    short.edge_val_mask = graph.edge_val_mask[:-1]
    with pytest.raises(ValueError, match="edge_val_mask must be bool, one entry per edge"):
        fit(short, sage())
    with pytest.raises(ValueError, match=r"takes 9 features \(in_channels\), but x of the graph has 12"):
        fit(graph, LinkPredictor(build("sage", in_channels=9)))
    with pytest.raises(ValueError, match="Bilinear returned .* needs a score per pair"):
        fit(graph, sage(decoder=torch.nn.Bilinear(5, 5, 1)))
    with pytest.raises(ValueError, match="edge_type runs from 0 to 2, but num_relations=2"):
        fit(graph, sage(decoder="distmult", num_relations=2))
    untyped = copy.copy(graph)
    del untyped.edge_type
    with pytest.raises(ValueError, match=r"needs edge_type of the graph, one integer per edge \(got none\)"):
        fit(untyped, sage(decoder="distmult", num_relations=3))
    with pytest.raises(ValueError, match=r"Linear must have out_channels .*\(got None\)"):
        LinkPredictor(torch.nn.Linear(2, 2), "distmult", num_relations=3)
    with pytest.raises(ValueError, match='Use negatives="uniform"'):
        fit(graph, sage(negatives="in_batch"))
    for options, message in (
        ({"decoder": "cosine"}, "decoder must be"),
        ({"loss": "hinge"}, "loss must be 'bce' or 'margin'"),
        ({"margin": 0}, "margin must be above 0 .got 0"),
        ({"decoder": "distmult"}, "num_relations requires decoder='distmult'"),
        ({"num_relations": 3}, "num_relations requires decoder='distmult'"),
        ({"decoder": "distmult", "num_relations": 0}, "num_relations must be at least 1"),
        ({"negatives": "hard"}, "negatives must be"),
        ({"num_negatives": 0}, "num_negatives must be at least 1"),
        ({"hits": (0,)}, "hits must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sage(**options)
    with pytest.raises(ValueError, match="sum below 1"):
        split_edges(graph, val=0.6, test=0.5)
    with pytest.raises(ValueError, match="distinct edges selects no edge"):
        split_edges(graph, val=0.0001)


# Mini-batches #################################################################


class Batches(L.Callback):
    """Keeps the training batches of the first epoch."""

    def __init__(self) -> None:
        self.seen: list[Data] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Data, batch_idx: int) -> None:
        if trainer.current_epoch == 0:
            self.seen.append(batch)


def sampled(rank: int, world_size: int, negatives: str, apart: bool, data: Any = None, **options: Any) -> Any:
    batches, recorder = Batches(), Recorder()
    relations: dict[str, Any] = {} if negatives == "in_batch" else {"decoder": "distmult", "num_relations": 3}
    module = LinkPredictor(build("sage", FEATURES, WIDTH), num_negatives=2, negatives=negatives, **relations).double()
    strategy = SamplingStrategy([4, 4], batch_size=30, timeout=60, **options)
    datamodule = GraphDataModule(graph_with_links(), **(data or {}))
    with ranks_apart(apart):
        trainer = quiet_trainer(strategy, world_size, callbacks=[batches, recorder], max_epochs=2)
        trainer.fit(module, datamodule=datamodule)
        [tested] = trainer.test(module, datamodule=datamodule, verbose=False)
    weights = {name: value for name, value in module.state_dict().items() if name.startswith("model.")}
    return batches.seen, weights, tested, recorder.epochs


@pytest.mark.parametrize(
    ("world_size", "negatives", "apart", "data"),
    [(1, "uniform", False, None), (2, "in_batch", False, None), (3, "uniform", True, BARE_RANK)],
)
def test_batches_of_edges(ranks, world_size, negatives, apart, data):
    graph = graph_with_links()
    results = ranks.run(world_size, sampled, negatives, apart, data)
    assert len({len(batches) for batches, *_ in results}) == 1  # as many steps on all ranks
    torch.testing.assert_close([found[1:] for found in results[1:]], [results[0][1:]] * (world_size - 1))
    seen = torch.cat([batch.input_id for batches, *_ in results for batch in batches])
    assert torch.equal(seen.sort().values, graph.edge_train_mask.nonzero().view(-1))
    for batches, *_ in results:
        for batch in batches:
            num = len(batch.input_id)
            assert torch.equal(batch.edge_label_type, graph.edge_type[batch.input_id])
            pairs = batch.n_id[batch.edge_label_index]
            assert torch.equal(pairs[:, :num], graph.edge_index[:, batch.input_id])
            assert batch.edge_label.tolist() == [1.0] * num + [0.0] * (pairs.size(1) - num)
            if negatives == "uniform":
                assert torch.equal(pairs[0, num:], pairs[0, :num].repeat_interleave(2))
                assert not (pairs[1, num:] == pairs[1, :num].repeat_interleave(2)).any()
            messages = batch.n_id[batch.edge_index]
            assert torch.equal(messages, graph.edge_index[:, batch.e_id])
            assert torch.equal(batch.x, graph.x[batch.n_id])
            assert graph.edge_train_mask[batch.e_id].all()
            targets = set(map(tuple, pairs[:, :num].t().tolist()))
            for source, target in messages.t().tolist():
                assert (source, target) not in targets
                assert (target, source) not in targets
            assert sum(batch.num_sampled_edges) == len(batch.e_id)


# Labels of edges ##############################################################


class EdgeClasses(L.LightningModule):
    """What a user writes: classes of edges, or numbers, from their ends; messages with features of edges."""

    predicts_edges = True

    def __init__(self, negatives: int, out: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.sampled_negatives = negatives
        self.convs = torch.nn.ModuleList(
            GINEConv(torch.nn.Linear(FEATURES, FEATURES), edge_dim=3, train_eps=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(2 * FEATURES, out)

    def rows(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = conv(x, edge_index, edge_attr).tanh()
        return x

    def loss(self, z: torch.Tensor, ends: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        out = self.head(torch.cat([z[ends[0]], z[ends[1]]], 1))
        return F.mse_loss(out.view(-1), label) if label.is_floating_point() else F.cross_entropy(out, label)

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        z = self.rows(batch.x, batch.edge_index, batch.edge_attr)
        loss = self.loss(z, batch.edge_label_index, batch.edge_label)
        self.log("train_loss", loss, batch_size=len(batch.input_id))
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        carried, chosen = batch.edge_train_mask, batch.edge_val_mask
        z = gather_halo(self.rows(batch.x, batch.edge_index[:, carried], batch.edge_attr[carried]))
        self.log("val_loss", self.loss(z, batch.edge_index[:, chosen], batch.edge_label[chosen]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def graph_with_labels(real: bool) -> Data:
    graph = graph_with_links()
    g = torch.Generator().manual_seed(2)
    size = graph.edge_index.size(1)
    graph.edge_label = torch.randn(size, generator=g).double() if real else torch.randint(0, 4, (size,), generator=g)
    return graph


def labelled_edges(rank: int, world_size: int, negatives: int, real: bool, apart: bool) -> Any:
    batches, recorder = Batches(), Recorder()
    module = EdgeClasses(negatives, 1 if real else 5).double()
    strategy = SamplingStrategy([-1, -1], batch_size=25, timeout=60)
    with ranks_apart(apart):
        trainer = quiet_trainer(strategy, world_size, callbacks=[batches, recorder], max_epochs=1)
        trainer.fit(module, datamodule=GraphDataModule(graph_with_labels(real)))
    return batches.seen, recorder.gradients, recorder.epochs[-1]["val_loss"], module.state_dict()


@pytest.mark.parametrize(
    ("negatives", "real", "apart"), [(0, False, False), (2, False, True), *campaign((0, True, True), (1, True, False))]
)
def test_labels_and_features_of_edges_are_those_of_one_process(ranks, negatives, real, apart):
    """The first step's gradients are those of one process: of these edges, on the whole graph but for them."""
    graph, results = graph_with_labels(real), ranks.run(2, labelled_edges, negatives, real, apart)
    for batches, *_ in results:
        for batch in batches:
            assert torch.equal(batch.edge_attr, graph.edge_attr[batch.e_id])
            label = graph.edge_label[batch.input_id] + (1 if negatives and not real else 0)
            assert torch.equal(batch.edge_label, torch.cat([label, label.new_zeros(len(label) * negatives)]))
    module, losses = EdgeClasses(negatives, 1 if real else 5).double(), []
    first = [batches[0] for batches, *_ in results]
    num = sum(len(batch.input_id) for batch in first)
    ids = graph.edge_index[0] * graph.num_nodes + graph.edge_index[1]
    for batch in first:
        source, target = graph.edge_index[:, batch.input_id]
        hidden = torch.cat([source * graph.num_nodes + target, target * graph.num_nodes + source])
        kept = graph.edge_train_mask & ~torch.isin(ids, hidden)
        z = module.rows(graph.x, graph.edge_index[:, kept], graph.edge_attr[kept])
        loss = module.loss(z, batch.n_id[batch.edge_label_index], batch.edge_label)
        losses.append(loss * len(batch.input_id) / num)
    sum(losses).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    for _, gradients, val_loss, weights in results:
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
        module.load_state_dict(weights)
        with torch.no_grad():
            carried, chosen = graph.edge_train_mask, graph.edge_val_mask
            z = module.rows(graph.x, graph.edge_index[:, carried], graph.edge_attr[carried])
            assert val_loss == pytest.approx(
                float(module.loss(z, graph.edge_index[:, chosen], graph.edge_label[chosen]))
            )


# Memory #######################################################################


def mapped_file(tensor: torch.Tensor) -> str:
    """Returns which file, by device and inode, a tensor's memory is mapped from; 0 for a process's own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        (first, last), (_, _, device, inode) = (int(each, 16) for each in line.split()[0].split("-")), line.split()[1:5]
        if first <= tensor.data_ptr() < last:
            return f"{device} {inode}" if inode != "0" else "0"
    raise AssertionError("no such address")


class EdgesInMemory(L.Callback):
    """Keeps by part where the edges that samplers draw lie, and how large what the loader holds beside is."""

    def __init__(self) -> None:
        self.files = dict[int, list[str]]()
        self.own = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        loader = trainer.strategy._loaders["train_mask"]
        [parts] = loader.makers[0].store._parts.values()
        for rank, part in parts.items():
            tensors = [part._csr.indptr, part._csr.indices, part._edges, part._choice["weight"]]
            self.files[rank] = [mapped_file(each) for each in tensors]
        seeds = loader.seeds, loader.stand_in
        self.own = sum(each.untyped_storage().nbytes() for each in seeds)


def edges_in_memory(rank: int, world_size: int) -> tuple[dict[int, list[str]], int]:
    kept, graph = EdgesInMemory(), graph_with_links()
    graph.odds = torch.rand(graph.edge_index.size(1))
    strategy = SamplingStrategy([4, 4], batch_size=30, timeout=60, weight_attr="odds")
    trainer = quiet_trainer(strategy, world_size, callbacks=[kept], max_epochs=1)
    trainer.fit(LinkPredictor(build("sage", FEATURES, WIDTH)).double(), datamodule=GraphDataModule(graph))
    return kept.files, kept.own


def test_ranks_of_a_machine_have_one_copy_of_the_edges(ranks):
    """Of each part, and of training edges among them, all ranks map the same files; of seeds each holds its own."""
    found = ranks.run(2, edges_in_memory)
    assert found[0][0] == found[1][0] and found[0][0].keys() == {0, 1}
    files = [file for of_part in found[0][0].values() for file in of_part]
    assert len(set(files)) == len(files) == 8 and "0" not in files
    num_seeds = int(graph_with_links().edge_train_mask.sum())
    assert sum(own for _, own in found) == 8 * (num_seeds + 2)
