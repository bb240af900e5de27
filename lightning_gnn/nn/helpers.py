"""Helpers for code that reads other nodes outside message passing, with fewer messages than row semantics.

Without a strategy of this package, each function is a no-op, so that models also run on a single device. The functions are
collective: all ranks must call them in the same order. N local nodes, H halo nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.data.lazy_ids import lazy_ids, stored_ids
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.rows.mode import active_mode, place, rows_of
from lightning_gnn.rows.placement import FROM_ROWS, RowPlacement, RowSet


class _ThreadGraphs(threading.local):
    """Graph contexts in use in this thread alone."""

    def __init__(self) -> None:
        self.graphs: list[list[GraphContext | None]] = []


_thread = _ThreadGraphs()
_everywhere: list[list[GraphContext | None]] = []  # for threads without their own, such as autograd's


@contextmanager
def graph_in_use(graph: GraphContext | None, this_thread_only: bool = False) -> Iterator[None]:
    """Context manager that sets the graph context of the helpers; None for none."""
    graphs, own = _thread.graphs if this_thread_only else _everywhere, [graph]
    graphs.append(own)
    try:
        yield
    finally:
        # A failed run is closed by Python's garbage collection, perhaps while another run uses its graph.
        graphs[:] = [each for each in graphs if each is not own]


def _graph() -> GraphContext | None:
    """Returns the graph context in use; None on one device."""
    graphs = _thread.graphs or _everywhere
    return graphs[-1][0] if graphs else None


def set_placement(x: Tensor, rows: RowSet | None, dim: int = 0) -> Tensor:
    """Set the placement of a helper's result; without rows, the result is equal on all ranks."""
    found: Tensor = place(x, FROM_ROWS if rows is None else rows.at(dim))
    return found


def gather_halo(x: Tensor) -> Tensor:
    """Returns the rows that ``batch.edge_index`` indexes: local rows, then copies of the halo rows.

    ``gather_halo(x)[batch.edge_index[0]]`` has the source row of every edge. ``x[batch.edge_index[0]]`` in a step has the same
    result, but the result of this function may be indexed several times. Differentiable: gradients of copies are summed at the
    owner.

    Args:
        x: one row per node of the batch, ``[N, ...]``.

    Returns:
        ``[N + H, ...]``; `x` itself on one device.

    Raises:
        UnsupportedModelError: `x` has another number of rows.
    """
    graph = _graph()
    if graph is None:
        return x
    mode = active_mode()
    if mode is not None:
        if not mode.has_nodes:
            return cast(Tensor, mode.run_per_sample(gather_halo, (x,), {}))
        if rows_of(x) is None:
            return x  # gathered already
        with mode.pause():
            return set_placement(gather_halo(x), mode.halo_rows)
    graph.check_rows(x.size(0), "gather_halo")
    graph.count_propagation("gather_halo")
    return graph.expand(x, "gather_halo")


def reduce_halo(x: Tensor) -> Tensor:
    """Returns the sum over all ranks of the values for each node: the transpose of :func:`gather_halo`, differentiable.

    ``reduce_halo(scatter(values, batch.edge_index[0], 0, dim_size=num_rows))``, with ``num_rows = gather_halo(x).size(0)``, sums
    values per edge at the source of each edge, whose out-edges are on several ranks.

    Args:
        x: one partial sum per row of :func:`gather_halo`'s result, ``[N + H, ...]``.

    Returns:
        ``[N, ...]``; `x` itself on one device.

    Raises:
        UnsupportedModelError: `x` has another number of rows.
    """
    graph = _graph()
    if graph is None:
        return x
    mode = active_mode()
    if mode is not None:
        if not mode.has_nodes:
            return cast(Tensor, mode.run_per_sample(reduce_halo, (x,), {}))
        of = rows_of(x)
        if of is None or of.rows is not mode.halo_rows:
            return x  # already a sum over all ranks
        with mode.pause():
            return set_placement(reduce_halo(x), mode.nodes)
    graph.check_expanded_rows(x.size(0), "reduce_halo")
    return graph.exchange.reduce(x, "reduce_halo")


def gather_nodes(x: Tensor, ids: Tensor) -> Tensor:
    """Returns the rows of any nodes of the whole graph, for example of the ends of negative edges.

    Differentiable: gradients of all ranks are summed at the owner. All ranks call it, each with any ids, possibly none; ids may
    change between steps. Each row is sent once, also for repeated ids, while ``x[ids]`` gathers all rows. For sources of
    ``batch.edge_index``, :func:`gather_halo` is cheaper.

    Args:
        x: one row per node of the batch, ``[N, ...]``.
        ids: ids in the original graph, as in ``batch.n_id``, int64, of any shape.

    Returns:
        ``[*ids.shape, ...]``; ``x[ids]`` on one device.

    Raises:
        UnsupportedModelError: `x` has another number of rows.
        ValueError: an id is out of range.
    """
    graph = _graph()
    if graph is None:
        return x[ids]
    mode = active_mode()
    if mode is not None:
        of, of_x = rows_of(ids), rows_of(x)
        if of_x is None or (of_x.dim == 0) != mode.has_nodes:
            return x[ids]  # gathered already, or nodes are along another dimension
        if not mode.has_nodes:
            out: Tensor = mode.run_per_sample(gather_nodes, (x, ids.reshape(-1)), {})
            return out.reshape(*ids.shape, *x.shape[1:])
        with mode.pause():
            found = gather_nodes(mode.drop_replicas(x, of_x), ids)
            return set_placement(found, None if of is None else of.rows, 0 if of is None else of.dim)
    graph.check_rows(x.size(0), "gather_nodes")
    assert graph.rows is not None
    return graph.rows.fetch(x, ids, "gather_nodes")


def global_num_nodes(x: Tensor) -> int:
    """Returns the number of nodes of the whole graph; `x` has one row per node of the batch."""
    graph = _graph()
    return int(x.size(0)) if graph is None or graph.rows is None else graph.rows.num_nodes


def select_edges(batch: Data, mask: str, names: Sequence[str] = ()) -> tuple[Tensor, ...]:
    """Returns the edges in a constant mask, ``[2, E']``, and the batch's tensors `names` for these edges.

    The selection is cached, so that layers treat it like all edges of the batch and reuse their caches.

    Args:
        batch: batch of the step.
        mask: name of an edge mask, bool ``[E]``, such as ``"edge_train_mask"``.
        names: names of tensors with one row per edge, such as ``"edge_weight"``.
    """

    def choose() -> tuple[Tensor, ...]:
        edges = lazy_ids(stored_ids(batch.edge_index)[:, batch[mask]], "edge_index")
        return edges, *(batch[name][batch[mask]] for name in names)

    graph, mode = _graph(), active_mode()
    if graph is None:
        return choose()
    if mode is None:
        return graph.cache_selection(f"{mask} {names}", batch.edge_index, choose)
    of = rows_of(batch.edge_index)
    with mode.pause():
        edges, *others = graph.cache_selection(f"{mask} {names}", batch.edge_index, choose)
        if of is not None:
            rows = of.rows.select(batch[mask])
            place(edges, RowPlacement(rows, 1, local_ids="both"))
            for each in others:
                place(each, rows.at(0))
    return edges, *others
