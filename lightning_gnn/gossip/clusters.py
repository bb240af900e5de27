"""Mini-batches that are induced subgraphs of clusters.

Source: Cluster-GCN (Chiang et al., KDD 2019), section 3; GossipGCN (Zhang 2021), Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch_geometric.data import Data

from lightning_gnn.data.attributes import GraphData, of_full_graph
from lightning_gnn.data.shards import Cut


class Clusters:
    """The clusters of a graph, and batches of them.

    Args:
        cut: the graph, cut into one part per cluster; memory-mapped, only what a batch holds is read.
        per_batch: clusters of a batch.
        seed: of the order of clusters.

    Attributes:
        count: how many clusters there are.
        trained: those that have labelled training nodes; of the others, nothing can be learnt.
        batches: how many batches an epoch has; the last one may have fewer clusters.
    """

    def __init__(self, cut: Cut, per_batch: int, seed: int) -> None:
        self._cut, self._per_batch, self._seed = cut, per_batch, seed
        self.count = len(cut.halos)
        self.trained = np.array(self.labelled("train_mask"))
        self.batches = math.ceil(len(self.trained) / per_batch)

    def of_item(self, item: int) -> list[int]:
        """Returns the clusters of an item of the pool; each epoch has an order of its own, the same on all workers."""
        epoch, batch = divmod(item, self.batches)
        order = np.random.default_rng((self._seed, epoch)).permutation(self.trained)
        return order[batch * self._per_batch : (batch + 1) * self._per_batch].tolist()

    def labelled(self, mask: str) -> list[int]:
        """Returns the clusters that have labelled nodes in a mask."""
        return np.flatnonzero(self._cut.mask_counts[mask]).tolist()

    def batch(self, clusters: Sequence[int]) -> Data:
        """Returns the subgraph that the nodes of some clusters induce.

        ``x [N, F]``, ``edge_index [2, E]`` in local ids, and all else that the graph has per node and edge; ``n_id [N]`` and
        ``e_id [E]``, original ids; ``num_owned``, N. The masks are those of the graph.
        """
        cut, chosen = self._cut, np.asarray(clusters)
        low, high = cut.offsets[chosen], cut.offsets[chosen + 1]
        begin = np.full(self.count, -1)  # first local row of each chosen cluster
        begin[chosen] = np.cumsum(high - low) - (high - low)
        nodes = np.concatenate([np.arange(first, end) for first, end in zip(low, high)])
        columns, edges = [], []
        for cluster, first, end in zip(chosen, low, high):
            source, target = cut.edge_index_of(cluster)
            # Halo rows lie behind the cluster's own; those of other chosen clusters are in the batch.
            rows = np.arange(begin[cluster], begin[cluster] + end - first)
            halo = cut.halos[cluster]
            owner = np.searchsorted(cut.offsets, halo, side="right") - 1
            rows = np.concatenate([rows, np.where(begin[owner] < 0, -1, begin[owner] + halo - cut.offsets[owner])])
            local = rows[source]
            inside = np.flatnonzero(local >= 0)
            columns.append(np.stack([local[inside], begin[cluster] + target[inside]]))
            edges.append(inside + cut.edge_offsets[cluster])
        edge_index = torch.from_numpy(np.concatenate(columns, 1))
        batch = GraphData(cut.kinds, of_full_graph(cut.left_out), edge_index=edge_index)
        rows_of = {"node": torch.from_numpy(nodes), "edge": torch.from_numpy(np.concatenate(edges))}
        for kind, ids in rows_of.items():
            for name, value in cut.attributes[kind].items():
                batch[name] = value[ids]
        for name, value in (*cut.attributes["graph"].items(), *cut.scalars.items()):
            batch[name] = value
        batch.n_id, batch.e_id = cut.n_id[rows_of["node"]], cut.e_id[rows_of["edge"]]
        batch.num_owned = len(nodes)
        return batch
