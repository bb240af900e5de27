"""What is loaded by its name, and where it lies: the only file whose strings name modules of layers above."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_CUTTERS = {"vertex_cut": "lightning_gnn.strategies.vertex_cut.cutters"}


def cutter_of(kind: str) -> ModuleType:
    """Returns the module that cuts edges for a kind of layout, with ``assign_edges``, ``part_dtype`` and ``report_of``."""
    return import_module(_CUTTERS[kind])
