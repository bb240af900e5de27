"""What a strategy asks of the datamodule: which parts of the graph each rank shall hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayoutSpec:
    """How a graph is laid out over ranks.

    Attributes:
        kind: ``"whole"``: one rank holds everything; ``"edge_cut"``: a rank holds all in-edges of the nodes it owns.
        parts: number of ranks.
    """

    kind: Literal["whole", "edge_cut"]
    parts: int = 1

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"A layout needs at least one part (got {self.parts}).")
