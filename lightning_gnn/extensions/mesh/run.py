"""Ranks, random streams and rows of a run on samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.mesh.axes import Mesh, device_mesh_of_one
from lightning_gnn.extensions.mesh.rows import MeshRows, MeshStreams, SampleRows
from lightning_gnn.extensions.samples.checks import SampleChecks
from lightning_gnn.extensions.samples.copies import Copies
from lightning_gnn.extensions.samples.order import positions_of
from lightning_gnn.extensions.samples.static import StaticBatches
from lightning_gnn.nn.bind import context_of
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError
from lightning_gnn.nn.helpers import gather_halo, reduce_halo
from lightning_gnn.private_lightning import MESH
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.mode import place
from lightning_gnn.rows.placement import REPLICATED
from lightning_gnn.rows.ranks import Ranks
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.strategy.scheme import make_context


class SampleRanks:
    """Ranks, random streams and rows of steps on samples.

    Args:
        world: all ranks.
        mesh: both axes of ranks; None for one data rank.
        random: random streams of this rank.
        shard: rank's part of the graph.
        copies: copies of the graph for concatenated samples; None for stacked samples.

    Attributes:
        world: all ranks.
        random: random streams of this rank.
        graph_world: ranks that have parts of the same samples.
        full_batch_size: number of samples of the largest global batch.
        make_context: function that returns a graph context for copies of the graph, for a batch that is not full.
    """

    full_batch_size: int
    make_context: Callable[[Shard], GraphContext]

    def __init__(self, world: Any, mesh: Any, random: Any, shard: Shard, copies: Copies | None) -> None:
        self.world, self._mesh, self.random, self._shard, self._copies = world, mesh, random, shard, copies
        self.graph_world = world if mesh is None else mesh.graph

    @property
    def shard(self) -> Shard:
        """Shard that layers are bound to: the rank's part of the graph, or its copies for a batch."""
        return self._shard if self._copies is None else self.copies(self.full_batch_size)

    def copies(self, total: int) -> Shard:
        """Returns the copies of the graph for a global batch of `total` samples."""
        assert self._copies is not None
        return self._copies[total]

    def rows_for(self, context: GraphContext) -> GraphRows:
        """Returns the rows of steps; collective.

        Args:
            context: graph context that layers are bound to.
        """
        if self._copies is not None:
            return CopiedRows(self, context)
        if self._mesh is not None:
            return MeshRows(self._shard, self._mesh, self.random)
        return SampleRows(self._shard, self.world, partial(self.random.inside, False), gather_halo, reduce_halo)

    def include_all_ranks(self, context: GraphContext) -> GraphContext:
        """Change a graph context for copies of the graph, whose statistics include the rows of all data ranks."""
        context.rows = _NoRows()  # type: ignore[assignment]
        if self._mesh is None:
            return context
        for name in ("sum_over_ranks", "max_over_ranks"):
            method = getattr(Exchange, name)
            setattr(context.exchange, name, partial(method, SimpleNamespace(world=self.world)))
        return context

    def gather_samples(self, values: Tensor, total: int) -> Tensor:
        """Returns values of all samples of a global batch, ``[S, ...]``; `values` has the samples of this data rank."""
        if self._mesh is None:
            return values
        size = self._mesh.data.size
        positions = [positions_of(rank, size, total) for rank in range(size)]
        found, _ = Ranks(self._mesh.data).gather_rows(values, [*map(len, positions)], "Values of samples")
        return found[torch.cat(positions).argsort().to(found.device)]


class SampleRun(SampleRanks):
    """Ranks, random streams and rows of the steps of a stage on samples.

    Args:
        strategy: strategy of the run.
        module: module of the run.
        world: all ranks.
        shard: rank's part of the graph.
    """

    def __init__(self, strategy: Any, module: Any, world: World, shard: Shard) -> None:
        self._strategy, self._module, shape = strategy, module, strategy.mesh_shape
        self._data = module.trainer.datamodule.sample_data
        mesh = Mesh(world, shape.graph_ranks) if shape.data_ranks > 1 else None
        random = RandomStreams(world) if mesh is None else MeshStreams(world, mesh)
        super().__init__(world, mesh, random, shard, self._data.copies)

    @property
    def full_batch_size(self) -> int:  # type: ignore[override]
        found: int = self._data.full_batch(self._module.trainer.datamodule.batch_size)
        return found

    def begin_stage(self, steps: Any) -> Shard:
        """Returns the shard that layers are bound to.

        Sets ``device_mesh`` of the module, and adds the callback that compares samples, until the stage ends.
        """
        in_use: ExitStack = steps.in_use
        steps.add_callbacks(SampleChecks(self.world, self._data, self._module.trainer.datamodule.seed))
        in_use.callback(setattr, self._data, "place", self._data.place)
        if self.world.size > 1:
            setattr(self._module, MESH, self._mesh.device_mesh if self._mesh else device_mesh_of_one(self.world))
            in_use.callback(setattr, self._module, MESH, None)
        return self.shard

    def make_rows(self, context: GraphContext) -> GraphRows:
        """Returns the rows of steps, and lets loaders place batches; see :meth:`rows_for`."""
        rows = self.rows_for(context)
        static = (
            StaticBatches(self._module.trainer, self.full_batch_size) if getattr(self._strategy, "cuda_graph", False) else None
        )

        def place_batch(batch: Any) -> Any:  # hooks before steps get rows, too
            batch = rows.place(batch.to(self.world.device))
            return batch if static is None else static.copy_batch(batch)

        self._data.place = place_batch
        return rows

    def make_context(self, shard: Shard) -> GraphContext:  # type: ignore[override]
        """Returns a graph context for copies of the graph; collective on graph ranks."""
        strategy = self._strategy
        of = {"meter": strategy.meter, "cache_input_aggregation": strategy.cache_input_aggregation}
        make = partial(make_context, strategy.scheme, world=self.graph_world, **of)
        return self.include_all_ranks(context_of(self._module, shard, self.graph_world, make))


class _NoRows:
    """Rows of any nodes: an original id has a row in each copy, and copies are on other data ranks, too."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedModelError(
            "gather_nodes, global_num_nodes and dense attention do not support concatenate=True on ranks. Use x[ids] and len(x)."
        )

    fetch, num_nodes = _refuse, property(_refuse)


_OF_STEPS = "propagations", "on_loaded_edges", "reverse"
"""Attributes of a graph context that do not depend on the graph."""


class CopiedRows(SampleRows):
    """Row sets of copies of the graph, one for each sample of a batch; :meth:`place` binds layers to the copies for a batch.

    All ranks have rows of one graph, whose copies are not connected.

    Args:
        run: ranks of the run.
        context: graph context that layers are bound to.
    """

    def __init__(self, run: SampleRanks, context: GraphContext) -> None:
        self._run, self._context, self._total = run, context, run.full_batch_size
        self._states: dict[int, tuple[dict[str, Any], ...]] = {}
        super().__init__(run.shard, run.world, partial(run.random.inside, False), gather_halo, reduce_halo)
        self.mode.norms_by_rules = True
        self._states[self._total] = self._state(run.include_all_ranks(context))

    @override
    def place(self, batch: Any) -> Any:
        info = batch.get("sample_info")
        if info is not None:
            self._use_copies(info.total)
            for name, dim in info.node_dims.items():
                if dim is None and not self._is_placed(batch[name]):
                    batch[name] = place(self._run.gather_samples(batch[name], info.total), REPLICATED)
        return super().place(batch)

    def _use_copies(self, total: int) -> None:
        """Set the row sets, and the graph of layers, to the copies for a global batch of `total` samples; collective."""
        if total == self._total:
            return
        if total not in self._states:
            shard = self._run.copies(total)
            made = self._run.make_context(shard)
            self.hold(shard)
            self._states[total] = self._state(made)
        of_rows, of_mode, *of_contexts = self._states[total]
        self._total = total
        vars(self).update(of_rows)
        vars(self.mode).update(of_mode)
        for context, state in zip((self._context, self._context.reverse), of_contexts):  # layers are bound to these objects
            vars(context).update(state)
        self._context.begin_step(self._run.graph_world.step)

    def _state(self, context: GraphContext) -> tuple[dict[str, Any], ...]:
        """Returns the attributes of the rows, the mode and graph contexts that depend on the copies."""
        of_rows = {name: vars(self)[name] for name in ("nodes", "edges", "_kinds", "_shard")}
        contexts = [context] if context.reverse is None else [context, context.reverse]
        of_contexts = [{name: value for name, value in vars(each).items() if name not in _OF_STEPS} for each in contexts]
        return of_rows, {"nodes": self.mode.nodes, "halo_rows": self.mode.halo_rows}, *of_contexts
