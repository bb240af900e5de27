"""The loss that hooks are given after a training step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override


class LossOfAllRanks(pl.Callback):
    """Puts the loss of all ranks into ``outputs["loss"]`` of ``on_train_batch_end``, where Lightning puts this rank's own.

    Callbacks and hooks that come after it decide by it, such as those of the learning-rate finder. In manual optimisation,
    `outputs` is what the step returned, of this rank.
    """

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = getattr(trainer.strategy, "loss", None)
        if pl_module.automatic_optimization and isinstance(loss, Tensor) and isinstance(outputs.get("loss"), Tensor):
            outputs["loss"] = loss.to(outputs["loss"])
