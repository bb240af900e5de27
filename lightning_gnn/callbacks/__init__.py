"""Callbacks."""

from lightning_gnn.callbacks.communication import CommunicationMetrics, CommunicationMonitor
from lightning_gnn.callbacks.trace import CommunicationTrace

__all__ = ["CommunicationMetrics", "CommunicationMonitor", "CommunicationTrace"]
