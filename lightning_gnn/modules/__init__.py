"""LightningModules."""

from lightning_gnn.modules.node_classifier import NodeClassifier

__all__ = ["NodeClassifier"]
