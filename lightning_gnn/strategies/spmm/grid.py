"""The process grid of 1D and 1.5D SpMM: who multiplies which block of the graph's matrix with which rows.

Source: CAGNET (Tripathy et al., SC'20; GNNSys'21) sections 4.1 and 4.2. P ranks form P / c process rows of c ranks each; rank
i c + j stands in row i and column j. A block row of nodes belongs to each process row, cut into c sub-blocks, one owned by
each of its ranks. The blocks of a process row's matrix are divided over its columns: column j takes those of the block rows in
its chunk. Where c^2 does not divide P, the paper gives the last column what remains; here chunks are as even as can be.

n nodes, f columns, P ranks, c the replication factor, R = P / c.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from lightning_gnn.comm.matrix import Holders
from lightning_gnn.partition.shard import Ids, owners_of


def legal_replications(num_ranks: int) -> tuple[int, ...]:
    """Returns the replication factors that divide P."""
    return tuple(c for c in range(1, num_ranks + 1) if num_ranks % c == 0)


@dataclass(frozen=True)
class ProcessGrid:
    """R rows of c ranks.

    Attributes:
        num_ranks: P.
        replication: c.
    """

    num_ranks: int
    replication: int = 1

    def __post_init__(self) -> None:
        legal = legal_replications(self.num_ranks)
        if self.replication not in legal:
            raise ValueError(
                f"The replication factor must divide the number of ranks: with {self.num_ranks} it is one of "
                f"{', '.join(map(str, legal))} (got {self.replication})."
            )

    @property
    def num_rows(self) -> int:
        """R, also the number of block rows."""
        return self.num_ranks // self.replication

    @property
    def all_multiply(self) -> bool:
        """Whether every process column has a block row to read. Else columns idle, down to one rank that does all for c = P."""
        return self.replication <= self.num_rows

    def row(self, rank: int) -> int:
        return rank // self.replication

    def column(self, rank: int) -> int:
        return rank % self.replication

    def in_row(self, row: int) -> range:
        """Returns the ranks of a process row: the owners of its block row."""
        return range(row * self.replication, (row + 1) * self.replication)

    def in_column(self, column: int) -> range:
        return range(column, self.num_ranks, self.replication)

    def chunk(self, column: int) -> range:
        """Returns the block rows whose nodes a process column reads, every c-th: their ranks lie evenly on the column's ring."""
        return range(column, self.num_rows, self.replication)

    @cached_property
    def columns(self) -> Ids:
        """The process column whose chunk holds each block row, int64 ``[R]``."""
        return np.arange(self.num_rows) % self.replication

    def source(self, block: int) -> int:
        """Returns the rank that broadcasts a block row down its process column."""
        return block * self.replication + int(self.columns[block])

    def ring(self, column: int) -> list[list[int | None]]:
        """Returns by stage the sub-block, by its owner, that each rank of a process column passes to the next one, in a ring.

        Sources begin with their own; each rank passes on what comes, in that order, a sub-block a stage, until it is back before
        its source. So each goes over each link once, and nearly all links are busy in each of the R + c - 2 stages (c divides R).
        """
        rows, stages = self.num_rows, []
        waiting = [deque[int]() for _ in range(rows)]
        for block in self.chunk(column):
            own = block * self.replication + column
            waiting[block].extend([own, *(rank for rank in self.in_row(block) if rank != own)])
        while any(waiting) and rows > 1:
            passed = [each.popleft() if each else None for each in waiting]
            stages.append(passed)
            for row, owner in enumerate(passed):
                if owner is not None and self.row(owner) != (row + 2) % rows:
                    waiting[(row + 1) % rows].append(owner)
        return stages

    def holders(self, offsets: Ids, row: Ids, col: Ids) -> Ids:
        """Returns the rank that multiplies each entry: the process row of `row`, the column whose chunk holds `col`; ``[E]``.

        `row` and `col` are relabelled ids ``[E]``; `offsets` the first node of each rank and the end, ``[P + 1]``.
        """
        c = self.replication
        return owners_of(offsets, row) // c * c + self.columns[owners_of(offsets, col) // c]

    def words(self, offsets: Ids, columns: int) -> int:
        """Returns the words that all ranks together receive in one layer and direction, if whole blocks travel.

        Broadcasts n f (R - 1); for these, the c owners of a block bring it together, n f (c - 1) / c if they own equally many;
        after them, partial sums are reduced and scattered in process rows, n f (c - 1).
        """
        nodes, c = int(offsets[-1]), self.replication
        there = sum(int(offsets[source + 1] - offsets[source]) for source in map(self.source, range(self.num_rows)))
        return columns * (nodes * (self.num_rows - 1) + (nodes - there) + nodes * (c - 1))

    def paper_words(self, num_nodes: int, columns: int) -> int:
        """Returns the same count of the paper's algorithm, which replicates block rows and keeps that up by an all-reduce.

        n f (R - 1) of the broadcasts and 2 n f (c - 1) of a ring.
        """
        return num_nodes * columns * ((self.num_rows - 1) + 2 * (self.replication - 1))


@dataclass(frozen=True)
class ProcessCube:
    """q x q x L ranks: the square of 2D products (L = 1) and the cube of 3D ones (L = q).

    Source: CAGNET (SC'20) sections 4.3 and 4.4 name the algorithms; the derivation is ours. The graph's nodes are cut into q L
    blocks, and each block into q sub-blocks, one per rank: rank (k q + i) q + j stands in row i and column j of layer k, and owns
    sub-block j of block k q + i. Block row i of the matrix is the blocks k q + i of all layers k. Entry (row, col) belongs to the
    block row of `row` and to the block of `col`; block b = k q + s of columns lies on the ranks of column s of layer k. So

        Z_ij = sum over layers k, sum over s of A_(i, k q + s) H_(k q + s, j)

    where H_(b, j) is the rows of block b, columns j of q: each layer is a SUMMA over s, and layers are added up.

    Attributes:
        side: q.
        layers: L.
    """

    side: int
    layers: int

    @classmethod
    def of(cls, num_ranks: int, dimensions: int) -> ProcessCube:
        """Returns the square or cube of that many ranks."""
        root = round(num_ranks ** (1 / dimensions))
        if root**dimensions != num_ranks:
            below, above = (max(1, int(num_ranks ** (1 / dimensions)) + more) ** dimensions for more in (0, 1))
            name = {2: "a square", 3: "a cube"}[dimensions]
            raise ValueError(
                f"{dimensions}D products need {name} number of ranks, such as {below} or {above} (got {num_ranks}). Use "
                'strategy="spmm_15d", which takes any.'
            )
        return cls(root, root if dimensions == 3 else 1)

    @property
    def num_ranks(self) -> int:
        return self.side * self.side * self.layers

    @property
    def dimensions(self) -> int:
        """Of the products: 2 or 3."""
        return 2 if self.layers == 1 else 3

    @property
    def num_blocks(self) -> int:
        """q L."""
        return self.side * self.layers

    def place(self, rank: int) -> tuple[int, int, int]:
        """Returns row i, column j and layer k of a rank."""
        block, column = divmod(rank, self.side)
        return block % self.side, column, block // self.side

    def rank(self, row: int, column: int, layer: int) -> int:
        return (layer * self.side + row) * self.side + column

    def owners(self, block: int) -> range:
        return range(block * self.side, (block + 1) * self.side)

    def blocks_of_row(self, row: int) -> list[int]:
        """Returns the blocks that block row i is made of."""
        return [layer * self.side + row for layer in range(self.layers)]

    def stage(self, rank: int, turn: int) -> int:
        """Returns the s that a rank is at in its turn t: (i + j + t) mod q, another one for each of a row, and of a column."""
        row, column, _ = self.place(rank)
        return (row + column + turn) % self.side

    def readers(self, rank: int, turn: int) -> tuple[int, int]:
        """Returns who reads from a rank in a turn: the column of who reads its block of the matrix, and the row for its rows."""
        row, column, _ = self.place(rank)
        return (column - row - turn) % self.side, (row - column - turn) % self.side

    def widths(self, columns: int) -> list[int]:
        """Returns how many of f columns each column j of ranks has: as even as can be."""
        return [columns * (j + 1) // self.side - columns * j // self.side for j in range(self.side)]

    def holders(self, offsets: Ids, row: Ids, col: Ids) -> Ids:
        """Returns the rank that holds each entry; see :meth:`ProcessGrid.holders`."""
        row_block, col_block = owners_of(offsets, row) // self.side, owners_of(offsets, col) // self.side
        layer, column = col_block // self.side, col_block % self.side
        return (layer * self.side + row_block % self.side) * self.side + column

    def words(self, offsets: Ids, columns: int) -> int:
        """Returns the words of rows that all ranks together receive in one product; entries of the matrix come on top.

        SUMMA n f (q - 1), the sum over layers n f (L - 1), and the way from rows to columns of blocks and back.
        """
        nodes, q = int(offsets[-1]), self.side
        widths = self.widths(columns)
        turned = sum(int(offsets[r + 1] - offsets[r]) * (columns - widths[self.place(r)[1]]) for r in range(self.num_ranks))
        return nodes * columns * (q - 1) + nodes * columns * (self.layers - 1) + 2 * turned


def on_grid(grid: ProcessGrid | ProcessCube, offsets: Ids) -> Holders:
    """Returns who multiplies an entry on a process grid, of nodes that start at `offsets`, ``[P + 1]``, on each rank."""
    return partial(grid.holders, offsets)
