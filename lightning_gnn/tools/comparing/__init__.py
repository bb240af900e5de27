"""One model and graph under many strategies, measured side by side: cells, their processes, results, table and report."""

from lightning_gnn.tools.comparing.run import compare

__all__ = ["compare"]
