"""Modules that are imported when their name is used: the one place where modules are named by strings."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

STRATEGIES = {
    "dgcl": ("lightning_gnn.strategies.dgcl.strategy", "DGCLStrategy"),
    "cover": ("lightning_gnn.strategies.cover.strategy", "CoverStrategy"),
    "spmm": ("lightning_gnn.strategies.spmm.strategy", "SpMMStrategy"),
    "spmm_1d": ("lightning_gnn.strategies.spmm.strategy", "SpMM1DStrategy"),
    "spmm_15d": ("lightning_gnn.strategies.spmm.strategy", "SpMM15DStrategy"),
    "spmm_2d": ("lightning_gnn.strategies.spmm.strategy", "SpMM2DStrategy"),
    "spmm_3d": ("lightning_gnn.strategies.spmm.strategy", "SpMM3DStrategy"),
    "vertex_cut": ("lightning_gnn.strategies.vertex_cut.strategy", "VertexCutStrategy"),
    "vertex_cut_cached": ("lightning_gnn.strategies.vertex_cut.strategy", "CachedVertexCutStrategy"),
    "sampling": ("lightning_gnn.strategies.sampling.strategy", "SamplingStrategy"),
    "gossip": ("lightning_gnn.strategies.gossip.strategy", "GossipStrategy"),
    "cluster_allreduce": ("lightning_gnn.strategies.gossip.strategy", "ClusterAllReduceStrategy"),
    "auto_gnn": ("lightning_gnn.tools.advising.auto", "AutoStrategy"),
}
"""The module and the class of each strategy, by the name that ``Trainer(strategy=...)`` takes."""

PARTITIONERS = {"streaming": ("lightning_gnn.extensions.graph_files.partitioner", "Streaming")}
"""The module and the class of each partitioner of nodes that is an extension, by its name as a ``partition``."""

_CUTTERS = {"vertex_cut": "lightning_gnn.strategies.vertex_cut.cutters"}
_REFINERS = {"metis_cover": ("lightning_gnn.strategies.cover.refine", "refine_for_cover")}


def source_of(data: Any) -> Any:
    """Returns the :class:`~lightning_gnn.data.loading.GraphSource` of a datamodule: that of files for the path of a folder."""
    if isinstance(data.source, str) and data.source and ("/" in data.source or Path(data.source).is_dir()):
        folders = import_module("lightning_gnn.extensions.graph_files.source")
        return folders.FolderSource(data.source, data.partition_memory)
    return import_module("lightning_gnn.data.loading").GraphSource(data.source)


def partitioners() -> dict[str, Any]:
    """Returns a :class:`~lightning_gnn.partition.budget.Partitioner` for each of `PARTITIONERS`, by their names."""
    return {name: getattr(import_module(module), kind)() for name, (module, kind) in PARTITIONERS.items()}


def cutter_of(kind: str) -> ModuleType:
    """Returns the module that cuts edges for a kind of layout, with ``assign_edges``, ``edge_predictions``, ``part_dtype`` and
    ``report_of``."""
    return import_module(_CUTTERS[kind])


def refiner_of(method: str) -> Callable[..., Any] | None:
    """Returns what moves nodes between METIS's parts under a method of :func:`~lightning_gnn.partition.edge_cut.assign_nodes`."""
    if method not in _REFINERS:
        return None
    module, name = _REFINERS[method]
    return getattr(import_module(module), name)
