"""Training with the fewest rows equals one device, and what travels is a minimum cover of the edges between ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import permutations
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from common import (
    CLASSES,
    all_rows_sent,
    assert_same,
    awkward_graph,
    campaign,
    one_training_node,
    quiet_trainer,
    single,
    three_nodes,
    train,
)
from planning import chain
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from test_vertex_cut import KINDS, on_one_device
from torch_geometric import nn as pyg_nn
from torch_geometric.data import Data
from torch_geometric.nn import Sequential
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

import lightning_gnn.strategies.cover.strategy
from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Triples
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.matrix import EdgeHolders, SparseMatrix
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans.exchanges import Workload, edge_traffic
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.scheme import make_exchange
from lightning_gnn.partition.shard import Relabelling
from lightning_gnn.registry import costs_of
from lightning_gnn.strategies.cover.covers import cover_edges
from lightning_gnn.strategies.cover.strategy import CoverScheme
from lightning_gnn.tools.advising.advice import Candidate, advise_on
from lightning_gnn.tools.advising.machine import Machine


def trained(rank: int, world_size: int, model: Any, options: dict[str, Any], **others: Any) -> dict[str, Any]:
    return train(rank, world_size, awkward_graph(), model, strategy=CoverStrategy, options=options, **others)


SUM_AND_MAXIMUM = ("gcn", "sage_max")


@pytest.mark.parametrize("world_size", [2, *campaign(3, 4, 5, 8)])
def test_trained_as_on_one_device(ranks, world_size):
    """Losses, gradients, weights, metrics and predictions, of sums and of what is covered by weight."""
    for found in ranks.run(world_size, trained, SUM_AND_MAXIMUM, {}):
        assert_same(found, on_one_device(SUM_AND_MAXIMUM), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("model", [pytest.param(KINDS, id="together"), *campaign(*KINDS)])
def test_every_kind_of_conv(ranks, model):
    for found in ranks.run(3, trained, model, {}, self_check=False):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


def test_parts_without_nodes_or_edges(ranks):
    graph, _ = one_training_node()
    expected = single(graph, "sage")
    for found in ranks.run(4, train, graph, "sage", strategy="cover"):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


def test_more_ranks_than_nodes(ranks):
    expected = single(three_nodes(), "gcn")
    for found in ranks.run(4, train, three_nodes(), "gcn", strategy="cover"):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


def test_users_module_over_sockets_with_recompute(ranks):
    options = {"shared_memory": False, "checkpoint_convs": True}
    for found in ranks.run(3, trained, "sage", options, module="user", self_check=False):
        assert_same(found, on_one_device("sage", "user"), rtol=1e-8, atol=1e-10)


RELAYED = ("gcn", *KINDS)


@pytest.mark.parametrize("model", [pytest.param(RELAYED, id="together"), *campaign(*RELAYED)])
def test_copies_and_partial_results_are_relayed(ranks, model):
    """Only neighbours are joined: partial sums are added on the way, and of extremes the largest is taken."""
    for found in ranks.run(4, trained, model, {"plan": "spst", "topology": chain(4)}, self_check=False):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


def test_partial_sums_are_added_on_the_way():
    """Nodes 0 to 3 on a rank each; 0, 1 and 2 lead to 3, and compute there what they add: one row crosses each link."""
    offsets, meeting = np.arange(5), Meeting(4)

    def work(rank: int) -> tuple[int, float, int, float]:
        world, meter = InProcessWorld(rank, meeting), Meter()
        target, source = (np.full(3, 3), np.arange(3)) if rank == 3 else (np.empty(0, np.int64),) * 2
        holders = EdgeHolders(target, source, source, rank, 4)
        entries = Triples(torch.from_numpy(target), torch.from_numpy(source), None)
        matrix = SparseMatrix(entries, holders, offsets, world, meter, partial(make_exchange, "spst", chain(4)))
        x = torch.tensor([[10.0**rank]], dtype=torch.float64)
        product = matrix.multiply(x, Call("layer", direction="forward"))
        rows = sum(traffic.rows for traffic in meter.take().values())
        back = matrix.multiply(x, Call("layer", direction="backward"))
        return rows, float(product), sum(traffic.rows for traffic in meter.take().values()), float(back)

    assert meeting.run(work) == [(1, 0, 0, 1000), (1, 0, 1, 1000), (1, 0, 1, 1000), (0, 111, 1, 0)]


def test_advice_knows_what_relays_send():
    """Predicted are the rows that cross links, relayed ones each time."""
    graph = hubs()
    order = Relabelling.from_assignment(np.random.default_rng(6).integers(0, 4, graph.num_nodes), 4)
    edge_index = order.new_ids()[graph.edge_index.numpy()]
    work = Workload(Relation.from_edges(edge_index, order.offsets), edge_index, 2, 16, 16)
    direct, along_trees = costs_of(CoverScheme(plan="spst"), work, chain(4))
    assert direct.seconds is None and "no link" in direct.reason
    assert along_trees.followed and along_trees.rows > direct.rows and along_trees.seconds is not None
    [only] = costs_of(CoverScheme(), work, chain(4))
    assert only.followed and only.rows == direct.rows


def test_plans_that_are_none():
    for plan in ("auto", "swap", "fastest", None):
        with pytest.raises(ValueError, match="plan must be one of 'p2p', 'spst'"):
            CoverStrategy(plan=plan)
    with pytest.raises(ValueError, match='plan="spst" needs a topology, got None'):
        CoverStrategy(plan="spst", topology=None)


@pytest.mark.parametrize("others", [False, True], ids=["cover", "one edge between others"])
@pytest.mark.parametrize("size", [5, 8])
def test_products_of_five_to_eight_ranks(size, others):
    """In one process: each rank computes what a cover gives it, and rows and gradients are those of the whole, exactly.

    Copies and partial sums share a message, unless some rank, known to all, must first have copies to make partial sums.
    """
    graph, rng = hubs(), np.random.default_rng(size)
    order = Relabelling.from_assignment(rng.integers(0, size, graph.num_nodes), size)
    source, target = order.new_ids()[graph.edge_index.numpy()]
    offsets = order.offsets
    owner = np.repeat(np.arange(size), np.diff(offsets))
    holders = cover_edges(np.stack([source, target]), owner, size)
    assert (holders != owner[target]).sum() > 50
    if others:
        holders[np.flatnonzero((owner[source] == 0) & (owner[target] == 1))[0]] = 2
    x = torch.from_numpy(rng.integers(-9, 10, (graph.num_nodes, 3))).double()
    forward, backward = torch.zeros_like(x), torch.zeros_like(x)
    forward.index_add_(0, torch.from_numpy(target), x[source])
    backward.index_add_(0, torch.from_numpy(source), x[target])
    meeting = Meeting(size)

    def work(rank: int) -> tuple[int, int]:
        mine, own = np.flatnonzero(owner[target] == rank), slice(*offsets[rank : rank + 2])
        of_edges = EdgeHolders(target[mine], source[mine], holders[mine], rank, graph.num_nodes)
        entries, meter = Triples(torch.from_numpy(target[mine]), torch.from_numpy(source[mine]), None), Meter()
        matrix = SparseMatrix(entries, of_edges, offsets, InProcessWorld(rank, meeting), meter)
        for direction, expected in (("forward", forward), ("backward", backward)):
            product = matrix.multiply(x[own].contiguous(), Call("layer", direction=direction))
            assert torch.equal(product, expected[own])
        found = meter.by_layer["layer", "forward"]
        return found.rows, found.messages

    traffic = edge_traffic(holders, offsets, np.stack([source, target]))
    messages = (traffic > 0).sum((0, 2)) if others else (traffic.sum(0) > 0).sum(1)
    assert meeting.run(work) == [*zip(traffic.sum((0, 2)).tolist(), messages.tolist())]


def test_codec(ranks):
    """Rows of 16 bits: half the bytes of the layers, and nearly the same losses."""
    graph = hubs()
    owner = np.random.default_rng(6).integers(0, 3, graph.num_nodes)
    [whole, *_], [coded, *_] = (ranks.run(3, sent, graph, owner, CoverStrategy, codec=each) for each in (None, "bf16"))
    assert 0.4 * whole < coded < 0.65 * whole


def test_advice_predicts_the_bytes(ranks):
    """Those of rows; what all schemes send alike, such as gradients, is predicted beside."""
    graph, counted, predicted = hubs(), [], []
    owner = np.random.default_rng(6).integers(0, 3, graph.num_nodes)
    for each in (DGCLStrategy, CoverStrategy):
        counted.append(ranks.run(3, sent, graph, owner, each, "gcn", False)[0])
        module, data = NodeClassifier(MODELS["gcn"](), num_classes=OUT), GraphDataModule(graph, partition=owner)
        [found] = advise_on(Machine.of(3, 1), module, data, only=[Candidate(each)], overhead=0.0)
        predicted.append(found.bytes_sent)
    assert predicted[0] - predicted[1] == counted[0] - counted[1] > 10_000


OUT = 16
WIDTHS = 64 + OUT
MODELS = {
    "gcn": lambda: GCN(OUT, 64, num_layers=3, out_channels=OUT),
    "gat": lambda: GAT(OUT, OUT, heads=2, num_layers=2),
    "gatv2": lambda: GAT(OUT, OUT, heads=2, v2=True, num_layers=2),
    "transformer": lambda: Sequential(
        "x, edges", [(pyg_nn.TransformerConv(width, 8, heads=2), "x, edges -> x") for width in (OUT, OUT)]
    ),
    "sage_max": lambda: GraphSAGE(OUT, OUT, aggr="max", num_layers=2),
    "sage_several": lambda: GraphSAGE(OUT, OUT, aggr=["mean", "min", "max", "std"], num_layers=2),
}
DEARER = [*MODELS][1:]
"""Models whose partial results cost more than copies."""


class SecondEpoch(L.Callback):
    """Keeps what ranks send in the second epoch: no longer what is constant, and still with a codec."""

    bytes_sent = 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.bytes_sent = float(trainer.callback_metrics["comm/bytes_sent"])


def sent(
    rank: int,
    size: int,
    graph: Data,
    owner: np.ndarray | None,
    strategy: type[L.pytorch.strategies.Strategy],
    model: str = "gcn",
    zeros: bool = True,
    **options: Any,
) -> float:
    """Returns the bytes that ranks send in an epoch, those of rows of zeros too, or none of these."""
    data, second = GraphDataModule(graph, partition=owner), SecondEpoch()
    trainer = quiet_trainer(
        strategy(self_check=False, **options), size, max_epochs=3, limit_val_batches=0, callbacks=[second]
    )
    with all_rows_sent() if zeros else nullcontext():
        trainer.fit(NodeClassifier(MODELS[model](), num_classes=OUT), datamodule=data)
    return second.bytes_sent


def test_what_travels_is_a_minimum_cover(ranks):
    """Bytes beyond those of dgcl on the same parts are the rows that a maximum matching spares, forward and backward."""
    graph = hubs()
    owner = np.random.default_rng(6).integers(0, 3, graph.num_nodes)
    [direct, *_], [covered, *_] = (ranks.run(3, sent, graph, owner, each) for each in (DGCLStrategy, CoverStrategy))
    source, target = graph.edge_index.numpy()
    halo = minimum = 0
    for p, q in permutations(range(3), 2):
        between = (owner[source] == p) & (owner[target] == q)
        halo += len(np.unique(source[between]))
        matrix = csr_matrix((np.ones(between.sum()), (source[between], target[between])), (graph.num_nodes,) * 2)
        minimum += int((maximum_bipartite_matching(matrix) >= 0).sum())
    assert minimum < 0.7 * halo
    assert direct - covered == 2 * 4 * WIDTHS * (halo - minimum)


def test_refined_parts_send_less(ranks):
    graph = hubs()
    plain, refined = (ranks.run(3, sent, graph, None, CoverStrategy, refine=each)[0] for each in (False, True))
    assert 0 < refined < 0.95 * plain
    for found in ranks.run(2, trained, SUM_AND_MAXIMUM, {"refine": True}):
        assert_same(found, on_one_device(SUM_AND_MAXIMUM), rtol=1e-10, atol=1e-12)


def test_refine_and_given_parts_contradict_each_other():
    graph = awkward_graph()
    data, module = (
        GraphDataModule(graph, partition="random"),
        NodeClassifier(GCN(graph.num_features, OUT, num_layers=1)),
    )
    with pytest.raises(ValueError, match=r"CoverStrategy\(refine=True\) moves nodes .* Remove one of them"):
        quiet_trainer(CoverStrategy(refine=True), 1).fit(module, datamodule=data)
    with pytest.raises(ValueError, match="refine must be True or False"):
        CoverStrategy(refine="yes")


@pytest.mark.parametrize("codec", [None, *campaign("int8", "bf16")])
def test_never_sends_more_than_dgcl(ranks, codec):
    graph = hubs()
    owner = np.random.default_rng(6).integers(0, 3, graph.num_nodes)
    for model in DEARER:
        direct, covered = (
            ranks.run(3, sent, graph, owner, each, model, codec=codec)[0] for each in (DGCLStrategy, CoverStrategy)
        )
        assert 0 < covered <= direct, model


def sent_and_weighed(rank: int, size: int, model: str, codec: Any) -> tuple[float, float]:
    """Returns what a partial result costs over what a copy does: as counted, and as edges were covered by."""
    costs: list[tuple[int, int]] = []
    cover = lightning_gnn.strategies.cover.strategy.cover_edges

    def cover_edges(*arguments: Any) -> np.ndarray:
        costs.append(arguments[3:])
        return cover(*arguments)

    sources = 64
    counted = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_gnn.strategies.cover.strategy, "cover_edges", cover_edges)
        for strategy, targets in ((DGCLStrategy, 1), (CoverStrategy, 1), (CoverStrategy, 2)):
            # Every source is read by every target of the other rank: copies of all, or results of few.
            graph, owner = between(sources, targets)
            counted[strategy, targets] = sent(rank, size, graph, owner, strategy, model, codec=codec)
    result = counted[CoverStrategy, 2] - counted[CoverStrategy, 1]
    copies = counted[DGCLStrategy, 1] - counted[CoverStrategy, 1] + result
    [weighed] = {each for each in costs if each != (1, 1)}
    return result / (copies / sources), weighed[1] / weighed[0]


@pytest.mark.parametrize("codec", [None, *campaign("int8", "bf16")])
def test_edges_are_covered_by_what_is_counted(ranks, codec):
    for model in DEARER:
        for counted, weighed in ranks.run(2, sent_and_weighed, model, codec):
            assert counted == weighed > 1, model


def between(sources: int, targets: int) -> tuple[Data, np.ndarray]:
    """Returns edges from all nodes of one rank to some of the other's, and the ranks."""
    nodes = sources + 2
    ends = np.stack([each.ravel() for each in np.meshgrid(np.arange(sources), sources + np.arange(targets))])
    return graph_of(ends, nodes), np.repeat([0, 1], [sources, 2])


def hubs() -> Data:
    """A graph whose edges begin or end at few nodes."""
    rng = np.random.default_rng(5)
    nodes, edges = 300, 600
    ends = np.where(rng.random((2, edges)) < 0.5, rng.integers(0, 10, (2, edges)), rng.integers(0, nodes, (2, edges)))
    return graph_of(ends, nodes)


def graph_of(ends: np.ndarray, nodes: int) -> Data:
    rng = np.random.default_rng(7)
    mask = torch.from_numpy(rng.random(nodes) < 0.5)
    return Data(
        x=torch.from_numpy(rng.standard_normal((nodes, OUT))).float(),
        edge_index=torch.from_numpy(ends),
        y=torch.from_numpy(rng.integers(0, CLASSES, nodes)),
        **dict.fromkeys(("train_mask", "val_mask", "test_mask"), mask),
    )
