"""Moves of nodes for covers never send more rows, keep parts within bounds, and find what METIS's objective cannot see."""

from __future__ import annotations

import numpy as np
import pytest
from common import examples
from hypothesis import given
from hypothesis import strategies as st
from test_cover_edges import costs_between, cut_graphs

from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.strategies.cover import refine
from lightning_gnn.strategies.cover.covers import cover_edges


def rows_sent(edge_index: np.ndarray, part: np.ndarray, parts: int) -> int:
    return int(costs_between(edge_index, cover_edges(edge_index, part, parts), part, parts).sum())


@examples(100)
@given(cut_graphs(), st.integers(0, 3))
def test_never_more_rows_and_parts_within_bounds(drawn, seed):
    edge_index, part, parts = drawn
    given_part = part.copy()
    found = refine.refine_for_cover(edge_index, part, parts, seed)
    assert (part == given_part).all() and found.dtype == np.int32 and found.shape == part.shape
    assert rows_sent(edge_index, found, parts) <= rows_sent(edge_index, part, parts)
    simple = np.unique(edge_index[:, edge_index[0] != edge_index[1]], axis=1)
    for before, after in ((part, found), (part[simple[1]], found[simple[1]])):
        before, after = (np.bincount(each, minlength=parts) for each in (before, after))
        assert after.max() <= max(before.max(), int(refine.BOUND * before.mean()))
    assert (np.bincount(found, minlength=parts) > 0).sum() >= (np.bincount(part, minlength=parts) > 0).sum()
    assert (refine.refine_for_cover(edge_index, part, parts, seed) == found).all()


def fewest_rows(ends: np.ndarray, part: np.ndarray, served_by: np.ndarray, node: int, goals: list[int]) -> int:
    """Returns how few rows are sent once the node is in one of `goals`, if edges between other nodes keep theirs; by sets."""
    cut = part[ends[:, 0]] != part[ends[:, 1]]
    kept = {(side, u_v[side], part[u_v[1 - side]]) for u_v, side in zip(ends[cut], served_by[cut]) if node not in u_v}
    found = []
    for goal in goals:
        own = [(int(u_v[1] == node), u_v[int(u_v[0] == node)]) for u_v in ends if node in u_v]
        unserved = {(s, part[v]) for s, v in own if part[v] != goal and (1 - s, v, goal) not in kept}
        found.append(len(kept) + len(unserved))
    return min(found)


@examples(60)
@given(cut_graphs())
def test_each_node_takes_the_part_of_the_fewest_rows(drawn):
    """And what is counted move by move is what a count of all edges gives."""
    edge_index, part, parts = drawn
    move_nodes = refine._move_nodes

    def watched(order, ends, incident, indptr, part, served_by, rows, nodes, edges, most_nodes, most_edges):
        for node in order:
            here, before = part[node], np.count_nonzero(rows)
            load = edges[here]
            in_edges = (ends[:, 1] == node).sum()
            fits = (nodes < most_nodes) & (edges + in_edges <= most_edges) & (nodes[here] > 1)
            near = part[ends[(ends == node).any(1)]].ravel()
            goals = [goal for goal in {*near.tolist()} if goal != here and fits[goal]]
            fewest = min([before, *([fewest_rows(ends, part, served_by, node, goals)] if goals else [])])
            one = np.array([node])
            move_nodes(one, ends, incident, indptr, part, served_by, rows, nodes, edges, most_nodes, most_edges)
            assert np.count_nonzero(rows) == fewest
            assert part[node] == here or fewest < before or edges[part[node]] < load  # as many rows, edges more even
            assert (rows == refine._count_edges(ends, part, served_by, parts)).all()
            assert (nodes == np.bincount(part, minlength=parts)).all()
            assert (edges == np.bincount(part[ends[:, 1]], minlength=parts)).all()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refine, "_move_nodes", watched)
        refine.refine_for_cover(edge_index, part, parts)


def test_nodes_go_back_to_their_cliques():
    size, rng = 60, np.random.default_rng(0)
    clique = np.stack([each.ravel() for each in np.meshgrid(np.arange(size), np.arange(size))])
    edge_index, part = np.concatenate([clique, clique + size], 1), np.repeat([0, 1], size)
    strayed = part.copy()
    strayed[[*rng.choice(size, 2, replace=False), *(size + rng.choice(size, 2, replace=False))]] ^= 1
    assert rows_sent(edge_index, strayed, 2) > 0
    assert (refine.refine_for_cover(edge_index, strayed, 2) == part).all()


def test_a_node_goes_where_its_rows_travel_anyway():
    """A minimum cut has no reason to move it: half of its edges are on either side. Part 1 copies both hubs in any case."""
    here, there, node, hubs = np.arange(1, 100), np.arange(100, 200), 0, np.array([1, 2])
    read = np.stack([np.repeat(hubs, len(there)), np.tile(there, len(hubs))])
    inside = np.concatenate([np.stack([here, np.roll(here, shift)]) for shift in (1, 2, 3, 4)], 1)
    own = np.array([[1, 2, 145, node], [node, node, node, 150]])
    edge_index, part = np.concatenate([read, inside, own], 1), np.repeat([0, 1], 100)
    assert rows_sent(edge_index, part, 2) == 4  # of the hubs, of the node and to it
    found = refine.refine_for_cover(edge_index, part, 2)
    assert found[node] == 1 and rows_sent(edge_index, found, 2) == 2


@pytest.mark.parametrize("groups", [None, ((0, 1), (2, 3))])
def test_metis_cover_is_metis_with_fewer_rows(groups):
    rng, nodes = np.random.default_rng(3), 2000
    edge_index = (rng.random((2, 8000)) ** 3 * nodes).astype(np.int64)
    masks = {"train": np.arange(nodes) < 4}
    plain, moved = (
        assign_nodes(edge_index, nodes, 4, method, masks=masks, groups=groups) for method in ("metis", "metis_cover")
    )
    assert rows_sent(edge_index, moved.part, 4) < 0.95 * rows_sent(edge_index, plain.part, 4)
    assert moved.method == "metis_cover"
    assert (np.bincount(moved.part[:4], minlength=4) > 0).all()
    assert (moved.report.nodes == np.bincount(moved.part, minlength=4)).all()
