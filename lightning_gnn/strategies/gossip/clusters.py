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
from lightning_gnn.data.sources import GraphData, of_full_graph
from lightning_gnn.partition.shard import Ids, owners_of
from lightning_gnn.strategies.gossip.worker import Worker


class Halo(NamedTuple):
    """What a batch knows of nodes that are not in it, but whose edges end in it, and where rows lie in a history.

    Attributes:
        x: their features, ``[H, F]``.
        own, ids: relabelled ids of the batch's nodes, ``[N]``, and of these, ascending, ``[H]``: numpy, which stays on the host.
    """

    x: Tensor
    own: Ids
    ids: Ids


class Clusters:
    """The clusters of a graph that is cut into one part per cluster, and batches of them. The graph is memory-mapped: only what a
    batch holds is read. `trained` are those that have labelled training nodes; of the others, nothing can be learnt. An epoch has
    so many `batches`, of which the last one may have fewer clusters. `with_halo`: batches have all edges that end in them, and
    the other clusters are dealt out to them, as their rows are read."""

    def __init__(self, cut: Cut, per_batch: int, seed: int, with_halo: bool = False) -> None:
        self._cut, self._per_batch, self._seed, self.with_halo = cut, per_batch, seed, with_halo
        self.count = len(cut.halos)
        self.trained = np.array(self.labelled("train_mask"))
        self.batches = math.ceil(len(self.trained) / per_batch)
        self._others = np.setdiff1d(np.arange(self.count), self.trained) if with_halo else self.trained[:0]

    def of_item(self, item: int) -> list[int]:
        """Returns the clusters of an item of the pool; each epoch has an order of its own, the same on all workers."""
        epoch, batch = divmod(item, self.batches)
        random = np.random.default_rng((self._seed, epoch))
        order, others = random.permutation(self.trained), random.permutation(self._others)
        chosen = order[batch * self._per_batch : (batch + 1) * self._per_batch]
        return [*chosen.tolist(), *others[batch :: self.batches].tolist()]

    def validated(self) -> list[int]:
        """Returns the clusters with validation nodes in an order drawn once, the same on all workers: the first of them, as of
        ``limit_val_batches``, are a sample of all, and workers that validate on these can be compared."""
        return np.random.default_rng(self._seed).permutation(self.labelled("val_mask")).tolist()

    def labelled(self, mask: str) -> list[int]:
        return np.flatnonzero(self._cut.mask_counts[mask]).tolist()

    def batch(self, clusters: Sequence[int]) -> Data:
        """Returns the subgraph that the nodes of some clusters induce, or with a halo all edges that end in them.

        ``x [N, F]``, ``edge_index [2, E]`` in local ids, those of halo nodes from N on, and all else that the graph has per node
        and edge; ``n_id [N]`` and ``e_id [E]``, original ids; ``num_owned``, N; with a halo ``halo``, a :class:`Halo`. The masks
        are those of the graph.
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
            # Halo rows lie behind the cluster's own; those of other chosen clusters are in the batch.
            rows = np.concatenate([np.arange(first, end), cut.halos[cluster]])
            owner = owners_of(cut.offsets, rows)
            outside = len(nodes) + np.searchsorted(halo, rows) if self.with_halo else -1
            local = np.where(begin[owner] < 0, outside, begin[owner] + rows - cut.offsets[owner])[source]
            inside = np.flatnonzero(local >= 0)
            columns.append(np.stack([local[inside], begin[cluster] + target[inside]]))
            edges.append(inside + cut.edge_offsets[cluster])
        edge_index = torch.from_numpy(np.concatenate(columns, 1))
        batch = GraphData(cut.kinds, of_full_graph(cut.left_out), edge_index=edge_index)
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
    """Batches of one cluster each."""

    def __init__(self, clusters: Clusters, chosen: Sequence[int]) -> None:
        self._clusters, self._chosen = clusters, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[Data]:
        for cluster in self._chosen:
            yield self._clusters.batch([cluster])


class Begun(Data):
    """Stands for a batch that a thread makes, until its turn comes."""


class LeftOver(Data):
    """Stands at the end of the last epoch for what others may leave undone, which is known only when its turn comes."""


class PooledBatches:
    """The training loader of a worker: of each epoch, the batches that it got.

    It has no length: Lightning then asks for one batch ahead, to know which is an epoch's last. That one is made by a thread, and
    copied to `device`, while the one before it is trained on; if `device` is None, it is made when it is asked for. `epoch`
    returns the number of the epoch that is asked for, and whether it is the last.
    """

    def __init__(
        self, worker: Worker, clusters: Clusters, epoch: Callable[[], tuple[int, bool]], device: torch.device | None
    ) -> None:
        self._worker, self._clusters, self._epoch = worker, clusters, epoch
        self._copies = Copies(torch.device("cpu") if device is None else device)
        self._thread = None if device is None else Background("lightning_gnn clusters")
        self._begun: deque[Future[Sent]] = deque()
        self._held: list[int] = []
        self._given: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Data]:
        epoch, last = self._epoch()
        self._given.clear()
        self._begun.clear()
        # Taken, and not trained on: they belong to a later epoch, or the last was left early.
        waiting = deque(self._held)
        while (item := waiting.popleft() if waiting else self._worker.take()) is not None:
            if item not in self._held:
                self._held.append(item)
            if item // self._clusters.batches > epoch:
                return
            self._given.append([item])
            if self._thread is None:
                yield self._of_item(item)
            else:
                self._begun.append(self._thread.begin(partial(self._sent, item)))
                yield Begun()
        if last and self._worker.size > 1:
            yield LeftOver()

    def _of_item(self, item: int) -> Data:
        return self._clusters.batch(self._clusters.of_item(item))

    def _sent(self, item: int) -> Sent:
        return self._copies.send(self._of_item(item))

    def arrived(self) -> Data:
        """Returns the batch that was begun first, on the device."""
        return self._copies.arrived(self._begun.popleft().result())

    def first_epoch(self) -> int:
        """Returns the epoch of the batch that this worker comes to first; the last one if none is left. It takes that batch."""
        if not self._held and (item := self._worker.take()) is not None:
            self._held.append(item)
        end = self._worker.pool.end or 0  # without an end, there is a batch
        return (self._held[0] if self._held else end - 1) // self._clusters.batches

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

    def close(self) -> None:
        """Makes no more batches ahead."""
        if self._thread is not None:
            self._thread.end()
            self._thread.join()
