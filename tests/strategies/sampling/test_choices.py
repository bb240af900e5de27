"""Neighbours that are drawn by weight or by time, wherever they lie; times against PyG's meaning, worked out by hand.

Test tiers: without ranks, also threads in place of machines; gloo ranks in the pool, also ``apart``.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import Recorder, awkward_graph, campaign, examples, quiet_trainer, ranks_apart
from hypothesis import given
from hypothesis import strategies as st
from test_exchanges import PAIRS, THREE, TWO, assert_equal, batches_of, cut_of, on_threads
from test_hetero_sampling import AWARDS, BY, CITES, CLASSES, TAGS, WRITES, Typed, trained, typed_graph
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule, LinkPredictor, NodeClassifier, SamplingStrategy, split_edges
from lightning_gnn.data.draws import OtherNodes, draw_others
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling import InEdges, Neighbors, NeighborSampler
from lightning_gnn.strategies.sampling.graph_store import Choice, GraphStore
from lightning_gnn.strategies.sampling.loader import BatchMaker, EdgeBatchMaker, Links
from lightning_gnn.strategies.sampling.neighbors import best_of

TIMED, LAST = Choice(time_attr="time"), Choice(time_attr="time", temporal_strategy="last")
WEIGHTED, BOTH = Choice(weight_attr="odds"), Choice(weight_attr="odds", time_attr="time")
LABOR, WEIGHTED_LABOR = Choice(labor=True), Choice(weight_attr="odds", labor=True)


def graph_in_time(of_edges: bool = False) -> Data:
    """Nodes at few times, some at one; edges of odds, many of them 0, and with `of_edges` of times of their own."""
    graph, g = awkward_graph(), torch.Generator().manual_seed(7)
    graph.time = torch.randint(0, 6, (graph.num_nodes,), generator=g)
    edges = graph.edge_index.size(1)
    graph.odds = torch.rand(edges, generator=g) * (torch.rand(edges, generator=g) < 0.6)
    if of_edges:
        graph.edge_time = torch.randint(0, 6, (edges,), generator=g)
    return graph


def typed_in_time() -> HeteroData:
    """Papers and authors have times, topics have none; edges to papers by authors have odds."""
    graph, g = typed_graph(), torch.Generator().manual_seed(3)
    for name in ("paper", "author"):
        graph[name].time = torch.randint(0, 5, (graph[name].num_nodes,), generator=g)
    graph[WRITES].odds = torch.rand(90, generator=g) * (torch.rand(90, generator=g) < 0.6)
    return graph


def sampled(cut: Any, machines: Any, choice: Choice, num_neighbors: Any) -> list[list[Any]]:
    of_types = {kind: list(num_neighbors) for kind in cut.types.edges}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_exchanges.GraphStore", lambda *given: GraphStore(*given, choice=choice))
        return batches_of(cut, machines, lambda store: BatchMaker(store, of_types))[0]


def assert_those_of_one(make: Any, choice: Choice, num_neighbors: Any, machines: Any, folder: Any) -> None:
    """The batches of several machines are those of one that has all of their ranks, bit by bit."""
    cut = cut_of(make(), sum(map(len, machines)), folder)
    one_machine = [sorted(rank for on in machines for rank in on)]
    apart, together = (sampled(cut, on, choice, num_neighbors) for on in (machines, one_machine))
    for one, other in zip(apart, together, strict=True):
        assert len(one) == len(other) > 1
        for batch, same in zip(one, other):
            assert_equal(batch.to_dict(), same.to_dict())


CASES = {
    "time": (graph_in_time, TIMED, [3, 2]),
    "all earlier": (graph_in_time, TIMED, [-1, -1]),
    "last": (graph_in_time, LAST, [2, 2]),
    "odds": (graph_in_time, WEIGHTED, [3, 2, 2]),
    "both": (graph_in_time, BOTH, [3, 2]),
    "types, time": (typed_in_time, TIMED, [3, 2]),
    "types, last": (typed_in_time, LAST, [1, 2]),
    "types, odds": (typed_in_time, WEIGHTED, [2, 2]),
    "labor": (awkward_graph, LABOR, [3, 2, 2]),
    "labor, odds": (graph_in_time, WEIGHTED_LABOR, [3, 2]),
    "types, labor": (typed_in_time, LABOR, [2, 2]),
}


@pytest.mark.parametrize("machines", [TWO, *campaign(PAIRS, THREE)])
@pytest.mark.parametrize("case", CASES)
def test_batches_of_several_machines_are_those_of_one(case, machines, tmp_path):
    assert_those_of_one(*CASES[case], machines, tmp_path)


@pytest.mark.parametrize("choice", [Choice(), LABOR, WEIGHTED_LABOR])
def test_what_parts_draw_is_what_a_sampler_of_the_whole_graph_draws(choice, tmp_path):
    """With its edges in the order of the parts': numbers are those of nodes of the graph, not of a part."""
    cut = cut_of(graph_in_time(), 3, tmp_path)
    graph = Data(edge_index=cut.ends(torch.arange(len(cut.e_id))), odds=cut.attributes["edge"]["odds"], num_nodes=60)
    whole = NeighborSampler.from_data(graph, [3, 2, 2], weight_attr=choice.weight_attr, labor=choice.labor)
    seeds = [torch.arange(rank, 60, 7) for rank in range(3)]

    def of_rank(rank: int, world: Any, near: Any) -> Any:
        maker = BatchMaker(GraphStore(cut, world, near, choice=choice), {ONE_TYPE: [3, 2, 2]})
        return maker.make(seeds[rank], [10, 20, 30])

    for rank, batch in enumerate(on_threads(THREE, of_rank)[0]):
        out: Any = whole.sample(seeds[rank], 10 * (rank + 1))
        assert torch.equal(batch.n_id, cut.n_id[out.node]) and torch.equal(batch.e_id, cut.e_id[out.edge])
        assert torch.equal(batch.edge_index, torch.stack([out.row, out.col]))


def in_edges(graph: Any, kind: Any, choice: Choice, node: int, until: int) -> tuple[list[int], list[int]]:
    """Returns the edges of a type to a node that may be drawn, ids in the graph, and their times."""
    store, sources = (graph[kind], graph[kind[0]]) if isinstance(graph, HeteroData) else (graph, graph)
    edges = (store.edge_index[1] == node).nonzero().view(-1)
    times = sources.time[store.edge_index[0, edges]] if choice.time_attr and "time" in sources else edges * 0
    kept = times <= until
    if choice.weight_attr and "odds" in store:
        kept &= store.odds[edges] > 0
    return edges[kept].tolist(), times[kept].tolist()


@pytest.mark.parametrize("case", CASES)
def test_what_may_be_drawn_is(case, tmp_path):
    """Of each node, as many edges as the fan-out says, of those that may be drawn; or the latest of these."""
    make, choice, num_neighbors = CASES[case]
    graph = make()
    hetero = isinstance(graph, HeteroData)
    cut = cut_of(graph, 2, tmp_path)
    looked = 0
    for batches in sampled(cut, [[0, 1]], choice, num_neighbors):
        for batch in batches:
            seeded = batch[cut.types.input_type] if hetero else batch
            if choice.time_attr:
                assert torch.equal(seeded.seed_time, (graph["paper"] if hetero else graph).time[seeded.input_id])
            for kind in cut.types.edges:
                edges = batch[kind] if hetero else batch
                targets = batch[kind[2]] if hetero else batch
                sources = batch[kind[0]] if hetero else batch
                of_hops = targets.num_sampled_nodes
                for local in range(sum(of_hops[:-1])):
                    hop = int(np.searchsorted(np.cumsum(of_hops), local, side="right"))
                    tree = int(targets.batch[local]) if choice.time_attr else 0
                    until = int(seeded.seed_time[tree]) if choice.time_attr else 0
                    node, drawn = int(targets.n_id[local]), edges.edge_index[1] == local
                    allowed, times = in_edges(graph, kind, choice, node, until)
                    found = edges.e_id[drawn].tolist()
                    most = len(allowed) if num_neighbors[hop] < 0 else min(len(allowed), num_neighbors[hop])
                    assert len(set(found)) == len(found) == most and set(found) <= set(allowed)
                    looked += len(allowed) > most
                    if choice.temporal_strategy == "last":
                        latest = sorted(times, reverse=True)[:most]
                        time_of = dict(zip(allowed, times))
                        assert sorted((time_of[edge] for edge in found), reverse=True) == latest
                    if choice.time_attr:
                        assert (sources.batch[edges.edge_index[0, drawn]] == tree).all()
    assert looked > 3 or -1 in num_neighbors


def test_odds_are_those_of_the_edges(tmp_path):
    """Of two edges, one that is nine times as likely is drawn nine times as often, though ranks renumber edges."""
    count = 400
    sources = torch.arange(count, 3 * count)
    targets = torch.arange(2 * count) % count
    odds = torch.where(sources < 2 * count, 0.9, 0.1)
    shuffled = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))
    graph = Data(
        x=torch.zeros(3 * count, 1), edge_index=torch.stack([sources, targets])[:, shuffled], odds=odds[shuffled]
    )
    graph.y = torch.zeros(3 * count, dtype=torch.long)
    graph.train_mask = graph.val_mask = graph.test_mask = torch.arange(3 * count) < count
    cut = cut_of(graph, 2, tmp_path)
    likely = [batch.n_id[batch.edge_index[0]] < 2 * count for of in sampled(cut, TWO, WEIGHTED, [1]) for batch in of]
    assert len(torch.cat(likely)) == count
    assert abs(float(torch.cat(likely).double().mean()) - 0.9) < 4 * (0.9 * 0.1 / count) ** 0.5


def by_hand(graph: Data, module: Any, hops: int) -> torch.Tensor:
    """Returns what a model says of every node from all that is not later than it, on one device."""
    sampler = NeighborSampler.from_data(graph, [-1] * hops, time_attr="time", disjoint=True)
    nodes = torch.arange(graph.num_nodes)
    out: Any = sampler.sample(nodes, seed_time=graph.time)
    with torch.no_grad():
        return module.double().model(graph.x[out.node], torch.stack([out.row, out.col]))[: graph.num_nodes]


@pytest.mark.parametrize("apart", [False, *campaign(True)])
def test_evaluation_looks_back_only(ranks, apart):
    """Test metrics and predictions are those of one device whose batches have all that is not later than their seed."""
    graph = graph_in_time()
    torch.manual_seed(2)
    module = NodeClassifier(GraphSAGE(graph.num_features, 8, num_layers=2, out_channels=5))
    expected = by_hand(graph, module, 2)
    options = {"num_neighbors": [3, 2], "batch_size": 4, "time_attr": "time"}
    for found in ranks.run(2, trained, graph, module, options, apart, fit=False):
        torch.testing.assert_close(found["predictions"], expected, rtol=1e-12, atol=1e-12)
        counted = graph.test_mask & (graph.y >= 0)
        right = (expected.argmax(1) == graph.y)[counted].double().mean()
        assert found["test"]["test_acc"] == pytest.approx(float(right), abs=1e-6)


class Papers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cites, self.writes = SAGEConv((8, 8), CLASSES), SAGEConv((5, 8), CLASSES)

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = batch.x_dict
        cited = self.cites((x["paper"], x["paper"]), batch[CITES].edge_index)
        return cited + self.writes((x["author"], x["paper"]), batch[WRITES].edge_index)


def test_training_in_time_with_types(ranks):
    """Batches of training hold nothing later than their seeds, and evaluation is that of one device."""
    graph = typed_in_time()
    torch.manual_seed(0)
    options = {
        "num_neighbors": {CITES: [4], WRITES: [3], TAGS: [0], BY: [0], AWARDS: [0]},
        "batch_size": 4,
        "time_attr": "time",
    }
    for found in ranks.run(2, partial(trained, max_epochs=2), graph, Typed(Papers()), options):
        assert len(found["batches"]) > 2
        for batch in found["batches"]:
            paper = batch["paper"]
            assert len(paper.seed_time) == paper.batch_size == int(paper.train_mask.sum())
            for name in ("paper", "author"):
                assert (batch[name].time <= paper.seed_time[batch[name].batch]).all()
        model = Papers().double()
        model.load_state_dict({name.removeprefix("model."): value for name, value in found["weights"].items()})
        earlier = graph.clone()
        for kind in (CITES, WRITES):
            source, target = earlier[kind].edge_index
            kept = earlier[kind[0]].time[source] <= earlier["paper"].time[target]
            earlier[kind].edge_index = earlier[kind].edge_index[:, kept]
        with torch.no_grad():
            torch.testing.assert_close(found["predictions"], model(earlier), rtol=1e-10, atol=1e-10)


# Scores #######################################################################


def heaviest(edges: InEdges) -> torch.Tensor:
    return edges["edge_weight"]


def by_odds(edges: InEdges) -> torch.Tensor:
    return torch.where(edges["odds"] > 0, torch.log1p(-edges.uniform) / edges["odds"], -torch.inf)


def of_ends(edges: InEdges) -> torch.Tensor:
    """Sources that are like their target, and some by chance."""
    return -(edges.of_sources("x") - edges.of_targets("x")).square().sum(1) + edges.uniform


def of_authors(edges: InEdges) -> torch.Tensor:
    return edges["odds"] if edges.kind == WRITES else edges.uniform


SCORES = {
    "heaviest": (graph_in_time, Choice(score=heaviest), [3, 2, 2]),
    "odds": (graph_in_time, Choice(score=by_odds), [3, 2]),
    "ends": (graph_in_time, Choice(score=of_ends), [2, -1]),
    "in time": (graph_in_time, Choice(score=of_ends, time_attr="time"), [2, 2]),
    "types": (typed_in_time, Choice(score=of_authors), [2, 2]),
}


@pytest.mark.parametrize("machines", [TWO, *campaign(PAIRS, THREE)])
@pytest.mark.parametrize("case", SCORES)
def test_own_scores_on_several_machines_are_those_of_one(case, machines, tmp_path):
    assert_those_of_one(*SCORES[case], machines, tmp_path)


def latest(edges: InEdges) -> torch.Tensor:
    return edges.of_sources("time")


@pytest.mark.parametrize(
    ("written", "built_in"), [(Choice(score=by_odds), WEIGHTED), (Choice(score=latest, time_attr="time"), LAST)]
)
def test_built_in_choices_are_scores(written, built_in, tmp_path):
    """What these draw, edge by edge: they are this rule, compiled; of edges of equal times, the first."""
    cut = cut_of(graph_in_time(), 2, tmp_path)
    drawn, expected = (
        [batch.e_id.sort().values for of_rank in sampled(cut, TWO, choice, [3]) for batch in of_rank]
        for choice in (written, built_in)
    )
    assert_equal(dict(enumerate(drawn)), dict(enumerate(expected)))
    assert sum(map(len, drawn)) > 40


def knows_its_edges(edges: InEdges) -> torch.Tensor:
    assert torch.equal(edges["ends"], torch.stack([edges.of_sources("number"), edges.of_targets("number")], 1))
    first = edges.offsets[:-1][edges.offsets.diff() > 0]
    assert len(edges.of_targets("number")[first]) == len(first) and edges.offsets[-1] == len(edges.uniform)
    return torch.where(edges["ends"].sum(1) % 3 > 0, edges.uniform, -torch.inf)


@pytest.mark.parametrize("messages", [None, "edge_train_mask"])
def test_what_scores_are_made_of(messages, tmp_path):
    """Attributes are those of the edges and their ends; random numbers those of node and edge, whatever else is asked for."""
    graph = split_edges(graph_in_time(), 0.2, 0.2)
    graph.number, graph.ends = torch.arange(graph.num_nodes), graph.edge_index.T.contiguous()
    cut = cut_of(graph, 2, tmp_path)

    def of_rank(rank: int, world: Any, near: Any) -> Neighbors:
        return GraphStore(cut, world, near, messages=messages, choice=Choice(score=knows_its_edges)).draw_neighbors(
            ONE_TYPE, nodes, 2, 7, False
        )

    everyone = torch.arange(graph.num_nodes)
    for nodes in (everyone, everyone.flip(0)):
        found = on_threads([[0, 1]], of_rank)[0][0]
        by_node = dict(zip(nodes.tolist(), found.edges.split(found.counts.tolist())))
        if nodes is everyone:
            expected = by_node
    assert_equal(by_node, expected)
    drawn = graph.ends[cut.e_id[torch.cat([*by_node.values()])]]
    assert len(drawn) > 40 and (drawn.sum(1) % 3 > 0).all()


@pytest.mark.parametrize("apart", [False, *campaign(True)])
def test_heaviest_edges_are_drawn(ranks, apart):
    graph = graph_in_time()
    module = NodeClassifier(GraphSAGE(graph.num_features, 8, num_layers=1, out_channels=5))
    for found in ranks.run(2, trained, graph, module, {"num_neighbors": [2], "batch_size": 8, "edge_score_fn": heaviest}, apart):
        for batch in found["batches"]:
            for seed, node in enumerate(batch.input_id.tolist()):
                weights = graph.edge_weight[graph.edge_index[1] == node].sort(descending=True).values[:2]
                of_seed = batch.edge_weight[batch.edge_index[1] == seed]
                assert torch.equal(of_seed.sort(descending=True).values, weights)


@examples(50)
@given(st.lists(st.lists(st.sampled_from([-np.inf, 0.0, 1.0, 2.0]), max_size=6), max_size=6), st.integers(0, 4))
def test_best_of_each_node(scores, fanout):
    offsets = torch.tensor([0, *np.cumsum([*map(len, scores)])]).long()
    ids = torch.arange(int(offsets[-1]))
    found = best_of(Neighbors(offsets, ids + 100, ids), torch.tensor([s for of in scores for s in of]), fanout)
    expected = [
        [
            int(first) + place
            for place in sorted(sorted(range(len(of)), key=lambda i: -of[i])[:fanout])
            if of[place] > -np.inf
        ]
        for first, of in zip(offsets, scores)
    ]
    assert found.counts.tolist() == [*map(len, expected)]
    assert found.edges.tolist() == [slot for of in expected for slot in of] == (found.sources - 100).tolist()


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda edges: edges["missing"], "edge_score_fn reads 'missing'"),
        (lambda edges: edges.uniform[:1], "edge_score_fn must return a number"),
        (lambda edges: edges.uniform * float("nan"), "not nan, for each of"),
    ],
)
def test_refused_scores(score, words, tmp_path):
    cut = cut_of(graph_in_time(), 1, tmp_path)
    with pytest.raises(ValueError, match=words):
        sampled(cut, [[0]], Choice(score=score), [2])


# Refused ######################################################################


REFUSED = {
    "weight": ({"weight_attr": "heaviness"}, "must name an attribute of edges"),
    "weight of integers": ({"weight_attr": "whole"}, "'whole' of edges"),
    "time": ({"time_attr": "year"}, "must name an attribute of nodes or edges"),
    "time of floats": ({"time_attr": "x"}, "'x' of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_attributes(case, ranks):
    options, words = REFUSED[case]
    graph = graph_in_time()
    graph.whole = torch.ones(graph.edge_index.size(1), dtype=torch.long)
    module = NodeClassifier(GraphSAGE(graph.num_features, 4, num_layers=2, out_channels=5))
    with pytest.raises(Exception, match=words):
        ranks.run(2, trained, graph, module, {"num_neighbors": [3, 2], **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight_attr": 1.5}, r"weight_attr must be a non-empty string \(got 1.5\)"),
        ({"time_attr": torch.ones(2)}, "time_attr must be a non-empty string"),
        ({"codec": "int8"}, "codec='int8' is not supported. Sampled features are sent exactly"),
        ({"weight_attr": "w", "replace": True}, "replace=True is not supported with weight"),
        ({"temporal_strategy": "last"}, "must be used with time"),
        ({"time_attr": "t", "sampler": "shadow"}, "Use sampler='neighbor'"),
        ({"time_attr": "t", "sampler": "labor"}, "LABOR does not support time"),
        ({"replace": True, "sampler": "labor"}, "Remove replace=True"),
        ({"weight_attr": "w", "sampler": "cluster"}, "Use sampler='neighbor'"),
        ({"temporal_strategy": "first"}, '"uniform" or "last"'),
        ({"edge_score_fn": heaviest, "replace": True}, "edge_score_fn must be a function of in-edges"),
        ({"edge_score_fn": "heaviest"}, "edge_score_fn must be a function of in-edges"),
        ({"edge_score_fn": heaviest, "sampler": "saint_node"}, "Use sampler='neighbor'"),
    ],
)
def test_refused_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        SamplingStrategy(**options)


# Links ########################################################################


def links_in_time(of_nodes: bool = False) -> Data:
    """Edges with times, or nodes with times and edges with times as seeds."""
    graph = split_edges(graph_in_time(of_edges=True), 0.15, 0.15)
    graph.moment = graph.time if of_nodes else graph.edge_time
    if of_nodes:
        graph.edge_label_time = graph.edge_time
    return graph


OF_LINKS = {
    "edges": (False, Choice(time_attr="moment"), [3, 2]),
    "nodes": (True, Choice(time_attr="moment"), [3, -1]),
    "last": (False, Choice(time_attr="moment", temporal_strategy="last"), [2, 2]),
    "both": (False, Choice(weight_attr="odds", time_attr="moment"), [2, 2]),
}


def batches_of_links(case: str, folder: Any, *machines: Any) -> tuple[Data, list[list[list[Any]]]]:
    of_nodes, choice, num_neighbors = OF_LINKS[case]
    graph = links_in_time(of_nodes)
    cut = cut_of(graph, sum(map(len, machines[0])), folder)
    others = OtherNodes(cut.n_id, cut.attributes["node"].get("moment"))

    def make(store: GraphStore) -> BatchMaker:
        return EdgeBatchMaker(Links(cut.ends, 2, others=others), store, {ONE_TYPE: num_neighbors})

    with pytest.MonkeyPatch.context() as patch:
        stores = partial(GraphStore, messages="edge_train_mask", choice=choice)
        patch.setattr("test_exchanges.GraphStore", stores)
        return graph, [batches_of(cut, on, make, edges="edge_train_mask")[0] for on in machines]


@pytest.mark.parametrize("machines", [TWO, *campaign(PAIRS, THREE)])
@pytest.mark.parametrize("case", OF_LINKS)
def test_links_of_several_machines_are_those_of_one(case, machines, tmp_path):
    one_machine = [sorted(rank for on in machines for rank in on)]
    _, (apart, together) = batches_of_links(case, tmp_path, machines, one_machine)
    for one, other in zip(apart, together, strict=True):
        assert len(one) == len(other) > 1
        for batch, same in zip(one, other):
            assert_equal(batch.to_dict(), same.to_dict())


@pytest.mark.parametrize("case", OF_LINKS)
def test_links_see_what_is_no_later(case, tmp_path):
    """As PyG's LinkNeighborLoader: ends of edges and of negatives are roots of trees at the edge's time; and nothing in an edge's
    trees tells of it."""
    of_nodes, choice, num_neighbors = OF_LINKS[case]
    graph, [ranks] = batches_of_links(case, tmp_path, [[0, 1]])
    source, target = graph.edge_index
    time_of = graph.moment[source] if of_nodes else graph.moment
    seed_time = graph.edge_time
    drawn = taken = 0
    for batch in (batch for of_rank in ranks for batch in of_rank):
        num = len(batch.input_id)
        until, pairs = seed_time[batch.input_id], batch.n_id[batch.edge_label_index]
        assert torch.equal(pairs[:, :num], graph.edge_index[:, batch.input_id])
        assert torch.equal(pairs[0, num:], pairs[0, :num].repeat_interleave(2))
        assert not (pairs[1, num:] == pairs[1, :num].repeat_interleave(2)).any()
        assert torch.equal(batch.edge_label_time, torch.cat([until, until.repeat_interleave(2)]))
        assert batch.edge_label.tolist() == [1.0] * num + [0.0] * 2 * num
        edge = torch.arange(num)
        assert torch.equal(batch.batch[batch.edge_label_index[1]], torch.cat([edge, edge.repeat_interleave(2)]))
        if of_nodes:  # of those that are there; where none is, the earliest
            late = graph.moment[pairs[1, num:]] > until.repeat_interleave(2)
            earliest = graph.moment.min() if num else 0
            assert (graph.moment[pairs[1, num:][late]] == earliest).all()
        assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
        assert graph.edge_train_mask[batch.e_id].all() and sum(batch.num_sampled_edges) == len(batch.e_id)
        tree = batch.batch[batch.edge_index]
        assert torch.equal(tree[0], tree[1])
        assert (time_of[batch.e_id] <= until[tree[0]]).all()
        assert (batch.edge_weight == graph.edge_weight[batch.e_id]).all()
        hidden = {(int(s), int(t)) for s, t in pairs[:, :num].T}
        trees = torch.arange(len(batch.n_id))[: batch.num_sampled_nodes[0]]
        for root in trees.tolist():
            node, of = int(batch.n_id[root]), int(batch.batch[root])
            allowed = graph.edge_train_mask & (target == node) & (time_of <= until[of])
            if choice.weight_attr:
                allowed &= graph.odds > 0
            ends = pairs[:, of].tolist()
            tells = sum((source == a) & (target == b) for a, b in (ends, ends[::-1])).bool()
            if not of_nodes:
                tells &= time_of >= until[of]
            found = batch.e_id[batch.edge_index[1] == root]
            assert allowed[found].all() and not tells[found].any() and len(found.unique()) == len(found)
            assert len(found) <= num_neighbors[0]
            hid = int((allowed & tells).sum())
            assert len(found) >= min(int(allowed.sum()), num_neighbors[0]) - hid
            drawn, taken = drawn + len(found), taken + hid
        assert hidden
    assert drawn > 20 and taken > 5


def linked(rank: int, world_size: int, of_nodes: bool, apart: bool = False) -> dict[str, Any]:
    recorder, graph = Recorder(), links_in_time(of_nodes)
    torch.manual_seed(3)
    options = {"num_negatives": 2, "eval_negatives": 4}
    module = LinkPredictor(GraphSAGE(graph.num_features, 4, num_layers=2, out_channels=4), **options).double()
    before = copy.deepcopy(module.model)
    # With one edge a batch, a rank has none in the last: it stands in there, and counts for nothing.
    strategy = SamplingStrategy([3, 2], 16 if of_nodes else 1, timeout=60, time_attr="moment")
    data = GraphDataModule(graph)
    with ranks_apart(apart):
        trainer = quiet_trainer(strategy, world_size, callbacks=[recorder], max_epochs=1)
        [tested] = trainer.test(module, datamodule=data, verbose=False)
        predicted = trainer.predict(module, datamodule=data) if of_nodes else []
        trainer.fit(module, datamodule=data)
    return {"test": tested, "epochs": recorder.epochs, "predicted": predicted, "model": before}


def metrics_by_hand(graph: Data, model: Any, of_nodes: bool) -> dict[str, float]:
    """Returns the test metrics of one device: each edge, and what it is compared with, from training edges that are no later."""
    model, losses, ranks = model.double(), [], []
    messages = Data(x=graph.x, edge_index=graph.edge_index[:, graph.edge_train_mask], moment=graph.moment)
    if not of_nodes:
        messages.moment = graph.moment[graph.edge_train_mask]
    sampler = NeighborSampler.from_data(messages, [-1, -1], time_attr="moment", disjoint=True)
    edges, (source, target) = graph.edge_test_mask.nonzero().view(-1), graph.edge_index
    others = OtherNodes(torch.arange(graph.num_nodes), graph.moment if of_nodes else None)
    against = others.draw(edges, target[edges], graph.edge_time[edges], 4, 0, -1)
    if not of_nodes:
        assert torch.equal(against, draw_others(edges, target[edges], 4, graph.num_nodes, 0, -1))
    for edge, compared in zip(edges, against):
        nodes = torch.cat([source[edge].view(1), target[edge].view(1), compared])
        until = graph.edge_time[edge].expand(len(nodes))
        out: Any = sampler.sample(nodes, seed_time=until)
        z = model(graph.x[out.node], torch.stack([out.row, out.col]))[: len(nodes)]
        scores = (z[0] * z[1:]).sum(1)
        losses.append(F.softplus(-scores[0]) + F.softplus(scores[1:]).mean())
        ranks.append(1 + int((scores[1:] >= scores[0]).sum()))
    of_ranks = torch.tensor(ranks).double()
    return {
        "test_loss": float(torch.stack(losses).mean()),
        "test_mrr": float((1 / of_ranks).mean()),
        "test_hits@3": float((of_ranks <= 3).double().mean()),
    }


@pytest.mark.parametrize(("of_nodes", "apart"), [(False, False), *campaign((True, True)), (True, False)])
def test_links_in_time_are_evaluated_as_on_one_device(ranks, of_nodes, apart):
    for found in ranks.run(2, linked, of_nodes, apart):
        with torch.no_grad():
            expected = metrics_by_hand(links_in_time(of_nodes), found["model"], of_nodes)
        assert {name: found["test"][name] for name in expected} == pytest.approx(expected, abs=1e-9)
        assert 0 < found["epochs"][-1]["train_loss"] < 10
        if of_nodes:
            graph = links_in_time(True)
            messages = Data(x=graph.x, edge_index=graph.edge_index[:, graph.edge_train_mask], time=graph.moment)
            [rows] = found["predicted"]
            module = type("Module", (), {"double": lambda self: self, "model": found["model"].double()})()
            torch.testing.assert_close(rows, by_hand(messages, module, 2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"negatives": "in_batch"}, "negatives are nodes at the time"),
        ({"filtered": True}, "negatives are nodes at the time"),
    ],
)
def test_refused_links_in_time(ranks, options, words):
    graph = links_in_time()
    module = LinkPredictor(GraphSAGE(graph.num_features, 4, num_layers=2, out_channels=4), **options)
    with pytest.raises(Exception, match=words):
        ranks.run(2, trained, graph, module, {"num_neighbors": [3, 2], "time_attr": "moment"})


@pytest.mark.parametrize(
    ("name", "words"),
    [("time", "edges have no attribute edge_label_time or time"), ("edge_label_time", "it has the times of seeds")],
)
def test_links_without_times_are_refused(ranks, name, words):
    graph = split_edges(graph_in_time(), 0.1, 0.1)
    module = LinkPredictor(GraphSAGE(graph.num_features, 4, num_layers=2, out_channels=4))
    with pytest.raises(Exception, match=words):
        ranks.run(2, trained, graph, module, {"num_neighbors": [3, 2], "time_attr": name})
