"""Callbacks."""

from lightning_gnn.callbacks.communication import CommunicationMetrics
from lightning_gnn.callbacks.monitor import CommunicationMonitor
from lightning_gnn.callbacks.trace import CommunicationTrace

__all__ = ["CommunicationMetrics", "CommunicationMonitor", "CommunicationTrace"]
