"""Traffic of products on a process grid: what ranks in one process really send, and the formulas' words. No processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.comm.grid import BlockMatrix, Matrix, SparseMatrix, Triples
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.summa import SummaMatrix
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.partition.grid import ProcessCube, ProcessGrid, legal_replications
from lightning_gnn.planning.grid_cost import block_cost, sparse_cost
from lightning_gnn.planning.grid_traffic import (
    block_traffic,
    holders,
    matrix_traffic,
    sparse_traffic,
    summa_entries,
    summa_traffic,
    summa_work,
)
from lightning_gnn.planning.relation import Relation

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
        matrix.multiply(x[slice(*offsets[rank : rank + 2])], "layer", False)

    assert meeting.run(work) == [None] * num_ranks
    found = [meter.by_layer["layer", "forward"] if meter.by_layer else None for meter in meters]
    rows = np.array([0 if each is None else each.rows for each in found])
    return rows, np.array([0 if each is None else each.bytes_sent for each in found])


@settings(max_examples=40, deadline=None)
@given(grids(), st.booleans())
def test_blocks(problem, weighted):
    grid, edges, offsets = problem
    traffic = block_traffic(grid, offsets)
    assert traffic.sum() == grid.words(offsets, 1) == block_cost(grid, offsets, 4).rows
    rows, _ = sent_by(grid.num_ranks, edges, offsets, weighted, lambda e, w, m: BlockMatrix(e, grid, offsets, w, m))
    assert np.array_equal(traffic.sum((0, 2)), rows)


@settings(max_examples=40, deadline=None)
@given(grids(), st.booleans())
def test_sparse(problem, weighted):
    grid, edges, offsets = problem
    traffic = sparse_traffic(grid, offsets, edges)
    rows, _ = sent_by(grid.num_ranks, edges, offsets, weighted, lambda e, w, m: SparseMatrix(e, grid, offsets, w, m))
    assert np.array_equal(traffic.sum((0, 2)), rows)
    assert traffic.sum() <= grid.words(offsets, 1)
    relation = Relation.from_edges(edges, offsets)
    halos = [relation.halo(rank) for rank in range(grid.num_ranks)]
    counted = sparse_cost(grid, offsets, halos, int(traffic[1].sum()), 4).rows
    assert traffic.sum() <= counted
    if grid.replication == 1:
        assert traffic.sum() == counted and np.array_equal(traffic[0], relation.pair_rows) and not traffic[1].any()


@settings(max_examples=40, deadline=None)
@given(cubes(), st.booleans())
def test_squares_and_cubes(problem, weighted):
    """Bytes of each rank: the matrix's blocks and all rows."""
    cube, edges, offsets = problem
    words = summa_traffic(cube, offsets, COLUMNS)
    matrix = matrix_traffic(cube, offsets, edges, 8 if weighted else 0)
    assert words.shape == matrix.shape and words.sum() == cube.words(offsets, COLUMNS)
    _, sent = sent_by(cube.num_ranks, edges, offsets, weighted, lambda e, w, m: SummaMatrix(e, cube, offsets, w, m))
    assert np.array_equal((words * 8 + matrix).sum((0, 2)), sent)
    assert summa_entries(cube, offsets, edges).sum() == edges.shape[1]
    assert summa_work(cube, offsets, edges, COLUMNS).sum() == edges.shape[1] * COLUMNS


def test_stages_by_hand():
    offsets = np.array([0, 1, 3, 6, 10])  # 1, 2, 3 and 4 nodes
    grid = ProcessGrid(4, 2)  # rows 0 1, 2 3; column 0 reads block 0, column 1 block 1
    gather, broadcast, reduce = block_traffic(grid, offsets)
    assert dict(flows(gather)) == {(1, 0): 2, (2, 3): 3}
    assert dict(flows(broadcast)) == {(0, 2): 3, (3, 1): 7}
    assert dict(flows(reduce)) == {(0, 1): 2, (1, 0): 1, (2, 3): 4, (3, 2): 3}
    edges = np.array([[0, 0, 9, 9, 4], [1, 5, 1, 9, 2]])  # to nodes 1, 5, 1, 9, 2 of ranks 1, 2, 1, 3, 1
    assert holders(grid, offsets, edges).tolist() == [0, 2, 1, 3, 1]
    reads, sums = sparse_traffic(grid, offsets, edges)
    assert dict(flows(reads)) == {(0, 2): 1, (3, 1): 1, (2, 1): 1}
    assert dict(flows(sums)) == {(0, 1): 1}
    words = summa_traffic(ProcessCube.of(4, 2), offsets, 5)  # widths 2 and 3; rows 0 1 and 2 3 own the blocks
    assert dict(flows(words[0])) == {(0, 1): 3, (1, 0): 4, (2, 3): 9, (3, 2): 8}
    assert dict(flows(words[1])) == {(0, 2): 6, (1, 3): 9}
    assert dict(flows(words[2])) == {(2, 0): 14, (3, 1): 21}
    assert not words[3].any() and np.array_equal(words[4], words[0].T)
    matrix = matrix_traffic(ProcessCube.of(4, 2), offsets, edges, 0)
    # Blocks of rank 0 (target and source below 3): 0→1; 1 (source above): 9→1, 4→2; 2: 0→5; 3: 9→9.
    assert dict(flows(matrix[1])) == {(0, 1): 32 + 4, (2, 3): 64 + 4}
    assert dict(flows(matrix[2])) == {(1, 0): 32 + 8, (3, 2): 64 + 4}


def flows(stage: np.ndarray) -> list[tuple[tuple[int, int], int]]:
    return [((a, b), int(stage[a, b])) for a, b in np.argwhere(stage).tolist()]
