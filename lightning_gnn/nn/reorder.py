"""(A x) W or A (x W): linear convs aggregate on the side with fewer columns.

The aggregation of constant input is cached (:meth:`GraphContext.total`), so there the map comes last. A first layer then costs
neither communication nor SpMM after its first call. Both sides are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn as pyg_nn

from lightning_gnn import private_pyg as pyg
from lightning_gnn.nn.adapters import overridden
from lightning_gnn.nn.context import GraphContext

Aggregate = Callable[[Tensor], Tensor]


def _map_first(context: GraphContext, x: Tensor, lin: Any) -> bool:
    kept = not x.requires_grad and context.cache.widths > 0 and context.cache.is_constant(x)
    return not kept and not context.exchange.one_way and lin.weight.size(0) < x.size(-1)


def _sides(context: GraphContext, x: Tensor, lin: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns the rows to aggregate and the map of their aggregate, for ``lin(aggregate(x))``."""
    if not _map_first(context, x, lin):
        return x, lin
    return F.linear(x, lin.weight), partial(_plus, lin.bias)


def _plus(bias: Tensor | None, out: Tensor) -> Tensor:
    return out if bias is None else out + bias


def gcn(context: GraphContext, layer: str, self: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    hop = _hop(self, context, layer, x, edge_index, edge_weight)
    rows, mapped = _sides(context, x, self.lin)
    out: Tensor = mapped(hop(rows))
    return out if self.bias is None else out + self.bias


def _hop(conv: Any, context: GraphContext, layer: str, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> Aggregate:
    """Returns a function for one propagation of rows over edges, normalized by the settings of the conv."""
    context.check_edges(edge_index, layer, edge_weight)
    if getattr(conv, "normalize", True):
        improved, loops = getattr(conv, "improved", False), getattr(conv, "add_self_loops", False)
        edge_sum = context.gcn_sum(layer, edge_index, edge_weight, improved, loops, x.dtype)
        if edge_sum is not None and type(conv.aggr_module) is pyg_nn.SumAggregation:
            context.check_rows(x.size(-2), layer)
            return partial(context.total, edge_sum=edge_sum, layer=layer)
        edge_index, edge_weight = context.gcn_norm(layer, edge_index, edge_weight, x.size(-2), improved, loops, x.dtype)
    return lambda rows: conv.propagate(edge_index, x=rows, edge_weight=edge_weight)


def sage(context: GraphContext, layer: str, self: Any, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
    source, target = (x, x) if isinstance(x, Tensor) else x
    if self.project:
        source = self.lin(source).relu()
    rows, mapped = _sides(context, source, self.lin_l)
    out = mapped(self.propagate(edge_index, x=(rows, target), size=size))
    if self.root_weight and target is not None:
        out = out + self.lin_r(target)
    return F.normalize(out, p=2.0, dim=-1) if self.normalize else out


def graph_conv(
    context: GraphContext, layer: str, self: Any, x: Any, edge_index: Tensor, edge_weight: Tensor | None = None, size: Any = None
) -> Tensor:
    source, target = (x, x) if isinstance(x, Tensor) else x
    rows, mapped = _sides(context, source, self.lin_rel)
    out = mapped(self.propagate(edge_index, x=(rows, target), edge_weight=edge_weight, size=size))
    return out if target is None else out + self.lin_root(target)


def sg(context: GraphContext, layer: str, self: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    hop = _hop(self, context, layer, x, edge_index, edge_weight)
    rows, mapped = _sides(context, x, self.lin)
    for _ in range(self.K):
        rows = hop(rows)
    return mapped(rows)


def tag(context: GraphContext, layer: str, self: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    hop = _hop(self, context, layer, x, edge_index, edge_weight)
    first, *others = self.lins
    if _map_first(context, x, first):
        # x W_0 + A (x W_1 + A (x W_2 + ...))
        out = self.lins[-1](x)
        for lin in [*self.lins][-2::-1]:
            out = lin(x) + hop(out)
    else:
        out, rows = first(x), x
        for lin in others:
            rows = hop(rows)
            out = out + lin(rows)
    return _plus(self.bias, out)


def gin(context: GraphContext, layer: str, self: Any, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
    source, target = (x, x) if isinstance(x, Tensor) else x
    [lin] = first_of_nn(self)
    if target is None or not _map_first(context, source, lin):
        return type(self).forward(self, x, edge_index, size)
    rows = F.linear(source, lin.weight)
    own = rows if target is source else F.linear(target, lin.weight)
    out = self.propagate(edge_index, x=(rows, own), size=size) + (1 + self.eps) * own
    with overridden(lin, "forward", partial(_plus, lin.bias)):  # already mapped
        return self.nn(out)


def first_of_nn(conv: Any) -> list[Any]:
    """Returns the first linear map of a GINConv's network; empty if it is unknown or used several times."""
    first = conv.nn
    while type(first) is torch.nn.Sequential and len(first) and not pyg.is_watched(first):
        first = first[0]
    if type(first) is pyg_nn.MLP and not pyg.is_watched(first):
        first = first.lins[0]
    uses = sum(part is first for _, part in conv.nn.named_modules(remove_duplicate=False))
    return [first] if isinstance(first, (torch.nn.Linear, pyg_nn.Linear)) and uses == 1 else []


def commnet(context: GraphContext, layer: str, self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    edges = context.without_self_loops(edge_index)
    rows, mapped = _sides(context, x, self.lin_heard)
    heard = mapped(self.propagate(edges, x=rows))
    return self.lin_self(x) + heard


def is_linear(conv: Any) -> bool:
    """Returns whether a conv sums or averages its messages, so that a linear map may come before or after."""
    return pyg.linear_aggregation(conv) is not None
