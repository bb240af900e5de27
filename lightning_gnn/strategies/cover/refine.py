"""Edge cuts for covers: nodes move between parts while that lowers the rows that a cover sends.

METIS makes few cut edges, of which every one may cost a row. A cover pays for the fewest nodes that touch them all
(:mod:`lightning_gnn.strategies.cover.covers`), so a node all of whose edges others' rows serve costs nothing, however many are
cut. Nodes move one at a time, as in Fiduccia and Mattheyses (DAC 1982), but only where that costs no row.

N nodes, E edges, P parts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.console import progress_bar
from lightning_gnn.partition.adjacency import compiled
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies.cover.covers import cover_edges

BOUND = 1.05
"""Over the mean: a part may grow to so many nodes and edges, or to what the heaviest had before."""

LEAST = 0.001
"""Rounds go on while one saves this fraction of the rows."""


def refine_for_cover(edge_index: Ids, part: NDArray[np.integer], num_parts: int, seed: int = 0) -> NDArray[np.int32]:
    """Returns parts by whose minimum covers at most as many rows are sent as by those of `part`, int32 ``[N]``.

    In each round, nodes move in random order, to the part where the rows of others leave the fewest to be sent for the node; to
    one where they are as many as now if that evens the parts' edges. Covers are found anew after each round. No part is emptied.
    Takes 8 N P bytes beside the edges.

    Args:
        edge_index: int64 ``[2, E]``, source and target; self-loops and duplicates may be among them.
        part: of each node, ``[N]``.
        num_parts: P.
        seed: of the order.
    """
    num_nodes, moved, draws = len(part), np.array(part, np.int32), np.random.default_rng(seed)
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    target, source = np.divmod(np.unique(target * num_nodes + source), num_nodes)
    ends = np.stack([source, target], 1)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(ends.ravel(), minlength=num_nodes))])
    incident = np.argsort(ends.ravel(), kind="stable")
    nodes, edges = np.bincount(moved, minlength=num_parts), np.bincount(moved[target], minlength=num_parts)
    most_nodes, most_edges = (max(each.max(), int(BOUND * each.mean())) for each in (nodes, edges))
    before = None
    with progress_bar("Moving nodes for a cover", unit="rounds") as told:
        while True:
            served_by = (cover_edges(ends.T, moved, num_parts) != moved[target]).astype(np.int8)
            rows = _count_edges(ends, moved, served_by, num_parts)
            sent = np.count_nonzero(rows)
            if not sent or (before is not None and sent > (1 - LEAST) * before):
                return moved
            before = sent
            order = draws.permutation(num_nodes)
            _move_nodes(order, ends, incident, indptr, moved, served_by, rows, nodes, edges, most_nodes, most_edges)
            told(1)


@compiled
def _count_edges(ends, part, served_by, num_parts):  # type: ignore[no-untyped-def]
    """Returns how many edges each row serves, int32 ``[2, N, P]``: of the copy of a source to a part, and of the partial result
    of a target from a part. `served_by` says of each edge which of its `ends` has the row, 0 or 1."""
    rows = np.zeros((2, len(part), num_parts), np.int32)
    for edge in range(len(ends)):
        side = served_by[edge]
        node, there = ends[edge, side], part[ends[edge, 1 - side]]
        if part[node] != there:
            rows[side, node, there] += 1
    return rows


@compiled
def _move_nodes(  # type: ignore[no-untyped-def]
    order, ends, incident, indptr, part, served_by, rows, nodes, edges, most_nodes, most_edges
):
    """Moves nodes in this order, one round; changes `part` and what is counted. Of a node, `incident` holds 2 edge + side."""
    num_parts = len(nodes)
    # By side, part that the node would move to, and part of its neighbours: whether others' rows leave an edge to them unserved.
    needs, near = np.zeros((2, num_parts, num_parts), np.bool_), np.zeros(num_parts, np.bool_)
    for node in order:
        here, mine = part[node], incident[indptr[node] : indptr[node + 1]]
        cut = False
        for each in mine:
            cut |= part[ends[each // 2, 1 - each % 2]] != here
        if not cut or nodes[here] == 1:
            continue
        needs[:], near[:] = False, False
        now = in_edges = 0  # rows of the node, and rows of others that serve its edge alone
        for side in range(2):
            for there in range(num_parts):
                now += rows[side, node, there] > 0
        for each in mine:
            edge, side = each // 2, each % 2
            other = ends[edge, 1 - side]
            there = part[other]
            near[there] = True
            in_edges += side
            now += there != here and served_by[edge] != side and rows[1 - side, other, here] == 1
            for goal in range(num_parts):
                needs[side, goal, there] |= rows[1 - side, other, goal] == 0
        fewest, best, least = now, here, edges[here]
        for goal in range(num_parts):
            if goal == here or not near[goal] or nodes[goal] >= most_nodes or edges[goal] + in_edges > most_edges:
                continue
            then, load = 0, edges[goal] + in_edges
            for there in range(num_parts):
                if there != goal:
                    then += needs[0, goal, there] + needs[1, goal, there]
            if then < fewest or (then == fewest and load < least):
                fewest, best, least = then, goal, load
        if best == here:
            continue
        for each in mine:
            edge, side = each // 2, each % 2
            other = ends[edge, 1 - side]
            there = part[other]
            if there != here:
                if served_by[edge] == side:
                    rows[side, node, there] -= 1
                else:
                    rows[1 - side, other, here] -= 1
            if there != best:
                if needs[side, best, there]:
                    served_by[edge] = side
                    rows[side, node, there] += 1
                else:
                    served_by[edge] = 1 - side
                    rows[1 - side, other, best] += 1
        part[node] = best
        nodes[here] -= 1
        nodes[best] += 1
        edges[here] -= in_edges
        edges[best] += in_edges
