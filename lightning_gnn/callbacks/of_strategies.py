"""Callbacks of strategies."""

from __future__ import annotations

from lightning.pytorch.callbacks import LambdaCallback


class StrategyCallback(LambdaCallback):
    """A ``LambdaCallback`` of a strategy. Its hooks run without row semantics, unlike those of users."""
