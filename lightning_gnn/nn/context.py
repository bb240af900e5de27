"""A rank's graph as bound convs see it: its edges, the exchange, and what is made of them once; and what convs compute over the
edges of all ranks: sums, extremes, attention, and what normalises them.

N owned rows, H halo rows, E edges, F columns; ``...`` stands for any trailing dimensions. Edges end at T rows: the owned ones,
unless nodes have types.
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
from lightning_gnn.nn.kept import Kept

if TYPE_CHECKING:
    from lightning_gnn.comm.matrix import SparseMatrix

T = TypeVar("T", bound=tuple[Tensor, ...])


class UnsupportedModelError(ValueError):
    """A model that cannot be trained, or not exactly on a part of the graph: says which module, why, and what to use."""


@dataclass(frozen=True)
class Attended:
    """Edges for attention, and what brings rows to their ends and results to owners.

    Attributes:
        csr: rows are targets, columns sources; of this rank.
        sources: what attention was given of sources, of the columns.
        targets: what it was given of targets, of the rows.
        missing: edges whose source does not come in this step, bool ``[E]`` in slot order; None for none.
        reduce: from partial sums of the rows to sums of owned rows, differentiable.
        across: completes maxima and sums of a row whose edges lie on several ranks; None where they do not.
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
    """One rank's graph as bound convs see it: its edges, the exchange, and what is made of them once.

    Args:
        exchange: S and S^T, and where sums over edges are products, how these are spread over ranks.
        x: the batch's own features; what layers make of them alone is made once.
        edge_index: the batch's own edges in local ids, int64 ``[2, E]``.
        edge_weight: the batch's own edge weights, ``[E]``, or None.
        kept_widths: what is kept of constant input takes at most as much memory as so many copies of it; 0 keeps nothing.
        rows: rows of any nodes; None where nothing reads them.
        node_ids: relabelled id of each owned and halo row, int64 ``[N + H]``; for products.
        target_ids: relabelled id of each row that edges end at, int64 ``[T]``, where these are of another type; for products.
        num_targets: T, where edges end at rows of another type.

    Attributes:
        propagations: how often each layer has let rows travel along edges in this step, by its name.
        on_loaded_edges: layers that compute the edges which the rank has loaded, by PyG's code or with what belongs to each edge,
            although the exchange may spread others' over ranks.
        columns_at_once: of constant input travel together: what travels stays small, like what later layers send.
        reverse: of the same nodes in the graph whose edges go the other way; None where no layer reads out-edges.
        share: makes S x for all layers that read the rows x; None where each layer makes its own.
    """

    columns_at_once = 16

    def __init__(
        self,
        exchange: Exchange,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        kept_widths: int = 4,
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
        self._kept_widths, self._node_ids = kept_widths, node_ids
        self._target_ids = node_ids if target_ids is None else target_ids
        self.turn_to(x, edge_index, edge_weight)

    def turn_to(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> None:
        """Takes another batch, whose rows the exchange knows of; what was made of the last one is forgotten."""
        self.x, self.edge_index, self.edge_weight = x, edge_index, edge_weight
        self.num_owned, self.num_halo = self.exchange.num_owned, self.exchange.num_halo
        self.num_targets = self.num_owned if self._given_targets is None else self._given_targets
        own_edges = [tensor for tensor in (edge_index, edge_weight) if tensor is not None]
        self.kept = Kept(x, own_edges, self._kept_widths)

    def check_rows(self, rows: int, layer: str, of_targets: bool = False) -> None:
        """Raises :class:`UnsupportedModelError` unless `layer` was given one row per owned node, that edges end at perhaps."""
        owned = self.num_targets if of_targets else self.num_owned
        if rows != owned:
            raise UnsupportedModelError(
                f"'{layer}' was given {rows} node rows, but this rank owns {owned}. Convs must be called with one "
                "row per node of the batch, in its order."
            )

    def check_expanded_rows(self, rows: int, layer: str) -> None:
        """Raises :class:`UnsupportedModelError` unless `layer` was given one row per owned and halo node."""
        if rows != self.num_owned + self.num_halo:
            raise UnsupportedModelError(
                f"'{layer}' was given {rows} rows, but this rank has {self.num_owned} owned and {self.num_halo} halo nodes: "
                "it takes one row for each, in the order of gather_halo(x)."
            )

    def check_edges(self, edge_index: Any, layer: str, edge_weight: Any = None) -> None:
        """Raises :class:`UnsupportedModelError` unless edges are given as ``[2, E]``, and weights of so many, if any."""
        if edge_index is not self.edge_index and not (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided):
            raise UnsupportedModelError(
                f"'{layer}' was called with a {type(edge_index).__name__} of sparse layout. Hand on batch.edge_index."
            )
        if isinstance(edge_weight, Tensor) and edge_weight.dim() and edge_weight.size(0) != edge_index.size(1):
            raise UnsupportedModelError(
                f"'{layer}' was given {edge_weight.size(0)} weights for {edge_index.size(1)} edges. A rank has a part of the "
                "graph's edges: take the rows of what belongs to all of them by batch.e_id, weight[batch.e_id]."
            )

    def begin_step(self, step: Step | None = None) -> None:
        """Starts a step; None for another of the same phase and epoch. Its propagations and calls are counted anew."""
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
        """:attr:`on_loaded_edges`, those that read out-edges among them."""
        return self.on_loaded_edges | (self.reverse.on_loaded_edges if self.reverse else set())

    @property
    def exchanges(self) -> list[Exchange]:
        """All by which rows of layers travel."""
        matrices = [made for made in self.kept.made_of_edges() if isinstance(made, Matrix)]
        own = [self.exchange, *(each for matrix in matrices for each in matrix.exchanges)]
        return own if self.reverse is None else [*own, *self.reverse.exchanges]

    def drain(self) -> None:
        """Waits for all rows that are under way."""
        for exchange in self.exchanges:
            exchange.drain()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of this rank's exchanges; nothing if they keep nothing."""
        self.drain()
        states = {"in": self.exchange.state_dict()}
        if self.reverse is not None:
            states["out"] = self.reverse.exchange.state_dict()
        return states if any(states.values()) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave on this rank."""
        self.exchange.load_state_dict(state.get("in", {}))
        if self.reverse is not None:
            self.reverse.exchange.load_state_dict(state.get("out", {}))

    def propagated(self, layer: str) -> None:
        """Counts that rows travel along edges once more; raises :class:`UnsupportedModelError` if that is too often."""
        self.propagations[layer] += 1
        count, most = self.propagations.total(), self.exchange.most_propagations
        if most is not None and count > most:
            raise UnsupportedModelError(
                f"'{layer}' is propagation number {count} of a step, but neighbourhoods are replicated for "
                f"num_hops={most}: rows would be missing. Set num_hops of the strategy to the number of propagations "
                "of your model, two for a GCN of two layers."
            )

    def _to_keep(self, make: Callable[[], T]) -> T:
        """Returns ``make()``, made once, in a training step or in evaluation, for all that come: without autograd, and exactly.

        It counts as no call of the step: other steps do not make it.
        """
        world = self.exchange.world
        calls = world.calls.copy()
        with torch.inference_mode(False), torch.no_grad(), world.transport.approximating(False):
            made = make()
        world.calls = calls
        return made

    # S ########################################################################

    def expand(self, x: Tensor, layer: str, dim: int = 0, alone: bool = False) -> Tensor:
        """Returns owned and halo rows, ``[N + H, ...]``, differentiable; `alone`: for this layer, shared with no other."""
        if not alone and self.share is not None and not dim % x.dim():
            shared = self.share(x, layer)
            if shared is not None:
                return shared
        kept = None
        if x is self.x and dim % x.dim() == 0:
            kept = self.kept.of_x("expanded", x, 0, lambda: self._to_keep(lambda: (self.exchange.expand(x, layer),)))
        return self.exchange.expand(x, layer, dim) if kept is None else kept[0]

    @contextmanager
    def read_once(self) -> Iterator[None]:
        """While open, S x of the same rows x is made once: code that calls for it again and again does not change them."""
        before, known = self.share, list[tuple[Tensor, Tensor]]()

        def share(x: Tensor, layer: str) -> Tensor:
            if not known or known[0][0] is not x:
                known[:] = [(x, self.expand(x, layer, alone=True))]
            return known[0][1]

        self.share = share
        try:
            yield
        finally:
            self.share = before

    # What is made once ########################################################

    def once(self, name: tuple[Any, ...], edge_index: Tensor, edge_weight: Tensor | None, compute: Callable[[], T]) -> T:
        """Returns ``compute()``, a tuple of tensors made of edges and weights alone; kept if both are the batch's own.

        Args:
            name: what is computed, with its options.
            edge_index, edge_weight: what it is computed from.
            compute: may communicate, since all ranks decide alike.
        """

        made = self.kept.once(name, [edge_index, edge_weight], lambda: self._to_keep(compute))
        return compute() if made is None else made

    def chosen(self, name: str, edge_index: Tensor, choose: Callable[[], T]) -> T:
        """Returns ``choose()``, a choice of the batch's own edges and of what belongs to them, made once.

        What is made of it is kept as what is made of all edges.

        Args:
            name: of the choice.
            edge_index: all edges.
            choose: returns tensors, the edges first; all ranks choose alike.
        """
        found = self.once(("chosen", name), edge_index, None, choose)
        if self.kept.is_own(edge_index):
            self.kept.choose(found)
        return found

    def split_edges(self, edge_index: Tensor, in_list: bool = False) -> SplitEdges | None:
        """Returns the CSR form of edges that stay the same between steps; None for others: they would not repay it.

        Args:
            edge_index: ``[2, E]``.
            in_list: with the places of edges in the list, for their weights.
        """
        sizes = self.num_owned, self.num_halo, self.num_targets
        make = partial(SplitEdges.from_edges, edge_index, *sizes, in_list)
        return self.kept.of_edges(("split", in_list), [edge_index], make)

    def matrix(self, edge_index: Tensor) -> CSR:
        """Returns the edges as one matrix over owned and halo rows, ``[T, N + H]``; kept where edges last."""

        def make() -> CSR:
            source, target = stored_ids(edge_index)
            return CSR.from_coo(target, source, self.num_targets, self.num_owned + self.num_halo)

        return self.kept.of_edges("matrix", [edge_index], make) or make()

    def split_weights(self, edge_index: Tensor, weight: Tensor) -> SplitWeights | None:
        """Returns weights that stay the same between steps in slot order; None for others."""
        edges = self.split_edges(edge_index, in_list=True)
        if edges is None or weight.dim() != 1:
            return None
        return self.kept.of_edges("weights", [edge_index, weight], lambda: edges.weights(weight))

    def _over_ranks(self, edge_index: Tensor, step_bytes: Callable[[], tuple[int, int]]) -> SparseMatrix | None:
        """Returns edges that last as they are spread over ranks; None where a rank holds all edges of its nodes.

        Args:
            edge_index: ``[2, E]``.
            step_bytes: returns the bytes that a training step sends, forward and backward, for a copy of a source's row, and for
                the partial result of a target.
        """
        node_ids, target_ids = self._node_ids, self._target_ids
        products = self.exchange.products
        if products is None or products.spread is None or node_ids is None or target_ids is None:
            return None
        make = products.spread(*step_bytes())

        def spread() -> SparseMatrix:
            source, target = stored_ids(edge_index)
            return cast("SparseMatrix", make(Triples(target_ids[target], node_ids[source], None)))

        return self.kept.of_edges(("spread", make), [edge_index], spread)

    # What convs compute ######################################################

    def attended(self, edge_index: Tensor, layer: str, in_list: bool, sources: Sequence[Tensor], targets: Tensor) -> Attended:
        """Returns the edges as attention takes them, and brings rows to their ends.

        Args:
            edge_index: ``[2, E]``.
            layer: named in errors and counted under.
            in_list: keep the slots of the matrix in step with the list, for what belongs to its edges.
            sources: of owned rows, what sources are read for, ``[N, K, C]`` each for K heads, the last what is summed.
            targets: of owned rows, what targets are read for, ``[N, K]`` or ``[N, K, C]``.
        """
        self.propagated(layer)
        matrix = None if in_list else self._over_ranks(edge_index, partial(self._attention_bytes, sources, targets))
        if matrix is None:
            self.on_loaded_edges.add(layer)
            csr, present = self.matrix(edge_index), self.exchange.present
            missing = None
            if present is not None:
                missing = ~torch.cat([present.new_ones(self.num_owned), present])[csr.indices.long()]
            rows = self.exchange.expand_all(sources, layer) if sources[1:] else [self.expand(sources[0], layer)]
            return Attended(csr, rows, targets, _as_it_is, missing=missing)

        def across(partial: Tensor, operation: str) -> Tensor:
            # Exactly: a row's ranks must subtract and divide by the same, and minus infinity stands for no edges.
            with self.exchange.world.transport.approximating(False):
                reduce = matrix.rows.reduce_max if operation == "max" else matrix.rows.reduce
                return matrix.rows.expand(reduce(partial, layer), layer)

        return Attended(
            matrix.csr,
            matrix.columns.expand_all(sources, layer),
            matrix.rows.expand(targets, layer),
            lambda x: matrix.rows.reduce(x, layer),
            across,
        )

    def _attention_bytes(self, sources: Sequence[Tensor], targets: Tensor) -> tuple[int, int]:
        """Returns the bytes that a training step sends for a copy of a source's row, and for a target's partial result."""
        row_bytes, dtype = self.exchange.world.transport.row_bytes, targets.dtype
        widths = [rows.shape[1:].numel() for rows in sources]
        # Forward, and gradients backward. The maxima and sums of a softmax go to the owner and back, and so do the sums of its
        # backward, exactly.
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
        """Returns edges with self-loops and symmetric normalisation by the degrees of the whole graph.

        All in-edges of an owned node are here, so its degree is local; that of a halo row is its owner's.
        What it makes of the batch's own edges and weights is computed once. Sums may scale rows instead, if `as_scales`.
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
        what = self.normalised(layer, edge_index, edge_weight, improved, add_self_loops, dtype) if as_scales else None
        if what is not None:
            self.kept.of_edges(("sum", False), [edges, weight], lambda: what)
        return edges, weight

    def normalised(
        self,
        layer: str,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        improved: bool,
        add_self_loops: bool,
        dtype: torch.dtype,
    ) -> Sum | None:
        """Returns the sum that :meth:`gcn_norm` weighs edges for, as scales of rows; None where its weights do not factor.
        They do for the batch's own edges without weights. No weight is read per edge then, nor are edges listed once more.
        Numbers shorter than float32 would be rounded once more by a scale, and are weighted instead.
        """
        plain = edge_weight is None and not (improved and add_self_loops)
        if not plain or dtype not in (torch.float32, torch.float64):
            return None

        def make() -> Sum:
            sizes = self.num_owned, self.num_halo
            edges = SplitEdges.from_edges(edge_index, *sizes, in_list=False, self_loops=add_self_loops)
            scale = _inverse_power(edges.in_degree.to(dtype), 0.5)
            return Sum(edges, before=self.scale_of_rows(scale, layer), after=scale)

        return self.kept.of_edges(("normalised", add_self_loops, dtype), [edge_index], make, own=True)

    def scale_of_rows(self, scale: Tensor, layer: str) -> Tensor:
        """Returns what degrees of all rows in a layer's graph make of them, ``[N]``, given what the in-edges that are here do."""
        return scale

    def with_self_loops(self, edge_index: Tensor) -> Tensor:
        """Returns the edges without self-loops, then one self-loop for each owned node, as PyG orders them."""

        def compute() -> tuple[Tensor]:
            looped = add_self_loops(remove_self_loops(plain_ids(edge_index))[0], num_nodes=self.num_targets)[0]
            return (kept_as(looped, edge_index),)

        return self.once(("self-loops",), edge_index, None, compute)[0]

    def without_self_loops(self, edge_index: Tensor) -> Tensor:
        """Returns the edges between different nodes; the same tensor if there are no others on any rank.

        What is kept or distributed is known by its edges, so ranks must agree on whether these are the batch's own.
        """

        def compute() -> tuple[Tensor]:
            plain = plain_ids(edge_index)
            left = without_self_loops(plain)
            if self.kept.is_own(edge_index):
                removed = torch.tensor([left is not plain], dtype=torch.int32, device=left.device)
                if not self.exchange.max_over_ranks(removed, "Looking for self-loops"):
                    return (edge_index,)
            return (kept_as(left.clone() if left is plain else left, edge_index),)

        return self.once(("no self-loops",), edge_index, None, compute)[0]

    def out_degree(self, source: Tensor, weight: Tensor, layer: str) -> Tensor:
        """Returns the sum of the weights of each owned node's out-edges, of which other ranks hold some: S^T.

        Args:
            source: of each edge, ``edge_index[0]``, ``[E]``.
            weight: of each edge, ``[E]``.
            layer: named in errors and counted under.

        Returns:
            ``[N]``, differentiable in `weight`.
        """
        partial = sum_by(source, weight, self.num_owned + self.num_halo)
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
        scale = _inverse_power(degree, 0.5 if normalization == "sym" else 1.0)
        weight = self.exchange.expand(scale, layer)[edge_index[0]] * edge_weight
        if normalization == "sym":
            weight = weight * scale[edge_index[1]]
        return loops, torch.cat([-weight, weight.new_ones(self.num_owned)])

    def sum_of(self, edge_index: Tensor, weight: Tensor | None, mean: bool) -> Sum | None:
        """Returns the sum over edges that :meth:`total` takes; None where edges or weights do not last.

        Args:
            edge_index: ``[2, E]``.
            weight: ``[E]`` or None for ones.
            mean: divide by the number of in-edges.
        """

        def make() -> Sum | None:
            edges = self.split_edges(edge_index, in_list=weight is not None)
            weights = None if weight is None else self.split_weights(edge_index, weight)
            if edges is None or (weight is not None and weights is None):
                return None
            return Sum(edges, weights, after=edges.inverse_degree if mean else None)

        return self.kept.of_edges(("sum", mean), [edge_index, weight], make)

    def total(self, x: Tensor, what: Sum, layer: str) -> Tensor:
        """Returns a sum over edges of S x, ``[N, F]``, by SpMM with the exchange behind it; kept while x is constant.

        Args:
            x: ``[N, F]``.
            what: which sum.
            layer: named in errors and counted under.
        """
        self.propagated(layer)
        world, exchange = self.exchange.world, self.exchange
        products, node_ids, target_ids = exchange.products, self._node_ids, self._target_ids
        kind: Any = SumOfRows
        over: Exchange | Matrix | None = exchange
        if products is not None and node_ids is not None and target_ids is not None:
            entries = partial(what.entries, node_ids, target_ids, self.num_owned)
            over = self.kept.of_edges(("product", id(what)), [], lambda: products.matrix(entries()))
            kind = Product

        def by_columns() -> tuple[Tensor]:
            if x.dtype not in (torch.float32, torch.float64):
                return (kind.apply(x, over, what, world.call(layer)),)
            out = x.new_empty((self.num_targets, x.size(1)))
            for low in range(0, x.size(1), self.columns_at_once):
                columns = slice(low, low + self.columns_at_once)
                out[:, columns] = kind.apply(x[:, columns].contiguous(), over, what, world.call(layer))
            return (out,)

        kept = self.kept.of_x(("sum", id(what)), x, 1, lambda: self._to_keep(by_columns))
        return kind.apply(x, over, what, world.call(layer)) if kept is None else kept[0]

    def statistics(self, x: Tensor, edge_index: Tensor, wanted: Sequence[str], layer: str) -> tuple[Tensor, ...] | None:
        """Returns several statistics of S x over each owned row's edges, ``[N, F]`` each; None where edges do not last, or
        the device has no loops.

        Args:
            x: ``[N, F]``.
            edge_index: ``[2, E]``.
            wanted: of :data:`~lightning_gnn.kernels.sums.STATISTICS`; 0 for rows without edges.
            layer: named in errors and counted under.
        """
        edges = self.split_edges(edge_index)
        if edges is None or not has_loops_for(x, edge_index.size(1)):
            return None
        self.propagated(layer)
        matrix = self._over_ranks(edge_index, partial(self._statistics_bytes, x, wanted))

        def compute() -> tuple[Tensor, ...]:
            if self.exchange.present is not None:
                return self._sampled_statistics(x, edges, self.exchange.present, wanted, layer)
            if matrix is not None:
                return StatisticsOverRanks.apply(x, matrix, edges.without_edges, wanted, layer)
            return StatisticsOfRows.apply(x, self.exchange, edges, wanted, self.exchange.world.call(layer))

        name = ("statistics", id(edge_index), *wanted)
        kept = self.kept.of_x(name, x, len(wanted), lambda: self._to_keep(compute))
        return compute() if kept is None else kept

    def _statistics_bytes(self, x: Tensor, wanted: Sequence[str]) -> tuple[int, int]:
        """Returns the bytes that a training step sends for a copy of a source's row, and for a target's partial result."""
        row_bytes, width = self.exchange.world.transport.row_bytes, x.size(1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Sums go to the owner; an extreme does and comes back, then how many edges have it, exactly; all gradients come back.
        sums = sum(name in ("sum", "squares") for name in wanted)
        exact = 3 * (len(wanted) - sums) * width * dtype.itemsize
        result = sums * row_bytes(width, dtype) + exact + row_bytes(len(wanted) * width, dtype)
        return 2 * row_bytes(width, x.dtype), result

    def _sampled_statistics(
        self, x: Tensor, edges: SplitEdges, present: Tensor, wanted: Sequence[str], layer: str
    ) -> tuple[Tensor, ...]:
        """As :meth:`statistics`, of the halo rows that are present: extremes of these alone, sums that are right on average."""
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


def _inverse_power(degree: Tensor, exponent: float) -> Tensor:
    """Returns ``degree ** -exponent``, and 0 for degrees of 0."""
    scale = degree.pow(-exponent)
    return scale.masked_fill(scale == float("inf"), 0.0)
