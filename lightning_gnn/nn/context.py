"""Graph context of a rank for bound convs: its edges, the exchange, caches, and the computations over the edges of all ranks.

These computations are sums, max/min aggregations, attention and normalization.

N local nodes, H halo nodes, E edges, F features; ``...`` stands for any trailing dimensions. T rows are targets of edges: the
local nodes, except in heterogeneous graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops
from typing_extensions import Self

from lightning_gnn.comm.call import Step
from lightning_gnn.comm.exchange import Exchange, Matrix, Triples
from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.data.lazy_ids import kept_as, plain_ids, stored_ids
from lightning_gnn.kernels import CSR
from lightning_gnn.kernels.attention import Across, edge_softmax
from lightning_gnn.kernels.run import has_loops_for
from lightning_gnn.nn.cache import BatchCache
from lightning_gnn.nn.commnet import without_self_loops
from lightning_gnn.nn.edges import (
    LastLoops,
    Product,
    SplitEdges,
    SplitWeights,
    StatisticsOfRows,
    StatisticsOverRanks,
    Sum,
    SumOfRows,
    last_loops,
    sum_by,
)

if TYPE_CHECKING:
    from lightning_gnn.comm.matrix import SparseMatrix

T = TypeVar("T", bound=tuple[Tensor, ...])


class UnsupportedModelError(ValueError):
    """Error for a model that is not supported or not exact on a part of the graph: names module, reason and alternative."""


@dataclass(frozen=True)
class AttentionEdges:
    """Edges for attention, with rows at their ends and functions that reduce results.

    Attributes:
        csr: matrix of this rank; its rows are targets, its columns sources.
        sources: values of sources, by column of `csr`.
        targets: values of targets, by row of `csr`.
        missing: mask of the edges whose source is absent in this step, bool ``[E]`` in slot order; None for none.
        reduce: differentiable function from partial sums of the rows to sums of local nodes.
        across: function that completes maxima and sums of rows whose edges are on several ranks; None if there are no such rows.
    """

    csr: CSR
    sources: list[Tensor]
    targets: Tensor
    reduce: Callable[[Tensor], Tensor]
    across: Across | None = None
    missing: Tensor | None = None

    def softmax(self, scores: Tensor) -> Tensor:
        """Returns the softmax of each row's scores, ``[E, H]``."""
        if self.missing is not None:
            scores = scores.masked_fill(self.missing.unsqueeze(1), torch.finfo(scores.dtype).min)
        return edge_softmax(self.csr, scores, self.across)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class GraphContext:
    """Graph of one rank for bound convs: its edges, the exchange, and caches.

    Args:
        exchange: S and S^T, with the matrices of edges that are distributed over ranks.
        x: input features of the batch; values that depend on them alone are cached.
        edge_index: edges of the batch in local ids, int64 ``[2, E]``.
        edge_weight: edge weights of the batch, ``[E]``, or None.
        cache_widths: maximum size of the cache of constant input, as a multiple of the size of `x`; 0 for no cache.
        rows: gather of rows of any nodes; None if nothing reads them.
        node_ids: relabeled id of each local and halo row, int64 ``[N + H]``; for matrices over ranks.
        target_ids: relabeled id of each target row, int64 ``[T]``, if targets are of another type; for matrices over ranks.
        num_targets: T, if targets are of another type.

    Attributes:
        propagations: number of propagations of each layer in this step, by layer name.
        on_loaded_edges: layers that compute the rank's loaded edges, by PyG's code or with edge data, even if the exchange
            distributes the edges of other layers over ranks.
        columns_at_once: number of columns of constant input in one message, so that messages stay about as small as in later
            layers.
        reverse: context of the same nodes in the graph with reversed edges; None if no layer reads out-edges.
        share: function that returns S x for all layers that read the rows x; None if each layer gathers its own.
    """

    columns_at_once = 16

    def __init__(
        self,
        exchange: Exchange,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        cache_widths: int = 4,
        rows: AnyRows | None = None,
        node_ids: Tensor | None = None,
        target_ids: Tensor | None = None,
        num_targets: int | None = None,
    ) -> None:
        self.exchange, self.rows = exchange, rows
        self.reverse: Self | None = None
        self.share: Callable[[Tensor, str], Tensor | None] | None = None
        self._given_targets = num_targets
        self.propagations = Counter[str]()
        self.on_loaded_edges = set[str]()
        self._cache_widths, self._node_ids = cache_widths, node_ids
        self._target_ids = node_ids if target_ids is None else target_ids
        self.turn_to(x, edge_index, edge_weight)

    def turn_to(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> None:
        """Switch to another batch, whose rows the exchange already uses; clears the caches."""
        self.x, self.edge_index, self.edge_weight = x, edge_index, edge_weight
        self.num_owned, self.num_halo = self.exchange.num_owned, self.exchange.num_halo
        self.num_targets = self.num_owned if self._given_targets is None else self._given_targets
        own_edges = [tensor for tensor in (edge_index, edge_weight) if tensor is not None]
        self.cache = BatchCache(x, own_edges, self._cache_widths)

    def check_rows(self, rows: int, layer: str, per_target: bool = False) -> None:
        """Raises :class:`UnsupportedModelError` unless `layer` has one row per local node, or per target with `per_target`."""
        owned = self.num_targets if per_target else self.num_owned
        if rows != owned:
            raise UnsupportedModelError(
                f"'{layer}' was given {rows} node rows, but this rank has {owned} local nodes. Convs must be called with one row "
                "per node of the batch, in its order. With samples, x is [B, N, F]; for layers of x [N, F], such as GATConv, set "
                "GraphDataModule(..., concatenate=True)."
            )

    def check_expanded_rows(self, rows: int, layer: str) -> None:
        """Raises :class:`UnsupportedModelError` unless `layer` has one row per local and halo node."""
        if rows != self.num_owned + self.num_halo:
            raise UnsupportedModelError(
                f"{layer} needs one row per local node ({self.num_owned}) and halo node ({self.num_halo}) of this rank, got "
                f"{rows} rows. Pass a tensor with the rows of gather_halo(x), in this order."
            )

    def check_edges(self, edge_index: Any, layer: str, edge_weight: Any = None) -> None:
        """Raises :class:`UnsupportedModelError` unless edges have the form ``[2, E]``, and weights, if any, have E entries."""
        if edge_index is not self.edge_index and not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
            raise UnsupportedModelError(
                f"'{layer}' was called with a {type(edge_index).__name__} of sparse layout. Pass batch.edge_index."
            )
        if isinstance(edge_weight, Tensor) and edge_weight.dim() and edge_weight.size(0) != edge_index.size(1):
            raise UnsupportedModelError(
                f"'{layer}' was given {edge_weight.size(0)} weights for {edge_index.size(1)} edges. A rank has a part of the "
                "graph's edges. Index tensors over all edges by batch.e_id: weight[batch.e_id]."
            )

    def begin_step(self, step: Step | None = None) -> None:
        """Start a step and reset its propagation and exchange counters; None for another step of the same phase and epoch."""
        world = self.exchange.world
        step = step or Step(world.step.phase, world.step.epoch, world.step.number + 1)
        world.begin_step(step)
        self.propagations.clear()
        if self.reverse is not None:
            self.reverse.propagations.clear()
        if step.phase != "train":
            self.drain()
        for exchange in self.exchanges:
            exchange.begin_step(step)

    @property
    def all_on_loaded_edges(self) -> set[str]:
        """Names of the layers in :attr:`on_loaded_edges` of this graph and of the graph with reversed edges."""
        return self.on_loaded_edges | (self.reverse.on_loaded_edges if self.reverse else set())

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges of layers."""
        matrices = [made for made in self.cache.edge_values() if isinstance(made, Matrix)]
        own = [self.exchange, *(each for matrix in matrices for each in matrix.exchanges)]
        return own if self.reverse is None else [*own, *self.reverse.exchanges]

    def drain(self) -> None:
        """Wait for all exchanges in progress."""
        for exchange in self.exchanges:
            exchange.drain()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank's exchanges for a checkpoint; empty if they have none."""
        self.drain()
        states = {"in": self.exchange.state_dict()}
        if self.reverse is not None:
            states["out"] = self.reverse.exchange.state_dict()
        return states if any(states.values()) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` of this rank."""
        self.exchange.load_state_dict(state.get("in", {}))
        if self.reverse is not None:
            self.reverse.exchange.load_state_dict(state.get("out", {}))

    def count_propagation(self, layer: str) -> None:
        """Count a propagation along edges; raises :class:`UnsupportedModelError` if there are too many."""
        self.propagations[layer] += 1
        limit = self.exchange.most_propagations
        if limit is not None and (count := self.propagations.total()) > limit:
            raise UnsupportedModelError(
                f"'{layer}' is propagation number {count} of a step, but neighborhoods are replicated for "
                f"num_hops={limit}: rows would be missing. Set num_hops of the strategy to the number of propagations "
                "of your model, two for a GCN of two layers."
            )

    def _to_keep(self, make: Callable[[], T]) -> T:
        """Returns ``make()`` for a cache used in training and evaluation: without autograd, and exact.

        Its exchanges are not counted in the step, because other steps do not repeat them.
        """
        world = self.exchange.world
        calls = world.calls.copy()
        with torch.inference_mode(False), torch.no_grad(), world.transport.approximating(False):
            made = make()
        world.calls = calls
        return made

    # S ########################################################################

    def expand(self, x: Tensor, layer: str, dim: int = 0, unshared: bool = False) -> Tensor:
        """Returns local and halo rows, ``[N + H, ...]``, differentiable; `unshared`: without sharing between layers."""
        if not unshared and self.share is not None and not dim % x.dim():
            shared = self.share(x, layer)
            if shared is not None:
                return shared
        kept = None
        if x is self.x and dim % x.dim() == 0:
            kept = self.cache.derive_from_x("expanded", x, 0, lambda: self._to_keep(lambda: (self.exchange.expand(x, layer),)))
        return self.exchange.expand(x, layer, dim) if kept is None else kept[0]

    @contextmanager
    def read_once(self) -> Iterator[None]:
        """Context manager that caches S x of the same rows x, for code that reads x repeatedly without changing it."""
        before, cached = self.share, list[tuple[Tensor, Tensor]]()

        def share(x: Tensor, layer: str) -> Tensor:
            if not cached or cached[0][0] is not x:
                cached[:] = [(x, self.expand(x, layer, unshared=True))]
            return cached[0][1]

        self.share = share
        try:
            yield
        finally:
            self.share = before

    # Caches ###################################################################

    def once(self, name: tuple[Any, ...], edge_index: Tensor, edge_weight: Tensor | None, compute: Callable[[], T]) -> T:
        """Returns ``compute()``, tensors derived from edges and weights alone; cached for edges and weights of the batch.

        Args:
            name: cache key: name and options of the computation.
            edge_index, edge_weight: inputs of the computation.
            compute: function without arguments. It may communicate, because all ranks use the cache equally.
        """

        made = self.cache.derive_constants(name, [edge_index, edge_weight], lambda: self._to_keep(compute))
        return compute() if made is None else made

    def cache_selection(self, name: str, edge_index: Tensor, choose: Callable[[], T]) -> T:
        """Returns ``choose()``, a cached selection of the batch's edges and edge data.

        Values derived from the selection are cached like values derived from all edges.

        Args:
            name: name of the selection.
            edge_index: all edges.
            choose: function that returns tensors, the edges first; all ranks select consistently.
        """
        found = self.once(("selection", name), edge_index, None, choose)
        if self.cache.is_own(edge_index):
            self.cache.choose(found)
        return found

    def split_edges(self, edge_index: Tensor, in_list: bool = False) -> SplitEdges | None:
        """Returns the CSR form of constant edges; None for other edges, which would not repay the conversion.

        Args:
            edge_index: edges, ``[2, E]``.
            in_list: whether to store the positions of edges in the edge list, for weights.
        """
        sizes = self.num_owned, self.num_halo, self.num_targets
        make = partial(SplitEdges.from_edges, edge_index, *sizes, in_list)
        return self.cache.derive(("split", in_list), [edge_index], make)

    def matrix(self, edge_index: Tensor) -> CSR:
        """Returns the edges as one matrix over local and halo rows, ``[T, N + H]``; cached for constant edges."""

        def make() -> CSR:
            source, target = stored_ids(edge_index)
            return CSR.from_coo(target, source, self.num_targets, self.num_owned + self.num_halo)

        return self.cache.derive("matrix", [edge_index], make) or make()

    def split_weights(self, edge_index: Tensor, weight: Tensor) -> SplitWeights | None:
        """Returns weights that are constant between steps in slot order; None for other weights."""
        edges = self.split_edges(edge_index, in_list=True)
        if edges is None or weight.dim() != 1:
            return None
        return self.cache.derive("weights", [edge_index, weight], lambda: edges.weights(weight))

    def _distribute_edges(self, edge_index: Tensor, step_bytes: Callable[[], tuple[int, int]]) -> SparseMatrix | None:
        """Returns constant edges distributed over ranks; None if a rank has all edges of its local nodes.

        Args:
            edge_index: edges, ``[2, E]``.
            step_bytes: function that returns the bytes that a training step sends, in both passes, for a copy of a source's row
                and for a target's partial result.
        """
        node_ids, target_ids = self._node_ids, self._target_ids
        products = self.exchange.products
        if products is None or products.spread is None or node_ids is None or target_ids is None:
            return None
        make = products.spread(*step_bytes())

        def spread() -> SparseMatrix:
            source, target = stored_ids(edge_index)
            return cast("SparseMatrix", make(Triples(target_ids[target], node_ids[source], None)))

        return self.cache.derive(("spread", make), [edge_index], spread)

    # Computations of convs ###################################################

    def attend(self, edge_index: Tensor, layer: str, in_list: bool, sources: Sequence[Tensor], targets: Tensor) -> AttentionEdges:
        """Returns the edges for attention, with gathered rows at their ends.

        Args:
            edge_index: edges, ``[2, E]``.
            layer: name for errors and traffic.
            in_list: whether matrix slots must match the edge list, for edge data.
            sources: values of local rows as sources, ``[N, K, C]`` each for K heads; the last are the summed values.
            targets: values of local rows as targets, ``[N, K]`` or ``[N, K, C]``.
        """
        self.count_propagation(layer)
        spread = self.exchange.products is not None and not in_list
        matrix = self._distribute_edges(edge_index, partial(self._attention_bytes, sources, targets)) if spread else None
        if matrix is None:
            self.on_loaded_edges.add(layer)
            csr, present = self.matrix(edge_index), self.exchange.present
            missing = None
            if present is not None:
                missing = ~torch.cat([present.new_ones(self.num_owned), present])[csr.indices.long()]
            expand = self.exchange.expand if self.share is None else self.expand
            rows = self.exchange.expand_all(sources, layer) if sources[1:] else [expand(sources[0], layer)]
            return AttentionEdges(csr, rows, targets, _as_it_is, missing=missing)

        def across(partial: Tensor, operation: str) -> Tensor:
            # Exact: the ranks of a row must subtract and divide by equal values, and minus infinity stands for no edges.
            with self.exchange.world.transport.approximating(False):
                reduce = matrix.rows.reduce_max if operation == "max" else matrix.rows.reduce
                return matrix.rows.expand(reduce(partial, layer), layer)

        return AttentionEdges(
            matrix.csr,
            matrix.columns.expand_all(sources, layer),
            matrix.rows.expand(targets, layer),
            lambda x: matrix.rows.reduce(x, layer),
            across,
        )

    def _attention_bytes(self, sources: Sequence[Tensor], targets: Tensor) -> tuple[int, int]:
        """Returns two byte counts per training step: of a copy of a source's features, and of a target's partial result."""
        row_bytes, dtype = self.exchange.world.transport.row_bytes, targets.dtype
        widths = [rows.shape[1:].numel() for rows in sources]
        # Forward rows and backward gradients. The maxima and sums of a softmax go to the owner and back, exactly. The same holds
        # for the sums of its backward pass.
        there = row_bytes(targets.shape[1:].numel(), dtype) + row_bytes(widths[-1], dtype)
        exact = 6 * targets.size(1) * torch.promote_types(dtype, torch.float32).itemsize
        return 2 * row_bytes(sum(widths), dtype), 2 * there + exact

    def gcn_norm(
        self,
        layer: str,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        num_nodes: int,
        improved: bool,
        add_self_loops: bool,
        dtype: torch.dtype,
        as_scales: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Returns edges with self-loops and symmetric normalization by the degrees of the whole graph.

        All in-edges of a local node are on its rank, so its degree is local; the degree of a halo node comes from its owner. The
        result for the edges and weights of the batch is cached. With `as_scales`, sums may scale rows instead.
        """
        self.check_rows(num_nodes, layer)

        def compute() -> tuple[Tensor, Tensor]:
            edges, weight = edge_index, edge_weight
            if add_self_loops:
                if weight is not None:
                    at, last = self.once(("last loops",), edges, None, lambda: last_loops(edge_index, num_nodes))
                    weight = LastLoops.apply(weight, at, last)
                edges, weight = add_remaining_self_loops(plain_ids(edges), weight, 2.0 if improved else 1.0, num_nodes)
            if weight is None:
                weight = torch.ones(edges.size(1), dtype=dtype, device=edges.device)
            source, target = plain_ids(edges)
            scale = _inverse_power(sum_by(target, weight, num_nodes), 0.5)
            weight = self.exchange.expand(self.scale_of_rows(scale, layer), layer)[source] * weight * scale[target]
            return edges if edges is edge_index else kept_as(edges, edge_index), weight

        name = ("gcn_norm", improved, add_self_loops, dtype, as_scales)
        edges, weight = self.once(name, edge_index, edge_weight, compute)
        edge_sum = self.gcn_sum(layer, edge_index, edge_weight, improved, add_self_loops, dtype) if as_scales else None
        if edge_sum is not None:
            self.cache.derive(("sum", False), [edges, weight], lambda: edge_sum)
        return edges, weight

    def gcn_sum(
        self, layer: str, edge_index: Tensor, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype
    ) -> Sum | None:
        """Returns the sum of :meth:`gcn_norm` as scales of rows; None if its weights do not factor.

        Weights factor for the edges of the batch without weights. The sum then reads no weight per edge and needs no second edge
        list. Scales would round dtypes shorter than float32 once more, so these use weights.
        """
        plain = edge_weight is None and not (improved and add_self_loops)
        if not plain or dtype not in (torch.float32, torch.float64):
            return None

        def make() -> Sum:
            sizes = self.num_owned, self.num_halo
            edges = SplitEdges.from_edges(edge_index, *sizes, in_list=False, self_loops=add_self_loops)
            scale = _inverse_power(edges.in_degree.to(dtype), 0.5)
            return Sum(edges, before=self.scale_of_rows(scale, layer), after=scale)

        return self.cache.derive(("gcn_sum", add_self_loops, dtype), [edge_index], make, strict=True)

    def scale_of_rows(self, scale: Tensor, layer: str) -> Tensor:
        """Returns the scales of local rows in a layer's whole graph, ``[N]``, from the scales by the in-edges here."""
        return scale

    def with_self_loops(self, edge_index: Tensor) -> Tensor:
        """Returns the edges without self-loops, then one self-loop for each local node, in PyG's order."""

        def compute() -> tuple[Tensor]:
            looped = add_self_loops(remove_self_loops(plain_ids(edge_index))[0], num_nodes=self.num_targets)[0]
            return (kept_as(looped, edge_index),)

        return self.once(("self-loops",), edge_index, None, compute)[0]

    def without_self_loops(self, edge_index: Tensor) -> Tensor:
        """Returns the edges between different nodes; the same tensor if no rank has self-loops.

        Caches and distributed edges are identified by the edge tensor, so ranks must agree on whether it is the batch's own.
        """

        def compute() -> tuple[Tensor]:
            plain = plain_ids(edge_index)
            left = without_self_loops(plain)
            if self.cache.is_own(edge_index):
                removed = torch.tensor([left is not plain], dtype=torch.int32, device=left.device)
                if not self.exchange.max_over_ranks(removed, "Looking for self-loops"):
                    return (edge_index,)
            return (kept_as(left.clone() if left is plain else left, edge_index),)

        return self.once(("no self-loops",), edge_index, None, compute)[0]

    def out_degree(self, source: Tensor, weight: Tensor, layer: str) -> Tensor:
        """Returns the sum of the weights of each local node's out-edges, some of which are on other ranks: S^T.

        Args:
            source: sources of edges, ``edge_index[0]``, ``[E]``.
            weight: weights of edges, ``[E]``.
            layer: name for errors and traffic.

        Returns:
            ``[N]``, differentiable in `weight`.
        """
        partial = sum_by(source, weight, self.num_owned + self.num_halo)
        return self.exchange.reduce(partial, layer)

    def laplacian(
        self, layer: str, edge_index: Tensor, edge_weight: Tensor | None, normalization: str | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns the rank's edges of the whole graph's Laplacian, like PyG's ``get_laplacian``."""
        edge_index, edge_weight = remove_self_loops(edge_index, edge_weight)
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
        degree = self.out_degree(edge_index[0], edge_weight, layer)
        loops, _ = add_self_loops(edge_index, num_nodes=self.num_owned)
        if normalization is None:
            return loops, torch.cat([-edge_weight, degree])
        scale = _inverse_power(degree, 0.5 if normalization == "sym" else 1.0)
        weight = self.exchange.expand(scale, layer)[edge_index[0]] * edge_weight
        if normalization == "sym":
            weight = weight * scale[edge_index[1]]
        return loops, torch.cat([-weight, weight.new_ones(self.num_owned)])

    def sum_of(self, edge_index: Tensor, weight: Tensor | None, mean: bool) -> Sum | None:
        """Returns the sum over edges for :meth:`total`; None if edges or weights change between steps.

        Args:
            edge_index: edges, ``[2, E]``.
            weight: weights, ``[E]``, or None for ones.
            mean: whether to divide by the number of in-edges.
        """

        def make() -> Sum | None:
            edges = self.split_edges(edge_index, in_list=weight is not None)
            weights = None if weight is None else self.split_weights(edge_index, weight)
            if edges is None or (weight is not None and weights is None):
                return None
            return Sum(edges, weights, after=edges.inverse_degree if mean else None)

        return self.cache.derive(("sum", mean), [edge_index, weight], make)

    def total(self, x: Tensor, edge_sum: Sum, layer: str) -> Tensor:
        """Returns a sum over edges of S x, ``[..., N, F]``, by SpMM and the exchange; cached while x is constant.

        Args:
            x: local rows, ``[N, F]``, or of several samples, ``[..., N, F]``, which share one message to each peer.
            edge_sum: sum over edges.
            layer: name for errors and traffic.
        """
        if x.dim() > 2:
            return as_samples(self.total(as_columns(x), edge_sum, layer), x)
        self.count_propagation(layer)
        world, exchange = self.exchange.world, self.exchange
        products, node_ids, target_ids = exchange.products, self._node_ids, self._target_ids
        kind: Any = SumOfRows
        over: Exchange | Matrix | None = exchange
        if products is not None and node_ids is not None and target_ids is not None:
            entries = partial(edge_sum.entries, node_ids, target_ids, self.num_owned)
            over = self.cache.derive(("product", id(edge_sum)), [], lambda: products.matrix(entries()))
            kind = Product

        def by_columns() -> tuple[Tensor]:
            if x.dtype not in (torch.float32, torch.float64):
                return (kind.apply(x, over, edge_sum, world.call(layer)),)
            out = x.new_empty((self.num_targets, x.size(1)))
            for low in range(0, x.size(1), self.columns_at_once):
                columns = slice(low, low + self.columns_at_once)
                out[:, columns] = kind.apply(x[:, columns].contiguous(), over, edge_sum, world.call(layer))
            return (out,)

        name, make = ("sum", id(edge_sum)), lambda: self._to_keep(by_columns)
        kept = None if x.requires_grad else self.cache.derive_from_x(name, x, 1, make)
        return kind.apply(x, over, edge_sum, world.call(layer)) if kept is None else kept[0]

    def statistics(self, x: Tensor, edge_index: Tensor, wanted: Sequence[str], layer: str) -> tuple[Tensor, ...] | None:
        """Returns statistics of S x over each local node's edges, ``[N, F]`` each.

        Returns None if edges change between steps, or if the device has no loops for them.

        Args:
            x: local rows, ``[N, F]``.
            edge_index: edges, ``[2, E]``.
            wanted: names from :data:`~lightning_gnn.kernels.sums.STATISTICS`; nodes without edges have 0.
            layer: name for errors and traffic.
        """
        edges = self.split_edges(edge_index)
        if edges is None or not has_loops_for(x, edge_index):
            return None
        self.count_propagation(layer)
        matrix = self._distribute_edges(edge_index, partial(self._statistics_bytes, x, wanted))

        def compute() -> tuple[Tensor, ...]:
            if self.exchange.present is not None:
                return self._sampled_statistics(x, edges, self.exchange.present, wanted, layer)
            if matrix is not None:
                return StatisticsOverRanks.apply(x, matrix, edges.without_edges, wanted, layer)
            return StatisticsOfRows.apply(x, self.exchange, edges, wanted, self.exchange.world.call(layer))

        name = ("statistics", id(edge_index), *wanted)
        kept = self.cache.derive_from_x(name, x, len(wanted), lambda: self._to_keep(compute))
        return compute() if kept is None else kept

    def _statistics_bytes(self, x: Tensor, wanted: Sequence[str]) -> tuple[int, int]:
        """Returns two byte counts per training step: of a copy of a source's features, and of a target's partial result."""
        row_bytes, width = self.exchange.world.transport.row_bytes, max(1, x.size(1))  # a batch may have no samples
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Sums are sent to the owner. Maxima and minima are sent to the owner and back, then the number of edges that have them,
        # exactly. The owner returns all gradients.
        sums = sum(name in ("sum", "squares") for name in wanted)
        exact = 3 * (len(wanted) - sums) * width * dtype.itemsize
        result = sums * row_bytes(width, dtype) + exact + row_bytes(len(wanted) * width, dtype)
        return 2 * row_bytes(width, x.dtype), result

    def _sampled_statistics(
        self, x: Tensor, edges: SplitEdges, present: Tensor, wanted: Sequence[str], layer: str
    ) -> tuple[Tensor, ...]:
        """See :meth:`statistics`; over the present halo rows: their max/min aggregation, and unbiased sums."""
        world, exchange = self.exchange.world, self.exchange
        of_all = Sum(edges)
        found = {
            name: SumOfRows.apply(rows, exchange, of_all, world.call(layer))
            for name, rows in (("sum", x), ("squares", x.square()))
            if name in wanted
        }
        extremes = [name for name in wanted if name not in found]
        if extremes:
            there = edges.only(present)
            found.update(zip(extremes, StatisticsOfRows.apply(x, exchange, there, extremes, world.call(layer))))
        return tuple(found[name] for name in wanted)


def as_columns(x: Tensor) -> Tensor:
    """Returns the rows of several samples, ``[..., N, F]``, as columns of each node: ``[N, B F]`` for B samples."""
    return x if x.dim() == 2 else x.movedim(-2, 0).flatten(1)


def as_samples(out: Tensor, x: Tensor) -> Tensor:
    """Returns results for the columns of :func:`as_columns` in the form of `x`: ``[..., T, F]`` from ``[T, B F]``."""
    if x.dim() == 2:
        return out
    # Contiguous as on one device, where views of the result share its memory.
    return out.view(len(out), *x.shape[:-2], x.size(-1)).movedim(0, -2).contiguous()


def _inverse_power(degree: Tensor, exponent: float) -> Tensor:
    """Returns ``degree ** -exponent``, and 0 for degrees of 0."""
    scale = degree.pow(-exponent)
    return scale.masked_fill(scale == float("inf"), 0.0)
