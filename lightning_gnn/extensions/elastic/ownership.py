"""Owners of nodes after a change of the ranks or of their speed: no more nodes move than necessary.

N nodes, E edges, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from lightning_gnn.data.shards import Cut
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.metis import part_graph
from lightning_gnn.partition.shard import Ids

_FIRST_GROUP = 16  # part of the moved work in the first group
_MOST_ROUNDS = 200  # on a long path, a group is one node


def owners_in(cut: Cut) -> NDArray[np.int32]:
    """Returns the owner of each node of a partitioned graph, int32 ``[N]``, in original order, type after type."""
    found = []
    for name, counts in cut.types.nodes.items():
        owners = np.empty(int(counts.sum()), np.int32)
        owners[cut.ids_of(name).numpy()] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        found.append(owners)
    return np.concatenate(found)


def give_to_survivors(
    edge_index: Ids, owners: NDArray[np.integer], new_ranks: Sequence[int | None], size: int, seed: int
) -> NDArray[np.int32]:
    """Returns the owner of each node, ``[N]``, after ranks were lost or renumbered.

    Nodes of lost ranks are cut into one piece per rank by METIS, and each piece goes to the rank with most edges to it. All other
    nodes stay on their rank.

    Args:
        edge_index: edges in original ids, int64 ``[2, E]``.
        owners: rank of each node before, ``[N]``.
        new_ranks: by the rank before, the rank now; None for a lost rank.
        size: number of ranks now.
        seed: seed of METIS.
    """
    found = np.array([-1 if rank is None else rank for rank in new_ranks], np.int32)[owners]
    lost = np.flatnonzero(found < 0)
    if not len(lost):
        return found
    position = np.full(len(owners), -1, np.int64)
    position[lost] = np.arange(len(lost))
    ends = position[edge_index]
    inside = ends[:, (ends >= 0).all(0)]
    pieces = part_graph(Adjacency.of(inside, len(lost)), size, seed) if len(lost) > size else np.arange(len(lost))
    border = (ends >= 0).sum(0) == 1
    piece, neighbor = pieces[ends[:, border].max(0)], found[edge_index[:, border]].max(0)
    shared = np.bincount(piece * size + neighbor, minlength=size * size).reshape(size, size)
    _, taker = linear_sum_assignment(shared, maximize=True)
    found[lost] = taker[pieces]
    return found


def work_of_nodes(edge_index: Ids, num_nodes: int) -> NDArray[np.float64]:
    """Returns the work of each node, ``[N]``: its in-edges, and the mean number of in-edges."""
    return np.bincount(edge_index[1], minlength=num_nodes) + edge_index.shape[1] / num_nodes


def move_work(
    edge_index: Ids, owners: NDArray[np.integer], work: NDArray[np.float64], shares: NDArray[np.float64]
) -> NDArray[np.int32]:
    """Returns the owner of each node, ``[N]``, after nodes moved from ranks with more than their share of work to the others.

    No more nodes move than necessary. Pairs of ranks with most edges between them come first. Nodes at the border of the
    receiving rank move, in groups whose size doubles. Those with the largest part of their neighbors there come first.

    Args:
        edge_index: edges in original ids, int64 ``[2, E]``.
        owners: rank of each node before, ``[N]``.
        work: work of each node, above 0, ``[N]``.
        shares: share of the work of each rank after the move, above 0, ``[P]``. Every rank keeps a node.
    """
    found, size = owners.astype(np.int32), len(shares)
    surplus = np.bincount(found, work, size) - shares / shares.sum() * work.sum()
    pairs = (surplus > 0)[:, None] & (surplus < 0)
    while pairs.any():
        between = np.zeros_like(pairs, int)
        if pairs.sum() > 1:
            between = np.bincount(found[edge_index[0]] * size + found[edge_index[1]], minlength=size * size).reshape(size, size)
        giver, taker = map(int, np.unravel_index(np.where(pairs, between + between.T, -1).argmax(), pairs.shape))
        moved = _move_region(edge_index, found, work, giver, taker, min(surplus[giver], -surplus[taker]))
        surplus[giver] -= moved
        surplus[taker] += moved
        pairs[giver, taker] = False
        pairs &= (surplus > 0)[:, None] & (surplus < 0)
    return found


def _move_region(
    edge_index: Ids, owners: NDArray[np.int32], work: NDArray[np.float64], giver: int, taker: int, amount: float
) -> float:
    """Change the owner of nodes with at most `amount` of work together, in place; returns their work."""
    size, left, moved, rounds = len(owners), owners == giver, 0.0, 0
    node, neighbor = np.concatenate([each[:, left[each[0]]] for each in (edge_index, edge_index[::-1])], 1)
    degree = np.maximum(1, np.bincount(node, minlength=size))
    while True:
        near = np.where(left, np.bincount(node[(owners == taker)[neighbor]], minlength=size) / degree, 0)
        fits = left & (work <= amount - moved)
        at_border = fits & (near > 0)
        # All nodes, if the rest is not connected, or none at the border fits
        fitting = np.flatnonzero(at_border if at_border.any() and rounds < _MOST_ROUNDS else fits)
        if not len(fitting):
            return moved
        order = fitting[np.argsort(-near[fitting], kind="stable")]
        group = min(amount - moved, max(amount / _FIRST_GROUP, moved))
        count = max(1, int(np.searchsorted(np.cumsum(work[order]), group, "right")))
        if not near.any() and rounds < _MOST_ROUNDS:
            count = 1  # a region begins, perhaps of a rank without nodes
        chosen = order[:count]
        owners[chosen], left[chosen] = taker, False
        moved, rounds = moved + float(work[chosen].sum()), rounds + 1
