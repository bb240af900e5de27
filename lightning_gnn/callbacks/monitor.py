"""Who sends how much to whom, as a picture in the loggers."""

from __future__ import annotations

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.callbacks.communication import CommunicationMetrics
from lightning_gnn.callbacks.loggers import log_picture


def metrics_of(trainer: pl.Trainer, asker: object) -> CommunicationMetrics:
    """Returns the strategy's own callback.

    Raises:
        ValueError: the strategy has none: its ranks exchange no rows.
    """
    found = next((each for each in trainer.callbacks if isinstance(each, CommunicationMetrics)), None)  # type: ignore[attr-defined]
    if found is None:
        raise ValueError(
            f"{type(asker).__name__} tells what ranks exchange in layers, and under {type(trainer.strategy).__name__} they "
            "exchange nothing in training steps. Leave it out, or use a strategy such as dgcl or sampling."
        )
    return found


class CommunicationMonitor(pl.Callback):
    """Draws a heat map per layer and direction, bytes from rank to rank, in W&B and TensorBoard; beside CSV logs as a file.

    Args:
        every_n_epochs: epochs from one picture to the next; each is of one epoch. The last epoch is always drawn.

    Raises:
        ValueError: a number below 1; from ``fit``, a strategy whose ranks exchange no rows.
    """

    def __init__(self, every_n_epochs: int = 50) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs is at least 1 (got {every_n_epochs}).")
        self.every_n_epochs = every_n_epochs
        self._drawn = -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics_of(trainer, self)
        self._drawn = -1

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch % self.every_n_epochs == 0:
            self._draw(trainer, trainer.current_epoch)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # By now the epoch has been counted.
        self._draw(trainer, trainer.current_epoch - 1)

    def _draw(self, trainer: pl.Trainer, epoch: int) -> None:
        metrics = metrics_of(trainer, self)
        if epoch == self._drawn or not trainer.loggers:
            return
        self._drawn = epoch
        by_rank = metrics.of_all_ranks()
        if trainer.is_global_zero and any(by_rank):
            from lightning_gnn.callbacks.pictures import draw_traffic

            log_picture(trainer, "communication/heat_map", draw_traffic(by_rank, f"Epoch {epoch}"))
