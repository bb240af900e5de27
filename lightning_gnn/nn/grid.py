"""Convs on a process grid: sums over neighbours are products with a matrix that lies on it; the rest reads the halo.

Source: CAGNET sections 4.1 and 4.2, Z = A^T H W. What sums or averages messages that are rows, weighted or not, is such a
product. Attention takes the edges as they are dealt over the grid: the softmax over a node's edges is completed in the process
row. Extremes and convs with messages of their own need whole neighbourhoods at one rank: they read all sources of the rank's own
nodes directly from their owners, as under ``dgcl``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_gnn.comm.grid import Matrix, SparseMatrix, Triples
from lightning_gnn.nn.context import Attended, GraphContext
from lightning_gnn.nn.edges import Fetch, Sum, scale_, scaled

MakeMatrix = Callable[[Triples], Matrix]
MakeSparse = Callable[[Triples], SparseMatrix]


class GridContext(GraphContext):
    """A :class:`GraphContext` whose sums are products on a process grid.

    Args:
        make_matrix: deals the entries of this rank's rows over the grid; communicates.
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
    def _sum(self, x: Tensor, fetch: Fetch, what: Sum, layer: str) -> Tensor:
        if id(what) not in self._products:
            with torch.inference_mode(False), torch.no_grad():
                self._products[id(what)] = what, self._make_matrix(self._entries(what))
        return _Product.apply(x, self._products[id(what)][1], what, layer)

    @override
    def attended(self, edge_index: Tensor, layer: str, in_list: bool) -> Attended:
        if self._make_sparse is None or in_list or id(edge_index) not in self._lasting:
            return super().attended(edge_index, layer, in_list)
        self.propagated(layer)
        if id(edge_index) not in self._dealt:
            with torch.inference_mode(False), torch.no_grad():
                source, target = self._node_ids[edge_index]
                self._dealt[id(edge_index)] = self._make_sparse(Triples(target, source, None))
        matrix = self._dealt[id(edge_index)]

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
