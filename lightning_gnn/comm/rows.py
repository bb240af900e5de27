"""Gather of rows of any nodes from their owners, for ids that change from call to call.

Source: DistDGL (2020) section III-C: a distributed key-value store with pull and push, to the owner of a row. A call first sends
the ids to the owners, so it costs one more message than a halo exchange. Each row is sent to a rank once, also for repeated ids.

N nodes of the whole graph, P ranks, n ids or rows of a rank, U distinct rows that a rank requests; ``...`` stands for any
trailing dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.comm.call import Direction, halo_exchange, known_call
from lightning_gnn.comm.exchange import start_messages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter, Moment

ExchangeRows = Callable[[Sequence[Tensor], Sequence[int] | None, str, Direction], list[Tensor]]
"""All-to-all exchange of rows: ``exchange`` of :class:`TransportChannel`, or of a channel with a process group of its own."""


class TransportChannel:
    """All-to-all exchange of a variable number of rows, over the transport of the halo exchange.

    All ranks call its methods in the same order.
    """

    def __init__(self, world: World, meter: Meter) -> None:
        self._world, self._meter = world, meter

    def exchange(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None = None, layer: str = "", direction: Direction = "forward"
    ) -> list[Tensor]:
        """Returns the tensors that all ranks have for this rank.

        Args:
            parts: rows for each rank, including this rank, ``[n, ...]``; dtype and trailing dimensions are equal on all ranks.
            counts: number of rows from each rank; None if unknown, and rows are then int64.
            layer, direction: names for errors and traffic.

        Raises:
            CommunicationError: a rank does not answer.
        """
        rank, size = self._world.rank, self._world.size
        peers = [peer for peer in range(size) if peer != rank]
        if not peers:
            return list(parts)
        if counts is None:
            return self._questions(parts, peers, layer)
        began, own = Moment.now(self._world.device, "send", layer, direction), parts[rank]
        found = [own if peer == rank else own.new_empty((count, *own.shape[1:])) for peer, count in enumerate(counts)]
        sends = [(peer, parts[peer].contiguous()) for peer in peers if parts[peer].numel()]
        receives = [(peer, found[peer]) for peer in peers if found[peer].numel()]
        start_messages(self._world, self._meter, known_call(layer, direction=direction), sends, receives, began)()
        return found

    def _questions(self, parts: Sequence[Tensor], peers: Sequence[int], layer: str) -> list[Tensor]:
        began = Moment.now(self._world.device, "wait", layer, "question")
        # The number of ids goes first, so that no message is empty.
        sends = [(peer, torch.cat([parts[peer].new_tensor([len(parts[peer])]), parts[peer]])) for peer in peers]
        transport = self._world.transport
        traffic = transport.traffic(sends, num_rows=0)
        with self._world.watch.during(halo_exchange(layer, "question"), joint=False):
            found = transport.start_varied([(peer, each.view(torch.uint8)) for peer, each in sends], peers)()
        traffic.seconds = self._meter.since(began, self._world.device, layer, "forward")
        self._meter.record(layer, "forward", traffic)
        found_of = {peer: found[peer].view(torch.int64)[1:] for peer in peers}
        return [found_of.get(peer, part) for peer, part in enumerate(parts)]


@dataclass(frozen=True)
class Request:
    """Row requests between ranks in one call.

    Attributes:
        counts: number of distinct rows that this rank requests from each rank; the rows are in rank order.
        rows: local indices of the rows that each rank, including this rank, requests from this rank.
    """

    counts: list[int]
    rows: list[Tensor]


class OwnedRows:
    """Rows at their owners, where each rank owns a range of positions. All ranks call its methods in the same order.

    Args:
        first: first position of each rank and the end, int64 ``[P + 1]``.
        exchange: function that sends the rows.
    """

    def __init__(self, first: Tensor, exchange: ExchangeRows) -> None:
        self._first, self._exchange = first, exchange

    def request(self, places: Tensor, layer: str = "") -> Request:
        """Send the positions of requested rows to their owners; `places`, int64 ``[U]``, are in rank order."""
        counts = torch.searchsorted(places, self._first).diff().tolist()
        parts = [part - first for part, first in zip(places.split(counts), self._first)]
        return Request(counts, self._exchange(parts, None, layer, "forward"))

    def pull(self, request: Request, read: Callable[[Tensor], Tensor], layer: str = "") -> Tensor:
        """Returns the rows that this rank requests, ``[U, ...]``; `read` returns copies of rows of this rank."""
        return torch.cat(self._exchange([read(rows) for rows in request.rows], request.counts, layer, "forward"))

    def push(self, request: Request, values: Tensor, layer: str = "") -> list[Tensor]:
        """Returns the values of each rank for ``request.rows``: the transpose of :meth:`pull`.

        Args:
            request: requested rows.
            values: values for the rows that this rank requests, ``[U, ...]``.
            layer: name for errors and traffic.
        """
        return self._exchange(values.split(request.counts), list(map(len, request.rows)), layer, "backward")


class AnyRows(OwnedRows):
    """Gather of rows by original node ids, for layers and losses.

    Args:
        n_id: original ids of all ranks' nodes in rank order, int64 ``[N]``.
        counts: number of nodes of each rank.
    """

    def __init__(self, n_id: Tensor, counts: Sequence[int], world: World, meter: Meter) -> None:
        super().__init__(torch.tensor([0, *counts], device=world.device).cumsum(0), TransportChannel(world, meter).exchange)
        self.num_nodes, self._n_id = len(n_id), n_id
        self._place: Tensor | None = None  # position in rank order of each original id

    def fetch(self, x: Tensor, ids: Tensor, layer: str) -> Tensor:
        """Returns the rows of nodes, differentiable.

        Args:
            x: rows of this rank's nodes, ``[n, ...]``; rows behind them, such as replicas, are not read.
            ids: original ids, int64, of any shape and number.
            layer: name for errors and traffic.

        Returns:
            ``[*ids.shape, ...]``.

        Raises:
            ValueError: an id is out of range.
            CommunicationError: a rank does not answer.
        """
        flat = ids.reshape(-1)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_nodes:
            raise ValueError(
                f"ids run from {int(flat.min())} to {int(flat.max())}, but there are {self.num_nodes} nodes: 0 to "
                f"{self.num_nodes - 1}. They are ids in the original graph, as in batch.n_id, not rows of the batch."
            )
        places, inverse = self._places()[flat].unique(return_inverse=True)
        rows = _Pull.apply(x, self, self.request(places, layer), layer)
        return rows.index_select(0, inverse).view(*ids.shape, *x.shape[1:])

    def _places(self) -> Tensor:
        if self._place is None:
            with torch.inference_mode(False):  # evaluation may come first, and training reuses it
                n_id = self._n_id.to(self._first.device)
                self._place = torch.empty_like(n_id)
                self._place[n_id] = torch.arange(self.num_nodes, device=n_id.device)
        return self._place


class _Pull(torch.autograd.Function):
    """:meth:`OwnedRows.pull`; the backward pass is its transpose. Both communicate on every rank, also for empty requests."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: OwnedRows, request: Request, layer: str) -> Tensor:
        ctx.rows, ctx.request, ctx.layer, ctx.num_rows = rows, request, layer, len(x)
        return rows.pull(request, lambda ids: x.index_select(0, ids), layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        # In rank order; the rows of one rank are distinct.
        for ids, values in zip(ctx.request.rows, ctx.rows.push(ctx.request, grad, ctx.layer)):
            out.index_add_(0, ids, values)
        return out, None, None, None
