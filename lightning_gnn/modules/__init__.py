"""LightningModules."""

from lightning_gnn.modules.link_predictor import LinkPredictor
from lightning_gnn.modules.node_classifier import NodeClassifier

__all__ = ["LinkPredictor", "NodeClassifier"]
