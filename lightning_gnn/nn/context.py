"""What bound convs know of their rank: its edges, the exchange, and everything that is computed once.

N owned rows, H halo rows, E edges, F columns; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops, scatter

from lightning_gnn.kernels import CSR, spmm


class UnsupportedModelError(ValueError):
    """A model that cannot be trained, or not exactly on a part of the graph: says which module, why, and what to use."""


T = TypeVar("T", bound=tuple[Tensor, ...])


class Exchange(Protocol):
    """S and its transpose; see :class:`lightning_gnn.comm.exchange.HaloExchange`."""

    num_owned: int
    num_halo: int

    def buffer(self, use: str, shape: torch.Size, dtype: torch.dtype) -> Tensor: ...
    def start_fetch(self, x: Tensor, halo: Tensor, layer: str) -> Callable[[], None]: ...
    def outgoing(self, shape: torch.Size, dtype: torch.dtype) -> Tensor: ...
    def start_return(self, halo_grad: Tensor, layer: str) -> Callable[[Tensor], None]: ...
    def expand(self, x: Tensor, layer: str, dim: int = 0) -> Tensor: ...
    def reduce(self, x: Tensor, layer: str) -> Tensor: ...
    def sum_over_ranks(self, x: Tensor, operation: str) -> Tensor: ...
    def max_over_ranks(self, x: Tensor, operation: str) -> Tensor: ...


@dataclass(frozen=True)
class SplitEdges:
    """``A = [A_owned | A_halo]``: the rank's edges by where their source lies, so that one part needs no waiting.

    Attributes:
        owned: CSR ``[N, N]``; halo: CSR ``[N, H]``; rows are targets.
        owned_ids, halo_ids: positions of their edges in the edge list, int64.
        inverse_degree: 1 / max(in-degree, 1), float64 ``[N]``.
    """

    owned: CSR
    halo: CSR
    owned_ids: Tensor
    halo_ids: Tensor
    inverse_degree: Tensor

    @classmethod
    def from_edges(cls, edge_index: Tensor, num_owned: int, num_halo: int) -> SplitEdges:
        source, target = edge_index
        is_halo = source >= num_owned
        owned_ids, halo_ids = (~is_halo).nonzero().view(-1), is_halo.nonzero().view(-1)
        degree = torch.bincount(target, minlength=num_owned)
        return cls(
            owned=CSR.from_coo(target[owned_ids], source[owned_ids], num_owned, num_owned),
            halo=CSR.from_coo(target[halo_ids], source[halo_ids] - num_owned, num_owned, num_halo),
            owned_ids=owned_ids,
            halo_ids=halo_ids,
            inverse_degree=degree.clamp(min=1).double().reciprocal(),
        )

    def weights(self, weight: Tensor) -> SplitWeights:
        """Returns one weight per edge, ``[E]`` in list order, in the slot order of both parts and their transposes."""
        owned, halo = weight[self.owned_ids], weight[self.halo_ids]
        return SplitWeights(
            self.owned.permute(owned),
            self.halo.permute(halo),
            self.owned.transpose().permute(owned),
            self.halo.transpose().permute(halo),
        )


@dataclass(frozen=True)
class SplitWeights:
    """Edge weights in slot order, for :class:`SplitEdges` and its transposes."""

    owned: Tensor
    halo: Tensor
    owned_transposed: Tensor
    halo_transposed: Tensor


class GraphContext:
    """One rank's graph as bound convs see it, and what they share.

    Args:
        exchange: S and S^T.
        x: the batch's own features; what S makes of them is fetched once. Recognised by identity, which all ranks agree
            on, not by storage: two empty tensors share theirs.
        edge_index: the batch's own edges in local ids, int64 ``[2, E]``.
        edge_weight: the batch's own edge weights, ``[E]``, or None.
        kept_widths: what is kept of constant input takes at most as much memory as so many copies of it; 0 keeps nothing.
    """

    def __init__(
        self, exchange: Exchange, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, kept_widths: int = 4
    ) -> None:
        self.exchange, self.kept_widths = exchange, kept_widths
        self.x, self.edge_index, self.edge_weight = x, edge_index, edge_weight
        self.num_owned, self.num_halo = exchange.num_owned, exchange.num_halo
        self._edges: dict[int, SplitEdges] = {}
        self._weights: dict[tuple[int, int], SplitWeights] = {}
        self._once: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
        self._constant_halo: Tensor | None = None
        self._expanded_x: Tensor | None = None
        self._x_version = x._version
        # A S x of constant x by what it is made of; these are constant themselves, by id, with their version.
        self._aggregates: dict[tuple[Any, ...], Tensor] = {}
        self._made_of_x: dict[int, tuple[Tensor, int]] = {}
        self._kept_columns = 0
        # Tensors that stay the same between steps, by id; held here, so that an id is not used again.
        self._lasting = {id(tensor): tensor for tensor in (edge_index, edge_weight) if tensor is not None}

    def check_rows(self, rows: int, layer: str) -> None:
        """Raises :class:`UnsupportedModelError` unless `layer` was given one row per owned node."""
        if rows != self.num_owned:
            raise UnsupportedModelError(
                f"'{layer}' was given {rows} node rows, but this rank owns {self.num_owned}. Convs must be called with one "
                "row per node of the batch, in its order."
            )

    def check_expanded_rows(self, rows: int, layer: str) -> None:
        """Raises :class:`UnsupportedModelError` unless `layer` was given one row per owned and halo node."""
        if rows != self.num_owned + self.num_halo:
            raise UnsupportedModelError(
                f"'{layer}' was given {rows} rows, but this rank has {self.num_owned} owned and {self.num_halo} halo nodes: "
                "it takes one row for each, in the order of expand(x)."
            )

    # S ########################################################################

    def is_constant(self, x: Tensor) -> bool:
        """Returns whether `x` is the batch's own features, or something kept that was made of them alone."""
        if x.requires_grad:
            return False
        kept = self._made_of_x.get(id(x))
        if kept is not None:
            return x._version == kept[1]
        if x is not self.x:
            return False
        if x._version != self._x_version:  # changed in place: what was made of it is stale, on every rank alike
            self._constant_halo = self._expanded_x = None
            self._aggregates, self._made_of_x, self._kept_columns = {}, {}, 0
            self._x_version = x._version
        return True

    def expand(self, x: Tensor, layer: str, dim: int = 0) -> Tensor:
        """Returns owned and halo rows, ``[N + H, ...]``, differentiable."""
        if x is not self.x or not self.is_constant(x):
            return self.exchange.expand(x, layer, dim)
        if self._expanded_x is None:
            with torch.inference_mode(False), torch.no_grad():
                self._expanded_x = self.exchange.expand(x, layer, dim)
        return self._expanded_x

    def fetch(self, x: Tensor, layer: str) -> tuple[Tensor, Callable[[], None]]:
        """Starts S; returns the halo rows ``[H, ...]`` and the function after which they are there."""
        shape = torch.Size((self.num_halo, *x.shape[1:]))
        if x is not self.x or not self.is_constant(x):
            halo = self.exchange.buffer("halo", shape, x.dtype)
            return halo, self.exchange.start_fetch(x, halo, layer)
        if self._constant_halo is None:
            with torch.inference_mode(False), torch.no_grad():
                self._constant_halo = x.new_empty(shape)
            return self._constant_halo, self.exchange.start_fetch(x, self._constant_halo, layer)
        return self._constant_halo, _nothing

    # A ########################################################################

    def split_edges(self, edge_index: Tensor) -> SplitEdges | None:
        """Returns the CSR form of edges that stay the same between steps; None for others: they would not repay it."""
        key = id(edge_index)
        if key not in self._lasting:
            return None
        if key not in self._edges:
            with torch.inference_mode(False), torch.no_grad():
                self._edges[key] = SplitEdges.from_edges(edge_index, self.num_owned, self.num_halo)
        return self._edges[key]

    def split_weights(self, edge_index: Tensor, weight: Tensor) -> SplitWeights | None:
        """Returns weights that stay the same between steps in slot order; None for others."""
        edges = self.split_edges(edge_index)
        if edges is None or id(weight) not in self._lasting or weight.requires_grad or weight.dim() != 1:
            return None
        key = (id(edge_index), id(weight))
        if key not in self._weights:
            with torch.inference_mode(False), torch.no_grad():
                self._weights[key] = edges.weights(weight)
        return self._weights[key]

    def gcn_norm(
        self,
        layer: str,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        num_nodes: int,
        improved: bool,
        add_self_loops: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Returns edges with self-loops and symmetric normalisation by the degrees of the whole graph.

        All in-edges of an owned node are here, so its degree is local; that of a halo row is its owner's.
        What it makes of the batch's own edges and weights is computed once.
        """
        self.check_rows(num_nodes, layer)
        return self.once(
            ("gcn_norm", improved, add_self_loops, dtype),
            edge_index,
            edge_weight,
            lambda: self._gcn_norm(layer, edge_index, edge_weight, num_nodes, improved, add_self_loops, dtype),
        )

    def once(
        self, name: tuple[Any, ...], edge_index: Tensor, edge_weight: Tensor | None, compute: Callable[[], T]
    ) -> T:
        """Returns ``compute()``, a tuple of tensors made of edges and weights alone; kept if both are the batch's own.

        Args:
            name: what is computed, with its options.
            edge_index, edge_weight: what it is computed from.
            compute: may communicate, since all ranks decide alike.
        """
        if edge_index is not self.edge_index or (edge_weight is not None and edge_weight is not self.edge_weight):
            return compute()
        if edge_weight is not None and edge_weight.requires_grad:
            return compute()
        versions = (edge_index._version, None if edge_weight is None else edge_weight._version)
        key = (*name, edge_weight is None, versions)
        if key not in self._once:
            # Evaluation may come first, and an inference tensor could not take part in training later.
            with torch.inference_mode(False), torch.no_grad():
                self._once[key] = compute()
            self._lasting.update({id(tensor): tensor for tensor in self._once[key]})
        return self._once[key]  # type: ignore[return-value]

    def _gcn_norm(
        self,
        layer: str,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        num_nodes: int,
        improved: bool,
        add_self_loops: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        if add_self_loops:
            edge_index, edge_weight = add_remaining_self_loops(
                edge_index, edge_weight, 2.0 if improved else 1.0, num_nodes
            )
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
        source, target = edge_index
        degree = scatter(edge_weight, target, 0, dim_size=num_nodes, reduce="sum")
        scale = degree.pow(-0.5)
        scale = scale.masked_fill(scale == float("inf"), 0.0)
        return edge_index, self.expand(scale, layer)[source] * edge_weight * scale[target]

    def out_degree(self, source: Tensor, weight: Tensor, layer: str) -> Tensor:
        """Returns the sum of the weights of each owned node's out-edges, of which other ranks hold some: S^T.

        Args:
            source: of each edge, ``edge_index[0]``, ``[E]``.
            weight: of each edge, ``[E]``.
            layer: named in errors and counted under.

        Returns:
            ``[N]``, differentiable in `weight`.
        """
        partial = scatter(weight, source, 0, dim_size=self.num_owned + self.num_halo, reduce="sum")
        return self.exchange.reduce(partial, layer)

    def laplacian(
        self, layer: str, edge_index: Tensor, edge_weight: Tensor | None, normalization: str | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns the rank's edges of the whole graph's Laplacian, as PyG's ``get_laplacian``."""
        edge_index, edge_weight = remove_self_loops(edge_index, edge_weight)
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
        degree = self.out_degree(edge_index[0], edge_weight, layer)
        loops, _ = add_self_loops(edge_index, num_nodes=self.num_owned)
        if normalization is None:
            return loops, torch.cat([-edge_weight, degree])
        scale = degree.pow(-0.5 if normalization == "sym" else -1.0)
        scale = scale.masked_fill(scale == float("inf"), 0.0)
        weight = self.expand(scale, layer)[edge_index[0]] * edge_weight
        if normalization == "sym":
            weight = weight * scale[edge_index[1]]
        return loops, torch.cat([-weight, weight.new_ones(self.num_owned)])

    def aggregate(self, x: Tensor, edge_index: Tensor, weight: Tensor | None, mean: bool, layer: str) -> Tensor | None:
        """Returns A S x, ``[N, F]``, by SpMM with the exchange behind it; None where edges or weights do not last.

        Args:
            x: ``[N, F]``.
            edge_index: ``[2, E]``.
            weight: ``[E]`` or None for ones.
            mean: divide by the number of in-edges.
            layer: named in errors and counted under.
        """
        edges = self.split_edges(edge_index)
        if edges is None:
            return None
        weights = None if weight is None else self.split_weights(edge_index, weight)
        if weight is not None and weights is None:
            return None
        if not self.kept_widths or not self.is_constant(x):
            return _Aggregate.apply(x, self, edges, weights, mean, layer)
        key = (id(x), id(edge_index), None if weight is None else (id(weight), weight._version), mean)
        kept = self._aggregates.get(key)
        if kept is None or not self.is_constant(kept):  # changed in place by who got it
            with torch.inference_mode(False), torch.no_grad():
                kept = _Aggregate.apply(x, self, edges, weights, mean, layer)
            # Counted in columns, so that all ranks decide alike.
            if self._kept_columns + x.size(1) <= self.kept_widths * self.x.size(1):
                if key not in self._aggregates:
                    self._kept_columns += x.size(1)
                self._aggregates[key] = kept
                self._made_of_x[id(kept)] = (kept, kept._version)
        return kept

    def check_edges(self, edge_index: Any, layer: str) -> None:
        """Raises :class:`UnsupportedModelError` unless edges are given as ``[2, E]``."""
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            raise UnsupportedModelError(
                f"'{layer}' was called with a {type(edge_index).__name__} of sparse layout. Hand on batch.edge_index."
            )


def _nothing() -> None:
    pass


class _Aggregate(torch.autograd.Function):
    """A S x with ``A = [A_owned | A_halo]``: the owned part is multiplied while the halo rows travel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        context: GraphContext,
        edges: SplitEdges,
        weights: SplitWeights | None,
        mean: bool,
        layer: str,
    ) -> Tensor:
        ctx.context, ctx.edges, ctx.weights, ctx.mean, ctx.layer = context, edges, weights, mean, layer
        ctx.dtype = x.dtype
        halo, wait = context.fetch(x, layer)
        # As in PyG, a float32 weight makes messages of bfloat16 rows float32; the rows travel as they are.
        dtype = x.dtype if weights is None else torch.promote_types(x.dtype, weights.owned.dtype)
        out = spmm(edges.owned, x.to(dtype), weights.owned if weights else None)
        wait()
        if halo.numel():
            spmm(edges.halo, halo.to(dtype), weights.halo if weights else None, out=out, accumulate=True)
        return out.mul_(edges.inverse_degree.to(out.dtype).unsqueeze(1)) if mean else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        edges, weights, exchange = ctx.edges, ctx.weights, ctx.context.exchange
        if ctx.mean:
            grad = grad * edges.inverse_degree.to(grad.dtype).unsqueeze(1)
        out = None
        if ctx.dtype == grad.dtype:  # straight into what is sent
            out = exchange.outgoing(torch.Size((edges.halo.num_cols, *grad.shape[1:])), grad.dtype)
        halo_grad = spmm(edges.halo.transpose(), grad, weights.halo_transposed if weights else None, out=out)
        finish = exchange.start_return(halo_grad.to(ctx.dtype), ctx.layer)
        own = spmm(edges.owned.transpose(), grad, weights.owned_transposed if weights else None).to(ctx.dtype)
        finish(own)
        return own, None, None, None, None, None
