"""For code that looks across nodes outside message passing: what one device would see, under any number of ranks.

Each function is the identity where no strategy of this package is at work, so that a model that uses them runs on one
device as before. They communicate: all ranks must call them alike. N owned rows, H halo rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.norms import SumOverRanks


class _InUse(threading.local):
    """The graph of each thread; the class's own attribute is that of threads which have none, such as autograd's."""

    graph: GraphContext | None = None


_in_use = _InUse()


@contextmanager
def graph_in_use(graph: GraphContext | None, this_thread_only: bool = False) -> Iterator[None]:
    """Makes `graph` the one that the helpers work on while open; None for none."""
    holder = _in_use if this_thread_only else _InUse
    before = holder.graph
    holder.graph = graph
    try:
        yield
    finally:
        holder.graph = before


def expand(x: Tensor) -> Tensor:
    """Returns the rows that ``batch.edge_index`` indexes: the owned ones, and behind them copies of the halo rows.

    ``expand(x)[batch.edge_index[0]]`` has the source row of every edge. Differentiable: gradients of copies are summed
    at the owner.

    Args:
        x: one row per node of the batch, ``[N, ...]``.

    Returns:
        ``[N + H, ...]``; `x` itself on one device.

    Raises:
        UnsupportedModelError: `x` has another number of rows.
    """
    graph = _in_use.graph
    if graph is None:
        return x
    graph.check_rows(x.size(0), "expand")
    graph.propagated("expand")
    return graph.expand(x, "expand")


def reduce(x: Tensor) -> Tensor:
    """Returns the sum at each node of what all ranks hold for it: the transpose of :func:`expand`, differentiable.

    ``reduce(scatter(values, batch.edge_index[0], 0, dim_size=num_rows))``, with ``num_rows = expand(x).size(0)``, sums
    values per edge at the source of each edge, whose out-edges lie on several ranks.

    Args:
        x: a partial sum per row of :func:`expand`'s result, ``[N + H, ...]``.

    Returns:
        ``[N, ...]``; `x` itself on one device.

    Raises:
        UnsupportedModelError: `x` has another number of rows.
    """
    graph = _in_use.graph
    if graph is None:
        return x
    graph.check_expanded_rows(x.size(0), "reduce")
    return graph.exchange.reduce(x, "reduce")


def sum_over_ranks(x: Tensor) -> Tensor:
    """Returns the sum of `x` over all ranks, on every rank: ``sum_over_ranks(x.sum(0))`` is over all nodes. Differentiable.

    Args:
        x: of one shape on all ranks.

    Returns:
        As `x`; `x` itself on one device.
    """
    graph = _in_use.graph
    return x if graph is None else SumOverRanks.apply(x, graph.exchange, "sum_over_ranks")
