"""The process grid of 1D and 1.5D SpMM: who multiplies which block of the graph's matrix with which rows.

Source: CAGNET (Tripathy et al., SC'20; GNNSys'21) sections 4.1 and 4.2. P ranks form P / c process rows of c ranks each; rank
i c + j stands in row i and column j. A block row of nodes belongs to each process row, cut into c sub-blocks, one owned by
each of its ranks. The blocks of a process row's matrix are divided over its columns: column j takes those of the block rows in
its chunk. Where c^2 does not divide P, the paper gives the last column what remains; here chunks are as even as can be.

n nodes, f columns, P ranks, c the replication factor, R = P / c.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gnn.partition.shard import Ids


def legal_replications(num_ranks: int) -> tuple[int, ...]:
    """Returns the replication factors that divide P."""
    return tuple(c for c in range(1, num_ranks + 1) if num_ranks % c == 0)


@dataclass(frozen=True)
class ProcessGrid:
    """R rows of c ranks.

    Attributes:
        num_ranks: P.
        replication: c.

    Raises:
        ValueError: c does not divide P.
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

    def row(self, rank: int) -> int:
        """Returns i."""
        return rank // self.replication

    def column(self, rank: int) -> int:
        """Returns j."""
        return rank % self.replication

    def in_row(self, row: int) -> range:
        """Returns the ranks of a process row: the owners of its block row."""
        return range(row * self.replication, (row + 1) * self.replication)

    def in_column(self, column: int) -> range:
        """Returns the ranks of a process column."""
        return range(column, self.num_ranks, self.replication)

    def chunk(self, column: int) -> range:
        """Returns the block rows whose nodes a process column reads: its stages."""
        rows, c = self.num_rows, self.replication
        return range(column * rows // c, (column + 1) * rows // c)

    def column_of(self, block: int) -> int:
        """Returns the process column whose chunk holds a block row."""
        return next(column for column in range(self.replication) if block in self.chunk(column))

    def source(self, block: int) -> int:
        """Returns the rank that broadcasts a block row down its process column."""
        return block * self.replication + self.column_of(block)

    def words(self, offsets: Ids, columns: int) -> int:
        """Returns the words that all ranks together receive in one layer and direction, if whole blocks travel.

        Broadcasts n f (R - 1); before these, the c owners of a block bring it together, n f (c - 1) / c if they own equally
        many; after them, partial sums are reduced and scattered in process rows, n f (c - 1).

        Args:
            offsets: first node of each rank and the end, ``[P + 1]``.
            columns: f.
        """
        nodes, c = int(offsets[-1]), self.replication
        there = sum(int(offsets[source + 1] - offsets[source]) for source in map(self.source, range(self.num_rows)))
        return columns * (nodes * (self.num_rows - 1) + (nodes - there) + nodes * (c - 1))

    def paper_words(self, num_nodes: int, columns: int) -> int:
        """Returns the same count of the paper's algorithm, which replicates block rows and keeps that up by an all-reduce.

        n f (R - 1) of the broadcasts and 2 n f (c - 1) of a ring.
        """
        return num_nodes * columns * ((self.num_rows - 1) + 2 * (self.replication - 1))
