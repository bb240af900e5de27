"""Logger runs that another rank continues after rank 0 is lost, with each row of the interrupted epoch once.

At the begin of each epoch, rank 0 writes all rows to disk and sends the positions of its files to the supervisor, which outlives
all ranks. The next rank 0 cuts the files at these positions and writes on.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.saving import load_hparams_from_yaml

from lightning_gnn.callbacks.loggers import begin_runs
from lightning_gnn.checkpoints import local_path
from lightning_gnn.comm.group import World
from lightning_gnn.lightning_packages import is_instance
from lightning_gnn.private_lightning import EXPERIMENT, LOGGER_VERSION, WANDB_RUN

SUPPORTED = "CSVLogger", "TensorBoardLogger", "WandbLogger"
_NO_LOGGER = "DummyLogger"

RUNS = "LIGHTNING_GNN_WANDB_RUNS"
"""Environment variable of ranks: names of W&B's runs, which the process that started them has started."""


def check_loggers(loggers: Sequence[Any]) -> None:
    """Raises ValueError if another rank cannot continue the run of a logger."""
    for logger in loggers:
        name = type(logger).__name__
        if name == _NO_LOGGER:
            continue
        if not any(_is(logger, each) for each in SUPPORTED):
            raise ValueError(
                f"elastic=True does not support {name}: if rank 0 is lost, another rank cannot continue its run. Use "
                f"{' or '.join(SUPPORTED)}, or set elastic=False."
            )
        if not _is(logger, "WandbLogger") and local_path(logger.save_dir or ".") is None:
            raise ValueError(
                f"elastic=True needs a local folder for {name}, since another rank cuts its files if rank 0 is lost (got "
                f"save_dir={logger.save_dir!r}). Use a local save_dir, or set elastic=False."
            )


def _is(logger: Any, name: str) -> bool:
    return is_instance(logger, f"loggers.{name}")


class _Rows:
    """Position of a ``CSVLogger``: its number of rows; None before its writer, which removes rows of earlier runs."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._file_size: tuple[int, int, Sequence[str]] = (0, 0, ())  # bytes, lines and columns of the file

    def position(self) -> int | None:
        if getattr(self._logger, EXPERIMENT) is None:
            return None
        writer = self._logger.experiment
        self._logger.save()
        size, lines, columns = self._file_size
        file = Path(writer.metrics_file_path)
        if not file.exists():
            return 0
        if columns != tuple(writer.metrics_keys):  # the file was written again, with more columns
            size = lines = 0
        with open(file, "rb") as opened:
            opened.seek(size)
            added = opened.read()
        self._file_size = size + len(added), lines + added.count(b"\n"), tuple(writer.metrics_keys)
        return self._file_size[1] - 1

    def continue_at(self, position: int | None) -> None:
        logger, self._file_size = self._logger, (0, 0, ())
        setattr(logger, EXPERIMENT, None)
        if position is None:
            return
        folder = Path(logger.log_dir)
        file, hparams = folder / "metrics.csv", folder / "hparams.yaml"
        kept = file.with_name(".metrics.csv.kept")
        if position and file.exists():
            with open(file, newline="") as opened:
                kept.write_text("".join(opened.readlines()[: position + 1]), newline="")
        known = load_hparams_from_yaml(str(hparams)) if hparams.exists() else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a new writer warns about the files, and removes the rows
            writer = logger.experiment
        writer.hparams.update(known)
        if position and kept.exists():
            kept.replace(file)
            with open(file, newline="") as opened:
                writer.metrics_keys = next(csv.reader(opened))


class _Events:
    """Position of a ``TensorBoardLogger``: the bytes of its event files by name."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def _files(self) -> list[Path]:
        folder = Path(self._logger.log_dir)
        return [each for each in folder.iterdir() if "tfevents" in each.name] if folder.is_dir() else []

    def position(self) -> Mapping[str, int]:
        if getattr(self._logger, EXPERIMENT) is not None:
            self._logger.save()
        return {each.name: each.stat().st_size for each in self._files()}

    def continue_at(self, position: Mapping[str, int]) -> None:
        writer = getattr(self._logger, EXPERIMENT)
        if writer is not None:
            writer.close()
            setattr(self._logger, EXPERIMENT, None)
        for each in self._files():
            if each.name in position:
                os.truncate(each, position[each.name])
            else:
                each.unlink()
        hparams = Path(self._logger.log_dir) / "hparams.yaml"
        if hparams.exists():
            self._logger.hparams.update(load_hparams_from_yaml(str(hparams)))


def start_runs(trainer: Any) -> None:
    """Start W&B's runs in the process that supervises the ranks: rows of a rank that is lost are then in W&B's own process."""
    begin_runs(trainer)
    runs = [logger.experiment for logger in trainer.loggers if _is(logger, "WandbLogger")]
    os.environ[RUNS] = " ".join(getattr(run, WANDB_RUN) for run in runs)


class Logs:
    """Loggers of a Trainer on this rank.

    Args:
        trainer: the Trainer.
        send: function that sends an epoch and the positions of the loggers to the supervisor.
    """

    def __init__(self, trainer: pl.Trainer, send: Callable[[int, Any], None]) -> None:
        self._trainer, self._send = trainer, send
        self._parts: list[Any] = []

    def share_versions(self, world: World) -> None:
        """Give all ranks the versions of rank 0, so that another rank would continue the same folders; collective."""
        loggers = [each for each in self._trainer.loggers if _is(each, "CSVLogger") or _is(each, "TensorBoardLogger")]
        versions = world.broadcast_object([each.version for each in loggers] if world.rank == 0 else [])
        for logger, version in zip(loggers, versions):
            setattr(logger, LOGGER_VERSION, version)
        of_wandb = [each for each in self._trainer.loggers if _is(each, "WandbLogger")]
        for logger, run in zip(of_wandb, os.environ.get(RUNS, "").split()):
            setattr(logger, WANDB_RUN, run)

    def begin(self, epoch: int) -> None:
        """Send the positions at the start of an epoch; -1 at the start of a call. Only on rank 0."""
        if self._trainer.is_global_zero:
            self._send(epoch, [each.position() for each in self._writers()])

    def continue_at(self, positions: Sequence[Any] | None) -> None:
        """Continue the runs at positions that rank 0 sent before it was lost, if this is now rank 0."""
        if self._trainer.is_global_zero and positions is not None:
            for part, position in zip(self._writers(), positions):
                part.continue_at(position)

    def _writers(self) -> list[Any]:
        if not self._parts:
            for logger in self._trainer.loggers:
                if _is(logger, "CSVLogger"):
                    self._parts.append(_Rows(logger))
                elif _is(logger, "TensorBoardLogger"):
                    self._parts.append(_Events(logger))
        return self._parts
