"""``dgcl``: an edge cut whose ranks fetch halo rows before each layer (graph allgather).

Source: DGCL, "An Efficient Communication Library for Distributed GNN Training" (EuroSys'21): sections 3 (replication), 4 (what
is exchanged), 5 (plans), 6 (how ranks follow them) and 7.1 (swap, DGCL-R).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_gnn.arguments import check_whole
from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.plans.scheme import PartitionName, PlannedScheme, log_plan
from lightning_gnn.extensions.plans.topology import Hosts, Topology
from lightning_gnn.partition.layout import LayoutSpec, Replicas
from lightning_gnn.strategy.base import GNNStrategy, refuse_options
from lightning_gnn.strategy.memory import MemoryAdvice, memory_advice
from lightning_gnn.strategy.scheme import twin_of

PlanName = Literal["auto", "p2p", "spst", "swap", "replicate", "dgcl_r"]

_WHOLE_SMALL_GRAPH = 1000
"""Hops after which any node of a self-check's graph is reached."""


class ReplicatedExchange(Exchange):
    """S and S^T inside a group of ranks, and behind the halo rows one of zeros: the source of edges from beyond.

    Rows that read it are not right, and nothing that is right reads these (:mod:`lightning_gnn.partition.replicas`).

    Args:
        inner: between the ranks of the group; idle where each is alone.
        own_lengths, most_propagations: see :class:`~lightning_gnn.comm.exchange.Exchange`.
    """

    def __init__(self, inner: Exchange, own_lengths: dict[int, int], most_propagations: int) -> None:
        super().__init__(inner.num_owned, inner.num_halo + 1, inner.world, inner.meter)
        self.inner, self.own_lengths, self.most_propagations = inner, own_lengths, most_propagations

    @override
    def begin_step(self, step: Step) -> None:
        self.inner.begin_step(step)

    @override
    def drain(self) -> None:
        self.inner.drain()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        halo[-1] = 0
        return (lambda: None) if self.inner.idle else self.inner.start_expand(x, halo[:-1], call)

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        return (lambda own: None) if self.inner.idle else self.inner.start_reduce(halo[:-1], call)

    @override
    def reduce(self, x: Tensor, layer: str) -> Tensor:
        raise ValueError(
            f"'{layer}' sums over the out-edges of each node, of which replicas know some only. Let ranks communicate instead: "
            'plan="p2p" or "spst".'
        )


class DGCLScheme(PlannedScheme):
    """Each rank holds all in-edges of its nodes; S fetches the halo rows, R is the identity. See :class:`DGCLStrategy`."""

    plans = get_args(PlanName)
    over_links = ("spst", "dgcl_r")

    def __init__(
        self,
        plan: PlanName = "auto",
        topology: str | Path | Topology | None = "auto",
        partition: PartitionName = "auto",
        num_hops: int | None = None,
    ) -> None:
        super().__init__(plan, topology, partition)
        if num_hops is not None:
            check_whole(num_hops=num_hops)
        replicates = plan in ("replicate", "dgcl_r")
        if replicates and (num_hops is None or num_hops < 0):
            raise ValueError(
                f'plan="{plan}" replicates the neighbourhoods of nodes: say how far by num_hops, the number of propagations '
                "of the "
                f"model, such as num_hops=2 for a GCN of two layers (got {num_hops})."
            )
        if num_hops is not None and not replicates:
            raise ValueError(f'num_hops={num_hops} says how far plan="replicate" and "dgcl_r" replicate; plan="{plan}" does not.')
        self.num_hops = num_hops

    def over(self, topology: str | Path | Topology) -> DGCLScheme:
        """Returns the same scheme over another topology."""
        return DGCLScheme(cast(PlanName, self.plan), topology, self.partition, self.num_hops)

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        layout = super().layout(world_size, num_hosts)
        if self.num_hops is None:
            return layout
        topology = self.topology_of(world_size, num_hosts)
        alone = tuple((rank,) for rank in range(world_size))
        groups = alone if self.plan == "replicate" or topology is None else topology.hosts
        return replace(layout, replicas=Replicas(self.num_hops, groups), takes_types=False)

    @override
    def way(self, world: World) -> tuple[Any, Topology | Hosts | None]:
        if self.plan == "replicate":
            return "p2p", None
        return "spst" if self.plan == "dgcl_r" else self.plan, self.links(world)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        exchange = super().exchange(shard, world, meter)
        if self.num_hops is None:
            return exchange
        rank = world.rank
        own = {shard.edges[rank]: shard.edge_counts[rank], shard.rows[rank]: shard.counts[rank]}
        return ReplicatedExchange(exchange, own, self.num_hops)


@twin_of.register
def _(scheme: DGCLScheme) -> DGCLScheme:
    if scheme.num_hops is None:
        return DGCLScheme(topology=None)
    return DGCLScheme("replicate", topology=None, num_hops=_WHOLE_SMALL_GRAPH)


@memory_advice.register
def _(scheme: DGCLScheme) -> MemoryAdvice:
    if scheme.num_hops is None:
        return MemoryAdvice(twin_of(scheme))
    return MemoryAdvice(twin_of(scheme), less=lambda ranks: 'Let ranks communicate instead: plan="p2p" or "spst".')


class DGCLStrategy(GNNStrategy):
    """Full-graph training over an edge cut, exact; ``Trainer(strategy="dgcl")``.

    Rows travel directly from their owner to each rank that reads them, and exactly those rows; or, where links differ, along
    the trees of a plan, over other ranks too (docs/planning.md).

    Args:
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
        num_hops: how far ``"replicate"`` and ``"dgcl_r"`` replicate: the number of propagations of the model.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: an unknown plan, or one without its topology or hops; and, once the number of ranks is known, a topology
            that is not there, is too small or is not connected.
    """

    strategy_name = "dgcl"
    scheme: DGCLScheme

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        yield {"plan": "p2p"}
        if not links_alike:
            yield {"plan": "spst"}

    def __init__(
        self,
        plan: PlanName = "auto",
        topology: str | Path | Topology | None = "auto",
        partition: PartitionName = "auto",
        num_hops: int | None = None,
        **options: Any,
    ) -> None:
        if plan == "swap":
            refuse_options(options, ["codec"], "With plan='swap' ranks read rows where they lie. Use plan='p2p' or 'spst'.")
        super().__init__(DGCLScheme(plan, topology, partition, num_hops), **options)

    @override
    def log_exchange(self, trainer: pl.Trainer, shard: Shard) -> None:
        scheme, exchange = self.scheme, self.steps.binding.context.exchange
        if isinstance(exchange, ReplicatedExchange):
            exchange = exchange.inner
        between = None if scheme.plan == "replicate" else scheme.links(self.world)
        log_plan(trainer, shard, exchange, between, scheme.plan if scheme.plan in ("swap", "replicate") else None)
