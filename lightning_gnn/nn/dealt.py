"""Convs whose edges are dealt over the ranks, on a process grid or by a vertex cut; what cannot be shared reads the halo.

Source: CAGNET sections 4.1 and 4.2, Z = A^T H W; CDFGNN section 3. What sums or averages messages that are rows, weighted or
not, is a product with the graph's matrix. Attention and extremes take the edges as they are dealt: what a node's edges have in
common is completed at its owner. Convs with messages of their own need whole neighbourhoods at one rank: they read all sources
of the rank's own nodes directly from their owners, as under ``dgcl``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_gnn.comm.matrix import Matrix, SparseMatrix, Triples
from lightning_gnn.kernels.sums import STATISTICS, RowStatistics, row_statistics_grad
from lightning_gnn.nn.context import Attended, GraphContext
from lightning_gnn.nn.edges import Fetch, Sum, scale_, scaled, wide

MakeMatrix = Callable[[Triples], Matrix]
MakeSparse = Callable[[Triples], SparseMatrix]


class DealtContext(GraphContext):
    """A :class:`GraphContext` whose sums are products with a matrix that lies on all ranks.

    Args:
        make_matrix: deals the entries of this rank's rows over the ranks; communicates.
        make_sparse: the same for edges that are attended over; None where a rank holds all edges of its nodes.
        node_ids: relabelled id of each owned and halo row, int64 ``[N + H]``.
        *args, **options: see :class:`GraphContext`.
    """

    def __init__(
        self, make_matrix: MakeMatrix, make_sparse: MakeSparse | None, node_ids: Tensor, *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._make_matrix, self._make_sparse, self._node_ids = make_matrix, make_sparse, node_ids
        self._dealt: dict[int, SparseMatrix] = {}  # by id of edges that last
        self._products: dict[int, tuple[Sum, Matrix]] = {}  # by id of the sum, which is held so that it stays its own

    @override
    def _forget_edges(self) -> None:
        super()._forget_edges()
        self._dealt.clear()
        self._products.clear()

    @override
    def _sum(self, x: Tensor, fetch: Fetch, what: Sum, layer: str) -> Tensor:
        if id(what) not in self._products:
            with torch.inference_mode(False), torch.no_grad():
                self._products[id(what)] = what, self._make_matrix(self._entries(what))
        return _Product.apply(x, self._products[id(what)][1], what, layer)

    @override
    def attended(self, edge_index: Tensor, layer: str, in_list: bool) -> Attended:
        if self._make_sparse is None or in_list or not self._lasts(edge_index):
            return super().attended(edge_index, layer, in_list)
        self.propagated(layer)
        matrix = self._dealt_edges(edge_index)

        def across(partial: Tensor, operation: str) -> Tensor:
            # Exactly: a row's ranks must subtract and divide by the same, and minus infinity stands for no edges.
            with self.exchange.exactly():
                whole = (
                    matrix.adds.largest(partial, layer) if operation == "max" else matrix.adds.reduce(partial, layer)
                )
                return matrix.targets.expand(whole, layer)

        return Attended(
            matrix.csr,
            lambda tensors: matrix.reads.expand_all(tensors, layer),
            lambda x: matrix.targets.expand(x, layer),
            lambda x: matrix.adds.reduce(x, layer),
            across,
        )

    @override
    def statistics(self, x: Tensor, edge_index: Tensor, wanted: Sequence[str], layer: str) -> tuple[Tensor, ...] | None:
        edges = self.split_edges(edge_index)
        if self._make_sparse is None or edges is None or x.device.type != "cpu":
            return super().statistics(x, edge_index, wanted, layer)
        self.propagated(layer)
        matrix, without = self._dealt_edges(edge_index), edges.without_edges

        def compute() -> tuple[Tensor, ...]:
            return _Statistics.apply(x, matrix, without, wanted, layer)

        return self._kept(("statistics", id(x), id(edge_index), *wanted), x, len(wanted), compute, compute)

    def _dealt_edges(self, edge_index: Tensor) -> SparseMatrix:
        if id(edge_index) not in self._dealt:
            assert self._make_sparse is not None
            with torch.inference_mode(False), torch.no_grad():
                source, target = self._node_ids[edge_index]
                self._dealt[id(edge_index)] = self._make_sparse(Triples(target, source, None))
        return self._dealt[id(edge_index)]

    def _entries(self, what: Sum) -> Triples:
        """Returns the entries of this rank's rows, in relabelled ids."""
        weights = what.weights
        rows, cols, values = [], [], []
        for csr, first, weight in (
            (what.edges.owned, 0, None if weights is None else weights.owned),
            (what.edges.halo, self.num_owned, None if weights is None else weights.halo),
        ):
            rows.append(self._node_ids[csr.row_of_slot()])
            cols.append(self._node_ids[csr.indices.long() + first])
            if weight is not None:
                values.append(weight)
        return Triples(torch.cat(rows), torch.cat(cols), torch.cat(values) if values else None)


class _Product(torch.autograd.Function):
    """A :class:`Sum`, ``[N, F]``, as a product on the grid; backward multiplies with the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Matrix, what: Sum, layer: str) -> Tensor:
        ctx.matrix, ctx.what, ctx.layer, ctx.dtype = matrix, what, layer, x.dtype
        out = matrix.multiply(scaled(x, what.before).contiguous(), layer, transposed=False)
        weight = None if what.weights is None else what.weights.owned
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        return scale_(out, what.after).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = scaled(grad, ctx.what.after).to(ctx.dtype).contiguous()
        own = ctx.matrix.multiply(grad, ctx.layer, transposed=True)
        return scale_(own, ctx.what.before).to(ctx.dtype), None, None, None


class _Statistics(torch.autograd.Function):
    """Several of :data:`~lightning_gnn.kernels.sums.STATISTICS` over edges that lie on several ranks; CPU.

    Each rank takes those of its own edges; sums are added up at the owner, and extremes compared there. All ranks then hear the
    extremes, count who has them, and share gradients among all edges that do, as on one device.

    Returns:
        Those in `wanted`, in its order, ``[N, F]`` each; 0 for the rows `without` edges.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: SparseMatrix, without: Tensor, wanted: Sequence[str], layer: str
    ) -> tuple[Tensor, ...]:
        ctx.matrix, ctx.wanted, ctx.layer, ctx.dtype = matrix, list(wanted), layer, x.dtype
        rows = wide(matrix.reads.expand(x, layer))
        found = RowStatistics.empty(matrix.csr, rows, wanted)
        found.add(matrix.csr, rows, accumulate=False)
        out = {name: matrix.adds.reduce(getattr(found, name), layer) for name in ("sum", "squares") if name in wanted}
        counts = {}
        for name, sign in (("max", 1), ("min", -1)):
            if name in wanted:
                partial = getattr(found, name)
                with matrix.adds.exactly():  # an edge either has the extreme, on all ranks, or not
                    whole = sign * matrix.adds.largest(sign * partial, layer)
                    whole[without] = 0
                    everywhere = matrix.targets.expand(whole, layer)
                    counts[f"num_{name}"] = _count(found, name, partial == everywhere, matrix, layer)
                out[name] = whole
                setattr(found, name, everywhere)
        none = rows.new_empty((0, rows.size(1)))
        owned = (out.get("max", none), out.get("min", none), counts.get("num_max", none), counts.get("num_min", none))
        ctx.save_for_backward(rows, found.max, found.min, *owned)
        return tuple(out[name].to(x.dtype) for name in wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        matrix, layer = ctx.matrix, ctx.layer
        rows, largest, least, *of_owned = ctx.saved_tensors
        none = rows.new_empty((0, rows.size(1)))
        found, owned = RowStatistics(none, none, largest, least, none, none), RowStatistics(none, none, *of_owned)
        own = {}
        for name in ctx.wanted:
            grad = grads[ctx.wanted.index(name)]
            shape = (matrix.num_owned, rows.size(1))
            grad = rows.new_zeros(shape) if grad is None else grad.to(rows.dtype)
            own[name] = (grad / owned.ties(name) if name in ("max", "min") else grad).contiguous()
        everywhere = dict(zip(own, matrix.targets.expand_all([*own.values()], layer)))
        upstream = RowStatistics(
            **{name: everywhere.get(name, none) for name in STATISTICS}, num_max=none, num_min=none
        )
        at_sources = row_statistics_grad(matrix.csr, rows, upstream, found)
        return matrix.reads.reduce(at_sources.to(ctx.dtype), layer), None, None, None, None


def _count(found: RowStatistics, name: str, attained: Tensor, matrix: SparseMatrix, layer: str) -> Tensor:
    """Returns how many edges of each owned row have its extreme value, ``[N, F]``."""
    count = getattr(found, f"num_{name}").to(found.max.dtype if name == "max" else found.min.dtype)
    return matrix.adds.reduce(torch.where(attained, count, 0), layer)
