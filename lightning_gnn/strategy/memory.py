"""Predictions of the memory of schemes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Graph
from lightning_gnn.strategy.scheme import Scheme, bind_module, twin_of

if TYPE_CHECKING:
    from lightning_gnn.checks.footprint import Predicted


PLENTY = 1000
"""Factor on the minimal memory of ranks above which nothing is predicted: layers never store this much."""


@dataclass(frozen=True)
class MemoryAdvice:
    """Memory model of a scheme.

    Attributes:
        rehearsed: the scheme of the trial steps on two ranks, which measure the memory of each rank.
        working_bytes: function that returns the minimal memory of a rank in addition to its part of the graph. Its arguments are
            the number of local nodes of each rank, and the bytes of a node's features.
        less: function of the number of ranks; returns advice on using less memory.
    """

    rehearsed: Scheme
    working_bytes: Callable[[Sequence[int], int], int] = lambda counts, row_bytes: 0
    less: Callable[[int], str] = lambda ranks: "Use more machines (num_nodes), fewer columns, or float16 features."

    def steps(
        self,
        module: pl.LightningModule,
        batch: Graph,
        trainer: pl.Trainer | None = None,
        device: torch.device | None = None,
        cache_input_aggregation: bool = True,
        **options: Any,
    ) -> Predicted:
        """Returns the memory of training steps; for arguments see :class:`~lightning_gnn.checks.footprint.Predicted`."""
        from lightning_gnn.checks.footprint import Predicted

        bind = partial(bind_module, self.rehearsed, meter=Meter(), cache_input_aggregation=cache_input_aggregation)
        return Predicted(module, batch, bind, self.rehearsed.layout(2), trainer, device, **options)


@singledispatch
def memory_advice(scheme: Scheme) -> MemoryAdvice:
    """Returns the memory model of a scheme; ``@memory_advice.register`` adds one for a scheme class and its subclasses."""
    return MemoryAdvice(twin_of(scheme))
