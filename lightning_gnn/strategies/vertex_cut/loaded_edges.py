"""Which layers of a vertex cut compute the edges that ranks load, not those that the cut has given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_gnn.nn.context import GraphContext


class LoadedEdges(pl.Callback):
    """Names them once, after the first training step.

    Args:
        context: the rank's graph.
        edge_counts: edges that each rank loads, ``[P]``.
    """

    def __init__(self, context: GraphContext, edge_counts: Sequence[int]) -> None:
        self._context, self._edge_counts, self._told = context, edge_counts, False

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._told or len(self._edge_counts) == 1:
            return
        self._told = True
        layers = sorted(self._context.all_on_loaded_edges)
        if layers:
            counts = self._edge_counts
            names, most, average = ", ".join(map(repr, layers)), max(counts), max(1, sum(counts) / len(counts))
            rank_zero_info(
                f"Loaded edges, not those that the vertex cut has given each rank, are computed by {names}: with messages of "
                "their own, edge features, or edges or weights that do not last. "
                f"Rank {counts.index(most)} loads most, {most:,}, {most / average:.2f} times the average."
            )
