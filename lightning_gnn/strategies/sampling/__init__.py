"""Neighbor sampling for mini-batches: single hops, local numbering, and samplers that combine them. Independent of ranks.

Loops are compiled by numba at first use and cached on disk.
"""

from lightning_gnn.strategies.sampling.hops import Numbering, induced_subgraph, sample_hops
from lightning_gnn.strategies.sampling.neighbors import InEdges, Neighbors, random_walks, sample_neighbors
from lightning_gnn.strategies.sampling.sampler import NeighborSampler, saint_edges, saint_nodes, saint_norms, saint_walks

__all__ = [
    "InEdges",
    "NeighborSampler",
    "Neighbors",
    "Numbering",
    "induced_subgraph",
    "random_walks",
    "saint_edges",
    "saint_nodes",
    "saint_norms",
    "saint_walks",
    "sample_hops",
    "sample_neighbors",
]
