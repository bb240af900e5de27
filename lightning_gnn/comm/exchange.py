"""The halo exchange of an edge cut: S fetches the rows that a rank's edges read, its transpose sends gradients home.

Source: DGCL (EuroSys'21), graph allgather (section 4.1) and its backward counterpart (section 6.2). :class:`HaloExchange`
sends one direct message per pair of ranks, which is the paper's peer-to-peer baseline;
:class:`~lightning_gnn.comm.planned.PlannedExchange` follows a plan.

N owned rows, H halo rows, P ranks; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.kernels import add_rows, take_rows
from lightning_gnn.partition.shard import HaloPlan

T = TypeVar("T")


def during_exchange(world: World, layer: str, direction: str) -> AbstractContextManager[None]:
    """Says while it is open, to the watchdog and in errors, whose rows are on their way."""
    return world.during(f"Halo exchange ({direction}) of layer '{layer}'")


def start_counted(
    start: Callable[[], Callable[[], T]],
    traffic: Traffic,
    began: float,
    world: World,
    meter: Meter,
    layer: str,
    direction: str,
) -> Callable[[], T]:
    """Starts messages; returns the function that waits for them, counts them, and returns what waiting gave.

    Args:
        start: starts them and returns what waits.
        traffic: bytes, messages and rows that they are.
        began: when packing them began, by ``time.perf_counter``.
        world, meter: the ranks, and where traffic is counted.
        layer, direction: counted under, and named in errors.

    Raises:
        CommunicationError: from here and from the returned function: a peer does not answer.
    """
    with during_exchange(world, layer, direction):
        world.watch.begins(joint=False)
        wait = start()
    traffic.seconds = meter.since(began, "send", layer, direction)

    def finish() -> T:
        began = time.perf_counter()
        with during_exchange(world, layer, direction):
            result = wait()
        traffic.seconds += meter.since(began, "wait", layer, direction)
        meter.record(layer, direction, traffic)
        return result

    return finish


class RowExchange(ABC):
    """S and S^T of one rank; how the rows travel is the subclass's.

    Args:
        num_owned, num_halo: N, H.
        idle: whether this rank neither sends nor receives anything, on behalf of others included.
        world: the ranks.
        meter: where traffic is counted.

    Attributes:
        own_lengths: where a rank holds rows of others too: by the length of a tensor with one entry per row or edge, how many
            are this rank's own. These come first, and they alone count in sums over ranks.
    """

    def __init__(self, num_owned: int, num_halo: int, idle: bool, world: World, meter: Meter) -> None:
        self.num_owned, self.num_halo, self.idle = num_owned, num_halo, idle
        self.world, self.meter = world, meter
        self.own_lengths: dict[int, int] = {}
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}

    def buffer(self, use: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns scratch memory that lives as long as the exchange; valid until the next call for the same `use`."""
        key = (use, shape, dtype)
        if key not in self._buffers:
            # An inference tensor could not take part in autograd later, and evaluation may well come first.
            with torch.inference_mode(False):
                self._buffers[key] = torch.empty(shape, dtype=dtype, device=self.world.device)
        return self._buffers[key]

    def begin_step(self) -> None:  # noqa: B027 (most need not know)
        """Is told that a step begins, forward and backward."""

    def exactly(self) -> AbstractContextManager[None]:
        """Rows travel as they are while this is open, whatever the codec: for what is kept. All ranks must open it."""
        return self.world.wire.coding(False)

    @abstractmethod
    def start_fetch(self, x: Tensor, halo: Tensor, layer: str) -> Callable[[], None]:
        """Starts S: sends rows that others read and receives into `halo`; returns the function that waits.

        Args:
            x: owned rows, ``[N, ...]``; unchanged until the returned function has returned.
            halo: receives the halo rows in place, ``[H, ...]``, contiguous.
            layer: named in errors and counted under.
        """

    @abstractmethod
    def outgoing(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns memory for the halo rows' gradients that the next :meth:`start_return` sends: a copy less."""

    @abstractmethod
    def start_return(self, halo_grad: Tensor, layer: str) -> Callable[[Tensor], None]:
        """Starts S^T: sends the halo rows' gradients home; the returned function waits and adds those that arrive.

        Args:
            halo_grad: ``[H, ...]``, contiguous.
            layer: named in errors and counted under.

        Returns:
            ``finish(grad)``: adds in place to ``grad`` ``[N, ...]``, in an order that does not depend on timing.
        """

    def expand_all(self, tensors: Sequence[Tensor], layer: str) -> list[Tensor]:
        """Returns S x of several tensors of one dtype, as :meth:`expand` does, in the messages of one: side by side."""
        if len(tensors) == 1 or self.idle:
            return [self.expand(x, layer) for x in tensors]
        widths = [x.shape[1:].numel() for x in tensors]
        rows = self.expand(torch.cat([x.reshape(len(x), width) for x, width in zip(tensors, widths)], 1), layer)
        return [part.contiguous().view(len(rows), *x.shape[1:]) for part, x in zip(rows.split(widths, dim=1), tensors)]

    def start(
        self,
        out: Tensor,
        out_counts: list[int],
        into: Tensor,
        into_counts: list[int],
        layer: str,
        direction: str,
        began: float,
    ) -> Callable[[], None]:
        """Starts one message to and from every peer that has rows to exchange, and counts it; returns the function that waits.

        Args:
            out, into: what is sent and what is filled, contiguous, of one dtype, rows in rank order; ``out`` and ``into``
                are left alone until the returned function has returned.
            out_counts, into_counts: rows for and from each rank, ``[P]``.
            layer, direction: counted under, and named in errors; ``"forward"`` or ``"backward"``.
            began: when packing them began, by ``time.perf_counter``.

        Raises:
            CommunicationError: from the returned function too: a peer does not answer.
        """
        rows = sum(out_counts)
        row_bytes = self.world.wire.message_bytes(out) // max(rows, 1)
        sent = ((peer, count * row_bytes) for peer, count in enumerate(out_counts) if count)
        traffic = Traffic.of(sent, rows)

        def start() -> Callable[[], None]:
            return self.world.wire.start(out, out_counts, into, into_counts)

        return start_counted(start, traffic, began, self.world, self.meter, layer, direction)

    def sum_over_ranks(self, x: Tensor, operation: str) -> Tensor:
        """Returns the sum of equal-shaped tensors of all ranks, bit-identical on every rank; errors name `operation`."""
        return self.world.all_reduce_(x.clone(), operation)

    def max_over_ranks(self, x: Tensor, operation: str) -> Tensor:
        """Returns the elementwise maximum of equal-shaped tensors of all ranks, on every rank; errors name `operation`."""
        return self.world.all_gather(x, operation).amax(0)

    def expand(self, x: Tensor, layer: str, dim: int = 0) -> Tensor:
        """Returns S x, differentiable: owned rows first, halo rows after them.

        Args:
            x: ``[N, ...]``, or with the nodes along `dim`.
            layer: named in errors and counted under.

        Returns:
            ``[N + H, ...]``, or longer along `dim`.
        """
        if self.idle:
            return x
        if dim % x.dim():
            return self.expand(x.movedim(dim, 0).contiguous(), layer).movedim(0, dim)
        return _Expand.apply(x, self, layer)

    def reduce(self, x: Tensor, layer: str) -> Tensor:
        """Returns S^T x, differentiable: each owned row plus what other ranks hold for it in their halo rows.

        Args:
            x: ``[N + H, ...]``, owned rows first.
            layer: named in errors and counted under.

        Returns:
            ``[N, ...]``.
        """
        if self.idle:
            return x
        return _Reduce.apply(x, self, layer)


class HaloExchange(RowExchange):
    """Moves rows directly between the owner of a node and the ranks whose edges read it.

    Args:
        plan: which rows go to whom.
        world: the ranks.
        meter: where traffic is counted.
    """

    def __init__(self, plan: HaloPlan, world: World, meter: Meter) -> None:
        self.plan = plan
        self.recv_counts = list(plan.recv_counts)
        self.send_counts = [len(rows) for rows in plan.send_rows]
        self.send_rows = torch.from_numpy(plan.all_send_rows()).to(world.device)
        self._send_rows_by_peer = self.send_rows.split(self.send_counts)
        num_halo = sum(self.recv_counts)
        super().__init__(plan.num_owned, num_halo, num_halo == 0 and len(self.send_rows) == 0, world, meter)

    @override
    def start_fetch(self, x: Tensor, halo: Tensor, layer: str) -> Callable[[], None]:
        began = time.perf_counter()
        packed = self.world.scratch((len(self.send_rows), *x.shape[1:]), x.dtype)
        take_rows(x, self.send_rows, packed)
        return self.start(packed, self.send_counts, halo, self.recv_counts, layer, "forward", began)

    @override
    def outgoing(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self.world.scratch(shape, dtype)

    @override
    def start_return(self, halo_grad: Tensor, layer: str) -> Callable[[Tensor], None]:
        """Peer after peer: the rows of one are distinct, so no two additions meet, the paper's non-atomic backward."""
        began = time.perf_counter()
        arrived = self.buffer("return", torch.Size((len(self.send_rows), *halo_grad.shape[1:])), halo_grad.dtype)
        wait = self.start(halo_grad, self.recv_counts, arrived, self.send_counts, layer, "backward", began)

        def finish(grad: Tensor) -> None:
            wait()
            for rows, values in zip(self._send_rows_by_peer, arrived.split(self.send_counts)):
                if len(rows):
                    add_rows(grad, rows, values)

        return finish

    def largest(self, x: Tensor, layer: str) -> Tensor:
        """Returns the largest of each owned row and of what other ranks hold for it, ``[N, ...]``; not differentiable.

        Args:
            x: ``[N + H, ...]``, owned rows first; minus infinity for nothing.
            layer: named in errors and counted under.
        """
        own = x[: self.num_owned].clone()
        if not self.idle:
            arrived = x.new_empty((len(self.send_rows), *x.shape[1:]))
            halo, began = x[self.num_owned :].contiguous(), time.perf_counter()
            self.start(halo, self.recv_counts, arrived, self.send_counts, layer, "backward", began)()
            for rows, values in zip(self._send_rows_by_peer, arrived.split(self.send_counts)):
                own[rows] = torch.maximum(own[rows], values)
        return own

    @override
    def expand_all(self, tensors: Sequence[Tensor], layer: str) -> list[Tensor]:
        """In the messages of one, but without a copy of all tensors side by side, unless a codec is to see whole rows."""
        if len(tensors) == 1 or self.idle or (self.world.wire.codec is not None and self.world.wire.codes):
            return super().expand_all(tensors, layer)
        return list(_ExpandAll.apply(self, layer, *tensors))


def _with_halo(exchange: RowExchange, x: Tensor, layer: str) -> Tensor:
    """S: ``[N, ...]`` to ``[N + H, ...]``."""
    out = x.new_empty((exchange.num_owned + exchange.num_halo, *x.shape[1:]))
    wait = exchange.start_fetch(x, out[exchange.num_owned :], layer)
    out[: exchange.num_owned] = x
    wait()
    return out


def _halo_sent_home(exchange: RowExchange, x: Tensor, layer: str) -> Tensor:
    """S^T: ``[N + H, ...]`` to ``[N, ...]``."""
    finish = exchange.start_return(x[exchange.num_owned :].contiguous(), layer)
    own = x[: exchange.num_owned].clone()
    finish(own)
    return own


class _Expand(torch.autograd.Function):
    """S as a concatenation, for code that indexes owned and halo rows alike; backward is S^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange, layer: str) -> Tensor:
        ctx.exchange, ctx.layer = exchange, layer
        return _with_halo(exchange, x, layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _halo_sent_home(ctx.exchange, grad, ctx.layer), None, None


def _blocks(packed: Tensor, counts: Sequence[int], widths: Sequence[int]) -> list[list[Tensor]]:
    """Returns the part of each tensor in each peer's message, ``[rows of the peer, width]`` by tensor, then peer.

    A peer's rows of all tensors, ``packed`` ``[rows, sum of widths]``, lie together: tensor after tensor.
    """
    by_peer = [
        message.view(-1).split([len(message) * width for width in widths]) for message in packed.split(list(counts))
    ]
    return [[parts[i].view(-1, width) for parts in by_peer] for i, width in enumerate(widths)]


class _ExpandAll(torch.autograd.Function):
    """S of several tensors in one message per peer; backward is S^T of all."""

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, layer: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.layer = exchange, layer
        began = time.perf_counter()
        first, owned = tensors[0], exchange.num_owned
        widths = [x.shape[1:].numel() for x in tensors]
        packed = exchange.world.scratch((len(exchange.send_rows), sum(widths)), first.dtype)
        for x, parts in zip(tensors, _blocks(packed, exchange.send_counts, widths)):
            for rows, part in zip(exchange._send_rows_by_peer, parts):
                take_rows(x.reshape(owned, -1), rows, part)
        halo = exchange.buffer("halo of all", torch.Size((exchange.num_halo, sum(widths))), first.dtype)
        counts = exchange.recv_counts
        wait = exchange.start(packed, exchange.send_counts, halo, counts, layer, "forward", began)
        outs = [x.new_empty((owned + exchange.num_halo, *x.shape[1:])) for x in tensors]
        for x, out in zip(tensors, outs):
            out[:owned] = x
        wait()
        for out, parts in zip(outs, _blocks(halo, counts, widths)):
            for part, rows in zip(parts, out[owned:].split(counts)):
                rows.view(part.shape).copy_(part)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, owned = ctx.exchange, ctx.exchange.num_owned
        began = time.perf_counter()
        widths = [grad.shape[1:].numel() for grad in grads]
        first = grads[0]
        packed = exchange.outgoing(torch.Size((exchange.num_halo, sum(widths))), first.dtype)
        for grad, parts in zip(grads, _blocks(packed, exchange.recv_counts, widths)):
            for part, rows in zip(parts, grad[owned:].split(exchange.recv_counts)):
                part.copy_(rows.reshape(part.shape))
        arrived = exchange.buffer("return of all", torch.Size((len(exchange.send_rows), sum(widths))), first.dtype)
        counts = exchange.send_counts
        wait = exchange.start(packed, exchange.recv_counts, arrived, counts, ctx.layer, "backward", began)
        owns = [grad[:owned].clone() for grad in grads]
        wait()
        for own, parts in zip(owns, _blocks(arrived, counts, widths)):
            for rows, part in zip(exchange._send_rows_by_peer, parts):
                if len(rows):
                    add_rows(own.view(owned, -1), rows, part)
        return None, None, *owns


class _Reduce(torch.autograd.Function):
    """S^T; backward is S."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange, layer: str) -> Tensor:
        ctx.exchange, ctx.layer = exchange, layer
        return _halo_sent_home(exchange, x, layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _with_halo(ctx.exchange, grad, ctx.layer), None, None
