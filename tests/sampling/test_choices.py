"""Neighbours that are drawn by weight or by time, wherever they lie; times against PyG's meaning, worked out by hand.

Test tiers: without ranks, also threads in place of machines; gloo ranks in the pool, also ``apart``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from common import awkward_graph, campaign
from test_exchanges import PAIRS, THREE, TWO, assert_equal, batches_of, cut_of, on_threads
from test_hetero_sampling import AWARDS, BY, CITES, CLASSES, TAGS, WRITES, Typed, trained, typed_graph
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import LinkPredictor, NodeClassifier, SamplingStrategy, split_edges
from lightning_gnn.partition.types import ONE_TYPE
from lightning_gnn.sampling import NeighborSampler
from lightning_gnn.sampling.graph_store import Choice, GraphStore
from lightning_gnn.sampling.loader import BatchMaker, TemporalBatchMaker

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


def sampled(cut: Any, machines: Any, choice: Choice, fanouts: Any) -> list[list[Any]]:
    make = TemporalBatchMaker if choice.time_attr else BatchMaker
    of_types = {kind: list(fanouts) for kind in cut.types.edges}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_exchanges.GraphStore", lambda *given: GraphStore(*given, choice=choice))
        return batches_of(cut, machines, lambda store: make(store, of_types))[0]


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
    make, choice, fanouts = CASES[case]
    cut = cut_of(make(), sum(map(len, machines)), tmp_path)
    one_machine = [sorted(rank for on in machines for rank in on)]
    apart, together = (sampled(cut, on, choice, fanouts) for on in (machines, one_machine))
    for one, other in zip(apart, together, strict=True):
        assert len(one) == len(other) > 1
        for batch, same in zip(one, other):
            assert_equal(batch.to_dict(), same.to_dict())


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
    make, choice, fanouts = CASES[case]
    graph = make()
    hetero = isinstance(graph, HeteroData)
    cut = cut_of(graph, 2, tmp_path)
    looked = 0
    for batches in sampled(cut, [[0, 1]], choice, fanouts):
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
                    most = len(allowed) if fanouts[hop] < 0 else min(len(allowed), fanouts[hop])
                    assert len(set(found)) == len(found) == most and set(found) <= set(allowed)
                    looked += len(allowed) > most
                    if choice.temporal_strategy == "last":
                        latest = sorted(times, reverse=True)[:most]
                        time_of = dict(zip(allowed, times))
                        assert sorted((time_of[edge] for edge in found), reverse=True) == latest
                    if choice.time_attr:
                        assert (sources.batch[edges.edge_index[0, drawn]] == tree).all()
    assert looked > 3 or -1 in fanouts


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
    options = {"fanouts": [3, 2], "batch_size": 4, "time_attr": "time"}
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
        "fanouts": {CITES: [4], WRITES: [3], TAGS: [0], BY: [0], AWARDS: [0]},
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


REFUSED = {
    "weight": ({"weight_attr": "heaviness"}, "no edges have an attribute of that name"),
    "weight of integers": ({"weight_attr": "whole"}, "'whole' of edges"),
    "time": ({"time_attr": "year"}, "seeds need a time each"),
    "time of floats": ({"time_attr": "x"}, "'x' of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_attributes(case, ranks):
    options, words = REFUSED[case]
    graph = graph_in_time()
    graph.whole = torch.ones(graph.edge_index.size(1), dtype=torch.long)
    module = NodeClassifier(GraphSAGE(graph.num_features, 4, num_layers=2, out_channels=5))
    with pytest.raises(Exception, match=words):
        ranks.run(2, trained, graph, module, {"fanouts": [3, 2], **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight_attr": "w", "replace": True}, "replace=True draws uniformly"),
        ({"temporal_strategy": "last"}, "takes the latest edges; it needs time"),
        ({"time_attr": "t", "method": "shadow"}, "Use method='neighbor'"),
        ({"time_attr": "t", "method": "labor"}, "trees share no nodes, as LABOR would have them do"),
        ({"replace": True, "method": "labor"}, "leave out replace=True"),
        ({"weight_attr": "w", "method": "cluster"}, "Use method='neighbor'"),
        ({"temporal_strategy": "first"}, '"uniform" or "last"'),
    ],
)
def test_refused_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        SamplingStrategy(**options)


def test_links_in_time_are_refused(ranks):
    graph = split_edges(graph_in_time(), 0.1, 0.1)
    module = LinkPredictor(GraphSAGE(graph.num_features, 4, num_layers=2, out_channels=4))
    with pytest.raises(Exception, match="links with times cannot be sampled yet"):
        ranks.run(2, trained, graph, module, {"fanouts": [3, 2], "time_attr": "time"})
