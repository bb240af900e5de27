"""Callbacks of strategies."""

from __future__ import annotations

from lightning.pytorch.callbacks import LambdaCallback


class OwnCallback(LambdaCallback):
    """A ``LambdaCallback`` of a strategy; its hooks see a rank's own tensors, unlike those of users."""
