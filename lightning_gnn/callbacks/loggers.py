"""Values, configuration, pictures and reports for the loggers of a run, in addition to values that modules log.

W&B and TensorBoard show pictures. W&B stores reports as artifacts of the run. Loggers with a folder, such as CSVLogger, store
pictures and reports as files in it. Other loggers get only values and configuration. Rank 0 writes all of it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_gnn.lightning_packages import is_instance

if TYPE_CHECKING:  # importing matplotlib is slow, and most runs draw nothing
    from matplotlib.figure import Figure


def log_values(trainer: pl.Trainer, values: Mapping[str, float | Tensor]) -> None:
    """Log values that are already global; called on every rank.

    ``self.log`` is not used: it would reduce global values over ranks, and take a millisecond per epoch.
    """
    for name, value in values.items():
        trainer.callback_metrics[name] = torch.as_tensor(value, dtype=torch.float64)
    for logger in trainer.loggers:
        logger.log_metrics({name: float(value) for name, value in values.items()}, step=trainer.global_step)


def log_config(trainer: pl.Trainer, values: Mapping[str, Any]) -> None:
    """Add nested plain values to the configuration of the run; called on every rank."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_hyperparams(dict(values))


def begin_runs(trainer: pl.Trainer) -> None:
    """Start W&B's run in this process, so that ranks that it starts, which end earlier, write to the same run."""
    for logger in trainer.loggers:
        if is_instance(logger, "loggers.WandbLogger"):
            _ = logger.experiment


def uploads(trainer: pl.Trainer) -> bool:
    """Returns whether a logger stores pictures and reports with the run, not only on this machine."""
    return any(is_instance(logger, "loggers.WandbLogger") for logger in trainer.loggers)


def log_picture(trainer: pl.Trainer, name: str, figure: Figure) -> None:
    """Log a figure; loggers with only a folder store a file ``NAME-step=STEP.png``. Rank 0 only."""
    step = trainer.global_step
    for logger in trainer.loggers:
        if is_instance(logger, "loggers.WandbLogger"):
            logger.log_image(name, [_image(_png(figure))], step)
        elif is_instance(logger, "loggers.TensorBoardLogger"):
            logger.experiment.add_figure(name, figure, step, close=False)
        elif (folder := _folder(logger)) is not None:
            file = folder / f"{name}-step={step}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(_png(figure))


def log_files(trainer: pl.Trainer, name: str, files: Mapping[str, str | Figure]) -> None:
    """Log a report of several files, texts or figures, by name. Rank 0 only.

    W&B stores them as artifact ``NAME-RUN``, and shows figures as well.
    """
    content = {file: each.encode() if isinstance(each, str) else _png(each) for file, each in files.items()}
    for logger in trainer.loggers:
        if is_instance(logger, "loggers.WandbLogger"):
            import wandb

            artifact = wandb.Artifact(f"{name}-{logger.experiment.id}", type="report")
            for file, data in content.items():
                with artifact.new_file(file, "wb") as opened:
                    opened.write(data)
            logger.experiment.log_artifact(artifact)
            for file, each in files.items():
                if not isinstance(each, str):
                    logger.log_image(f"report/{Path(file).stem}", [_image(content[file])], trainer.global_step)
        elif (folder := _folder(logger)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for file, data in content.items():
                (folder / file).write_bytes(data)


def _folder(logger: Logger) -> Path | None:
    folder = getattr(logger, "log_dir", None)
    return Path(folder) if isinstance(folder, str | Path) else None  # DummyLogger has any attribute


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _image(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))
