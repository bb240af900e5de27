"""A rank's edges as matrices, and sums over them that an exchange completes.

N owned rows, H halo rows, E edges, F columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.kernels import CSR, spmm
from lightning_gnn.kernels.sums import STATISTICS, RowStatistics, row_statistics_grad


class Exchange(Protocol):
    """S and its transpose; see :class:`lightning_gnn.comm.exchange.RowExchange`."""

    num_owned: int
    num_halo: int
    own_lengths: dict[int, int]

    def begin_step(self) -> None: ...
    def exactly(self) -> AbstractContextManager[None]: ...
    def buffer(self, use: str, shape: torch.Size, dtype: torch.dtype) -> Tensor: ...
    def start_fetch(self, x: Tensor, halo: Tensor, layer: str) -> Callable[[], None]: ...
    def outgoing(self, shape: torch.Size, dtype: torch.dtype) -> Tensor: ...
    def start_return(self, halo_grad: Tensor, layer: str) -> Callable[[Tensor], None]: ...
    def expand(self, x: Tensor, layer: str, dim: int = 0) -> Tensor: ...
    def expand_all(self, tensors: Sequence[Tensor], layer: str) -> list[Tensor]: ...
    def reduce(self, x: Tensor, layer: str) -> Tensor: ...
    def sum_over_ranks(self, x: Tensor, operation: str) -> Tensor: ...
    def max_over_ranks(self, x: Tensor, operation: str) -> Tensor: ...


Fetch = Callable[[Tensor, str], tuple[Tensor, Callable[[], None]]]
"""Starts S for a layer; returns the halo rows and the function after which they are there."""


@dataclass(frozen=True)
class SplitEdges:
    """``A = [A_owned | A_halo]``: the rank's edges by where their source lies, so that one part needs no waiting.

    Attributes:
        owned: CSR ``[N, N]``; halo: CSR ``[N, H]``; rows are targets. Both are of the whole list of edges.
        in_degree: int64 ``[N]``.
    """

    owned: CSR
    halo: CSR
    in_degree: Tensor

    @classmethod
    def from_edges(cls, edge_index: Tensor, num_owned: int, num_halo: int) -> SplitEdges:
        source, target = edge_index
        degree = torch.bincount(target, minlength=num_owned)
        if not num_halo:
            none = CSR.from_coo(source[:0], source[:0], num_owned, 0).in_list(source[:0])
            return cls(CSR.from_coo(target, source, num_owned, num_owned), none, degree)

        def part(where: Tensor, first: int, columns: int) -> CSR:
            ids = where.nonzero().view(-1)
            return CSR.from_coo(target[ids], source[ids] - first, num_owned, columns).in_list(ids)

        is_halo = source >= num_owned
        return cls(part(~is_halo, 0, num_owned), part(is_halo, num_owned, num_halo), degree)

    def of_slots(self) -> SplitEdges:
        """Returns the same edges without their places in the list, which sums without weights do not need."""
        return SplitEdges(self.owned.of_slots(), self.halo.of_slots(), self.in_degree)

    @cached_property
    def inverse_degree(self) -> Tensor:
        """1 / max(in-degree, 1), float64 ``[N]``."""
        return self.in_degree.clamp(min=1).double().reciprocal()

    @cached_property
    def without_edges(self) -> Tensor:
        """The owned rows that no edge ends at, ids."""
        return (self.in_degree == 0).nonzero().view(-1)

    def weights(self, weight: Tensor) -> SplitWeights:
        """Returns one weight per edge, ``[E]`` in list order, in the slot order of both parts and their transposes."""
        owned, halo = self.owned.permute(weight), self.halo.permute(weight)
        return SplitWeights(owned, halo, self.owned.transpose().permute(owned), self.halo.transpose().permute(halo))


@dataclass(frozen=True)
class SplitWeights:
    """Edge weights in slot order, for :class:`SplitEdges` and its transposes."""

    owned: Tensor
    halo: Tensor
    owned_transposed: Tensor
    halo_transposed: Tensor


@dataclass(frozen=True)
class Sum:
    """What a sum over edges is of: ``after * (A (weight *) (before * x))``.

    Attributes:
        edges: A.
        weights: of edges; None for ones.
        before: of owned rows, ``[N]``, applied where they are owned and so before they travel; None for ones.
        after: of the rows of the result, ``[N]``; None for ones.
    """

    edges: SplitEdges
    weights: SplitWeights | None = None
    before: Tensor | None = None
    after: Tensor | None = None


class SumOfRows(torch.autograd.Function):
    """A :class:`Sum`, ``[N, F]``: the owned part is multiplied while the halo rows travel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fetch: Fetch, exchange: Exchange, what: Sum, layer: str) -> Tensor:
        ctx.exchange, ctx.what, ctx.layer, ctx.dtype = exchange, what, layer, x.dtype
        edges, weights = what.edges, what.weights
        x = scaled(x, what.before)
        halo, wait = fetch(x, layer)
        # As in PyG, a float32 weight makes messages of bfloat16 rows float32; the rows travel as they are.
        dtype = x.dtype if weights is None else torch.promote_types(x.dtype, weights.owned.dtype)
        out = x.new_empty((exchange.num_owned, x.size(1)), dtype=torch.promote_types(dtype, torch.float32))
        last = None if halo.numel() else what.after
        spmm(edges.owned, x, weights.owned if weights else None, out=out, scale=last)
        wait()
        if halo.numel():
            weight = weights.halo if weights else None
            spmm(edges.halo, halo, weight, out=out, accumulate=True, scale=what.after)
        return out.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        what, exchange = ctx.what, ctx.exchange
        edges, weights = what.edges, what.weights
        grad = scaled(grad.contiguous(), what.after)
        # What others wait for goes first, straight into what is sent.
        sent = exchange.outgoing(torch.Size((edges.halo.num_cols, grad.size(1))), ctx.dtype)
        spmm(edges.halo.transpose(), grad, weights.halo_transposed if weights else None, out=sent)
        finish = exchange.start_return(sent, ctx.layer)
        own = grad.new_empty((exchange.num_owned, grad.size(1)), dtype=ctx.dtype)
        spmm(edges.owned.transpose(), grad, weights.owned_transposed if weights else None, out=own)
        finish(own)
        return scale_(own, what.before), None, None, None, None


def _column(scale: Tensor, rows: Tensor) -> Tensor:
    return scale.to(rows.dtype).unsqueeze(1)


def scaled(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Returns rows times a scale of each, None for ones."""
    return rows if scale is None else rows * _column(scale, rows)


def scale_(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Returns `rows`, scaled in place: memory that is there is faster than new."""
    return rows if scale is None else rows.mul_(_column(scale, rows))


class StatisticsOfRows(torch.autograd.Function):
    """Several of :data:`~lightning_gnn.kernels.sums.STATISTICS` over the edges of each row, in one pass; CPU.

    Returns:
        Those in `wanted`, in its order, ``[N, F]`` each; 0 for rows without edges.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fetch: Fetch, exchange: Exchange, edges: SplitEdges, wanted: Sequence[str], layer: str
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.edges, ctx.wanted, ctx.layer = exchange, edges, wanted, layer
        halo, wait = fetch(x, layer)
        rows = wide(x)
        found = RowStatistics.empty(edges.owned, rows, wanted)
        found.add(edges.owned, rows, accumulate=False)
        wait()
        # The halo's memory is used again by other layers, while its rows are compared with the extremes in the backward.
        halo_rows = wide(halo).clone() if {"max", "min", "squares"} & set(wanted) else wide(halo)
        found.add(edges.halo, halo_rows, accumulate=True)
        for extreme in (found.max, found.min):
            if len(extreme):
                extreme[edges.without_edges] = 0
        ctx.save_for_backward(x, halo_rows, found.max, found.min, found.num_max, found.num_min)
        return tuple(getattr(found, name).to(x.dtype) for name in wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        edges, exchange = ctx.edges, ctx.exchange
        x, halo_rows, largest, least, num_max, num_min = ctx.saved_tensors
        rows = wide(x)
        none = rows.new_empty((0, rows.size(1)))
        found = RowStatistics(none, none, largest, least, num_max, num_min)
        upstream = dict.fromkeys(STATISTICS, none)
        for name, grad in zip(ctx.wanted, grads):
            if grad is not None:
                grad = grad.to(none.dtype)
                upstream[name] = (grad / found.ties(name) if name in ("max", "min") else grad).contiguous()
        extremes = RowStatistics(
            sum=none, squares=none, num_max=none, num_min=none,
            max=found.max if len(upstream["max"]) else none, min=found.min if len(upstream["min"]) else none,
        )  # fmt: skip
        wanted = RowStatistics(**upstream, num_max=none, num_min=none)
        sent = exchange.outgoing(halo_rows.shape, none.dtype)
        row_statistics_grad(edges.halo, halo_rows, wanted, extremes, out=sent)
        finish = exchange.start_return(sent.to(x.dtype), ctx.layer)
        own = row_statistics_grad(edges.owned, rows, wanted, extremes).to(x.dtype)
        finish(own)
        return own, None, None, None, None, None


def wide(x: Tensor) -> Tensor:
    """Returns rows as statistics take them: contiguous, float32 or float64."""
    return (x if x.dtype in (torch.float32, torch.float64) else x.float()).contiguous()
