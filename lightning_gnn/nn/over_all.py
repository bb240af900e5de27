"""PyG's modules in which every node looks at all others: linear attention, dense attention, and correct and smooth.

Linear attention is a sum over all nodes of small matrices, so ranks send these; dense attention needs the rows of all nodes.
n nodes of this rank, N of all; B graphs, one; H heads, D columns of each.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import CorrectAndSmooth, GPSConv
from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention
from torch_geometric.nn.attention.performer import PerformerProjection, generalized_kernel
from torch_geometric.utils import one_hot

from lightning_gnn.nn.context import GraphContext, UnsupportedModelError
from lightning_gnn.nn.norms import STATE, Statistics

Forward = Callable[..., Tensor]


def _own(self: Any, x: Tensor, dim: int) -> Statistics | None:
    """Returns what sums over ranks where `x` has this rank's nodes along `dim`, of one graph; None for rows of something else."""
    take: Statistics = self.__dict__[STATE]
    return take if x.size(0) == 1 and x.size(dim) == take.num_rows else None


def _sums(take: Statistics, *parts: Tensor) -> list[Tensor]:
    """Returns the sums of several tensors over ranks, in one message."""
    summed = take.total(torch.cat([part.reshape(-1) for part in parts]))
    return [each.view(part.shape) for each, part in zip(summed.split([part.numel() for part in parts]), parts)]


def _sgformer(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    take = _own(self, x, 1)
    if take is None:
        return type(self).forward(self, x, mask)

    def heads(lin: torch.nn.Linear) -> Tensor:
        return lin(x).reshape(*x.shape[:2], self.heads, self.head_channels)  # [1, n, H, D]

    def unit(rows: Tensor) -> Tensor:
        rows = rows.masked_fill(rows == 0, 1e-6)
        return rows / torch.linalg.norm(rows, dim=-1, keepdim=True)

    q, k, v = unit(heads(self.q)), unit(heads(self.k)), heads(self.v)
    own_k = take.own(k, 1)
    kv, k_sum, count = _sums(
        take,
        torch.einsum("blhm,blhd->bhmd", own_k, take.own(v, 1)),
        own_k.sum(1),
        own_k.new_full((1,), own_k.size(1)),
    )
    above = torch.einsum("bnhm,bhmd->bnhd", q, kv) + count * v
    below = torch.einsum("bnhm,bhm->bnh", q, k_sum).unsqueeze(-1) + count
    return (above / below).mean(2)


def _polynormer(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    take = _own(self, x, 1)
    if take is None:
        return type(self).forward(self, x, mask)

    def heads(rows: Tensor) -> Tensor:
        return rows.view(*x.shape[:2], self.head_channels, self.heads)  # [1, n, D, H]

    k = heads(self.k(x).sigmoid())
    q = k if self.qk_shared else heads(self.q(x).sigmoid())
    own_k, own_v = take.own(k, 1), take.own(heads(self.v(x)), 1)
    kv, k_sum = _sums(take, torch.einsum("bndh,bnmh->bdmh", own_k, own_v), own_k.sum(1))
    above = torch.einsum("bndh,bdmh->bnmh", q, kv)
    below = torch.einsum("bndh,bdh->bnh", q, k_sum).unsqueeze(2)
    out = self.lns((above / (below + 1e-6)).reshape(*x.shape[:2], -1)) * (self.h_lins(x) + self.beta)
    return self.dropout(torch.relu(self.lin_out(out)))


def _performer(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    take = _own(self, q, 2)  # [1, H, n, D]
    if take is None:
        return type(self).forward(self, q, k, v)
    q, k = (generalized_kernel(rows, self.projection_matrix, self.kernel) for rows in (q, k))
    own_k = take.own(k, 2)
    kv, k_sum = _sums(take, own_k.transpose(-2, -1) @ take.own(v, 2), own_k.sum(-2))
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


_METHODS: dict[type[torch.nn.Module], dict[str, Forward]] = {
    SGFormerAttention: {"forward": _sgformer},
    PolynormerAttention: {"forward": _polynormer},
    PerformerProjection: {"forward": _performer},
    CorrectAndSmooth: {"correct": _correct},
}


def over_all(module: torch.nn.Module) -> dict[str, Forward] | None:
    """Returns the methods of a bound module that looks at all nodes; None for another, or one that has them otherwise."""
    kind = next((kind for kind in type(module).__mro__ if kind in _METHODS), None)
    if kind is None or any(getattr(type(module), name) is not getattr(kind, name) for name in _METHODS[kind]):
        return None
    return _METHODS[kind]


def dense_attention(conv: GPSConv, context: GraphContext, layer: str) -> dict[str, Any]:
    """Returns the forward of a bound GPSConv's ``torch.nn.MultiheadAttention``, over the rows of all ranks."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        if query.size(0) != 1 or query.size(1) != len(context.x):
            raise UnsupportedModelError(
                f"'{layer}' was given {list(query.shape[:2])} graphs and nodes; a graph over ranks is one graph, and batch None."
            )
        assert context.rows is not None
        all_nodes = torch.arange(context.rows.num_nodes, device=query.device)
        rows = context.rows.fetch(key[0], all_nodes, layer).unsqueeze(0)
        return type(self).forward(self, query, rows, rows, need_weights=False)

    return {"forward": types.MethodType(forward, conv.attn)}
