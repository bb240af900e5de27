"""The scheme of an edge cut whose rows may follow the trees of a plan over the links between ranks.

Source: DGCL, "An Efficient Communication Library for Distributed GNN Training" (EuroSys'21): sections 4.1 (hierarchical cuts),
5 (plans) and 6 (how ranks follow them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
from typing_extensions import override

from lightning_gnn.arguments import is_one_of, shown
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.plans.detect import detect, hosts_of
from lightning_gnn.extensions.plans.make_exchange import NO_TOPOLOGY, make_exchange
from lightning_gnn.extensions.plans.presets import find_topology, machines
from lightning_gnn.extensions.plans.topology import MAX_DEVICES, Hosts, Topology
from lightning_gnn.partition.edge_cut import several_alike
from lightning_gnn.partition.layout import Groups, LayoutSpec, by_machine
from lightning_gnn.strategy.edge_cut import EdgeCutScheme

PartitionName = Literal["auto", "flat", "hierarchical"]


_LINKS: WeakKeyDictionary[World, dict[Any, Topology | Hosts | None]] = WeakKeyDictionary()
"""What has been found of running ranks, by the name that was asked for."""


class PlannedScheme(EdgeCutScheme):
    """An edge cut whose rows may follow a plan over `topology`; arguments as of
    :class:`~lightning_gnn.strategies.dgcl.strategy.DGCLStrategy`."""

    plans: Sequence[str] = ("auto", "p2p", "spst")
    """The names of plans that it knows."""
    over_links: Sequence[str] = ("spst",)
    """Of these, the plans that are made for a topology."""

    def __init__(
        self,
        plan: str = "auto",
        topology: str | Path | Topology | None = "auto",
        partition: PartitionName = "auto",
    ) -> None:
        for what, value, known in (("plan", plan, self.plans), ("partition", partition, get_args(PartitionName))):
            if not is_one_of(value, known) or value is None:
                raise ValueError(f"{what} must be one of {', '.join(map(repr, known))} (got {shown(value)}).")
        if not isinstance(topology, (str, Path, Topology, NoneType)):
            raise ValueError(f"topology must be a name, a path, a Topology or None (got {shown(topology)}).")
        if topology is None and (plan in self.over_links or partition == "hierarchical"):
            asked = f'partition="{partition}"' if partition == "hierarchical" else f'plan="{plan}"'
            raise ValueError(NO_TOPOLOGY.format(asked))
        self.plan, self.topology, self.partition = plan, topology, partition

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        """Returns what each rank must hold; raises ValueError for a topology that is not there or not for so many ranks, before
        anything is partitioned or started."""
        topology = self.topology_of(world_size, num_hosts)
        found: Groups | None = None if topology is None else topology.groups
        if topology is None and self.topology == "auto":
            found = by_machine(world_size, num_hosts)
        alike = found is not None and several_alike(found)
        in_groups = self.partition == "hierarchical" or (self.partition == "auto" and alike)
        return replace(super().layout(world_size, num_hosts), groups=found if in_groups else None)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        offsets = np.cumsum([0, *shard.rows])  # copies of others' rows included
        return make_exchange(*self.way(world), shard.plan, shard.halos, offsets, world, meter)

    def way(self, world: World) -> tuple[Any, Topology | Hosts | None]:
        """Returns the plan that rows follow, as :func:`make_exchange` takes it, and over which links."""
        return self.plan, self.links(world)

    def links(self, world: World) -> Topology | Hosts | None:
        """Returns what the running ranks are joined by; only their machines, of more ranks than have a topology.

        Searched for once, whatever the number of exchanges.
        """
        if self.topology not in ("auto", "measured"):
            return self.topology_of(world.size)
        found = _LINKS.setdefault(world, {})
        if self.topology not in found:
            found[self.topology] = self._search(world)
        return found[self.topology]

    def _search(self, world: World) -> Topology | Hosts | None:
        if self.topology == "measured":
            from lightning_gnn.extensions.plans.measure import measured

            return measured(world) if world.size > 1 else self.topology_of(1)
        if world.size <= MAX_DEVICES:
            return detect(world)
        hosts = hosts_of(world)
        return Hosts(hosts) if len(hosts) > 1 else None

    def topology_of(self, size: int, num_hosts: int = 1) -> Topology | None:
        """Returns the topology of so many ranks; ``"auto"`` and ``"measured"`` see machines only, as there are no ranks yet.

        None where there is none to search: of more ranks than plans are searched for.
        """
        if size > MAX_DEVICES and self.topology in ("auto", "uniform"):
            between = self.plan == "spst" and self.topology == "auto" and num_hosts > 1
            if self.plan in self.over_links and not between:
                raise ValueError(
                    f'plan="{self.plan}" plans for at most {MAX_DEVICES} ranks, and there are {size}. Rows can go directly: '
                    'plan="auto" or "p2p".'
                )
            return None
        if self.topology is None:
            return None
        if size > MAX_DEVICES and self.topology == "measured":
            raise ValueError(
                f'topology="measured" times messages between each two ranks, of at most {MAX_DEVICES} (got {size}). '
                'Use topology="auto".'
            )
        if self.topology not in ("auto", "measured"):
            return find_topology(self.topology, size)
        return machines([size // num_hosts] * num_hosts)
