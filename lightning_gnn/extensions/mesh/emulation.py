"""Mesh whose ranks are threads of one process, for checks and predictions of memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from typing_extensions import override

from lightning_gnn.comm.in_process import InProcessWorld
from lightning_gnn.comm.transport import TransportWrapper
from lightning_gnn.extensions.mesh.axes import AxisTransport
from lightning_gnn.extensions.mesh.run import SampleRanks
from lightning_gnn.nn.bind import Binding
from lightning_gnn.registry import wrap_transport
from lightning_gnn.rows.graph import GraphRows


class _Transport(AxisTransport):
    """Transport between the ranks of an axis, and their mailboxes."""

    all_local = True

    def __init__(self, world: InProcessWorld, members: Sequence[int]) -> None:
        TransportWrapper.__init__(self, world._ranks)
        self._meeting, self._members, self._rank = world._meeting, members, members.index(world.rank)

    def post(self, sender: int, receiver: int, value: Any) -> None:
        """Store `value` for `receiver`."""
        self._meeting.post(self._members[sender], self._members[receiver], value)

    def take(self, peer: int) -> Any:
        """Returns the next unclaimed value of `peer`."""
        return self._transport.take(self._members[peer])


class _Axis(InProcessWorld):
    """Ranks of one axis of a mesh whose ranks are threads.

    Args:
        world: all ranks.
        members: global ranks of the axis, in the order of their ranks on it.
    """

    def __init__(self, world: InProcessWorld, members: Sequence[int]) -> None:
        super().__init__(members.index(world.rank), world._meeting)
        self.size, self.members = len(members), members
        self._ranks = self._meeting = _Transport(world, members)  # type: ignore[assignment]
        self.transport = wrap_transport(self._ranks)

    @override
    def global_rank(self, rank: int) -> int:
        return self.members[rank]


class EmulatedMesh:
    """Both axes of a mesh whose ranks are threads.

    Args:
        world: all ranks.
        data_ranks: number of data ranks.

    Attributes:
        data, graph: see :class:`~lightning_gnn.extensions.mesh.axes.Mesh`.
    """

    def __init__(self, world: InProcessWorld, data_ranks: int) -> None:
        places = torch.arange(world.size).view(data_ranks, -1)
        self.graph = _Axis(world, places[world.rank // places.size(1)].tolist())
        self.data = _Axis(world, places[:, world.rank % places.size(1)].tolist())


class _SharedDraws:
    """Random numbers of a check, in which each rank draws the numbers of all ranks."""

    def inside(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    equal_on_graph_ranks = inside


def join_sample_ranks(shard: Any, module: torch.nn.Module, world: InProcessWorld, bind: Any) -> tuple[Binding, GraphRows]:
    """Returns a module bound to a rank's shard, and the rows of its steps, as in a run on samples; collective.

    Args:
        shard: shard of the rank, a :class:`~lightning_gnn.extensions.samples.small_graph.SampleShard`.
        module: unbound module.
        world: all ranks.
        bind: function that binds a module to a rank's shard for the scheme.
    """
    mesh = EmulatedMesh(world, shard.data_ranks) if shard.data_ranks > 1 else None
    ranks = SampleRanks(world, mesh, _SharedDraws(), shard, shard.copies)
    ranks.full_batch_size = shard.total
    binding = bind(module, ranks.shard, ranks.graph_world)
    return binding, ranks.rows_for(binding.context)
