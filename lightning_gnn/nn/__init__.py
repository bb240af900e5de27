"""Models, and the binding that runs any PyG model on a part of a graph."""

from typing import Any

from lightning_gnn.nn.adapters import patch_globals
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.commnet import CommNet, CommNetConv
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError
from lightning_gnn.nn.convs import register_adapter
from lightning_gnn.nn.helpers import gather_halo, gather_nodes, global_num_nodes, reduce_halo, select_edges
from lightning_gnn.registry import feature


def __getattr__(name: str) -> Any:
    if name == "DistributedEmbedding":
        return feature(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Binding",
    "CommNet",
    "CommNetConv",
    "DistributedEmbedding",
    "GraphContext",
    "UnsupportedModelError",
    "gather_halo",
    "gather_nodes",
    "global_num_nodes",
    "patch_globals",
    "reduce_halo",
    "register_adapter",
    "select_edges",
]
