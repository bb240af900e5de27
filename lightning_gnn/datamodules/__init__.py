"""Graphs as Lightning data: :class:`GraphDataModule`, its store, and a generator of graphs."""

from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.datamodules.links import split_edges
from lightning_gnn.datamodules.synthetic import planted_partition

__all__ = ["GraphDataModule", "planted_partition", "split_edges"]
