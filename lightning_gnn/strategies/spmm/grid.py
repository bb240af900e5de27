"""Process grids of 1D, 1.5D, 2D and 3D SpMM: which rank multiplies which block of the matrix.

Source: CAGNET (Tripathy et al., SC'20; GNNSys'21) sections 4.1 and 4.2. P ranks form P / c process rows of c ranks each; rank i c
+ j is in row i and column j. Each process row has a block row of nodes. The block row has c sub-blocks, one owned by each rank of
the process row.

The blocks of a process row's matrix are divided between its columns: column j has the blocks of the block rows in its chunk. If
c^2 does not divide P, the paper assigns the remainder to the last column; here chunks are as even as possible.

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
    """Process grid of R rows of c ranks.

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
                f"replication_factor must divide the number of ranks, {self.num_ranks}, got {self.replication}. Use one of "
                f"{', '.join(map(str, legal))}."
            )

    @property
    def num_rows(self) -> int:
        """R, also the number of block rows."""
        return self.num_ranks // self.replication

    @property
    def all_multiply(self) -> bool:
        """Whether every process column has a block row to read. If not, columns idle; for c = P, one rank does all the work."""
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
        """Returns the block rows that a process column reads: every c-th, so that their ranks are evenly spaced on its ring."""
        return range(column, self.num_rows, self.replication)

    @cached_property
    def columns(self) -> Ids:
        """Process column whose chunk includes each block row, int64 ``[R]``."""
        return np.arange(self.num_rows) % self.replication

    def source(self, block: int) -> int:
        """Returns the rank that broadcasts a block row down its process column."""
        return block * self.replication + int(self.columns[block])

    def ring(self, column: int) -> list[list[int | None]]:
        """Returns by stage the sub-block that each rank of a process column sends to the next rank of the ring.

        Sub-blocks are identified by their owners; None if nothing is sent. Sources send their own sub-block first. Each rank
        forwards received sub-blocks in order, one per stage. A sub-block stops at the rank before its source. Each sub-block uses
        each link once. Nearly all links are busy in each of the R + c - 2 stages (if c divides R).
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
        """Returns the rank that multiplies each entry, ``[E]``.

        The rank is in the process row of `row` and in the column whose chunk includes `col`.

        Args:
            offsets: first node of each rank and the end, ``[P + 1]``.
            row, col: relabeled ids, ``[E]``.
        """
        c = self.replication
        return owners_of(offsets, row) // c * c + self.columns[owners_of(offsets, col) // c]

    def words(self, offsets: Ids, columns: int) -> int:
        """Returns the words that all ranks together receive in one layer and direction if whole blocks are sent.

        Broadcasts send n f (R - 1). Before these, the c owners of a block gather it: n f (c - 1) / c if they own equal numbers.
        After the broadcasts, partial sums are reduced and scattered in process rows: n f (c - 1).
        """
        nodes, c = int(offsets[-1]), self.replication
        there = sum(int(offsets[source + 1] - offsets[source]) for source in map(self.source, range(self.num_rows)))
        return columns * (nodes * (self.num_rows - 1) + (nodes - there) + nodes * (c - 1))

    def paper_words(self, num_nodes: int, columns: int) -> int:
        """Returns the same count for the paper's algorithm, which replicates block rows and updates them by an all-reduce.

        n f (R - 1) for the broadcasts and 2 n f (c - 1) for a ring.
        """
        return num_nodes * columns * ((self.num_rows - 1) + 2 * (self.replication - 1))


@dataclass(frozen=True)
class ProcessCube:
    """Grid of q x q x L ranks: the square of 2D products (L = 1) and the cube of 3D products (L = q).

    Source: CAGNET (SC'20) sections 4.3 and 4.4 name the algorithms; the derivation is ours. The nodes are divided into q L
    blocks, and each block into q sub-blocks, one per rank. Rank (k q + i) q + j is in row i and column j of layer k. It owns
    sub-block j of block k q + i.

    Block row i of the matrix consists of the blocks k q + i of all layers k. Entry (row, col) belongs to the block row of `row`
    and to the block of `col`. Block b = k q + s of columns is on the ranks of column s of layer k. Therefore

        Z_ij = sum over layers k, sum over s of A_(i, k q + s) H_(k q + s, j)

    where H_(b, j) has the rows of block b and columns j of q. Each layer is a SUMMA over s, and layers are summed.

    Attributes:
        side: q.
        layers: L.
    """

    side: int
    layers: int

    @classmethod
    def of(cls, num_ranks: int, dimensions: int) -> ProcessCube:
        """Returns the square or cube of `num_ranks` ranks."""
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
        """Dimensions of the products: 2 or 3."""
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
        """Returns the blocks of block row i."""
        return [layer * self.side + row for layer in range(self.layers)]

    def stage(self, rank: int, turn: int) -> int:
        """Returns the SUMMA stage s of a rank in turn t: (i + j + t) mod q, distinct within a row and within a column."""
        row, column, _ = self.place(rank)
        return (row + column + turn) % self.side

    def readers(self, rank: int, turn: int) -> tuple[int, int]:
        """Returns the destinations of a rank in a turn.

        The first is the column that reads its block of the matrix; the second is the row that reads its rows.
        """
        row, column, _ = self.place(rank)
        return (column - row - turn) % self.side, (row - column - turn) % self.side

    def widths(self, columns: int) -> list[int]:
        """Returns the number of the f columns for each column j of ranks, as even as possible."""
        return [columns * (j + 1) // self.side - columns * j // self.side for j in range(self.side)]

    def holders(self, offsets: Ids, row: Ids, col: Ids) -> Ids:
        """Returns the rank that has each entry; see :meth:`ProcessGrid.holders`."""
        row_block, col_block = owners_of(offsets, row) // self.side, owners_of(offsets, col) // self.side
        layer, column = col_block // self.side, col_block % self.side
        return (layer * self.side + row_block % self.side) * self.side + column

    def words(self, offsets: Ids, columns: int) -> int:
        """Returns the words of rows that all ranks together receive in one product, without entries of the matrix.

        SUMMA: n f (q - 1). The sum over layers: n f (L - 1). In addition, the conversion between rows and columns of blocks, in
        both directions.
        """
        nodes, q = int(offsets[-1]), self.side
        widths = self.widths(columns)
        turned = sum(int(offsets[r + 1] - offsets[r]) * (columns - widths[self.place(r)[1]]) for r in range(self.num_ranks))
        return nodes * columns * (q - 1) + nodes * columns * (self.layers - 1) + 2 * turned


def on_grid(grid: ProcessGrid | ProcessCube, offsets: Ids) -> Holders:
    """Returns a function that maps entries to the ranks that multiply them, for nodes that start at `offsets`, ``[P + 1]``."""
    return partial(grid.holders, offsets)
