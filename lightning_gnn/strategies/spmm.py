"""``spmm_1d`` and ``spmm_15d``: the graph's matrix on a process grid, in block rows that are broadcast stage by stage.

Source: CAGNET, "Reducing Communication in Graph Neural Network Training" (SC'20) and its GNNSys'21 version: sections 4.1 (1D,
Algorithm 1) and 4.2 (1.5D, Algorithm 2).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_gnn.checks.memory import available_bytes
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.grid import BlockMatrix, GridMatrix, SparseMatrix, Triples
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.datamodules.shards import Shard
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.grid import GridContext
from lightning_gnn.partition.grid import ProcessGrid, legal_replications
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.shard import Ids
from lightning_gnn.planning.grid_cost import GridCost, block_cost, choose, sparse_cost
from lightning_gnn.strategies.base import GNNStrategy, Scheme

Permute = Literal["metis", "random"]


class SpMMScheme(Scheme):
    """Each rank owns a sub-block of nodes and their in-edges; sums over neighbours are products on a process grid.

    Args:
        replication, sparsity_aware, permute, keep_constant: see :class:`SpMM15DStrategy`.

    Raises:
        ValueError: a replication factor below 1, an unknown permutation.
    """

    def __init__(
        self,
        replication: int | None,
        sparsity_aware: bool,
        permute: Permute | None,
        keep_constant: bool = True,
    ) -> None:
        if replication is not None and replication < 1:
            raise ValueError(f"replication is a number of ranks, at least 1 (got {replication}).")
        if permute not in ("metis", "random", None):
            raise ValueError(f"permute must be 'metis', 'random' or None (got {permute!r}).")
        self.replication, self.sparsity_aware = replication, sparsity_aware
        self.permute, self.keep_constant = permute, keep_constant

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        """Returns what each rank must hold.

        Raises:
            ValueError: the replication factor does not divide the number of ranks; names those that do.
        """
        ProcessGrid(world_size, self.replication or 1)
        return LayoutSpec("edge_cut", world_size, method=self.permute or "contiguous")

    @override
    def for_self_check(self) -> SpMMScheme:
        return SpMMScheme(1 if self.replication == 1 else 2, self.sparsity_aware, self.permute, self.keep_constant)

    @override
    def bind(self, module: torch.nn.Module, shard: Shard, world: World, meter: Meter) -> Binding:
        batch = shard.batch
        offsets = np.cumsum([0, *shard.counts])
        own = np.arange(offsets[world.rank], offsets[world.rank + 1])
        node_ids = np.concatenate([own, shard.halos[world.rank]])
        grid = self._grid(shard, offsets, node_ids, world)
        kind = SparseMatrix if self.sparsity_aware else BlockMatrix

        def make_matrix(entries: Triples) -> GridMatrix:
            return kind(entries, grid, offsets, world, meter)

        context = GridContext(
            make_matrix,
            torch.from_numpy(node_ids).to(world.device),
            HaloExchange(shard.plan, world, meter),
            batch.x,
            batch.edge_index,
            batch.get("edge_weight"),
            4 if self.keep_constant else 0,
        )
        return Binding(module, context)

    def _grid(self, shard: Shard, offsets: Ids, node_ids: Ids, world: World) -> ProcessGrid:
        """Returns the grid that is asked for, or that with the replication factor that moves least."""
        if self.replication is not None or world.size == 1:
            return ProcessGrid(world.size, self.replication or 1)
        grids = [ProcessGrid(world.size, c) for c in legal_replications(world.size)]
        row_bytes = shard.batch.x[:1].nbytes
        costs: list[GridCost] = []
        if self.sparsity_aware:
            source, target = node_ids[shard.batch.edge_index.cpu().numpy()]
            own = torch.tensor([_partial_sums(source, target, grid, offsets, world.rank) for grid in grids])
            partial_sums = world.all_reduce_(own.to(world.device), "Choosing the replication factor").tolist()
            for grid, partial in zip(grids, partial_sums):
                costs.append(sparse_cost(grid, offsets, shard.halos, int(partial), row_bytes))
        else:
            costs = [block_cost(grid, offsets, row_bytes) for grid in grids]
        # Of the rank that has least, so that all choose alike.
        available = available_bytes() if world.device.type == "cpu" else None
        least = min((each for each in world.all_gather_object(available) if each is not None), default=None)
        chosen = choose(costs, None if least is None else least // world.size)
        rank_zero_info(
            f"replication={chosen.grid.replication} of {', '.join(str(cost.grid.replication) for cost in costs)}: a product "
            f"moves {chosen.rows:,} rows ("
            + ", ".join(f"{cost.grid.replication}: {cost.rows:,}" for cost in costs)
            + f") and holds {chosen.bytes_held / 1e6:.3g} MB more than its operands on a rank"
        )
        return chosen.grid


def _partial_sums(source: Ids, target: Ids, grid: ProcessGrid, offsets: Ids, rank: int) -> int:
    """Returns how often a node of this rank has in-edges from the chunk of another column than its own."""
    columns = np.array([grid.column_of(block) for block in range(grid.num_rows)])
    owner = np.searchsorted(offsets, source, side="right") - 1
    column = columns[owner // grid.replication]
    elsewhere = column != grid.column(rank)
    return len(np.unique(target[elsewhere] * grid.replication + column[elsewhere]))


class SpMM15DStrategy(GNNStrategy):
    """Full-graph training with products on a process grid, exact; ``Trainer(strategy="spmm_15d")``.

    Args:
        replication: c, a divisor of the number of ranks: partial sums of a node lie on so many of them, and each rank reads
            1 / c of the nodes. By default the one that moves the fewest rows.
        sparsity_aware: send only the rows that a nonzero reads, and the partial sums that one has added to; otherwise whole
            blocks, as published.
        permute: who owns which node, unless the datamodule says so: ``"metis"`` for few rows to send, ``"random"`` for blocks of
            equal weight, None for ranges of the graph's own order. By default METIS if `sparsity_aware`, else random.
        keep_constant: see :class:`~lightning_gnn.strategies.dgcl.DGCLStrategy`.
        **options: see :class:`~lightning_gnn.strategies.base.GNNStrategy`.

    Raises:
        ValueError: an unknown permutation; once the number of ranks is known, a replication factor that does not divide it.
    """

    strategy_name = "spmm_15d"

    def __init__(
        self,
        replication: int | None = None,
        sparsity_aware: bool = True,
        permute: Permute | Literal["auto"] | None = "auto",
        keep_constant: bool = True,
        **options: Any,
    ) -> None:
        if permute == "auto":
            permute = "metis" if sparsity_aware else "random"
        super().__init__(SpMMScheme(replication, sparsity_aware, permute, keep_constant), **options)


class SpMM1DStrategy(SpMM15DStrategy):
    """:class:`SpMM15DStrategy` with replication 1, CAGNET's Algorithm 1; ``Trainer(strategy="spmm_1d")``.

    Args:
        sparsity_aware, permute, keep_constant, **options: see :class:`SpMM15DStrategy`.
    """

    strategy_name = "spmm_1d"

    def __init__(
        self,
        sparsity_aware: bool = True,
        permute: Permute | Literal["auto"] | None = "auto",
        keep_constant: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(1, sparsity_aware, permute, keep_constant, **options)
