"""What is known of the memory of schemes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from torch_geometric.data import Data

from lightning_gnn.comm.traffic import Meter
from lightning_gnn.strategy.scheme import Scheme, bind_module, twin_of

if TYPE_CHECKING:
    from lightning_gnn.checks.footprint import Predicted


PLENTY = 1000
"""Times what ranks hold at the least: more than layers ever keep, so nothing is predicted where so much is available."""


@dataclass(frozen=True)
class MemoryAdvice:
    """What is known of the memory that ranks need under a scheme.

    Attributes:
        rehearsed: the scheme whose steps on two ranks tell what each rank keeps.
        working_bytes: given the owned rows of each rank, and the bytes of a node's features, returns what a rank needs beside
            its part of the graph, at the least.
        less: given the number of ranks, says how a run takes less memory.
    """

    rehearsed: Scheme
    working_bytes: Callable[[Sequence[int], int], int] = lambda counts, row_bytes: 0
    less: Callable[[int], str] = lambda ranks: "Use more machines (num_nodes), fewer columns, or float16 features."

    def steps(
        self,
        module: pl.LightningModule,
        batch: Data,
        trainer: pl.Trainer | None = None,
        device: torch.device | None = None,
        cache_input_aggregation: bool = True,
    ) -> Predicted:
        """Returns what training steps keep; arguments as of :class:`~lightning_gnn.checks.footprint.Predicted`."""
        from lightning_gnn.checks.footprint import Predicted

        bind = partial(bind_module, self.rehearsed, meter=Meter(), cache_input_aggregation=cache_input_aggregation)
        return Predicted(module, batch, bind, self.rehearsed.layout(2), trainer, device)


@singledispatch
def memory_advice(scheme: Scheme) -> MemoryAdvice:
    """Returns what is known of the memory of a scheme; ``@memory_advice.register`` adds a function for a class of schemes."""
    return MemoryAdvice(twin_of(scheme))
