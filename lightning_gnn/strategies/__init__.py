"""Strategies; importing this package registers their names with Lightning's Trainer."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gnn.launching import join_parent
from lightning_gnn.strategies.base import GNNStrategy
from lightning_gnn.strategies.dgcl import DGCLStrategy
from lightning_gnn.strategies.gossip import ClusterAllReduceStrategy, GossipStrategy
from lightning_gnn.strategies.sampling import SamplingStrategy
from lightning_gnn.strategies.scheme import Scheme
from lightning_gnn.strategies.spmm import SpMM1DStrategy, SpMM2DStrategy, SpMM3DStrategy, SpMM15DStrategy
from lightning_gnn.strategies.vertex_cut import CachedVertexCutStrategy, VertexCutStrategy

join_parent()  # before a process that this one starts could take itself for the rank


def register(strategy: type[GNNStrategy]) -> None:
    """Makes the strategy's name, and those of other ways to start ranks, known to the Trainer."""
    for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_notebook", "fork")):
        name, description = strategy.strategy_name + suffix, f"{strategy.__name__}, ranks started by {start_method}"
        StrategyRegistry.register(name, strategy, description=description, start_method=start_method)


def registered() -> dict[str, type[GNNStrategy]]:
    """Returns this package's strategies, and those of users, by the names that they are registered by."""
    kinds = {name: each["strategy"] for name, each in StrategyRegistry.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, GNNStrategy)}


for _strategy in (
    DGCLStrategy,
    SpMM1DStrategy,
    SpMM15DStrategy,
    SpMM2DStrategy,
    SpMM3DStrategy,
    VertexCutStrategy,
    CachedVertexCutStrategy,
    SamplingStrategy,
    GossipStrategy,
    ClusterAllReduceStrategy,
):
    register(_strategy)

__all__ = [
    "CachedVertexCutStrategy",
    "ClusterAllReduceStrategy",
    "DGCLStrategy",
    "GNNStrategy",
    "GossipStrategy",
    "SamplingStrategy",
    "Scheme",
    "SpMM1DStrategy",
    "SpMM2DStrategy",
    "SpMM3DStrategy",
    "SpMM15DStrategy",
    "VertexCutStrategy",
    "register",
    "registered",
]
