"""The quality of an edge cut: one definition for every partitioner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.planning.cost import LayerCost

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class EdgeCutReport:
    """Counts per part, ``[P]`` each.

    Attributes:
        nodes: owned nodes.
        edges: in-edges of owned nodes: the edges that the part computes.
        halo_rows: distinct nodes of other parts that have an edge into this one: the rows it receives per layer.
        cut_edges: edges between parts, in all.
    """

    nodes: Counts
    edges: Counts
    halo_rows: Counts
    cut_edges: int

    @property
    def node_balance(self) -> float:
        """Largest part's nodes over the average."""
        return _balance(self.nodes)

    @property
    def edge_balance(self) -> float:
        """Largest part's in-edges over the average."""
        return _balance(self.edges)

    @property
    def predicted_seconds(self) -> float:
        """Of one layer and direction; see :mod:`lightning_gnn.planning.cost`."""
        return LayerCost.of(self.edges, self.halo_rows).seconds

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON."""
        return {
            "nodes": self.nodes.tolist(),
            "edges": self.edges.tolist(),
            "halo_rows": self.halo_rows.tolist(),
            "cut_edges": self.cut_edges,
            "node_balance": self.node_balance,
            "edge_balance": self.edge_balance,
            "predicted_seconds": self.predicted_seconds,
        }

    def table(self) -> Table:
        """Returns the report as a table, a row per part."""
        table = Table("part", "nodes", "edges", "halo rows", title="Edge cut")
        for part, row in enumerate(zip(self.nodes, self.edges, self.halo_rows)):
            table.add_row(str(part), *(f"{value:,}" for value in row))
        table.caption = (
            f"cut edges {self.cut_edges:,}, heaviest part / average: nodes {self.node_balance:.2f}, "
            f"edges {self.edge_balance:.2f}"
        )
        return table


def _balance(counts: Counts) -> float:
    return float(counts.max() / counts.mean()) if counts.sum() else 1.0


def edge_cut_report(edge_index: NDArray[np.int64], part: NDArray[np.integer], num_parts: int) -> EdgeCutReport:
    """Returns the report of an assignment of nodes to parts.

    Args:
        edge_index: int64 ``[2, E]``, source and target.
        part: owner of each node, ``[N]``.
        num_parts: P.
    """
    source, target = edge_index
    owner = part[target].astype(np.int64)
    cut = part[source] != owner
    pairs = np.unique(source[cut] * num_parts + owner[cut])
    return EdgeCutReport(
        nodes=np.bincount(part, minlength=num_parts),
        edges=np.bincount(owner, minlength=num_parts),
        halo_rows=np.bincount(pairs % num_parts, minlength=num_parts),
        cut_edges=int(cut.sum()),
    )
