"""Several aggregations of the same rows in one pass over the edges, and PNA based on them.

Source of PNA: Corso et al., "Principal Neighbourhood Aggregation for Graph Nets" (2020), as in PyG's PNAConv.

N local nodes, H halo nodes, F features, T towers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn import private_pyg as pyg
from lightning_gnn.kernels.run import has_loops_for
from lightning_gnn.nn.context import GraphContext

# Statistics of the one pass from which other `pyg.reductions` are computed.
_NEEDS = {"mean": ("sum",), "var": ("sum", "squares"), "std": ("sum", "squares")}


def aggregations(
    context: GraphContext, x: Tensor, edge_index: Tensor, reductions: Sequence[str], layer: str
) -> list[Tensor] | None:
    """Returns aggregations of S x over each local node's edges, ``[N, F]`` each; None for edges that change between steps.

    Args:
        context: graph context of the rank.
        x: local rows, ``[N, F]``.
        edge_index: edges, ``[2, E]``.
        reductions: names from :func:`pyg.reductions`.
        layer: name for errors and traffic.
    """
    wanted = sorted({need for name in reductions for need in _NEEDS.get(name, (name,))})
    statistics = context.statistics(x, edge_index, wanted, layer)
    edges = context.split_edges(edge_index)
    if statistics is None or edges is None:
        return None
    found, inverse_degree = dict(zip(wanted, statistics)), edges.inverse_degree

    def divide_by_degree(name: str) -> Tensor:
        return found[name] * inverse_degree.to(found[name].dtype).unsqueeze(1)

    def compute(name: str) -> Tensor:  # as in PyG's aggregations
        if name == "mean":
            return divide_by_degree("sum")
        if name not in ("var", "std"):
            return found[name]
        variance = divide_by_degree("squares") - divide_by_degree("sum").square()
        if name == "var":
            return variance
        root = variance.clamp(min=1e-5).sqrt()
        return root.masked_fill(root <= math.sqrt(1e-5), 0.0)

    return [compute(name) for name in reductions]


# PNA ##########################################################################


def has_sums(conv: Any) -> bool:
    """Returns whether a PNAConv has one layer before the aggregation, as :func:`pna` requires."""
    return pyg.reductions(conv.aggr_module.aggr) is not None and all(len(net) == 1 for net in conv.pre_nns)


def pna(context: GraphContext, layer: str, self: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
    """Returns the output of a PNAConv whose messages are A x_i + B x_j + b.

    The aggregation runs over B x_j only; the other terms shift its result.
    """
    context.check_edges(edge_index, layer)
    edges = context.split_edges(edge_index)
    columns = self.towers * self.F_in
    if edge_attr is not None or edges is None or not has_loops_for(x, edge_index, columns):
        return type(self).forward(self, x, edge_index, edge_attr)
    context.check_rows(x.size(0), layer)
    rows = x.view(-1, self.towers, self.F_in) if self.divide_input else x.unsqueeze(1).expand(-1, self.towers, -1)
    own, sent = [], []
    for tower, net in enumerate(self.pre_nns):
        at_target, at_source = net[0].weight.split(self.F_in, 1)
        own.append(F.linear(rows[:, tower], at_target, net[0].bias))
        sent.append(F.linear(rows[:, tower], at_source))
    shift = torch.stack(own, 1)
    reductions = pyg.reductions(self.aggr_module.aggr)
    assert reductions is not None
    parts = aggregations(context, torch.cat(sent, 1), edge_index, reductions, layer)
    assert parts is not None
    degree = edges.in_degree.to(x.dtype).view(-1, 1, 1)
    has_edges = degree.clamp(max=1)
    shifts = {"sum": degree * shift, "var": None, "std": None}
    taken = []
    for name, part in zip(reductions, parts):
        by = shifts.get(name, has_edges * shift)
        part = part.view(shift.shape)
        taken.append(part if by is None else part + by)
    combined = torch.cat(taken, -1)
    out = torch.cat([rows, *(combined * scale for scale in _scales(self.aggr_module, degree))], -1)
    return self.lin(torch.cat([net(out[:, tower]) for tower, net in enumerate(self.post_nns)], 1))


def _scales(scaler: Any, degree: Tensor) -> list[Tensor | float]:
    """Returns the factors of PyG's DegreeScalerAggregation, in its order."""
    ways: dict[str, Callable[[], Tensor | float]] = {
        "identity": lambda: 1.0,
        "amplification": lambda: torch.log(degree + 1) / scaler.avg_deg_log,
        "attenuation": lambda: scaler.avg_deg_log / torch.log(degree.clamp(min=1) + 1),
        "linear": lambda: degree / scaler.avg_deg_lin,
        "inverse_linear": lambda: scaler.avg_deg_lin / degree.clamp(min=1),
    }
    return [ways[name]() for name in scaler.scaler]


def maps_of(conv: Any) -> list[Any]:
    """Returns the layers before the aggregation whose weights :func:`pna` reads; none for layers with hooks."""
    return [part for net in conv.pre_nns if not pyg.is_watched(net) for part in net]
