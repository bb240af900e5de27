"""Row semantics of a batch of samples on a mesh: nodes are divided among graph ranks, samples among data ranks.

Each axis has a mode, and a tensor has a placement on each. Torch calls the mode of samples first. Its rules call functions of
torch, which the mode of nodes receives. So each rule treats one axis, and the other axis appears whole to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.group import World
from lightning_gnn.comm.mesh import Mesh
from lightning_gnn.data.shards import Shard
from lightning_gnn.devices import random_states, set_random_states
from lightning_gnn.nn.helpers import gather_halo, reduce_halo
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.mode import RowsMode, place
from lightning_gnn.rows.placement import OF_SAMPLES, REPLICATED, RowSet
from lightning_gnn.rows.ranks import Ranks
from lightning_gnn.steps.random_streams import RandomStreams


class MeshStreams(RandomStreams):
    """Random streams of a mesh: a third stream is equal on the graph ranks of a data rank.

    A step draws from it for values without node rows, such as noise per sample.
    """

    def __init__(self, world: World, mesh: Mesh) -> None:
        super().__init__(world)
        with torch.random.fork_rng(devices=[] if world.device.type == "cpu" else None):
            self._seed_from(self.seed - world.rank, world.size + world.rank // mesh.graph.size)
            self._of_samples = random_states(world.device)

    @contextmanager
    def equal_on_graph_ranks(self) -> Iterator[None]:
        """Context manager in which graph ranks draw equal numbers; the shared stream stays in use if it is."""
        if not self._inside:
            yield
            return
        before = random_states(self._device)
        set_random_states(self._device, self._of_samples)
        try:
            yield
        finally:
            self._of_samples = random_states(self._device)
            set_random_states(self._device, before)

    @override
    def state(self) -> tuple[list[Tensor], list[Tensor]]:
        common, own = super().state()
        return common, [*own, *self._of_samples]

    @override
    def load(self, common: list[Tensor], rank_states: list[Tensor]) -> None:
        middle = len(rank_states) // 2
        super().load(common, rank_states[:middle])
        self._of_samples = rank_states[middle:]


class MeshRows(GraphRows):
    """Row sets of a rank's part of the graph and of its samples.

    Args:
        shard: shard of this graph rank, on its device.
        mesh: both axes of ranks.
        random: random streams of this rank.
    """

    def __init__(self, shard: Shard, mesh: Mesh, random: MeshStreams) -> None:
        name = mesh.data.broadcast_object(uuid4().hex)
        self._data_ranks = Ranks(mesh.data, name=name, attribute=OF_SAMPLES)
        self.of_samples: RowsMode | None = None
        super().__init__(shard, mesh.graph, random.equal_on_graph_ranks, gather_halo, reduce_halo)
        self.of_samples = RowsMode(self._data_ranks, partial(random.inside, False), other=self.mode)
        self.place(shard.batch)

    @property
    @override
    def modes(self) -> list[RowsMode]:
        assert self.of_samples is not None
        return [self.mode, self.of_samples]

    @contextmanager
    @override
    def activate(self, in_backward: bool = False) -> Iterator[None]:
        assert self.of_samples is not None
        with self.mode.activate(in_backward), self.of_samples.activate(in_backward):
            yield

    @override
    def place(self, batch: Any) -> Any:
        super().place(batch)
        if self.of_samples is None:
            return batch
        info = batch.get("sample_info")
        samples = None if info is None else self._samples(info)
        with self.of_samples.reading():
            for name, value in batch.to_dict().items():
                if isinstance(value, Tensor):
                    has_samples = samples is not None and name in info.node_dims and value.dim() > 0
                    place(value, samples.at(0) if has_samples and samples is not None else REPLICATED)
        return batch

    def _samples(self, info: Any) -> RowSet:
        """Returns the samples of a batch: sample j of all is on data rank j mod D."""
        size, total, positions = self._data_ranks.size, info.total, info.positions.to(self._data_ranks.device)
        keys = [range(rank, total, size) for rank in range(size)]
        counts = [len(of_rank) for of_rank in keys]
        every = torch.tensor([key for of_rank in keys for key in of_rank], device=self._data_ranks.device)
        return RowSet(
            self._data_ranks, len(positions), lambda: positions, total=total, all_keys=lambda: (every, counts), name="samples"
        )
