"""``dgcl``: an edge cut whose ranks fetch halo rows before each layer (graph allgather).

Source: DGCL, "An Efficient Communication Library for Distributed GNN Training" (EuroSys'21): sections 3 (replication), 4 (what
is exchanged), 5 (plans), 6 (how ranks follow them) and 7.1 (swap, DGCL-R).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from typing_extensions import override

from lightning_gnn.arguments import check_flags, check_whole, is_one_of, shown
from lightning_gnn.comm.by_width import relayed_by, route_of
from lightning_gnn.comm.detect import detect, hosts_of
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.measure import measured
from lightning_gnn.comm.plans import NO_TOPOLOGY, make_exchange
from lightning_gnn.comm.replicated import ReplicatedExchange
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.partition.edge_cut import several_alike
from lightning_gnn.partition.layout import Groups, LayoutSpec, Replicas, by_machine
from lightning_gnn.planning import Relation, Topology, find_topology, p2p
from lightning_gnn.planning.exchanges import ExchangeCost, Workload, edge_exchange, plan_exchanges
from lightning_gnn.planning.hierarchy import Hosts
from lightning_gnn.planning.presets import machines
from lightning_gnn.planning.topology import MAX_DEVICES
from lightning_gnn.strategies.base import GNNStrategy
from lightning_gnn.strategies.scheme import Scheme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PlanName = Literal["auto", "p2p", "spst", "swap", "replicate", "dgcl_r"]
PartitionName = Literal["auto", "flat", "hierarchical"]

_WHOLE_SMALL_GRAPH = 1000
"""Hops after which any node of a self-check's graph is reached."""


class DGCLScheme(Scheme):
    """Each rank holds all in-edges of its nodes; S fetches the halo rows, R is the identity. See :class:`DGCLStrategy`."""

    follows_plan = True

    def __init__(
        self,
        keep_constant: bool = True,
        plan: PlanName = "auto",
        topology: str | Path | Topology | None = "auto",
        partition: PartitionName = "auto",
        hops: int | None = None,
    ) -> None:
        for what, value, known in (("plan", plan, PlanName), ("partition", partition, PartitionName)):
            if not is_one_of(value, get_args(known)) or value is None:
                raise ValueError(f"{what} must be one of {', '.join(map(repr, get_args(known)))} (got {shown(value)}).")
        if not isinstance(topology, (str, Path, Topology, NoneType)):
            raise ValueError(f"topology must be a name, a path, a Topology or None (got {shown(topology)}).")
        check_flags(keep_constant=keep_constant)
        if hops is not None:
            check_whole(hops=hops)
        if topology is None and (plan in ("spst", "dgcl_r") or partition == "hierarchical"):
            asked = f'partition="{partition}"' if partition == "hierarchical" else f'plan="{plan}"'
            raise ValueError(NO_TOPOLOGY.format(asked))
        replicates = plan in ("replicate", "dgcl_r")
        if replicates and (hops is None or hops < 0):
            raise ValueError(
                f'plan="{plan}" replicates the neighbourhoods of nodes: say how far by hops, the number of propagations of the '
                f"model, such as hops=2 for a GCN of two layers (got {hops})."
            )
        if hops is not None and not replicates:
            raise ValueError(
                f'hops={hops} says how far plan="replicate" and "dgcl_r" replicate; plan="{plan}" does not.'
            )
        self.keep_constant, self.plan, self.topology = keep_constant, plan, topology
        self.partition, self.hops = partition, hops
        self._world: World | None = None
        self._shard: Shard | None = None
        self._exchanges: list[Exchange] = []  # two of a module that reads out-edges
        self._between: Topology | Hosts | None = None
        if plan == "swap":
            self.takes_no_codec = "With plan='swap' they read each other's where these lie. Use plan='p2p' or 'spst'."

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        """Returns what each rank must hold; raises ValueError for a topology that is not there or not for so many ranks, before
        anything is partitioned or started."""
        topology = self._topology(world_size, num_hosts)
        groups = replicas = None
        found: Groups | None = None if topology is None else topology.groups
        if topology is None and self.topology == "auto":
            found = by_machine(world_size, num_hosts)
        if found is not None and (
            self.partition == "hierarchical" or (self.partition == "auto" and several_alike(found))
        ):
            groups = found
        if self.hops is not None:
            alone = tuple((rank,) for rank in range(world_size))
            replicas = Replicas(self.hops, alone if self.plan == "replicate" or topology is None else topology.hosts)
        return LayoutSpec("edge_cut", world_size, groups, replicas=replicas, takes_types=self.hops is None)

    @override
    def less_memory(self, world_size: int) -> str:
        if self.hops is None:
            return super().less_memory(world_size)
        return 'Let ranks communicate instead: plan="p2p" or "spst".'

    @override
    def for_self_check(self) -> DGCLScheme:
        if self.hops is None:
            return DGCLScheme(self.keep_constant, topology=None)
        return DGCLScheme(self.keep_constant, "replicate", topology=None, hops=_WHOLE_SMALL_GRAPH)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        rank = world.rank
        plan = {"replicate": "p2p", "dgcl_r": "spst"}.get(self.plan, self.plan)
        topology = None if self.plan == "replicate" else self.links(world)
        offsets = np.cumsum([0, *shard.rows])  # copies of others' rows included
        exchange = make_exchange(plan, topology, shard.plan, shard.halos, offsets, world, meter)  # type: ignore[arg-type]
        self._shard = shard
        self._exchanges.append(exchange)
        if self.hops is None:
            return exchange
        own = {shard.edges[rank]: shard.edge_counts[rank], shard.rows[rank]: shard.counts[rank]}
        return ReplicatedExchange(exchange, own, self.hops)

    @override
    def unbind(self) -> None:
        self._world = self._shard = self._between = None
        self._exchanges = []

    @override
    def followed(self) -> dict[str, Any]:
        relayed = relayed_by(*self._followed())
        topology = {} if self._between is None else {"topology": self._between.name}
        if relayed is None:
            return {"name": self.plan if self.plan in ("swap", "replicate") else "p2p", **topology}
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
        if not isinstance(topology, Topology) or topology.num_devices == 1 or self.plan in ("swap", "replicate"):
            return None
        from lightning_gnn.planning.pictures import draw_links
        from lightning_gnn.planning.plan_cost import link_loads

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
            if self.plan in ("spst", "dgcl_r") and not between:
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


class DGCLStrategy(GNNStrategy):
    """Full-graph training over an edge cut, exact; ``Trainer(strategy="dgcl")``.

    Rows travel directly from their owner to each rank that reads them, and exactly those rows; or, where links differ, along
    the trees of a plan, over other ranks too (docs/planning.md).

    Args:
        keep_constant: keep what the layers' sums over neighbours make of the graph's own features, which is the same in every
            step: at most four times the memory of the features. Without, it is computed and sent anew.
        plan: how rows travel: ``"p2p"`` directly; ``"spst"`` along shortest path spanning trees over `topology` (DGCL section
            5.2), in as many stages as the cost model finds the fastest for rows of their width, also directly; ``"auto"``
            directly between GPUs and if all links are alike, otherwise as ``"spst"``. More than 64 ranks have a plan of two
            stages in place of trees, between machines and inside them. To compare with: ``"swap"`` through the
            memory of one machine; ``"replicate"`` not at all, each rank holds and computes the neighbourhood of its nodes;
            ``"dgcl_r"`` neighbourhoods per machine, SPST inside it.
        topology: what the ranks are joined by, rank i being device i. ``"auto"``: machines by host name, and what NVML and
            Linux tell of their GPUs and ports (docs/planning.md); CPU ranks of a machine are alike. ``"measured"``: what
            messages between each two ranks take when the run begins, each sent alone: what links share is not seen. Or
            ``"dgx1"``, ``"dgx1x2"``, ``"pcie8"``, ``"summit"``, ``"uniform"``, the path of a JSON file, or a topology, such as
            ``lightning-gnn topology measure`` writes; of larger ones the first devices are taken. None for links that are alike.
        partition: where METIS cuts: ``"flat"`` between all ranks alike; ``"hierarchical"`` between the machines of `topology`
            first, then between their sockets, then inside these (DGCL section 4.1); ``"auto"`` hierarchically if there are
            several machines of equally many ranks.
        hops: how far ``"replicate"`` and ``"dgcl_r"`` replicate: the number of propagations of the model.
        **options: see :class:`~lightning_gnn.strategies.base.GNNStrategy`.

    Raises:
        ValueError: an unknown plan, or one without its topology or hops; and, once the number of ranks is known, a topology
            that is not there, is too small or is not connected.
    """

    strategy_name = "dgcl"

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        yield {"plan": "p2p"}
        if not links_alike:
            yield {"plan": "spst"}

    def __init__(
        self,
        keep_constant: bool = True,
        plan: PlanName = "auto",
        topology: str | Path | Topology | None = "auto",
        partition: PartitionName = "auto",
        hops: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(DGCLScheme(keep_constant, plan, topology, partition, hops), **options)
