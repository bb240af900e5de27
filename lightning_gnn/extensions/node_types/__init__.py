"""Graphs with node and edge types."""
