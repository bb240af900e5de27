"""Sums and extremes over edges that are spread over ranks, on a process grid or by a vertex cut.

Source: CAGNET sections 4.1 and 4.2, Z = A^T H W; CDFGNN section 3. What sums or averages messages that are rows, weighted or
not, is a product with the graph's matrix. For extremes, what a node's edges have in common is completed at its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Matrix
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.kernels.sums import RowStatistics, row_statistics_grad
from lightning_gnn.nn.edges import Sum, scale_, scaled, shared, upstream_of, wide


class Product(torch.autograd.Function):
    """A :class:`Sum`, ``[N, F]``, as a product on the grid; backward multiplies with the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Matrix, what: Sum, call: Call) -> Tensor:
        ctx.matrix, ctx.what, ctx.call, ctx.dtype = matrix, what, call, x.dtype
        out = matrix.multiply(scaled(x, what.before).contiguous(), call)
        weight = None if what.weights is None else what.weights.owned
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        return scale_(out, what.after).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = scaled(grad, ctx.what.after).to(ctx.dtype).contiguous()
        own = ctx.matrix.multiply(grad, ctx.call.backward())
        return scale_(own, ctx.what.before).to(ctx.dtype), None, None, None


class StatisticsOverRanks(torch.autograd.Function):
    """Several of :data:`~lightning_gnn.kernels.sums.STATISTICS` over edges that lie on several ranks.

    Each rank takes those of its own edges; sums are added up at the owner, and extremes compared there. All ranks then get the
    extremes, count who has them, and share gradients among all edges that do, as on one device.

    Returns:
        Those in `wanted`, in its order, ``[N, F]`` each; 0 for the rows `without` edges.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: SparseMatrix, without: Tensor, wanted: Sequence[str], layer: str
    ) -> tuple[Tensor, ...]:
        ctx.matrix, ctx.wanted, ctx.layer, ctx.dtype = matrix, wanted, layer, x.dtype
        rows = wide(matrix.columns.expand(x, layer))
        found = RowStatistics.empty(matrix.csr, rows, wanted)
        found.add(matrix.csr, rows, accumulate=False)
        out = {name: matrix.rows.reduce(getattr(found, name), layer) for name in ("sum", "squares") if name in wanted}
        counts = {}
        for name, sign in (("max", 1), ("min", -1)):
            if name in wanted:
                partial = getattr(found, name)
                # Exactly: an edge either has the extreme, on all ranks, or not.
                with matrix.rows.world.transport.approximating(False):
                    whole = sign * matrix.rows.reduce_max(sign * partial, layer)
                    whole.index_fill_(0, without, 0)
                    everywhere = matrix.rows.expand(whole, layer)
                    attaining = torch.where(partial == everywhere, getattr(found, f"num_{name}").to(partial.dtype), 0)
                    counts[f"num_{name}"] = matrix.rows.reduce(attaining, layer)
                out[name] = whole
                setattr(found, name, everywhere)
        none = rows.new_empty((0, rows.size(1)))
        owned = (out.get("max", none), out.get("min", none), counts.get("num_max", none), counts.get("num_min", none))
        ctx.save_for_backward(rows, found.max, found.min, *owned)
        return tuple(out[name].to(x.dtype) for name in wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        matrix, layer = ctx.matrix, ctx.layer
        rows, largest, least, *of_owned = ctx.saved_tensors
        none = rows.new_empty((0, rows.size(1)))
        found, owned = RowStatistics(none, none, largest, least, none, none), RowStatistics(none, none, *of_owned)
        own = shared(dict(zip(ctx.wanted, grads)), owned)
        everywhere = dict(zip(own, matrix.rows.expand_all([*own.values()], layer)))
        at_sources = row_statistics_grad(matrix.csr, rows, upstream_of(everywhere, none), found)
        return matrix.columns.reduce(at_sources.to(ctx.dtype), layer), None, None, None, None
