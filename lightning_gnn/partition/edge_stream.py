"""EBV's stream of edges (CDFGNN section 6, equation 24): which loads and penalties it sees, and running it.

N nodes, E edges, P ranks, B blocks of eight lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition import vertex_loops as loops

Ids = NDArray[np.int64]
Parts = NDArray[np.unsignedinteger]

MOST_PARTS = 1 << loops.LANE_BITS
"""A score's last bits name one of so many."""


@dataclass(frozen=True)
class Lanes:
    """How ranks lie in blocks of eight lanes, and what equation 24 charges there, in fixed point.

    Hosts of up to eight ranks share blocks, and a table for the sets of eight lanes knows them; larger ones fill several.

    Attributes:
        rank: of each lane, -1 for none, ``[8 B]``.
        blocks_per_host: 1, or more for hosts of more than eight ranks.
        penalty: int64 ``[256, 8]``, see :func:`~lightning_gnn.partition.vertex_loops.ebv`.
        host_penalty: that of a host of several blocks.
        edge_step, replica_step: what an edge and a replica add to the load of their rank.
    """

    rank: NDArray[np.int64]
    blocks_per_host: int
    penalty: NDArray[np.int64]
    host_penalty: int
    edge_step: int
    replica_step: int

    @classmethod
    def of(cls, hosts: list[list[int]], num_nodes: int, num_edges: int, host_weight: float) -> Lanes:
        size, num_parts = len(hosts[0]), len(hosts) * len(hosts[0])
        share = max(1, 8 // size)  # hosts of a block
        blocks_per_host = -(-size // 8)
        rows = [list(chain(*hosts[first : first + share])) for first in range(0, len(hosts), share)]
        rank = np.full((len(rows), 8 * blocks_per_host), -1)
        for row, ranks in zip(rank, rows):
            row[: len(ranks)] = ranks
        if rank.size > MOST_PARTS:  # with gaps
            raise ValueError(
                f"{len(hosts)} hosts of {size} parts are too many: those of up to 8 share eights, others take a multiple of 8, "
                f"and there are {MOST_PARTS} in all. Use host_weight=0."
            )
        if len(hosts) == 1:
            host_weight = 0.0
        sets = np.arange(256)[:, None] >> np.arange(8) & 1 == 1
        host = np.arange(8) // size
        host_has = (sets[:, :, None] & (host[:, None] == host)).any(1)
        on_rank, on_host = (round(weight * loops.ONE) << loops.LANE_BITS for weight in (1 - host_weight, host_weight))
        return cls(
            rank=rank.ravel(),
            blocks_per_host=blocks_per_host,
            penalty=~sets * np.int64(on_rank) + ~host_has * np.int64(on_host if blocks_per_host == 1 else 0),
            host_penalty=on_host,
            edge_step=round(loops.ONE * num_parts / num_edges) << loops.LANE_BITS,
            replica_step=round(loops.ONE * num_parts / num_nodes) << loops.LANE_BITS,
        )

    def no_holders(self, num_nodes: int) -> NDArray[np.uint8]:
        """Returns empty sets of lanes, uint8 ``[N, B]``."""
        return np.zeros((num_nodes, len(self.rank) // 8), np.uint8)

    def no_load(self) -> NDArray[np.int64]:
        """Returns the loads of lanes before the first edge, int64 ``[8 B]``."""
        return np.where(self.rank < 0, loops.NEVER, 0) + np.arange(len(self.rank))


def stream(
    source: Ids,
    target: Ids,
    degree: NDArray[np.int32],
    chosen: NDArray[np.bool_],
    lanes: Lanes,
    load: NDArray[np.int64],
    held: NDArray[np.uint8],
    part: Parts,
) -> None:
    """Writes the ranks of the chosen edges, to parts that have these loads and hold these nodes already."""
    number = int(chosen.sum()) if len(chosen) else len(source)
    pairs = np.empty((number, 2), smallest_integers(len(degree)))
    order = np.empty(number, smallest_integers(len(source)))
    loops.by_degree_sum(source, target, degree, chosen, pairs, order)
    steps = lanes.edge_step, lanes.replica_step
    penalties = lanes.penalty, lanes.blocks_per_host, lanes.host_penalty
    loops.ebv(pairs, order, *penalties, load, *steps, lanes.rank, held, part)


def smallest_integers(number: int) -> type[np.signedinteger]:
    """Returns the type of ids below `number`: half the memory where 32 bits do."""
    return np.int32 if number <= np.iinfo(np.int32).max else np.int64
