"""Mesh of ranks: data ranks have other samples, and the graph ranks of a data rank have parts of the same samples.

Rank ``d * G + g`` is graph rank g of data rank d. Graph ranks, which send in each layer, are thereby on one machine if possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_gnn.comm.call import Step
from lightning_gnn.comm.group import World
from lightning_gnn.comm.transport import Receive, TransportWrapper
from lightning_gnn.registry import wrap_transport

AXES = "data", "graph"
"""Names of the dimensions of the mesh."""


class AxisTransport(TransportWrapper):
    """Transport between the ranks of an axis, whose messages use the transport of all ranks.

    Args:
        transport: transport between all ranks.
        members: global ranks of the axis, in the order of their ranks on it.
    """

    def __init__(self, transport: Any, members: Sequence[int]) -> None:
        super().__init__(transport)
        self._members, self._rank = members, members.index(transport.rank)
        self.all_local = all(transport.is_local(member) for member in members)

    def start_each(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Receive]]) -> Callable[[], None]:
        members = self._members
        wait: Callable[[], None] = self._transport.start_each(
            [(members[peer], rows) for peer, rows in sends], [(members[peer], rows) for peer, rows in receives]
        )
        return wait

    def start_varied(self, sends: Sequence[tuple[int, Tensor]], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
        members = self._members
        wait = self._transport.start_varied([(members[peer], rows) for peer, rows in sends], [members[peer] for peer in senders])
        return lambda: {members.index(peer): rows for peer, rows in wait().items()}

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks of the axis, of one shape, in their order."""
        rows = tensor.contiguous()
        parts = [torch.empty_like(rows) for _ in self._members]
        parts[self._rank] = tensor
        peers = [peer for peer in range(len(parts)) if peer != self._rank] if rows.numel() else []
        self.start_each([(peer, rows) for peer in peers], [(peer, parts[peer]) for peer in peers])()
        return parts


class AxisWorld(World):
    """Ranks of one axis of the mesh that this rank belongs to; its errors name global ranks.

    Args:
        world: all ranks.
        members: global ranks of the axis, in the order of their ranks on it.
        group: process group of these ranks.
        host_group: their process group for CPU tensors.
    """

    def __init__(self, world: World, members: Sequence[int], group: Any, host_group: Any) -> None:
        self.rank, self.size, self.members = members.index(world.rank), len(members), members
        self.device, self.timeout, self.backend, self.watch = world.device, world.timeout, world.backend, world.watch
        self.step, self.calls = Step(), Counter[str]()
        self.graph_group, self.host_group, self.gradient_group = group, host_group, None
        self.closed, self._memory, self._whole = False, None, world
        self._ranks = AxisTransport(world._ranks, members)
        self.transport = wrap_transport(self._ranks)

    @override
    def _group_of(self, tensor: Tensor) -> Any:
        return self.host_group if tensor.device.type == "cpu" else self.graph_group

    @override
    def global_rank(self, rank: int) -> int:
        return self.members[rank]

    @property
    @override
    def waited_s(self) -> float | None:
        return self._whole.waited_s

    @override
    def close(self) -> None:
        """No-op: the groups end with the groups of all ranks."""


class Mesh:
    """Both axes of a mesh of ranks; collective.

    Args:
        world: all ranks.
        graph_ranks: number of graph ranks, G; the number of ranks is a multiple.

    Attributes:
        data, graph: ranks with the same part of the graph, and ranks with the same samples.
        device_mesh: both axes for torch, by the names in :data:`AXES`.
    """

    def __init__(self, world: World, graph_ranks: int) -> None:
        places = torch.arange(world.size).view(-1, graph_ranks)
        self.data, data_group = _make_axis(world, places.t().tolist())
        self.graph, graph_group = _make_axis(world, places.tolist())
        kind = world.device.type
        self.device_mesh = DeviceMesh.from_group([data_group, graph_group], kind, mesh=places, mesh_dim_names=AXES)


def device_mesh_of_one(world: World) -> DeviceMesh:
    """Returns the axes of one data rank for torch; the graph ranks are the group of all ranks. Collective."""
    alone = [world.new_group(world.backend, [rank]) for rank in range(world.size)]
    groups, places = [alone[world.rank], world.graph_group], torch.arange(world.size).view(1, -1)
    return DeviceMesh.from_group(groups, world.device.type, mesh=places, mesh_dim_names=AXES)


def _make_axis(world: World, groups: Sequence[Sequence[int]]) -> tuple[AxisWorld, Any]:
    """Returns the axis of this rank and its process group; all ranks make the groups of all."""
    found: Any = None
    for members in groups:
        made = [world.new_group(backend, members) for backend in dict.fromkeys([world.backend, "gloo"])]
        if world.rank in members:
            found = AxisWorld(world, members, made[0], made[-1]), made[0]
            if world.backend != "gloo":  # a collective connects all ranks, as in World
                dist.all_reduce(torch.zeros(1, device=world.device), group=made[0])
    axis: tuple[AxisWorld, Any] = found
    return axis
