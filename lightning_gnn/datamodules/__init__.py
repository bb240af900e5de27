"""Graphs as Lightning data: :class:`GraphDataModule` and its store."""

from lightning_gnn.datamodules.graph import GraphDataModule

__all__ = ["GraphDataModule"]
