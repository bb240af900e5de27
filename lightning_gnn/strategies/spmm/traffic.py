"""Traffic of products on a process grid (CAGNET), and the choice of the replication factor and of the grid.

Source: CAGNET (GNNSys'21) Algorithms 1 and 2 and section 4.2, (SC'20) sections 4.3 and 4.4, as implemented in
``strategies/spmm/matrices.py``. Messages are counted without running ranks. All counts are for a forward product. A backward
product multiplies with the transpose: in the sparse form, its rows are sent in the opposite direction; in the other forms, in the
same direction.

Symbols:

- n nodes, f columns, E edges, P ranks, S stages.
- c: replication factor, with R = P / c block rows. q: side of a square or cube. L: its number of layers.
- Traffic is ``[S, P, P]``: stage, sender, receiver.
- `offsets` is the first node of each rank and the end, ``[P + 1]``.
- `edge_index` has relabeled ids, source and target, ``[2, E]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, Matrix, Triples
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.partition.shard import HaloPlan, Ids, owners_of
from lightning_gnn.strategies.spmm.grid import ProcessCube, ProcessGrid, legal_replications
from lightning_gnn.strategies.spmm.matrices import SummaMatrix


@dataclass(frozen=True)
class GridCost:
    """Cost of one legal replication factor.

    Attributes:
        grid: grid with that factor.
        rows: rows that all ranks together receive in one product.
        bytes_held: bytes of the rank that needs the most: blocks and partial sums, without the operands.
    """

    grid: ProcessGrid
    rows: int
    bytes_held: int


def block_cost(grid: ProcessGrid, offsets: Ids, row_bytes: int) -> GridCost:
    """Returns the cost of sending whole blocks.

    A rank stores the block that it broadcasts, two sub-blocks in transit, and the partial sums of its row.
    """
    sub_block, block = int(np.diff(offsets).max()), int(np.diff(offsets[:: grid.replication]).max())
    held = 2 * block + 2 * sub_block if grid.num_ranks > 1 else 0
    return GridCost(grid, grid.words(offsets, 1), held * row_bytes)


def sparse_cost(grid: ProcessGrid, offsets: Ids, halos: Sequence[Ids], partial_sums: int, row_bytes: int) -> GridCost:
    """Returns the cost of sending only rows that a nonzero multiplies or adds to.

    Args:
        halos: halo nodes of each rank.
        partial_sums: number of (node, column) pairs in which the node has in-edges from the chunk of another column than its
            owner's, over all nodes.
    """
    c = grid.replication
    expanded, most = 0, 0
    for row in range(grid.num_rows):
        own = np.arange(offsets[row * c], offsets[(row + 1) * c])  # almost all of a block row's own nodes are needed
        nodes = np.unique(np.concatenate([own if c > 1 else own[:0], *(halos[rank] for rank in grid.in_row(row))]))
        owner = np.searchsorted(offsets, nodes, side="right") - 1
        reader = row * c + grid.columns[owner // c]
        received = np.bincount((reader % c)[owner != reader], minlength=c)
        expanded, most = expanded + int(received.sum()), max(most, int(received.max()))
    return GridCost(grid, expanded + partial_sums, (most + int(np.diff(offsets[::c]).max()) * (c > 1)) * row_bytes)


def choose(costs: Sequence[GridCost], available: int | None) -> GridCost:
    """Returns the cost with the fewest rows that fits into memory and lets all ranks multiply; ties go to the largest c."""
    costs = [cost for cost in costs if cost.grid.all_multiply]
    fitting = [cost for cost in costs if available is None or cost.bytes_held <= available]
    if not fitting:
        least = min(costs, key=lambda cost: cost.bytes_held)
        raise ValueError(
            f"Block rows need at least {least.bytes_held / 1e9:.3g} GB per rank (replication_factor={least.grid.replication}), "
            f"but each rank has {(available or 0) / 1e9:.3g} GB available. Use more ranks or fewer columns."
        )
    return min(fitting, key=lambda cost: (cost.rows, -cost.grid.replication))


@dataclass(frozen=True)
class Product:
    """Distribution of the entries of a matrix for a product.

    Attributes:
        grid: the process grid, sparsity-aware; or the square or cube, whose blocks are kept.
        mirrored: whether an entry is on the rank of its mirror image: partial sums are sent in place of rows, and rows in place
            of sums.
    """

    grid: ProcessGrid | ProcessCube
    mirrored: bool = False

    def holders(self, offsets: Ids, row: Ids, col: Ids) -> Ids:
        """Returns the rank that has each entry; see :meth:`~lightning_gnn.strategies.spmm.grid.ProcessGrid.holders`."""
        return self.grid.holders(offsets, *((col, row) if self.mirrored else (row, col)))

    def __str__(self) -> str:
        if isinstance(self.grid, ProcessCube):
            return f"spmm_{self.grid.dimensions}d"
        name = "spmm_1d" if self.grid.replication == 1 else f"spmm_15d c={self.grid.replication}"
        return name + " mirrored" * self.mirrored


def products(ranks: int) -> list[Product]:
    """Returns the products in which all of `ranks` ranks multiply: 1D, 1.5D, and 2D and 3D if P is a square or a cube."""
    grids = [ProcessGrid(ranks, c) for c in legal_replications(ranks)]
    found = [Product(grid, mirrored) for grid in grids if grid.all_multiply for mirrored in (False, True)]
    for dimensions in (2, 3) if ranks > 1 else ():
        with suppress(ValueError):  # neither a square nor a cube
            found.append(Product(ProcessCube.of(ranks, dimensions)))
    return found


def product_words(product: Product, offsets: Ids, rows: Ids, columns: int, backward: bool) -> Ids:
    """Returns the words of rows and of partial sums that each rank sends to each other rank, int64 ``[2, P, P]``.

    Args:
        rows: rows of a sparse product as counted by :func:`edge_traffic`, ``[2, P, P]``; not used for a square or a cube.
    """
    if isinstance(product.grid, ProcessCube):
        traffic, summed = summa_traffic(product.grid, offsets, columns), product.grid.side + 1
        return np.stack([traffic[:summed].sum(0), traffic[summed:].sum(0)])  # the same for any matrix, so for the transpose too
    return columns * (rows[::-1].transpose(0, 2, 1) if backward else rows)


def busiest(words: Ids, row_word: float, sum_word: float) -> tuple[float, float]:
    """Returns the bytes that the busiest rank sends or receives, and the bytes of all ranks.

    Args:
        words: see :func:`product_words`.
        row_word, sum_word: bytes of a word of a row, and of a word of a partial sum.
    """
    sent: NDArray[np.float64] = words[0] * row_word + words[1] * sum_word
    return float(max(sent.sum(0).max(), sent.sum(1).max())), float(sent.sum())


def own_edge_traffic(product: Product, reach: NDArray[np.bool_], rank: int) -> Ids:
    """Returns a rank's share of :func:`edge_traffic`: rows sent to, and partial sums received from, each rank; int64 ``[2, P]``.

    Args:
        reach: whether each local node has an edge to, then from, a node of each rank, ``[2, N, P]``.
    """
    num_ranks = reach.shape[2]
    others = np.arange(num_ranks)
    one_each, own = np.arange(num_ranks + 1), np.full(num_ranks, rank)
    found = np.zeros((2, num_ranks), np.int64)
    for end, (row, col) in enumerate(((others, own), (own, others))):
        holder = product.holders(one_each, row, col)
        for each in np.unique(holder[holder != rank]):
            found[end, each] = reach[end][:, holder == each].any(1).sum()
    return found


def block_traffic(grid: ProcessGrid, offsets: Ids) -> Ids:
    """Returns the rows of :class:`~lightning_gnn.strategies.spmm.matrices.BlockMatrix`, int64 ``[S, P, P]``.

    In the first stage, each block is gathered at the rank that broadcasts it. In the last stage, partial sums are reduced to
    owners. Both are empty for c = 1. Between them, sub-blocks go around each process column.
    """
    own = np.diff(offsets)
    rings = [grid.ring(column) for column in range(grid.replication)]
    traffic = np.zeros((max(map(len, rings)) + 2, grid.num_ranks, grid.num_ranks), np.int64)
    for row in range(grid.num_rows):
        ranks = np.array(grid.in_row(row))
        traffic[0, ranks, grid.source(row)] = own[ranks]
        traffic[-1, ranks[:, None], ranks] = own[ranks]
    for column, ring in enumerate(rings):
        ranks = np.array(grid.in_column(column))
        for stage, passed in enumerate(ring):
            sent = [0 if owner is None else own[owner] for owner in passed]
            traffic[stage + 1, ranks, np.roll(ranks, -1)] = sent
    return _without_own(traffic)


def summa_traffic(cube: ProcessCube, offsets: Ids, columns: int) -> Ids:
    """Returns the numbers that each rank sends to each other rank in each stage of a product, int64 ``[q + 3, P, P]``.

    Stages of :class:`~lightning_gnn.strategies.spmm.matrices.SummaMatrix`: the conversion of rows to columns of blocks; q
    stages of SUMMA; the sum over layers (empty in 2D); the conversion back.
    """
    q, ranks = cube.side, range(cube.num_ranks)
    own, sizes = np.diff(offsets), np.diff(offsets[::q])
    widths = np.array(cube.widths(columns))
    traffic = np.zeros((q + 3, cube.num_ranks, cube.num_ranks), np.int64)
    for rank in ranks:
        row, column, layer = cube.place(rank)
        block = layer * q + row
        traffic[0, rank, np.array(cube.owners(block))] = own[rank] * widths
        for turn in range(q):
            reader = cube.rank(cube.readers(rank, turn)[1], column, layer)
            traffic[turn + 1, rank, reader] = sizes[block] * widths[column]
        summed = [cube.rank(row, column, other) for other in range(cube.layers)]
        traffic[q + 1, rank, summed] = sizes[cube.blocks_of_row(row)] * widths[column]
    traffic[q + 2] = traffic[0].T
    return _without_own(traffic)


def summa_entries(cube: ProcessCube, offsets: Ids, edge_index: Ids) -> Ids:
    """Returns the number of entries of each rank's block of the matrix, int64 ``[P]``."""
    return np.bincount(cube.holders(offsets, edge_index[1], edge_index[0]), minlength=cube.num_ranks)


def matrix_traffic(cube: ProcessCube, offsets: Ids, edge_index: Ids, value_bytes: int) -> Ids:
    """Returns the bytes of the matrix that are sent in the same stages as :func:`summa_traffic`'s words, ``[q + 3, P, P]``.

    For a block: per entry, a column (4 bytes) and a value (0 bytes if all values are 1), and 8 bytes for each nonempty row.
    """
    q = cube.side
    holder = cube.holders(offsets, edge_index[1], edge_index[0])
    filled = np.zeros((int(offsets[-1]), cube.num_ranks), np.bool_)
    filled[edge_index[1], holder] = True
    sizes = 8 * filled.sum(0) + np.bincount(holder, minlength=cube.num_ranks) * (4 + value_bytes)
    traffic = np.zeros((q + 3, cube.num_ranks, cube.num_ranks), np.int64)
    for rank in range(cube.num_ranks):
        row, _, layer = cube.place(rank)
        for turn in range(q):
            traffic[turn + 1, rank, cube.rank(row, cube.readers(rank, turn)[0], layer)] = sizes[rank]
    return _without_own(traffic)


def summa_work(cube: ProcessCube, offsets: Ids, edge_index: Ids, columns: int) -> Ids:
    """Returns edges x columns that each rank sums over, int64 ``[P]``: its block row in its layer, times its columns."""
    q = cube.side
    widths = np.array(cube.widths(columns))
    in_row = summa_entries(cube, offsets, edge_index).reshape(-1, q).sum(1)
    return (in_row[:, None] * widths).reshape(-1)


def _without_own(traffic: Ids) -> Ids:
    return traffic * (1 - np.eye(traffic.shape[1], dtype=np.int64))


class MatrixByCall(Matrix):
    """Matrix that chooses for each product the algorithm with the fewest bytes of the busiest rank.

    Ties are broken by the bytes of all ranks. Rows are sent in their dtype, and partial sums in at least float32. Therefore
    float32 rows use one algorithm regardless of width. bfloat16 rows may use different algorithms forward and backward: the
    algorithms in which rows are sent rather than sums.

    A matrix is distributed for an algorithm at its first use. All ranks compute the same costs, so they make the same choice.

    Memory in addition to the matrices: the entries of this rank's rows.

    Args:
        entries, offsets, world, meter: see :class:`~lightning_gnn.strategies.spmm.matrices.BlockMatrix`.
        plan: rows that this rank sends to each other rank in a halo exchange.
    """

    def __init__(self, entries: Triples, plan: HaloPlan, offsets: Ids, world: World, meter: Meter) -> None:
        self._entries, self._offsets, self._world, self._meter = entries, offsets, world, meter
        self._products = products(world.size)
        reach = _reach(entries, plan, offsets, world)
        own = np.stack([own_edge_traffic(product, reach, world.rank) for product in self._products])
        of_all = world.all_gather(torch.from_numpy(own).to(world.device), "Counting what products send").cpu().numpy()
        # Indexed by product, kind, sender and receiver. Local rows are sent to other ranks; their partial sums come to the owner.
        sent, summed = of_all[:, :, 0].transpose(1, 0, 2), of_all[:, :, 1].transpose(1, 2, 0)
        self._rows = np.stack([sent, summed], 1)
        self._chosen_products: dict[tuple[int, torch.dtype, bool], Product] = {}
        self._matrices: dict[Product, Matrix] = {}

    def product(self, columns: int, dtype: torch.dtype, backward: bool) -> Product:
        """Returns the product for rows of this width and dtype."""
        key = columns, dtype, backward
        if key not in self._chosen_products:
            row_bytes = self._world.transport.row_bytes
            of_row = row_bytes(columns, dtype) / max(1, columns)
            of_sum = row_bytes(columns, torch.promote_types(dtype, torch.float32)) / max(1, columns)
            costs = [
                busiest(product_words(product, self._offsets, rows, columns, backward), of_row, of_sum)
                for product, rows in zip(self._products, self._rows)
            ]
            self._chosen_products[key] = self._products[costs.index(min(costs))]
        return self._chosen_products[key]

    @property
    @override
    def exchanges(self) -> Sequence[Exchange]:
        return [each for matrix in self._matrices.values() for each in matrix.exchanges]

    @override
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        product = self.product(x.size(1), x.dtype, call.direction == "backward")
        if product not in self._matrices:
            # Evaluation may run first, and inference tensors cannot be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                self._matrices[product] = self._make(product)
        return self._matrices[product].multiply(x, call)

    def _make(self, product: Product) -> Matrix:
        if isinstance(product.grid, ProcessCube):
            return SummaMatrix(self._entries, product.grid, self._offsets, self._world, self._meter)
        holders = partial(product.holders, self._offsets)
        return SparseMatrix(self._entries, holders, self._offsets, self._world, self._meter)


def _reach(entries: Triples, plan: HaloPlan, offsets: Ids, world: World) -> np.ndarray:
    """Returns whether each local node has an entry in its column, then in its row, with a node of each rank, ``[2, N, P]``."""
    first, stop = offsets[world.rank : world.rank + 2]
    row, col = entries.row.cpu().numpy(), entries.col.cpu().numpy()
    reach = np.zeros((2, int(stop - first), world.size), np.bool_)
    for rank, rows in enumerate(plan.send_rows):
        reach[0, rows, rank] = True
    reach[0, col[(col >= first) & (col < stop)] - first, world.rank] = True
    reach[1, row - first, owners_of(offsets, col)] = True
    return reach
