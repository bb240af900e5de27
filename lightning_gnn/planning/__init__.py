"""Who sends what when, and what it costs; runs without ranks."""

from lightning_gnn.planning.cost import LayerCost

__all__ = ["LayerCost"]
