"""GraphSAINT: which nodes a batch has (Zeng et al., ICLR 2020); :meth:`NeighborSampler.induced` makes it.

Each returns distinct nodes, ascending; matrices are of in-edges, of graphs whose edges go both ways, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_gnn.kernels.csr import CSR
from lightning_gnn.strategies.sampling.neighbors import random_walks
from lightning_gnn.strategies.sampling.sampler import NeighborSampler


def saint_nodes(csr: CSR, count: int, seed: int = 0) -> Tensor:
    """Returns what `count` draws of nodes find, with odds in proportion to their degree."""
    return csr.indices[_draws(csr.num_edges, count, seed)].long().unique()


def saint_edges(csr: CSR, count: int, seed: int = 0) -> Tensor:
    """Returns the ends of `count` drawn edges, with odds in proportion to the sum of one over the degree of either end."""
    target = csr.row_of_slot().long()
    source = csr.indices.long()
    odds = 1 / csr.indptr.diff().double()[target] + 1 / torch.bincount(source, minlength=csr.num_cols).double()[source]
    # multinomial takes 2^24 edges at most, a search any number.
    heap = odds.cumsum(0)
    points = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * heap[-1]
    drawn = torch.searchsorted(heap, points).clamp_(max=csr.num_edges - 1)
    return torch.cat([source[drawn], target[drawn]]).unique()


def saint_walks(csr: CSR, count: int, steps: int, seed: int = 0) -> Tensor:
    """Returns the nodes of `count` walks of so many steps, from roots drawn uniformly."""
    return random_walks(csr, _draws(csr.num_rows, count, seed), steps, seed).unique()


def saint_norms(sampler: NeighborSampler, draw: Callable[[int], Tensor], samples: int) -> tuple[Tensor, Tensor]:
    """Returns the weights that undo how often nodes and edges are drawn, estimated from some samples (section 3.2).

    Args:
        sampler: of the graph.
        draw: returns the nodes of a sample of this seed, such as ``lambda seed: saint_nodes(csr, 6000, seed)``.
        samples: how many.

    Returns:
        For each node, what its loss is divided by in a sum over a batch, as a factor, float32 ``[N]``; for each edge, the factor
        of its message in a sum over in-edges, float32 ``[E]`` in list order: one over the share of its target's samples that
        it is in. What was never drawn counts as drawn a tenth of a time, as in PyG.
    """
    [csr] = sampler.csr.values()
    nodes, edges = torch.zeros(csr.num_rows), torch.zeros(csr.num_edges)
    for seed in range(samples):
        out = sampler.induced(draw(seed))
        nodes[out.node] += 1
        edges[out.edge] += 1
    target = csr.unpermute(csr.row_of_slot()).long()
    return samples / nodes.clamp(min=0.1) / csr.num_rows, nodes.clamp(min=0.1)[target] / edges.clamp(min=0.1)


def _draws(size: int, count: int, seed: int) -> Tensor:
    if not size:
        raise ValueError("There is nothing to draw from: the graph is empty.")
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed))
