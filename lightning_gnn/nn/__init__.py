"""Models, and what makes any PyG model run on a part of a graph."""

from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.commnet import CommNet, CommNetConv
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError

__all__ = ["Binding", "CommNet", "CommNetConv", "GraphContext", "UnsupportedModelError"]
