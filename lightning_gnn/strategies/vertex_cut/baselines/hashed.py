"""Partitioners that assign edges by hashes of their nodes."""

from __future__ import annotations

import numpy as np

from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies.vertex_cut.cutters import Parts, degrees


def dbh(source: Ids, target: Ids, num_nodes: int, num_parts: int, seed: int, part: Parts) -> None:
    """Assign each edge to the partition of its end of lower degree (Xie et al., NIPS'14)."""
    home, degree = _homes(num_nodes, num_parts, seed, part), degrees(source, target, num_nodes)
    part[:] = np.where(degree[source] <= degree[target], home[source], home[target])


def grid(source: Ids, target: Ids, num_nodes: int, num_parts: int, seed: int, part: Parts) -> None:
    """Arrange partitions in a grid; assign each edge to the row of its source's partition and the column of its target's."""
    home = _homes(num_nodes, num_parts, seed, part)
    rows = max(rows for rows in range(1, num_parts + 1) if num_parts % rows == 0 and rows * rows <= num_parts)
    columns = num_parts // rows
    part[:] = (home // columns)[source] * columns + (home % columns)[target]


def _homes(num_nodes: int, num_parts: int, seed: int, part: Parts) -> Parts:
    """Returns the random partition of each node, ``[N]``."""
    return np.random.default_rng(seed).integers(0, num_parts, num_nodes).astype(part.dtype)
