"""A rank's graph as layers see it: its edges, the exchange, and what is made of them once.

N owned rows, H halo rows, E edges, F columns; ``...`` stands for any trailing dimensions. Edges end at T rows: the owned ones,
unless nodes have types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_gnn.comm.call import Step
from lightning_gnn.comm.exchange import Exchange, Matrix, Triples
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.kernels import CSR
from lightning_gnn.nn.edges import SplitEdges, SplitWeights
from lightning_gnn.nn.kept import Kept


class UnsupportedModelError(ValueError):
    """A model that cannot be trained, or not exactly on a part of the graph: says which module, why, and what to use."""


T = TypeVar("T", bound=tuple[Tensor, ...])


class RankGraph:
    """One rank's graph: its edges, the exchange, and what is made of them once.

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
                f"hops={most}: rows would be missing. Set hops of the strategy to the number of propagations "
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

    def expand_all(self, tensors: Sequence[Tensor], layer: str) -> list[Tensor]:
        """Returns owned and halo rows of several tensors, in one message per peer; differentiable."""
        return [self.expand(tensors[0], layer)] if len(tensors) == 1 else self.exchange.expand_all(tensors, layer)

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

    def _over_ranks(self, edge_index: Tensor, copy_bytes: int, result_bytes: int) -> SparseMatrix | None:
        """Returns edges that last as they are spread over ranks; None where a rank holds all edges of its nodes.

        Args:
            edge_index: ``[2, E]``.
            copy_bytes, result_bytes: of what a training step sends, forward and backward, for a copy of a source's row, and for
                the partial result of a target.
        """
        node_ids, target_ids = self._node_ids, self._target_ids
        products = self.exchange.products
        if products is None or products.spread is None or node_ids is None or target_ids is None:
            return None
        make = products.spread(copy_bytes, result_bytes)

        def spread() -> SparseMatrix:
            source, target = stored_ids(edge_index)
            matrix = make(Triples(target_ids[target], node_ids[source], None))
            assert isinstance(matrix, SparseMatrix)
            return matrix

        return self.kept.of_edges(("spread", make), [edge_index], spread)
