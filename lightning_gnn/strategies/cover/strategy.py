"""``cover``: an edge cut with minimum communication volume: features of sources or partial aggregates of targets.

Source: SuperGCN (arXiv 2411.16025), which uses minimum vertex covers of cut edges for GCN. Here they are used for every conv that
supports a vertex cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from math import gcd
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.arguments import check_flags
from lightning_gnn.comm.exchange import Exchange, Products, Triples
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import MakeExchange, SparseMatrix, spread_edges
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.lazy_ids import plain_ids
from lightning_gnn.data.shards import Shard
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.extensions.plans.scheme import PartitionName, PlannedScheme, make_exchange
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.shard import owners_of
from lightning_gnn.strategies.cover.covers import cover_edges
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.strategy.scheme import twin_of

CoverPlanName = Literal["p2p", "spst"]


class CoverScheme(PlannedScheme):
    """Scheme with the shards of ``dgcl`` that sends features or partial aggregates. See :class:`CoverStrategy`.

    The rank of the source computes the edges of covered targets.
    """

    plans = get_args(CoverPlanName)

    def __init__(
        self,
        plan: CoverPlanName = "p2p",
        topology: str | Path | Topology | None = "auto",
        partition: PartitionName = "auto",
        refine: bool = False,
    ) -> None:
        super().__init__(plan, topology, partition)
        check_flags(refine=refine)
        self.refine = refine

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        layout = replace(super().layout(world_size, num_hosts), takes_types=False)
        return replace(layout, method="metis_cover") if self.refine else layout

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        owner = owners_of(shard.offsets, shard.node_ids(world.rank))
        # Direct messages do not need the topology of the ranks.
        topology = None if self.plan == "p2p" and self.topology in ("auto", "measured") else self.links(world)
        make: MakeExchange = partial(make_exchange, self.plan, topology)  # type: ignore[arg-type]

        @cache
        def make_cover(copy_cost: int, result_cost: int) -> Callable[[Triples], SparseMatrix]:
            # Each rank has all edges into its own nodes and computes their cover itself.
            holders = cover_edges(plain_ids(shard.batch.edge_index).cpu().numpy(), owner, world.size, copy_cost, result_cost)
            return spread_edges(shard, holders, world, meter, make)

        def spread(copy_bytes: int, result_bytes: int) -> Callable[[Triples], SparseMatrix]:
            common = gcd(copy_bytes, result_bytes)
            return make_cover(copy_bytes // common, result_bytes // common)

        exchange = make(shard.plan, shard.halos, shard.offsets, world, meter)
        # For a sum, features and partial aggregates have equal width, forward and backward.
        return exchange.with_products(Products(make_cover(1, 1), spread))


@twin_of.register
def _(scheme: CoverScheme) -> CoverScheme:
    return CoverScheme(topology=None)


class CoverStrategy(GNNStrategy):
    """Full-graph training over an edge cut with the fewest rows sent, exact; ``Trainer(strategy="cover")``.

    Local nodes are the same as under ``dgcl``. For an edge between two ranks, either the features of its source are sent, or a
    partial aggregate for its target. A minimum vertex cover of the edges between each ordered pair of ranks decides. No other
    choice sends fewer rows.

    For attention and max or min aggregation, a partial aggregate costs more than features. The cover then has minimum weight: no
    other choice sends fewer bytes in a training step. docs/cover-internals.md lists the weights.

    Args:
        topology: hardware topology, see :class:`~lightning_gnn.strategies.dgcl.strategy.DGCLStrategy`.
        partition: partitioner, see :class:`~lightning_gnn.strategies.dgcl.strategy.DGCLStrategy`.
        plan: route of the rows. ``"p2p"``: directly. ``"spst"``: features down the trees of a plan over `topology`, partial
            aggregates up such trees, added on the way. Either is relayed only if the cost model predicts a gain
            (docs/cover-internals.md).
        refine: whether to move nodes between METIS's partitions, once before training, if this reduces the rows sent. See
            :func:`~lightning_gnn.strategies.cover.refine.refine_for_cover`; docs/cover-internals.md lists the gains.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: an unknown plan or partition, a `refine` that is not a bool, or a plan without its topology; `refine` with a
            `partition` of the datamodule. Raised once the number of ranks is known: a topology that does not exist or is too
            small.
    """

    strategy_name = "cover"

    @override
    def log_exchange(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Log nothing: the arguments determine the plan."""

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        yield {}

    def __init__(
        self,
        plan: CoverPlanName = "p2p",
        topology: str | Path | Topology | None = "auto",
        partition: PartitionName = "auto",
        refine: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(CoverScheme(plan, topology, partition, refine), **options)
        self.refine = refine

    @override
    def check_data(self, data: Any) -> GraphDataModule:
        data = super().check_data(data)
        if self.refine and data.partition is not None:
            raise ValueError(
                f"{type(self).__name__}(refine=True) moves nodes between the parts of METIS and does not support "
                "GraphDataModule(partition=...). Remove one of them."
            )
        return data
