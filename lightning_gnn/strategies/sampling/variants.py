"""Other batches than sampled neighborhoods: ego graphs, GraphSAINT's subgraphs, clusters.

Sources: ShaDow (Zeng et al., NeurIPS 2021), GraphSAINT (Zeng et al., ICLR 2020), Cluster-GCN (Chiang et al., KDD 2019). Rows on
other machines are requested in bulk, by all ranks in the same order, as for neighbors.

N nodes and E edges of the whole graph; all ids are in the order of the partitioned graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import override

from lightning_gnn.data.shards import Cut
from lightning_gnn.data.sources import MASKS
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.budget import check_metis
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.partition.metis import part_graph
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.hops import induced_subgraph
from lightning_gnn.strategies.sampling.loader import BatchMaker
from lightning_gnn.strategies.sampling.neighbors import bounds, inverse

Method = Literal["neighbor", "labor", "shadow", "saint_node", "saint_edge", "saint_walk", "cluster"]

METHODS = get_args(Method)
"""Names of samplers: neighborhoods of the seeds, the first two; ego graphs; nodes and all edges between them."""

Draw = Callable[[GraphStore, Tensor, Sequence[int]], Tensor]
"""Function that returns the nodes of a batch, distinct and ascending.

Its arguments are the store, the batch's seeds and the random seed of each rank.
"""

_STEP = 0x9E3779B97F4A7C15
"""Difference of the random seeds of a walk's steps: a walk that returns to a node draws a new step."""


class EgoBatchMaker(BatchMaker):
    """Maker of batches of ego graphs, one per seed, that share no nodes; see :class:`BatchMaker` for arguments."""

    @override
    def make(self, seeds: Tensor, random_seeds: list[int], peer_seeds: Mapping[int, Tensor] | None = None) -> Data:
        """Returns the batch in the format of PyG's ShaDowKHopSampler, but with labels of all nodes.

        It has all edges between the nodes drawn around a seed, one ego graph after the other. ``batch [n]`` is the ego graph of
        each node; ``ptr`` has their first nodes and the end; ``root_n_id`` has the rows of the seeds, for which masks are True.
        """
        node, kind = ONE_TYPE[0], ONE_TYPE
        out = self._trees([(node, seeds)], random_seeds, None, directed=False)
        assert out.batch is not None
        tree = out.batch[node]
        order = tree.argsort(stable=True)
        place = inverse(order)
        out.node, out.batch = {node: out.node[node][order]}, {node: tree[order]}
        out.row, out.col = ({kind: place[ends[kind]]} for ends in (out.row, out.col))
        batch = self._batch(out, self.store)
        batch.root_n_id = place[: len(seeds)]
        batch.ptr = bounds(torch.bincount(tree, minlength=len(seeds)))
        for name in MASKS:
            batch[name] = torch.zeros(len(order), dtype=torch.bool).index_fill_(0, batch.root_n_id, True)
        batch.input_id, batch.batch_size = self.store.cut.ids_of(node, seeds), len(seeds)
        return batch


class SubgraphBatchMaker(BatchMaker):
    """Maker of batches of some nodes and all edges between them.

    Args:
        draw: chooses the nodes.
        training: whether a node is a labeled training node, bool ``[N]``.
        stand_in: one of these, ``[1]``, for a batch without any: a mean over no nodes would be nan.
        store: see :class:`BatchMaker`.
    """

    own_masks = ("train_mask",)

    def __init__(self, draw: Draw, training: Tensor, stand_in: Tensor, store: GraphStore) -> None:
        super().__init__(store, {ONE_TYPE: [-1]})
        self._draw, self._training, self._stand_in = draw, training, stand_in

    @override
    def make(self, seeds: Tensor, random_seeds: list[int], peer_seeds: Mapping[int, Tensor] | None = None) -> Data:
        """Returns the batch in the format of PyG's GraphSAINT loaders and ClusterLoader, without norms.

        ``train_mask`` is True for labeled training nodes; other masks are the graph's. ``num_seeds`` counts the labeled training
        nodes, and is 0 if the placeholder is the only one.
        """
        nodes = self._draw(self.store, seeds, random_seeds)
        idle = not bool(self._training[nodes].any())
        if idle:
            nodes = torch.cat([nodes, self._stand_in])
        hop = self.store.hops(random_seeds, False)
        found = induced_subgraph({ONE_TYPE[0]: nodes}, [ONE_TYPE], hop, self._numberings)
        batch = self._batch(found, self.store)
        batch.train_mask = self._training[nodes]
        batch.num_seeds = 0 if idle else int(batch.train_mask.sum())
        return batch


def node_draw(
    cut: Cut, rank: int, method: str, batch_size: int, walk_length: int, clusters: int, seed: int
) -> tuple[Draw, int, int]:
    """Returns a sampler's function that draws nodes, its draws per epoch, and its draws per step; equal on all ranks.

    An epoch draws about as many nodes as the graph has. For the arguments see
    :class:`~lightning_gnn.strategies.sampling.strategy.SamplingStrategy`.
    """
    most = int(np.diff(cut.offsets).max())
    if method == "cluster":
        count = clusters * max(1, -(-most // batch_size))
        return cluster_draw(cut, rank, count, seed), count, clusters
    draw, nodes = saint_draw(cut, method, batch_size, walk_length)
    return draw, max(1, -(-most // nodes)), 1


def saint_draw(cut: Cut, method: str, count: int, walk_length: int) -> tuple[Draw, int]:
    """Returns a function that draws the nodes of GraphSAINT's batches (section 3.4), and their maximum number.

    Args:
        cut: the partitioned graph.
        method: kind of draws.

            - ``"saint_node"``: sources of edges drawn uniformly, so nodes with probabilities proportional to their degree.
            - ``"saint_edge"``: both ends of an in-edge of each of some uniform nodes. If edges go both ways, these are edges with
              probabilities proportional to the sum of the inverse degrees of their ends.
            - ``"saint_walk"``: walks to in-neighbors from uniform nodes.
        count: number of draws: nodes, edges or walks; duplicates are included once.
        walk_length: number of steps of a walk.
    """
    num_nodes, num_edges = len(cut.n_id), len(cut.e_id)
    if not num_edges:
        raise ValueError(f"sampler={method!r} does not support a graph without edges: it draws along edges.")

    def uniform(high: int, seed: int) -> Tensor:
        return torch.randint(high, (count,), generator=torch.Generator().manual_seed(seed))

    def nodes(store: GraphStore, seeds: Tensor, random_seeds: Sequence[int]) -> Tensor:
        return cut.ends(uniform(num_edges, random_seeds[store.rank]))[0].unique()

    def edges(store: GraphStore, seeds: Tensor, random_seeds: Sequence[int]) -> Tensor:
        targets = uniform(num_nodes, random_seeds[store.rank]).unique()
        found = store.hops(random_seeds, False)(ONE_TYPE, targets, 1)
        return torch.cat([found.sources, targets[found.counts > 0]]).unique()

    def walks(store: GraphStore, seeds: Tensor, random_seeds: Sequence[int]) -> Tensor:
        here = uniform(num_nodes, random_seeds[store.rank])
        walk, seen = torch.arange(count) * num_nodes, [here]
        for step in range(walk_length):
            steps = [(seed + step * _STEP) & (2**63 - 1) for seed in random_seeds]
            found = store.hops(steps, False)(ONE_TYPE, walk + here, 1)  # walks that meet have separate draws
            here = here.masked_scatter(found.counts > 0, found.sources)
            seen.append(here)
        return torch.cat(seen).unique()

    return {"saint_node": (nodes, count), "saint_edge": (edges, 2 * count), "saint_walk": (walks, (walk_length + 1) * count)}[
        method
    ]


def cluster_draw(cut: Cut, rank: int, num_clusters: int, seed: int) -> Draw:
    """Returns a function that draws Cluster-GCN's batches: clusters of a rank's local nodes, by METIS on the edges among them.

    A batch's seeds are ids of clusters. If a partition has fewer nodes than clusters, the last clusters are empty.
    """
    first, owned = int(cut.offsets[rank]), int(cut.offsets[rank + 1] - cut.offsets[rank])
    inside = np.asarray(cut.edge_index_of(rank))
    inside = inside[:, inside[0] < owned]
    if owned > num_clusters > 1:
        check_metis(inside, owned, num_clusters)
        part = torch.from_numpy(part_graph(Adjacency.of(inside, owned), num_clusters, seed)).long()
    else:
        part = torch.arange(owned) % num_clusters
    members = part.argsort(stable=True).split(torch.bincount(part, minlength=num_clusters).tolist())

    def clusters(store: GraphStore, seeds: Tensor, random_seeds: Sequence[int]) -> Tensor:
        return first + torch.cat([members[cluster] for cluster in seeds.tolist()]).sort().values

    return clusters
