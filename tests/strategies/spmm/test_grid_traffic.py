"""Traffic of products on a process grid: what ranks in one process really send, and the formulas' words. No processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from common import examples
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rings import published_traffic
from lightning_gnn.comm.call import DIRECTIONS, Call
from lightning_gnn.comm.exchange import Matrix, Triples
from lightning_gnn.comm.group import World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.comm.transport import TransportWrapper
from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload, edge_traffic
from lightning_gnn.extensions.plans.plan_cost import direct_cost
from lightning_gnn.extensions.plans.presets import dgx1
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.wiring import topology_from_dict, uniform
from lightning_gnn.partition.shard import Relabelling, halo_plan
from lightning_gnn.strategies.dgcl.costs import plan_exchanges
from lightning_gnn.strategies.spmm.costs import cube_exchange, grid_exchanges, product_exchanges
from lightning_gnn.strategies.spmm.grid import ProcessCube, ProcessGrid, legal_replications, on_grid
from lightning_gnn.strategies.spmm.matrices import BlockMatrix, SummaMatrix
from lightning_gnn.strategies.spmm.traffic import (
    MatrixByCall,
    block_cost,
    block_traffic,
    busiest,
    matrix_traffic,
    product_words,
    products,
    sparse_cost,
    summa_entries,
    summa_traffic,
    summa_work,
)

COLUMNS = 3


@st.composite
def graphs(draw: Any, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges over uneven, maybe empty parts, and the parts' offsets."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    num_nodes = draw(st.sampled_from([1, 5, 40]))
    offsets = np.sort(np.concatenate([[0, num_nodes], rng.integers(0, num_nodes + 1, num_ranks - 1)]))
    return rng.integers(0, num_nodes, (2, draw(st.sampled_from([0, 10, 200])))), offsets


@st.composite
def grids(draw: Any) -> tuple[ProcessGrid, np.ndarray, np.ndarray]:
    num_ranks = draw(st.integers(1, 12))
    grid = ProcessGrid(num_ranks, draw(st.sampled_from(legal_replications(num_ranks))))
    return grid, *draw(graphs(num_ranks))


@st.composite
def cubes(draw: Any) -> tuple[ProcessCube, np.ndarray, np.ndarray]:
    cube = ProcessCube.of(*draw(st.sampled_from([(1, 2), (4, 2), (9, 2), (8, 3), (27, 3)])))
    return cube, *draw(graphs(cube.num_ranks))


def sent_by(
    num_ranks: int, edges: np.ndarray, offsets: np.ndarray, weighted: bool, make: Callable[..., Matrix]
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and bytes that each rank sends in one forward product of float64 rows, ``[P]`` each."""
    meeting, meters = Meeting(num_ranks), [Meter() for _ in range(num_ranks)]
    x = torch.ones(int(offsets[-1]), COLUMNS, dtype=torch.float64)

    def work(rank: int) -> None:
        own = (edges[1] >= offsets[rank]) & (edges[1] < offsets[rank + 1])
        source, target = torch.from_numpy(edges[:, own])
        values = torch.ones(int(own.sum()), dtype=torch.float64) if weighted else None
        matrix = make(Triples(target, source, values), InProcessWorld(rank, meeting), meters[rank])
        matrix.multiply(x[slice(*offsets[rank : rank + 2])], Call("layer"))

    assert meeting.run(work) == [None] * num_ranks
    found = [meter.by_layer["layer", "forward"] if meter.by_layer else None for meter in meters]
    rows = np.array([0 if each is None else each.rows for each in found])
    return rows, np.array([0 if each is None else each.bytes_sent for each in found])


@examples(40)
@given(grids(), st.booleans())
def test_blocks(problem, weighted):
    grid, edges, offsets = problem
    traffic = block_traffic(grid, offsets)
    assert traffic.sum() == grid.words(offsets, 1) == block_cost(grid, offsets, 4).rows
    rows, _ = sent_by(grid.num_ranks, edges, offsets, weighted, lambda e, w, m: BlockMatrix(e, grid, offsets, w, m))
    assert np.array_equal(traffic.sum((0, 2)), rows)


@examples(40)
@given(grids(), st.booleans())
def test_sparse(problem, weighted):
    grid, edges, offsets = problem
    traffic = edge_traffic(grid.holders(offsets, edges[1], edges[0]), offsets, edges)
    rows, _ = sent_by(
        grid.num_ranks, edges, offsets, weighted, lambda e, w, m: SparseMatrix(e, on_grid(grid, offsets), offsets, w, m)
    )
    assert np.array_equal(traffic.sum((0, 2)), rows)
    assert traffic.sum() <= grid.words(offsets, 1)
    relation = Relation.from_edges(edges, offsets)
    halos = [relation.halo(rank) for rank in range(grid.num_ranks)]
    counted = sparse_cost(grid, offsets, halos, int(traffic[1].sum()), 4).rows
    assert traffic.sum() <= counted
    if grid.replication == 1:
        assert traffic.sum() == counted and np.array_equal(traffic[0], relation.pair_rows) and not traffic[1].any()


@examples(40)
@given(cubes(), st.booleans())
def test_squares_and_cubes(problem, weighted):
    """Bytes of each rank: the matrix's blocks and all rows."""
    cube, edges, offsets = problem
    words = summa_traffic(cube, offsets, COLUMNS)
    matrix = matrix_traffic(cube, offsets, edges, 8 if weighted else 0)
    assert words.shape == matrix.shape and words.sum() == cube.words(offsets, COLUMNS)
    _, sent = sent_by(
        cube.num_ranks, edges, offsets, weighted, lambda e, w, m: SummaMatrix(e, cube, offsets, w, m, False)
    )
    assert np.array_equal((words * 8 + matrix).sum((0, 2)), sent)
    assert summa_entries(cube, offsets, edges).sum() == edges.shape[1]
    assert summa_work(cube, offsets, edges, COLUMNS).sum() == edges.shape[1] * COLUMNS


def test_stages_by_hand():
    offsets = np.array([0, 1, 3, 6, 10])  # 1, 2, 3 and 4 nodes
    grid = ProcessGrid(4, 2)  # rows 0 1, 2 3; column 0 reads block 0, column 1 block 1
    gather, first, second, reduce = block_traffic(grid, offsets)
    assert dict(flows(gather)) == {(1, 0): 2, (2, 3): 3}
    assert dict(flows(first)) == {(0, 2): 1, (3, 1): 4}
    assert dict(flows(second)) == {(0, 2): 2, (3, 1): 3}
    assert dict(flows(reduce)) == {(0, 1): 2, (1, 0): 1, (2, 3): 4, (3, 2): 3}
    edges = np.array([[0, 0, 9, 9, 4], [1, 5, 1, 9, 2]])  # to nodes 1, 5, 1, 9, 2 of ranks 1, 2, 1, 3, 1
    assert grid.holders(offsets, edges[1], edges[0]).tolist() == [0, 2, 1, 3, 1]
    reads, sums = edge_traffic(grid.holders(offsets, edges[1], edges[0]), offsets, edges)
    assert dict(flows(reads)) == {(0, 2): 1, (3, 1): 1, (2, 1): 1}
    assert dict(flows(sums)) == {(0, 1): 1}
    words = summa_traffic(ProcessCube.of(4, 2), offsets, 5)  # widths 2 and 3; rows 0 1 and 2 3 own the blocks
    assert dict(flows(words[0])) == {(0, 1): 3, (1, 0): 4, (2, 3): 9, (3, 2): 8}
    assert dict(flows(words[1])) == {(1, 3): 9, (3, 1): 21}  # ranks 0 and 2 have the rows that they begin with
    assert dict(flows(words[2])) == {(0, 2): 6, (2, 0): 14}
    assert not words[3].any() and np.array_equal(words[4], words[0].T)
    matrix = matrix_traffic(ProcessCube.of(4, 2), offsets, edges, 0)
    # Blocks of rank 0 (target and source below 3): 0→1; 1 (source above): 9→1, 4→2; 2: 0→5; 3: 9→9.
    assert dict(flows(matrix[1])) == {(2, 3): 8 + 4, (3, 2): 8 + 4}
    assert dict(flows(matrix[2])) == {(0, 1): 8 + 4, (1, 0): 16 + 8}


@pytest.mark.parametrize(
    ("num_ranks", "replication", "stages"),
    [(1, 1, 0), (4, 1, 3), (4, 2, 2), (8, 2, 4), (16, 4, 6), (32, 4, 10), (6, 6, 0)],
)
def test_rings(num_ranks, replication, stages):
    """Each sub-block goes once through each rank's port in each direction, in as many stages as there must be."""
    grid = ProcessGrid(num_ranks, replication)
    for column in range(replication):
        ring, sub_blocks = grid.ring(column), [o for block in grid.chunk(column) for o in grid.in_row(block)]
        assert len(ring) == (stages if sub_blocks else 0)
        for row in range(grid.num_rows):
            own = [owner for owner in sub_blocks if grid.row(owner) == row]
            sent = [each[row] for each in ring if each[row] is not None]
            came = [each[row - 1] for each in ring if each[row - 1] is not None]
            assert sorted(came) == [owner for owner in sub_blocks if owner not in own]
            following = [owner for owner in sub_blocks if grid.row(owner) == (row + 1) % grid.num_rows]
            assert sorted(sent) == [owner for owner in sub_blocks if owner not in following]
            for stage, each in enumerate(ring):  # nothing is passed on that has not come
                assert each[row] is None or each[row] in own or each[row] in [ring[k][row - 1] for k in range(stage)]


@pytest.mark.parametrize(
    "make", [*(ProcessGrid(8, c) for c in (1, 2)), ProcessGrid(4, 2), ProcessCube(2, 1), ProcessCube(3, 1)]
)
def test_ranks_send_in_the_order_of_the_stages(make):
    """Who sends how much to whom, one message after the other, is what the traffic says: so no port waits for another's turn."""
    offsets = np.arange(0, 10 * make.num_ranks + 1, 10)
    edges = np.random.default_rng(0).integers(0, offsets[-1], (2, 400))
    if isinstance(make, ProcessGrid):
        matrix, row_bytes = partial(BlockMatrix, grid=make), COLUMNS * 8
        traffic = block_traffic(make, offsets) * row_bytes
    else:
        matrix = partial(SummaMatrix, cube=make, keep_blocks=False)
        traffic = summa_traffic(make, offsets, COLUMNS) * 8 + matrix_traffic(make, offsets, edges, 0)
    order: list[list[tuple[int, int]]] = [[] for _ in range(make.num_ranks)]

    def recorded(entries: Triples, world: World, meter: Meter) -> Matrix:
        made, carrier = matrix(entries, offsets=offsets, world=world, meter=meter), world.transport
        while isinstance(carrier, TransportWrapper):
            carrier = carrier._transport
        start_each = carrier.start_each

        def start(sends: Any, receives: Any) -> Any:
            by_peer: dict[int, int] = {}
            for peer, rows in sends:
                by_peer[peer] = by_peer.get(peer, 0) + rows.nbytes
            order[world.rank] += sorted(by_peer.items())
            return start_each(sends, receives)

        carrier.start_each = start  # type: ignore[method-assign]
        return made

    sent_by(make.num_ranks, edges, offsets, False, recorded)
    for rank, found in enumerate(order):
        assert found == [(peer, size) for stage in traffic[:, rank].tolist() for peer, size in enumerate(stage) if size]


@pytest.mark.parametrize(("num_ranks", "replication"), [(4, 1), (4, 2), (8, 2), (12, 4), (6, 6), (1, 1)])
def test_published_products(num_ranks, replication):
    grid = ProcessGrid(num_ranks, replication)
    offsets = np.concatenate([[0], np.cumsum(np.arange(1, num_ranks + 1))])
    *broadcasts, reduce = published_traffic(grid, offsets)
    assert sum(stage.sum() for stage in (*broadcasts, reduce)) == grid.paper_words(int(offsets[-1]), 1)
    assert len(broadcasts) == -(-grid.num_rows // replication)
    for column in range(replication):
        for stage, block in zip(broadcasts, grid.chunk(column)):
            ranks = np.array(grid.in_column(column))
            received, rows = stage[:, ranks].sum(0), offsets[(block + 1) * replication] - offsets[block * replication]
            source = grid.source(block)
            assert set(received[ranks != source]) <= {rows} and not received[ranks == source].any()
            assert (stage[ranks] > 0).sum(1).max() <= 1  # passed on, not sent to each


def flows(stage: np.ndarray) -> list[tuple[tuple[int, int], int]]:
    return [((a, b), int(stage[a, b])) for a, b in np.argwhere(stage).tolist()]


# Each call its own way ########################################################


def costs_of(
    offsets: np.ndarray, edges: np.ndarray, columns: int, dtype: torch.dtype, backward: bool
) -> list[tuple[tuple[float, float], np.ndarray]]:
    """Of each way to multiply: the bytes of the busiest rank and of all, and those that each rank sends, ``[P]``."""
    found = []
    for product in products(len(offsets) - 1):
        rows = edge_traffic(product.holders(offsets, edges[1], edges[0]), offsets, edges)
        words = product_words(product, offsets, rows, columns, backward)
        sizes = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
        found.append((busiest(words, *sizes), words[0].sum(1) * sizes[0] + words[1].sum(1) * sizes[1]))
    return found


@examples(40)
@given(st.data(), st.sampled_from([1, 2, 3, 4, 8, 9]), st.booleans(), st.booleans())
def test_each_call_takes_the_way_that_sends_least(data, num_ranks, directed, weighted):
    """Sums are those of a dense product, and each rank sends what the way that is the least for the busiest one says; with loops
    that layers add, which no halo knows of."""
    edges, offsets = data.draw(graphs(num_ranks))
    if directed:  # a few nodes that nearly all read, or that read nearly all
        end = data.draw(st.sampled_from([0, 1]))
        edges[end] %= max(1, int(offsets[-1]) // 5)
    else:
        edges = np.unique(np.concatenate([edges, edges[::-1]], 1), axis=1)
    halos = [Relation.from_edges(edges, offsets).halo(rank) for rank in range(num_ranks)]
    nodes = int(offsets[-1])
    entries = np.concatenate([edges, np.tile(np.arange(nodes), (2, 1))], 1)
    values = torch.from_numpy(np.arange(entries.shape[1]) % 4 + 1.0) if weighted else torch.ones(entries.shape[1])
    dense = torch.zeros(nodes, nodes, dtype=torch.float64)
    dense.index_put_((torch.from_numpy(entries[1]), torch.from_numpy(entries[0])), values.double(), accumulate=True)
    calls = [(*each, back) for each in ((8, torch.float64), (3, torch.bfloat16)) for back in (False, True, False)]
    meeting, meters = Meeting(num_ranks), [[Meter() for _ in calls] for _ in range(num_ranks)]

    def work(rank: int) -> None:
        own, meter = (entries[1] >= offsets[rank]) & (entries[1] < offsets[rank + 1]), Meter()
        source, target = torch.from_numpy(entries[:, own])
        of_own = values[torch.from_numpy(own)].float() if weighted else None
        plan = halo_plan(rank, offsets, halos)
        matrix = MatrixByCall(Triples(target, source, of_own), plan, offsets, InProcessWorld(rank, meeting), meter)
        for number, (columns, dtype, backward) in enumerate(calls):
            # Small whole numbers: sums are exact in any order.
            x = (torch.arange(nodes * columns, dtype=torch.float64).view(nodes, columns) * 7) % 11 - 5
            rows = slice(*offsets[rank : rank + 2])
            with torch.inference_mode(number == 0):
                out = matrix.multiply(x[rows].to(dtype), Call("layer", direction=DIRECTIONS[backward]))
            assert torch.equal(out.double(), ((dense.T if backward else dense) @ x)[rows])
            meters[rank][number].counted = meter.take()
        assert matrix._matrices.keys() == set(matrix._chosen_products.values())  # and no others
        for product, counted in zip(products(num_ranks), matrix._rows):
            if isinstance(product.grid, ProcessGrid):
                holder = product.holders(offsets, entries[1], entries[0])
                assert np.array_equal(counted, edge_traffic(holder, offsets, entries))

    for error in meeting.run(work):
        if error is not None:
            raise error
    for number, call in enumerate(calls):
        sent = np.array([meters[rank][number].total().bytes_sent for rank in range(num_ranks)])
        _, least = min(costs_of(offsets, entries, *call), key=lambda each: each[0])
        assert np.array_equal(sent, least)


def test_rows_of_two_bytes_travel_rather_than_sums():
    """Of an undirected graph whose parts are cut well: there and back as rows, though one matrix would send sums back."""
    edges = np.array([[0, 9, 10, 19], [10, 19, 0, 9]])
    edges = np.concatenate([edges, np.stack([np.arange(20), np.arange(20) ^ 1])], 1)
    offsets = np.arange(0, 21, 5)
    ways = list(map(str, products(4)))

    def taken(dtype: torch.dtype, backward: bool) -> str:
        costs = [cost for cost, _ in costs_of(offsets, edges, 16, dtype, backward)]
        return ways[costs.index(min(costs))]

    assert [taken(torch.float32, backward) for backward in (False, True)] == ["spmm_1d"] * 2
    assert [taken(torch.bfloat16, backward) for backward in (False, True)] == ["spmm_1d", "spmm_1d mirrored"]


def test_all_ways_are_listed_and_one_is_followed():
    work = workload(8)
    found = {each.scheme: each for each in product_exchanges(work, None)}
    assert list(found) == list(map(str, products(8)))  # the graph is directed
    [followed] = [name for name, each in found.items() if each.followed]
    costs = costs_of(work.relation.offsets, work.edge_index, work.columns, torch.float32, backward=False)
    assert followed == min(zip(costs, found), key=lambda each: each[0][0])[1]
    both = np.concatenate([work.edge_index, work.edge_index[::-1]], 1)
    relation = Relation.from_edges(both, work.relation.offsets)
    undirected = product_exchanges(replace(work, relation=relation, edge_index=both), None)
    assert [each.scheme for each in undirected] == ["spmm_1d", "spmm_15d c=2", "spmm_3d"]


# Prices ######################################################################


def workload(num_ranks: int, **options: Any) -> Workload:
    rng = np.random.default_rng(0)
    order = Relabelling.from_assignment(rng.integers(0, num_ranks, 300), num_ranks)
    edge_index = order.new_ids()[rng.integers(0, 300, (2, 1200))]
    return Workload(Relation.from_edges(edge_index, order.offsets), edge_index, 3, columns=16, features=50, **options)


def all_products(work: Workload, topology: Topology | None) -> dict[str, ExchangeCost]:
    found = grid_exchanges(work, topology)
    for dimensions in (2, 3):
        with suppress(ValueError):  # neither a square nor a cube
            found.append(cube_exchange(work, topology, ProcessCube.of(work.relation.num_devices, dimensions)))
    return {each.scheme: each for each in found}


def test_products_are_priced_by_stage():
    work, topology = workload(8), dgx1()
    found = all_products(work, topology)
    factors = [f"spmm_15d c={c}{form}" for c in (2, 4, 8) for form in ("", " blocks")]
    assert list(found) == ["spmm_1d", "spmm_1d blocks", *factors, "spmm_3d"]
    holder = ProcessGrid(8, 2).holders(work.relation.offsets, work.edge_index[1], work.edge_index[0])
    traffic = {"spmm_15d c=2": edge_traffic(holder, work.relation.offsets, work.edge_index)}
    traffic["spmm_15d c=2 blocks"] = block_traffic(ProcessGrid(8, 2), work.relation.offsets)
    edges = np.bincount(holder, minlength=8)
    for scheme, rows in traffic.items():
        by_hop = np.array([by_hand(stage, topology) for stage in rows])
        each = found[scheme]
        started = (rows.sum((1, 2)) > 0).sum() * topology.stage_seconds
        assert each.rows == rows.sum() and each.seconds == pytest.approx(by_hop.max(1).sum() * 64 + started)
        assert np.array_equal(each.edges, edges) and each.edge_balance == pytest.approx(edges.max() / 150)
    # A halo exchange by another name.
    direct, one = plan_exchanges(work, topology)[0], found["spmm_1d"]
    assert direct.scheme == "p2p" and one.rows == direct.rows and one.seconds == pytest.approx(direct.seconds)
    assert one.replication == pytest.approx(direct.replication) and np.array_equal(one.edges, direct.edges)
    assert one.paper_rows == found["spmm_1d blocks"].rows == 300 * 7


def by_hand(stage: np.ndarray, topology: Topology) -> list[float]:
    """Seconds of each hop for rows of one byte."""
    busy = [0.0] * len(topology.hops)
    for (a, b), rows in flows(stage):
        for hop in topology.links[a, b]:
            busy[hop] += rows / (topology.hops[hop].gb_per_s * 1e9)
    return busy


@pytest.mark.parametrize("value_bytes", [0, 4])
@pytest.mark.parametrize("columns", [16, 50])
def test_the_matrix_takes_time_too(value_bytes, columns):
    work, topology, cube = workload(4, value_bytes=value_bytes), uniform(4), ProcessCube.of(4, 2)
    work = replace(work, columns=columns)
    kept, found = (cube_exchange(work, topology, cube, keep_blocks) for keep_blocks in (True, False))
    offsets = work.relation.offsets
    matrix = matrix_traffic(cube, offsets, work.edge_index, value_bytes)
    assert found.scheme == "spmm_2d" and found.matrix_bytes == matrix.sum() > 0
    assert found.rows == round(cube.words(offsets, columns) / columns)
    sent = summa_traffic(cube, offsets, columns) * 4 + matrix
    assert found.seconds == pytest.approx(np.array([by_hand(stage, topology) for stage in sent]).max(1).sum())
    assert kept.matrix_bytes == 0 and kept.rows == found.rows
    sent -= matrix
    assert kept.seconds == pytest.approx(np.array([by_hand(stage, topology) for stage in sent]).max(1).sum())


def test_products_without_a_link_or_a_topology():
    links = [{"a": a, "b": a + 1, "gb_per_s": 1.0} for a in range(3)]
    line = topology_from_dict({"devices": 4, "links": links, "name": "line"})
    found = all_products(workload(4), line)
    for each in found.values():
        assert each.seconds is None and each.rows > 0
        assert "no link between them, and products on a process grid are not relayed" in each.reason
    bare = all_products(workload(4), None)
    assert [each.rows for each in bare.values()] == [each.rows for each in found.values()]
    assert all(each.seconds is None and not each.reason for each in bare.values())
    json.dumps([each.as_dict() for each in bare.values()])
    assert list(all_products(workload(6), None))[-1] == "spmm_15d c=6 blocks"  # no square
    with pytest.raises(ValueError, match="one device per part of the graph, 4,"):
        grid_exchanges(workload(4), dgx1())
    with pytest.raises(ValueError, match="'dgx1' must have one device per rank, 4, got 8"):
        direct_cost(np.zeros((1, 4, 4), np.int64), dgx1())
