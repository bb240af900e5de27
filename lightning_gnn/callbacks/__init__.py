"""Callbacks that log communication metrics and pictures."""

from lightning_gnn.callbacks.communication import CommunicationMetrics, CommunicationMonitor

__all__ = ["CommunicationMetrics", "CommunicationMonitor"]
