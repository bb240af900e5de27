"""What convs compute over a rank's edges and those of all ranks: sums, extremes, attention, and what normalises them.

N owned rows, H halo rows, E edges, F columns; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops

from lightning_gnn.data.lazy_ids import kept_as, plain_ids
from lightning_gnn.kernels import CSR
from lightning_gnn.kernels.attention import Across, edge_softmax
from lightning_gnn.kernels.run import has_loops_for
from lightning_gnn.nn.commnet import without_self_loops
from lightning_gnn.nn.edges import LastLoops, SplitEdges, StatisticsOfRows, Sum, SumOfRows, last_loops, sum_by
from lightning_gnn.nn.products import Product, StatisticsOverRanks
from lightning_gnn.nn.rank_graph import RankGraph


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


class GraphContext(RankGraph):
    """One rank's graph as bound convs see it; for its arguments see :class:`~lightning_gnn.nn.rank_graph.RankGraph`."""

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
        matrix = None if in_list else self._over_ranks(edge_index, *self._attention_bytes(sources, targets))
        if matrix is None:
            self.on_loaded_edges.add(layer)
            csr, present = self.matrix(edge_index), self.exchange.present
            missing = None
            if present is not None:
                missing = ~torch.cat([present.new_ones(self.num_owned), present])[csr.indices.long()]
            return Attended(csr, self.expand_all(sources, layer), targets, _as_it_is, missing=missing)

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
        if not self.kept.is_own(edge_index) or not plain or dtype not in (torch.float32, torch.float64):
            return None

        def make() -> Sum:
            sizes = self.num_owned, self.num_halo
            edges = SplitEdges.from_edges(edge_index, *sizes, in_list=False, self_loops=add_self_loops)
            scale = _inverse_power(edges.in_degree.to(dtype), 0.5)
            return Sum(edges, before=self.scale_of_rows(scale, layer), after=scale)

        return self.kept.of_edges(("normalised", add_self_loops, dtype), [edge_index], make)

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
            edges = self.split_edges(edge_index, in_list=weight is not None)
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
        matrix, products, node_ids, target_ids = None, exchange.products, self._node_ids, self._target_ids
        if products is not None and node_ids is not None and target_ids is not None:
            entries = partial(what.entries, node_ids, target_ids, self.num_owned)
            matrix = self.kept.of_edges(("product", id(what)), [], lambda: products.matrix(entries()))

        def compute(rows: Tensor) -> Tensor:
            if matrix is not None:
                return Product.apply(rows, matrix, what, world.call(layer))
            return SumOfRows.apply(rows, exchange, what, world.call(layer))

        def by_columns() -> tuple[Tensor]:
            if x.dtype not in (torch.float32, torch.float64):
                return (compute(x),)
            out = x.new_empty((self.num_targets, x.size(1)))
            for low in range(0, x.size(1), self.columns_at_once):
                columns = slice(low, low + self.columns_at_once)
                out[:, columns] = compute(x[:, columns].contiguous())
            return (out,)

        kept = self.kept.of_x(("sum", id(what)), x, 1, lambda: self._to_keep(by_columns))
        return compute(x) if kept is None else kept[0]

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
        matrix = self._over_ranks(edge_index, *self._statistics_bytes(x, wanted))

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
