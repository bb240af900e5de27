"""Cutters of edges to compare with, each imported when it is named: see :mod:`~lightning_gnn.strategies.vertex_cut.cutters`."""
