"""What a worker that takes the place of one that was killed begins with: another worker's state at the start of an epoch."""

from __future__ import annotations

import io

import lightning.pytorch as pl
import torch


def snapshot_of(trainer: pl.Trainer, module: pl.LightningModule) -> bytes:
    """Returns weights, buffers, and states of optimizers and schedulers, as they are between two epochs."""
    file = io.BytesIO()
    state = {
        "weights": module.state_dict(),
        "optimizers": [each.state_dict() for each in trainer.optimizers],
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
    }
    torch.save(state, file)
    return file.getvalue()


def load_snapshot(trainer: pl.Trainer, module: pl.LightningModule, snapshot: bytes) -> None:
    """Gives this worker the state that :func:`snapshot_of` returned for another."""
    state = torch.load(io.BytesIO(snapshot), map_location="cpu", weights_only=True)
    module.load_state_dict(state["weights"])
    for optimizer, its_state in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(its_state)
    for config, its_state in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(its_state)
