"""``dgcl``: an edge cut whose ranks fetch halo rows before each layer (graph allgather).

Source: DGCL, "An Efficient Communication Library for Distributed GNN Training" (EuroSys'21), section 4.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.datamodules.store import Shard
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.base import GNNStrategy, Scheme


class DGCLScheme(Scheme):
    """Each rank holds all in-edges of its nodes; S fetches the halo rows, R is the identity.

    Args:
        keep_constant: see :class:`DGCLStrategy`.
    """

    def __init__(self, keep_constant: bool = True) -> None:
        self.keep_constant = keep_constant

    @override
    def layout(self, world_size: int) -> LayoutSpec:
        return LayoutSpec("edge_cut", world_size)

    @override
    def bind(self, module: torch.nn.Module, shard: Shard, world: World, meter: Meter) -> Binding:
        batch = shard.batch
        exchange = HaloExchange(shard.plan, world, meter)
        kept_widths = 4 if self.keep_constant else 0
        context = GraphContext(exchange, batch.x, batch.edge_index, batch.get("edge_weight"), kept_widths)
        return Binding(module, context)


class DGCLStrategy(GNNStrategy):
    """Full-graph training over an edge cut, exact; ``Trainer(strategy="dgcl")``.

    Rows travel directly from their owner to each rank that reads them, and exactly those rows.

    Args:
        keep_constant: keep what the layers' sums over neighbours make of the graph's own features, which is the same in every
            step: at most four times the memory of the features. Without, it is computed and sent anew.
        **options: see :class:`~lightning_gnn.strategies.base.GNNStrategy`.
    """

    strategy_name = "dgcl"

    def __init__(self, keep_constant: bool = True, **options: Any) -> None:
        super().__init__(DGCLScheme(keep_constant), **options)
