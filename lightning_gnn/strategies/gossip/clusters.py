"""Mini-batches that are induced subgraphs of clusters.

Source: Cluster-GCN (Chiang et al., KDD 2019), section 3; GossipGCN (Zhang 2021), Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.data.ahead import Background, Copies, Sent
from lightning_gnn.data.shards import Cut
from lightning_gnn.data.sources import GraphData, full_graph_left_out
from lightning_gnn.partition.shard import Ids, owners_of
from lightning_gnn.strategies.gossip.worker import Worker


class Halo(NamedTuple):
    """Halo nodes of a batch, and the positions of its rows in a history.

    Attributes:
        x: features of the halo nodes, ``[H, F]``.
        local_ids, ids: relabeled ids of the batch's nodes, ``[N]``, and of the halo nodes, ascending, ``[H]``: numpy, which
            stays on the host.
    """

    x: Tensor
    local_ids: Ids
    ids: Ids


class Clusters:
    """Clusters of a graph that has one partition per cluster, and batches of them.

    The graph is memory-mapped: only the data of a batch is read.

    Args:
        cut: the partitioned graph.
        per_batch: number of clusters per batch.
        seed: random seed of the order of clusters.
        with_halo: whether batches have all edges that end in them. The clusters without training nodes are then divided between
            batches, since their rows are read.

    Attributes:
        trained: clusters with labeled training nodes; the others have no loss.
        batches: number of batches of an epoch; the last one may have fewer clusters.
    """

    def __init__(self, cut: Cut, per_batch: int, seed: int, with_halo: bool = False) -> None:
        self._cut, self._per_batch, self._seed, self.with_halo = cut, per_batch, seed, with_halo
        self.count = len(cut.halos)
        self.trained = np.array(self.find_clusters("train_mask"))
        self.batches = math.ceil(len(self.trained) / per_batch)
        self._unlabeled_clusters = np.setdiff1d(np.arange(self.count), self.trained) if with_halo else self.trained[:0]

    def draw_clusters(self, item: int) -> list[int]:
        """Returns the clusters of an item of the pool; each epoch has a separate order, the same on all workers."""
        epoch, batch = divmod(item, self.batches)
        random = np.random.default_rng((self._seed, epoch))
        order, others = random.permutation(self.trained), random.permutation(self._unlabeled_clusters)
        chosen = order[batch * self._per_batch : (batch + 1) * self._per_batch]
        return [*chosen.tolist(), *others[batch :: self.batches].tolist()]

    def draw_validation_clusters(self) -> list[int]:
        """Returns the clusters with validation nodes in a random order, the same on all workers.

        The first clusters, as used with ``limit_val_batches``, are then a sample of all, so that workers can be compared.
        """
        return np.random.default_rng(self._seed).permutation(self.find_clusters("val_mask")).tolist()

    def find_clusters(self, mask: str) -> list[int]:
        return np.flatnonzero(self._cut.mask_counts[mask]).tolist()

    def batch(self, clusters: Sequence[int]) -> Data:
        """Returns the subgraph induced by the nodes of some clusters; with a halo, it has all edges that end in them.

        ``x [N, F]``, ``edge_index [2, E]`` in local ids, halo nodes from N on, and all other attributes of nodes and edges.
        ``n_id [N]`` and ``e_id [E]`` are original ids, ``num_owned`` is N. With a halo, ``halo`` is a :class:`Halo`. Masks are
        the graph's.
        """
        cut, chosen = self._cut, np.asarray(clusters)
        low, high = cut.offsets[chosen], cut.offsets[chosen + 1]
        begin = np.full(self.count, -1)  # first local row of each chosen cluster
        begin[chosen] = np.cumsum(high - low) - (high - low)
        nodes = np.concatenate([np.arange(first, end) for first, end in zip(low, high)])
        halo = np.empty(0, np.int64)
        if self.with_halo:
            read = np.unique(np.concatenate([cut.halos[cluster] for cluster in chosen]))
            halo = read[begin[owners_of(cut.offsets, read)] < 0]
        columns, edges = [], []
        for cluster, first, end in zip(chosen, low, high):
            source, target = cut.edge_index_of(cluster)
            # Halo rows follow the cluster's own rows; halo rows of other chosen clusters are in the batch.
            rows = np.concatenate([np.arange(first, end), cut.halos[cluster]])
            owner = owners_of(cut.offsets, rows)
            outside = len(nodes) + np.searchsorted(halo, rows) if self.with_halo else -1
            local = np.where(begin[owner] < 0, outside, begin[owner] + rows - cut.offsets[owner])[source]
            inside = np.flatnonzero(local >= 0)
            columns.append(np.stack([local[inside], begin[cluster] + target[inside]]))
            edges.append(inside + cut.edge_offsets[cluster])
        edge_index = torch.from_numpy(np.concatenate(columns, 1))
        batch = GraphData(cut.kinds, full_graph_left_out(cut.left_out), edge_index=edge_index)
        rows_of = {"node": torch.from_numpy(nodes), "edge": torch.from_numpy(np.concatenate(edges))}
        for kind, ids in rows_of.items():
            for name, value in cut.attributes[kind].items():
                batch[name] = cut.in_batches(name, value[ids])
        for name, value in (*cut.attributes["graph"].items(), *cut.scalars.items()):
            batch[name] = value
        batch.n_id, batch.e_id = cut.n_id[rows_of["node"]], cut.e_id[rows_of["edge"]].long()
        batch.num_owned = len(nodes)
        if self.with_halo:
            batch.halo = Halo(cut.in_batches("x", cut.attributes["node"]["x"][torch.from_numpy(halo)]), nodes, halo)
        return batch


class ClusterBatches:
    """Loader of batches of one cluster each."""

    def __init__(self, clusters: Clusters, cluster_ids: Sequence[int]) -> None:
        self._clusters, self._cluster_ids = clusters, cluster_ids

    def __len__(self) -> int:
        return len(self._cluster_ids)

    def __iter__(self) -> Iterator[Data]:
        for cluster in self._cluster_ids:
            yield self._clusters.batch([cluster])


class PendingBatch(Data):
    """Placeholder for a batch that a thread makes."""


class LeftOver(Data):
    """Placeholder at the end of the last epoch for items that others may leave undone, which are not known before."""


class PooledBatches:
    """Loader of a worker's training batches: for each epoch, the batches that it took from the pool.

    It has no length, so Lightning requests one batch in advance to find the last of an epoch. A thread makes this batch, and
    copies it to `device`, during training on the previous one. If `device` is None, it is made when it is requested.

    Args:
        worker: this worker.
        clusters: clusters of the graph.
        epoch: function that returns the number of the requested epoch, and whether it is the last.
        device: device of the batches, or None.
    """

    def __init__(
        self, worker: Worker, clusters: Clusters, epoch: Callable[[], tuple[int, bool]], device: torch.device | None
    ) -> None:
        self._worker, self._clusters, self._epoch = worker, clusters, epoch
        self._copies = Copies(torch.device("cpu") if device is None else device)
        self._thread = None if device is None else Background("lightning_gnn clusters")
        self._pending: deque[Future[Sent]] = deque()
        self._open_items: list[int] = []
        self._batch_items: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Data]:
        epoch, last = self._epoch()
        self._batch_items.clear()
        self._pending.clear()
        # Items taken but not trained on: they belong to a later epoch, or the last epoch was ended early.
        waiting = deque(self._open_items)
        while (item := waiting.popleft() if waiting else self._worker.take()) is not None:
            if item not in self._open_items:
                self._open_items.append(item)
            if item // self._clusters.batches > epoch:
                return
            self._batch_items.append([item])
            if self._thread is None:
                yield self._make_batch(item)
            else:
                self._pending.append(self._thread.begin(partial(self._send_batch, item)))
                yield PendingBatch()
        if last and self._worker.size > 1:
            yield LeftOver()

    def _make_batch(self, item: int) -> Data:
        return self._clusters.batch(self._clusters.draw_clusters(item))

    def _send_batch(self, item: int) -> Sent:
        return self._copies.send(self._make_batch(item))

    def pop_batch(self) -> Data:
        """Returns the batch that was started first, on the device."""
        return self._copies.receive(self._pending.popleft().result())

    def first_epoch(self) -> int:
        """Returns the epoch of this worker's next batch, which it takes; the last epoch if none is left."""
        if not self._open_items and (item := self._worker.take()) is not None:
            self._open_items.append(item)
        end = self._worker.pool.end or 0  # without an end, there is always a batch
        return (self._open_items[0] if self._open_items else end - 1) // self._clusters.batches

    def left_over(self) -> Data | None:
        """Returns a batch of all clusters that no other worker will train on; None once all are done."""
        self._open_items += (items := self._worker.left_over())
        if not items:
            return None
        self._batch_items.append(items)
        return self._clusters.batch(sorted({cluster for item in items for cluster in self._clusters.draw_clusters(item)}))

    def finish_batch(self) -> None:
        """Mark the items of the first batch in use as done."""
        for item in self._batch_items.popleft():
            self._worker.mark_done(item)
            self._open_items.remove(item)

    def give_back(self) -> None:
        for item in self._open_items:
            self._worker.give_back(item)
        self._open_items.clear()

    def close(self) -> None:
        """Stop making batches in advance."""
        if self._thread is not None:
            self._thread.end()
            self._thread.join()
