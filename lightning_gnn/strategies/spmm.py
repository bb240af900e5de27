"""``spmm_1d`` and ``spmm_15d``: the graph's matrix on a process grid, in block rows that are broadcast stage by stage.

Source: CAGNET, "Reducing Communication in Graph Neural Network Training" (SC'20) and its GNNSys'21 version: sections 4.1 (1D,
Algorithm 1) and 4.2 (1.5D, Algorithm 2).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import override

from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.grid import BlockMatrix, GridMatrix, SparseMatrix, Triples
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.datamodules.shards import Shard
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.grid import GridContext
from lightning_gnn.partition.grid import ProcessGrid
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.base import GNNStrategy, Scheme

Permute = Literal["random", "metis"]


class SpMMScheme(Scheme):
    """An edge cut whose sums over neighbours are products on a process grid.

    Args:
        replication, sparsity_aware, permute, keep_constant: see :class:`SpMM15DStrategy`.
    """

    def __init__(
        self,
        replication: int = 1,
        sparsity_aware: bool = True,
        permute: Permute | None = "metis",
        keep_constant: bool = True,
    ) -> None:
        self.replication, self.sparsity_aware = replication, sparsity_aware
        self.permute, self.keep_constant = permute, keep_constant

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        """Returns what each rank must hold.

        Raises:
            ValueError: the replication factor does not divide the number of ranks.
        """
        grid = ProcessGrid(world_size, self.replication)
        rows = tuple(tuple(grid.in_row(row)) for row in range(grid.num_rows))
        return LayoutSpec("edge_cut", world_size, groups=rows if 1 < self.replication < world_size else None)

    @override
    def for_self_check(self) -> SpMMScheme:
        return SpMMScheme(2 if self.replication > 1 else 1, self.sparsity_aware, keep_constant=self.keep_constant)

    @override
    def bind(self, module: torch.nn.Module, shard: Shard, world: World, meter: Meter) -> Binding:
        batch = shard.batch
        grid, offsets = ProcessGrid(world.size, self.replication), np.cumsum([0, *shard.counts])
        kind = SparseMatrix if self.sparsity_aware else BlockMatrix

        def make_matrix(entries: Triples) -> GridMatrix:
            return kind(entries, grid, offsets, world, meter)

        own = np.arange(offsets[world.rank], offsets[world.rank + 1])
        node_ids = torch.from_numpy(np.concatenate([own, shard.halos[world.rank]])).to(world.device)
        exchange = HaloExchange(shard.plan, world, meter)
        kept_widths = 4 if self.keep_constant else 0
        weight = batch.get("edge_weight")
        context = GridContext(make_matrix, node_ids, exchange, batch.x, batch.edge_index, weight, kept_widths)
        return Binding(module, context)


class SpMM15DStrategy(GNNStrategy):
    """Full-graph training with 1.5D products, exact; ``Trainer(strategy="spmm_15d")``.

    Args:
        replication: c: partial sums of a node lie on so many ranks; 1 is the 1D algorithm.
        sparsity_aware: send only the rows that a nonzero reads instead of whole blocks.
        keep_constant: see :class:`~lightning_gnn.strategies.dgcl.DGCLStrategy`.
        **options: see :class:`~lightning_gnn.strategies.base.GNNStrategy`.
    """

    strategy_name = "spmm_15d"

    def __init__(
        self, replication: int = 1, sparsity_aware: bool = True, keep_constant: bool = True, **options: Any
    ) -> None:
        super().__init__(SpMMScheme(replication, sparsity_aware, keep_constant=keep_constant), **options)
