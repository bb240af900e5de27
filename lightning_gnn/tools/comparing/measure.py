"""What a rank measures of its own training: times of an epoch, traffic, logged values."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.devices import synchronize


class EpochTimes(pl.Callback):
    """Keeps, by training epoch, where this rank's time went and what it sent. Validation and what callbacks do are left out.

    Args:
        loss: the logged value whose mean over an epoch's steps is kept as that epoch's.
        lines: file to which each epoch is appended as a line of JSON; None for no file.

    Attributes:
        began: when the first epoch began, by ``time.time``.
        epochs: of each epoch

            - ``seconds``: from its begin to the end of its last step;
            - ``batches``: of these, waiting for batches to be made;
            - ``gradients``: summing gradients over ranks, or averaging them, that was not hidden behind the backward;
            - ``sums``: all else that is summed or gathered in steps: logged values, statistics of norms;
            - ``exchange``: by ``"LAYER DIRECTION"``, bytes, messages, rows and seconds of exchanging rows;
            - ``waited``: of gradients, sums and exchange, waiting for other ranks; 0 of CUDA ranks, whose devices wait, and of
              workers that train independently, which count it themselves;
            - ``steps``: how many there were;
            - ``logged``: values at its end, those of its validation among them.
    """

    def __init__(self, loss: str, lines: Path | None) -> None:
        self.loss, self.began = loss, 0.0
        self.epochs: list[dict[str, Any]] = []
        self._file = lines
        self._before: Mapping[tuple[str, str], Traffic] = {}
        self._start = self._ended = self._paused = 0.0
        self._clear()

    def _clear(self) -> None:
        self._traffic: dict[tuple[str, str], Traffic] = {}
        self._losses: list[float] = []
        self._backward_ended: tuple[float, float] | None = None  # when, and the seconds of sums until then
        self._batches = self._gradients = self._outside = self._sums = self._waited = 0.0
        self._steps = 0

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clear()
        self._start = self._ended = self._now(pl_module)
        self.began = self.began or time.time()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = self._now(pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Between two steps it belongs to neither; after the last one it is past what is counted.
        gone = self._now(pl_module) - self._paused
        self._outside += gone
        self._ended += gone

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._batches += time.perf_counter() - self._ended
        self._before = dict(_meter(trainer).by_layer)
        self._count(trainer, -1)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Workers that train independently average after this; all others have summed gradients, which the strategy counts.
        self._backward_ended = self._now(pl_module), _world_seconds(trainer)[0]

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._backward_ended is not None:
            ended, sums = self._backward_ended
            self._gradients += self._now(pl_module) - ended
            self._sums -= _world_seconds(trainer)[0] - sums
            self._backward_ended = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ended = self._now(pl_module)
        self._count(trainer, 1)
        self._steps += 1
        for key, now in _meter(trainer).by_layer.items():
            self._traffic[key] = self._traffic.get(key, Traffic()) + now - self._before.get(key, Traffic())
        if trainer.num_training_batches != 1 and self.loss in trainer.callback_metrics:
            self._losses.append(float(trainer.callback_metrics[self.loss]))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logged = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not isinstance(value, Tensor) or value.numel() == 1
        }
        if self._losses:
            logged[self.loss] = sum(self._losses) / len(self._losses)
        exchange = {
            f"{layer} {direction}": [each.bytes_sent, each.messages, each.rows, each.seconds]
            for (layer, direction), each in self._traffic.items()
        }
        self.epochs.append(
            {
                "seconds": self._ended - self._start - self._outside,
                "batches": self._batches,
                "gradients": self._gradients,
                "sums": self._sums,
                "waited": self._waited,
                "exchange": exchange,
                "steps": self._steps,
                "logged": logged,
            }
        )
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(self.epochs[-1]) + "\n")

    def _count(self, trainer: pl.Trainer, sign: int) -> None:
        """Adds what the ranks' connections count, at the end of a step, to what it was at its begin."""
        sums, waited = _world_seconds(trainer)
        gradients, of_sums = getattr(trainer.strategy, "gradient_seconds", (0.0, 0.0))
        self._gradients += sign * gradients
        self._sums += sign * (sums - of_sums)
        self._waited += sign * waited

    @staticmethod
    def _now(module: pl.LightningModule) -> float:
        synchronize(module.device)
        return time.perf_counter()


def _meter(trainer: pl.Trainer) -> Meter:
    return getattr(trainer.strategy, "meter", None) or Meter()


def _world_seconds(trainer: pl.Trainer) -> tuple[float, float]:
    """Returns the seconds until now of sums and gatherings, and of waiting; 0 where ranks have nothing to do with each other."""
    world: World | None = getattr(trainer.strategy, "world", None)
    return (0.0, 0.0) if world is None else (world.collectives_s, world.waited_s or 0.0)


def peak_memory() -> int:
    try:
        # Not ru_maxrss, which a process inherits from the one that started it.
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
