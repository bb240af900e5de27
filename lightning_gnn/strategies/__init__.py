"""Strategies. Importing this package registers their names with Lightning's Trainer.

The module of a strategy is imported at the first use of the strategy.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gnn.lightning_packages import FABRICS, PACKAGES
from lightning_gnn.registry import STRATEGIES, class_of_strategies

if TYPE_CHECKING:
    from lightning_gnn.strategies.cover.strategy import CoverStrategy
    from lightning_gnn.strategies.dgcl.strategy import DGCLStrategy
    from lightning_gnn.strategies.gossip.strategy import ClusterAllReduceStrategy, GossipStrategy
    from lightning_gnn.strategies.sampling.strategy import SamplingStrategy
    from lightning_gnn.strategies.spmm.strategy import (
        SpMM1DStrategy,
        SpMM2DStrategy,
        SpMM3DStrategy,
        SpMM15DStrategy,
        SpMMStrategy,
    )
    from lightning_gnn.strategies.vertex_cut.strategy import CachedVertexCutStrategy, VertexCutStrategy
    from lightning_gnn.strategy.base import GNNStrategy
    from lightning_gnn.strategy.scheme import Scheme

PLUGINS = "lightning_gnn.strategies"
"""Entry point group for strategies of other packages: ``name = "package.module:Class"``."""


def __getattr__(name: str) -> Any:
    found = class_of_strategies(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


class _Lazy:
    """Placeholder for a strategy in Lightning's registry; imports the strategy when it is called or loaded.

    Args:
        module, name: module and name of the class.
        plugin: package that provides the class; None for strategies of this package.
    """

    def __init__(self, module: str, name: str, plugin: str | None = None) -> None:
        self._module, self._name, self._plugin = module, name, plugin

    def load(self) -> type[GNNStrategy]:
        """Returns the class; raises ImportError if it cannot be imported."""
        try:
            return getattr(import_module(self._module), self._name)
        except Exception as error:
            if self._plugin is None:
                raise
            what = f"{self._module}:{self._name}, a strategy of the package {self._plugin}"
            raise ImportError(f"{what}, cannot be imported: {type(error).__name__}: {error}") from error

    def __call__(self, **arguments: Any) -> GNNStrategy:
        return self.load()(**arguments)


def register(strategy: type[GNNStrategy]) -> None:
    """Register a strategy with the Trainer: its name, and the names with the suffixes ``_spawn`` and ``_notebook``."""
    _register(strategy.strategy_name, strategy.__name__, strategy)


def _register(name: str, described: str, strategy: type[GNNStrategy] | _Lazy) -> None:
    for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_notebook", "fork")):
        description = f"{described}, ranks started by {start_method}"
        stub = partial(_refuse_fabric, name + suffix)
        for package, fabric in zip(PACKAGES, FABRICS):
            registry, is_copy = package.strategies.StrategyRegistry, package is not PACKAGES[0]
            registry.register(name + suffix, strategy, description, override=is_copy, start_method=start_method)
            fabric.strategies.STRATEGY_REGISTRY.register(name + suffix, stub, "for the Trainer only", override=True)


def _refuse_fabric(name: str) -> NoReturn:
    """Raises ValueError. Registered with Fabric in place of the strategy, so that the error explains what to use."""
    raise ValueError(
        f"Fabric(strategy={name!r}) is not supported: Fabric runs your own loop, and {name!r} needs the steps, logs and "
        f"gradients of a Trainer. Use Trainer(strategy={name!r}) with a LightningModule, or lightning_gnn.functional in your "
        "own loop (docs/functional.md)."
    )


def registered() -> dict[str, type[GNNStrategy]]:
    """Returns the registered :class:`GNNStrategy` classes by name: from this package, plugins and users."""
    from lightning_gnn.strategy.base import GNNStrategy

    found: dict[str, type[GNNStrategy]] = {}
    broken: set[str] = set()
    for name, each in StrategyRegistry.items():
        kind = each["strategy"]
        try:
            kind = kind.load() if isinstance(kind, _Lazy) else kind
        except ImportError as error:
            broken.add(str(error))
        if isinstance(kind, type) and issubclass(kind, GNNStrategy):
            found[name] = kind
    for text in broken - _LOGGED_ERRORS:
        rank_zero_warn(f"Skipped a strategy: {text}.")
        _LOGGED_ERRORS.add(text)
    return found


def _register_plugins() -> None:
    """Register the strategies of installed packages by name, without importing them."""
    for entry in entry_points(group=PLUGINS):
        plugin = entry.dist.name if entry.dist is not None else entry.value
        if entry.name in StrategyRegistry:
            rank_zero_warn(f"Skipped strategy {entry.name!r} of the package {plugin}: another strategy has this name.")
        else:
            _register(entry.name, entry.attr, _Lazy(entry.module, entry.attr, plugin))


_LOGGED_ERRORS: set[str] = set()
"""Import errors of plugins that were already logged."""

for _name, (_module, _class) in STRATEGIES.items():
    _register(_name, _class, _Lazy(_module, _class))
_register_plugins()

__all__ = [
    "CachedVertexCutStrategy",
    "ClusterAllReduceStrategy",
    "CoverStrategy",
    "DGCLStrategy",
    "GNNStrategy",
    "GossipStrategy",
    "SamplingStrategy",
    "Scheme",
    "SpMM1DStrategy",
    "SpMM2DStrategy",
    "SpMM3DStrategy",
    "SpMM15DStrategy",
    "SpMMStrategy",
    "VertexCutStrategy",
    "register",
    "registered",
]
