"""DNE: Hanai et al., *Distributed edge partitioning for trillion-edge graphs*, VLDB'19, with all workers in one process."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import numpy as np

from lightning_gnn.partition.adjacency import compile_loop
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies.vertex_cut.cutters import Parts, degrees, incidence

EXPANDED = 0.1, 1.1
"""Parameters of the paper: lambda and alpha.

lambda is the share of a boundary that is expanded in a round. alpha is the maximum edges of a partition, relative to the mean.
"""


def dne(source: Ids, target: Ids, num_nodes: int, num_parts: int, seed: int, part: Parts) -> None:
    """Grow all partitions at once from random nodes, by neighborhood expansion."""
    indptr, neighbor, edge_of = incidence(source, target, degrees(source, target, num_nodes))
    starts = np.random.default_rng(seed).permutation(num_nodes)
    share, bound = EXPANDED
    _expand_at_once(indptr, neighbor, edge_of, starts, share, bound * len(source) / num_parts, num_parts, part)


@compile_loop
def _expand_at_once(indptr, neighbor, edge_of, starts, share, limit, num_parts, part):
    """Grow all partitions in rounds, like DNE's workers, until all edges are assigned or partitions exceed `limit` edges.

    In a round, a partition expands the `share` of its boundary with the fewest free edges. These edges are assigned to it. Their
    other ends join its boundary, with their free edges into the partition. No other partition has both ends of such an edge,
    since the edge would then be assigned to it. A partition without a boundary continues from the next of `starts` ``[N]`` that
    has free edges.
    """
    num_nodes = len(starts)
    free, rest = np.ones(len(part), np.bool_), indptr[1:] - indptr[:-1]
    holders, count = np.zeros((num_nodes, (num_parts + 7) // 8), np.uint8), np.zeros(num_parts, np.int64)
    boundaries = [np.empty(0, np.int64) for _ in range(num_parts)]
    joined, start, left = np.empty(num_nodes, np.int64), 0, len(part)
    while left > 0:
        for rank in range(num_parts):
            if count[rank] > limit:
                continue
            block, bit = rank >> 3, np.uint8(1 << (rank & 7))
            boundary = boundaries[rank][rest[boundaries[rank]] > 0]
            if len(boundary) == 0:
                while start < num_nodes and rest[starts[start]] == 0:
                    start += 1
                if start == num_nodes:
                    break
                boundary = starts[start : start + 1].astype(np.int64)
                holders[boundary[0], block] |= bit
            keys = rest[boundary]
            number = max(1, int(share * len(boundary)))
            most = np.partition(keys, number - 1)[number - 1]
            ties = number - (keys < most).sum()
            stays, new = np.ones(len(boundary), np.bool_), 0
            for k in range(len(boundary)):
                if keys[k] > most or (keys[k] == most and ties == 0):
                    continue
                ties -= keys[k] == most
                stays[k] = False
                core = boundary[k]
                for slot in range(indptr[core], indptr[core + 1]):
                    edge, other = edge_of[slot], neighbor[slot]
                    if free[edge]:
                        free[edge] = False
                        part[edge] = rank
                        rest[core] -= 1
                        rest[other] -= other != core
                        count[rank] += 1
                        left -= 1
                        if holders[other, block] & bit == 0:
                            holders[other, block] |= bit
                            joined[new] = other
                            new += 1
            for node in joined[:new]:
                for slot in range(indptr[node], indptr[node + 1]):
                    edge, other = edge_of[slot], neighbor[slot]
                    if free[edge] and holders[other, block] & bit:
                        free[edge] = False
                        part[edge] = rank
                        rest[node] -= 1
                        rest[other] -= other != node
                        count[rank] += 1
                        left -= 1
            boundaries[rank] = np.concatenate((boundary[stays], joined[:new]))
