"""Base classes for both packages that Lightning is published as: ``lightning`` and ``pytorch_lightning``.

The packages have the same code and separate classes. A Trainer accepts only objects whose classes come from its own package, so
classes that users pass to a Trainer inherit from the classes of both. `pytorch_lightning` need not be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden as _is_overridden
from lightning_utilities.core import rank_zero

_log = rank_zero.log
PACKAGES: Sequence[Any] = [pl, *([import_module("pytorch_lightning")] if find_spec("pytorch_lightning") else [])]
rank_zero.log = _log  # each package sets the logger of all at import; users configure the logger of the package that they import
"""Installed packages."""

FABRICS: Sequence[Any] = [import_module(name) for name in ("lightning.fabric", "lightning_fabric")[: len(PACKAGES)]]
"""Package of Fabric for each of `PACKAGES`."""

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule
    from lightning.pytorch.strategies import ParallelStrategy
else:

    def _join(name: str, classes: Sequence[type]) -> type:
        return type(name, tuple(classes), {"__module__": __name__, "__doc__": f"{name} of all installed packages."})

    LightningDataModule = _join("LightningDataModule", [each.LightningDataModule for each in PACKAGES])
    ParallelStrategy = _join("ParallelStrategy", [each.strategies.ParallelStrategy for each in PACKAGES])


def is_instance(value: Any, name: str, packages: Sequence[Any] = PACKAGES) -> TypeGuard[Any]:
    """Returns whether a value is an instance of a class of an installed package, such as ``"loggers.WandbLogger"``."""
    return isinstance(value, tuple(map(attrgetter(name), packages)))


def is_overridden(hook: str, owner: Any) -> bool:
    """Returns whether a module or datamodule overrides a hook of its package."""
    parents = [kind for each in PACKAGES for kind in (each.LightningModule, each.LightningDataModule)]
    return _is_overridden(hook, owner, next(kind for kind in parents if isinstance(owner, kind)))


def overrides_hook(callback: pl.Callback, hook: str) -> bool:
    """Returns whether a callback overrides a hook, like Lightning's ``is_overridden``, which rejects partial functions."""
    inherited = [getattr(each.Callback, hook, None) for each in PACKAGES]
    return getattr(getattr(callback, hook, None), "__func__", None) not in inherited


def check_callbacks(trainer: Any) -> None:
    """Raises TypeError if a callback comes from another package than the Trainer."""
    package = next(each for each in PACKAGES if isinstance(trainer, each.Trainer))
    for callback in trainer.callbacks:
        theirs, is_known = type(callback).__module__, is_instance(callback, "Callback")
        if is_known and not isinstance(callback, package.Callback) and not theirs.startswith("lightning_gnn."):
            raise TypeError(
                f"The callback {type(callback).__name__} must come from the package of the Trainer, {package.__name__}, got "
                f"{theirs}. Import the Trainer, modules and callbacks from one package."
            )
