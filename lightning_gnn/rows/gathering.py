"""All rows of a graph on all ranks, and a rank's rows of these; differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_gnn.rows.placement import RowSet
from lightning_gnn.rows.ranks import EnterRows, Operation, SumOverRanks


class GatherRows(torch.autograd.Function):
    """The rows of all ranks along dimension 0, in the order of the graph, on all ranks; `x` has this rank's own and replicas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowSet, operation: str | Operation) -> Tensor:
        ctx.rows, ctx.operation = rows, rows.ranks.named(operation)
        found, _ = rows.ranks.gather_rows(x[: rows.owned], rows.counts, ctx.operation)
        return found[rows.order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.rows
        own = EnterRows.apply(grad, rows.ranks, ctx.operation)[rows.positions[: rows.owned]] * rows.ranks.size
        if rows.owned != rows.count:
            own = torch.cat([own, own.new_zeros(rows.count - rows.owned, *own.shape[1:])])
        return own, None, None


class TakeRows(torch.autograd.Function):
    """This rank's rows of a replicated tensor that has those of all ranks along dimension 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowSet, operation: str | Operation) -> Tensor:
        ctx.rows, ctx.operation = rows, rows.ranks.named(operation)
        return x[rows.positions]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, operation = ctx.rows, ctx.operation.gradient
        if not rows.replicas:
            whole = GatherRows.apply(grad, rows, operation)
        else:  # replicas give gradients back, too
            placed = grad.new_zeros(rows.total, *grad.shape[1:]).index_add(0, rows.positions, grad)
            whole = SumOverRanks.apply(placed, rows.ranks, operation)
        return whole / rows.ranks.size, None, None
