"""What is checked while a run goes on: the graph and what optimizers hold have not changed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_gnn.checks.unregistered import unregistered, unregistered_in_loss
from lightning_gnn.datamodules.graph import GraphDataModule


class RunChecks(pl.Callback):
    """Refuses what has changed since the stage began, and ranks would not follow, before the next epoch's first step.

    Beside the graph, that is what optimizers hold, in callbacks that unfreeze layers, say. Looks at it again where groups of
    parameters have come or gone, and in the first step at what its loss comes from.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._before: list[Tensor] = []
        self._steps = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = list(pl_module.parameters())

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        sizes = [len(group["params"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if trainer.world_size > 1 and (batch_idx == 0 or sizes != self._sizes):
            self._sizes = sizes
            failure = unregistered(pl_module, trainer.optimizers, self._before)
            if failure is not None:
                raise failure
        if batch_idx == 0:
            self._check_graph(trainer.datamodule)  # type: ignore[attr-defined]

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if trainer.world_size > 1 and self._steps == 0:
            failure = unregistered_in_loss(pl_module, loss)
            if failure is not None:
                raise failure

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1

    def _check_graph(self, data: GraphDataModule) -> None:
        changed = data.changed_in_stage()
        if changed:
            raise ValueError(
                f"{', '.join(changed)} of the graph that was given to GraphDataModule changed in place during fit. Ranks go on "
                "with the graph as it was when fit began, and one device would train on the changed one. Change the graph "
                "between calls of the Trainer, or, for one step, a copy in its batch: "
                f"batch.{changed[0]} = batch.{changed[0]}.clone()."
            )
