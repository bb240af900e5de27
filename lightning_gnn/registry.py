"""Modules that are imported when their name is used: the one place where modules are named by strings."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
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

_CUTTERS = {"vertex_cut": "lightning_gnn.strategies.vertex_cut.cutters"}
_REFINERS = {"metis_cover": ("lightning_gnn.strategies.cover.refine", "refine_for_cover")}

_FEATURES = {
    "DistributedEmbedding": "lightning_gnn.extensions.embeddings.embedding",
    "TypedBinding": "lightning_gnn.extensions.node_types.binding",
    "TypedCut": "lightning_gnn.extensions.node_types.shards",
    "TypedGraph": "lightning_gnn.extensions.node_types.binding",
    "check_typed_module": "lightning_gnn.extensions.node_types.binding",
    "prepare_hetero": "lightning_gnn.extensions.node_types.graph",
    "typed_small_graph": "lightning_gnn.extensions.node_types.small_graph",
    "whole_graph_with_types": "lightning_gnn.extensions.node_types.shards",
}


def feature(name: str) -> Any:
    """Returns a class or function of an extension, by its name.

    Raises:
        AttributeError: there is none of that name.
    """
    if name not in _FEATURES:
        raise AttributeError(f"No extension has {name!r}. There are {sorted(_FEATURES)}.")
    return getattr(import_module(_FEATURES[name]), name)


def explained(error: str, step: str) -> str | None:
    """Returns what an extension says of an error of `step`, such as what to do; None if none knows it."""
    return import_module("lightning_gnn.extensions.node_types.graph").about_types(error, step)


def cutter_of(kind: str) -> ModuleType:
    """Returns the module that cuts edges for a kind of layout, with ``assign_edges``, ``part_dtype`` and ``report_of``."""
    return import_module(_CUTTERS[kind])


def refiner_of(method: str) -> Callable[..., Any] | None:
    """Returns what moves nodes between METIS's parts under a method of :func:`~lightning_gnn.partition.edge_cut.assign_nodes`."""
    if method not in _REFINERS:
        return None
    module, name = _REFINERS[method]
    return getattr(import_module(module), name)
