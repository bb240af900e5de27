"""PyTorch Lightning strategies that train any PyTorch Geometric model, unchanged, on one graph over many devices.

Importing this package registers the strategies: ``Trainer(strategy="dgcl")``.
"""

from lightning_gnn.advising.advice import advise
from lightning_gnn.advising.auto import AutoStrategy
from lightning_gnn.callbacks.cache import AdaptiveThreshold, LargestChanges
from lightning_gnn.callbacks.monitor import CommunicationMonitor
from lightning_gnn.callbacks.trace import CommunicationTrace
from lightning_gnn.comparing import compare
from lightning_gnn.datamodules import GraphDataModule, planted_partition, split_edges
from lightning_gnn.foreign import leave_out
from lightning_gnn.modules import LinkPredictor, NodeClassifier
from lightning_gnn.nn import (
    CommNet,
    CommNetConv,
    DistributedEmbedding,
    UnsupportedModelError,
    choose_edges,
    expand,
    fetch_rows,
    labelled,
    mean_over_ranks,
    num_nodes,
    reduce,
    register_adapter,
    substitute,
    sum_over_ranks,
)
from lightning_gnn.parity import check_parity
from lightning_gnn.strategies import (
    CachedVertexCutStrategy,
    ClusterAllReduceStrategy,
    DGCLStrategy,
    GNNStrategy,
    GossipStrategy,
    SamplingStrategy,
    SpMM1DStrategy,
    SpMM2DStrategy,
    SpMM3DStrategy,
    SpMM15DStrategy,
    VertexCutStrategy,
)
from lightning_gnn.strategies.staged import StagedStrategy

leave_out()

__version__ = "0.1.0"

__all__ = [
    "AdaptiveThreshold",
    "AutoStrategy",
    "CachedVertexCutStrategy",
    "ClusterAllReduceStrategy",
    "CommNet",
    "CommNetConv",
    "CommunicationMonitor",
    "CommunicationTrace",
    "DGCLStrategy",
    "DistributedEmbedding",
    "GNNStrategy",
    "GossipStrategy",
    "GraphDataModule",
    "LargestChanges",
    "LinkPredictor",
    "NodeClassifier",
    "SamplingStrategy",
    "SpMM1DStrategy",
    "SpMM2DStrategy",
    "SpMM3DStrategy",
    "SpMM15DStrategy",
    "StagedStrategy",
    "UnsupportedModelError",
    "VertexCutStrategy",
    "advise",
    "check_parity",
    "choose_edges",
    "compare",
    "expand",
    "fetch_rows",
    "labelled",
    "mean_over_ranks",
    "num_nodes",
    "planted_partition",
    "reduce",
    "register_adapter",
    "split_edges",
    "substitute",
    "sum_over_ranks",
]
