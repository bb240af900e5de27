"""How much of a graph is looked at: all of it, or a ball around training nodes."""

from __future__ import annotations

import numpy as np
import torch
from torch_geometric.data import Data

MAX_VALUES = 20_000_000
"""Nodes times features of a graph that is looked at as a whole: 160 MB in float64, of which there are a few copies."""
MAX_EDGES = 1_000_000
"""Of such a graph: on one device, PyG makes a row for each."""


def some_of(data: Data, num_nodes: int | None, seed: int = 0) -> Data:
    """Returns the graph, or a sample of it, with ``n_id`` and ``e_id``, the ids of its nodes and edges in the graph.

    Args:
        data: checked, see :func:`~lightning_gnn.data.sources.prepare_graph`.
        num_nodes: of the sample; None for the whole graph if it has at most `MAX_VALUES` and `MAX_EDGES`, else for a sample that
            has.
        seed: of the sample.
    """
    data = data.clone()
    data.n_id, data.e_id = torch.arange(data.x.size(0)), torch.arange(data.edge_index.size(1))
    if num_nodes is not None:
        return ball(data, num_nodes, seed)
    nodes = max(1, min(data.x.size(0), MAX_VALUES // data.x.size(1)))
    found = ball(data, nodes, seed)
    while found.edge_index.size(1) > MAX_EDGES and nodes > 1:
        nodes //= 2
        found = ball(data, nodes, seed)
    return found


def ball(data: Data, num_nodes: int, seed: int = 0) -> Data:
    """Returns the subgraph of so many nodes: a training node, its neighbours in either direction, theirs, and so on.

    Of the last neighbours, some are drawn. Where no neighbours are left, other nodes begin balls of their own, training nodes
    first: one, then two, then four.
    """
    total = data.x.size(0)
    if num_nodes >= total:
        return data
    rng = np.random.default_rng(seed)
    source, target = data.edge_index.numpy()
    order = rng.permutation(total)
    order = order[np.argsort(~data.train_mask.numpy()[order], kind="stable")]
    taken, starts = np.zeros(total, dtype=bool), 1
    new = np.empty(0, dtype=np.int64)
    while (room := num_nodes - int(taken.sum())) > 0:
        if len(new):
            last = np.zeros(total, dtype=bool)
            last[new] = True
            reached = np.unique(np.concatenate([target[last[source]], source[last[target]]]))
            new = reached[~taken[reached]]
        else:
            new = order[~taken[order]][:starts]
            starts *= 2
        new = new if len(new) <= room else rng.choice(new, room, replace=False)
        taken[new] = True
    return data.subgraph(torch.from_numpy(taken))
