"""GAT, GATv2 and the graph transformer without a row per edge: kernels for scores, softmax and weighted sums.

Results equal PyG's forward up to rounding, which stores several tensors of edges x heads x channels. PyG's own forward runs off
the CPU, and with edge features in the messages (GATv2Conv and TransformerConv with ``edge_dim``).

N local nodes, H halo nodes, E edges, K heads of C channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import add_self_loops, remove_self_loops

from lightning_gnn.kernels.attention import additive_scores, pair_products, pair_sums, weighted_sums
from lightning_gnn.kernels.run import has_loops_for
from lightning_gnn.nn.context import AttentionEdges, GraphContext
from lightning_gnn.nn.edges import mean_by


def sums(conv: Any) -> bool:
    """Returns whether a conv sums its messages, as the forwards here do."""
    return type(conv.aggr_module) is SumAggregation


def gat(
    context: GraphContext,
    layer: str,
    self: Any,
    x: Any,
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    size: Any = None,
    return_attention_weights: bool | None = None,
) -> Any:
    source, target = (x, x) if isinstance(x, Tensor) else x
    if target is None or not _by_kernels(self, context, layer, source, edge_index):
        return type(self).forward(self, x, edge_index, edge_attr, size, return_attention_weights)
    heads, columns = self.heads, self.out_channels
    of_source, of_target = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
    own = of_source(source)
    own_target = own if target is source and self.lin is not None else of_target(target)
    if self.add_self_loops:
        if edge_attr is not None:
            without, edge_attr = remove_self_loops(edge_index, edge_attr)
            if self.fill_value == "mean":
                edge_attr = torch.cat([edge_attr, mean_by(without[1], edge_attr, context.num_targets)])
            else:
                _, edge_attr = add_self_loops(without, edge_attr, self.fill_value, context.num_targets)
        edge_index = context.with_self_loops(edge_index)
    in_list = edge_attr is not None or bool(return_attention_weights)
    at_target = _per_head(own_target, self.att_dst)
    edges = context.attend(edge_index, layer, in_list, [own.view(-1, heads, columns)], at_target)
    csr, [rows] = edges.csr, edges.sources
    scores = pair_sums(csr, _per_head(rows.view(-1, heads * columns), self.att_src), edges.targets)
    if edge_attr is not None and self.lin_edge is not None:
        mapped = self.lin_edge(edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr)
        scores = scores + csr.permute(_per_head(mapped, self.att_edge))
    scores = F.leaky_relu(scores, self.negative_slope)
    return _compute_output(self, edges, rows, scores, target, edge_index, return_attention_weights)


def gatv2(
    context: GraphContext,
    layer: str,
    self: Any,
    x: Any,
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    return_attention_weights: bool | None = None,
) -> Any:
    source, target = (x, x) if isinstance(x, Tensor) else x
    if edge_attr is not None or target is None or not _by_kernels(self, context, layer, source, edge_index):
        return type(self).forward(self, x, edge_index, edge_attr, return_attention_weights)
    shape = (-1, self.heads, self.out_channels)
    own = self.lin_l(source).view(shape)
    own_target = own if self.share_weights and target is source else self.lin_r(target).view(shape)
    if self.add_self_loops:
        edge_index = context.with_self_loops(edge_index)
    edges = context.attend(edge_index, layer, bool(return_attention_weights), [own], own_target)
    [rows] = edges.sources
    scores = additive_scores(edges.csr, rows, edges.targets, self.att.view(shape[1:]), self.negative_slope)
    return _compute_output(self, edges, rows, scores, target, edge_index, return_attention_weights)


def transformer(
    context: GraphContext,
    layer: str,
    self: Any,
    x: Any,
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    return_attention_weights: bool | None = None,
) -> Any:
    source, target = (x, x) if isinstance(x, Tensor) else x
    plain = edge_attr is None and self.lin_edge is None
    if not plain or not _by_kernels(self, context, layer, source, edge_index):
        return type(self).forward(self, x, edge_index, edge_attr, return_attention_weights)
    shape = (-1, self.heads, self.out_channels)
    query, *own = (of_rows.view(shape) for of_rows in (self.lin_query(target), self.lin_key(source), self.lin_value(source)))
    edges = context.attend(edge_index, layer, isinstance(return_attention_weights, bool), own, query)
    csr, [keys, values] = edges.csr, edges.sources
    products = pair_products(csr, keys, edges.targets)
    shares = edges.softmax(products / math.sqrt(self.out_channels))
    kept = F.dropout(shares, p=self.dropout, training=self.training)
    out = edges.reduce(weighted_sums(csr, values, kept))
    out = out.flatten(1) if self.concat else out.mean(dim=1)
    if self.root_weight:
        skipped = self.lin_skip(target)
        if self.lin_beta is None:
            out = out + skipped
        else:
            beta = self.lin_beta(torch.cat([out, skipped, out - skipped], dim=-1)).sigmoid()
            out = beta * skipped + (1 - beta) * out
    if isinstance(return_attention_weights, bool):
        return out, (edge_index, csr.unpermute(shares))
    return out


def _by_kernels(conv: Any, context: GraphContext, layer: str, source: Tensor, edge_index: Any) -> bool:
    context.check_edges(edge_index, layer)
    context.check_rows(source.size(0), layer)
    return source.dim() == 2 and has_loops_for(source, edge_index, conv.heads * conv.out_channels)


def _per_head(rows: Tensor, attention: Tensor) -> Tensor:
    """Returns ``<rows[n, h], attention[h]>``, ``[N, K]``, of rows ``[N, K * C]`` and ``[1, K, C]``, as one matrix product."""
    _, heads, columns = attention.shape
    spread = torch.eye(heads, dtype=attention.dtype, device=attention.device).unsqueeze(2) * attention
    return F.linear(rows, spread.view(heads, heads * columns))


def _compute_output(
    conv: Any,
    edges: AttentionEdges,
    rows: Tensor,
    scores: Tensor,
    target: Tensor,
    edge_index: Tensor,
    return_attention_weights: Any,
) -> Any:
    """Returns the output of a GAT or GATv2 from its scores."""
    shares = F.dropout(edges.softmax(scores), p=conv.dropout, training=conv.training)
    out = edges.reduce(weighted_sums(edges.csr, rows, shares))
    out = out.flatten(1) if conv.concat else out.mean(dim=1)
    if getattr(conv, "res", None) is not None:
        out = out + conv.res(target)
    if conv.bias is not None:
        out = out + conv.bias
    return (out, (edge_index, edges.csr.unpermute(shares))) if return_attention_weights else out
