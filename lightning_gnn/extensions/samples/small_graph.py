"""Small random graphs with samples, for checks and predictions of memory: see :mod:`lightning_gnn.checks.small_graph`.

B samples, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import override

from lightning_gnn.checks.small_graph import Form, SmallGraph, small_graph, values_of_rows
from lightning_gnn.data.shards import CutInfo, Graph, Shard
from lightning_gnn.data.sources import GraphData, kinds_of, left_out_of
from lightning_gnn.extensions.samples.data import check_shard
from lightning_gnn.extensions.samples.formats import ALL_NODES, SampleFormat
from lightning_gnn.extensions.samples.loader import SampleBatch, SampleInfo, graph_values
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.registry import feature

_DATASETS = {"fit": "samples", "validate": "val_samples", "test": "test_samples", "predict": "predict_samples"}
"""Argument with the samples of a stage."""

_PREFIX = "of samples: "
"""Begin of the names of samples' tensors in a small graph, which may equal names of the graph's tensors."""

COUNT = 3
"""Number of samples of the self-check."""


@dataclass(frozen=True)
class SampleShard(Shard):
    """Shard whose steps receive samples.

    Attributes:
        tensors: tensors ``[B, ...]`` of the samples by name, with the rows of the rank's nodes.
        node_dims: dimension of the nodes in each tensor ``[B, ...]`` of the samples by name; None for one value per sample.
        count: B.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    node_dims: Mapping[str, int | None] | None = None
    count: int = 0
    rows_type = property(lambda self: feature("SampleRows"))

    @classmethod
    def of(cls, shard: Shard, **samples: Any) -> SampleShard:
        """Returns a shard with samples, given its own attributes."""
        return cls(**{each.name: getattr(shard, each.name) for each in fields(Shard)}, **samples)

    @override
    def step_batch(self) -> SampleBatch:
        batch = SampleBatch(kinds_of(self.batch), left_out_of(self.batch))
        for name, value in (*graph_values(self).items(), *self.tensors.items()):
            batch[name] = value
        indices = list(range(self.count))
        batch.sample_info = SampleInfo(indices, torch.tensor(indices), self.count, dict(self.node_dims or {}))
        return batch


@dataclass(frozen=True)
class SampleGraph(SmallGraph):
    """Graph with samples, whose tensors ``[B, ...]`` are attributes of the graph."""

    node_dims: Mapping[str, int | None] | None = None
    count: int = 0

    @override
    def whole(self, graph: Graph) -> Shard:
        return self._with_samples(super().whole(graph))

    @override
    def shards(self, graph: Graph, layout: LayoutSpec) -> list[Shard]:
        return [self._with_samples(shard) for shard in super().shards(graph, layout)]

    def _with_samples(self, shard: Shard) -> Shard:
        """Returns a shard with the samples' rows of its nodes."""
        rows = np.split(shard.n_id.numpy(), shard.offsets[1:-1])[shard.rank]
        tensors = {}
        for name, dim in (self.node_dims or {}).items():
            value = shard.batch[_PREFIX + name]
            del shard.batch[_PREFIX + name]
            tensors[name] = value.clone() if dim is None else value.index_select(dim, torch.from_numpy(rows))
        return SampleShard.of(shard, tensors=tensors, node_dims=self.node_dims, count=self.count)


def with_samples(small: SmallGraph, tensors: Mapping[str, Tensor], form: SampleFormat) -> SampleGraph:
    """Returns a graph with samples.

    Args:
        small: graph without samples.
        tensors: tensors ``[B, ...]`` of the samples by name.
        form: format of the samples.
    """
    graph: Any = small.graph
    kinds = {**kinds_of(graph), **dict.fromkeys((_PREFIX + name for name in tensors), "graph")}
    values = {**graph.to_dict(), **{_PREFIX + name: value for name, value in tensors.items()}}
    joined = GraphData(kinds, left_out_of(graph), **values)  # type: ignore[arg-type]
    count = len(next(iter(tensors.values())))
    return SampleGraph(joined, small.part, small.holders, small.options, form.node_dims, count)


def first_samples(data: Any, num_nodes: int, num_edges: int) -> dict[str, tuple[dict[str, Tensor], SampleFormat]]:
    """Returns tensors ``[B, ...]`` of the first samples by stage, and their format.

    Args:
        data: :class:`~lightning_gnn.GraphDataModule` with samples.
        num_nodes, num_edges: size of its graph.
    """
    found = {}
    for stage, name in _DATASETS.items():
        if name in data.sample_data.sizes:
            items, form = data.sample_data.first(name, data.seed, num_nodes, num_edges, COUNT)
            found[stage] = form.stack([form.local_rows(index, item, None) for index, item in enumerate(items)]), form
    return found


def select_nodes(tensors: Mapping[str, Tensor], form: SampleFormat, nodes: Tensor) -> tuple[dict[str, Tensor], SampleFormat]:
    """Returns samples of some nodes, given the ids of the nodes, and their format."""
    rows = {
        name: tensors[name] if dim is None else tensors[name].index_select(dim, nodes) for name, dim in form.node_dims.items()
    }
    return rows, form.resize({ALL_NODES: len(nodes)})


def sample_shards(data: Any, shards: Sequence[Shard], data_ranks: int) -> list[Shard]:
    """Returns the shards of a graph whose steps receive the first training samples of a datamodule, as many as in a batch."""
    samples, of = data.sample_data, shards[0]
    check_shard(of)
    count = samples.samples_per_rank(data.batch_size, data_ranks)
    items, form = samples.first("samples", data.seed, len(of.n_id), len(of.e_id), count)
    found: list[Shard] = []
    for shard, rows in zip(shards, np.split(of.n_id.numpy(), of.offsets[1:-1])):
        tensors = form.stack([form.local_rows(index, item, {ALL_NODES: rows}) for index, item in enumerate(items)])
        found.append(SampleShard.of(shard, tensors=tensors, node_dims=form.node_dims, count=len(items)))
    return found


def random_samples(
    batch: Data,
    masks: Collection[str],
    form: Form,
    seed: int = 0,
    num_classes: int = 0,
    *,
    item: Mapping[str, Tensor],
    sample_form: SampleFormat,
    count: int,
) -> SampleGraph:
    """Returns a small graph as :func:`~lightning_gnn.checks.small_graph.small_graph` does, with samples.

    Values of a node in a sample are the values of a random node in the given sample.

    Args:
        item: tensors of the given sample by name.
        sample_form: its format.
        count: number of samples.
    """
    small, g = small_graph(batch, masks, form, seed, num_classes), torch.Generator().manual_seed(seed)
    size, tensors = sum(form.nodes), {}
    for name, value in item.items():
        dim = sample_form.tensors[name].node_dim
        if dim is None:
            tensors[name] = value.expand(count, *value.shape).clone()
            continue
        drawn = torch.randint(value.size(dim), (count * size,), generator=g)
        rows = values_of_rows(value.movedim(dim, 0), drawn).unflatten(0, (count, size))
        tensors[name] = rows.movedim(1, dim + 1).contiguous()
    return with_samples(small, tensors, sample_form.resize({ALL_NODES: size}))


class SampleGraphs:
    """Small graphs with the samples of a run.

    Args:
        data: :class:`~lightning_gnn.GraphDataModule` of the run, with samples.
        shape: mesh of the run, see :class:`~lightning_gnn.strategy.ranks.MeshShape`.
    """

    def __init__(self, data: Any, shape: Any) -> None:
        self._data, self._samples, self._shape = data, data.sample_data, shape

    def has(self, stage: str, of: CutInfo) -> bool:
        """Returns whether the self-check covers a stage: it has stacked samples of one node type, and nodes are divided."""
        is_covered = self._shape.graph_ranks > 1 and not self._samples.concatenates and not of.types.is_hetero
        return is_covered and _DATASETS[stage] in self._samples.sizes

    @property
    def trains(self) -> bool:
        """Whether there are training samples, and memory can be predicted."""
        return "samples" in self._samples.sizes and not self._samples.concatenates

    def batch_size(self) -> int:
        """Returns the number of training samples of a data rank's largest batch."""
        ranks = self._shape.data_ranks
        return min(self._samples.samples_per_rank(self._data.batch_size, ranks), -(-self._samples.sizes["samples"] // ranks))

    def row_bytes(self, of: CutInfo) -> int:
        """Returns the bytes of a node in the training samples of a data rank's batch."""
        _, form = self._first("fit", of)
        tensors = [each.resize({ALL_NODES: 1}) for each in form.tensors.values() if each.node_dim is not None]
        return self.batch_size() * sum(each.dtype.itemsize * prod(each.shape) for each in tensors)

    def _first(self, stage: str, of: CutInfo) -> tuple[Any, SampleFormat]:
        """Returns the first sample of a stage and the format."""
        items, form = self._samples.first(_DATASETS[stage], self._data.seed, len(of.n_id), len(of.e_id))
        return items[0], form

    def maker(self, shard: Shard, stage: str, whole_batch: bool = False) -> Callable[..., SampleGraph]:
        """Returns a function that makes small graphs with samples.

        Args:
            shard: part of the graph.
            stage: stage whose samples are used.
            whole_batch: whether a small graph has as many samples as a batch; else a few.

        Raises:
            ValueError: the graph or its layout does not support samples.
        """
        check_shard(shard)
        item, form = self._first(stage, shard)
        tensors = form.local_rows(0, item, None)
        count = self.batch_size() if whole_batch else COUNT
        return partial(random_samples, item=tensors, sample_form=form, count=count)
