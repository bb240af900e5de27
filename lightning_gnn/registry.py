"""Modules of schemes that core loads by name when a layout or a method needs them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

_CUTTERS = {"vertex_cut": "lightning_gnn.strategies.vertex_cut.cutters"}
_REFINERS = {"metis_cover": ("lightning_gnn.strategies.cover.refine", "refine_for_cover")}


def cutter_of(kind: str) -> ModuleType:
    """Returns the module that cuts edges for a kind of layout, with ``assign_edges``, ``part_dtype`` and ``report_of``."""
    return import_module(_CUTTERS[kind])


def refiner_of(method: str) -> Callable[..., Any] | None:
    """Returns what moves nodes between METIS's parts under a method of :func:`~lightning_gnn.partition.edge_cut.assign_nodes`."""
    if method not in _REFINERS:
        return None
    module, name = _REFINERS[method]
    return getattr(import_module(module), name)
