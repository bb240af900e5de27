"""``cover``: an edge cut whose ranks send the least that it allows: copies of sources, or partial results of targets.

Source: SuperGCN (arXiv 2411.16025), which has minimum vertex covers of cut edges for GCN; here for every conv that can be
computed over a vertex cut.
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
    """Ranks hold what they hold under `dgcl`; of the edges between two ranks, those of covered targets are computed by the
    sources' rank. See :class:`CoverStrategy`."""

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
        # Rows that go directly need no search for what the ranks are joined by.
        topology = None if self.plan == "p2p" and self.topology in ("auto", "measured") else self.links(world)
        make: MakeExchange = partial(make_exchange, self.plan, topology)  # type: ignore[arg-type]

        @cache
        def covered(copy_cost: int, result_cost: int) -> Callable[[Triples], SparseMatrix]:
            # All edges into a rank are its own, so each rank covers those that end at it, and none needs to know the others'.
            holders = cover_edges(plain_ids(shard.batch.edge_index).cpu().numpy(), owner, world.size, copy_cost, result_cost)
            return spread_edges(shard, holders, world, meter, make)

        def spread(copy_bytes: int, result_bytes: int) -> Callable[[Triples], SparseMatrix]:
            common = gcd(copy_bytes, result_bytes)
            return covered(copy_bytes // common, result_bytes // common)

        exchange = make(shard.plan, shard.halos, shard.offsets, world, meter)
        # Of a sum, a copy and a partial result are as wide, forward and backward.
        return exchange.with_products(Products(covered(1, 1), spread))


@twin_of.register
def _(scheme: CoverScheme) -> CoverScheme:
    return CoverScheme(topology=None)


class CoverStrategy(GNNStrategy):
    """Full-graph training over an edge cut with the fewest rows, exact; ``Trainer(strategy="cover")``.

    Each rank owns the nodes that it owns under ``dgcl``. An edge between two ranks needs the row of its source at the one, or the
    sum that its target gets from there, made at the other; for each ordered pair of ranks a minimum vertex cover of their edges
    says which, so that no choice sends fewer rows; of attention and extremes, whose partial results cost more than copies, one of
    minimum weight, so that none sends fewer bytes in a training step. docs/cover.md has the weights.

    Args:
        topology, partition: see :class:`~lightning_gnn.strategies.dgcl.strategy.DGCLStrategy`.
        plan: how rows travel: ``"p2p"`` directly; ``"spst"`` copies down the trees of a plan over `topology`, and partial results
            up such trees, added on the way, each as far as the cost model finds that faster (docs/cover.md).
        refine: move nodes between METIS's parts while that lowers the rows that are sent
            (:func:`~lightning_gnn.strategies.cover.refine.refine_for_cover`). Once, before training; docs/cover.md has what it
            gains.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: an unknown plan or partition, a `refine` that is no bool, or a plan without its topology; `refine` with a
            `partition` of the datamodule; once the number of ranks is known, a topology that is not there or is too small.
    """

    strategy_name = "cover"

    @override
    def log_exchange(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Tells nothing: arguments tell how rows travel."""

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
                f"{type(self).__name__}(refine=True) moves nodes between the parts that METIS makes, and "
                "GraphDataModule(partition=...) asks for other parts. Leave one of them out."
            )
        return data
