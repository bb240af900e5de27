"""What is known of each class of convs, in one table, which :func:`register_adapter` adds to; and what follows from it."""

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
    """What is known of a class of convs; a conv of which nothing is known is exact if it hands its edges to `propagate`.

    Attributes:
        adapter: returns the methods that a bound conv needs, see :func:`register_adapter`.
        sends_rows: whether messages are rows of sources, or these times `weight`. SpMM computes their sums and means.
        weight: the argument of `propagate` that messages are multiplied by; None for ones.
        forward: the function that the conv's forward computes, at less cost. It is given the rank's graph and the layer's name
            before the conv and its arguments.
        fits: whether the settings of a conv allow `forward`.
        maps: the linear maps whose weights `forward` reads, none if it is not known which; None where it calls all maps.
        kernels: the groups of :func:`lightning_gnn.kernels.warm_up.warm_up` that it runs.
        halo_columns: how many columns travel, None for those of x. Only of convs that take ``(x_source, x_target)`` and do
            nothing with sources but map each row, so that they may be given S x. Others may draw random numbers for rows, or take
            statistics of them, and copies of a row would count.
        several_hops: whether rows travel along edges several times in a call; None if that is not known.
        of_all_types: whether it is called on all types of nodes and edges at once; `refused` is then for graphs of one type.
        refused: why it is not exact on a part of a graph, and what to use; empty where it is exact.
    """

    adapter: Adapter | None = None
    sends_rows: bool = False
    weight: str | None = None
    forward: Callable[..., Any] | None = None
    fits: Callable[[Any], bool] = reorder.is_linear
    maps: Callable[[Any], list[Any] | None] = lambda conv: None
    kernels: tuple[str, ...] = ("sums",)
    halo_columns: Callable[[Any], int | None] | None = None
    several_hops: bool | None = False
    of_all_types: bool = False
    refused: str = ""


# Each of the first three normalises by degrees through `gcn_norm`, which would need those of halo rows.
_NORMALISED = ConvRule(adapters.gcn)
_WEIGHTED = ConvRule(adapters.gcn, sends_rows=True, weight="edge_weight")
_HOPS = replace(_WEIGHTED, several_hops=True)
_ROWS = ConvRule(sends_rows=True, halo_columns=lambda conv: conv.out_channels)
_ATTENTION = ConvRule(fits=attention.sums, kernels=("attention",), halo_columns=lambda conv: conv.heads * conv.out_channels)

# Exact as they are: their forward hands `edge_index` to `propagate` untouched, with self-loops added by
# `add_self_loops(num_nodes=rows of x)`, which are those of the owned rows, or looks at in-degrees, which are all here.
_AS_THEY_ARE = """AGNNConv CGConv ClusterGCNConv EdgeConv FeaStConv FiLMConv GENConv GINEConv GMMConv GeneralConv HEATConv
LEConv MFConv NNConv PPFConv PointGNNConv PointNetConv PointTransformerConv RGATConv FastRGCNConv ResGatedGraphConv
SignedConv WLConvContinuous"""

_REFUSED = {
    **{f"CuGraph{name}": f"it needs cuGraph's own graph; use {name}" for name in ("GATConv", "RGCNConv", "SAGEConv")},
    "DynamicEdgeConv": "it finds neighbours among all nodes; build the edges beforehand, or see docs/recipes.md, 'All pairs'",
    "FusedGATConv": "it needs its own graph format; use GATConv",
    "GravNetConv": "it finds neighbours among all nodes; build the edges beforehand and use GraphConv",
    "HypergraphConv": "its second step runs against the direction of the edges",
    "MeshCNNConv": "it works on the edges of a mesh, not on nodes",
    "PANConv": "it multiplies the whole graph's adjacency with itself",
    "SparseLinear": "it has a row of weights for each node of the whole graph; docs/recipes.md, 'LINKX', picks those of a rank",
    "SplineConv": "its kernel is in compiled extras; use GMMConv",
    "WLConv": "it hashes colours in an order that all nodes share",
    "XConv": "it finds neighbours among all nodes",
}
_TYPES = "it takes several node types, which a HeteroData has; use"

CONVS: dict[str | type, ConvRule] = {
    "MessagePassing": ConvRule(sends_rows=True, several_hops=None),  # convs of users
    **dict.fromkeys(_AS_THEY_ARE.split(), ConvRule()),
    **{name: ConvRule(refused=reason) for name, reason in _REFUSED.items()},
    "APPNP": _HOPS,
    "ARMAConv": replace(_NORMALISED, several_hops=True),
    "ChebConv": ConvRule(adapters.cheb, sends_rows=True, weight="norm", several_hops=True),
    CommNetConv: ConvRule(adapters.commnet, sends_rows=True, forward=reorder.commnet, maps=lambda conv: [conv.lin_heard]),
    "DNAConv": _NORMALISED,
    "EGConv": _NORMALISED,
    "FAConv": _NORMALISED,
    "GATConv": replace(_ATTENTION, forward=attention.gat),
    "GATv2Conv": replace(_ATTENTION, forward=attention.gatv2),
    "GCN2Conv": _WEIGHTED,
    "GCNConv": replace(_WEIGHTED, forward=reorder.gcn, maps=lambda conv: [conv.lin]),
    "GINConv": replace(_ROWS, forward=reorder.gin, maps=reorder.first_of_nn, halo_columns=lambda conv: None),
    "GatedGraphConv": ConvRule(several_hops=True),
    "GraphConv": replace(_ROWS, weight="edge_weight", forward=reorder.graph_conv, maps=lambda conv: [conv.lin_rel]),
    "HANConv": ConvRule(of_all_types=True, refused=f"{_TYPES} convs for one"),
    "HGTConv": ConvRule(of_all_types=True, refused=f"{_TYPES} TransformerConv on a graph with one"),
    "LGConv": _WEIGHTED,
    "LabelPropagation": replace(_HOPS, adapter=adapters.label_propagation),
    "MixHopConv": _HOPS,
    "PDNConv": _NORMALISED,
    "PNAConv": ConvRule(
        forward=aggregations.pna, fits=aggregations.has_sums, maps=aggregations.maps_of, kernels=("sums", "statistics")
    ),
    "RGCNConv": ConvRule(adapters.rgcn),
    "SAGEConv": replace(_ROWS, forward=reorder.sage, maps=lambda conv: [conv.lin_l]),
    "SGConv": replace(_HOPS, forward=reorder.sg, maps=lambda conv: [conv.lin]),
    "SSGConv": _HOPS,
    "SimpleConv": ConvRule(sends_rows=True, weight="edge_weight"),
    "SuperGATConv": ConvRule(adapters.supergat),
    "TAGConv": replace(_HOPS, forward=reorder.tag, maps=lambda conv: list(conv.lins)),
    "TransformerConv": replace(
        _ATTENTION, forward=attention.transformer, halo_columns=lambda conv: 2 * conv.heads * conv.out_channels
    ),
}
"""By class; PyG's by name, since its versions differ in which they have. Read it through :func:`rule_of`."""


def _key(kind: type) -> str | type:
    return kind.__name__ if kind.__module__.startswith("torch_geometric.") else kind


def known_kind(kind: type) -> Any:
    """Returns the nearest class, of a class and its bases, in :data:`CONVS`; None if there is none. Convs have MessagePassing."""
    return next((each for each in kind.__mro__ if _key(each) in CONVS), None)


def rule_of(kind: type, *methods: str) -> ConvRule:
    """Returns the rule of :func:`known_kind`; the empty one if there is none, or the class has `methods` of its own."""
    known = known_kind(kind)
    same = known is not None and all(getattr(kind, name) is getattr(known, name) for name in methods)
    return CONVS[_key(known)] if same else ConvRule()


def add_to_rule(kind: type, **facts: Any) -> None:
    """Has the table know more of a class, which is told by the fields of :class:`ConvRule`."""
    CONVS[_key(kind)] = replace(rule_of(kind), **facts)


def exact_convs() -> list[str]:
    """Returns the names of the convs in the table that are exact on a graph without types."""
    rules = {kind if isinstance(kind, str) else kind.__name__: rule for kind, rule in CONVS.items()}
    return sorted(name for name, rule in rules.items() if not rule.refused and name != "MessagePassing")


# What holds of the class's own forward, and not of one that an adapter has changed.
_OF_OTHER_FORWARDS: dict[str, Any] = {"forward": None, "halo_columns": None, "refused": ""}


def register_adapter(kind: type[MessagePassing]) -> Callable[[Adapter], Adapter]:
    """Decorates the adapter of a conv class, for a conv whose own code looks at more than its node's edges.

    While a conv of that class, or a subclass without an adapter of its own, is bound, it has the methods that the adapter
    returns. It takes precedence over what this package knows of the class. ``propagate`` and ``edge_updater`` are wrapped
    in any case; a conv that only calls them needs no adapter. docs/models.md has an example.

    Args:
        kind: the conv class.

    The adapter is called with the conv, its rank's :class:`~lightning_gnn.nn.context.GraphContext`, and the layer's name.

    Raises:
        TypeError: `kind` does not derive from MessagePassing.
    """
    if not (isinstance(kind, type) and issubclass(kind, MessagePassing)):
        raise TypeError(f"register_adapter takes a class that derives from MessagePassing (got {kind!r}).")

    def register(adapter: Adapter) -> Adapter:
        rows, several_hops = rule_of(kind, "message").sends_rows, bool(rule_of(kind).several_hops)
        add_to_rule(kind, adapter=adapter, sends_rows=rows, several_hops=several_hops, **_OF_OTHER_FORWARDS)
        return adapter

    return register


def kernel_groups(module: torch.nn.Module) -> set[str]:
    """Returns which loops a model's convs may run, as groups of :func:`lightning_gnn.kernels.warm_up.warm_up`."""
    groups = set[str]()
    for conv in module.modules():
        if isinstance(conv, MessagePassing):
            groups.update(rule_of(type(conv)).kernels)
            if rule_of(type(conv), "message").sends_rows and not reorder.is_linear(conv):
                groups.add("statistics")
    return groups


def fused(conv: MessagePassing, context: GraphContext, layer: str, own: Callable[..., Any]) -> dict[str, Any]:
    """Returns the forward at less cost, as an adapter does; nothing for a conv of another form.

    Args:
        conv: to be bound.
        context: its rank's graph.
        layer: its name.
        own: its forward otherwise, a function of the conv. It is what runs in calls that hooks watch, or whose linear maps are
            more than their weights: those may change at any time, as pruning does.
    """
    rule = rule_of(type(conv), "forward", "message", "edge_update")
    if rule.forward is None or not rule.fits(conv):
        return {}
    forward = partial(rule.forward, context, layer)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        maps = rule.maps(self)
        may_read = maps is None or (maps != [] and all(map(pyg.is_plain_map, maps)))
        return (forward if pyg.is_plain(self) and may_read else own)(self, *args, **kwargs)

    return {"forward": types.MethodType(run, conv)}
