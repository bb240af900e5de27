"""The scheme of an edge cut whose rows go directly from their owner to each rank that reads them."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_gnn.arguments import check_flags
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategy.scheme import Scheme


class EdgeCutScheme(Scheme):
    """Each rank holds all in-edges of its nodes; S fetches the halo rows directly from their owners, R is the identity.

    Args:
        keep_constant: keep what layers make of the graph's own features, which is the same in every step.
    """

    def __init__(self, keep_constant: bool = True) -> None:
        check_flags(keep_constant=keep_constant)
        self.keep_constant = keep_constant

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return LayoutSpec.edge_cut(world_size)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        return HaloExchange(shard.plan, world, meter)

    @override
    def followed(self) -> dict[str, Any]:
        return {"name": "p2p"}

    @override
    def for_self_check(self) -> EdgeCutScheme:
        return EdgeCutScheme(self.keep_constant)
