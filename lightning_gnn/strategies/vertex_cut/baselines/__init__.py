"""Partitioners of edges for comparison, imported when used: see :mod:`~lightning_gnn.strategies.vertex_cut.cutters`."""
