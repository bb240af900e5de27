"""The scheme of an edge cut whose rows go directly from their owner to each rank that reads them."""

from __future__ import annotations

from typing_extensions import override

from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategy.scheme import Scheme


class EdgeCutScheme(Scheme):
    """Each rank holds all in-edges of its nodes; S fetches the halo rows directly from their owners, R is the identity."""

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return LayoutSpec.edge_cut(world_size)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        return HaloExchange(shard.plan, world, meter)
