"""Several samplers, fan-outs on the datamodule, and batches other than neighbourhoods: ShaDow, GraphSAINT, Cluster-GCN.

Test tiers: without ranks; gloo ranks in the pool, also ``apart``, as if each were on a machine of its own.
"""

from __future__ import annotations

from itertools import chain
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from common import (
    CLASSES,
    Recorder,
    assert_same,
    awkward_graph,
    build,
    campaign,
    of_config,
    one_training_node,
    quiet_trainer,
    ranks_apart,
    single,
)
from lightning.pytorch.callbacks import BatchSizeFinder
from scipy.stats import chisquare
from test_links import sampled as links_sampled
from test_sampling_strategy import SMALL, WHOLE, seeds_of, trained, watched
from torch_geometric.data import Data
from torch_geometric.utils import k_hop_subgraph, subgraph

from lightning_gnn import (
    DGCLStrategy,
    GraphDataModule,
    NodeClassifier,
    SamplingStrategy,
    planted_partition,
)
from lightning_gnn.data.shards import Cut, cut_graph
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.loader import SampledBatches, SeedBatches
from lightning_gnn.strategies.sampling.variants import METHODS, saint_draw

SUBGRAPHS = METHODS[3:]

# Fan-outs on the datamodule ###################################################


def fit(strategy: Any, devices: int = 1, **data: Any) -> Any:
    trainer = quiet_trainer(strategy, devices, max_epochs=1)
    module = NodeClassifier(build("sage"), num_classes=CLASSES).double()
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph(), **data))
    return trainer.strategy


@pytest.mark.parametrize("own", [{}, {"num_neighbors": (3, 2)}, {"batch_size": 4}])
def test_fanouts_on_the_datamodule_reach_the_strategy(own):
    strategy = fit(SamplingStrategy(self_check=False, **own), num_neighbors=[3, 2], batch_size=4)
    assert (strategy.num_neighbors, strategy.batch_size) == ([3, 2], 4)


def test_by_name_the_datamodule_decides(ranks):
    """Batches are those of the same choices on the strategy."""
    given = ranks.run(1, watched, SMALL, max_epochs=1, apart=False)[0]
    found = ranks.run(1, watched, {}, max_epochs=1, apart=False, data=SMALL)[0]
    assert seeds_of(found) == seeds_of(given) and len(seeds_of(found)[0]) > 1
    for batch, other in zip(found["batches"][0], given["batches"][0]):
        assert torch.equal(batch.e_id, other.e_id)


def test_yaml_of_a_named_strategy(tmp_path):
    found = of_config(tmp_path / "config.yaml", "sampling", ", num_neighbors: [4, -1], batch_size: 7")
    assert isinstance(found.trainer.strategy, SamplingStrategy)
    assert (found.datamodule.num_neighbors, found.datamodule.batch_size) == ([4, -1], 7)


@pytest.mark.parametrize(
    ("strategy", "data", "message"),
    [
        (
            {"num_neighbors": [3, 2]},
            {"num_neighbors": [3, 3]},
            r"num_neighbors is set twice: \[3, 3\] in GraphDataModule, \[3, 2\] in",
        ),
        ({"batch_size": 5}, {"batch_size": 4}, "batch_size is set twice: 4 in GraphDataModule, 5 in Sampl"),
        ({"sampler": "cluster"}, {"num_neighbors": [3]}, "num_neighbors is not supported with sampler='cluster'"),
        ("auto", {"num_neighbors": [3, 2]}, r"GraphDataModule\(num_neighbors=\[3, 2\]\) requires sampled .* SingleDevice"),
        (DGCLStrategy, {"batch_size": 4}, "batch_size=4.* requires sampled mini-batches, and DGCLStrategy does not"),
    ],
)
def test_choices_that_contradict_or_would_be_ignored(strategy, data, message):
    made: Any = strategy
    if isinstance(strategy, dict):
        made = SamplingStrategy(self_check=False, **strategy)
    with pytest.raises(ValueError, match=message):
        fit(made() if isinstance(made, type) else made, **data)


def test_there_is_no_batch_size_to_find():
    trainer = quiet_trainer("auto", 1, callbacks=[BatchSizeFinder()])
    with pytest.raises(ValueError, match="BatchSizeFinder requires GraphDataModule.batch_size"):
        trainer.fit(
            NodeClassifier(build("gcn"), num_classes=CLASSES).double(), datamodule=GraphDataModule(awkward_graph())
        )


def test_a_test_on_the_whole_graph_needs_no_samples():
    data = GraphDataModule(awkward_graph(), num_neighbors=[3, 2])
    module = NodeClassifier(build("sage"), num_classes=CLASSES).double()
    [tested] = quiet_trainer("auto", 1).test(module, datamodule=data, verbose=False)
    assert "test_loss" in tested


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampler": "layer"},
            "sampler must be one of neighbor, labor, shadow, saint_node, saint_edge, saint_walk, cluster, got 'layer'",
        ),
        ({"sampler": "saint_node", "num_neighbors": [5]}, "sampler='saint_node', which draws none"),
        ({"sampler": "cluster", "directed": False}, "sampler='cluster' supports neither replace=True nor directed=False"),
        ({"walk_length": 0}, "walk_length must be at least 1 .got 0"),
        ({"num_clusters": 0}, "num_clusters must be at least 1 .got 0"),
        ({"num_workers": 0}, "num_workers must be at least 1 .got 0"),
        ({"num_workers": 3}, "at least num_workers=3, got 2"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"), [({"num_neighbors": [2, 0]}, "A fan-out must be .*got 0"), ({"batch_size": 0}, "at least 1 .got 0")]
)
def test_refused_on_the_datamodule(options, message):
    with pytest.raises(ValueError, match=message):
        GraphDataModule(awkward_graph(), **options)


def test_edges_are_predicted_from_neighbourhoods_only(ranks):
    with pytest.raises(
        AssertionError, match="sampler='shadow' does not support LinkPredictor"
    ):
        ranks.run(1, links_sampled, "uniform", False, None, sampler="shadow")


# Samplers #####################################################################


class Together:
    """Makes batches in pairs: each waits for another thread that makes one."""

    store = Mock()

    def __init__(self, meeting: Barrier) -> None:
        self._meeting = meeting

    def make(self, seeds: torch.Tensor, random_seeds: list[int], peer_seeds: Any = None) -> Data:
        self._meeting.wait(timeout=30)
        return Data(seeds=seeds)


def test_samplers_work_at_the_same_time_and_in_order():
    meeting, own = Barrier(2), torch.arange(12)
    batches = SeedBatches([12], 2)
    loader = SampledBatches([Together(meeting), Together(meeting)], batches, own, own[:1], 0, 0, 2, lambda: 0)  # type: ignore[list-item]
    found = [batch.seeds.tolist() for batch in loader]
    once = SampledBatches([Together(Barrier(1))], batches, own, own[:1], 0, 0, 0, lambda: 0)  # type: ignore[list-item]
    assert found == [batch.seeds.tolist() for batch in once]
    loader.close()


@pytest.mark.parametrize(("world_size", "apart"), [(1, False), (2, True)])
def test_batches_do_not_depend_on_the_number_of_samplers(ranks, world_size, apart):
    options = {**SMALL, "batch_size": 3, "prefetch_batches": 4}
    one, three = (
        ranks.run(world_size, watched, {**options, "num_workers": samplers}, max_epochs=2, apart=apart)
        for samplers in (1, 3)
    )
    for expected, found in zip(one, three):
        assert seeds_of(found) == seeds_of(expected) and len(seeds_of(found)[0]) > 3
        for epoch, others in zip(found["batches"], expected["batches"]):
            for batch, other in zip(epoch, others):
                assert torch.equal(batch.n_id, other.n_id) and torch.equal(batch.e_id, other.e_id)
                assert torch.equal(batch.x, other.x) and torch.equal(batch.edge_index, other.edge_index)
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
        if apart:
            for name in ("sampling/remote_bytes", "sampling/cache_hit_rate"):
                assert found["logged"][-1][name] == expected["logged"][-1][name] > 0


def test_several_samplers_end_with_training_that_stops_early(ranks):
    options = {**SMALL, "batch_size": 2, "prefetch_batches": 5, "num_workers": 3}
    for found in ranks.run(2, watched, options, limit_train_batches=2, max_epochs=2):
        assert [len(epoch) for epoch in found["batches"]] == [2, 2]


# LABOR ########################################################################


def test_ranks_draw_by_numbers_of_sources(ranks):
    """A batch has fewer nodes than one that draws by target, of as many edges; of edges to predict, too."""
    options = {"num_neighbors": [2, 2], "batch_size": 8}
    nodes, drawn = {}, {}
    for method in ("neighbor", "labor"):
        everyone = ranks.run(2, watched, {**options, "sampler": method}, max_epochs=2)
        batches = [batch for found in everyone for epoch in found["batches"] for batch in epoch]
        nodes[method] = sum(len(batch.n_id) for batch in batches)
        drawn[method] = sum(batch.num_sampled_edges[0] for batch in batches)
    assert drawn["labor"] == drawn["neighbor"] and nodes["labor"] < nodes["neighbor"]
    [(batches, *_)] = ranks.run(1, links_sampled, "uniform", False, None, sampler="labor")
    assert len(batches) > 1


# Ego graphs ###################################################################


def test_ego_graphs_of_all_neighbours_are_the_full_graph(ranks):
    options = {**WHOLE, "sampler": "shadow"}
    for found in ranks.run(3, trained, "sage", options, True):
        assert_same(found, single(awkward_graph(), "sage"), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("num_neighbors", [[-1, -1], [3, 2]])
def test_ego_graphs_are_those_of_pyg(ranks, num_neighbors):
    graph = awkward_graph()
    expected = (graph.train_mask & (graph.y >= 0)).nonzero().view(-1).tolist()
    everyone = ranks.run(2, watched, {"num_neighbors": num_neighbors, "batch_size": 4, "sampler": "shadow"}, max_epochs=1)
    seeds = [seed for found in everyone for [epoch] in [seeds_of(found)] for batch in epoch for seed in batch]
    assert sorted(seeds) == expected
    for found in everyone:
        for batch in found["batches"][0]:
            assert torch.equal(batch.x, graph.x[batch.n_id]) and torch.equal(batch.y, graph.y[batch.n_id])
            assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
            assert torch.equal(batch.batch, batch.batch.sort().values)
            assert torch.equal(batch.batch[batch.root_n_id], torch.arange(batch.batch_size))
            assert torch.equal(batch.n_id[batch.root_n_id], batch.input_id)
            assert torch.equal(batch.train_mask.nonzero().view(-1), batch.root_n_id.sort().values)
            assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
            for tree, root in enumerate(batch.input_id.tolist()):
                low, high = batch.ptr[tree : tree + 2].tolist()
                assert (batch.batch[low:high] == tree).all()
                nodes = batch.n_id[low:high]
                reached, *_ = k_hop_subgraph(root, 2, graph.edge_index, num_nodes=60)
                assert len(nodes.unique()) == len(nodes) and torch.isin(nodes, reached).all()
                assert len(nodes) == len(reached) if num_neighbors[0] == -1 else len(nodes) <= 1 + 3 + 3 * 2
                check_induced(nodes, batch.e_id[batch.batch[batch.edge_index[1]] == tree], graph)


def check_induced(nodes: torch.Tensor, edges: torch.Tensor, graph: Data) -> None:
    _, _, kept = subgraph(nodes, graph.edge_index, num_nodes=graph.num_nodes, return_edge_mask=True)
    assert torch.equal(edges.sort().values, kept.nonzero().view(-1))


# GraphSAINT and Cluster-GCN ###################################################


class Alone:
    """A world of one rank, for a store without others."""

    rank, size = 0, 1


@pytest.fixture(scope="module")
def undirected() -> tuple[Data, Cut, GraphStore]:
    graph = planted_partition(60, 6.0, num_classes=3, seed=2)
    # Hubs, at which walks meet.
    hub = torch.stack([torch.zeros(40, dtype=torch.long), torch.arange(20, 60)])
    graph.edge_index = torch.cat([graph.edge_index, hub, hub.flip(0)], 1)
    cut = cut_graph(graph, torch.zeros(60, dtype=torch.int32).numpy(), 1)
    return graph, cut, GraphStore(cut, Alone(), [0])  # type: ignore[arg-type]


def share_of_draws(undirected: Any, method: str, count: int, walk_length: int, draws: int) -> torch.Tensor:
    """Returns how often each node is in a draw, ``[N]``, by original ids."""
    _, cut, store = undirected
    draw, most = saint_draw(cut, method, count, walk_length)
    seen = torch.zeros(60, dtype=torch.float64)
    for seed in range(draws):
        nodes = draw(store, torch.tensor([0]), [seed])
        assert torch.equal(nodes, nodes.unique()) and len(nodes) <= most
        seen[cut.n_id[nodes]] += 1 / draws
    return seen


@pytest.mark.parametrize(("method", "count"), [("saint_node", 15), *campaign(("saint_edge", 1), ("saint_walk", 6))])
def test_saint_draws_have_the_papers_odds(undirected, method, count):
    """Of independent draws with odds q, a node is among them with probability 1 - (1 - q)^count."""
    graph, _, _ = undirected
    source, target = graph.edge_index
    degree = torch.bincount(source, minlength=60).double()
    step = torch.zeros(60, 60, dtype=torch.float64)
    step.index_put_((target, source), 1 / degree[target], accumulate=True)
    step += torch.diag((degree == 0).double())
    if method == "saint_node":
        odds = degree / degree.sum()
    elif method == "saint_edge":  # a uniform node that has edges, and a neighbour of it
        odds = torch.zeros(60, dtype=torch.float64)
        for node in range(60):
            per_edge = (1 / degree[source] + 1 / degree[target]) * ((source == node) | (target == node))
            odds[node] = per_edge.sum() / 2 / 60
    else:  # what is not there after two steps has been avoided by all three nodes of a walk
        odds = torch.zeros(60, dtype=torch.float64)
        for node in range(60):
            avoiding = torch.ones(60, dtype=torch.float64)
            others = torch.arange(60) != node
            for _ in range(2):
                avoiding = step[:, others] @ avoiding[others]
            odds[node] = 1 - avoiding[others].sum() / 60
    draws = 2_000
    expected = 1 - (1 - odds) ** count
    deviation = (expected * (1 - expected) / draws).sqrt()
    seen = share_of_draws(undirected, method, count, 2, draws)
    assert ((seen - expected).abs() <= 4.5 * deviation + 1e-12).all()


def test_walks_that_meet_part_again(undirected):
    """From a hub at which many walks are, they go to all of its neighbours alike."""
    graph, cut, store = undirected
    neighbours = graph.edge_index[0, graph.edge_index[1] == 0]
    hop = store.hops([5], False)
    here = (cut.n_id == 0).nonzero().view(-1)
    found = hop(("node", "to", "node"), torch.arange(4_000) * 60 + here, 1)
    seen = torch.bincount(cut.n_id[found.sources], minlength=60).double()
    expected = torch.bincount(neighbours, minlength=60).double() / len(neighbours) * 4_000
    assert seen[expected == 0].sum() == 0
    there = expected > 0
    assert chisquare(seen[there].numpy(), expected[there].numpy()).pvalue > 1e-4


@pytest.mark.parametrize("method", SUBGRAPHS)
def test_batches_are_all_edges_between_drawn_nodes(ranks, method):
    graph = awkward_graph()
    training = graph.train_mask & (graph.y >= 0)
    options = {"sampler": method, "batch_size": 8, "num_clusters": 2}
    everyone = ranks.run(2, watched, options, max_epochs=2)
    for epochs in zip(*(found["batches"] for found in everyone)):
        assert len(epochs[0]) == len(epochs[1]) > 1 or method == "saint_walk"
    for found in everyone:
        torch.testing.assert_close(found["weights"], everyone[0]["weights"], rtol=0, atol=0)
        assert found["logged"][-1] == everyone[0]["logged"][-1]
        for batch in chain(*found["batches"]):
            assert len(batch.n_id.unique()) == len(batch.n_id)
            assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
            check_induced(batch.n_id, batch.e_id, graph)
            for name in ("x", "y", "val_mask"):
                assert torch.equal(batch[name], graph[name][batch.n_id])
            assert torch.equal(batch.train_mask, training[batch.n_id])
    drawn = [[batch.n_id.tolist() for batch in epoch] for epoch in everyone[0]["batches"]]
    assert drawn[0] != drawn[1]
    if method == "cluster":  # each node once an epoch
        for epoch in range(2):
            nodes = torch.cat(
                [batch.n_id[: len(batch.n_id)] for found in everyone for batch in found["batches"][epoch]]
            )
            assert set(nodes.tolist()) == set(range(60)) and len(nodes) <= 60 + 2 * len(drawn[epoch])


def stepped(rank: int, world_size: int, options: dict[str, Any], graph: Data, **data: Any) -> Any:
    """Returns the first step's batch and gradients."""
    recorder, module = Recorder(), NodeClassifier(build("sage"), num_classes=CLASSES).double()
    seen = []
    module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    strategy = SamplingStrategy(timeout=60, self_check=False, **options)
    with ranks_apart():
        trainer = quiet_trainer(strategy, world_size, callbacks=[recorder], max_steps=1, num_sanity_val_steps=0)
        trainer.fit(module, datamodule=GraphDataModule(graph, **data))
    return seen[0], recorder.gradients


def check_first_step(results: list[Any], counts: list[int]) -> None:
    """Its gradients are those of the mean over training nodes of all batches; a stand-in counts for nothing."""
    model, total = build("sage").double(), torch.zeros((), dtype=torch.float64)
    for (batch, _), count in zip(results, counts):
        assert list(batch.seed_counts) == counts
        out, y = model(batch.x, batch.edge_index)[batch.train_mask], batch.y[batch.train_mask]
        assert len(y) == max(1, count)
        total = total + min(1, count) * F.cross_entropy(out, y, reduction="sum")
    expected = torch.autograd.grad(total / sum(counts), list(model.parameters()))
    for _, gradients in results:
        torch.testing.assert_close(gradients, list(expected))


def test_the_loss_is_the_mean_over_training_nodes_of_all_ranks(ranks):
    results = ranks.run(2, stepped, {"sampler": "saint_node", "batch_size": 20}, awkward_graph())
    counts = [int(batch.train_mask.sum()) for batch, _ in results]
    assert counts[0] != counts[1]  # else weights would not matter
    check_first_step(results, counts)


def test_ranks_without_training_nodes_stand_by(ranks):
    """Ranks 1 to 3 have none, rank 1 has no nodes at all."""
    graph, part = one_training_node()
    options = {"sampler": "cluster", "batch_size": 1000, "num_clusters": 3, "num_workers": 2}
    results = ranks.run(4, stepped, options, graph, partition=part)
    assert [len(batch.n_id) for batch, _ in results] == [20, 1, 31, 11]
    check_first_step(results, [1, 0, 0, 0])
    check_first_step(ranks.run(4, stepped, {"num_neighbors": [-1, -1]}, graph, partition=part), [1, 0, 0, 0])


def test_one_batch_of_all_clusters_is_the_full_graph(ranks):
    for found in ranks.run(1, trained, "gin", {"sampler": "cluster", "batch_size": 1000, "num_clusters": 7}, False):
        assert_same(found, single(awkward_graph(), "gin"), rtol=1e-8, atol=1e-10)
