"""One step of the user's own module on their own graph, under every scheme and on one device, compared value by value."""

from lightning_gnn.checks.differences import Finding
from lightning_gnn.tools.parity.check import check_parity, explain_steps
from lightning_gnn.tools.parity.report import ParityReport, SchemeParity

__all__ = ["Finding", "ParityReport", "SchemeParity", "check_parity", "explain_steps"]
