"""Comparison of strategies on one model and graph: runs, their processes, results, table and report."""

from lightning_gnn.tools.comparing.run import compare

__all__ = ["compare"]
