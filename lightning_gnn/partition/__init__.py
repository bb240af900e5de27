"""Who owns what: partitioners, their quality, and the shards that follow; pure functions of a graph, without ranks."""

from lightning_gnn.partition.edge_cut import Assignment, assign_nodes
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.metrics import EdgeCutReport, edge_cut_report
from lightning_gnn.partition.vertex_cut import EdgeAssignment, assign_edges
from lightning_gnn.partition.vertex_report import VertexCutReport, vertex_cut_report

__all__ = [
    "Assignment",
    "EdgeAssignment",
    "EdgeCutReport",
    "LayoutSpec",
    "VertexCutReport",
    "assign_edges",
    "assign_nodes",
    "edge_cut_report",
    "vertex_cut_report",
]
