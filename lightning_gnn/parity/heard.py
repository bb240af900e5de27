"""What a step logs, as the Trainer would have it at the end of the epoch; made global by the code that does so in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gnn.comm.group import World
from lightning_gnn.strategies.logs import GlobalLogs


class Heard:
    """Takes the logs of a step.

    Args:
        model: its ``log`` is replaced.
        stage: ``"fit"``, ``"validate"`` or ``"test"``.
        world: of this rank; None on one device.
        counts: labelled rows of each rank, which values are weighted by.
        stand_ins: rows that only stand in for an empty mask.
    """

    def __init__(
        self, model: pl.LightningModule, stage: str, world: World | None, counts: Sequence[int], stand_ins: int
    ) -> None:
        self.values: dict[str, Tensor] = {}
        self._metrics: dict[str, Metric] = {}
        self._model, self._hook = model, _EPOCH_END[stage]
        model.__dict__.pop("log_dict", None)  # which calls log
        object.__setattr__(model, "log", self._hear)
        self._logs = None if world is None else GlobalLogs(model, world)
        if self._logs is not None:
            self._logs.enter(counts, stand_ins)

    def _hear(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Metric):
            self._metrics[name] = value
            return
        self.values[name] = torch.as_tensor(value).detach().double()

    def finish(self) -> None:
        """Ends step and epoch."""
        if self._logs is not None:
            self._logs.leave()
        if self._hook:
            getattr(self._model, self._hook)()
        for name, metric in self._metrics.items():
            self.values[name] = torch.as_tensor(metric.compute()).detach().double()


_EPOCH_END = {
    "fit": "on_train_epoch_end",
    "validate": "on_validation_epoch_end",
    "test": "on_test_epoch_end",
    "predict": "",
}
