"""Covers serve every edge, cost as little as maximum flows allow, and know nothing of pairs of parts without edges."""

from __future__ import annotations

import numpy as np
import pytest
from common import examples
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching, maximum_flow

from lightning_gnn.strategies.cover.covers import cover_edges


@st.composite
def cut_graphs(draw):
    """Edges, with self-loops and duplicates, and the part of each node; some parts and nodes have none."""
    seed, nodes = draw(st.integers(0, 1 << 30)), draw(st.integers(1, 30))
    parts, edges = draw(st.integers(1, 5)), draw(st.integers(0, 120))
    rng = np.random.default_rng(seed)
    hubs = rng.random((2, edges)) ** draw(st.sampled_from([1, 4]))
    return (hubs * nodes).astype(np.int64), rng.integers(0, parts, nodes), parts


def costs_between(
    edge_index: np.ndarray, holder: np.ndarray, part: np.ndarray, parts: int, copy_cost: int = 1, result_cost: int = 1
) -> np.ndarray:
    """Returns the cost of what goes from each part to each other: copies of sources, and partial results of targets."""
    source, target = edge_index
    copies = {(part[u], q, u, copy_cost, "copy") for u, q in zip(source, holder) if part[u] != q}
    results = {(p, part[v], v, result_cost, "result") for v, p in zip(target, holder) if part[v] != p}
    found = np.zeros((parts, parts), np.int64)
    for p, q, _, cost, _ in copies | results:
        found[p, q] += cost
    return found


def matched(edge_index: np.ndarray, part: np.ndarray, p: int, q: int) -> int:
    """Returns the size of a maximum matching of the edges from p to q: no cover is smaller (Koenig)."""
    source, target = edge_index[:, (part[edge_index[0]] == p) & (part[edge_index[1]] == q)]
    if not len(source):
        return 0
    matrix = csr_matrix((np.ones(len(source)), (source, target)), shape=(len(part), len(part)))
    return int((maximum_bipartite_matching(matrix, perm_type="column") >= 0).sum())


@examples(100)
@given(cut_graphs())
def test_no_cover_is_smaller(drawn):
    edge_index, part, parts = drawn
    holder = cover_edges(edge_index, part, parts)
    is_source, is_target = holder == part[edge_index[0]], holder == part[edge_index[1]]
    assert (is_source | is_target).all()
    rows = costs_between(edge_index, holder, part, parts)
    for p in range(parts):
        for q in range(parts):
            assert rows[p, q] == (matched(edge_index, part, p, q) if p != q else 0)


def flow(edge_index: np.ndarray, part: np.ndarray, p: int, q: int, copy_cost: int, result_cost: int) -> int:
    """Returns the maximum flow over the edges from p to q: no cover weighs less (max-flow min-cut)."""
    source, target = np.unique(edge_index[:, (part[edge_index[0]] == p) & (part[edge_index[1]] == q)], axis=1)
    nodes, begin = len(part), len(part)
    sources, targets = np.unique(source), np.unique(target)
    row = np.concatenate([source, np.full(len(sources), begin), targets])
    col = np.concatenate([target, sources, np.full(len(targets), begin + 1)])
    capacity = np.repeat([nodes * copy_cost, copy_cost, result_cost], [len(source), len(sources), len(targets)])
    graph = csr_matrix((capacity.astype(np.int32), (row, col)), shape=(nodes + 2, nodes + 2))
    return int(maximum_flow(graph, begin, begin + 1).flow_value)


COSTS = st.one_of(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.sampled_from([(16, 17), (1, 40), (40, 1)]))


@examples(100)
@given(cut_graphs(), COSTS)
def test_no_cover_costs_less(drawn, costs):
    edge_index, part, parts = drawn
    holder = cover_edges(edge_index, part, parts, *costs)
    assert ((holder == part[edge_index[0]]) | (holder == part[edge_index[1]])).all()
    found = costs_between(edge_index, holder, part, parts, *costs)
    for p in range(parts):
        for q in range(parts):
            assert found[p, q] == (flow(edge_index, part, p, q, *costs) if p != q else 0)
    # Of several, it has the fewest results: that they cost a hundredth more changes nothing.
    assert (cover_edges(edge_index, part, parts, 100 * costs[0], 100 * costs[1] + 1) == holder).all()


@examples(100)
@given(cut_graphs())
def test_each_part_can_cover_its_own_edges(drawn):
    """Ranks know the edges into their own nodes only, and agree with who knows them all."""
    edge_index, part, parts = drawn
    whole = cover_edges(edge_index, part, parts)
    for q in range(parts):
        own = part[edge_index[1]] == q
        assert (cover_edges(edge_index[:, own], part, parts) == whole[own]).all()


@pytest.mark.parametrize(("sources", "targets"), [(1, 50), (50, 1)])
def test_a_hub_is_one_row(sources, targets):
    source, target = (each.ravel() for each in np.meshgrid(np.arange(sources), sources + np.arange(targets)))
    part = np.repeat([0, 1], [sources, targets])
    edge_index = np.stack([source, target])
    holder = cover_edges(edge_index, part, 2)
    assert (holder == (1 if sources == 1 else 0)).all()  # a copy of the hub, or the hub's sum
    assert costs_between(edge_index, holder, part, 2).sum() == 1


def test_of_covers_of_one_size_edges_stay_with_their_targets():
    part = np.array([0, 0, 1, 1])
    assert (cover_edges(np.array([[0, 1], [2, 3]]), part, 2) == 1).all()


def test_long_alternating_paths_are_found():
    """Each source takes its second target first: the last one is matched by moving all others, in one path, and none is free."""
    length = 4000
    u, v = np.arange(length), length + np.arange(length)
    edge_index = np.stack([np.concatenate([u[:-1], u]), np.concatenate([v[1:], v])])
    part = np.repeat([0, 1], length)
    holder = cover_edges(edge_index, part, 2)
    assert costs_between(edge_index, holder, part, 2).sum() == length
    assert (holder == 1).all()
