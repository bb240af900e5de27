"""What a step and its hooks log, as the Trainer has it when the epoch ends."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gnn.comm.group import World
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.mode import local_rows
from lightning_gnn.steps.logs import GlobalLogs


class LoggedValues:
    """Takes what a module logs, whose ``log`` it replaces; without a world, on one device. Values by name are those of all ranks
    at the end of the epoch."""

    def __init__(self, model: pl.LightningModule, world: World | None, rows: GraphRows | None) -> None:
        self.values: dict[str, Tensor] = {}
        self._metrics: dict[str, Metric] = {}
        self._world = world
        model.__dict__.pop("log_dict", None)  # which calls log
        object.__setattr__(model, "log", self._keep)
        self._logs = None if world is None else GlobalLogs(model, world, (), rows)

    def _keep(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Metric):
            self._metrics[name] = value
        else:
            self.values[name] = torch.as_tensor(value).detach().double()

    def given_to_logger(self, name: str, value: Any) -> None:
        """Keeps a value that the module gives to its logger, past ``self.log``; of ranks, the logger is rank 0's."""
        number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if number and (self._world is None or self._world.rank == 0):
            with local_rows():
                self.values[f"{name} of self.logger"] = torch.as_tensor(value).detach().double()

    def enter(self) -> None:
        if self._logs is not None:
            self._logs.enter_rows()

    def leave(self) -> None:
        """Ends the step."""
        if self._logs is not None:
            self._logs.check_names()
            self._logs.leave_rows()

    def so_far(self) -> dict[str, Tensor]:
        """Returns values by name, those of metrics included."""
        return {**self.values, **{name: metric.compute() for name, metric in self._metrics.items()}}

    def finish(self, skipped: set[str]) -> None:
        """Ends the epoch; a metric that raises on one device is added to `skipped`, and left out if it is in there."""
        for name, metric in self._metrics.items():
            if name in skipped:
                continue
            try:
                value = metric.compute()
            except Exception:
                if self._world is not None:
                    raise
                skipped.add(name)
                continue
            if isinstance(value, Tensor):
                self.values[name] = value.detach().double()
