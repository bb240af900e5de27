"""Callbacks."""

from lightning_gnn.callbacks.communication import CommunicationMetrics, CommunicationMonitor

__all__ = ["CommunicationMetrics", "CommunicationMonitor"]
