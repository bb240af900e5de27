"""PyTorch Lightning strategies that train any PyTorch Geometric model, unchanged, on one graph over many devices.

Importing this package registers the strategies: ``Trainer(strategy="dgcl")``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import lightning_gnn.strategies  # noqa: F401  registers their names
from lightning_gnn.launching import join_parent
from lightning_gnn.private_lightning import leave_out
from lightning_gnn.registry import home_of

if TYPE_CHECKING:
    from lightning_gnn.callbacks.communication import CommunicationMonitor
    from lightning_gnn.data.links import split_edges
    from lightning_gnn.data.synthetic import planted_partition
    from lightning_gnn.datamodules import GraphDataModule
    from lightning_gnn.extensions.embeddings.embedding import DistributedEmbedding
    from lightning_gnn.extensions.samples.order import split_by_time
    from lightning_gnn.modules import LinkPredictor, NodeClassifier
    from lightning_gnn.nn import (
        CommNet,
        CommNetConv,
        UnsupportedModelError,
        gather_halo,
        gather_nodes,
        global_num_nodes,
        patch_globals,
        reduce_halo,
        register_adapter,
        select_edges,
    )
    from lightning_gnn.rows import NotExactError, gather_global, local_rows, register_row_rule
    from lightning_gnn.strategies import (
        CachedVertexCutStrategy,
        ClusterAllReduceStrategy,
        CoverStrategy,
        DGCLStrategy,
        GNNStrategy,
        GossipStrategy,
        SamplingStrategy,
        SpMM1DStrategy,
        SpMM2DStrategy,
        SpMM3DStrategy,
        SpMM15DStrategy,
        SpMMStrategy,
        VertexCutStrategy,
    )
    from lightning_gnn.strategies.vertex_cut.thresholds import AdaptiveThreshold, TopKChanges
    from lightning_gnn.tools.advising.advice import advise
    from lightning_gnn.tools.advising.auto import AutoStrategy
    from lightning_gnn.tools.comparing import compare
    from lightning_gnn.tools.parity import check_parity

join_parent()  # before child processes could use the same environment variable
leave_out()

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(home_of(name)), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    from lightning_gnn.old_names import OF_PACKAGE

    if name in OF_PACKAGE:
        raise ImportError(f"lightning_gnn.{name} was {OF_PACKAGE[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AdaptiveThreshold",
    "AutoStrategy",
    "CachedVertexCutStrategy",
    "ClusterAllReduceStrategy",
    "CommNet",
    "CommNetConv",
    "CommunicationMonitor",
    "CoverStrategy",
    "DGCLStrategy",
    "DistributedEmbedding",
    "GNNStrategy",
    "GossipStrategy",
    "GraphDataModule",
    "LinkPredictor",
    "NodeClassifier",
    "NotExactError",
    "SamplingStrategy",
    "SpMM1DStrategy",
    "SpMM2DStrategy",
    "SpMM3DStrategy",
    "SpMM15DStrategy",
    "SpMMStrategy",
    "TopKChanges",
    "UnsupportedModelError",
    "VertexCutStrategy",
    "advise",
    "check_parity",
    "compare",
    "gather_global",
    "gather_halo",
    "gather_nodes",
    "global_num_nodes",
    "local_rows",
    "patch_globals",
    "planted_partition",
    "reduce_halo",
    "register_adapter",
    "register_row_rule",
    "select_edges",
    "split_by_time",
    "split_edges",
]

if {"__file__", "__spec__"} <= vars(sys.modules["__main__"]).keys() and sys.modules["__main__"].__spec__ is None:  # a script
    from lightning_gnn.launching.preload import preload

    preload(sys._getframe().f_back)
