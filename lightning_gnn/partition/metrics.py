"""Quality of an edge cut: one definition for every partitioner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.console import text_table
from lightning_gnn.partition.adjacency import ask_for_ends, compile_loop

Counts = NDArray[np.int64]

SECONDS_PER_EDGE_COLUMN = 0.4e-9
"""Seconds of SpMM in float32 on one core of a 2-core CPU machine: 0.2 s for 4.0 M edges x 128 columns (benchmarks/kernels.py)."""

BYTES_PER_S = 1.0e9
"""Bandwidth between two ranks: gloo over loopback on this machine; also the order of a 10 Gbit/s network."""

COLUMNS = 64
"""Common hidden width, float32."""


@dataclass(frozen=True)
class EdgeCutReport:
    """Counts of an edge cut: one entry per rank, ``[P]``, except `cut_edges`.

    Attributes:
        nodes: local nodes.
        edges: in-edges of local nodes: the edges that the rank computes.
        halo_rows: halo nodes: distinct nodes of other ranks with an edge to this rank, received in each layer.
        cut_edges: total number of edges between ranks.
        masks: labeled nodes of each mask, by name, and edges of each edge mask; empty without masks.
        types: nodes and edges of each type, by name, of a heterogeneous graph.
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
        """Edges between ranks divided by all edges."""
        return self.cut_edges / max(1, int(self.edges.sum()))

    @property
    def replication(self) -> float:
        """Replication factor: local and halo nodes of all ranks, divided by the number of nodes; 1 without cut edges."""
        return 1 + int(self.halo_rows.sum()) / max(1, int(self.nodes.sum()))

    @property
    def predicted_seconds(self) -> float:
        """Seconds of one layer and direction on the slowest rank: its sums over edges and its received halo rows."""
        sums, halos = self.edges * SECONDS_PER_EDGE_COLUMN, self.halo_rows * 4 / BYTES_PER_S
        return float(((sums + halos) * COLUMNS).max())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EdgeCutReport:
        """Returns the report from the result of :meth:`as_dict`, which may have further keys."""
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
        """Returns the report as a table with a row per rank; `row_bytes`, the bytes of a node's row, add received bytes."""
        masks = {_entries(name): counts for name, counts in self.masks.items()}
        last = [] if row_bytes is None else ["received per layer and direction"]
        table = text_table("part", "nodes", *masks, "in-edges", "halo rows", *last, title="Edge cut", num_left=0)
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
        """Returns the nodes and edges of each type and rank as a table with a row per type."""
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
    """Returns the report of an assignment of nodes to ranks.

    Args:
        edge_index: sources and targets, int64 ``[2, E]``.
        part: owner of each node, ``[N]``.
        num_parts: P.
        masks: masks, bool ``[N]`` each, whose nodes are counted per rank.
        edge_masks: edge masks, bool ``[E]`` each, whose edges are counted at the owners of their targets.
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


@compile_loop
def _count_cut(source, target, part, reads, edges, halo_rows):  # type: ignore[no-untyped-def]
    """Count edges and halo rows per rank, return the cut edges; `reads` marks, in bits, the ranks that read a node."""
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
