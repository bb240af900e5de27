"""HDRF: Petroni et al., *HDRF: Stream-based partitioning for power-law graphs*, CIKM'15.

The bound of their problem (section 2) is enforced: without it, all edges of a sorted list may go to one rank. Degrees are exact.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from math import ceil

import numpy as np

from lightning_gnn.partition.adjacency import compile_loop
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies.vertex_cut.cutters import STREAM_BOUND, Parts, degrees
from lightning_gnn.strategies.vertex_cut.loops import LANE_BITS, LANES, NEVER, ONE


def hdrf(source: Ids, target: Ids, num_nodes: int, num_parts: int, seed: int, part: Parts) -> None:
    """Assign edges to partitions in their order, replicating the end of higher degree first."""
    most = ceil(STREAM_BOUND * len(source) / num_parts)
    _hdrf(source, target, degrees(source, target, num_nodes), num_parts, most, part)


@compile_loop
def _hdrf(source, target, degree, num_parts, limit, part):
    """Assign each edge to the rank of the highest score among the ranks with fewer than `limit` edges.

    The code minimizes the negative score.
    """
    blocks = (num_parts + 7) // 8
    holders = np.zeros((len(degree), blocks), np.uint8)
    count = np.zeros(8 * blocks, np.int64)
    lanes = np.arange(8 * blocks)
    lanes[num_parts:] += NEVER
    holds = np.zeros((256, 8), np.int64)
    for lane_set in range(256):
        for lane in range(8):
            holds[lane_set, lane] = lane_set >> lane & 1
    least, most = 0, 0
    num_least = num_parts  # ranks with the fewest edges; the minimum rises when this reaches 0
    per_edge = ONE
    for edge in range(len(source)):
        u, v = source[edge], target[edge]
        share = ONE * degree[v] // (np.int64(degree[u]) + degree[v])
        worth_u, worth_v = (ONE + share) << LANE_BITS, (2 * ONE - share) << LANE_BITS
        best = 2 * NEVER - 1
        for block in range(blocks):
            of_u, of_v = holds[holders[u, block]], holds[holders[v, block]]
            counts, lane_of = count[8 * block : 8 * block + 8], lanes[8 * block : 8 * block + 8]
            for lane in range(8):
                load = (max(counts[lane] - least, 0) * per_edge) << LANE_BITS
                best = min(best, load - worth_u * of_u[lane] - worth_v * of_v[lane] + lane_of[lane])
        chosen = best & LANES
        block, bit = chosen >> 3, np.uint8(1 << (chosen & 7))
        holders[u, block] |= bit
        holders[v, block] |= bit
        counts = count[8 * block : 8 * block + 8]
        for lane in range(8):
            counts[lane] += lane == chosen & 7
        if count[chosen] == limit:
            lanes[chosen] += NEVER
        num_least -= count[chosen] == least + 1
        if num_least == 0:
            least += 1
            for each in count[:num_parts]:
                num_least += each == least
        most = max(most, count[chosen])
        per_edge = ONE // (1 + most - least)
        part[edge] = chosen
