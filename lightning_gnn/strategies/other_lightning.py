"""A clear answer for users of ``pytorch_lightning``, whose registry is not that of ``lightning``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

OTHER = "pytorch_lightning"


class _Refused:
    """Stands for our strategies in the other registry."""

    def __init__(self, **_: Any) -> None:
        raise TypeError(
            "lightning_gnn's strategies belong to `lightning`, and this Trainer is of `pytorch_lightning`. Write "
            "`import lightning as L` and L.Trainer, L.LightningModule, in place of `import pytorch_lightning as pl`."
        )


_names: list[str] = []


class _OnImport(MetaPathFinder):
    """Registers the names once the other package is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != OTHER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_register(module: Any) -> None:
                execute(module)
                _register(_names)

            spec.loader.exec_module = and_register  # type: ignore[method-assign]
        return spec


def refuse_other_lightning(names: Sequence[str]) -> None:
    """Makes ``pytorch_lightning.Trainer(strategy=NAME)`` say what to import, whichever is imported first."""
    first = not _names
    _names.extend(names)
    if OTHER in sys.modules:
        _register(names)
    elif first:
        sys.meta_path.insert(0, _OnImport())


def _register(names: Sequence[str]) -> None:
    registry = sys.modules[OTHER].strategies.StrategyRegistry
    for name in names:
        if name not in registry:
            registry.register(name, _Refused, description="of `lightning`, not of `pytorch_lightning`")
