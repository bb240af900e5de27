"""The quality of an edge cut: one definition for every partitioner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.console import text_table
from lightning_gnn.partition.adjacency import ask_for_ends, compiled

Counts = NDArray[np.int64]

SECONDS_PER_EDGE_COLUMN = 0.4e-9
"""Of SpMM in float32 on one core of a 2-core CPU machine: 0.2 s for 4.0 M edges x 128 columns (benchmarks/kernels.py)."""

BYTES_PER_S = 1.0e9
"""Between two ranks: gloo over loopback on that machine; also the order of a 10 Gbit/s network."""

COLUMNS = 64
"""A common hidden width; float32."""


@dataclass(frozen=True)
class EdgeCutReport:
    """Counts per part, ``[P]`` each.

    Attributes:
        nodes: owned nodes.
        edges: in-edges of owned nodes: the edges that the part computes.
        halo_rows: distinct nodes of other parts that have an edge into this one: the rows it receives per layer.
        cut_edges: edges between parts, in all.
        masks: labelled nodes of each mask, by its name, and edges of each mask of edges; empty if there are none.
        types: nodes and edges of each type, by its name, of a graph that has types.
    """

    nodes: Counts
    edges: Counts
    halo_rows: Counts
    cut_edges: int
    masks: Mapping[str, Counts] = field(default_factory=dict)
    types: Mapping[str, Counts] = field(default_factory=dict)

    @property
    def node_balance(self) -> float:
        return balance(self.nodes)

    @property
    def edge_balance(self) -> float:
        return balance(self.edges)

    @property
    def cut_fraction(self) -> float:
        """Edges between parts over all edges."""
        return self.cut_edges / max(1, int(self.edges.sum()))

    @property
    def replication(self) -> float:
        """Rows that all parts together read, owned and halo, over the nodes: 1 if nothing is cut."""
        return 1 + int(self.halo_rows.sum()) / max(1, int(self.nodes.sum()))

    @property
    def predicted_seconds(self) -> float:
        """Of one layer and direction on the slowest part, which sums over its edges and receives its halo rows."""
        sums, halos = self.edges * SECONDS_PER_EDGE_COLUMN, self.halo_rows * 4 / BYTES_PER_S
        return float(((sums + halos) * COLUMNS).max())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EdgeCutReport:
        """Returns the report that :meth:`as_dict` gave, with or without more keys beside."""
        nodes, edges, halo_rows = (np.asarray(values[name], np.int64) for name in ("nodes", "edges", "halo_rows"))
        named = (values.get(key, {}).items() for key in ("masks", "types"))
        masks, types = ({name: np.asarray(counts, np.int64) for name, counts in each} for each in named)
        return cls(nodes, edges, halo_rows, values["cut_edges"], masks, types)

    def as_dict(self) -> dict[str, Any]:
        derived = ("node_balance", "edge_balance", "predicted_seconds")
        return {
            **{name: getattr(self, name).tolist() for name in ("nodes", "edges", "halo_rows")},
            "cut_edges": self.cut_edges,
            "masks": {name: counts.tolist() for name, counts in self.masks.items()},
            "types": {name: counts.tolist() for name, counts in self.types.items()},
            **{name: getattr(self, name) for name in derived},
        }

    def table(self, row_bytes: int | None = None) -> Table:
        """Returns the report as a table, a row per part; with the bytes of a node's row, also what a part receives."""
        masks = {_entries(name): counts for name, counts in self.masks.items()}
        last = [] if row_bytes is None else ["received per layer and direction"]
        table = text_table("part", "nodes", *masks, "in-edges", "halo rows", *last, title="Edge cut", left=0)
        for part, row in enumerate(zip(self.nodes, *masks.values(), self.edges, self.halo_rows)):
            received = [] if row_bytes is None else [_bytes(int(row[-1]) * row_bytes)]
            table.add_row(str(part), *(f"{value:,}" for value in row), *received)
        balances = {"nodes": self.nodes, **masks, "edges": self.edges}
        table.caption = (
            f"edges between parts {self.cut_edges:,} ({self.cut_fraction:.1%}), replication {self.replication:.2f}, "
            f"heaviest part / average: {', '.join(f'{name} {balance(each):.2f}' for name, each in balances.items())}"
        )
        return table

    def table_of_types(self) -> Table:
        """Returns the nodes and edges of each type in each part, a row per type."""
        parts = [f"part {part}" for part in range(len(self.nodes))]
        table = text_table("type", *parts, "heaviest / average", title="Types")
        for name, counts in self.types.items():
            table.add_row(name, *(f"{count:,}" for count in counts), f"{balance(counts):.2f}")
        return table


def _entries(mask: str) -> str:
    name, of_edges = mask.removesuffix("_mask"), mask.startswith("edge_")
    return f"{name.removeprefix('edge_')} edges" if of_edges else f"{name} nodes"


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def balance(counts: Counts) -> float:
    return float(counts.max() / counts.mean()) if counts.sum() else 1.0


def edge_cut_report(
    edge_index: NDArray[np.int64],
    part: NDArray[np.integer],
    num_parts: int,
    masks: Mapping[str, NDArray[np.bool_]] | None = None,
    edge_masks: Mapping[str, NDArray[np.bool_]] | None = None,
) -> EdgeCutReport:
    """Returns the report of an assignment of nodes to parts.

    Args:
        edge_index: int64 ``[2, E]``, source and target.
        part: owner of each node, ``[N]``.
        masks: bool ``[N]`` each, whose nodes are counted per part.
        edge_masks: bool ``[E]`` each, whose edges are counted per part, which owns their targets.
    """
    source, target = (np.ascontiguousarray(ends) for ends in edge_index)
    edges, halo_rows = np.zeros(num_parts, np.int64), np.zeros(num_parts, np.int64)
    reads = np.zeros((len(part), -(-num_parts // 8)), np.uint8)
    return EdgeCutReport(
        nodes=np.bincount(part, minlength=num_parts),
        edges=edges,
        halo_rows=halo_rows,
        cut_edges=_count_cut(source, target, part, reads, edges, halo_rows),
        masks={
            **{name: np.bincount(part[mask], minlength=num_parts) for name, mask in (masks or {}).items()},
            **{name: np.bincount(part[target[mask]], minlength=num_parts) for name, mask in (edge_masks or {}).items()},
        },
    )


@compiled
def _count_cut(source, target, part, reads, edges, halo_rows):  # type: ignore[no-untyped-def]
    """Counts edges and halo rows per part, returns the cut edges; marks in `reads`, bits, which parts read a node."""
    cut = 0
    for edge in range(len(source)):
        ask_for_ends(part, source, target, edge)
        node, owner = source[edge], part[target[edge]]
        edges[owner] += 1
        if part[node] != owner:
            cut += 1
            bit = np.uint8(1 << (owner & 7))
            halo_rows[owner] += (reads[node, owner >> 3] & bit) == 0
            reads[node, owner >> 3] |= bit
    return cut
