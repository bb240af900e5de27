"""Base class of callbacks that strategies add."""

from __future__ import annotations

from lightning.pytorch.callbacks import LambdaCallback


class StrategyCallback(LambdaCallback):
    """``LambdaCallback`` of a strategy. Its hooks run without row semantics, unlike callbacks of users."""
