"""What bound convs know of their rank: its edges, the exchange, and what they compute over all ranks.

N owned rows, H halo rows, E edges, F columns; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops, scatter

from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import Step
from lightning_gnn.comm.matrix import Matrix, SparseMatrix, Triples
from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.kernels import CSR
from lightning_gnn.kernels.attention import Across, edge_softmax
from lightning_gnn.nn.commnet import without_self_loops
from lightning_gnn.nn.edges import SplitEdges, SplitWeights, StatisticsOfRows, Sum, SumOfRows
from lightning_gnn.nn.kept import Kept
from lightning_gnn.nn.products import Product, StatisticsOverRanks


class UnsupportedModelError(ValueError):
    """A model that cannot be trained, or not exactly on a part of the graph: says which module, why, and what to use."""


T = TypeVar("T", bound=tuple[Tensor, ...])


@dataclass(frozen=True)
class Attended:
    """Edges for attention, and what brings rows to their ends and results to owners.

    Attributes:
        csr: rows are targets, columns sources; of this rank.
        missing: edges whose source does not come in this step, bool ``[E]`` in slot order; None for none.
        sources: from owned rows to those of the columns, differentiable; of several tensors, in the messages of one.
        targets: from owned rows to those of the rows, differentiable.
        reduce: from partial sums of the rows to sums of owned rows, differentiable.
        across: completes maxima and sums of a row whose edges lie on several ranks; None where they do not.
    """

    csr: CSR
    sources: Callable[[Sequence[Tensor]], list[Tensor]]
    targets: Callable[[Tensor], Tensor]
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
    """One rank's graph as bound convs see it.

    Args:
        exchange: S and S^T, and where sums over edges are products, how these are spread over ranks.
        x: the batch's own features; what layers make of them alone is made once.
        edge_index: the batch's own edges in local ids, int64 ``[2, E]``.
        edge_weight: the batch's own edge weights, ``[E]``, or None.
        kept_widths: what is kept of constant input takes at most as much memory as so many copies of it; 0 keeps nothing.
        rows: rows of any nodes; None where nothing reads them.
        node_ids: relabelled id of each owned and halo row, int64 ``[N + H]``; for products.

    Attributes:
        propagations: how often each layer has let rows travel along edges in this step, by its name.
        columns_at_once: of constant input travel together: what travels stays small, like what later layers send.
        reverse: of the same nodes in the graph whose edges go the other way; None where no layer reads out-edges.
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
    ) -> None:
        self.exchange, self.rows = exchange, rows
        self.reverse: GraphContext | None = None
        self.propagations = Counter[str]()
        self.x, self.edge_index, self.edge_weight = x, edge_index, edge_weight
        self.num_owned, self.num_halo = exchange.num_owned, exchange.num_halo
        self.kept = Kept(x, [tensor for tensor in (edge_index, edge_weight) if tensor is not None], kept_widths)
        self._node_ids = node_ids

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

    def check_edges(self, edge_index: Any, layer: str, edge_weight: Any = None) -> None:
        """Raises :class:`UnsupportedModelError` unless edges are given as ``[2, E]``, and weights of so many, if any."""
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
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
                f"hops={most}: rows would be missing. Set hops of the strategy to the number of propagations "
                "of your model, two for a GCN of two layers."
            )

    @contextmanager
    def _to_keep(self) -> Iterator[None]:
        """Where something is made once, in a training step or in evaluation, for all that come: without autograd, and exactly.

        It counts as no call of the step: other steps do not make it.
        """
        world = self.exchange.world
        calls = world.calls.copy()
        with torch.inference_mode(False), torch.no_grad(), world.wire.encoding(False):
            yield
        world.calls = calls

    # S ########################################################################

    def is_constant(self, x: Tensor) -> bool:
        """Returns whether `x` is the batch's own features, or something kept that was made of them alone."""
        return self.kept.is_constant(x)

    def expand(self, x: Tensor, layer: str, dim: int = 0) -> Tensor:
        """Returns owned and halo rows, ``[N + H, ...]``, differentiable."""

        def compute() -> tuple[Tensor]:
            with self._to_keep():
                return (self.exchange.expand(x, layer),)

        kept = self.kept.of_x("expanded", x, 0, compute) if x is self.x and dim % x.dim() == 0 else None
        return self.exchange.expand(x, layer, dim) if kept is None else kept[0]

    def expand_all(self, tensors: Sequence[Tensor], layer: str) -> list[Tensor]:
        """Returns owned and halo rows of several tensors, in one message per peer; differentiable."""
        return [self.expand(tensors[0], layer)] if len(tensors) == 1 else self.exchange.expand_all(tensors, layer)

    # A ########################################################################

    def split_edges(self, edge_index: Tensor) -> SplitEdges | None:
        """Returns the CSR form of edges that stay the same between steps; None for others: they would not repay it."""
        return self.kept.of_edges(
            "split", [edge_index], lambda: SplitEdges.from_edges(edge_index, self.num_owned, self.num_halo)
        )

    def matrix(self, edge_index: Tensor) -> CSR:
        """Returns the edges as one matrix over owned and halo rows, ``[N, N + H]``; kept where edges last."""

        def make() -> CSR:
            source, target = edge_index
            return CSR.from_coo(target, source, self.num_owned, self.num_owned + self.num_halo)

        return self.kept.of_edges("matrix", [edge_index], make) or make()

    def attended(self, edge_index: Tensor, layer: str, in_list: bool) -> Attended:
        """Returns the edges as attention takes them.

        Args:
            edge_index: ``[2, E]``.
            layer: named in errors and counted under.
            in_list: keep the slots of the matrix in step with the list, for what belongs to its edges.
        """
        self.propagated(layer)
        matrix = None if in_list else self._over_ranks(edge_index)
        if matrix is None:
            csr, present = self.matrix(edge_index), self.exchange.present
            missing = None
            if present is not None:
                missing = ~torch.cat([present.new_ones(self.num_owned), present])[csr.indices.long()]
            return Attended(csr, lambda rows: self.expand_all(rows, layer), _as_it_is, _as_it_is, missing=missing)

        def across(partial: Tensor, operation: str) -> Tensor:
            # Exactly: a row's ranks must subtract and divide by the same, and minus infinity stands for no edges.
            with self.exchange.world.wire.encoding(False):
                reduce = matrix.rows.reduce_max if operation == "max" else matrix.rows.reduce
                return matrix.rows.expand(reduce(partial, layer), layer)

        return Attended(
            matrix.csr,
            lambda rows: matrix.columns.expand_all(rows, layer),
            lambda x: matrix.rows.expand(x, layer),
            lambda x: matrix.rows.reduce(x, layer),
            across,
        )

    def _over_ranks(self, edge_index: Tensor) -> SparseMatrix | None:
        """Returns edges that last as they are spread over ranks; None where a rank holds all edges of its nodes."""

        make, node_ids = self.exchange.make_attended, self._node_ids
        if make is None or node_ids is None:
            return None
        source, target = edge_index
        triples = Triples(node_ids[target], node_ids[source], None)
        return self.kept.of_edges("attended", [edge_index], lambda: make(triples))

    def split_weights(self, edge_index: Tensor, weight: Tensor) -> SplitWeights | None:
        """Returns weights that stay the same between steps in slot order; None for others."""
        edges = self.split_edges(edge_index)
        if edges is None or weight.requires_grad or weight.dim() != 1:
            return None
        return self.kept.of_edges("weights", [edge_index, weight], lambda: edges.weights(weight))

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
        edges, weight = self.once(
            ("gcn_norm", improved, add_self_loops, dtype, as_scales),
            edge_index,
            edge_weight,
            lambda: self._gcn_norm(layer, edge_index, edge_weight, num_nodes, improved, add_self_loops, dtype),
        )
        what = self.normalised(edge_index, edge_weight, improved, add_self_loops, dtype) if as_scales else None
        if what is not None:
            self.kept.of_edges(("sum", False), [edges, weight], lambda: what)
        return edges, weight

    def normalised(
        self, edge_index: Tensor, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype
    ) -> Sum | None:
        """Returns the sum that :meth:`gcn_norm` weighs edges for, as scales of rows; None where its weights do not factor.

        They do for the batch's own edges without weights. No weight is read per edge then, nor are edges listed once more.
        Numbers shorter than float32 would be rounded once more by a scale, and are weighted instead.
        """
        plain = edge_weight is None and not (improved and add_self_loops)
        if not self.kept.is_own(edge_index) or not plain or dtype not in (torch.float32, torch.float64):
            return None

        def make() -> Sum:
            looped = add_remaining_self_loops(edge_index, num_nodes=self.num_owned)[0] if add_self_loops else edge_index
            edges = SplitEdges.from_edges(looped, self.num_owned, self.num_halo).of_slots()
            scale = _inverse_power(edges.in_degree.to(dtype), 0.5)
            return Sum(edges, before=scale, after=scale)

        return self.kept.of_edges(("normalised", add_self_loops, dtype), [edge_index], make)

    def once(
        self, name: tuple[Any, ...], edge_index: Tensor, edge_weight: Tensor | None, compute: Callable[[], T]
    ) -> T:
        """Returns ``compute()``, a tuple of tensors made of edges and weights alone; kept if both are the batch's own.

        Args:
            name: what is computed, with its options.
            edge_index, edge_weight: what it is computed from.
            compute: may communicate, since all ranks decide alike.
        """

        def make() -> T:
            with self._to_keep():
                return compute()

        made = self.kept.once(name, [edge_index, edge_weight], make)
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
        scale = _inverse_power(degree, 0.5)
        return edge_index, self.exchange.expand(scale, layer)[source] * edge_weight * scale[target]

    def with_self_loops(self, edge_index: Tensor) -> Tensor:
        """Returns the edges without self-loops, then one self-loop for each owned node, as PyG orders them."""

        def compute() -> tuple[Tensor]:
            return (add_self_loops(remove_self_loops(edge_index)[0], num_nodes=self.num_owned)[0],)

        return self.once(("self-loops",), edge_index, None, compute)[0]

    def without_self_loops(self, edge_index: Tensor) -> Tensor:
        """Returns the edges between different nodes; the same tensor if there are no others on any rank.

        What is kept or dealt is known by its edges, so ranks must agree on whether these are the batch's own.
        """

        def compute() -> tuple[Tensor]:
            left = without_self_loops(edge_index)
            if self.kept.is_own(edge_index):
                removed = torch.tensor([left is not edge_index], dtype=torch.int32, device=edge_index.device)
                if not self.exchange.max_over_ranks(removed, "Looking for self-loops"):
                    return (left,)
            return (left.clone() if left is edge_index else left,)

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
        scale = _inverse_power(degree, 0.5 if normalization == "sym" else 1.0)
        weight = self.exchange.expand(scale, layer)[edge_index[0]] * edge_weight
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

        def make() -> Sum | None:
            edges = self.split_edges(edge_index)
            weights = None if weight is None else self.split_weights(edge_index, weight)
            if edges is None or (weight is not None and weights is None):
                return None
            return Sum(edges, weights, after=edges.inverse_degree if mean else None)

        what = self.kept.of_edges(("sum", mean), [edge_index, weight], make)
        return None if what is None else self.total(x, what, layer)

    def total(self, x: Tensor, what: Sum, layer: str) -> Tensor:
        """Returns a sum over edges of S x, ``[N, F]``; kept while x, ``[N, F]``, is constant."""
        self.propagated(layer)
        world, exchange = self.exchange.world, self.exchange
        matrix, make, node_ids = None, exchange.make_matrix, self._node_ids
        if make is not None and node_ids is not None:
            matrix = self.kept.of_edges(("product", id(what)), [], lambda: make(what.entries(node_ids, self.num_owned)))

        def compute(rows: Tensor) -> Tensor:
            if matrix is not None:
                return Product.apply(rows, matrix, what, world.call(layer))
            return SumOfRows.apply(rows, exchange, what, world.call(layer))

        def compute_once() -> tuple[Tensor]:
            with self._to_keep():
                if x.dtype not in (torch.float32, torch.float64):
                    return (compute(x),)
                out = x.new_empty((self.num_owned, x.size(1)))
                for low in range(0, x.size(1), self.columns_at_once):
                    columns = slice(low, low + self.columns_at_once)
                    out[:, columns] = compute(x[:, columns].contiguous())
                return (out,)

        kept = self.kept.of_x(("sum", id(what)), x, 1, compute_once)
        return compute(x) if kept is None else kept[0]

    def statistics(self, x: Tensor, edge_index: Tensor, wanted: Sequence[str], layer: str) -> tuple[Tensor, ...] | None:
        """Returns several statistics of S x over each owned row's edges, ``[N, F]`` each; None where edges do not last.

        Args:
            x: ``[N, F]``, on the CPU.
            edge_index: ``[2, E]``.
            wanted: of :data:`~lightning_gnn.kernels.sums.STATISTICS`; 0 for rows without edges.
            layer: named in errors and counted under.
        """
        edges = self.split_edges(edge_index)
        if edges is None or x.device.type != "cpu":
            return None
        self.propagated(layer)
        matrix = self._over_ranks(edge_index)

        present = self.exchange.present
        if present is not None and not self.is_constant(x):
            return self._sampled_statistics(x, edges, edge_index, wanted, layer)

        def compute() -> tuple[Tensor, ...]:
            if matrix is not None:
                return StatisticsOverRanks.apply(x, matrix, edges.without_edges, wanted, layer)
            return StatisticsOfRows.apply(x, self.exchange, edges, wanted, self.exchange.world.call(layer))

        def compute_once() -> tuple[Tensor, ...]:
            with self._to_keep():
                return compute()

        kept = self.kept.of_x(("statistics", id(edge_index), *wanted), x, len(wanted), compute_once)
        return compute() if kept is None else kept

    def _sampled_statistics(
        self, x: Tensor, edges: SplitEdges, edge_index: Tensor, wanted: Sequence[str], layer: str
    ) -> tuple[Tensor, ...]:
        """As :meth:`statistics`, of the halo rows that are present: extremes of these alone, sums that are right on average."""
        world, exchange = self.exchange.world, self.exchange
        assert exchange.present is not None
        of_all = Sum(edges)
        found = {
            name: SumOfRows.apply(rows, exchange, of_all, world.call(layer))
            for name, rows in (("sum", x), ("squares", x.square()))
            if name in wanted
        }
        extremes = [name for name in wanted if name not in found]
        if extremes:
            there = edges.only(exchange.present)
            found.update(zip(extremes, StatisticsOfRows.apply(x, exchange, there, extremes, world.call(layer))))
        return tuple(found[name] for name in wanted)


def _inverse_power(degree: Tensor, exponent: float) -> Tensor:
    """Returns ``degree ** -exponent``, and 0 for degrees of 0."""
    scale = degree.pow(-exponent)
    return scale.masked_fill(scale == float("inf"), 0.0)
