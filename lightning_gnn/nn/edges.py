"""Edges of a rank as matrices, and sums and max/min aggregations over edges that an exchange completes.

Edges are at the owners of their targets, or distributed over ranks on a process grid or by a vertex cut. Source: CAGNET sections
4.1 and 4.2, Z = A^T H W; CDFGNN section 3. A sum or mean of messages that are rows, weighted or not, is a product with the
graph's matrix. For max/min aggregation, the partial results of a node's edges are combined at its owner.

N local nodes, H halo nodes, E edges, F features. T rows are targets of edges: the local nodes, except in heterogeneous graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.utils import scatter

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, Matrix, Triples
from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.kernels import CSR, spmm
from lightning_gnn.kernels.sums import STATISTICS, RowStatistics, row_statistics_grad

if TYPE_CHECKING:
    from lightning_gnn.comm.matrix import SparseMatrix


@dataclass(frozen=True)
class SplitEdges:
    """``A = [A_owned | A_halo]``: edges of the rank by local or halo source, so that the local part needs no exchange.

    Attributes:
        owned: edges from local nodes, CSR ``[T, N]``; rows are targets.
        halo: edges from halo nodes, CSR ``[T, H]``; rows are targets. Both have the positions of edges in the edge list, or
            neither.
        in_degree: int64 ``[T]``.
    """

    owned: CSR
    halo: CSR
    in_degree: Tensor

    @classmethod
    def from_edges(
        cls,
        edge_index: Tensor,
        num_owned: int,
        num_halo: int,
        num_targets: int | None = None,
        in_list: bool = True,
        self_loops: bool = False,
    ) -> SplitEdges:
        """Returns the split of an edge list.

        Args:
            edge_index: edges, ``[2, E]``.
            num_owned, num_halo, num_targets: N, H and T, by default N.
            in_list: whether to store the positions of edges in the list, for weights.
            self_loops: whether to replace self-loops in the list by one for each local node; not with `in_list`.
        """
        source, target = stored_ids(edge_index)
        num_targets = num_owned if num_targets is None else num_targets
        owned, halo = CSR.halves(target, source, num_targets, num_owned, num_halo, in_list, self_loops)
        return cls(owned, halo, owned.indptr.diff() + halo.indptr.diff())

    def only(self, present: Tensor) -> SplitEdges:
        """Returns the edges without edges from absent halo rows, and without positions in the list; `present` is bool ``[H]``."""
        row, col = self.halo.row_of_slot(), self.halo.indices.long()
        kept = present[col]
        halo = CSR.from_coo(row[kept], col[kept], self.halo.num_rows, self.halo.num_cols).to_slot_order()
        degree = self.in_degree - torch.bincount(row[~kept], minlength=len(self.in_degree))
        return SplitEdges(self.owned.to_slot_order(), halo, degree)

    @cached_property
    def inverse_degree(self) -> Tensor:
        """1 / max(in-degree, 1), float64 ``[T]``."""
        return self.in_degree.clamp(min=1).double().reciprocal()

    @cached_property
    def without_edges(self) -> Tensor:
        """Indices of targets without edges."""
        return (self.in_degree == 0).nonzero().view(-1)

    def weights(self, weight: Tensor) -> SplitWeights:
        """Returns edge weights, ``[E]`` in list order, in the slot order of both parts and their transposes."""
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
    """Definition of a sum over edges: ``after * (A (weight *) (before * x))``.

    Attributes:
        edges: matrix A.
        weights: edge weights; None for ones.
        before: scales of local rows, ``[N]``, applied by the owner before rows are sent; None for ones.
        after: scales of the result, ``[T]``; None for ones.
    """

    edges: SplitEdges
    weights: SplitWeights | None = None
    before: Tensor | None = None
    after: Tensor | None = None

    def entries(self, node_ids: Tensor, target_ids: Tensor, num_owned: int) -> Triples:
        """Returns the entries of the matrix with relabeled ids.

        Args:
            node_ids: relabeled ids of local and halo rows, ``[N + H]``.
            target_ids: relabeled ids of targets, ``[T]``.
            num_owned: N.
        """
        edges, weights = self.edges, self.weights
        rows = [target_ids[csr.row_of_slot()] for csr in (edges.owned, edges.halo)]
        cols = [node_ids[edges.owned.indices.long()], node_ids[edges.halo.indices.long() + num_owned]]
        values = None if weights is None else torch.cat([weights.owned, weights.halo])
        return Triples(torch.cat(rows), torch.cat(cols), values)


class SumOfRows(torch.autograd.Function):
    """:class:`Sum`, ``[T, F]``: the product with local rows overlaps with the halo exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, edge_sum: Sum, call: Call) -> Tensor:
        ctx.exchange, ctx.edge_sum, ctx.call, ctx.dtype = exchange, edge_sum, call, x.dtype
        edges, weights = edge_sum.edges, edge_sum.weights
        x = (x if edge_sum.before is None else x * edge_sum.before.to(x.dtype).unsqueeze(1)).contiguous()
        halo = exchange.buffers.take((exchange.num_halo, x.size(1)), x.dtype)
        wait = exchange.start_expand(x, halo, call)
        # As in PyG, a float32 weight makes messages of bfloat16 rows float32; the exchange sends the original dtype.
        dtype = x.dtype if weights is None else torch.promote_types(x.dtype, weights.owned.dtype)
        out = x.new_empty((edges.owned.num_rows, x.size(1)), dtype=torch.promote_types(dtype, torch.float32))
        last = None if halo.numel() else edge_sum.after
        spmm(edges.owned, x, weights.owned if weights else None, out=out, scale=last)
        wait()
        if exchange.present is not None:
            halo.mul_(exchange.scale)
        if halo.numel():
            weight = weights.halo if weights else None
            spmm(edges.halo, halo, weight, out=out, accumulate=True, scale=edge_sum.after)
        exchange.buffers.give_back(halo)
        return out.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        edge_sum, exchange = ctx.edge_sum, ctx.exchange
        edges, weights = edge_sum.edges, edge_sum.weights
        grad = (grad if edge_sum.after is None else grad * edge_sum.after.to(grad.dtype).unsqueeze(1)).contiguous()
        # Values that other ranks wait for go first.
        halo = exchange.buffers.take((edges.halo.num_cols, grad.size(1)), ctx.dtype)
        spmm(edges.halo.transpose(in_list=weights is not None), grad, weights.halo_transposed if weights else None, out=halo)
        if exchange.present is not None:
            halo.mul_(exchange.scale)
        finish = exchange.start_reduce(halo, ctx.call.backward())
        own = grad.new_empty((exchange.num_owned, grad.size(1)), dtype=ctx.dtype)
        spmm(edges.owned.transpose(in_list=weights is not None), grad, weights.owned_transposed if weights else None, out=own)
        finish(own)
        exchange.buffers.give_back(halo)
        own = own if edge_sum.before is None else own.mul_(edge_sum.before.to(own.dtype).unsqueeze(1))
        return own, None, None, None


class Product(torch.autograd.Function):
    """:class:`Sum`, ``[N, F]``, as a product over ranks; the backward pass multiplies with the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Matrix, edge_sum: Sum, call: Call) -> Tensor:
        ctx.matrix, ctx.edge_sum, ctx.call, ctx.dtype = matrix, edge_sum, call, x.dtype
        out = matrix.multiply(scale_rows(x, edge_sum.before).contiguous(), call)
        weight = None if edge_sum.weights is None else edge_sum.weights.owned
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        return scale_(out, edge_sum.after).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = scale_rows(grad, ctx.edge_sum.after).to(ctx.dtype).contiguous()
        own = ctx.matrix.multiply(grad, ctx.call.backward())
        return scale_(own, ctx.edge_sum.before).to(ctx.dtype), None, None, None


def scale_rows(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Returns rows times their scales; None for ones."""
    return rows if scale is None else rows * scale.to(rows.dtype).unsqueeze(1)


def scale_(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Scale `rows` in place, which is faster than a new tensor; None for ones."""
    return rows if scale is None else rows.mul_(scale.to(rows.dtype).unsqueeze(1))


def sum_by(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Returns the sums of values by index, ``[size, ...]``, differentiable and bitwise reproducible on every device.

    Args:
        index: int64 ``[E]``.
        values: ``[E, ...]``.
        size: number of sums.
    """
    if values.device.type == "cpu":
        return scatter(values, index, 0, dim_size=size, reduce="sum")
    # On CUDA, scatter adds atomically in any order; this sorts.
    return values.new_zeros((size, *values.shape[1:])).index_put((index,), values, accumulate=True)


def mean_by(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Returns the sums of :func:`sum_by` divided by their counts."""
    count = sum_by(index, values.new_ones(len(index)), size).clamp_(min=1)
    return sum_by(index, values, size) / count.view(-1, *[1] * (values.dim() - 1))


def last_loops(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Returns the positions of self-loops, and the position of the last self-loop of the same node, int64 ``[L]`` each."""
    source, target = stored_ids(edge_index)
    at = (source == target).nonzero().view(-1)
    node = source[at].long()
    return at, at.new_full((num_nodes,), -1).scatter_reduce_(0, node, at, "amax")[node]


class LastLoops(torch.autograd.Function):
    """Weight of a node's last self-loop for all its self-loops. PyG keeps the last on the CPU, but any of them on CUDA.

    The gradient of each self-loop is the gradient of the last, as in PyG. For `at` and `last` see :func:`last_loops`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, at: Tensor, last: Tensor) -> Tensor:
        return weight.index_copy(0, at, weight[last])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class StatisticsOfRows(torch.autograd.Function):
    """Several of :data:`~lightning_gnn.kernels.sums.STATISTICS` over the edges of each row, in one pass.

    Returns:
        Statistics in the order of `wanted`, ``[N, F]`` each; 0 for rows without edges.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: Exchange, edges: SplitEdges, wanted: Sequence[str], call: Call
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.edges, ctx.wanted, ctx.call = exchange, edges, wanted, call
        halo = x.new_empty((exchange.num_halo, x.size(1)))
        wait = exchange.start_expand(x.contiguous(), halo, call)
        rows = wide(x)
        found = RowStatistics.empty(edges.owned, rows, wanted)
        found.add(edges.owned, rows, accumulate=False)
        wait()
        halo_rows = wide(halo)
        found.add(edges.halo, halo_rows, accumulate=True)
        for extreme in (found.max, found.min):
            if len(extreme):
                extreme.index_fill_(0, edges.without_edges, 0)  # `[...] = 0` would copy the number to a GPU
        ctx.save_for_backward(x, halo_rows, found.max, found.min, found.num_max, found.num_min)
        return tuple(getattr(found, name).to(x.dtype) for name in wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        edges, exchange = ctx.edges, ctx.exchange
        x, halo_rows, *of_extremes = ctx.saved_tensors
        rows = wide(x)
        none = rows.new_empty((0, rows.size(1)))
        found = RowStatistics(none, none, *of_extremes)
        upstream = upstream_of(divide_among_ties(dict(zip(ctx.wanted, grads)), found), none)
        halo = row_statistics_grad(edges.halo, halo_rows, upstream, found).to(x.dtype)
        finish = exchange.start_reduce(halo, ctx.call.backward())
        own = row_statistics_grad(edges.owned, rows, upstream, found).to(x.dtype)
        finish(own)
        return own, None, None, None, None


class StatisticsOverRanks(torch.autograd.Function):
    """Several of :data:`~lightning_gnn.kernels.sums.STATISTICS` over edges that are distributed over ranks.

    Each rank aggregates its edges; owners add sums and compare maxima and minima. All ranks then receive the maxima and minima,
    count the edges that attain them, and divide gradients among these edges, as on one device.

    Returns:
        Statistics in the order of `wanted`, ``[N, F]`` each; 0 for the rows in `without`.
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
                # Exact: all ranks must agree on whether an edge attains the maximum or minimum.
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
        own = divide_among_ties(dict(zip(ctx.wanted, grads)), owned)
        everywhere = dict(zip(own, matrix.rows.expand_all([*own.values()], layer)))
        at_sources = row_statistics_grad(matrix.csr, rows, upstream_of(everywhere, none), found)
        return matrix.columns.reduce(at_sources.to(ctx.dtype), layer), None, None, None, None


def divide_among_ties(grads: Mapping[str, Tensor], statistics: RowStatistics) -> dict[str, Tensor]:
    """Returns the gradients of statistics in the dtype of `statistics`; gradients of max and min are divided among ties."""
    of_edges = {name: grad.to(statistics.sum.dtype) for name, grad in grads.items()}
    extremes = {name: of_edges[name] / statistics.ties(name) for name in ("max", "min") if name in of_edges}
    return {name: grad.contiguous() for name, grad in (of_edges | extremes).items()}


def upstream_of(grads: Mapping[str, Tensor], none: Tensor) -> RowStatistics:
    """Returns gradients of statistics in the form of the kernel, with `none` for statistics without gradients."""
    return RowStatistics(**{name: grads.get(name, none) for name in STATISTICS}, num_max=none, num_min=none)


def wide(x: Tensor) -> Tensor:
    """Returns rows for statistics: contiguous, float32 or float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
