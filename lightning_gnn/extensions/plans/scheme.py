"""The scheme of an edge cut whose rows may follow the trees of a plan over the links between ranks.

Source: DGCL, "An Efficient Communication Library for Distributed GNN Training" (EuroSys'21): sections 4.1 (hierarchical cuts),
5 (plans) and 6 (how ranks follow them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from typing_extensions import override

from lightning_gnn.arguments import is_one_of, shown
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.plans import Relation, Topology, find_topology, p2p
from lightning_gnn.extensions.plans.by_width import relayed_by, route_of
from lightning_gnn.extensions.plans.detect import detect, hosts_of
from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload, edge_exchange, plan_exchanges
from lightning_gnn.extensions.plans.hierarchy import Hosts
from lightning_gnn.extensions.plans.make_exchange import NO_TOPOLOGY, make_exchange
from lightning_gnn.extensions.plans.measure import measured
from lightning_gnn.extensions.plans.presets import machines
from lightning_gnn.extensions.plans.topology import MAX_DEVICES
from lightning_gnn.partition.edge_cut import several_alike
from lightning_gnn.partition.layout import Groups, LayoutSpec, by_machine
from lightning_gnn.strategy.edge_cut import EdgeCutScheme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PartitionName = Literal["auto", "flat", "hierarchical"]


class PlannedScheme(EdgeCutScheme):
    """An edge cut whose rows may follow a plan over `topology`; arguments as of
    :class:`~lightning_gnn.strategies.dgcl.strategy.DGCLStrategy`."""

    plans: Sequence[str] = ("auto", "p2p", "spst")
    """The names of plans that it knows."""
    over_links: Sequence[str] = ("spst",)
    """Of these, the plans that are made for a topology."""

    def __init__(
        self,
        keep_constant: bool = True,
        plan: str = "auto",
        topology: str | Path | Topology | None = "auto",
        partition: PartitionName = "auto",
    ) -> None:
        for what, value, known in (("plan", plan, self.plans), ("partition", partition, get_args(PartitionName))):
            if not is_one_of(value, known) or value is None:
                raise ValueError(f"{what} must be one of {', '.join(map(repr, known))} (got {shown(value)}).")
        if not isinstance(topology, (str, Path, Topology, NoneType)):
            raise ValueError(f"topology must be a name, a path, a Topology or None (got {shown(topology)}).")
        super().__init__(keep_constant)
        if topology is None and (plan in self.over_links or partition == "hierarchical"):
            asked = f'partition="{partition}"' if partition == "hierarchical" else f'plan="{plan}"'
            raise ValueError(NO_TOPOLOGY.format(asked))
        self.plan, self.topology, self.partition = plan, topology, partition
        self._world: World | None = None
        self._shard: Shard | None = None
        self._exchanges: list[Exchange] = []  # two of a module that reads out-edges
        self._between: Topology | Hosts | None = None

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        """Returns what each rank must hold; raises ValueError for a topology that is not there or not for so many ranks, before
        anything is partitioned or started."""
        topology = self._topology(world_size, num_hosts)
        found: Groups | None = None if topology is None else topology.groups
        if topology is None and self.topology == "auto":
            found = by_machine(world_size, num_hosts)
        alike = found is not None and several_alike(found)
        in_groups = self.partition == "hierarchical" or (self.partition == "auto" and alike)
        return replace(super().layout(world_size, num_hosts), groups=found if in_groups else None)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        offsets = np.cumsum([0, *shard.rows])  # copies of others' rows included
        exchange = make_exchange(*self.way(world), shard.plan, shard.halos, offsets, world, meter)
        self._shard = shard
        self._exchanges.append(exchange)
        return exchange

    def way(self, world: World) -> tuple[Any, Topology | Hosts | None]:
        """Returns the plan that rows follow, as :func:`make_exchange` takes it, and over which links."""
        return self.plan, self.links(world)

    @override
    def unbind(self) -> None:
        self._world = self._shard = self._between = None
        self._exchanges = []

    @override
    def followed(self) -> dict[str, Any]:
        relayed = relayed_by(*self._followed())
        topology = {} if self._between is None else {"topology": self._between.name}
        if relayed is None:
            return {"name": "p2p", **topology}
        if relayed.route is None:  # of another rank, or of a plan that no rank knows whole
            return {"name": "spst", **topology}
        route = relayed.route
        return {"name": "spst", **topology, "stages": route.num_stages, "rows_per_exchange": int(route.traffic.sum())}

    @override
    def exchanges(self, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
        if topology is None:
            return [edge_exchange("p2p", work, None, followed=True)]
        found = {each.scheme: each for each in plan_exchanges(work, topology)}
        planned, name = found["spst"].plan, "spst" if self.plan == "auto" else self.plan
        direct = planned is None or planned.num_stages <= 1 or (self.plan == "auto" and topology.uniform)
        if name == "spst" and direct:
            name = "p2p"
        return [replace(each, followed=each.scheme == name) for each in found.values()]

    @override
    def picture(self, shard: Shard) -> Figure | None:
        topology = self._between
        if not isinstance(topology, Topology) or topology.num_devices == 1:
            return None
        from lightning_gnn.extensions.plans.pictures import draw_links
        from lightning_gnn.extensions.plans.plan_cost import link_loads

        exchange, row_bytes = self._followed()
        route = route_of(exchange, row_bytes)
        if route is None:
            route = p2p(Relation.from_halos(shard.halos, np.cumsum([0, *shard.rows])), topology)
        title = f"{route.name} over {topology.name}, rows of {row_bytes:,} bytes"
        return draw_links(link_loads(route, topology, row_bytes), topology, title)

    def _followed(self) -> tuple[Exchange | None, int]:
        """Returns the exchange of the module's edges, and the bytes of a row of features."""
        if self._shard is None:
            return None, 0
        return self._exchanges[-1], self._shard.batch.x[:1].nbytes

    def links(self, world: World) -> Topology | Hosts | None:
        """Returns what the running ranks are joined by; only their machines, of more ranks than have a topology.

        Searched for once, whatever the number of exchanges.
        """
        if self._world is not world:
            self.unbind()
            self._world, self._between = world, self._links(world)
        return self._between

    def _links(self, world: World) -> Topology | Hosts | None:
        if self.topology == "measured" and world.size > 1:
            return measured(world)
        if self.topology == "auto":
            if world.size <= MAX_DEVICES:
                return detect(world)
            hosts = hosts_of(world)
            return Hosts(hosts) if len(hosts) > 1 else None
        return self._topology(world.size)

    def _topology(self, size: int, num_hosts: int = 1) -> Topology | None:
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
