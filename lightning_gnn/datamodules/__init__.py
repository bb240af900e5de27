"""Graphs as Lightning data: :class:`GraphDataModule` and its partition directory."""

from lightning_gnn.datamodules.graph import GraphDataModule

__all__ = ["GraphDataModule"]
