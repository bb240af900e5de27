"""What products on a process grid move, by replication factor: the choice of c (CAGNET section 4.2).

n nodes, P ranks, c the replication factor, R = P / c block rows. Rows are those of one product, forward or backward, summed over
the ranks that receive them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_gnn.partition.grid import ProcessGrid
from lightning_gnn.partition.shard import Ids


@dataclass(frozen=True)
class GridCost:
    """One legal replication factor.

    Attributes:
        grid: with that factor.
        rows: that all ranks together receive in one product.
        bytes_held: of the rank that holds most: blocks and partial sums, beside the operands.
    """

    grid: ProcessGrid
    rows: int
    bytes_held: int


def block_cost(grid: ProcessGrid, offsets: Ids, row_bytes: int) -> GridCost:
    """Returns the cost if whole blocks travel: the one that a rank broadcasts, two that it receives, its row's partial sums."""
    largest = int(np.diff(offsets[:: grid.replication]).max())
    blocks = 4 if grid.num_ranks > 1 else 0
    return GridCost(grid, grid.words(offsets, 1), blocks * largest * row_bytes)


def sparse_cost(grid: ProcessGrid, offsets: Ids, halos: Sequence[Ids], partial_sums: int, row_bytes: int) -> GridCost:
    """Returns the cost if only rows travel that a nonzero reads or adds to.

    Args:
        grid, offsets: who owns what.
        halos: of each rank, the nodes that the in-edges of its own nodes read from others.
        partial_sums: how often a node has in-edges from the chunk of another column than its owner's, over all nodes.
        row_bytes: of a row.
    """
    c = grid.replication
    read, most = 0, 0
    for row in range(grid.num_rows):
        own = np.arange(offsets[row * c], offsets[(row + 1) * c])  # which a block row reads, nearly all of them
        nodes = np.unique(np.concatenate([own if c > 1 else own[:0], *(halos[rank] for rank in grid.in_row(row))]))
        owner = np.searchsorted(offsets, nodes, side="right") - 1
        reader = row * c + grid.columns[owner // c]
        received = np.bincount((reader % c)[owner != reader], minlength=c)
        read, most = read + int(received.sum()), max(most, int(received.max()))
    return GridCost(grid, read + partial_sums, (most + int(np.diff(offsets[::c]).max()) * (c > 1)) * row_bytes)


def choose(costs: Sequence[GridCost], available: int | None) -> GridCost:
    """Returns the cost with the fewest rows of those that fit into memory and let all ranks multiply; among equals the largest c.

    Raises:
        ValueError: none fits.
    """
    costs = [cost for cost in costs if cost.grid.all_multiply]
    fitting = [cost for cost in costs if available is None or cost.bytes_held <= available]
    if not fitting:
        least = min(costs, key=lambda cost: cost.bytes_held)
        raise ValueError(
            f"Blocks of rows need at least {least.bytes_held / 1e9:.3g} GB per rank (replication={least.grid.replication}), but "
            f"{(available or 0) / 1e9:.3g} GB are available to each. Use more ranks or fewer columns."
        )
    return min(fitting, key=lambda cost: (cost.rows, -cost.grid.replication))
