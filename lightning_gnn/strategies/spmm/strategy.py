"""``spmm``, ``spmm_1d``, ``spmm_15d``, ``spmm_2d`` and ``spmm_3d``: the adjacency matrix on a process grid.

Source: CAGNET, "Reducing Communication in Graph Neural Network Training" (SC'20) and its GNNSys'21 version: sections 4.1 (1D,
Algorithm 1), 4.2 (1.5D, Algorithm 2), 4.3 (2D) and 4.4 (3D).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_gnn.arguments import check_flags, check_whole, is_one_of, quote
from lightning_gnn.callbacks.loggers import log_config
from lightning_gnn.comm.exchange import Exchange, HaloExchange, Products
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.data.shards import Shard
from lightning_gnn.devices import available_bytes
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.shard import HaloPlan, Ids
from lightning_gnn.strategies.spmm.grid import ProcessCube, ProcessGrid, legal_replications, on_grid
from lightning_gnn.strategies.spmm.matrices import BlockMatrix, SummaMatrix
from lightning_gnn.strategies.spmm.traffic import MatrixByCall, block_cost, choose, sparse_cost
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.strategy.memory import MemoryAdvice, memory_advice
from lightning_gnn.strategy.scheme import Scheme, twin_of

Permute = Literal["metis", "random"]


class ProductScheme(Scheme):
    """Scheme in which each rank owns a range of nodes and their in-edges. See :class:`SpMM15DStrategy`.

    Sum aggregations are products with a distributed matrix.
    """

    def __init__(self, node_order: Permute | None) -> None:
        if not is_one_of(node_order, ("metis", "random", None)):
            raise ValueError(f"node_order must be 'metis', 'random' or None (got {quote(node_order)}).")
        self.node_order = node_order

    def check_ranks(self, world_size: int) -> None:
        """Raises ValueError with valid numbers of ranks if `world_size` is not one of them; in 1D, all are valid."""

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        self.check_ranks(world_size)
        return LayoutSpec("edge_cut", world_size, method=self.node_order or "contiguous")


class GridExchange(HaloExchange):
    """Halo exchange of direct messages for layers that do not use products.

    Attributes:
        grid: process grid of the products.
    """

    def __init__(self, plan: HaloPlan, world: World, meter: Meter, grid: ProcessGrid) -> None:
        super().__init__(plan, world, meter)
        self.grid = grid


class SpMMScheme(ProductScheme):
    """1D and 1.5D products; see :class:`SpMM15DStrategy`."""

    def __init__(self, replication_factor: int | None, sparsity_aware: bool, node_order: Permute | None) -> None:
        if replication_factor is not None:
            check_whole(replication_factor=replication_factor)
        check_flags(sparsity_aware=sparsity_aware)
        if replication_factor is not None and replication_factor < 1:
            raise ValueError(f"replication_factor must be at least 1, got {replication_factor}.")
        super().__init__(node_order)
        self.replication_factor, self.sparsity_aware = replication_factor, sparsity_aware

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        # In 1D, the features for a nonzero come only from their owner, so node types are exchanged separately.
        types = self.replication_factor == 1 and self.sparsity_aware
        return replace(super().layout(world_size, num_hosts), takes_types=types)

    @override
    def check_ranks(self, world_size: int) -> None:
        ProcessGrid(world_size, self.replication_factor or 1)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        if shard.types.is_hetero:
            return GridExchange(shard.plan, world, meter, ProcessGrid(world.size, 1))
        offsets = shard.offsets
        grid = self._grid(shard, offsets, shard.node_ids(world.rank), world)
        exchange = GridExchange(shard.plan, world, meter, grid)
        sparse = partial(SparseMatrix, holders=on_grid(grid, offsets), offsets=offsets, world=world, meter=meter)
        blocks = partial(BlockMatrix, grid=grid, offsets=offsets, world=world, meter=meter)
        spread = (lambda copy_bytes, result_bytes: sparse) if grid.replication > 1 else None
        return exchange.with_products(Products(sparse if self.sparsity_aware else blocks, spread))

    def _grid(self, shard: Shard, offsets: Ids, node_ids: Ids, world: World) -> ProcessGrid:
        """Returns the grid with the given replication factor, or with the factor that sends the fewest rows."""
        if self.replication_factor is not None or world.size == 1:
            return ProcessGrid(world.size, self.replication_factor or 1)
        grids = [ProcessGrid(world.size, c) for c in legal_replications(world.size)]
        row_bytes = shard.batch.x[:1].nbytes
        if self.sparsity_aware:
            source, target = node_ids[stored_ids(shard.batch.edge_index).cpu().numpy()]
            own = torch.tensor([_partial_sums(source, target, grid, offsets, world.rank) for grid in grids])
            partial_sums = world.all_reduce_(own.to(world.device), "Choosing the replication factor").tolist()
            sums_of = zip(grids, map(int, partial_sums))
            costs = [sparse_cost(grid, offsets, shard.halos, sums, row_bytes) for grid, sums in sums_of]
        else:
            costs = [block_cost(grid, offsets, row_bytes) for grid in grids]
        # Memory of the rank with the least, so that all ranks choose the same grid.
        available = available_bytes() if world.device.type == "cpu" else None
        least = min((each for each in world.all_gather_object(available) if each is not None), default=None)
        chosen = choose(costs, None if least is None else least // world.size)
        rank_zero_info(
            f"replication_factor={chosen.grid.replication} of {', '.join(str(cost.grid.replication) for cost in costs)}: a "
            "product "
            f"moves {chosen.rows:,} rows ("
            + ", ".join(f"{cost.grid.replication}: {cost.rows:,}" for cost in costs)
            + f") and holds {chosen.bytes_held / 1e6:.3g} MB more than its operands on a rank"
        )
        return chosen.grid


def _partial_sums(source: Ids, target: Ids, grid: ProcessGrid, offsets: Ids, rank: int) -> int:
    """Returns the number of partial aggregates of this rank's nodes.

    These are pairs of a node and another column whose chunk has sources of the node's in-edges.
    """
    column = grid.holders(offsets, target, source) % grid.replication
    elsewhere = column != grid.column(rank)
    return len(np.unique(target[elsewhere] * grid.replication + column[elsewhere]))


class CubeScheme(ProductScheme):
    """2D and 3D products; see :class:`SpMM2DStrategy`."""

    def __init__(self, dimensions: int, node_order: Permute | None, keep_blocks: bool = True, column: bool = False) -> None:
        super().__init__(node_order)
        self.dimensions, self.keep_blocks, self.column = dimensions, keep_blocks, column

    @override
    def check_ranks(self, world_size: int) -> None:
        self._cube(world_size)

    def _cube(self, ranks: int) -> ProcessCube:
        return ProcessCube(1, ranks) if self.column else ProcessCube.of(ranks, self.dimensions)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        cube = self._cube(world.size)
        of_ranks: dict[str, Any] = {"offsets": shard.offsets, "world": world, "meter": meter}
        products = partial(SummaMatrix, cube=cube, keep_blocks=self.keep_blocks, **of_ranks)
        # Attention and max or min aggregation use the edges that each rank has of the cube.
        dealt = partial(SparseMatrix, holders=on_grid(cube, shard.offsets), **of_ranks)
        return HaloExchange(shard.plan, world, meter).with_products(Products(products, lambda copy_bytes, result_bytes: dealt))


class AnyProductScheme(ProductScheme):
    """Products on the grid that sends the least; see :class:`SpMMStrategy`."""

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        products = partial(MatrixByCall, plan=shard.plan, offsets=shard.offsets, world=world, meter=meter)
        return HaloExchange(shard.plan, world, meter).with_products(Products(products))


@twin_of.register
def _(scheme: SpMMScheme) -> SpMMScheme:
    return SpMMScheme(1 if scheme.replication_factor == 1 else 2, scheme.sparsity_aware, scheme.node_order)


@twin_of.register
def _(scheme: CubeScheme) -> CubeScheme:
    # Two ranks are not a square: the same products on 1 x 1 x 2.
    return CubeScheme(scheme.dimensions, scheme.node_order, scheme.keep_blocks, column=True)


@memory_advice.register
def _(scheme: SpMMScheme) -> MemoryAdvice:
    def working_bytes(counts: Sequence[int], row_bytes: int) -> int:
        if scheme.sparsity_aware or scheme.replication_factor is None:
            return 0  # The rows read are known when nonzeros are distributed; an open factor is chosen to fit into memory.
        offsets = np.cumsum([0, *counts])
        return block_cost(ProcessGrid(len(counts), scheme.replication_factor), offsets, row_bytes).bytes_held

    def less(ranks: int) -> str:
        legal = ", ".join(map(str, legal_replications(ranks)))
        return f"Set a smaller replication_factor (legal: {legal}), or use more machines (num_nodes) or fewer columns."

    return MemoryAdvice(SpMMScheme(1, scheme.sparsity_aware, scheme.node_order), working_bytes, less)


@memory_advice.register
def _(scheme: CubeScheme) -> MemoryAdvice:
    return MemoryAdvice(SpMMScheme(1, False, scheme.node_order))


class SpMMStrategy(GNNStrategy):
    """Full-graph training with the algorithm of the fewest bytes for each product, exact; ``Trainer(strategy="spmm")``.

    The algorithms are the algorithms of the other ``spmm_`` strategies in which all ranks multiply:

    - 1D, and 1.5D with c up to sqrt(P), both sparsity-aware. Both are also available mirrored: partial sums are sent in place of
      features, and features in place of partial sums.
    - 2D if P is a square, and 3D if P is a cube.

    For each width, dtype and direction, a product uses the algorithm with the fewest bytes sent or received by the busiest rank.
    A matrix is distributed only for the algorithms that are used. Layers that are not products exchange halo features, as under
    ``spmm_1d``.

    Args:
        node_order: see :class:`SpMM15DStrategy`.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: an unknown node order.
    """

    strategy_name = "spmm"

    def __init__(self, node_order: Permute | None = "metis", **options: Any) -> None:
        super().__init__(AnyProductScheme(node_order), **options)


class SpMM15DStrategy(GNNStrategy):
    """Full-graph training with products on a process grid, exact; ``Trainer(strategy="spmm_15d")``.

    Args:
        replication_factor: c, a divisor of the number of ranks. Partial sums of a node are on c ranks, and each rank reads 1 / c
            of the nodes. By default, the factor up to sqrt(P) that sends the fewest rows; with larger factors, ranks idle.
        sparsity_aware: whether to send only features that a nonzero reads, and partial sums to which a nonzero contributes. If
            False, whole blocks are sent, as published.
        node_order: assignment of nodes to ranks, unless the datamodule has a partition. ``"metis"`` for few rows sent,
            ``"random"`` for blocks of equal weight, None for ranges of the graph's order. By default METIS if `sparsity_aware`,
            else random.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: an unknown node order. Raised once the number of ranks is known: a replication factor that does not divide it.
    """

    strategy_name = "spmm_15d"

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        for c in legal_replications(ranks):
            if 1 < c <= isqrt(ranks):
                yield {"replication_factor": c}
                yield {"replication_factor": c, "sparsity_aware": False}

    def __init__(
        self,
        replication_factor: int | None = None,
        sparsity_aware: bool = True,
        node_order: Permute | Literal["auto"] | None = "auto",
        **options: Any,
    ) -> None:
        if isinstance(node_order, str) and node_order == "auto":
            node_order = "metis" if sparsity_aware else "random"
        super().__init__(SpMMScheme(replication_factor, sparsity_aware, node_order), **options)

    @override
    def log_exchange(self, trainer: pl.Trainer, shard: Shard) -> None:
        exchange = self.steps.binding.context.exchange
        assert isinstance(exchange, GridExchange)
        log_config(trainer, {"plan": {"name": "products", "replication_factor": exchange.grid.replication}})


class SpMM1DStrategy(SpMM15DStrategy):
    """:class:`SpMM15DStrategy` with replication_factor 1, CAGNET's Algorithm 1; ``Trainer(strategy="spmm_1d")``.

    Args:
        sparsity_aware: whether to send only the rows that are read, see :class:`SpMM15DStrategy`.
        node_order: order of the nodes, see :class:`SpMM15DStrategy`.
        **options: see :class:`SpMM15DStrategy`.
    """

    strategy_name = "spmm_1d"

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        yield {"sparsity_aware": False}  # sparsity-aware 1D sends the same rows as dgcl

    def __init__(
        self, sparsity_aware: bool = True, node_order: Permute | Literal["auto"] | None = "auto", **options: Any
    ) -> None:
        super().__init__(1, sparsity_aware, node_order, **options)


class SpMM2DStrategy(GNNStrategy):
    """Full-graph training with 2D products (SUMMA), exact; ``Trainer(strategy="spmm_2d")``; P is a square.

    ``cache_input_aggregation=True``, the default, also keeps the blocks of the matrix that a rank multiplies with. With P = q^2
    ranks in 2D, this is 1/q of the matrix; with P = q^3 ranks in 3D, 1/q^2. If False, each rank stores 1/P of the matrix, and
    blocks are sent in each product.

    Args:
        node_order: assignment of nodes to ranks, unless the datamodule has a partition. ``"random"`` for blocks of equal weight,
            ``"metis"``, or None for ranges of the graph's order.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: an unknown node order. Raised once the number of ranks is known: a number that is not a square.
    """

    strategy_name = "spmm_2d"
    dimensions = 2

    def __init__(self, node_order: Permute | None = "random", **options: Any) -> None:
        super().__init__(CubeScheme(self.dimensions, node_order, options.get("cache_input_aggregation", True)), **options)


class SpMM3DStrategy(SpMM2DStrategy):
    """:class:`SpMM2DStrategy` on a cube of ranks with summed layers; ``Trainer(strategy="spmm_3d")``; P is a cube."""

    strategy_name = "spmm_3d"
    dimensions = 3
