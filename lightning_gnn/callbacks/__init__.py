"""Callbacks."""

from lightning_gnn.callbacks.communication import CommunicationMetrics

__all__ = ["CommunicationMetrics"]
