"""Table of the properties of conv classes, which :func:`register_adapter` extends, and functions that read it."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from lightning_gnn import private_pyg as pyg
from lightning_gnn.nn import adapters, aggregations, attention, reorder
from lightning_gnn.nn.adapters import Adapter
from lightning_gnn.nn.commnet import CommNetConv
from lightning_gnn.nn.context import GraphContext


@dataclass(frozen=True)
class ConvRule:
    """Properties of a class of convs; a class without a rule is exact if it passes its edges to `propagate`.

    Attributes:
        adapter: function that returns replacement methods of a bound conv, see :func:`register_adapter`.
        sends_rows: whether messages are source rows, possibly times `weight`. SpMM computes their sums and means.
        weight: argument of `propagate` that multiplies messages; None for ones.
        forward: faster function equal to the conv's forward. It takes the rank's graph context and the layer's name before the
            conv and its arguments.
        fits: function that returns whether the settings of a conv allow `forward`.
        maps: name of the linear map whose weight `forward` reads, or function that returns several; empty if they are unknown,
            None if `forward` calls all maps.
        kernels: groups of :func:`lightning_gnn.kernels.warm_up.warm_up` that it runs.
        halo_columns: function that returns the number of exchanged columns, or None for the columns of x. Set only for convs that
            take ``(x_source, x_target)`` and map each source row separately, so that S x may be their input. Other convs may draw
            random numbers or compute statistics over rows, where copies of a row would count.
        several_hops: whether a call propagates along edges several times; None if unknown.
        takes_all_types: whether it is called on all node and edge types at once; `refused` then applies to homogeneous graphs.
        refused: reason why it is not exact on a part of a graph, and an alternative; empty if it is exact.
    """

    adapter: Adapter | None = None
    sends_rows: bool = False
    weight: str | None = None
    forward: Callable[..., Any] | None = None
    fits: Callable[[Any], bool] = reorder.is_linear
    maps: str | Callable[[Any], list[Any]] | None = None
    kernels: tuple[str, ...] = ("sums",)
    halo_columns: Callable[[Any], int | None] | None = None
    several_hops: bool | None = False
    takes_all_types: bool = False
    refused: str = ""


# The first three rules normalize by degrees through `gcn_norm`, which would need the degrees of halo nodes.
_NORMALIZED = ConvRule(adapters.gcn)
_WEIGHTED = ConvRule(adapters.gcn, sends_rows=True, weight="edge_weight")
_HOPS = replace(_WEIGHTED, several_hops=True)
_ROWS = ConvRule(sends_rows=True, halo_columns=lambda conv: conv.out_channels)
_ATTENTION = ConvRule(fits=attention.sums, kernels=("attention",), halo_columns=lambda conv: conv.heads * conv.out_channels)

# Exact without changes. Their forward passes `edge_index` to `propagate` unchanged, or adds self-loops by
# `add_self_loops(num_nodes=rows of x)`, which are the local rows, or reads in-degrees, which are all local.
_AS_THEY_ARE = """AGNNConv CGConv ClusterGCNConv EdgeConv FeaStConv FiLMConv GENConv GINEConv GMMConv GeneralConv HEATConv
LEConv MFConv NNConv PPFConv PointGNNConv PointNetConv PointTransformerConv RGATConv FastRGCNConv ResGatedGraphConv
SignedConv WLConvContinuous"""

_REFUSED = {
    **{f"CuGraph{name}": f"it needs cuGraph's own graph; use {name}" for name in ("GATConv", "RGCNConv", "SAGEConv")},
    "DynamicEdgeConv": "it finds neighbors among all nodes; create the edges beforehand, or see docs/recipes.md, 'All pairs'",
    "FusedGATConv": "it needs its own graph format; use GATConv",
    "GravNetConv": "it finds neighbors among all nodes; create the edges beforehand and use GraphConv",
    "HypergraphConv": "its second step runs against the direction of the edges",
    "MeshCNNConv": "it works on the edges of a mesh, not on nodes",
    "PANConv": "it multiplies the whole graph's adjacency with itself",
    "SparseLinear": "it has a row of weights for each node of the graph; docs/recipes.md, 'LINKX', selects the rows of a rank",
    "SplineConv": "its kernel is in compiled extras; use GMMConv",
    "WLConv": "it hashes colors in an order that all nodes share",
    "XConv": "it finds neighbors among all nodes",
}
_TYPES = "it requires a HeteroData with several node types; otherwise use"

CONVS: dict[str | type, ConvRule] = {
    "MessagePassing": ConvRule(sends_rows=True, several_hops=None),  # convs of users
    **dict.fromkeys(_AS_THEY_ARE.split(), ConvRule()),
    **{name: ConvRule(refused=reason) for name, reason in _REFUSED.items()},
    "APPNP": _HOPS,
    "ARMAConv": replace(_NORMALIZED, several_hops=True),
    "ChebConv": ConvRule(adapters.cheb, sends_rows=True, weight="norm", several_hops=True),
    CommNetConv: ConvRule(adapters.commnet, sends_rows=True, forward=reorder.commnet, maps="lin_heard"),
    "DNAConv": _NORMALIZED,
    "EGConv": _NORMALIZED,
    "FAConv": _NORMALIZED,
    "GATConv": replace(_ATTENTION, forward=attention.gat),
    "GATv2Conv": replace(_ATTENTION, forward=attention.gatv2),
    "GCN2Conv": _WEIGHTED,
    "GCNConv": replace(_WEIGHTED, forward=reorder.gcn, maps="lin"),
    "GINConv": replace(_ROWS, forward=reorder.gin, maps=reorder.first_of_nn, halo_columns=lambda conv: None),
    "GatedGraphConv": ConvRule(several_hops=True),
    "GraphConv": replace(_ROWS, weight="edge_weight", forward=reorder.graph_conv, maps="lin_rel"),
    "HANConv": ConvRule(takes_all_types=True, refused=f"{_TYPES} convs for one type"),
    "HGTConv": ConvRule(takes_all_types=True, refused=f"{_TYPES} TransformerConv"),
    "LGConv": _WEIGHTED,
    "LabelPropagation": replace(_HOPS, adapter=adapters.label_propagation),
    "MixHopConv": _HOPS,
    "PDNConv": _NORMALIZED,
    "PNAConv": ConvRule(
        forward=aggregations.pna, fits=aggregations.has_sums, maps=aggregations.maps_of, kernels=("sums", "statistics")
    ),
    "RGCNConv": ConvRule(adapters.rgcn),
    "SAGEConv": replace(_ROWS, forward=reorder.sage, maps="lin_l"),
    "SGConv": replace(_HOPS, forward=reorder.sg, maps="lin"),
    "SSGConv": _HOPS,
    "SimpleConv": ConvRule(sends_rows=True, weight="edge_weight"),
    "SuperGATConv": ConvRule(adapters.supergat),
    "TAGConv": replace(_HOPS, forward=reorder.tag, maps=lambda conv: list(conv.lins)),
    "TransformerConv": replace(
        _ATTENTION, forward=attention.transformer, halo_columns=lambda conv: 2 * conv.heads * conv.out_channels
    ),
}
"""Rules by class; by name for PyG classes, since PyG versions differ in their classes. Read it through :func:`rule_of`."""


def _key(kind: type) -> str | type:
    return kind.__name__ if kind.__module__.startswith("torch_geometric.") else kind


def known_kind(kind: type) -> Any:
    """Returns the nearest class in :data:`CONVS` among a class and its bases, or None; convs have at least MessagePassing."""
    return next((each for each in kind.__mro__ if _key(each) in CONVS), None)


def rule_of(kind: type, *methods: str) -> ConvRule:
    """Returns the rule of :func:`known_kind`; an empty rule if there is none, or if the class overrides `methods`."""
    known = known_kind(kind)
    same = known is not None and all(getattr(kind, name) is getattr(known, name) for name in methods)
    return CONVS[_key(known)] if same else ConvRule()


def add_to_rule(kind: type, **facts: Any) -> None:
    """Update fields of a class's :class:`ConvRule` in the table."""
    CONVS[_key(kind)] = replace(rule_of(kind), **facts)


def exact_convs() -> list[str]:
    """Returns the names of the convs in the table that are exact on homogeneous graphs."""
    rules = {kind if isinstance(kind, str) else kind.__name__: rule for kind, rule in CONVS.items()}
    return sorted(name for name, rule in rules.items() if not rule.refused and name != "MessagePassing")


# Fields that hold for the class's own forward, and not for a forward that an adapter replaces.
_OF_OTHER_FORWARDS: dict[str, Any] = {"forward": None, "halo_columns": None, "refused": ""}


def register_adapter(kind: type[MessagePassing]) -> Callable[[Adapter], Adapter]:
    """Decorator that registers the adapter of a conv class whose own code reads more than the edges of its nodes.

    A bound conv of this class, or of a subclass without an adapter of its own, has the methods that the adapter returns. They
    take precedence over the package's rule for the class. ``propagate`` and ``edge_updater`` are always wrapped; a conv that only
    calls them needs no adapter. docs/models.md has an example.

    Args:
        kind: conv class.

    The adapter is called with the conv, its rank's :class:`~lightning_gnn.nn.context.GraphContext`, and the layer's name.

    Raises:
        TypeError: `kind` does not derive from MessagePassing.
    """
    if not (isinstance(kind, type) and issubclass(kind, MessagePassing)):
        raise TypeError(f"register_adapter requires a class that derives from MessagePassing (got {kind!r}).")

    def register(adapter: Adapter) -> Adapter:
        rows, several_hops = rule_of(kind, "message").sends_rows, bool(rule_of(kind).several_hops)
        add_to_rule(kind, adapter=adapter, sends_rows=rows, several_hops=several_hops, **_OF_OTHER_FORWARDS)
        return adapter

    return register


def kernel_groups(module: torch.nn.Module) -> set[str]:
    """Returns the loops that a model's convs may run, as groups of :func:`lightning_gnn.kernels.warm_up.warm_up`."""
    groups = set[str]()
    for conv in module.modules():
        if isinstance(conv, MessagePassing):
            groups.update(rule_of(type(conv)).kernels)
            if rule_of(type(conv), "message").sends_rows and not reorder.is_linear(conv):
                groups.add("statistics")
    return groups


def fused_methods(conv: MessagePassing, context: GraphContext, layer: str, original: Callable[..., Any]) -> dict[str, Any]:
    """Returns the faster forward as a replacement method, like an adapter; empty if the conv does not fit.

    Args:
        conv: conv to be bound.
        context: graph context of its rank.
        layer: name of the conv.
        original: function of the conv and its arguments that runs the usual forward. It runs if the conv or a linear map has
            hooks, or if a map is modified, for example by pruning. Both may change between calls.
    """
    rule = rule_of(type(conv), "forward", "message", "edge_update")
    if rule.forward is None or not rule.fits(conv):
        return {}
    forward = partial(rule.forward, context, layer)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        maps = rule.maps(self) if callable(rule.maps) else [getattr(self, rule.maps)] if rule.maps else None
        may_read = maps is None or (maps != [] and all(map(pyg.is_plain_map, maps)))
        return (forward if pyg.is_plain(self) and may_read else original)(self, *args, **kwargs)

    return {"forward": types.MethodType(run, conv)}
