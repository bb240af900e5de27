"""PyG's aggregation modules outside convs: over all nodes of all ranks where they read out the whole graph.

Sum, mean, maximum and minimum of rows that lie on several ranks are exact; others look at all rows at once and are refused
when they are called so. An aggregation over the edges of each node (an ``index`` with several groups) is local as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr

from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.nn.norms import STATE, Statistics


def _sum(take: Statistics, x: Tensor) -> Tensor:
    return take.total(x.sum(-2, keepdim=True))


def _mean(take: Statistics, x: Tensor) -> Tensor:
    count = take.total(x.new_full((1,), x.size(-2))).clamp(min=1)
    return _sum(take, x) / count


def _max(take: Statistics, x: Tensor) -> Tensor:
    """The maximum, whose gradient ties share evenly, as on one device."""
    with torch.no_grad():
        lowest = x.new_full((*x.shape[:-2], 1, x.size(-1)), float("-inf"))
        largest = take.largest(torch.cat([x, lowest], -2).amax(-2, keepdim=True))
        share = (x == largest).to(x.dtype)
        share = share / take.total(share.sum(-2, keepdim=True))
    return take.total((x * share).sum(-2, keepdim=True))


READOUTS: dict[type[aggr.Aggregation], Callable[[Statistics, Tensor], Tensor]] = {
    aggr.SumAggregation: _sum,
    aggr.MeanAggregation: _mean,
    aggr.MaxAggregation: _max,
    aggr.MinAggregation: lambda take, x: -_max(take, -x),
}
"""By class, the readout over ranks."""


def readout(
    self: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    **options: Any,
) -> Tensor:
    """The forward of a bound aggregation module."""
    over_all = ptr is None and (index is None or (dim_size in (None, 1) and not bool(index.any())))
    if not over_all:
        return type(self).forward(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **options)
    if isinstance(self, aggr.MultiAggregation):  # whose own forward fuses what it can, and would not ask its parts
        return self.combine([part(x, index, ptr, dim_size, dim) for part in self.aggrs])
    take: Statistics = self.__dict__[STATE]
    compute = next((READOUTS[kind] for kind in type(self).__mro__ if kind in READOUTS), None)
    if compute is None:
        raise UnsupportedModelError(
            f"'{take.layer}' ({type(self).__name__}) reads out all nodes at once, which are not on one rank. Use SumAggregation, "
            "MeanAggregation, MaxAggregation or MinAggregation."
        )
    return compute(take, take.own(x, dim).movedim(dim, -2)).movedim(-2, dim)
