"""Mini-batches that are induced subgraphs of clusters.

Source: Cluster-GCN (Chiang et al., KDD 2019), section 3; GossipGCN (Zhang 2021), Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch_geometric.data import Data

from lightning_gnn.data.attributes import GraphData, of_full_graph
from lightning_gnn.data.shards import Cut
from lightning_gnn.gossip.worker import Worker


class Clusters:
    """The clusters of a graph that is cut into one part per cluster, and batches of them. The graph is memory-mapped: only what a
    batch holds is read. `trained` are those that have labelled training nodes; of the others, nothing can be learnt. An epoch has
    so many `batches`, of which the last one may have fewer clusters."""

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

    def validated(self) -> list[int]:
        """Returns the clusters with validation nodes in an order drawn once, the same on all workers: the first of them, as of
        ``limit_val_batches``, are a sample of all, and workers that validate on these can be compared."""
        return np.random.default_rng(self._seed).permutation(self.labelled("val_mask")).tolist()

    def labelled(self, mask: str) -> list[int]:
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
            rows = np.concatenate([np.arange(first, end), cut.halos[cluster]])
            owner = np.searchsorted(cut.offsets, rows, side="right") - 1
            local = np.where(begin[owner] < 0, -1, begin[owner] + rows - cut.offsets[owner])[source]
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


class ClusterBatches:
    """Batches of one cluster each."""

    def __init__(self, clusters: Clusters, chosen: Sequence[int]) -> None:
        self._clusters, self._chosen = clusters, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[Data]:
        for cluster in self._chosen:
            yield self._clusters.batch([cluster])


class LeftOver(Data):
    """Stands at the end of the last epoch for what others may leave undone, which is known only when its turn comes."""


class PooledBatches:
    """The training loader of a worker: of each epoch, the batches that it got.

    It has no length: Lightning then asks for one batch ahead, to know which is an epoch's last. `epoch` returns the number of the
    epoch that is asked for, and whether it is the last.
    """

    def __init__(self, worker: Worker, clusters: Clusters, epoch: Callable[[], tuple[int, bool]]) -> None:
        self._worker, self._clusters, self._epoch = worker, clusters, epoch
        self._held: list[int] = []
        self._given: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Data]:
        epoch, last = self._epoch()
        self._given.clear()
        # Taken, and not trained on: they belong to a later epoch, or the last was left early.
        waiting = deque(self._held)
        while (item := waiting.popleft() if waiting else self._worker.take()) is not None:
            if item not in self._held:
                self._held.append(item)
            if item // self._clusters.batches > epoch:
                return
            self._given.append([item])
            yield self._clusters.batch(self._clusters.of_item(item))
        if last and self._worker.size > 1:
            yield LeftOver()

    def left_over(self) -> Data | None:
        """Returns a batch of all clusters that nobody will do else; None once all is done."""
        self._held += (items := self._worker.left_over())
        if not items:
            return None
        self._given.append(items)
        return self._clusters.batch(sorted({cluster for item in items for cluster in self._clusters.of_item(item)}))

    def trained(self) -> None:
        """Says that the batch that was given first is done."""
        for item in self._given.popleft():
            self._worker.done(item)
            self._held.remove(item)

    def give_back(self) -> None:
        for item in self._held:
            self._worker.give_back(item)
        self._held.clear()
