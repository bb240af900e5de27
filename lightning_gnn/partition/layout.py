"""What a strategy asks of the datamodule: which parts of the graph each rank shall hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Groups = tuple["int | Groups", ...]
"""Ranks as nested tuples: ``((0, 1), (2, 3))`` are two machines of two; see ``Topology.groups``."""


@dataclass(frozen=True)
class Replicas:
    """Rows of other ranks that a rank holds and computes too, so that it need not fetch them.

    Attributes:
        hops: how far from the nodes of its group a rank looks: the number of propagations of the model.
        groups: ranks that share replicas, each rank once: between groups nothing is exchanged (DGCL section 3: every rank
            alone; Table 5, DGCL-R: the ranks of each machine).
    """

    hops: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LayoutSpec:
    """How a graph is laid out over ranks.

    Attributes:
        kind: ``"whole"``: one rank holds everything; ``"edge_cut"``: a rank holds all in-edges of the nodes it owns.
        parts: number of ranks.
        groups: where the partitioner shall cut first; None for cutting between all ranks alike.
        method: how nodes get their owners if the user leaves that open: ``"contiguous"`` takes them in their own order.
        replicas: what ranks hold beside what they own; made when a rank reads its part, the stored cut is the same.
    """

    kind: Literal["whole", "edge_cut"]
    parts: int = 1
    groups: Groups | None = None
    method: Literal["metis", "random", "contiguous"] = "metis"
    replicas: Replicas | None = None

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"A layout needs at least one part (got {self.parts}).")

    @property
    def stored(self) -> LayoutSpec:
        """The layout as the store keeps it."""
        return LayoutSpec(self.kind, self.parts, self.groups)

    def as_dict(self) -> dict[str, Any]:
        """Returns what the store keeps as plain values, for JSON."""
        return {"kind": self.kind, "parts": self.parts, "groups": self.groups}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayoutSpec:
        """Returns the layout that :meth:`as_dict` gave, also by way of JSON."""
        return cls(values["kind"], values["parts"], _as_groups(values["groups"]))


def _as_groups(groups: Any) -> Any:
    return tuple(map(_as_groups, groups)) if isinstance(groups, (list, tuple)) else groups
