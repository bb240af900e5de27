"""Synthetic graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch_geometric.data import Data


def planted_partition(
    num_nodes: int = 10_000,
    average_degree: float = 10.0,
    num_classes: int = 8,
    num_features: int = 32,
    homophily: float = 0.7,
    noise: float = 4.0,
    split: Sequence[float] = (0.5, 0.25, 0.25),
    seed: int = 0,
) -> Data:
    """Returns a graph whose communities are its classes: symmetric, without self-loops and duplicate edges.

    Degrees follow a power law (exponent 2.8, cut at 2000 times the smallest), as in the degree-corrected planted partition.

    Args:
        num_nodes: N.
        average_degree: directed edges per node, accurate to about one percent on large sparse graphs.
        num_classes: number of communities.
        num_features: columns of ``x``: a random center per class plus `noise` times a standard normal.
        homophily: fraction of edges drawn inside a community.
        noise: standard deviation of features around their class's center.
        split: fractions of training, validation and test nodes.
        seed: random seed; equal seeds give equal graphs.

    Returns:
        ``x`` float32 ``[N, F]``, ``edge_index`` int64 ``[2, E]``, ``y`` int64 ``[N]``, boolean masks ``[N]``.
    """
    if num_nodes < 2 or num_classes < 1 or num_features < 1:
        raise ValueError(
            f"There must be at least 2 nodes, 1 class and 1 feature (got {num_nodes}, {num_classes} and {num_features})."
        )
    if not 0 <= homophily <= 1:
        raise ValueError(f"homophily must be from 0 to 1 (got {homophily}).")
    if not 0 < average_degree < num_nodes:
        raise ValueError(f"average_degree must be between 0 and num_nodes={num_nodes} (got {average_degree}).")
    if len(split) != 3 or min(split) < 0 or sum(split) > 1 + 1e-9:
        raise ValueError(f"split needs three fractions that sum to at most 1 (got {tuple(split)}).")
    rng = np.random.default_rng(seed)
    y = rng.integers(0, num_classes, num_nodes)
    weight = np.minimum((1 - rng.random(num_nodes)) ** (-1 / 1.8), 2000.0)
    by_class = np.argsort(y, kind="stable")
    heap = np.concatenate([[0.0], np.cumsum(weight[by_class])])  # node k of by_class: heap[k] to heap[k + 1]
    first = np.searchsorted(y[by_class], np.arange(num_classes + 1))
    low, high = heap[first[:-1]], heap[first[1:]]

    def draw(count: int) -> np.ndarray:
        """Returns distinct undirected edges among `count` draws, as one number each."""
        # Sorted draws make the searches access memory in order, several times faster on large graphs.
        u = by_class[_find(heap, np.sort(rng.random(count)) * heap[-1])]
        inside = rng.random(count) < homophily
        position = rng.random(count)
        position = np.where(inside, low[y[u]] + position * (high - low)[y[u]], position * heap[-1])
        order = np.argsort(position)
        u, v = u[order], by_class[_find(heap, position[order])]
        distinct = u != v
        return np.minimum(u, v)[distinct] * num_nodes + np.maximum(u, v)[distinct]

    wanted = round(average_degree * num_nodes / 2)
    edges = np.unique(draw(wanted))
    for _ in range(20):  # replaces removed duplicates and self-loops, of which hubs make more
        missing = wanted - len(edges)
        if missing <= 0.005 * wanted:
            break
        edges = np.unique(np.concatenate([edges, draw(int(1.1 * missing) + 16)]))
    if len(edges) > wanted:
        edges = np.sort(rng.permutation(edges)[:wanted])
    u, v = edges // num_nodes, edges % num_nodes
    edge_index = torch.from_numpy(np.stack([np.concatenate([u, v]), np.concatenate([v, u])]))

    x = rng.standard_normal((num_nodes, num_features), dtype=np.float32)
    x *= np.float32(noise)
    x += rng.standard_normal((num_classes, num_features)).astype(np.float32)[y]
    share = torch.from_numpy(rng.random(num_nodes))
    ends = np.cumsum(split)
    return Data(
        x=torch.from_numpy(x),
        edge_index=edge_index,
        y=torch.from_numpy(y),
        train_mask=share < ends[0],
        val_mask=(share >= ends[0]) & (share < ends[1]),
        test_mask=(share >= ends[1]) & (share < ends[2]),
    )


def _find(heap: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.searchsorted(heap[1:-1], positions, side="right")
