"""Edge cuts for covers: moves nodes between partitions to reduce the rows that a cover sends.

METIS minimizes cut edges, each of which may cost a row. A cover costs the fewest nodes that include one end of each cut edge
(:mod:`lightning_gnn.strategies.cover.covers`). A node whose edges are all covered by other nodes costs nothing, regardless of its
number of cut edges. Nodes are moved one at a time, as in Fiduccia and Mattheyses (DAC 1982), but only if the move costs no row.

N nodes, E edges, P partitions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.console import progress_bar
from lightning_gnn.partition.adjacency import compile_loop
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies.cover.covers import cover_edges

BOUND = 1.05
"""Maximum nodes and edges of a partition, relative to the mean; the heaviest partition's initial numbers if these are larger."""

LEAST = 0.001
"""Minimum reduction of the rows in a round, as a fraction; a smaller reduction ends the refinement."""


def refine_for_cover(edge_index: Ids, part: NDArray[np.integer], num_parts: int, seed: int = 0) -> NDArray[np.int32]:
    """Returns a partition whose minimum covers send at most as many rows as the covers of `part`, int32 ``[N]``.

    Each round visits the nodes in random order. A node moves to the partition that requires the fewest rows for it. With equal
    rows, it moves if this improves the edge balance. Covers are recomputed after each round. No partition becomes empty.

    Needs 8 N P bytes in addition to the edges.

    Args:
        edge_index: int64 ``[2, E]``, source and target; may include self-loops and duplicates.
        part: partition of each node, ``[N]``.
        num_parts: P.
        seed: random seed of the order of nodes.
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


@compile_loop
def _count_edges(ends, part, served_by, num_parts):  # type: ignore[no-untyped-def]
    """Returns the number of edges that each row covers, int32 ``[2, N, P]``.

    A row is the features of a source sent to a partition, or the partial aggregate of a target from a partition.

    Args:
        served_by: which of the `ends` of each edge has the row, 0 or 1, ``[E]``.
    """
    rows = np.zeros((2, len(part), num_parts), np.int32)
    for edge in range(len(ends)):
        side = served_by[edge]
        node, there = ends[edge, side], part[ends[edge, 1 - side]]
        if part[node] != there:
            rows[side, node, there] += 1
    return rows


@compile_loop
def _move_nodes(  # type: ignore[no-untyped-def]
    order, ends, incident, indptr, part, served_by, rows, nodes, edges, most_nodes, most_edges
):
    """Move nodes in the given order, one round; updates `part` and all counts in place.

    Args:
        incident: 2 edge + side for each edge of a node.
    """
    num_parts = len(nodes)
    # Indexed by side, destination of the node, and neighbor's partition: whether an edge to that partition needs a row of the
    # node.
    needs, near = np.zeros((2, num_parts, num_parts), np.bool_), np.zeros(num_parts, np.bool_)
    for node in order:
        here, mine = part[node], incident[indptr[node] : indptr[node + 1]]
        cut = False
        for each in mine:
            cut |= part[ends[each // 2, 1 - each % 2]] != here
        if not cut or nodes[here] == 1:
            continue
        needs[:], near[:] = False, False
        now = in_edges = 0  # rows of the node, and rows of neighbors that cover only its edge
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
