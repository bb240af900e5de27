"""Rows of any nodes, from their owners, where the rows that are wanted change from call to call and no plan lasts.

Source: DistDGL (2020) section III-C: a distributed key-value store with pull and push, to the owner of a row. Owners are asked
first, so a call costs a message more than a halo exchange, but each row travels to a rank once, however often the rank wants it.

N nodes of the whole graph, P ranks, n ids or rows of a rank, U distinct rows that a rank wants; ``...`` stands for any trailing
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.comm.call import Direction, halo_exchange, known_call
from lightning_gnn.comm.exchange import start_messages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter, Moment

if TYPE_CHECKING:
    from lightning_gnn.comm.channel import GroupChannel


class TransportChannel:
    """Carries rows from every rank to every other, as many as each has for it, over the transport of the halo exchange.

    All ranks make its calls in the same order.
    """

    def __init__(self, world: World, meter: Meter) -> None:
        self._world, self._meter = world, meter

    def exchange(
        self,
        parts: Sequence[Tensor],
        counts: Sequence[int] | None = None,
        layer: str = "",
        direction: Direction = "forward",
    ) -> list[Tensor]:
        """Returns what every rank has for this one.

        Args:
            parts: for each rank, this one included, ``[n, ...]``; dtype and trailing dimensions are equal everywhere.
            counts: rows that each rank has for this one; None if they are not known yet, then rows are int64.
            layer, direction: named in errors and counted under.

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
        # Their number goes first, so that no message is empty.
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
    """What ranks want of each other in one call.

    Attributes:
        counts: distinct rows that this rank wants of each rank; they lie in rank order.
        rows: of this rank that each rank wants, itself included, local ids.
    """

    counts: list[int]
    rows: list[Tensor]


class OwnedRows:
    """Rows at the rank that owns them, where each rank owns a range of places. All ranks make its calls alike.

    Args:
        first: first place of each rank and the end, int64 ``[P + 1]``.
        channel: how rows travel.
    """

    def __init__(self, first: Tensor, channel: TransportChannel | GroupChannel) -> None:
        self._first, self._channel = first, channel

    def request(self, places: Tensor, layer: str = "") -> Request:
        """Tells each rank which of its rows this one wants; `places`, int64 ``[U]``, ascend from rank to rank."""
        counts = torch.searchsorted(places, self._first).diff().tolist()
        parts = [part - first for part, first in zip(places.split(counts), self._first)]
        return Request(counts, self._channel.exchange(parts, None, layer))

    def pull(self, request: Request, read: Callable[[Tensor], Tensor], layer: str = "") -> Tensor:
        """Returns the rows that this rank wants, ``[U, ...]``; `read` returns copies of rows of this rank."""
        return torch.cat(self._channel.exchange([read(rows) for rows in request.rows], request.counts, layer))

    def push(self, request: Request, values: Tensor, layer: str = "") -> list[Tensor]:
        """Returns what each rank has for ``request.rows``: the transpose of :meth:`pull`.

        Args:
            request: which rows.
            values: for those that this rank wants, ``[U, ...]``.
            layer: named in errors and counted under.
        """
        counts = [len(rows) for rows in request.rows]
        return self._channel.exchange(values.split(request.counts), counts, layer, "backward")


class AnyRows(OwnedRows):
    """Rows by the ids that their nodes have in the original graph, for layers and losses.

    Args:
        n_id: original ids of all ranks' nodes in rank order, int64 ``[N]``.
        counts: nodes of each rank.
    """

    def __init__(self, n_id: Tensor, counts: Sequence[int], world: World, meter: Meter) -> None:
        super().__init__(torch.tensor([0, *counts], device=world.device).cumsum(0), TransportChannel(world, meter))
        self.num_nodes, self._n_id = len(n_id), n_id
        self._place: Tensor | None = None  # in rank order, of each original id

    def fetch(self, x: Tensor, ids: Tensor, layer: str) -> Tensor:
        """Returns the rows of nodes, differentiable.

        Args:
            x: rows of this rank's nodes, ``[n, ...]``; what lies behind them, such as replicas, is not read.
            ids: original ids, int64, of any shape, as many as this rank likes.
            layer: named in errors and counted under.

        Returns:
            ``[*ids.shape, ...]``.

        Raises:
            ValueError: an id of no node.
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
            with torch.inference_mode(False):  # evaluation may come first, and training use it later
                n_id = self._n_id.to(self._first.device)
                self._place = torch.empty_like(n_id)
                self._place[n_id] = torch.arange(self.num_nodes, device=n_id.device)
        return self._place


class _Pull(torch.autograd.Function):
    """:meth:`OwnedRows.pull`; backward is its transpose. It communicates on every rank, also on one that wants nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: OwnedRows, request: Request, layer: str) -> Tensor:
        ctx.rows, ctx.request, ctx.layer, ctx.num_rows = rows, request, layer, len(x)
        return rows.pull(request, lambda chosen: x.index_select(0, chosen), layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        # In rank order; the rows of one rank are distinct.
        for chosen, values in zip(ctx.request.rows, ctx.rows.push(ctx.request, grad, ctx.layer)):
            out.index_add_(0, chosen, values)
        return out, None, None, None
