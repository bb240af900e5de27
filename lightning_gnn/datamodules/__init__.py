"""Graphs as Lightning data: :class:`GraphDataModule`, its store, and a generator of graphs."""

from lightning_gnn.data.links import split_edges
from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.datamodules.graph import GraphDataModule

__all__ = ["GraphDataModule", "planted_partition", "split_edges"]
