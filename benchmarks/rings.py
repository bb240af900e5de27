"""CAGNET's own product over NCCL, as rings of messages: what benchmarks/papers.py prices."""

from __future__ import annotations

import numpy as np

from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies.spmm.grid import ProcessGrid


def published_traffic(grid: ProcessGrid, offsets: Ids) -> Ids:
    """Returns the rows of CAGNET's own product over NCCL, int64 ``[S, P, P]``: rings down the columns, then rings in the rows.

    Each block row lies on all ranks of its process row. Stage k broadcasts the k-th block of each process column along its
    ranks, which pass it on while they receive it, so each link carries it once (GNNSys'21, section 6.1). The last stage
    all-reduces partial sums in process rows: each rank sends each sub-block twice, but for one each time.

    Args:
        grid: the ranks.
        offsets: first node of each rank and the end, ``[P + 1]``.
    """
    own = np.diff(offsets)
    stages = max(len(grid.chunk(column)) for column in range(grid.replication))
    traffic = np.zeros((stages + 1, grid.num_ranks, grid.num_ranks), np.int64)
    for column in range(grid.replication):
        ring = np.array(grid.in_column(column))
        for stage, block in enumerate(grid.chunk(column)):
            way = np.roll(ring, -block)  # the source stands in process row `block`
            traffic[stage, way[:-1], way[1:]] = own[np.array(grid.in_row(block))].sum()
    for row in range(grid.num_rows):
        ring = np.array(grid.in_row(row))
        after = np.roll(ring, -1)
        traffic[-1, ring, after] = 2 * own[ring].sum() - own[after] - own[np.roll(ring, -2)]
    ranks = np.arange(grid.num_ranks)
    traffic[:, ranks, ranks] = 0
    return traffic
