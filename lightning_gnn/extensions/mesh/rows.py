"""Row semantics of a batch of samples on a mesh: nodes are divided among graph ranks, samples among data ranks.

Each axis has a mode, and a tensor has a placement on each. Torch calls the mode of samples first. Its rules call functions of
torch, which the mode of nodes receives. So each rule treats one axis, and the other axis appears whole to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.devices import random_states, set_random_states
from lightning_gnn.extensions.mesh.axes import Mesh
from lightning_gnn.extensions.samples.order import positions_of
from lightning_gnn.nn.helpers import gather_halo, reduce_halo
from lightning_gnn.private_torch import without_torch_functions
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.mode import RowsMode, by_placement, map_leaves, place, placement_of, rows_of, tensors_in
from lightning_gnn.rows.placement import FROM_ROWS, OF_SAMPLES, REPLICATED, RowPlacement, RowSet
from lightning_gnn.rows.ranks import Ranks
from lightning_gnn.rows.shapes import ShapeConverter
from lightning_gnn.steps.random_streams import RandomStreams


class MeshStreams(RandomStreams):
    """Random streams of a mesh: a third stream is equal on the graph ranks of a data rank.

    A step draws from it for values without node rows, such as noise per sample.
    """

    def __init__(self, world: World, mesh: Mesh) -> None:
        super().__init__(world)
        with torch.random.fork_rng(devices=[] if world.device.type == "cpu" else None):
            self._seed_from(self.seed - world.rank, world.size + world.rank // mesh.graph.size)
            self._sample_states = random_states(world.device)
        self._graph_ranks = torch.tensor([mesh.graph.size])

    @contextmanager
    def equal_on_graph_ranks(self) -> Iterator[None]:
        """Context manager in which graph ranks draw equal numbers; the shared stream stays in use if it is."""
        if not self._inside:
            yield
            return
        before = random_states(self._device)
        set_random_states(self._device, self._sample_states)
        try:
            yield
        finally:
            self._sample_states = random_states(self._device)
            set_random_states(self._device, before)

    @override
    def state(self) -> tuple[list[Tensor], list[Tensor]]:
        common, own = super().state()
        return common, [*own, *self._sample_states, self._graph_ranks]

    @override
    def load(self, common: list[Tensor], rank_states: list[Tensor]) -> None:
        of_mesh = len(rank_states) > 2  # its own and the sample states, of one or two devices, and the number of graph ranks
        own = len(rank_states) // 2 if of_mesh else len(rank_states)
        super().load(common, rank_states[:own])
        # On a mesh of another shape, graph ranks would otherwise continue the streams of different data ranks.
        if of_mesh and own == len(self._sample_states) and rank_states[-1].equal(self._graph_ranks):
            self._sample_states = rank_states[own:-1]


class SampleSize(int):
    """Size that depends on the number of local samples, which may differ between data ranks.

    It equals no other size, so that caches by size keep them apart.

    Attributes:
        times: number of entries per sample.
    """

    times: int

    @classmethod
    def of(cls, count: int, times: int) -> SampleSize:
        """Returns the size of `count` entries."""
        made = cls(count)
        made.times = times
        return made

    @override
    def __eq__(self, value: object) -> bool:
        return isinstance(value, SampleSize) and (int(self), self.times) == (int(value), value.times)

    @override
    def __hash__(self) -> int:
        return hash((int(self), self.times))


def _original(rows: RowSet) -> tuple[RowSet, int]:
    """Returns the rows that were flattened or repeated, or else these rows, and the number of entries of each."""
    found, times = rows, 1
    while of := found.entries_of or found.repeats_of:
        found, times = of[0], times * of[1]
    return found, times


class SampleShapeConverter(ShapeConverter):
    """Converter in the mode of samples; local sizes are of :class:`SampleSize`, for the mode of nodes."""

    @override
    def local_rows(self, rows: RowSet) -> int:
        return SampleSize.of(rows.count, _original(rows)[1])


_SAMPLE_PRIMES = 99_991, 99_989
"""Primes for the number of local samples; the first that divides no other size is used."""


class NodeShapeConverter(ShapeConverter):
    """Converter in the mode of nodes, with a prime in place of the number of local samples.

    Results must not depend on this number: data ranks would otherwise gather other rows.
    """

    def __init__(self, x: Tensor, of: RowPlacement, arguments: Sequence[Any]) -> None:
        super().__init__(x, of, arguments)
        self._prime, samples = 0, x.__dict__.get(OF_SAMPLES)
        if not isinstance(samples, RowPlacement):
            return
        beside = [size for at, size in enumerate(self.sizes) if at not in (of.dim, samples.dim)]
        others = [int(size) for size in arguments if isinstance(size, int) and not isinstance(size, SampleSize)]
        known = [*beside, *others, _original(of.rows)[0].known_total or 0]
        self.has_empty_dim = 0 in beside
        self._prime = next(each for each in _SAMPLE_PRIMES if all(size < each or size % each for size in known))
        times = _original(samples.rows)[1]
        self._samples = samples.rows.count // max(1, times)
        if samples.dim != of.dim:
            self.sizes[samples.dim] = times * self._prime

    @override
    def to_global(self, size: Any) -> Any:
        return size.times * self._prime if self._prime and isinstance(size, SampleSize) else size

    @override
    def global_rows(self, rows: RowSet) -> int:
        found = rows.entries_of or rows.repeats_of
        return rows.total if found is None else self.global_rows(found[0]) * self.to_global(found[1])

    @override
    def to_local(self, size: int) -> int:
        times, left = divmod(size, self._prime or size + 1)
        return SampleSize.of(times * self._samples, times) if times and not left else super().to_local(size)


class SampleMode(RowsMode):
    """Mode of the samples of a mesh, see :attr:`~lightning_gnn.rows.mode.RowsMode.has_nodes`.

    Args:
        ranks: data ranks.
        common_draws: context manager in which random numbers are equal on all ranks.
        node_mode: mode of the nodes.
    """

    def __init__(self, ranks: Ranks, common_draws: Callable[[], AbstractContextManager[Any]], node_mode: RowsMode) -> None:
        super().__init__(ranks, common_draws)
        self._nodes = node_mode
        self.shape_converter, node_mode.shape_converter = SampleShapeConverter, NodeShapeConverter
        self.has_nodes, self.norms_by_rules = False, True

    @override
    def places_of(self, selection: RowSet) -> Tensor:
        selection.places.__dict__[self._nodes.attribute] = REPLICATED  # graph ranks have samples in the same places
        return selection.places

    @override
    def run_backward(self, outputs: Any, starts: Any, inputs: Any, options: Any, accumulate_grad: bool = False) -> Any:
        if accumulate_grad:
            return super().run_backward(outputs, starts, inputs, options, accumulate_grad)
        self._nodes.calling = (self,)
        try:
            return torch.autograd.grad(**{**options, "outputs": outputs, "inputs": inputs, "grad_outputs": starts})
        finally:
            self._nodes.calling = ()

    @override
    def send(self, function: type[torch.autograd.Function], x: Tensor, *args: Any, more_dims: int = 0) -> Tensor:
        with without_torch_functions():
            out = super().send(function, x, *args)
        with self._nodes.reading():  # the result has the nodes of x
            of = placement_of(x)
            if of is not None:
                place(out, of.rows.at(of.dim + more_dims) if isinstance(of, RowPlacement) else of.with_view(None))
        return out

    @override
    def gather_rows(self, x: Tensor, placement: RowPlacement, operation: str) -> Tensor:
        with self._nodes.reading():
            of = rows_of(x)
            if of is not None and of.dim == placement.dim:  # samples and nodes are along one dimension
                with self._nodes.pause():
                    x = self._nodes.gather_rows(x, of, operation)
                place(x, FROM_ROWS)
        return super().gather_rows(x, placement, operation)

    @override
    def run_per_sample(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        row_args, unknown, from_rows = by_placement(args, kwargs)
        self.row_tensors(args, kwargs)  # raises for unknown tensors

        def enter(value: Any) -> Any:
            if not row_args or not isinstance(value, Tensor):
                return value
            (x, of), placement = row_args[0], placement_of(value)
            if not isinstance(placement, RowPlacement) and value.dim() == x.dim() and value.size(of.dim) == of.rows.total:
                return self.take(value, of.dim, of.rows, "layer")
            return self.enter(value, placement, "layer")

        args, kwargs = map_leaves(args, enter), map_leaves(kwargs, enter)
        with self.pause():
            out = run(*args, **kwargs)
        for x in tensors_in((out,)):
            self.remove_placement(x)
            if not row_args and not unknown:
                place(x, FROM_ROWS if from_rows else REPLICATED)
            elif row_args and x.dim() > (of := row_args[0][1]).dim and x.size(of.dim) == of.rows.count:
                place(x, of.rows.at(of.dim))
        return out


class SampleRows(GraphRows):
    """Row sets of a rank's part of the graph, with samples whose nodes are along any dimension."""

    @override
    def place(self, batch: Any) -> Any:
        self.batch_size = getattr(batch, "total_size", None)
        for x, kind, dim in getattr(batch, "sample_tensors", ()):
            if not self._is_placed(x):  # a hook may have replaced it
                place(x, REPLICATED if dim is None else self.nodes[kind].at(dim))
        return super().place(batch)


class MeshRows(SampleRows):
    """Row sets of a rank's part of the graph and of its samples.

    Args:
        shard: shard of this graph rank, on its device.
        mesh: both axes of ranks.
        random: random streams of this rank.
    """

    def __init__(self, shard: Shard, mesh: Mesh, random: MeshStreams) -> None:
        self._data_ranks = Ranks(mesh.data, name=mesh.data.broadcast_object(uuid4().hex), attribute=OF_SAMPLES)
        self._sample_mode: RowsMode | None = None
        super().__init__(shard, mesh.graph, random.equal_on_graph_ranks, gather_halo, reduce_halo)
        self._sample_mode = SampleMode(self._data_ranks, partial(random.inside, False), self.mode)
        self.place(shard.batch)

    @property
    @override
    def modes(self) -> list[RowsMode]:
        assert self._sample_mode is not None
        return [self.mode, self._sample_mode]

    @contextmanager
    @override
    def activate(self, in_backward: bool = False) -> Iterator[None]:
        assert self._sample_mode is not None
        with self.mode.activate(in_backward), self._sample_mode.activate(in_backward):
            yield

    @override
    def place(self, batch: Any) -> Any:
        super().place(batch)
        if self._sample_mode is None:
            return batch
        info = getattr(batch, "sample_info", None)
        samples = None if info is None else self._samples(info)
        with self._sample_mode.reading():
            for x, *_ in () if samples is None else batch.sample_tensors:
                x.__dict__.setdefault(OF_SAMPLES, samples.at(0))  # type: ignore[union-attr]
            for x in tensors_in(batch.to_dict()):
                x.__dict__.setdefault(OF_SAMPLES, REPLICATED)
        return batch

    def _samples(self, info: Any) -> RowSet:
        """Returns the samples of a batch."""
        size, total, positions = self._data_ranks.size, info.total, info.positions.to(self._data_ranks.device)
        keys = [positions_of(rank, size, total) for rank in range(size)]
        counts, every = [len(each) for each in keys], torch.cat(keys).to(self._data_ranks.device)
        return RowSet(
            self._data_ranks, len(positions), lambda: positions, total=total, all_keys=lambda: (every, counts), name="samples"
        )
