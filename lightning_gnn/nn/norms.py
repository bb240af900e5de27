"""Norms, readouts and attention over the nodes or edges of all ranks, equal to one device up to rounding.

Every row counts on one rank, so sums over ranks of sums over rows are exact. The backward pass of a sum over ranks is a sum over
ranks, because each rank's output depends on the rows of all ranks. N local nodes, F features.

Aggregation modules outside convs read out the whole graph. Sum, mean, max and min over rows of several ranks are exact. Other
readouts need all rows at once and raise an error when called. An aggregation over the edges of each node (an ``index`` with
several groups) is local.

Linear attention is a sum over all nodes of small matrices, which ranks send; dense attention needs the rows of all nodes.

n local nodes; B graphs, one; H heads with D channels each.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn as pyg_nn
from torch_geometric.nn import CorrectAndSmooth, GPSConv, aggr
from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention
from torch_geometric.nn.attention.performer import PerformerProjection, generalized_kernel
from torch_geometric.utils import one_hot

from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError
from lightning_gnn.private_torch import input_check

Forward = Callable[..., Tensor]


class SumOverRanks(torch.autograd.Function):
    """Sum of equal-shaped tensors of all ranks; its backward pass is the same sum of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, layer: str) -> Tensor:
        ctx.exchange, ctx.layer = exchange, layer
        return exchange.sum_over_ranks(x, f"Statistics of layer '{layer}'")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.sum_over_ranks(grad, f"Gradients of the statistics of layer '{ctx.layer}'"), None, None


STATE = "_lightning_gnn"
"""Name of the attribute with the state of a bound module."""


class Statistics:
    """Differentiable sums over the rows of all ranks; shared, not copied, when the model is copied.

    Args:
        graph: object with the current exchange of layers.
        layer: name of the layer.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Statistics:
        return self

    def __init__(self, graph: Any, layer: str) -> None:
        self._graph, self.layer = graph, layer

    @property
    def num_rows(self) -> int:
        """Number of rows of this rank, including rows that count on another rank."""
        count: int = self._graph.exchange.num_owned
        return count

    def drop_replicas(self, x: Tensor, dim: int = 0) -> Tensor:
        """Returns `x` without rows that count on another rank; `dim` is the dimension of nodes or edges."""
        return x.narrow(dim, 0, self._graph.exchange.own_lengths.get(x.size(dim), x.size(dim)))

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over ranks."""
        return SumOverRanks.apply(x, self._graph.exchange, self.layer)

    def largest(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum of `x` over ranks, not differentiable."""
        return self._graph.exchange.max_over_ranks(x, f"Largest values of layer '{self.layer}'")

    def mean(self, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Returns the mean of `x` over `dims` and all ranks, with kept dims, and the count of each mean, in one all-reduce."""
        x = self.drop_replicas(x)
        part = x.sum(dims, keepdim=True)
        count = x.new_full((1,), x.numel() // max(part.numel(), 1) if x.numel() else 0)
        summed = self.total(torch.cat([part.reshape(-1), count]))
        count = summed[-1].detach()
        return (summed[:-1] / count.clamp(min=1)).view(part.shape), count


def _statistics(norm: Any, batch: Any) -> Statistics:
    """Returns the statistics of a bound norm; raises an error for several graphs."""
    take: Statistics = norm.__dict__[STATE]
    if batch is not None and bool(batch.any()):
        raise UnsupportedModelError(
            f"'{take.layer}' does not support a batch vector with statistics per graph: all ranks share one graph. Remove it."
        )
    return take


def _batch_norm(norm: Any, x: Tensor) -> Tensor:
    take: Statistics = norm.__dict__[STATE]
    if not norm.training and norm.running_mean is not None:
        return type(norm).forward(norm, x)
    input_check(norm)(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = tuple(dim for dim in range(x.dim()) if dim != 1)
    mean, count = take.mean(wide, dims)
    # Ranks with several values need no check, which would wait for a device. A total of one value is at most one on each rank.
    if norm.training and x.numel() <= x.size(1) and count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {int(count)} on all ranks")
    centered = wide - mean
    variance, _ = take.mean(centered.square(), dims)
    if norm.training and norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        factor = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
        unbiased = variance.detach() * (count / (count - 1))
        for running, value in ((norm.running_mean, mean.detach()), (norm.running_var, unbiased)):
            running.lerp_(value.reshape(-1).to(running.dtype), factor)
    out = centered * (variance + norm.eps).rsqrt()
    if norm.affine:
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out.to(x.dtype)


def _instance_norm(norm: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    take = _statistics(norm, batch)
    if not norm.training and norm.track_running_stats:
        return type(norm).forward(norm, x)
    mean, count = take.mean(x, (0,))
    centered = x - mean
    variance, _ = take.mean(centered.square(), (0,))
    if norm.training and norm.running_mean is not None:
        unbiased = variance.detach() * (count / (count - 1))
        for running, value in ((norm.running_mean, mean.detach()), (norm.running_var, unbiased)):
            running.lerp_(value.reshape(-1), norm.momentum)
    out = centered * (variance + norm.eps).rsqrt()
    return out if norm.weight is None else out * norm.weight + norm.bias


def _graph_norm(norm: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    take = _statistics(norm, batch)
    mean, _ = take.mean(x, (0,))
    out = x - mean * norm.mean_scale
    variance, _ = take.mean(out.square(), (0,))
    return norm.weight * out / (variance + norm.eps).sqrt() + norm.bias


def _pair_norm(norm: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    take = _statistics(norm, batch)
    mean, _ = take.mean(x, (0,))
    x = x - mean
    if norm.scale_individually:
        return norm.scale * x / (norm.eps + x.norm(2, -1, keepdim=True))
    square, _ = take.mean(x.square().sum(-1, keepdim=True), (0,))
    return norm.scale * x / (norm.eps + square).sqrt()


def _mean_subtraction(norm: Any, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    take = _statistics(norm, batch)
    return x - take.mean(x, (0,))[0]


def _layer_norm(norm: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    take = _statistics(norm, batch)
    mean, _ = take.mean(x, (0, 1))
    x = x - mean
    variance, _ = take.mean(x.square(), (0, 1))
    out = x / (variance.sqrt() + norm.eps)
    return out if norm.weight is None else out * norm.weight + norm.bias


def _graph_size(norm: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    take = _statistics(norm, batch)
    return x * take.total(x.new_full((1,), len(take.drop_replicas(x)))).rsqrt()


NORMS: dict[type[torch.nn.Module], Forward] = {
    torch.nn.BatchNorm1d: _batch_norm,
    pyg_nn.norm.GraphNorm: _graph_norm,
    pyg_nn.norm.GraphSizeNorm: _graph_size,
    pyg_nn.norm.InstanceNorm: _instance_norm,
    pyg_nn.norm.LayerNorm: _layer_norm,
    pyg_nn.norm.MeanSubtractionNorm: _mean_subtraction,
    pyg_nn.norm.PairNorm: _pair_norm,
}
"""Forward of a bound norm, by class. PyG's BatchNorm and DiffGroupNorm contain a BatchNorm1d and need no entry."""


# Readouts #####################################################################


def _sum(take: Statistics, x: Tensor) -> Tensor:
    return take.total(x.sum(-2, keepdim=True))


def _mean(take: Statistics, x: Tensor) -> Tensor:
    count = take.total(x.new_full((1,), x.size(-2))).clamp(min=1)
    return _sum(take, x) / count


def _max(take: Statistics, x: Tensor) -> Tensor:
    """Returns the maximum; ties share its gradient evenly, as on one device."""
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
"""Readout over ranks, by class."""


def readout(
    self: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    **options: Any,
) -> Tensor:
    """Returns the output of a bound aggregation module."""
    over_all = ptr is None and (index is None or (dim_size in (None, 1) and not bool(index.any())))
    if not over_all:
        return type(self).forward(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **options)
    if isinstance(self, aggr.MultiAggregation):  # its own forward fuses aggregations and would not call its parts
        return self.combine([part(x, index, ptr, dim_size, dim) for part in self.aggrs])
    take: Statistics = self.__dict__[STATE]
    compute = next((READOUTS[kind] for kind in type(self).__mro__ if kind in READOUTS), None)
    if compute is None:
        raise UnsupportedModelError(
            f"'{take.layer}' ({type(self).__name__}) reads all nodes at once, which are on several ranks. Use SumAggregation, "
            "MeanAggregation, MaxAggregation or MinAggregation."
        )
    return compute(take, take.drop_replicas(x, dim).movedim(dim, -2)).movedim(-2, dim)


# Linear attention, dense attention, correct and smooth ###########################


def _local_statistics(self: Any, x: Tensor, dim: int) -> Statistics | None:
    """Returns the sums over ranks if `x` has this rank's nodes along `dim`, of one graph; None for other rows."""
    take: Statistics = self.__dict__[STATE]
    return take if x.size(0) == 1 and x.size(dim) == take.num_rows else None


def _sums(take: Statistics, *parts: Tensor) -> list[Tensor]:
    """Returns the sums of several tensors over ranks, in one all-reduce."""
    summed = take.total(torch.cat([part.reshape(-1) for part in parts]))
    return [each.view(part.shape) for each, part in zip(summed.split([part.numel() for part in parts]), parts)]


def _sgformer(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    take = _local_statistics(self, x, 1)
    if take is None:
        return type(self).forward(self, x, mask)

    def heads(lin: torch.nn.Linear) -> Tensor:
        return lin(x).reshape(*x.shape[:2], self.heads, self.head_channels)  # [1, n, H, D]

    def unit(rows: Tensor) -> Tensor:
        rows = rows.masked_fill(rows == 0, 1e-6)
        return rows / torch.linalg.norm(rows, dim=-1, keepdim=True)

    q, k, v = unit(heads(self.q)), unit(heads(self.k)), heads(self.v)
    own_k = take.drop_replicas(k, 1)
    kv, k_sum, count = _sums(
        take, torch.einsum("blhm,blhd->bhmd", own_k, take.drop_replicas(v, 1)), own_k.sum(1), own_k.new_full((1,), own_k.size(1))
    )
    above = torch.einsum("bnhm,bhmd->bnhd", q, kv) + count * v
    below = torch.einsum("bnhm,bhm->bnh", q, k_sum).unsqueeze(-1) + count
    return (above / below).mean(2)


def _polynormer(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    take = _local_statistics(self, x, 1)
    if take is None:
        return type(self).forward(self, x, mask)

    def heads(rows: Tensor) -> Tensor:
        return rows.view(*x.shape[:2], self.head_channels, self.heads)  # [1, n, D, H]

    k = heads(self.k(x).sigmoid())
    q = k if self.qk_shared else heads(self.q(x).sigmoid())
    own_k, own_v = take.drop_replicas(k, 1), take.drop_replicas(heads(self.v(x)), 1)
    kv, k_sum = _sums(take, torch.einsum("bndh,bnmh->bdmh", own_k, own_v), own_k.sum(1))
    above = torch.einsum("bndh,bdmh->bnmh", q, kv)
    below = torch.einsum("bndh,bdh->bnh", q, k_sum).unsqueeze(2)
    out = self.lns((above / (below + 1e-6)).flatten(2)) * (self.h_lins(x) + self.beta)
    return self.dropout(torch.relu(self.lin_out(out)))


def _performer(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    take = _local_statistics(self, q, 2)  # [1, H, n, D]
    if take is None:
        return type(self).forward(self, q, k, v)
    q, k = (generalized_kernel(rows, self.projection_matrix, self.kernel) for rows in (q, k))
    own_k = take.drop_replicas(k, 2)
    kv, k_sum = _sums(take, own_k.transpose(-2, -1) @ take.drop_replicas(v, 2), own_k.sum(-2))
    return (q @ kv) / (q @ k_sum.unsqueeze(-1))


def _correct(
    self: Any, y_soft: Tensor, y_true: Tensor, mask: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
) -> Tensor:
    if not self.autoscale:
        return type(self).correct(self, y_soft, y_true, mask, edge_index, edge_weight)
    take: Statistics = self.__dict__[STATE]
    if y_true.dtype == torch.long and y_true.size(0) == y_true.numel():
        y_true = one_hot(y_true.view(-1), num_classes=y_soft.size(-1), dtype=y_soft.dtype)
    error = torch.zeros_like(y_soft)
    error[mask] = y_true - y_soft[mask]
    smoothed = self.prop1(error, edge_index, edge_weight=edge_weight, post_step=lambda x: x.clamp_(-1.0, 1.0))
    total, count = take.total(torch.stack([error[mask].abs().sum(), error.new_tensor(len(y_true))]))
    scale = total / count / smoothed.abs().sum(1, keepdim=True)
    scale[scale.isinf() | (scale > 1000)] = 1.0
    return y_soft + scale * smoothed


OVER_ALL: dict[type[torch.nn.Module], dict[str, Forward]] = {
    SGFormerAttention: {"forward": _sgformer},
    PolynormerAttention: {"forward": _polynormer},
    PerformerProjection: {"forward": _performer},
    CorrectAndSmooth: {"correct": _correct},
}
"""Methods of bound modules in which every node attends to all other nodes, by class."""

_METHODS = OVER_ALL | {kind: {"forward": forward} for kind, forward in NORMS.items()}


def global_methods(module: torch.nn.Module, reads_out: bool = False) -> Mapping[str, Forward]:
    """Returns replacement methods of a bound module that reads the nodes of all ranks, by name.

    The result is empty for modules that read one row at a time. It is also empty for classes that override these methods, to
    which row semantics apply.

    Args:
        module: module to be bound.
        reads_out: whether an aggregation module is outside of convs.
    """
    if reads_out and isinstance(module, aggr.Aggregation):
        return {"forward": readout}
    if isinstance(module, pyg_nn.norm.LayerNorm) and module.mode == "node":
        return {}
    kind = next((kind for kind in type(module).__mro__ if kind in _METHODS), None)
    if kind is None or any(getattr(type(module), name) is not getattr(kind, name) for name in _METHODS[kind]):
        return {}
    return _METHODS[kind]


def dense_attention(conv: GPSConv, context: GraphContext, layer: str) -> dict[str, Any]:
    """Returns the forward of a bound GPSConv's ``torch.nn.MultiheadAttention``, over the rows of all ranks."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        if query.size(0) != 1 or query.size(1) != len(context.x):
            raise UnsupportedModelError(
                f"'{layer}' requires one graph and batch=None over ranks (got {list(query.shape[:2])} graphs and nodes)."
            )
        assert context.rows is not None
        all_nodes = torch.arange(context.rows.num_nodes, device=query.device)
        rows = context.rows.fetch(key[0], all_nodes, layer).unsqueeze(0)
        return type(self).forward(self, query, rows, rows, need_weights=False)

    return {"forward": types.MethodType(forward, conv.attn)}
