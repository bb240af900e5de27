"""A small random graph that looks like the user's: its rows are rows of theirs, its edges are random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.datamodules.sources import EDGE_MASKS, MASKS, is_labelled

# No two of nodes, edges and their halves are equal, so that the first dimension of a tensor says what its rows are.
NUM_NODES, NUM_EDGES = 31, 113


def small_graph(
    batch: Data,
    masks: Sequence[str] = MASKS,
    seed: int = 0,
    num_nodes: int = NUM_NODES,
    num_edges: int = NUM_EDGES,
) -> Data:
    """Returns a directed graph with duplicate edges, isolated nodes, and no self-loops.

    Args:
        batch: a rank's part of the user's graph. Node and edge attributes are drawn from its rows, half of them labelled
            rows of `masks`, or edges in these; other attributes stay.
        masks: the masks that the step uses.
        seed: of the draw.
        num_nodes, num_edges: of the graph.
    """
    g = torch.Generator().manual_seed(seed)
    own = int(batch.num_owned)
    rows = torch.randint(own, (num_nodes,), generator=g)
    for mask in set(masks) & set(MASKS):
        labelled = batch[mask].nonzero().view(-1)
        if batch.get("y") is not None:
            labelled = labelled[is_labelled(batch.y[labelled])]
        if len(labelled):
            half = num_nodes // 2
            rows[:half] = labelled[torch.randint(len(labelled), (half,), generator=g)]
    busy = num_nodes - 4
    source = torch.randint(busy, (num_edges,), generator=g)
    target = (source + torch.randint(1, busy, (num_edges,), generator=g)) % busy
    target[-9:], source[-9:] = target[:9].clone(), source[:9].clone()
    given = batch.edge_index.size(1)
    edges = torch.randint(max(given, 1), (num_edges,), generator=g)
    for mask in set(masks) & set(EDGE_MASKS):
        counted = batch[mask].nonzero().view(-1)
        if len(counted):
            half = num_edges // 2
            edges[:half] = counted[torch.randint(len(counted), (half,), generator=g)]
    small = Data(edge_index=torch.stack([source, target]))
    for name, value in batch.to_dict().items():
        if name in ("edge_index", "num_owned"):
            continue
        if isinstance(value, Tensor) and batch.is_node_attr(name):
            small[name] = value[rows]
        elif isinstance(value, Tensor) and batch.is_edge_attr(name):
            small[name] = value[edges] if given else value.new_zeros((num_edges, *value.shape[1:]))
        else:
            small[name] = value
    return small


def two_halves_of_edges(seed: int = 0) -> np.ndarray:
    """Returns the rank of each edge of a small graph, 0 or 1."""
    return np.random.default_rng(seed).permutation(np.arange(NUM_EDGES) % 2)


def two_halves(seed: int = 0) -> np.ndarray:
    """Returns the owner of each node of a small graph, 0 or 1; both own rows of the first half, which have labels."""
    part = np.random.default_rng(seed).permutation(np.arange(NUM_NODES) % 2)
    part[:2] = 0, 1
    return part
