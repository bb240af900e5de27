"""Splits of edges, for predicting links."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected

from lightning_gnn.data.sources import checked_edges


def split_edges(
    data: Data, val: float = 0.05, test: float = 0.1, undirected: bool | None = None, seed: int = 0
) -> Data:
    """Returns the graph with a random split of its edges: ``edge_train_mask``, ``edge_val_mask``, ``edge_test_mask``.

    Parallel edges go together, and in an undirected graph both directions, since one would tell of the other. Self-loops, which
    tell nothing, are left to training. No edges are removed: it is :class:`~lightning_gnn.LinkPredictor` that lets messages pass
    over training edges only.

    Args:
        data: the graph; not changed.
        val, test: fractions of the edges.
        undirected: whether ``(u, v)`` and ``(v, u)`` are one edge; by default whether the graph has them all.
        seed: same seed, same split.

    Returns:
        A shallow copy; the masks are bool ``[E]``.

    Raises:
        ValueError: fractions out of range, too few edges for them, or edges that are none of the graph's nodes.
    """
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise ValueError(
            f"val and test are fractions of the edges whose sum is below 1, the rest is for training (got {val} and {test})."
        )
    if not isinstance(data, Data) or data.edge_index is None:
        raise ValueError(f"split_edges takes a torch_geometric.data.Data with edge_index (got {type(data).__name__}).")
    num_nodes = int(data.num_nodes or 0)
    edge_index = checked_edges(data.edge_index, num_nodes).cpu()
    if undirected is None:
        undirected = bool(is_undirected(edge_index, num_nodes=num_nodes))
    source, target = edge_index.sort(0).values if undirected else edge_index
    _, group = (source * num_nodes + target).unique(return_inverse=True)
    splittable = group[source != target].unique()
    sizes = [round(share * len(splittable)) for share in (val, test)]
    for name, share, size in zip(("val", "test"), (val, test), sizes):
        if share > 0 and size == 0:
            raise ValueError(
                f"{name}={share} of {len(splittable)} different edges is none. Give a larger fraction, or 0."
            )
    drawn = splittable[torch.from_numpy(np.random.default_rng(seed).permutation(len(splittable)))]
    held = [torch.isin(group, part) for part in drawn[: sum(sizes)].split(sizes)]
    result = copy.copy(data)
    masks: dict[str, Tensor] = {"train": ~(held[0] | held[1]), "val": held[0], "test": held[1]}
    for name, mask in masks.items():
        result[f"edge_{name}_mask"] = mask.to(data.edge_index.device)
    return result
