"""Which convs are exact, and the few that need help because they look at the graph's structure themselves."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)

from lightning_gnn.nn.commnet import CommNetConv, without_self_loops
from lightning_gnn.nn.context import GraphContext

Adapter = Callable[[MessagePassing, GraphContext, str], dict[str, Any]]
"""Returns the methods to put on a conv while it is bound, by name; gets the conv, its rank's graph and its layer's name."""


def substitute(method: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Returns a bound method with some global names of its function replaced, for this instance only."""
    function = method.__func__  # type: ignore[attr-defined]
    replaced = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    replaced.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(replaced, method.__self__)  # type: ignore[attr-defined]


def _gcn(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def gcn_norm(
        edge_index: Tensor,
        edge_weight: Tensor | None,
        num_nodes: int,
        improved: bool,
        add_self_loops: bool,
        flow: str,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        return context.gcn_norm(layer, edge_index, edge_weight, num_nodes, improved, add_self_loops, dtype)

    return {"forward": substitute(conv.forward, gcn_norm=gcn_norm)}


def _commnet(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def without_loops(edge_index: Tensor) -> Tensor:
        return context.once(("no self-loops",), edge_index, None, lambda: (without_self_loops(edge_index),))[0]

    return {"forward": substitute(conv.forward, without_self_loops=without_loops)}


# None: exact as it is, since its forward hands `edge_index` to `propagate` untouched, or with self-loops added by
# `add_self_loops(num_nodes=rows of x)`, which are those of the owned rows.
ADAPTERS: dict[type[MessagePassing], Adapter | None] = {
    CommNetConv: _commnet,
    GATConv: None,
    GATv2Conv: None,
    GCNConv: _gcn,
    GINConv: None,
    GraphConv: None,
    SAGEConv: None,
    TransformerConv: None,
}

# Convs whose messages are a source row, or a source row times an edge weight: these aggregate by SpMM.
# The value names the weight among the arguments of `propagate`.
LINEAR_MESSAGES: dict[Callable[..., Tensor], str | None] = {
    MessagePassing.message: None,
    CommNetConv.message: None,
    GCNConv.message: "edge_weight",
    GINConv.message: None,
    GraphConv.message: "edge_weight",
    SAGEConv.message: None,
}
