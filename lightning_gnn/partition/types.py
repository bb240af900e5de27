"""Node and edge types of a graph that has been cut: which ids of each type a part holds.

P parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch_geometric.typing import EdgeType, NodeType

Counts = NDArray[np.int64]

ONE_TYPE: EdgeType = ("node", "to", "node")
"""The edge type of a graph that has no types; its node type is ``"node"``."""


@dataclass(frozen=True)
class Types:
    """How many nodes and edges of each type lie in each part.

    Rows of a part are its nodes of the first type, then those of the second, and so on; so are its edges. Beside that, nodes of
    one type have ids of their own, from 0 on: those of part 0, then those of part 1; so have edges.

    Attributes:
        nodes, edges: by type, int64 ``[P]``, in the order of the types.
        input_type: the node type that seeds are of.
        is_hetero: the graph has types, even if only one.
    """

    nodes: Mapping[NodeType, Counts]
    edges: Mapping[EdgeType, Counts]
    input_type: NodeType
    is_hetero: bool = True

    @classmethod
    def none(cls, nodes: Counts, edges: Counts) -> Types:
        """Returns what stands for the types of a graph without any, which has so many nodes and edges in each part."""
        return cls({ONE_TYPE[0]: nodes}, {ONE_TYPE: edges}, ONE_TYPE[0], is_hetero=False)

    def _of(self, kind: NodeType | EdgeType) -> Mapping[Any, Counts]:
        return self.nodes if isinstance(kind, str) else self.edges

    def total(self, kind: NodeType | EdgeType) -> int:
        return int(self._of(kind)[kind].sum())

    def offsets(self, kind: NodeType | EdgeType) -> Counts:
        """Returns a type's first id in each part, and the end, ``[P + 1]``."""
        return np.concatenate([[0], np.cumsum(self._of(kind)[kind])])

    def begins(self, kind: NodeType | EdgeType) -> Counts:
        """Returns where a type begins among the rows, or the edges, of each part, ``[P]``."""
        of = self._of(kind)
        before = takewhile(lambda name: name != kind, of)
        return sum((of[name] for name in before), np.zeros_like(of[kind]))

    def place(self, kind: NodeType | EdgeType) -> slice:
        """Returns where a type lies in a list of all nodes, or edges, that has type after type."""
        first = int(self.begins(kind).sum())
        return slice(first, first + self.total(kind))

    def key(self, kind: NodeType | EdgeType) -> str:
        """Returns the name under which attributes of a type are kept: types may have names that files cannot have."""
        what = "node" if isinstance(kind, str) else "edge"
        return f"{what}{list(self._of(kind)).index(kind)}" if self.is_hetero else what

    def ids(self, rows: Counts) -> Counts:
        """Returns the ids within their types of nodes that are given by their rows, ``[n]``, counted over all parts."""
        block, starts = self._blocks(rows)
        firsts = np.stack([self.offsets(name)[:-1] for name in self.nodes], 1).ravel()
        return rows - starts[block] + firsts[block]

    def numbers(self, rows: Counts) -> Counts:
        """Returns the numbers of the types, in their order, of nodes that are given by their rows, ``[n]``."""
        return self._blocks(rows)[0] % len(self.nodes)

    def _blocks(self, rows: Counts) -> tuple[Counts, Counts]:
        """Returns in which block of nodes, of one part and type, rows lie, ``[n]``, and the first row of each block."""
        per_part = np.stack(list(self.nodes.values()), 1)  # [P, types]
        starts = np.concatenate([[0], np.cumsum(per_part)[:-1]])
        return np.searchsorted(starts, rows, side="right") - 1, starts

    def as_dict(self) -> dict[str, Any] | None:
        """Returns plain values, of which :func:`types_of` makes these again; None without types."""
        if not self.is_hetero:
            return None
        return {
            "nodes": [[name, counts.tolist()] for name, counts in self.nodes.items()],
            "edges": [[list(kind), counts.tolist()] for kind, counts in self.edges.items()],
            "input_type": self.input_type,
        }


def types_of(manifest: Mapping[str, Any]) -> Types:
    """Returns how many nodes and edges of each type the parts of an entry have."""
    values = manifest.get("types")
    if values is None:
        return Types.none(np.diff(manifest["offsets"]), np.diff(manifest["edge_offsets"]))
    nodes = {name: np.asarray(counts, np.int64) for name, counts in values["nodes"]}
    edges: dict[EdgeType, Counts] = {tuple(kind): np.asarray(counts, np.int64) for kind, counts in values["edges"]}
    return Types(nodes, edges, values["input_type"])
