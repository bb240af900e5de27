"""1D and 1.5D products on a process grid equal one device, and move what their formulas say (gloo ranks, float64)."""

from __future__ import annotations

import copy
from collections import Counter
from datetime import timedelta
from functools import cache
from itertools import permutations
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from common import (
    CLASSES,
    FEATURES,
    assert_same,
    awkward_graph,
    build,
    campaign,
    examples,
    one_training_node,
    quiet_trainer,
    single,
    strategy_of_config,
    three_nodes,
    train,
)
from conftest import RankFailed
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric import nn as pyg_nn
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

from lightning_gnn import (
    GraphDataModule,
    NodeClassifier,
    SpMM1DStrategy,
    SpMM2DStrategy,
    SpMM15DStrategy,
    SpMMStrategy,
)
from lightning_gnn.comm.call import DIRECTIONS, Call
from lightning_gnn.comm.exchange import Matrix, Triples
from lightning_gnn.comm.group import CommunicationError, World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.data.shards import split_graph
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.spmm.grid import ProcessCube, ProcessGrid, legal_replications, on_grid
from lightning_gnn.strategies.spmm.matrices import BlockMatrix, SummaMatrix
from lightning_gnn.strategies.spmm.strategy import CubeScheme, _partial_sums
from lightning_gnn.strategies.spmm.traffic import GridCost, block_cost, choose, sparse_cost
from lightning_gnn.strategy.scheme import bind_module


@cache
def on_one_device(model: Any, module: str = "library") -> dict[str, Any]:
    return single(awkward_graph(), model, module=module)


def trained(rank: int, world_size: int, model: Any, options: dict[str, Any], **others: Any) -> dict[str, Any]:
    return train(rank, world_size, awkward_graph(), model, strategy=SpMM15DStrategy, options=options, **others)


PRODUCTS = ("gcn", "graphconv", "gin_batch_norm")
EVERY_DAY = [(3, 1, False), (4, 2, True)]
CASES = [(2, 1, True), (2, 2, False), (3, 1, False), (4, 2, True), (4, 2, False), (4, 4, True), (3, 3, False)]


@pytest.mark.parametrize(
    ("model", "world_size", "replication", "sparsity_aware"),
    [
        *((PRODUCTS, *case) for case in EVERY_DAY),
        *campaign(*(("gcn", *case) for case in CASES)),
        *campaign(*((model, 4, 2, sparse) for model in PRODUCTS[1:] for sparse in (True, False))),
    ],
)
def test_trained_as_on_one_device(ranks, model, world_size, replication, sparsity_aware):
    options = {"replication_factor": replication, "sparsity_aware": sparsity_aware}
    for found in ranks.run(world_size, trained, model, options):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("model", "world_size", "replication"),
    [
        (("gat", "gatv2", "transformer"), 4, 2),
        *campaign(("gat", 2, 2), ("gat", 3, 3), ("gat", 4, 2), ("gatv2", 4, 2), ("transformer", 4, 2)),
    ],
)
def test_attention_over_a_process_row(ranks, model, world_size, replication):
    for found in ranks.run(world_size, trained, model, {"replication_factor": replication, "sparsity_aware": False}):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


OTHERS = ("gat_edges", "sage_max", "transformer_edges", "own")


@pytest.mark.parametrize("model", [pytest.param(OTHERS, id="together"), *campaign(*OTHERS)])
def test_convs_that_are_no_products(ranks, model):
    for found in ranks.run(4, trained, model, {"replication_factor": 2}):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("permute", ["random", *campaign(None)])
def test_permutations_and_the_users_module(ranks, permute):
    options = {"node_order": permute, "sparsity_aware": permute is None}
    for found in ranks.run(4, trained, "sage", options, module="user"):
        assert_same(found, on_one_device("sage", "user"), rtol=1e-8, atol=1e-10)


ON_A_GRID = (*PRODUCTS, "gat")


@pytest.mark.parametrize("model", [pytest.param(ON_A_GRID, id="together"), *campaign(*ON_A_GRID)])
def test_2d(ranks, model):
    for found in ranks.run(4, train, awkward_graph(), model, strategy="spmm_2d"):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


@pytest.mark.campaign  # eight ranks
def test_3d(ranks):
    for found in ranks.run(8, train, awkward_graph(), ("gcn", "gat"), strategy="spmm_3d"):
        assert_same(found, on_one_device(("gcn", "gat")), rtol=1e-8, atol=1e-10)


def test_each_product_its_own_way(ranks):
    for found in ranks.run(4, train, awkward_graph(), ("gcn", "graphconv", "gat"), strategy="spmm"):
        assert_same(found, on_one_device(("gcn", "graphconv", "gat")), rtol=1e-8, atol=1e-10)


@pytest.mark.campaign  # eight ranks
def test_each_product_its_own_way_on_8_ranks(ranks):
    for found in ranks.run(8, train, awkward_graph(), ("gcn", "gat"), strategy="spmm"):
        assert_same(found, on_one_device(("gcn", "gat")), rtol=1e-8, atol=1e-10)


def test_gradients_of_two_bytes_travel_as_rows(ranks):
    """So that backward, too, fewer bytes are sent than of partial sums, and the loss is that of one matrix."""
    one_way, own = (ranks.run(4, logged, (kind, {}), "bf16-mixed") for kind in (SpMM1DStrategy, SpMMStrategy))
    assert [loss for *_, loss in own] == pytest.approx([loss for *_, loss in one_way], rel=0.01)
    sent = [[max(found["model.convs.1", way] for found, *_ in each) for way in DIRECTIONS] for each in (one_way, own)]
    assert sent[1][0] <= sent[0][0] and sent[1][1] < 0.8 * sent[0][1]


@pytest.mark.parametrize("strategy", ["spmm_1d", "spmm_15d"])
def test_by_name(ranks, strategy):
    part = torch.arange(60) % 2  # the third rank owns nothing
    for found in ranks.run(3, train, awkward_graph(), "gcn", strategy=strategy, data={"partition": part}):
        assert_same(found, on_one_device("gcn"), rtol=1e-8, atol=1e-10)


ON_4_RANKS: dict[str, tuple[type, dict[str, Any]]] = {
    "sparse": (SpMM15DStrategy, {"replication_factor": 2}),
    "blocks": (SpMM15DStrategy, {"replication_factor": 2, "sparsity_aware": False}),
    "2d": (SpMM2DStrategy, {}),
    "any": (SpMMStrategy, {}),
}
on_4_ranks = pytest.mark.parametrize("products", ["sparse", *campaign("blocks", "any"), "2d"])


def run_on_4(ranks: Any, products: str, graph: Data, model: Any, **others: Any) -> list[dict[str, Any]]:
    strategy, options = ON_4_RANKS[products]
    options = {**options, **others.pop("options", {})}
    return ranks.run(4, train, graph, model, strategy=strategy, options=options, self_check=False, **others)


@on_4_ranks
@pytest.mark.parametrize("model", [pytest.param(("gcn", "sage"), id="together"), *campaign("gcn", "sage")])
def test_parts_without_nodes_edges_or_labels(ranks, model, products):
    graph, part = one_training_node()
    expected = single(graph, model)
    for found in run_on_4(ranks, products, graph, model, data={"partition": part}):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


@on_4_ranks
@pytest.mark.parametrize("model", [pytest.param(("gcn", "sage"), id="together"), *campaign("gcn", "sage")])
def test_more_ranks_than_nodes(ranks, model, products):
    expected = single(three_nodes(), model)
    for found in run_on_4(ranks, products, three_nodes(), model):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


@on_4_ranks
def test_over_sockets(ranks, products):
    for found in run_on_4(ranks, products, awkward_graph(), "gcn", options={"shared_memory": False}):
        assert_same(found, on_one_device("gcn"), rtol=1e-8, atol=1e-10)


def seeded(rank: int, world_size: int, products: str) -> list[torch.Tensor]:
    """Weights and running statistics after training with dropout, and what they predict."""
    L.seed_everything(7)
    strategy, options = ON_4_RANKS[products]
    model = GCN(FEATURES, 16, num_layers=2, out_channels=CLASSES, dropout=0.5, norm="batch_norm")
    module = NodeClassifier(model, num_classes=CLASSES)
    trainer = quiet_trainer(strategy(timeout=60, self_check=False, **options), world_size, deterministic=True)
    data = GraphDataModule(awkward_graph(dtype=torch.float32))
    try:
        trainer.fit(module, datamodule=data)
        return [*module.state_dict().values(), *trainer.predict(module, datamodule=data)]
    finally:
        torch.use_deterministic_algorithms(False)


@on_4_ranks
def test_same_seed_same_bits(ranks, products):
    """With Trainer(deterministic=True), dropout, and statistics over all nodes; every rank ends with the same."""
    first, second = (ranks.run(4, seeded, products) for _ in range(2))
    assert all(value.isfinite().all() for value in first[0])
    for found in (*first, *second):
        assert all(map(torch.equal, found, first[0]))


def test_from_yaml(tmp_path):
    asked = "{class_path: lightning_gnn.SpMM15DStrategy, init_args: {replication_factor: 2, sparsity_aware: false}}"
    scheme = strategy_of_config(tmp_path / "config.yaml", asked).scheme
    assert (scheme.replication_factor, scheme.sparsity_aware, scheme.node_order) == (2, False, "random")


# Products #####################################################################


@st.composite
def problems(draw: Any) -> tuple[np.ndarray, np.ndarray, ProcessGrid, bool]:
    """Edges over uneven, maybe empty parts, weights or none; up to 12 ranks, every legal grid."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    num_ranks = draw(st.integers(1, 12))
    grid = ProcessGrid(num_ranks, draw(st.sampled_from(legal_replications(num_ranks))))
    num_nodes = draw(st.sampled_from([1, 5, 40]))
    offsets = np.sort(np.concatenate([[0, num_nodes], rng.integers(0, num_nodes + 1, num_ranks - 1)]))
    edges = rng.integers(0, num_nodes, (2, draw(st.sampled_from([0, 10, 200]))))
    return edges, offsets, grid, draw(st.booleans())


def entries_of(edges: np.ndarray, offsets: np.ndarray, rank: int, weighted: bool) -> tuple[Triples, torch.Tensor]:
    own = (edges[1] >= offsets[rank]) & (edges[1] < offsets[rank + 1])
    source, target = torch.from_numpy(edges[:, own])
    values = torch.from_numpy(np.flatnonzero(own) + 1.0) if weighted else None
    return Triples(target, source, values), torch.from_numpy(np.flatnonzero(own))


def matrix_of(sparse: bool, entries: Triples, grid: ProcessGrid, offsets: Any, world: World, meter: Meter) -> Matrix:
    if sparse:
        return SparseMatrix(entries, on_grid(grid, offsets), offsets, world, meter)
    return BlockMatrix(entries, grid, offsets, world, meter)


@examples(60)
@given(problems(), st.booleans())
def test_products_and_words(problem, sparse):
    """Against a dense product, forward and transposed; rows moved are those of the formula, or of the cost model."""
    edges, offsets, grid, weighted = problem
    num_nodes, meeting = int(offsets[-1]), Meeting(grid.num_ranks)
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    values = torch.arange(1.0, edges.shape[1] + 1, dtype=torch.float64) if weighted else torch.ones(edges.shape[1])
    dense.index_put_((torch.from_numpy(edges[1]), torch.from_numpy(edges[0])), values.double(), accumulate=True)
    x = torch.randn(num_nodes, 3, dtype=torch.float64)
    sent: list[dict[str, int]] = [{}] * grid.num_ranks

    def work(rank: int) -> None:
        meter = Meter()
        entries, _ = entries_of(edges, offsets, rank, weighted)
        matrix = matrix_of(sparse, entries, grid, offsets, InProcessWorld(rank, meeting), meter)
        own = slice(*offsets[rank : rank + 2])
        for _ in range(2):  # buffers are used again
            torch.testing.assert_close(matrix.multiply(x[own], Call("layer")), (dense @ x)[own], rtol=1e-12, atol=1e-9)
            torch.testing.assert_close(
                matrix.multiply(x[own], Call("layer", direction="backward")), (dense.T @ x)[own], rtol=1e-12, atol=1e-9
            )
        sent[rank] = {direction: traffic.rows // 2 for (_, direction), traffic in meter.by_layer.items()}

    assert meeting.run(work) == [None] * grid.num_ranks
    total = sum((Counter(each) for each in sent), Counter())
    words = grid.words(offsets, 1)
    if sparse:
        assert total["forward"] <= words and total["backward"] <= words
    else:
        assert total["forward"] == total["backward"] == words <= grid.paper_words(num_nodes, 1)


@examples(100)
@given(problems())
def test_predicted_rows_are_an_upper_bound(problem):
    """Of the sparse form; exact but for nodes of a block row that no node of it reads."""
    edges, offsets, grid, _ = problem
    halos, partial = [], 0
    for rank in range(grid.num_ranks):
        own = (edges[1] >= offsets[rank]) & (edges[1] < offsets[rank + 1])
        source, target = edges[:, own]
        halos.append(np.unique(source[(source < offsets[rank]) | (source >= offsets[rank + 1])]))
        partial += _partial_sums(source, target, grid, offsets, rank)
    predicted = sparse_cost(grid, offsets, halos, partial, 8).rows
    column = grid.columns
    owner = np.searchsorted(offsets, edges, side="right") - 1
    holder = owner[1] // grid.replication * grid.replication + column[owner[0] // grid.replication]
    moved = 0
    for end in range(2):
        pairs = np.unique(np.stack([edges[end], holder])[:, owner[end] != holder], axis=1)
        moved += pairs.shape[1]
    assert moved <= predicted
    if grid.replication == 1:
        assert moved == predicted


@examples(40)
@given(
    st.sampled_from([(1, 2), (4, 2), (9, 2), (16, 2), (8, 3), (27, 3)]),
    st.integers(0, 1000),
    st.booleans(),
    st.booleans(),
)
def test_squares_and_cubes(size, seed, weighted, keep_blocks):
    """Products of 2D and 3D against a dense one, and the rows that they move; few columns, at times fewer than the side."""
    num_ranks, dimensions = size
    cube = ProcessCube.of(num_ranks, dimensions)
    rng = np.random.default_rng(seed)
    num_nodes, columns = int(rng.choice([1, 7, 60])), int(rng.choice([1, 2, 5]))
    offsets = np.sort(np.concatenate([[0, num_nodes], rng.integers(0, num_nodes + 1, num_ranks - 1)]))
    edges = rng.integers(0, num_nodes, (2, int(rng.choice([0, 10, 300]))))
    values = np.arange(1.0, edges.shape[1] + 1) if weighted else np.ones(edges.shape[1])
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    dense.index_put_(
        (torch.from_numpy(edges[1]), torch.from_numpy(edges[0])), torch.from_numpy(values), accumulate=True
    )
    x = torch.from_numpy(rng.standard_normal((num_nodes, columns)))
    meeting, meters = Meeting(num_ranks), [Meter() for _ in range(num_ranks)]

    def work(rank: int) -> None:
        entries, _ = entries_of(edges, offsets, rank, weighted)
        matrix = SummaMatrix(entries, cube, offsets, InProcessWorld(rank, meeting), meters[rank], keep_blocks)
        own = slice(*offsets[rank : rank + 2])
        for transposed in (False, True, False):
            expected = ((dense.T if transposed else dense) @ x)[own]
            torch.testing.assert_close(
                matrix.multiply(x[own], Call("layer", direction=DIRECTIONS[transposed])),
                expected,
                rtol=1e-12,
                atol=1e-9,
            )

    assert meeting.run(work) == [None] * num_ranks
    for direction, count in (("forward", 2), ("backward", 1)):
        sent = sum(meter.by_layer["layer", direction].bytes_sent for meter in meters)
        # Blocks go to the side's other ranks, unless they keep them: per entry a column and a value, and which rows have any.
        target, source = edges[1::-1] if direction == "forward" else edges
        filled = len(np.unique(target * num_ranks + cube.holders(offsets, target, source)))
        block_bytes = 0 if keep_blocks else 8 * filled + edges.shape[1] * (12 if weighted else 4)
        assert sent == count * (cube.words(offsets, columns) * 8 + (cube.side - 1) * block_bytes)


ATTENTION = {
    "gat": lambda: pyg_nn.GATConv(5, 4, heads=2),
    "gatv2": lambda: pyg_nn.GATv2Conv(5, 4, heads=2),
    "transformer": lambda: pyg_nn.TransformerConv(5, 4, heads=2),
    "maxima": lambda: pyg_nn.SAGEConv(5, 4, aggr="max"),
}


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize(("size", "dimensions"), [(4, 2), (8, 3), (9, 2), (16, 2)])
def test_attention_on_squares_and_cubes(size, dimensions, kind):
    """Outputs and gradients are those of one device, though rows go to and from those only who hold their nodes' edges on the
    cube: copies of sources down a column of ranks, and what is completed at targets along a row."""
    graph = awkward_graph(seed=5)
    cube, meeting = ProcessCube.of(size, dimensions), Meeting(size)
    shards = split_graph(
        graph, np.random.default_rng(0).integers(0, size, graph.num_nodes), LayoutSpec("edge_cut", size)
    )
    offsets, n_id = shards[0].offsets, shards[0].n_id
    torch.manual_seed(1)
    conv, x = ATTENTION[kind]().double(), graph.x[:, :5].clone().requires_grad_()
    expected = conv(x, graph.edge_index)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)

    def work(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[int, int]]:
        mine, shard, meter = copy.deepcopy(conv), shards[rank], Meter()
        mine.zero_grad()
        own = n_id[slice(*offsets[rank : rank + 2])]
        scheme, world = CubeScheme(dimensions, None), InProcessWorld(rank, meeting)
        binding = bind_module(scheme, torch.nn.Sequential(mine), shard, world, meter)
        rows = x.detach()[own].requires_grad_()
        with graph_in_use(binding.context, this_thread_only=True):
            out = mine(rows, shard.batch.edge_index)
            out.backward(upstream[own])
        sent = sum(meter.by_layer.values(), Traffic()).to
        return [out.detach(), rows.grad], [each.grad for each in mine.parameters()], dict(sent)

    found = meeting.run(work)
    for error in sorted(found, key=lambda each: isinstance(each, CommunicationError)):  # of ranks that waited last
        if isinstance(error, BaseException):
            raise error
    for whole, of_one in zip(zip(*(rows for rows, _, _ in found)), (expected.detach(), x.grad)):
        torch.testing.assert_close(torch.cat(whole), of_one[n_id], rtol=1e-12, atol=1e-12)
    for of_all, parameter in zip(zip(*(grads for _, grads, _ in found)), conv.parameters()):
        torch.testing.assert_close(sum(of_all), parameter.grad, rtol=1e-12, atol=1e-12)
    pairs = [*permutations(range(size), 2)]
    allowed = {(a, b) for a, b in pairs if reads(cube, a, b) or reads(cube, b, a)}
    sent = {(rank, peer) for rank, (_, _, to) in enumerate(found) for peer, count in to.items() if count}
    assert sent <= allowed and len(sent) > 0.7 * len(allowed)


def reads(cube: ProcessCube, owner: int, reader: int) -> bool:
    """Returns whether a rank holds edges that leave nodes of another one, or that lead to them."""
    block = owner // cube.side
    row, column, layer = cube.place(reader)
    return block == layer * cube.side + column or block % cube.side == row


def test_squares_and_cubes_of_ranks():
    cube = ProcessCube.of(8, 3)
    assert (cube.side, cube.layers, cube.num_ranks) == (2, 2, 8)
    assert [cube.rank(*cube.place(rank)) for rank in range(8)] == list(range(8))
    assert cube.blocks_of_row(1) == [1, 3] and list(cube.owners(3)) == [6, 7]
    even = np.arange(0, 81, 10)
    assert cube.words(even, 4) == 80 * 4 + 80 * 4 + 2 * 80 * 2
    assert ProcessCube.of(4, 2).words(np.arange(5) * 10, 4) == 40 * 4 + 2 * 40 * 2
    with pytest.raises(ValueError, match=r"a square number of ranks, such as 4 or 9 \(got 6\)"):
        ProcessCube.of(6, 2)
    with pytest.raises(ValueError, match=r"a cube number of ranks, such as 1 or 8 \(got 4\)"):
        ProcessCube.of(4, 3)


def test_grid():
    grid = ProcessGrid(6, 2)  # 4 does not divide 6: chunks of 1 and 2 block rows
    assert [list(grid.chunk(column)) for column in range(2)] == [[0, 2], [1]]
    assert [grid.source(block) for block in range(3)] == [0, 3, 4]
    assert [list(grid.in_row(1)), list(grid.in_column(1))] == [[2, 3], [1, 3, 5]]
    even = np.arange(0, 61, 10)
    assert grid.words(even, 4) == 60 * 4 * 2 + 30 * 4 + 60 * 4
    # The count of 1D, and that P = 4 moves as much with c = 2 as with 1 as published, and less here.
    assert ProcessGrid(4, 1).words(np.arange(5) * 10, 1) == ProcessGrid(4, 1).paper_words(40, 1) == 120
    assert ProcessGrid(4, 2).paper_words(40, 1) == 120 and ProcessGrid(4, 2).words(np.arange(5) * 10, 1) == 100
    assert ProcessGrid(8, 2).paper_words(40, 1) == 5 * 40 and ProcessGrid(8, 1).paper_words(40, 1) == 7 * 40


@pytest.mark.parametrize(("num_ranks", "legal"), [(1, (1,)), (6, (1, 2, 3, 6)), (7, (1, 7))])
def test_legal_replications(num_ranks, legal):
    assert legal_replications(num_ranks) == legal
    with pytest.raises(ValueError, match=rf"number of ranks, {num_ranks}, got 4. Use one of {', '.join(map(str, legal))}\."):
        ProcessGrid(num_ranks, 4)


def test_the_choice():
    offsets = np.arange(0, 801, 100)
    costs = [block_cost(ProcessGrid(8, c), offsets, 4) for c in legal_replications(8)]
    assert [cost.rows for cost in costs] == [800 * 7, 800 * 3 + 400 + 800, 800 + 600 + 2400, 700 + 5600]
    assert choose(costs, None).grid.replication == 2
    assert choose(costs, 4 * 100 * 4).grid.replication == 1  # memory for one more would be 3200 bytes
    with pytest.raises(ValueError, match=r"need at least 1.6e-06 GB per rank \(replication_factor=1\)"):
        choose(costs, 1000)
    assert choose([GridCost(ProcessGrid(4, c), 5, 0) for c in (1, 2, 4)], None).grid.replication == 2
    assert (
        choose([GridCost(ProcessGrid(2, c), 5, 0) for c in (1, 2)], None).grid.replication == 1
    )  # else one rank idles


# On ranks #####################################################################


def products(rank: int, world_size: int, shared_memory: bool) -> None:
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        for seed in range(6):
            rng = np.random.default_rng(seed)
            num_nodes = int(rng.integers(1, 60))
            offsets = np.sort(np.concatenate([[0, num_nodes], rng.integers(0, num_nodes + 1, world_size - 1)]))
            edges = rng.integers(0, num_nodes, (2, int(rng.integers(0, 300))))
            x = torch.from_numpy(rng.standard_normal((num_nodes, 5)))
            dense = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
            dense.index_put_((torch.from_numpy(edges[1]), torch.from_numpy(edges[0])), torch.ones(()).double(), True)
            own = slice(*offsets[rank : rank + 2])
            entries, _ = entries_of(edges, offsets, rank, False)
            for c in legal_replications(world_size):
                grid = ProcessGrid(world_size, c)
                matrices: list[Matrix] = [
                    matrix_of(sparse, entries, grid, offsets, world, Meter()) for sparse in (True, False)
                ]
                if world_size == 4 and c == 1:
                    matrices.append(SummaMatrix(entries, ProcessCube.of(4, 2), offsets, world, Meter()))
                for matrix in matrices:
                    for transposed in (False, True, False):
                        product = matrix.multiply(x[own], Call("layer", direction=DIRECTIONS[transposed]))
                        expected = ((dense.T if transposed else dense) @ x)[own]
                        torch.testing.assert_close(product, expected, rtol=1e-12, atol=1e-12)
    finally:
        world.close()


@pytest.mark.parametrize(
    ("world_size", "shared_memory"), [(3, True), (4, False), *campaign((2, True), (2, False), (3, False), (4, True))]
)
def test_products_on_ranks(ranks, world_size, shared_memory):
    ranks.run(world_size, products, shared_memory)


def logged(
    rank: int, world_size: int, products: tuple[type, dict[str, Any]], precision: Any = "64-true"
) -> tuple[dict[Any, int], list[int], float]:
    """Bytes of the last of three epochs by layer and direction, the numbers of owned rows, and the last loss."""
    last: dict[Any, int] = {}

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            last.update({key: traffic.bytes_sent for key, traffic in trainer.callbacks[0].by_layer.items()})

    strategy, options = products
    module = NodeClassifier(build("gcn"), num_classes=CLASSES)
    trainer = quiet_trainer(strategy(timeout=30, **options), world_size, limit_val_batches=0, precision=precision)
    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    data = GraphDataModule(awkward_graph(dtype=torch.float64 if precision == "64-true" else torch.float32))
    trainer.fit(module, datamodule=data)
    return last, list(data.shard.counts), float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("replication", [*campaign(1), 2, *campaign(4)])
def test_logged_bytes_are_the_formulas(ranks, replication):
    results = ranks.run(4, logged, (SpMM15DStrategy, {"replication_factor": replication, "sparsity_aware": False}))
    offsets = np.cumsum([0, *results[0][1]])
    words = ProcessGrid(4, replication).words(offsets, CLASSES)
    for direction in ("forward", "backward"):
        assert sum(found["model.convs.1", direction] for found, *_ in results) == words * 8


@on_4_ranks
def test_bf16_mixed(ranks, products):
    """The loss of one device, from rows that travel as they are computed: partial sums alone have four bytes."""
    plain, short = (ranks.run(4, logged, ON_4_RANKS[products], precision) for precision in ("32-true", "bf16-mixed"))
    for (_, _, loss), (_, _, expected) in zip(short, plain):
        assert loss == pytest.approx(expected, rel=0.02)
    for direction in ("forward", "backward"):
        sent, before = (sum(found["model.convs.1", direction] for found, *_ in each) for each in (short, plain))
        assert sent < 0.9 * before


def fails(rank: int, world_size: int) -> None:
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=3))
    try:
        edges, offsets = np.array([[0, 1, 2], [1, 2, 0]]), np.arange(4)
        matrix = BlockMatrix(entries_of(edges, offsets, rank, False)[0], ProcessGrid(3), offsets, world, Meter())
        if rank == 1:
            raise KeyError("user code")
        matrix.multiply(torch.ones(1, 2), Call("encoder.convs.1"))
    finally:
        world.close()


def test_a_missing_rank_is_named(ranks):
    with pytest.raises(RankFailed) as caught:
        ranks.run(3, fails)
    for words in ("(forward)", "layer 'encoder.convs.1'", "on rank 0", "rank 1"):
        assert words in caught.value.errors[0]


# Refusals #####################################################################


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replication_factor": 0}, "at least 1, got 0"),
        ({"node_order": "louvain"}, r"node_order must be 'metis', 'random' or None \(got 'louvain'\)"),
    ],
)
def test_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        SpMM15DStrategy(**options)


@pytest.mark.parametrize(("strategy", "message"), [("spmm_2d", "such as 1 or 4"), ("spmm_3d", "such as 1 or 8")])
def test_numbers_of_ranks_are_refused_before_they_start(strategy, message):
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    with pytest.raises(ValueError, match=message):
        quiet_trainer(strategy, 3).fit(module, datamodule=GraphDataModule(awkward_graph()))


def test_refused_before_ranks_start():
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    trainer = quiet_trainer(SpMM15DStrategy(replication_factor=3), 4)
    with pytest.raises(ValueError, match="number of ranks, 4, got 3. Use one of 1, 2, 4"):
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))


def test_too_little_memory_is_told_with_the_legal_factors(monkeypatch):
    monkeypatch.setattr("lightning_gnn.devices.available_bytes", lambda: 40_000)
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    trainer = quiet_trainer(SpMM15DStrategy(replication_factor=2, sparsity_aware=False), 2)
    with pytest.raises(ValueError, match=r"need at least .* GB are available. Set a smaller replication_factor .legal: 1, 2."):
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))


def test_1d_is_replication_1():
    assert SpMM1DStrategy().scheme.replication_factor == 1  # type: ignore[attr-defined]
