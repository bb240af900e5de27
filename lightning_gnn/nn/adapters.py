"""Which convs are exact, and the few that need help because they look at the graph's structure themselves."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn as pyg_nn
from torch_geometric.nn import MessagePassing

from lightning_gnn.nn.commnet import CommNetConv
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.rank_graph import UnsupportedModelError

Adapter = Callable[[MessagePassing, GraphContext, str], dict[str, Any]]
"""Returns the methods to put on a conv while it is bound, by name; gets the conv, its rank's graph and its layer's name."""


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
        ADAPTERS[kind] = adapter
        return adapter

    return register


def substitute(method: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Returns a bound method with some global names of its function replaced, for this instance only.

    ``substitute(conv.forward, degree=mine)`` is ``conv.forward`` in which ``degree`` means ``mine``.

    Raises:
        UnsupportedModelError: a method of a subclass, which uses none of the names and calls ``super()``, whose function is out
            of reach.
    """
    function = method.__func__  # type: ignore[attr-defined]
    code, known = function.__code__, {**function.__globals__, **names}
    if "super" in code.co_names and not set(names) & set(code.co_names):
        raise UnsupportedModelError(
            f"{function.__qualname__} calls super().{function.__name__}(), which needs another {', '.join(names)} on a part of a "
            "graph and cannot be given it. Do not derive from that class: have a conv of it as a part, and call that."
        )
    replaced = types.FunctionType(code, known, function.__name__, function.__defaults__, function.__closure__)
    replaced.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(replaced, method.__self__)  # type: ignore[attr-defined]


@contextmanager
def overridden(module: torch.nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """While open, one instance has another method."""
    object.__setattr__(module, name, method)
    try:
        yield
    finally:
        module.__dict__.pop(name)


def _gcn(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def gcn_norm(
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert num_nodes is not None and dtype is not None
        return context.gcn_norm(layer, edge_index, edge_weight, num_nodes, improved, add_self_loops, dtype)

    return {"forward": substitute(conv.forward, gcn_norm=gcn_norm)}


def _commnet(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    return {"forward": substitute(conv.forward, without_self_loops=context.without_self_loops)}


def _cheb(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def norm(
        self: MessagePassing,
        edge_index: Tensor,
        num_nodes: int,
        edge_weight: Tensor | None,
        normalization: str | None,
        lambda_max: float | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        batch: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The Laplacian scaled to eigenvalues from -1 to 1, as ``ChebConv.__norm__``."""
        context.check_rows(num_nodes, layer)
        if batch is not None:
            raise UnsupportedModelError(f"'{layer}' was given a batch vector; a graph over ranks is one graph.")

        def compute() -> tuple[Tensor, Tensor]:
            edges, weight = context.laplacian(layer, edge_index, edge_weight, normalization, dtype)
            largest = lambda_max
            if largest is None:
                own = weight.max() if weight.numel() else weight.new_tensor(float("-inf"))
                largest = 2.0 * context.exchange.max_over_ranks(own, f"Largest entry of the Laplacian of '{layer}'")
            weight = 2.0 * weight / largest
            weight = weight.masked_fill(weight == float("inf"), 0.0)
            return edges, torch.where(edges[0] == edges[1], weight - 1, weight)

        if isinstance(lambda_max, Tensor):
            return compute()
        return context.once(("Laplacian", normalization, lambda_max, dtype), edge_index, edge_weight, compute)

    return {"__norm__": types.MethodType(norm, conv)}


def _supergat(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def no_pairs(self: MessagePassing, edge_index: Tensor, *_: Any) -> Tensor:
        return edge_index[:, :0]

    def attention_loss(self: MessagePassing) -> Tensor:
        raise UnsupportedModelError(
            f"'{layer}' cannot take its attention loss over ranks, for which it samples pairs among all nodes. Leave "
            "get_attention_loss() out; docs/recipes.md, 'Pairs of nodes', has losses of pairs."
        )

    return {
        "positive_sampling": types.MethodType(no_pairs, conv),
        "negative_sampling": types.MethodType(no_pairs, conv),
        "get_attention_loss": types.MethodType(attention_loss, conv),
    }


def _label_propagation(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def one_hot(y: Tensor) -> Tensor:
        own = y.max() if len(y) else y.new_tensor(0)
        classes = int(context.exchange.max_over_ranks(own, f"Classes of '{layer}'")) + 1
        return torch.nn.functional.one_hot(y, classes).to(torch.get_default_dtype())

    def gcn_norm(edge_index: Tensor, num_nodes: int, add_self_loops: bool) -> tuple[Tensor, Tensor]:
        # Whatever the rows', as in PyG: scales would be rounded otherwise than weights.
        dtype = torch.get_default_dtype()
        return context.gcn_norm(layer, edge_index, None, num_nodes, False, add_self_loops, dtype, as_scales=False)

    method = types.MethodType(conv.forward.__wrapped__, conv)  # inside torch.no_grad()
    forward = substitute(method, gcn_norm=gcn_norm, one_hot=one_hot)
    return {"forward": types.MethodType(torch.no_grad()(forward.__func__), conv)}  # type: ignore[attr-defined]


def _rgcn(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    run = conv.forward.__func__

    def forward(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        with context.read_once():  # else the same rows would travel once per relation
            return run(self, *args, **kwargs)

    return {"forward": types.MethodType(forward, conv)}


# Convs that normalise by degrees through `gcn_norm`, which would need those of halo rows.
_NORMALISED = "APPNP ARMAConv DNAConv EGConv FAConv GCN2Conv GCNConv LGConv MixHopConv PDNConv SGConv SSGConv TAGConv"

# Convs that are exact as they are: their forward hands `edge_index` to `propagate` untouched, with self-loops added by
# `add_self_loops(num_nodes=rows of x)`, which are those of the owned rows, or looks at in-degrees, which are all here.
_AS_THEY_ARE = """AGNNConv CGConv ClusterGCNConv EdgeConv FeaStConv FiLMConv GATConv GATv2Conv GENConv GINConv GINEConv GMMConv
GatedGraphConv GeneralConv GraphConv HEATConv LEConv MFConv NNConv PNAConv PPFConv PointGNNConv PointNetConv
PointTransformerConv RGATConv FastRGCNConv ResGatedGraphConv SAGEConv SignedConv SimpleConv TransformerConv
WLConvContinuous"""

ADAPTERS: dict[type[MessagePassing], Adapter | None] = {
    CommNetConv: _commnet,
    pyg_nn.ChebConv: _cheb,
    pyg_nn.LabelPropagation: _label_propagation,
    pyg_nn.RGCNConv: _rgcn,
    pyg_nn.SuperGATConv: _supergat,
    **{getattr(pyg_nn, name): _gcn for name in _NORMALISED.split()},
    **{getattr(pyg_nn, name): None for name in _AS_THEY_ARE.split()},
}
"""By conv class, its adapter; None for convs that need none. Subclasses are taken like the nearest class in here."""

REFUSED: dict[str, str] = {
    **{f"CuGraph{name}": f"it needs cuGraph's own graph; use {name}" for name in ("GATConv", "RGCNConv", "SAGEConv")},
    "DynamicEdgeConv": "it finds neighbours among all nodes; build the edges beforehand, or see docs/recipes.md, 'All pairs'",
    "FusedGATConv": "it needs its own graph format; use GATConv",
    "GravNetConv": "it finds neighbours among all nodes; build the edges beforehand and use GraphConv",
    "HANConv": "it takes several node types, which a HeteroData has; use convs for one",
    "HGTConv": "it takes several node types, which a HeteroData has; use TransformerConv on a graph with one",
    "HypergraphConv": "its second step runs against the direction of the edges",
    "MeshCNNConv": "it works on the edges of a mesh, not on nodes",
    "PANConv": "it multiplies the whole graph's adjacency with itself",
    "SplineConv": "its kernel is in compiled extras; use GMMConv",
    "WLConv": "it hashes colours in an order that all nodes share",
    "SparseLinear": "it has a row of weights for each node of the whole graph; docs/recipes.md, 'LINKX', picks those of a rank",
    "XConv": "it finds neighbours among all nodes",
}
"""Names of PyG's convs that are not exact on a part of a graph, with the reason and what to use."""

# Convs whose messages are a source row times `edge_weight`.
_WEIGHTED = "APPNP GCN2Conv GCNConv GraphConv LGConv MixHopConv SGConv SSGConv SimpleConv TAGConv"

# Convs whose messages are a source row, or a source row times an edge weight: these aggregate by SpMM.
# The value names the weight among the arguments of `propagate`.
LINEAR_MESSAGES: dict[Callable[..., Tensor], str | None] = {
    MessagePassing.message: None,
    CommNetConv.message: None,
    pyg_nn.ChebConv.message: "norm",
    pyg_nn.GINConv.message: None,
    pyg_nn.LabelPropagation.message: "edge_weight",
    pyg_nn.SAGEConv.message: None,
    **{getattr(pyg_nn, name).message: "edge_weight" for name in _WEIGHTED.split()},
}
