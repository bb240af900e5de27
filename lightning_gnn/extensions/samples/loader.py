"""Loader of batches of samples on a rank's part of the graph.

B samples in a batch, N local nodes of the rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_gnn.data.shards import Shard
from lightning_gnn.data.sources import MASKS, GraphData, kinds_of, left_out_of
from lightning_gnn.datamodules.graph import GraphLoader
from lightning_gnn.extensions.samples.copies import Copies
from lightning_gnn.extensions.samples.formats import SampleFormat, digest_of
from lightning_gnn.extensions.samples.node_sets import TypedSampleBatch, local_sizes, names_of_graph, typed_batch
from lightning_gnn.extensions.samples.order import GlobalOrder, RankBatch


@dataclass(frozen=True)
class SampleInfo:
    """Samples of a batch.

    Attributes:
        indices: dataset indices of this data rank's samples, in the order of the batch.
        positions: positions of these samples in the global batch, int64 ``[B]``, on the CPU.
        total: number of samples of the global batch, over all data ranks.
        node_dims: dimension of the nodes in each tensor of the batch, from the left; None for one value per sample.
        is_compared: whether ranks compare the samples of this batch.
        digests: checksums of the whole samples if ranks compare them; 0 for the samples of a folder.
        is_static: whether each such batch has the same tensors.
    """

    indices: list[int]
    positions: Tensor
    total: int
    node_dims: Mapping[str, int | None]
    is_compared: bool = False
    digests: Sequence[int] = ()
    is_static: bool = False


class SampleBatch(GraphData):
    """Batch of samples on a rank's part of the graph."""

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of nodes; PyG returns the first dimension of the first node attribute, which may be samples in ``x``."""
        return len(self.n_id)

    @property
    def sample_tensors(self) -> Iterator[tuple[Tensor, None, int | None]]:
        """Tensors of the samples, without a node type, and the dimension of their nodes; None for one value per sample."""
        return ((self[name], None, dim) for name, dim in self.sample_info.node_dims.items())

    @property
    def total_size(self) -> int:
        """Number of samples of the global batch."""
        return int(self.sample_info.total)

    @property
    def num_graphs(self) -> int:
        """Number of samples of the global batch, which ``batch.batch`` numbers, as in batches of PyG."""
        return self.total_size


class _Items(Dataset[Any]):
    """Items of a dataset by epoch and index, with a rank's rows; random states in an item depend only on its key and the seed."""

    def __init__(self, samples: Any, form: SampleFormat, rows: Mapping[str, np.ndarray] | None, seed: int) -> None:
        self._samples, self._form, self._rows, self._seed = samples, form, rows, seed

    def __getitem__(self, key: tuple[int, int, bool]) -> tuple[dict[str, Tensor], int]:
        epoch, index, is_compared = key
        item = read_item(self._samples, self._seed, epoch, index)
        digest = digest_of(item) if is_compared and self._rows is not None else 0
        return self._form.local_rows(index, item, self._rows), digest


def read_item(samples: Any, seed: int, epoch: int, index: int) -> Any:
    """Returns an item of a dataset; random states are seeded by these numbers, and restored afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002 (what users draw from)
    [number] = np.random.SeedSequence((seed, epoch, index)).generate_state(1, np.uint32).tolist()
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.default_generator.manual_seed(number)  # not torch.manual_seed, which also seeds GPUs
    try:
        return samples[index]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])


class _Keys:
    """Batch sampler: keys of a data rank's items.

    Attributes:
        epoch, first: epoch, and first batch of the next iteration.
    """

    def __init__(self, order: GlobalOrder, data_rank: int) -> None:
        self._order, self._data_rank = order, data_rank
        self.epoch = self.first = 0

    def __len__(self) -> int:
        return len(self._order)

    def is_compared(self, number: int) -> bool:
        """Returns whether ranks compare the samples of a batch."""
        return self.epoch == 0 or number % 100 == 0

    def __iter__(self) -> Iterator[list[tuple[int, int, bool]]]:
        epoch, batches = self.epoch, self._order.batches(self.epoch, self._data_rank, self.first)
        for number, batch in enumerate(batches, self.first):
            yield [(epoch, index, self.is_compared(number)) for index in batch.indices]


def taken_names(shard: Shard) -> set[str]:
    """Returns the names of the graph's attributes in batches."""
    return names_of_graph(shard) if shard.types.is_hetero else {*graph_values(shard)}


def graph_values(shard: Shard) -> dict[str, Any]:
    """Returns the attributes of the graph in batches: without features and masks that the user's graph does not have."""
    absent = [name for name in MASKS if not sum(shard.mask_counts[name])] + ["x"] * (shard.batch.x.size(1) == 0)
    return {name: value for name, value in shard.batch.to_dict().items() if name not in absent}


def _concatenate(values: Tensor, dim: int | None) -> Tensor:
    """Returns samples ``[B, ...]`` concatenated along the dimension of their nodes; unchanged without nodes."""
    return values if dim is None else values.movedim(0, dim).flatten(dim, dim + 1)


def make_batch(
    shard: Shard,
    form: SampleFormat,
    tensors: Mapping[str, Tensor],
    rank_batch: RankBatch,
    copies: Copies | None = None,
    *compared: Any,
) -> SampleBatch | TypedSampleBatch:
    """Returns a batch of samples on a rank's part of the graph.

    Args:
        shard: rank's part of the graph.
        form: format of the samples.
        tensors: tensors ``[B, ...]`` of the samples by name, with the rows of the rank's nodes.
        rank_batch: samples of the data rank.
        copies: copies of the graph if samples are concatenated; None otherwise.
        *compared: last fields of :class:`SampleInfo`.
    """
    node_dims = form.node_dims
    if shard.types.is_hetero:
        return typed_batch(shard, tensors, SampleInfo(*rank_batch, node_dims, *compared))
    if copies is not None:
        shard = copies[rank_batch.total]
        node_dims = {name: each.node_dim for name, each in form.tensors.items()}
        tensors = {name: _concatenate(value, node_dims[name]) for name, value in tensors.items()}
    batch = SampleBatch(kinds_of(shard.batch), left_out_of(shard.batch))
    # First the tensor from which Lightning infers the batch size on one device: samples, or the nodes of all copies.
    first = tensors if copies is None else {"batch": shard.batch.batch, **tensors}
    for name, value in {**first, **graph_values(shard)}.items():
        batch[name] = value
    batch.sample_info = SampleInfo(*rank_batch, node_dims, *compared)
    return batch


class SampleLoader(GraphLoader):
    """Loader of a data rank's batches: the rank's part of the graph with the stacked tensors of samples.

    Args:
        samples: map-style dataset.
        form: format of its items.
        shard: rank's part of the graph.
        order: order of the samples.
        data_rank: number of this data rank.
        epoch: function that returns the current epoch.
        seed: seed of random states in items.
        rows: original ids of the rank's nodes by type, int64 ``[N]``; None if items contain only these, in this order.
        copies: copies of the graph if samples are concatenated as in PyG's batches; None otherwise.
        place: function that is called with each batch, and returns it.
        num_workers, persistent_workers, prefetch_factor: arguments of ``torch.utils.data.DataLoader``.
    """

    def __init__(
        self,
        samples: Any,
        form: SampleFormat,
        shard: Shard,
        order: GlobalOrder,
        data_rank: int = 0,
        epoch: Callable[[], int] = lambda: 0,
        seed: int = 0,
        rows: Mapping[str, np.ndarray] | None = None,
        copies: Copies | None = None,
        place: Callable[[Any], Any] = lambda batch: batch,
        num_workers: int = 0,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        self.order, self.data_rank, self.data_ranks = order, data_rank, order.data_ranks
        self._shard, self._epoch, self._copies, self._place = shard, epoch, copies, place
        self._form = form.resize(local_sizes(shard))
        self._keys = _Keys(order, data_rank)
        self._position, self._resumed = (0, 0), (-1, 0, 0)
        self._loader: DataLoader[Any] = DataLoader(
            _Items(samples, form, rows, seed),
            batch_sampler=self._keys,  # type: ignore[arg-type]
            collate_fn=self._collate,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            generator=torch.Generator(),  # an iteration draws a seed, by default from the global generator
        )

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in place of the current epoch of the Trainer."""
        self._epoch = lambda: epoch

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch, the number of batches that have been read in it, and the number of samples of a global batch."""
        return {**dict(zip(("epoch", "batches"), self._position)), "samples": self.order.global_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Skip the batches that have been read, without loading them, if the next iteration is in the same epoch."""
        self._resumed = state["epoch"], state["batches"], state["samples"]

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch()
        (of, read, size), self._resumed = self._resumed, (-1, 0, 0)
        first = read if of == epoch else 0
        if first and size != self.order.global_size:
            raise ValueError(
                f"Within an epoch, a run must continue with the same number of samples per global batch, got "
                f"{self.order.global_size}, and the checkpoint has {size}. Set global_batch_size={size}, or continue from a "
                "checkpoint at the end of an epoch."
            )
        first = first if first < len(self) else 0
        self._position, self._keys.epoch, self._keys.first = (epoch, first), epoch, first
        batches = self.order.batches(epoch, self.data_rank, first)
        for number, ((tensors, digests), rank_batch) in enumerate(zip(self._loader, batches), first):
            self._position = epoch, number + 1
            compared = self._keys.is_compared(number), digests
            yield self._place(make_batch(self._shard, self._form, tensors, rank_batch, self._copies, *compared))

    def _collate(self, items: Sequence[tuple[dict[str, Tensor], int]]) -> tuple[dict[str, Tensor], list[int]]:
        return self._form.stack([tensors for tensors, _ in items]), [digest for _, digest in items]
