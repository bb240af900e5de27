"""The quality of a vertex cut: one definition for every partitioner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.console import text_table
from lightning_gnn.extensions.graph_files.in_edges import counts_of, in_degrees
from lightning_gnn.partition.adjacency import edge_pieces
from lightning_gnn.partition.metrics import Counts, balance
from lightning_gnn.strategies.vertex_cut import loops


@dataclass(frozen=True)
class VertexCutReport:
    """Counts per rank, ``[P]`` each; rows are those of one layer and direction.

    A rank reads a node if it holds an edge from it, and adds to it if it holds an edge to it. The node's master sends a copy to
    every other rank that reads it; every other rank that adds to it sends the master a partial sum.

    Attributes:
        masters: nodes whose master the rank is.
        replicas: rows that it holds: of nodes with an edge here, and those it is the master of.
        edges: edges that it holds: what it computes.
        in_edges: of the nodes whose master it is: what it loads, and computes where a conv reads them at the master.
        copies: rows that it receives, as it reads them.
        partials: rows that it sends, as it adds to them.
        inner, outer: rows that it sends to ranks of its host and of others, copies and partial sums (CDFGNN Table 3: the most).
    """

    masters: Counts
    replicas: Counts
    edges: Counts
    in_edges: Counts
    copies: Counts
    partials: Counts
    inner: Counts
    outer: Counts

    @property
    def replication_factor(self) -> float:
        """Rows that all ranks hold over the nodes (CDFGNN section 6)."""
        return int(self.replicas.sum()) / max(1, int(self.masters.sum()))

    @property
    def edge_balance(self) -> float:
        """Largest rank's edges over the average (CDFGNN section 6: edge imbalance factor)."""
        return balance(self.edges)

    @property
    def loaded_balance(self) -> float:
        """Largest rank's in-edges over the average: of what ranks load."""
        return balance(self.in_edges)

    @property
    def replica_balance(self) -> float:
        """Largest rank's rows over the average (CDFGNN section 6: vertex imbalance factor)."""
        return balance(self.replicas)

    @property
    def master_balance(self) -> float:
        """Largest rank's masters over the average: of the dense work."""
        return balance(self.masters)

    @property
    def sent_balance(self) -> float:
        """Largest rank's sent rows over the average."""
        return balance(self.inner + self.outer)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VertexCutReport:
        return cls(*(np.asarray(values[each.name], np.int64) for each in fields(cls)))

    def as_dict(self) -> dict[str, Any]:
        derived = (
            "replication_factor",
            *(f"{name}_balance" for name in ("edge", "loaded", "replica", "master", "sent")),
        )
        counts = {name: values.tolist() for name, values in vars(self).items()}
        return counts | {name: getattr(self, name) for name in derived}

    def table(self) -> Table:
        heads = (
            "masters",
            "rows held",
            "computed edges",
            "loaded edges",
            "copies received",
            "partial sums sent",
            "sent inside",
            "between hosts",
        )
        table = text_table("part", *heads, title="Vertex cut", left=0)
        for part, row in enumerate(zip(*vars(self).values())):
            table.add_row(str(part), *(f"{value:,}" for value in row))
        table.caption = (
            f"replication {self.replication_factor:.2f}, heaviest part / average: computed edges {self.edge_balance:.2f}, "
            f"loaded edges {self.loaded_balance:.2f}, rows held {self.replica_balance:.2f}, masters {self.master_balance:.2f}, "
            f"sent {self.sent_balance:.2f}"
        )
        return table


@dataclass(frozen=True)
class Ends:
    """Which ranks hold an edge from each node, and which one to it: bits, uint8 ``[N, P / 8]`` each, rounded up."""

    reads: NDArray[np.uint8]
    adds: NDArray[np.uint8]

    @classmethod
    def of(cls, edge_index: NDArray[np.integer], part: NDArray[np.integer], num_nodes: int, num_parts: int) -> Ends:
        """Returns the ends of edges ``[2, E]`` that the ranks `part` ``[E]`` hold."""
        found = cls(*(np.zeros((num_nodes, -(-num_parts // 8)), np.uint8) for _ in range(2)))
        for begin, source, target in edge_pieces(edge_index):
            loops.ends(source, target, part[begin : begin + len(source)], found.reads, found.adds)
        return found


def vertex_cut_report(
    edge_index: NDArray[np.integer],
    part: NDArray[np.integer],
    master: NDArray[np.integer],
    num_parts: int,
    host: NDArray[np.integer] | None = None,
    ends: Ends | None = None,
) -> VertexCutReport:
    """Returns the report of an assignment of edges and masters to ranks.

    Args:
        edge_index: int64 ``[2, E]``, source and target.
        part: rank of each edge, ``[E]``.
        master: rank of each node, ``[N]``.
        host: of each rank, ``[P]``; None if all ranks share one.
        ends: those of this assignment, where they are known.
    """
    if ends is None:
        ends = Ends.of(edge_index, part, len(master), num_parts)
    host = np.zeros(num_parts, np.int64) if host is None else np.asarray(host, np.int64)
    replicas, copies, partials, inner, outer = loops.traffic(ends.reads, ends.adds, master, host)
    masters, edges = (counts_of(each, num_parts) for each in (master, part))
    in_edges = np.bincount(master, in_degrees(edge_index, len(master)), num_parts).astype(np.int64)
    return VertexCutReport(masters, replicas, edges, in_edges, copies, partials, inner, outer)
