"""Full-graph training over ranks equals one device: losses, gradients, weights, metrics, predictions (gloo ranks)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from common import assert_same, awkward_graph, campaign, one_training_node, single, three_nodes, train

MODELS = ["gcn", "gcn_cached", "sage", "sage_sum", "sage_max", "gin", "gat", "gatv2", "gat_edges", "transformer"]
MODELS += ["transformer_edges", "sage_several", "pna", "commnet", "graphconv", "own", "own_mean", "own_sum"]


@cache
def on_one_device(model: str) -> dict[str, Any]:
    return single(awkward_graph(), model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_awkward_graph(ranks, world_size):
    """All models beside each other."""
    expected = single(awkward_graph(), MODELS)
    for found in ranks.run(world_size, train, awkward_graph(), MODELS, timeout=280):
        assert_same(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.campaign
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_awkward_graph_by_model(ranks, model, world_size):
    expected = on_one_device(model)
    for found in ranks.run(world_size, train, awkward_graph(), model, self_check=world_size == 2):
        assert_same(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("partition", "world_size"), [("random", 2), ("metis", 4), *campaign(("random", 4), ("metis", 2))]
)
def test_user_module(ranks, world_size, partition):
    graph = awkward_graph(seed=3)
    graph.y[graph.y < 0] = 0
    expected = single(graph, "gat", module="user")
    for found in ranks.run(world_size, train, graph, "gat", module="user", data={"partition": partition}):
        # torchmetrics computes F1 and AUROC in float32
        assert_same(found, expected, rtol=1e-6, atol=1e-7)


def test_parts_without_nodes_or_labels(ranks):
    """Rank 1 owns nothing, rank 2 no training node, rank 0 the only one."""
    graph, part = one_training_node()
    expected = single(graph, "sage", module="user")
    for found in ranks.run(4, train, graph, "sage", module="user", data={"partition": part}):
        assert_same(found, expected, rtol=1e-6, atol=1e-7)


def test_more_ranks_than_nodes(ranks):
    graph = three_nodes()
    expected = single(graph, "gcn")
    for found in ranks.run(4, train, graph, "gcn"):
        assert_same(found, expected, rtol=1e-9, atol=1e-11)


def test_no_edges(ranks):
    graph = awkward_graph(seed=7)
    for name in ("edge_weight", "edge_attr"):
        graph[name] = graph[name][:0]
    graph.edge_index = graph.edge_index[:, :0]
    expected = single(graph, "gat")
    for found in ranks.run(2, train, graph, "gat"):
        assert_same(found, expected, rtol=1e-9, atol=1e-11)


ALIKE = ("gcn", "sage_max", "gat", "gatv2", "transformer", "pna")


@pytest.mark.parametrize("model", [pytest.param(ALIKE, id="together"), *campaign(*ALIKE)])
def test_the_same_run_gives_the_same_bits(ranks, model):
    first, again = (ranks.run(3, train, awkward_graph(), model, self_check=False) for _ in range(2))
    for found, expected in zip(again, first):
        assert_same(found, expected, rtol=0, atol=0)
