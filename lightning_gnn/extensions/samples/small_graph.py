"""Small random graphs with samples, for checks and predictions of memory: see :mod:`lightning_gnn.checks.small_graph`.

B samples, N nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from typing_extensions import Self, override

from lightning_gnn.checks.small_graph import Form, SmallGraph, small_graph, values_of_rows
from lightning_gnn.data.shards import CutInfo, Graph, Shard, restore_order
from lightning_gnn.extensions.node_types.shards import TypedShard
from lightning_gnn.extensions.samples.copies import Copies
from lightning_gnn.extensions.samples.data import DATASETS, check_shard
from lightning_gnn.extensions.samples.formats import ALL_NODES, SampleFormat
from lightning_gnn.extensions.samples.loader import SampleBatch, make_batch
from lightning_gnn.extensions.samples.node_sets import TypedSampleBatch, count_nodes, local_sizes, rows_of_parts
from lightning_gnn.extensions.samples.order import RankBatch, positions_of
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.registry import feature

_PREFIX = "of samples: "
"""Begin of the names of samples' tensors in a small graph, which may equal names of the graph's tensors."""

COUNT = 3
"""Number of samples of the self-check."""


@dataclass(frozen=True, kw_only=True)
class SampleShard(Shard):
    """Shard whose steps receive samples.

    Attributes:
        tensors: tensors ``[B, ...]`` of this data rank's samples by name, with the rows of the rank's nodes.
        form: format of these samples.
        total: number of samples of all data ranks.
        data_ranks, data_rank: number of data ranks, and number of this one.
        concatenates: whether the batch has a copy of the graph for each sample.
    """

    tensors: Mapping[str, Tensor]
    form: SampleFormat
    total: int
    data_ranks: int = 1
    data_rank: int = 0
    concatenates: bool = False

    @classmethod
    def of(cls, shard: Shard, **samples: Any) -> SampleShard:
        """Returns a shard with samples, given its own attributes."""
        kind = _TypedSampleShard if shard.types.is_hetero else cls
        return kind(**{each.name: getattr(shard, each.name) for each in fields(Shard)}, **samples)

    @cached_property
    def copies(self) -> Copies | None:
        """Copies of the graph for concatenated samples; None for stacked samples."""
        return Copies(self, self.data_ranks, self.data_rank) if self.concatenates else None

    @cached_property
    def _step_batch(self) -> SampleBatch | TypedSampleBatch:
        positions = positions_of(self.data_rank, self.data_ranks, self.total)
        rank_batch = RankBatch(positions.tolist(), positions, self.total)
        return make_batch(self, self.form, self.tensors, rank_batch, self.copies)

    @override
    def step_batch(self) -> SampleBatch | TypedSampleBatch:
        return copy.copy(self._step_batch)

    def join_ranks(self, *arguments: Any) -> tuple[Any, Any]:  # type: ignore[override]
        return feature("join_sample_ranks")(self, *arguments)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _TypedSampleShard(SampleShard, TypedShard):
    """Shard of a graph with types, whose steps receive samples."""


@dataclass(frozen=True, kw_only=True)
class SampleGraph(SmallGraph):
    """Graph with samples, whose tensors ``[S, ...]`` are attributes of the graph.

    Attributes:
        form: format of the samples.
        total: S.
        data_ranks: number of data ranks.
        concatenates: whether batches have a copy of the graph for each sample.
    """

    form: SampleFormat
    total: int
    data_ranks: int = 1
    concatenates: bool = False

    @override
    def whole(self, graph: Graph) -> Shard:
        tensors = self._take_samples(graph)
        return self._with_samples(super().whole(graph), tensors, 1, 0)

    @override
    def shards(self, graph: Graph, layout: LayoutSpec) -> list[Shard]:
        graph = copy.copy(graph)
        tensors = self._take_samples(graph)
        if layout.parts == 1:
            [part] = SmallGraph.shards(super().merge_parts(), graph, layout)
            parts = [restore_order(part, graph, **self.options)]
        else:
            parts = super().shards(graph, layout)
        ranks = range(self.data_ranks)
        return [self._with_samples(part, tensors, len(ranks), rank) for rank in ranks for part in parts]

    @override
    def merge_parts(self) -> Self:
        return replace(super().merge_parts(), data_ranks=1)

    def _take_samples(self, graph: Any) -> dict[str, Tensor]:
        """Returns the tensors of the samples, which are removed from the graph."""
        tensors = {name: getattr(graph, _PREFIX + name) for name in self.form.tensors}
        for name in tensors:
            delattr(graph, _PREFIX + name)
        return tensors

    def _with_samples(self, part: Shard, tensors: Mapping[str, Tensor], data_ranks: int, data_rank: int) -> Shard:
        """Returns a shard with the rows of its nodes in the samples of a data rank."""
        rows, own = rows_of_parts(part), {}
        for name, dim in self.form.node_dims.items():
            own[name] = tensors[name][data_rank::data_ranks].clone()
            if dim is not None:
                ids = rows[self.form.tensors[name].node_type][part.rank]
                own[name] = own[name].index_select(dim, torch.from_numpy(ids))
        form = self.form.resize(local_sizes(part))
        samples = {"total": self.total, "data_ranks": data_ranks, "data_rank": data_rank, "concatenates": self.concatenates}
        return SampleShard.of(part, tensors=own, form=form, **samples)


def with_samples(small: SmallGraph, tensors: Mapping[str, Tensor], form: SampleFormat, **options: Any) -> SampleGraph:
    """Returns a graph with samples.

    Args:
        small: graph without samples.
        tensors: tensors ``[S, ...]`` of the samples by name.
        form: format of the samples.
        **options: fields of :class:`SampleGraph`.
    """
    graph: Any = copy.copy(small.graph)
    for name, value in tensors.items():
        setattr(graph, _PREFIX + name, value)
    count = len(next(iter(tensors.values())))
    return SampleGraph(graph, small.part, small.holders, small.options, form=form, total=count, **options)


def first_samples(data: Any, graph: Graph) -> dict[str, tuple[dict[str, Tensor], SampleFormat]]:
    """Returns tensors ``[B, ...]`` of the first samples by stage, and their format.

    Args:
        data: :class:`~lightning_gnn.GraphDataModule` with samples.
        graph: its graph.
    """
    sizes = count_nodes(graph)
    found = {}
    for stage, name in DATASETS.items():
        if name in data.sample_data.sizes:
            items, form = data.sample_data.read_first(name, data.seed, sizes, graph.num_edges, COUNT)
            found[stage] = form.stack([form.local_rows(index, item, None) for index, item in enumerate(items)]), form
    return found


def select_nodes(tensors: Mapping[str, Tensor], form: SampleFormat, graph: Graph) -> tuple[dict[str, Tensor], SampleFormat]:
    """Returns samples of the nodes of a subgraph, whose ``n_id`` are the ids of the nodes, and their format."""
    n_id: Any = graph.n_id_dict if isinstance(graph, HeteroData) else {ALL_NODES: graph.n_id}
    rows = {
        name: tensors[name] if dim is None else tensors[name].index_select(dim, n_id[form.tensors[name].node_type])
        for name, dim in form.node_dims.items()
    }
    return rows, form.resize({kind: len(ids) for kind, ids in n_id.items()})


def sample_shards(data: Any, shards: Sequence[Shard], data_ranks: int) -> list[Shard]:
    """Returns the shards of a graph whose steps receive the first training samples of a datamodule, as many as in a batch."""
    samples, of = data.sample_data, shards[0]
    check_shard(of)
    count, parts = samples.samples_per_data_rank(data.batch_size, data_ranks), rows_of_parts(of)
    sizes = {kind: sum(map(len, ids)) for kind, ids in parts.items()}
    items, form = samples.read_first("samples", data.seed, sizes, len(of.e_id), count)
    found: list[Shard] = []
    for shard in shards:
        rows = {kind: ids[shard.rank] for kind, ids in parts.items()}
        tensors = form.stack([form.local_rows(index, item, rows) for index, item in enumerate(items)])
        options = {"form": form.resize(local_sizes(shard)), "total": len(items), "concatenates": samples.concatenates}
        found.append(SampleShard.of(shard, tensors=tensors, **options))
    return found


def random_samples(
    batch: Any,
    masks: Collection[str],
    form: Form,
    seed: int = 0,
    num_classes: int = 0,
    *,
    make: Callable[..., SmallGraph],
    items: Sequence[Mapping[str, Tensor]],
    sample_form: SampleFormat,
    count: int,
    **options: Any,
) -> SampleGraph:
    """Returns a small graph with samples.

    Values of a node in a sample are the values of a random node of its type in the first given sample.

    Args:
        batch, masks, form, seed, num_classes: see :func:`~lightning_gnn.checks.small_graph.small_graph`.
        make: function that makes the graph without samples.
        items: tensors of given samples by name.
        sample_form: their format.
        count: number of samples.
        **options: fields of :class:`SampleGraph`.
    """
    small, g = make(batch, masks, form, seed, num_classes), torch.Generator().manual_seed(seed)
    tensors, sizes = {}, count_nodes(small.graph)
    for name, value in items[0].items():
        dim = sample_form.tensors[name].node_dim
        if dim is None:
            tensors[name] = torch.stack([items[number % len(items)][name] for number in range(count)])
            continue
        size = sizes[sample_form.tensors[name].node_type]
        drawn = torch.randint(value.size(dim), (count * size,), generator=g)
        rows = values_of_rows(value.movedim(dim, 0), drawn).unflatten(0, (count, size))
        tensors[name] = rows.movedim(1, dim + 1).contiguous()
    return with_samples(small, tensors, sample_form.resize(sizes), **options)


class SampleGraphs:
    """Small graphs with the samples of a run.

    Args:
        data: :class:`~lightning_gnn.GraphDataModule` of the run, with samples.
        shape: mesh of the run, see :class:`~lightning_gnn.strategy.ranks.MeshShape`.
    """

    def __init__(self, data: Any, shape: Any) -> None:
        self._data, self._samples, self._shape = data, data.sample_data, shape

    def has(self, stage: str) -> bool:
        """Returns whether a stage has samples."""
        return DATASETS[stage] in self._samples.sizes

    @property
    def trains(self) -> bool:
        """Whether there are training samples, and memory can be predicted."""
        return self.has("fit")

    @property
    def advice(self) -> str:
        """Text for steps that do not run, for example on samples of this shape."""
        if self._samples.concatenates:
            return ""
        return (
            " With samples, x is [B, N, F]; for layers of x [N, F], such as GATConv, set GraphDataModule(..., concatenate=True). "
            "Models with one parameter per node do not run on a small graph."
        )

    @property
    def ways_to_fit(self) -> str:
        """Text of arguments with which a rank needs less memory."""
        size = "batch_size" if self._samples.global_batch_size is None else "global_batch_size"
        return f"a smaller {size}; a larger graph_ranks, with more ranks if needed"

    def batch_size(self) -> int:
        """Returns the number of training samples of a data rank's largest batch."""
        ranks = self._shape.data_ranks
        return min(self._samples.samples_per_data_rank(self._data.batch_size, ranks), -(-self._samples.sizes["samples"] // ranks))

    def row_bytes(self, of: CutInfo) -> list[int]:
        """Returns the bytes of a node in the training samples of a data rank's batch, by node type."""
        found = dict.fromkeys(rows_of_parts(of), 0)
        _, form = self._first("fit", of, 1)
        for each in form.resize(dict.fromkeys(found, 1)).tensors.values():
            if each.node_dim is not None:
                found[each.node_type] += self.batch_size() * each.dtype.itemsize * prod(each.shape)
        return [*found.values()]

    def _first(self, stage: str, of: CutInfo, count: int) -> tuple[list[dict[str, Tensor]], SampleFormat]:
        """Returns the first samples of a stage and their format."""
        sizes = {kind: sum(map(len, ids)) for kind, ids in rows_of_parts(of).items()}
        items, form = self._samples.read_first(DATASETS[stage], self._data.seed, sizes, len(of.e_id), count)
        return [form.local_rows(index, item, None) for index, item in enumerate(items)], form

    def maker(
        self, shard: Shard, stage: str, whole_batch: bool = False, make: Callable[..., SmallGraph] = small_graph
    ) -> Callable[..., SampleGraph]:
        """Returns a function that makes small graphs with samples.

        Args:
            shard: part of the graph.
            stage: stage whose samples are used.
            whole_batch: whether a small graph has as many samples as a data rank's batch; else a few, for two data ranks if the
                run has several.
            make: function that makes the graph without samples.

        Raises:
            ValueError: the graph or its layout does not support samples.
        """
        check_shard(shard)
        items, form = self._first(stage, shard, 1 if whole_batch else COUNT)
        count, data_ranks = (self.batch_size(), 1) if whole_batch else (COUNT, min(2, self._shape.data_ranks))
        options = {"data_ranks": data_ranks, "concatenates": self._samples.concatenates}
        return partial(random_samples, make=make, items=items, sample_form=form, count=count, **options)
