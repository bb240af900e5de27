"""Mini-batches of one rank, made ahead of training in the background.

Source: DistDGL section III-D: sampling and fetching of later batches overlap training of this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import SamplerOutput
from typing_extensions import override

from lightning_gnn.comm.graph_store import GraphStore
from lightning_gnn.datamodules.sources import MASKS
from lightning_gnn.sampling.draws import draw_others
from lightning_gnn.sampling.hops import sample_hops
from lightning_gnn.sampling.numbering import Numbering
from lightning_gnn.sampling.sampler import ONE_TYPE, one_type_fanouts, output_of_one_type
from lightning_gnn.sampling.seeds import SeedBatches


class BatchMaker:
    """Makes a batch of seeds: samples, and fetches what its nodes and edges have.

    Args:
        store: the graph.
        n_id, e_id: original ids of nodes and edges.
        fanouts: per hop, the in-edges drawn of each node; -1 for all.
        replace, directed: see :class:`~lightning_gnn.sampling.NeighborSampler`.
    """

    def __init__(
        self,
        store: GraphStore,
        n_id: Tensor,
        e_id: Tensor,
        fanouts: list[int],
        replace: bool = False,
        directed: bool = True,
    ) -> None:
        self.store, self._n_id, self._e_id = store, n_id, e_id
        self._fanouts = one_type_fanouts(fanouts)
        self._replace, self._directed = replace, directed
        self._numbering = Numbering(len(n_id))

    def make(self, seeds: Tensor, random_seeds: list[int]) -> Data:
        """Returns the batch, as PyG's NeighborLoader gives it, with masks that are true for seeds only.

        Args:
            seeds: ids in the partitioned graph.
            random_seeds: of each rank's batch.
        """
        batch = self._batch(self._sample(seeds, random_seeds))
        for name in MASKS:
            batch[name] = torch.arange(len(batch.n_id)) < len(seeds)
        batch.input_id, batch.batch_size = batch.n_id[: len(seeds)], len(seeds)
        return batch

    def _sample(self, nodes: Tensor, random_seeds: list[int]) -> SamplerOutput:
        """Returns the sampled neighbourhood of distinct nodes, which come first."""
        hop = self.store.hops(random_seeds, self._replace)
        node = ONE_TYPE[0]
        return output_of_one_type(
            sample_hops({node: nodes}, self._fanouts, hop, {node: self._numbering}, self._directed)
        )

    def _batch(self, out: SamplerOutput) -> Data:
        """Returns a neighbourhood with what its nodes and edges have."""
        batch = Data(edge_index=torch.stack([out.row, out.col]))
        for name in self.store.node_names:
            batch[name] = self.store.nodes(name, out.node)
        for name in self.store.edge_names:
            batch[name] = self.store.edges(name, out.edge)
        batch.n_id, batch.e_id = self._n_id[out.node], self._e_id[out.edge]
        batch.num_sampled_nodes, batch.num_sampled_edges = out.num_sampled_nodes, out.num_sampled_edges
        return batch


class EdgeBatchMaker(BatchMaker):
    """Makes a batch of edges, whose ends are the seeds of the neighbourhood.

    Edges of the batch carry no messages in it, in either direction, nor do others between the same nodes: they would tell what
    is to be learnt.

    Args:
        ends: returns sources and targets of edges, ``[2, n]``, for their ids ``[n]``, all in the partitioned graph.
        num_negatives: pairs for each edge whose target is drawn from all other nodes.
        *args, **options: see :class:`BatchMaker`.
    """

    def __init__(self, ends: Callable[[Tensor], Tensor], num_negatives: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ends, self._num_negatives = ends, num_negatives

    @override
    def make(self, seeds: Tensor, random_seeds: list[int]) -> Data:
        """Returns the batch, as PyG's LinkNeighborLoader gives it.

        ``edge_label_index [2, n + n K]`` has the edges in local numbers and then K negatives of the first, K of the second and so
        on; ``edge_label`` is 1 or 0; ``input_id`` has the edges' original ids; ``edge_label_type [n]`` their types, if the graph
        has ``edge_type``.

        Args:
            seeds: ids of edges in the partitioned graph.
            random_seeds: of each rank's batch.
        """
        source, target = self._ends(seeds)
        rank, num_nodes = self.store.rank, len(self._n_id)
        others = draw_others(seeds, target, self._num_negatives, num_nodes, random_seeds[rank])
        pairs = torch.stack(
            [
                torch.cat([source, source.repeat_interleave(self._num_negatives)]),
                torch.cat([target, others.view(-1)]),
            ]
        )
        nodes, local = pairs.unique(return_inverse=True)
        batch = self._batch(_without_pairs(self._sample(nodes, random_seeds), local[:, : len(seeds)]))
        batch.edge_label_index = local
        batch.edge_label = (torch.arange(local.size(1)) < len(seeds)).float()
        batch.input_id = self._e_id[seeds]
        if "edge_type" in self.store.edge_names:
            batch.edge_label_type = self.store.edges("edge_type", seeds)
        return batch


def _without_pairs(out: SamplerOutput, pairs: Tensor) -> SamplerOutput:
    """Returns a neighbourhood without the edges between some pairs of nodes, in local numbers ``[2, n]``, in either direction."""
    num = len(out.node)
    source, target = pairs
    assert out.edge is not None
    kept = ~torch.isin(out.row * num + out.col, torch.cat([source * num + target, target * num + source]))
    if out.num_sampled_edges is not None:
        out.num_sampled_edges = [int(hop.sum()) for hop in kept.split(out.num_sampled_edges)]
    out.row, out.col, out.edge = out.row[kept], out.col[kept], out.edge[kept]
    return out


class SampledBatches:
    """The training loader of a rank: an epoch's batches, some of them ahead.

    Ranks on several machines answer each other while they make batches, so all make as many: when training stops early, those
    that were begun are made to the end. Of several samplers (DistDGL, section III-D), each takes the same steps on all ranks and
    asks on channels of its own, so that none waits for another.

    Args:
        makers: make them, one per sampler; what a batch is does not depend on which.
        batches: which seeds each has.
        seeds: of this rank, nodes or edges.
        stand_in: a seed for batches in which this rank has none: a mean over nothing would be nan.
        rank: this one.
        seed: of all random numbers.
        ahead: batches that are made ahead; 0 makes each when it is asked for.
        epoch: returns the number of the epoch whose batches are asked for.

    Attributes:
        waited: seconds spent in waiting for batches, since :meth:`take_seconds`.
    """

    def __init__(
        self,
        makers: Sequence[BatchMaker],
        batches: SeedBatches,
        seeds: Tensor,
        stand_in: Tensor,
        rank: int,
        seed: int,
        ahead: int,
        epoch: Callable[[], int],
    ) -> None:
        self.makers, self.batches = makers, batches
        self._seeds, self._stand_in, self._rank = seeds, stand_in, rank
        self._seed, self._ahead, self._epoch = seed, ahead, epoch
        self.waited = 0.0
        self._seconds = [0.0] * len(makers)
        self._running: Generator[Data, None, None] | None = None

    def __len__(self) -> int:
        return self.batches.steps

    def __iter__(self) -> Iterator[Data]:
        self.close()
        epoch = self._epoch()
        own = self.batches.of_epoch(self._seeds, self._rank, _mixed(self._seed, epoch, self._rank))

        def make(step: int, sampler: int) -> Data:
            began = time.perf_counter()
            try:
                return self._made(epoch, step, own[step], self.makers[sampler])
            finally:
                self._seconds[sampler] += time.perf_counter() - began

        if self._ahead:
            self._running = _ahead_of(make, len(self), self._ahead, len(self.makers), self._count_wait)
        else:
            self._running = (make(step, 0) for step in range(len(self)))
        return self._running

    def close(self) -> None:
        """Ends an epoch that was left early, once the batches that were begun are made: other ranks may wait for them."""
        if self._running is not None:
            self._running.close()
        self._running = None

    def _made(self, epoch: int, step: int, seeds: Tensor, maker: BatchMaker) -> Data:
        counts = self.batches.counts(step)
        random_seeds = [_mixed(self._seed, epoch, rank, step) for rank in range(len(counts))]
        batch = maker.make(seeds if len(seeds) else self._stand_in, random_seeds)
        if "num_seeds" not in batch:  # else what other ranks have is not known before they have made theirs
            batch.seed_counts = counts
        return batch

    def _count_wait(self, seconds: float) -> None:
        self.waited += seconds

    def take_seconds(self) -> tuple[float, float]:
        """Returns the seconds that samplers, added up, made batches and training waited for them, since the last call."""
        seconds = sum(self._seconds)
        taken = seconds, self.waited if self._ahead else seconds
        self._seconds, self.waited = [0.0] * len(self.makers), 0.0
        return taken


def _ahead_of(
    make: Callable[[int, int], Data], steps: int, ahead: int, samplers: int, waited: Callable[[float], None]
) -> Generator[Data, None, None]:
    """Yields ``make(step, sampler)`` of all steps in order, made in threads that are `ahead` of who takes them, never more.

    Step after step goes to the samplers in turn, so that each makes the same ones on all ranks, in the same order.
    """
    ready, asked = [Queue[Any]() for _ in range(samplers)], [Queue[int | None]() for _ in range(samplers)]

    def run(sampler: int) -> None:
        while (step := asked[sampler].get()) is not None:
            try:
                ready[sampler].put(make(step, sampler))
            except BaseException as error:
                ready[sampler].put(error)
                return

    threads = [
        Thread(target=run, args=(sampler,), name=f"lightning_gnn sampler {sampler}", daemon=True)
        for sampler in range(samplers)
    ]
    for thread in threads:
        thread.start()
    for step in range(min(ahead, steps)):
        asked[step % samplers].put(step)
    try:
        for step in range(steps):
            began = time.perf_counter()
            batch = ready[step % samplers].get()
            waited(time.perf_counter() - began)
            if isinstance(batch, BaseException):
                raise batch
            if step + ahead < steps:
                asked[(step + ahead) % samplers].put(step + ahead)
            yield batch
    finally:
        for each in asked:
            each.put(None)
        for thread in threads:
            thread.join()


def _mixed(*numbers: int) -> int:
    """Returns one random number that depends on all of these."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
