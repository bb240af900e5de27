"""Helper processes of ranks: they detect lost ranks outside of Python's interpreter lock, and end the other ranks."""

from lightning_gnn.extensions.liveness.link import RankHelper

__all__ = ["RankHelper"]
