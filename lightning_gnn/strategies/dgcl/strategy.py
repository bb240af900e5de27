"""``dgcl``: an edge cut whose ranks receive halo features before each layer (graph allgather).

Source: DGCL, "An Efficient Communication Library for Distributed GNN Training" (EuroSys'21): sections 3 (replication), 4
(exchanged data), 5 (plans), 6 (execution of plans) and 7.1 (swap, DGCL-R).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_gnn.arguments import check_whole, is_one_of, quote
from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.plans.scheme import PartitionName, PlannedScheme, log_plan
from lightning_gnn.extensions.plans.topology import Hosts, Topology
from lightning_gnn.partition.layout import LayoutSpec, Replicas
from lightning_gnn.registry import feature
from lightning_gnn.strategy.base import GNNStrategy, refuse_options
from lightning_gnn.strategy.memory import MemoryAdvice, memory_advice
from lightning_gnn.strategy.scheme import twin_of

PlanName = Literal["auto", "p2p", "spst", "swap", "replicate", "dgcl_r"]

_WHOLE_SMALL_GRAPH = 1000
"""Number of hops within which all nodes of a self-check's graph are reachable."""


class ReplicatedExchange(Exchange):
    """Halo exchange (S, and S^T in the backward pass) inside a group of ranks, with one halo row of zeros appended.

    The row of zeros is the source of edges from nodes outside the group. Rows that depend on it are incorrect. No correct row
    depends on them (:mod:`lightning_gnn.partition.replicas`).

    Args:
        inner: exchange between the ranks of the group; not used if each group is a single rank.
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
        return (lambda _: None) if self.inner.idle else self.inner.start_reduce(halo[:-1], call)

    @override
    def reduce(self, x: Tensor, layer: str) -> Tensor:
        raise ValueError(
            f"'{layer}' sums over the out-edges of each node, which is not supported with replication: replicas have some of "
            'these edges only. Use plan="p2p" or "spst".'
        )


class DGCLScheme(PlannedScheme):
    """Scheme in which each rank has all in-edges of its local nodes. See :class:`DGCLStrategy`.

    S sends halo features; R is the identity.
    """

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
                f'num_hops must be set with plan="{plan}", got {num_hops}. Set it to the number of propagations of the model, '
                "such as num_hops=2 for a GCN of two layers."
            )
        if num_hops is not None and not replicates:
            raise ValueError(f'num_hops={num_hops} needs plan="replicate" or "dgcl_r", got plan="{plan}". Remove num_hops.')
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
    return MemoryAdvice(twin_of(scheme), less=lambda ranks: 'Use plan="p2p" or "spst", which communicate instead.')


class DGCLStrategy(GNNStrategy):
    """Full-graph training over an edge cut, exact; ``Trainer(strategy="dgcl")``.

    Each owner sends exactly the features that another rank needs, directly to that rank. If links differ, features are relayed
    along the trees of a plan (docs/planning.md).

    Args:
        plan: route of the features.

            - ``"p2p"``: directly.
            - ``"spst"``: along shortest path spanning trees over `topology` (DGCL section 5.2). The cost model chooses the number
              of stages for the width of the features; direct messages are one of the choices.
            - ``"auto"``: directly between GPUs or if all links are equal, otherwise as ``"spst"``. With more than 64 ranks, a
              plan of two stages replaces the trees: between machines, then inside them.
            - ``"swap"``, for comparison: through the memory of one machine.
            - ``"replicate"``, for comparison: nothing is sent; each rank stores and computes the neighborhood of its nodes.
            - ``"dgcl_r"``, for comparison: neighborhoods are replicated per machine, SPST inside a machine.
        topology: links between ranks; rank i is device i.

            - ``"auto"``: machines by host name, with the links that NVML and Linux report for GPUs and ports (docs/planning.md).
              CPU ranks of a machine are equal.
            - ``"measured"``: measures each pair of ranks at the start of the run, one message at a time. Contention on shared
              links is not measured.
            - ``"dgx1"``, ``"dgx1x2"``, ``"pcie8"``, ``"summit"``, ``"uniform"``, the path of a JSON file, or a topology, as
              written by ``lightning-gnn topology measure``. The first devices of a larger topology are used.
            - None: all links are equal.
        partition: levels of the METIS partition.

            - ``"flat"``: one partition into all ranks.
            - ``"hierarchical"``: between the machines of `topology`, then between their sockets, then inside them (DGCL section
              4.1).
            - ``"auto"``: hierarchical for several machines with equal numbers of ranks.
        num_hops: number of hops that ``"replicate"`` and ``"dgcl_r"`` replicate: the number of propagations of the model.
        cuda_graph: whether training steps on a GPU are captured and replayed as graphs (docs/gpus.md, "CUDA graphs"). ``"auto"``
            logs why a step cannot be captured; True raises an error.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: an unknown plan, or a plan without its topology or hops. Raised once the number of ranks is known: a topology
            that does not exist, is too small or is not connected.
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
        cuda_graph: bool | Literal["auto"] = False,
        **options: Any,
    ) -> None:
        if not (isinstance(cuda_graph, bool) or is_one_of(cuda_graph, ["auto"])):
            raise ValueError(f"cuda_graph must be False, 'auto' or True (got {quote(cuda_graph)}).")
        self.cuda_graph = cuda_graph
        if plan == "swap":
            refuse_options(options, ["codec"], "With plan='swap' ranks read rows where they lie. Use plan='p2p' or 'spst'.")
        super().__init__(DGCLScheme(plan, topology, partition, num_hops), **options)

    @override
    def begin_stage(self, trainer: pl.Trainer, shard: Shard) -> None:
        super().begin_stage(trainer, shard)
        if self.cuda_graph and trainer.state.fn == TrainerFn.FITTING:
            self.steps.graphs = feature("StepGraphs")(self, trainer, self.cuda_graph is True)

    @override
    def log_exchange(self, trainer: pl.Trainer, shard: Shard) -> None:
        scheme, exchange = self.scheme, self.steps.binding.context.exchange
        if isinstance(exchange, ReplicatedExchange):
            exchange = exchange.inner
        between = None if scheme.plan == "replicate" else scheme.links(self.world)
        log_plan(trainer, shard, exchange, between, scheme.plan if scheme.plan in ("swap", "replicate") else None)
