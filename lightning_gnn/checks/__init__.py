"""Whether a model gives the numbers of one device."""

from lightning_gnn.checks.self_check import SelfCheck, self_check

__all__ = ["SelfCheck", "self_check"]
