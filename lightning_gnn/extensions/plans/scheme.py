"""Scheme of an edge cut whose halo exchange may follow the trees of a plan over the links between ranks.

Source: DGCL, "An Efficient Communication Library for Distributed GNN Training" (EuroSys'21): sections 4.1 (hierarchical
partitions), 5 (plans) and 6 (execution of plans by the ranks).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_gnn.arguments import is_one_of, quote
from lightning_gnn.callbacks.loggers import log_config, log_files, uploads
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.plans.topology import MAX_DEVICES, Hosts, Topology
from lightning_gnn.partition.layout import Groups, LayoutSpec, by_machine, has_equal_machines
from lightning_gnn.partition.shard import HaloPlan, Ids
from lightning_gnn.strategy.scheme import EdgeCutScheme

PlanName = Literal["auto", "p2p", "spst", "swap"]
PartitionName = Literal["auto", "flat", "hierarchical"]

NO_TOPOLOGY = (
    '{} needs a topology, got None. Pass topology="dgx1", "dgx1x2", "pcie8", a JSON file (docs/planning.md) or a Topology, '
    'or use plan="auto" or "p2p".'
)

_LINKS: WeakKeyDictionary[World, dict[Any, Topology | Hosts | None]] = WeakKeyDictionary()
"""Detected or measured topologies of running ranks, by requested name."""


class PlannedScheme(EdgeCutScheme):
    """Edge cut whose halo exchange may follow a plan over `topology`.

    The arguments are described in :class:`~lightning_gnn.strategies.dgcl.strategy.DGCLStrategy`.
    """

    plans: Sequence[str] = ("auto", "p2p", "spst")
    """Names of the supported plans."""
    over_links: Sequence[str] = ("spst",)
    """Supported plans that are made for a topology."""

    def __init__(
        self, plan: str = "auto", topology: str | Path | Topology | None = "auto", partition: PartitionName = "auto"
    ) -> None:
        for what, value, known in (("plan", plan, self.plans), ("partition", partition, get_args(PartitionName))):
            if not is_one_of(value, known) or value is None:
                raise ValueError(f"{what} must be one of {', '.join(map(repr, known))} (got {quote(value)}).")
        if not isinstance(topology, (str, Path, Topology, NoneType)):
            raise ValueError(f"topology must be a name, a path, a Topology or None (got {quote(topology)}).")
        if topology is None and (plan in self.over_links or partition == "hierarchical"):
            asked = f'partition="{partition}"' if partition == "hierarchical" else f'plan="{plan}"'
            raise ValueError(NO_TOPOLOGY.format(asked))
        self.plan, self.topology, self.partition = plan, topology, partition

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        """Returns the layout of the ranks.

        Raises:
            ValueError: if the topology does not exist or does not fit the number of ranks. The check runs before partitioning and
                before ranks start.
        """
        topology = self.topology_of(world_size, num_hosts)
        found: Groups | None = None if topology is None else topology.groups
        if topology is None and self.topology == "auto":
            found = by_machine(world_size, num_hosts)
        alike = found is not None and has_equal_machines(found)
        in_groups = self.partition == "hierarchical" or (self.partition == "auto" and alike)
        return replace(super().layout(world_size, num_hosts), groups=found if in_groups else None)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        offsets = np.cumsum([0, *shard.rows])  # includes copies of rows of other ranks
        return make_exchange(*self.way(world), shard.plan, shard.halos, offsets, world, meter)

    def way(self, world: World) -> tuple[Any, Topology | Hosts | None]:
        """Returns the plan, as :func:`make_exchange` takes it, and the topology or machines."""
        return self.plan, self.links(world)

    def links(self, world: World) -> Topology | Hosts | None:
        """Returns the topology of the running ranks, or only their machines if there are too many ranks for a topology.

        The result is cached, so the search runs once for all exchanges.
        """
        if self.topology not in ("auto", "measured"):
            return self.topology_of(world.size)
        found = _LINKS.setdefault(world, {})
        if self.topology not in found:
            found[self.topology] = self._search(world)
        return found[self.topology]

    def _search(self, world: World) -> Topology | Hosts | None:
        if world.size == 1:
            return None
        if self.topology == "measured":
            from lightning_gnn.extensions.plans.measure import measure_quickly

            return measure_quickly(world)
        from lightning_gnn.extensions.plans.detect import detect, hosts_of

        if world.size <= MAX_DEVICES:
            return detect(world)
        hosts = hosts_of(world)
        return Hosts(hosts) if len(hosts) > 1 else None

    def topology_of(self, size: int, num_hosts: int = 1) -> Topology | None:
        """Returns the topology of `size` ranks; for ``"auto"`` and ``"measured"`` only of machines, as no ranks run yet.

        Returns None without a topology, or if there are more ranks than the plan search supports.
        """
        if size > MAX_DEVICES and self.topology in ("auto", "uniform"):
            between = self.plan == "spst" and self.topology == "auto" and num_hosts > 1
            if self.plan in self.over_links and not between:
                raise ValueError(
                    f'plan="{self.plan}" supports at most {MAX_DEVICES} ranks, got {size}. Use plan="auto" or "p2p".'
                )
            return None
        if self.topology is None:
            return None
        if size > MAX_DEVICES and self.topology == "measured":
            raise ValueError(f'topology="measured" supports at most {MAX_DEVICES} ranks, got {size}. Use topology="auto".')
        if self.topology not in ("auto", "measured"):
            from lightning_gnn.extensions.plans.presets import find_topology  # imported late: most runs name no topology

            return find_topology(self.topology, size)
        from lightning_gnn.extensions.plans.wiring import machines

        return machines([size // num_hosts] * num_hosts)


def make_exchange(
    plan: PlanName,
    topology: Topology | Hosts | None,
    rows: HaloPlan,
    halos: Sequence[Ids],
    offsets: Ids,
    world: World,
    meter: Meter,
) -> Exchange:
    """Returns this rank's halo exchange. Collective: all ranks must call it.

    Args:
        plan: ``"p2p"``: direct. ``"spst"``: along trees over `topology`; for each row width the fastest trees by the cost model
            (DGCL section 5.1), including direct exchange. ``"swap"``: through host memory. ``"auto"``: ``"spst"`` between CPU
            ranks, else direct.
        topology: topology of the ranks; or their machines, for plans in two stages; None for uniform links.
        rows: rows of the direct exchange from and to this rank.
        halos: for each rank, the ids of its halo nodes, ascending.
        offsets: first id of each rank and the end, ``[P + 1]``.
        world: the ranks.
        meter: counts traffic.

    Raises:
        ValueError: for ``"p2p"`` if `topology` does not link the ranks; for ``"swap"`` if the ranks do not share memory.
    """
    if plan == "swap":
        # Imported late: most runs send rows directly and load no plans.
        from lightning_gnn.extensions.plans.planned_exchange import SwapExchange

        return SwapExchange(rows, halos[world.rank], offsets, world, meter)
    if topology is None or not looks_at_links(plan, topology, world):
        return HaloExchange(rows, world, meter)
    from lightning_gnn.extensions.plans.ways import follow_links

    return follow_links(plan, topology, (rows, halos, offsets, world, meter))


def looks_at_links(plan: PlanName, topology: Topology | Hosts | None, world: World) -> bool:
    """Returns whether the halo exchange depends on the topology.

    Relays have not been measured on GPUs, so GPU ranks follow trees only if a plan is requested by name.
    """
    if topology is None or world.size == 1:
        return False
    return plan != "auto" or (world.device.type == "cpu" and not topology.uniform)


def log_plan(
    trainer: pl.Trainer, shard: Shard, exchange: Exchange, between: Topology | Hosts | None, name: str | None = None
) -> None:
    """Log the plan for rows as wide as the input features, and a picture of the link loads.

    Args:
        shard: shard of this rank.
        exchange: exchange of the module's edges.
        between: topology or machines of the ranks.
        name: name of a plan that does not send along links; None for direct exchange and trees.
    """
    row_bytes = next((store.x[:1].nbytes for store in shard.batch.node_stores if "x" in store), 0)
    description = _describe_plan(exchange, between, row_bytes) | ({"name": name} if name else {})
    log_config(trainer, {"plan": description})
    if not (trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and uploads(trainer)):
        return
    if name is None and isinstance(between, Topology) and between.num_devices > 1:
        from lightning_gnn.extensions.plans.pictures import draw_links  # imported late: most runs draw nothing
        from lightning_gnn.extensions.plans.plan import p2p
        from lightning_gnn.extensions.plans.plan_cost import link_loads
        from lightning_gnn.extensions.plans.relation import Relation
        from lightning_gnn.extensions.plans.ways import route_of

        route = route_of(exchange, row_bytes)
        if route is None:
            route = p2p(Relation.from_halos(shard.halos, np.cumsum([0, *shard.rows])), between)
        title = f"{route.name} over {between.name}, rows of {row_bytes:,} bytes"
        picture = draw_links(link_loads(route, between, row_bytes), between, title)
        log_files(trainer, "plan", {"plan.json": json.dumps(description, indent=1) + "\n", "plan.png": picture})


def _describe_plan(exchange: Exchange, between: Topology | Hosts | None, row_bytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {"name": "p2p"} if between is None else {"name": "p2p", "topology": between.name}
    if isinstance(exchange, HaloExchange):
        return found
    from lightning_gnn.extensions.plans.ways import relayed_by

    relayed = relayed_by(exchange, row_bytes)
    if relayed is None:
        return found
    found["name"] = "spst"
    if relayed.route is not None:  # None: the plan of another rank, or a plan that no rank stores as a whole
        found |= {"stages": relayed.route.num_stages, "rows_per_exchange": int(relayed.route.traffic.sum())}
    return found
