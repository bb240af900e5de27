"""Row semantics in the hooks of a run: the Trainer opens its profiler around each hook, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl

from lightning_gnn.lightning_packages import is_overridden, overrides_hook
from lightning_gnn.rows.mode import active_mode

_LIGHTNING = ("lightning", "pytorch_lightning")
_WITHOUT_TENSORS = """Checkpoint ModelCheckpoint OnExceptionCheckpoint EarlyStopping LearningRateMonitor
DeviceStatsMonitor Timer GradientAccumulationScheduler ModelSummary RichModelSummary ProgressBar TQDMProgressBar
RichProgressBar ThroughputMonitor SpikeDetection LearningRateFinder BatchSizeFinder"""
"""Callbacks of Lightning that compute nothing from the module's tensors, or run steps, which enable row semantics.

Other callbacks, such as ModelPruning, compute with tensors.
"""
_EXCLUDED = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_optimizers", "teardown", "setup")
"""Hooks without row semantics: they run before or after a run, or around steps, which enable it themselves."""


@contextmanager
def in_hooks(trainer: pl.Trainer, opened: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context manager that runs hooks of the module, its data and callbacks inside `opened`, except callbacks without tensors.

    Args:
        trainer: Trainer of the run.
        opened: function that returns the context manager around a hook, which enables row semantics or its replacement.
    """
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    profile, known = profiler.profile, dict[str, bool]()

    def profile_hook(action: str) -> AbstractContextManager[Any]:
        if action not in known:
            known[action] = _is_of_user(trainer, action)
        if not known[action] or active_mode() is not None:
            return profile(action)
        stack = ExitStack()
        stack.enter_context(opened())
        stack.enter_context(profile(action))
        return stack

    profiler.profile = profile_hook
    try:
        yield
    finally:
        profiler.__dict__.pop("profile", None)


def _is_of_user(trainer: Any, action: str) -> bool:
    owner, _, hook = action.rpartition(".")
    if hook in _EXCLUDED:
        return False
    if owner.startswith("[LightningModule]"):
        return is_overridden(hook, trainer.lightning_module)
    if owner.startswith("[LightningDataModule]"):
        return is_overridden(hook, trainer.datamodule)
    callbacks = [each for each in trainer.callbacks if owner == f"[Callback]{each.state_key}"]
    return any(_has_tensors(type(each)) and overrides_hook(each, hook) for each in callbacks)


def _has_tensors(callback: type[pl.Callback]) -> bool:
    library = callback.__module__.partition(".")[0]
    return library != "lightning_gnn" and not (library in _LIGHTNING and callback.__name__ in _WITHOUT_TENSORS.split())
