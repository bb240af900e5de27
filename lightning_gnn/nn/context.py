"""What bound convs know of their rank: its edges, the exchange, and everything that is computed once.

N owned rows, H halo rows, E edges, F columns; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops, scatter

from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.kernels import CSR
from lightning_gnn.kernels.attention import Across
from lightning_gnn.nn.commnet import without_self_loops
from lightning_gnn.nn.edges import Exchange, Fetch, SplitEdges, SplitWeights, StatisticsOfRows, Sum, SumOfRows


class UnsupportedModelError(ValueError):
    """A model that cannot be trained, or not exactly on a part of the graph: says which module, why, and what to use."""


T = TypeVar("T", bound=tuple[Tensor, ...])


@dataclass(frozen=True)
class Attended:
    """Edges whose numbers are shared out among those of each target, and what brings rows to their ends and results home.

    Attributes:
        csr: rows are targets, columns sources; of this rank.
        sources: from owned rows to those of the columns, differentiable; of several tensors, in the messages of one.
        targets: from owned rows to those of the rows, differentiable.
        home: from partial sums of the rows to sums of owned rows, differentiable.
        across: completes maxima and sums of a row whose edges lie on several ranks; None where they do not.
    """

    csr: CSR
    sources: Callable[[Sequence[Tensor]], list[Tensor]]
    targets: Callable[[Tensor], Tensor]
    home: Callable[[Tensor], Tensor]
    across: Across | None = None


def _as_it_is(x: Tensor) -> Tensor:
    return x


class GraphContext:
    """One rank's graph as bound convs see it, and what they share.

    Args:
        exchange: S and S^T.
        x: the batch's own features; what S makes of them is fetched once. Recognised by identity, which all ranks agree
            on, not by storage: two empty tensors share theirs.
        edge_index: the batch's own edges in local ids, int64 ``[2, E]``.
        edge_weight: the batch's own edge weights, ``[E]``, or None.
        kept_widths: what is kept of constant input takes at most as much memory as so many copies of it; 0 keeps nothing.
        most_propagations: how often rows may travel along edges in a step; None for any number.
        rows: fetches rows of any nodes; None where nothing does.

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
        most_propagations: int | None = None,
        rows: AnyRows | None = None,
    ) -> None:
        self.rows = rows
        self.reverse: GraphContext | None = None
        self._most_propagations, self.propagations = most_propagations, Counter[str]()
        self.exchange, self.kept_widths = exchange, kept_widths
        self.x, self.edge_index, self.edge_weight = x, edge_index, edge_weight
        self.num_owned, self.num_halo = exchange.num_owned, exchange.num_halo
        self._edges: dict[int, SplitEdges] = {}
        self._weights: dict[tuple[int, int], SplitWeights] = {}
        self._matrices: dict[int, CSR] = {}
        self._sums: dict[tuple[Any, ...], Sum] = {}
        self._once: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
        self._constant_halo: Tensor | None = None
        self._expanded_x: Tensor | None = None
        self._x_version = x._version
        # What A S makes of constant x by what it is made of; these are constant themselves, by id, with their version.
        self._aggregates: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
        self._made_of_x: dict[int, tuple[Tensor, int]] = {}
        self._kept_columns = 0
        self._given = {id(tensor): tensor for tensor in (edge_index, edge_weight) if tensor is not None}
        self._versions = self._versions_of_edges()
        # The batch's own edges and weights, by id, and what :meth:`chosen` has made of them.
        self._own = dict(self._given)
        # Tensors that stay the same between steps, by id; held here, so that an id is not used again.
        self._lasting = dict(self._given)

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

    @contextmanager
    def _to_keep(self) -> Iterator[None]:
        """Where something is made once, in a training step or in evaluation, for all that come: without autograd, and exactly."""
        with torch.inference_mode(False), torch.no_grad(), self.exchange.exactly():
            yield

    def _versions_of_edges(self) -> list[int]:
        return [tensor._version for tensor in self._given.values()]

    def _is_own(self, tensor: Tensor) -> bool:
        """Returns whether these are the batch's own edges or weights, or were chosen of them.

        If one of them was changed in place, on every rank alike, all that was made of them is forgotten first.
        """
        self._look_for_changes()
        return id(tensor) in self._own

    def _lasts(self, tensor: Tensor) -> bool:
        """Returns whether a tensor stays the same between steps, as :meth:`_is_own`."""
        self._look_for_changes()
        return id(tensor) in self._lasting

    def _look_for_changes(self) -> None:
        versions = self._versions_of_edges()
        if versions != self._versions:
            self._versions = versions
            self._forget_edges()

    def _forget_edges(self) -> None:
        """Forgets what was made of edges and their weights."""
        self._own, self._lasting = dict(self._given), dict(self._given)
        for kept in (self._edges, self._weights, self._matrices, self._sums, self._once):
            kept.clear()
        self._forget_aggregates()

    def _forget_aggregates(self) -> None:
        """Forgets what was made of constant features."""
        self._aggregates, self._made_of_x, self._kept_columns = {}, {}, 0

    # S ########################################################################

    def begin_step(self) -> None:
        """Starts another step: counts its propagations."""
        self.propagations.clear()
        self.exchange.begin_step()
        if self.reverse is not None:
            self.reverse.begin_step()

    def propagated(self, layer: str) -> None:
        """Counts that rows travel along edges once more; raises :class:`UnsupportedModelError` if that is too often."""
        self.propagations[layer] += 1
        count = self.propagations.total()
        if self._most_propagations is not None and count > self._most_propagations:
            raise UnsupportedModelError(
                f"'{layer}' is propagation number {count} of a step, but neighbourhoods are replicated for "
                f"hops={self._most_propagations}: rows would be missing. Set hops of the strategy to the number of propagations "
                "of your model, two for a GCN of two layers."
            )

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
            self._forget_aggregates()
            self._x_version = x._version
        return True

    def expand(self, x: Tensor, layer: str, dim: int = 0) -> Tensor:
        """Returns owned and halo rows, ``[N + H, ...]``, differentiable."""
        if x is not self.x or not self.is_constant(x):
            return self.exchange.expand(x, layer, dim)
        if self._expanded_x is None:
            with self._to_keep():
                self._expanded_x = self.exchange.expand(x, layer, dim)
        return self._expanded_x

    def expand_all(self, tensors: Sequence[Tensor], layer: str) -> list[Tensor]:
        """Returns owned and halo rows of several tensors, in one message per peer; differentiable."""
        return self.exchange.expand_all(tensors, layer)

    def fetch(self, x: Tensor, layer: str) -> tuple[Tensor, Callable[[], None]]:
        """Starts S; returns the halo rows ``[H, ...]`` and the function after which they are there."""
        if x is not self.x or not self.is_constant(x):
            return self._fetch_anew(x, layer)
        shape = torch.Size((self.num_halo, *x.shape[1:]))
        if self._constant_halo is None:
            with self._to_keep():
                self._constant_halo = x.new_empty(shape)
                wait = self.exchange.start_fetch(x, self._constant_halo, layer)

            def finish() -> None:
                with self._to_keep():  # later stages of a plan are sent here
                    wait()

            return self._constant_halo, finish
        return self._constant_halo, _nothing

    def _fetch_anew(self, x: Tensor, layer: str) -> tuple[Tensor, Callable[[], None]]:
        halo = self.exchange.buffer("halo", torch.Size((self.num_halo, *x.shape[1:])), x.dtype)
        return halo, self.exchange.start_fetch(x, halo, layer)

    # A ########################################################################

    def split_edges(self, edge_index: Tensor) -> SplitEdges | None:
        """Returns the CSR form of edges that stay the same between steps; None for others: they would not repay it."""
        if not self._lasts(edge_index):
            return None
        key = id(edge_index)
        if key not in self._edges:
            with torch.inference_mode(False), torch.no_grad():
                self._edges[key] = SplitEdges.from_edges(edge_index, self.num_owned, self.num_halo)
        return self._edges[key]

    def matrix(self, edge_index: Tensor) -> CSR:
        """Returns the edges as one matrix over owned and halo rows, ``[N, N + H]``; kept where edges last."""
        lasts = self._lasts(edge_index)
        kept = self._matrices.get(id(edge_index))
        if kept is not None:
            return kept
        with torch.inference_mode(False), torch.no_grad():
            source, target = edge_index
            made = CSR.from_coo(target, source, self.num_owned, self.num_owned + self.num_halo)
        if lasts:
            self._matrices[id(edge_index)] = made
        return made

    def attended(self, edge_index: Tensor, layer: str, in_list: bool) -> Attended:
        """Returns the edges as attention takes them.

        Args:
            edge_index: ``[2, E]``.
            layer: named in errors and counted under.
            in_list: keep the slots of the matrix in step with the list, for what belongs to its edges.
        """

        def sources(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [self.expand(tensors[0], layer)] if len(tensors) == 1 else self.expand_all(tensors, layer)

        self.propagated(layer)
        return Attended(self.matrix(edge_index), sources, _as_it_is, _as_it_is)

    def split_weights(self, edge_index: Tensor, weight: Tensor) -> SplitWeights | None:
        """Returns weights that stay the same between steps in slot order; None for others."""
        edges = self.split_edges(edge_index)
        if edges is None or not self._lasts(weight) or weight.requires_grad or weight.dim() != 1:
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
            self._sums[id(edges), id(weight), False] = what
        return edges, weight

    def normalised(
        self, edge_index: Tensor, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype
    ) -> Sum | None:
        """Returns the sum that :meth:`gcn_norm` weighs edges for, as scales of rows; None where its weights do not factor.

        They do for the batch's own edges without weights. No weight is read per edge then, nor are edges listed once more.
        Numbers shorter than float32 would be rounded once more by a scale, and are weighted instead.
        """
        plain = edge_weight is None and not (improved and add_self_loops)
        if not self._is_own(edge_index) or not plain or dtype not in (torch.float32, torch.float64):
            return None
        key = ("normalised", add_self_loops, dtype, id(edge_index))
        if key not in self._sums:
            with torch.inference_mode(False), torch.no_grad():
                if add_self_loops:
                    edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=self.num_owned)
                edges = SplitEdges.from_edges(edge_index, self.num_owned, self.num_halo).of_slots()
                scale = _inverse_power(edges.in_degree.to(dtype), 0.5)
                self._sums[key] = Sum(edges, before=scale, after=scale)
        return self._sums[key]

    def once(
        self, name: tuple[Any, ...], edge_index: Tensor, edge_weight: Tensor | None, compute: Callable[[], T]
    ) -> T:
        """Returns ``compute()``, a tuple of tensors made of edges and weights alone; kept if both are the batch's own.

        Args:
            name: what is computed, with its options.
            edge_index, edge_weight: what it is computed from.
            compute: may communicate, since all ranks decide alike.
        """
        if not self._is_own(edge_index) or (edge_weight is not None and not self._is_own(edge_weight)):
            return compute()
        if edge_weight is not None and edge_weight.requires_grad:
            return compute()
        key = (*name, id(edge_index), None if edge_weight is None else id(edge_weight))
        if key not in self._once:
            # Evaluation may come first, and an inference tensor could not take part in training later.
            with self._to_keep():
                self._once[key] = compute()
            self._lasting.update({id(tensor): tensor for tensor in self._once[key]})
        return self._once[key]  # type: ignore[return-value]

    def chosen(self, name: str, edge_index: Tensor, choose: Callable[[], T]) -> T:
        """Returns ``choose()``, a choice of the batch's own edges and of what belongs to them, made once.

        What is made of it is kept as what is made of all edges.

        Args:
            name: of the choice.
            edge_index: all edges.
            choose: returns tensors, the edges first; all ranks choose alike.
        """
        found = self.once(("chosen", name), edge_index, None, choose)
        if self._is_own(edge_index):
            self._own.update({id(tensor): tensor for tensor in found})
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
            if self._is_own(edge_index):
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
        what = self._sum_of(edge_index, weight, mean)
        return None if what is None else self.total(x, what, layer)

    def _sum_of(self, edge_index: Tensor, weight: Tensor | None, mean: bool) -> Sum | None:
        self._look_for_changes()
        key = (id(edge_index), None if weight is None else id(weight), mean)
        if key not in self._sums:
            edges = self.split_edges(edge_index)
            weights = None if weight is None else self.split_weights(edge_index, weight)
            if edges is None or (weight is not None and weights is None):
                return None
            self._sums[key] = Sum(edges, weights, after=edges.inverse_degree if mean else None)
        return self._sums[key]

    def total(self, x: Tensor, what: Sum, layer: str) -> Tensor:
        """Returns a sum over edges of S x, ``[N, F]``; kept while x, ``[N, F]``, is constant."""
        self.propagated(layer)
        # Scaled rows are not the constant ones, whose halo is kept.
        fetch = self.fetch if what.before is None else self._fetch_anew

        def compute() -> tuple[Tensor]:
            return (self._sum(x, fetch, what, layer),)

        def compute_once() -> tuple[Tensor]:
            out = x.new_empty((self.num_owned, x.size(1)))
            for low in range(0, x.size(1), self.columns_at_once):
                columns = slice(low, low + self.columns_at_once)
                part = x[:, columns].contiguous()
                out[:, columns] = self._sum(part, self._fetch_anew, what, layer)
            return (out,)

        once = compute_once if x.dtype in (torch.float32, torch.float64) else compute
        return self._kept(("sum", id(x), id(what)), x, 1, compute, once)[0]

    def _sum(self, x: Tensor, fetch: Fetch, what: Sum, layer: str) -> Tensor:
        return SumOfRows.apply(x, fetch, self.exchange, what, layer)

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
        key = ("statistics", id(x), id(edge_index), *wanted)

        def compute() -> tuple[Tensor, ...]:
            return StatisticsOfRows.apply(x, self.fetch, self.exchange, edges, wanted, layer)

        return self._kept(key, x, len(wanted), compute, compute)

    def _kept(
        self,
        key: tuple[Any, ...],
        x: Tensor,
        count: int,
        compute: Callable[[], tuple[Tensor, ...]],
        compute_once: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Returns ``compute()``, `count` tensors as wide as x that are made of x and edges; kept while x is constant.

        `compute_once` computes the same for what is kept.
        """
        if not self.kept_widths or not self.is_constant(x):
            return compute()
        kept = self._aggregates.get(key)
        if kept is None or not all(self.is_constant(each) for each in kept):  # changed in place by who got it
            with self._to_keep():
                kept = compute_once()
            # Counted in columns, so that all ranks decide alike.
            columns = count * x.size(1)
            if self._kept_columns + columns <= self.kept_widths * self.x.size(1):
                if key not in self._aggregates:
                    self._kept_columns += columns
                self._aggregates[key] = kept
                self._made_of_x.update({id(each): (each, each._version) for each in kept})
        return kept

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


def _inverse_power(degree: Tensor, exponent: float) -> Tensor:
    """Returns ``degree ** -exponent``, and 0 for degrees of 0."""
    scale = degree.pow(-exponent)
    return scale.masked_fill(scale == float("inf"), 0.0)


def _nothing() -> None:
    pass
