"""Rows of any nodes, from their owners, where the rows that are wanted change from call to call and no plan lasts.

Source: DistDGL (2020) section III-C: a distributed key-value store with pull and push, to the owner of a row. Owners are asked
first, so a call costs a message more than a halo exchange, but each row travels to a rank once, however often the rank wants it.

N nodes of the whole graph, P ranks, n ids or rows of a rank, U distinct rows that a rank wants; ``...`` stands for any trailing
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.comm.call import Direction, halo_exchange, known_call
from lightning_gnn.comm.exchange import start_messages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter, Moment

_HEAD = 16_384
"""Bytes of the first message of each pair of ranks in :meth:`GroupChannel.start`. Gloo sends what the receiver has made room for:
a longer rest costs another round trip, so that small messages should not have one; 16 kB take 0.1 ms at 1 Gbit/s."""


def packed(fields: Sequence[Tensor]) -> Tensor:
    """Returns tensors of any dtype, ``[n, ...]`` each, side by side as bytes, behind how many rows each has."""
    pieces = [torch.tensor([len(field) for field in fields]).view(torch.uint8)]
    for field in fields:
        if field.numel():
            pieces.append(field.contiguous().view(-1).view(torch.uint8))
            if odd := len(pieces[-1]) % 8:  # each begins where its dtype may
                pieces.append(pieces[-1].new_zeros(8 - odd))
    return torch.cat(pieces)


def unpacked(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns what :func:`packed` got; `like` are empty tensors of the same dtypes and trailing dimensions."""
    begin, found = 8 * len(like), []
    for size, each in zip(data[:begin].view(torch.int64).tolist(), like):
        num_bytes = size * each.element_size() * each.shape[1:].numel()
        shape = size, *each.shape[1:]
        found.append(data[begin : begin + num_bytes].view(each.dtype).view(shape) if num_bytes else each.new_empty(shape))
        begin += num_bytes + -num_bytes % 8
    return found


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


class GroupChannel:
    """A process group of its own, for tensors on the CPU, beside everything else that ranks exchange.

    Calls come from any one thread of each rank; making and closing it is a call, too.

    Args:
        purpose: named in errors.

    Attributes:
        bytes_received: from other ranks, but for what fills up short messages.
        exchanges: how often ranks have waited for each other.
    """

    def __init__(self, world: World, purpose: str = "Sampling") -> None:
        self._world, self._purpose = world, purpose
        # Gloo, also beside GPUs: what is wanted lies in host memory, and must not wait for a stream.
        self._group = dist.new_group(timeout=world.group_timeout, backend="gloo")
        self.bytes_received = self.exchanges = 0

    def exchange(
        self,
        parts: Sequence[Tensor],
        counts: Sequence[int] | None = None,
        layer: str = "",
        direction: Direction = "forward",
    ) -> list[Tensor]:
        """See :meth:`TransportChannel.exchange`; rows of unknown number may have any dtype."""
        first = parts[0]
        sizes = torch.tensor([len(part) for part in parts])
        row_bytes = first.element_size() * first.shape[1:].numel()
        with self._world.watch.during(self._purpose, RuntimeError):
            if counts is None:
                arriving = torch.empty_like(sizes)
                dist.all_to_all_single(arriving, sizes, group=self._group)
            else:
                arriving = torch.tensor(counts)
            data = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
            into = torch.empty(int(arriving.sum()) * row_bytes, dtype=torch.uint8)
            in_bytes, out_bytes = ((each * row_bytes).tolist() for each in (arriving, sizes))
            dist.all_to_all_single(into, data, in_bytes, out_bytes, group=self._group)
        self.bytes_received += into.numel() - in_bytes[self._world.rank]
        self.exchanges += 1
        return list(into.view(first.dtype).view(-1, *first.shape[1:]).split(arriving.tolist()))

    def start(self, sends: Mapping[int, Tensor], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
        """Starts to send bytes to some ranks and to receive, from each of `senders`, as many as it sends. Others take no part.

        Args:
            sends: by rank, bytes for it, uint8 ``[n]``.
            senders: ranks that send something here.

        Returns:
            Waits, and returns the bytes by sender. Ranks wait before they start the next exchange.

        Raises:
            CommunicationError: a rank does not answer; from the returned function, too.
        """
        room = _HEAD - 8
        leaving: list[tuple[Any, Tensor]] = []
        with self._world.watch.during(self._purpose, RuntimeError):
            heads = {peer: torch.empty(_HEAD, dtype=torch.uint8) for peer in senders}
            arriving: dict[int, Any] = {peer: dist.irecv(head, peer, group=self._group) for peer, head in heads.items()}
            for peer, data in sends.items():
                head = torch.zeros(_HEAD, dtype=torch.uint8)
                head[:8], head[8 : 8 + len(data)] = torch.tensor([len(data)]).view(torch.uint8), data[:room]
                pieces = [head, data[room:]] if len(data) > room else [head]
                leaving += [(dist.isend(piece, peer, group=self._group), piece) for piece in pieces]

        def wait() -> dict[int, Tensor]:
            found: dict[int, Tensor] = {}
            rests: list[Any] = []
            with self._world.watch.during(self._purpose, RuntimeError):
                for peer, work in arriving.items():
                    work.wait()
                    size = int(heads[peer][:8].view(torch.int64))
                    found[peer] = heads[peer][8 : 8 + size]
                    if size > room:
                        whole = torch.empty(size, dtype=torch.uint8)
                        whole[:room], found[peer] = found[peer], whole
                        rests.append(dist.irecv(whole[room:], peer, group=self._group))
                    self.bytes_received += 8 + size
                for work in (*rests, *(work for work, _ in leaving)):
                    work.wait()
            self.exchanges += 1
            return found

        return wait

    def close(self) -> None:
        """Ends the group; all ranks call it."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


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
