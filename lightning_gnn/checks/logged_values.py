"""What a step and its hooks log, as the Trainer has it when the epoch ends; made global by the code that does so in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gnn.comm.group import World
from lightning_gnn.steps.logs import OPTIONS, GlobalLogs
from lightning_gnn.steps.weights import loss_scale


@dataclass(frozen=True)
class Logged:
    """A call of ``self.log`` on one rank, in a method of the module; `value` is the rank's own, float64, None of a metric."""

    method: str
    value: Tensor | None
    options: dict[str, Any]


class LoggedValues:
    """Takes what a module logs, whose ``log`` it replaces; without a world, on one device. Values by name are those of all ranks
    at the end of the epoch, calls the last of each name, of this rank; `weights` what ranks weigh, None on one device."""

    def __init__(self, model: pl.LightningModule, world: World | None) -> None:
        self._model = model
        self.values: dict[str, Tensor] = {}
        self.calls: dict[str, Logged] = {}
        self._metrics: dict[str, Metric] = {}
        self._world = world
        model.__dict__.pop("log_dict", None)  # which calls log
        object.__setattr__(model, "log", self._keep)
        self._logs = None if world is None else GlobalLogs(model, world)
        self.weights = None if self._logs is None else self._logs.weights
        self._log = model.log
        object.__setattr__(model, "log", self._note)

    def _note(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        own = None if isinstance(value, Metric) else torch.as_tensor(value).detach().double()
        options.update(zip(OPTIONS, args))
        self.calls[name] = Logged(self._model._current_fx_name or "", own, options)
        self._log(name, value, **options)

    def _keep(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Metric):
            self._metrics[name] = value
        else:
            self.values[name] = torch.as_tensor(value).detach().double()

    def given_to_logger(self, name: str, value: Any) -> None:
        """Keeps a value that the module gives to its logger, past ``self.log``; of ranks, the logger is rank 0's."""
        number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if number and (self._world is None or self._world.rank == 0):
            name, own = f"{name} of self.logger", torch.as_tensor(value).detach().double()
            self.values[name] = own
            self.calls[name] = Logged(self._model._current_fx_name or "", own, {"to_logger": True})

    def enter(self, counts: Sequence[int], stand_ins: int, sizes: Sequence[int]) -> None:
        if self._logs is not None:
            self._logs.enter(counts, stand_ins, sizes)

    def leave(self, output: Any, loss_reduction: str) -> float:
        """Ends the step; returns what to multiply this rank's loss with, see :meth:`GlobalLogs.leave`."""
        if self._logs is None:
            return loss_scale(output, (1,), 0, loss_reduction, lambda own: own.unsqueeze(0))[0]
        self._logs.check_names()
        return self._logs.leave(output, loss_reduction)

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
