"""Interface of halo exchanges: S gathers halo rows, and its transpose adds values for halo rows at their owners.

Source: DGCL (EuroSys'21), graph allgather (section 4.1) and its backward counterpart (section 6.2). :class:`HaloExchange` sends
one direct message per pair of ranks, which is the paper's peer-to-peer baseline.
:class:`~lightning_gnn.extensions.plans.planned_exchange.PlannedExchange` follows a plan.

N local nodes, H halo nodes, P ranks; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Self, override

from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter, Moment, Traffic
from lightning_gnn.partition.shard import HaloPlan


def count_messages(
    world: World, meter: Meter, call: Call, began: Moment, traffic: Traffic, wait: Callable[[], None]
) -> Callable[[], None]:
    """Returns a function that waits for started messages and records their traffic.

    Args:
        world: ranks.
        meter: traffic meter.
        call: identifier of the exchange, for traffic and errors.
        began: time at which packing the messages began.
        traffic: traffic of the messages.
        wait: function that waits for the messages.

    Raises:
        CommunicationError: from the returned function: a peer does not answer.
    """
    layer, direction = call.layer, call.direction
    traffic.seconds = meter.since(began, world.device, layer, direction)

    def finish() -> None:
        began = Moment.now(world.device, "wait", layer, direction)
        with world.watch.during(call.name):
            wait()
        traffic.seconds += meter.since(began, world.device, layer, direction)
        meter.record(layer, direction, traffic)

    return finish


def start_messages(
    world: World,
    meter: Meter,
    call: Call,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    began: Moment,
) -> Callable[[], None]:
    """Starts the messages of an exchange; returns a function that waits for the messages and records their traffic."""
    with world.watch.during(call.name, joint=False):
        traffic, wait = world.transport.traffic(sends), world.transport.start_each(sends, receives)
    return count_messages(world, meter, call, began, traffic, wait)


class Triples:
    """Entries of a matrix over all nodes, with the ids of the relabeled graph.

    Attributes:
        row, col: ids, int64 ``[E]``.
        value: values, ``[E]``; None for ones.
    """

    def __init__(self, row: Tensor, col: Tensor, value: Tensor | None) -> None:
        self.row, self.col, self.value = row, col, value

    def transpose(self) -> Triples:
        return Triples(self.col, self.row, self.value)

    def __getitem__(self, index: Tensor) -> Triples:
        return Triples(self.row[index], self.col[index], None if self.value is None else self.value[index])


@dataclass(frozen=True)
class Products:
    """Matrices of layers whose edges are distributed over several ranks.

    Attributes:
        matrix: function that makes the matrix of a sum over edges from the entries of this rank's rows. It communicates.
        spread: function for edges with attention or max/min aggregation. It takes the bytes that a step sends for a copy of a
            source's row, and for a partial result of a target. It returns a function that makes the matrix; a scheme may assign
            edges to ranks by the ratio of the bytes. None if a rank computes the edges of its local nodes.
    """

    matrix: Callable[[Triples], Matrix]
    spread: Callable[[int, int], Callable[[Triples], Matrix]] | None = None


class Exchange(ABC):
    """S and its transpose for one rank; layers receive all rows of other ranks through it.

    A scheme implements two methods, :meth:`start_expand` and :meth:`start_reduce`. Any number of exchanges may be in progress,
    and ranks may wait for them in any order. All ranks start them in the same order.

    Args:
        num_owned: number of local nodes, N.
        num_halo: number of halo nodes, H.
        world: ranks.
        meter: traffic meter.
        idle: whether this rank sends and receives nothing, including relayed messages.

    Attributes:
        own_lengths: number of this rank's own rows, by the number of rows of a tensor of nodes or edges; set if a rank also has
            rows of other ranks. Own rows are first, and only they count in sums over ranks.
        most_propagations: maximum number of propagations along edges in a step; None for no limit.
        products: matrices of edges that several ranks hold; None if a rank computes all edges of its local nodes.
        present: mask of the halo rows received in this step, bool ``[H]``; None for all. Absent rows are 0 and layers leave out
            their edges. Layers multiply the sums of the other rows by `scale`.
        in_stages: whether waiting sends further messages. No other exchange of the same id may start before it is complete.
        one_way: whether halo rows carry no gradient. A transformation of the input before the exchange would get no gradient from
            other ranks, so layers exchange first.
    """

    present: Tensor | None = None
    scale = 1.0
    in_stages = False
    one_way = False

    def __init__(self, num_owned: int, num_halo: int, world: World, meter: Meter, idle: bool = False) -> None:
        self.num_owned, self.num_halo, self.idle = num_owned, num_halo, idle
        self.world, self.meter, self.buffers = world, meter, world.buffers(world.device)
        self.own_lengths: dict[int, int] = {}
        self.most_propagations: int | None = None
        self.products: Products | None = None

    def with_products(self, products: Products) -> Self:
        """Returns this exchange with matrices for layers whose edges several ranks hold."""
        self.products = products
        return self

    # Methods of a scheme #########################################################

    @abstractmethod
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        """Starts S: sends local rows and receives into `halo`; returns a function that waits for both.

        Args:
            x: local rows, ``[N, ...]``, contiguous. It must not change before the returned function has returned.
            halo: receive buffer of the halo rows, ``[H, ...]``, contiguous.
            call: identifier of the exchange.
        """

    @abstractmethod
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        """Starts S^T: sends values for halo rows to their owners; returns a function that waits and reduces.

        Args:
            halo: values for halo rows, ``[H, ...]``, contiguous. It must not change before the returned function has returned.
            call: identifier of the exchange.

        Returns:
            ``finish(out)``: function that adds received values to ``out`` ``[N, ...]`` in place, or takes the maximum, depending
                on ``call.operation``. The order does not depend on timing.
        """

    def begin_step(self, step: Step) -> None:  # noqa: B027 (most need not know)
        """Hook called at the start of a step, before its first message."""

    def drain(self) -> None:  # noqa: B027
        """Wait for all messages in progress: before evaluation and checkpoints, and at the end of a run."""

    @property
    def approximate(self) -> bool:
        """Whether rows may be approximate now: in training before the last epoch, except for values that layers cache."""
        return self.world.transport.approximate

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank's exchange for a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the result of :meth:`state_dict` of this rank, from a run with the same number of ranks."""

    # Methods for layers ##########################################################

    def expand(self, x: Tensor, layer: str, dim: int = 0) -> Tensor:
        """Returns S x, differentiable: local rows, then halo rows.

        Args:
            x: local rows, ``[N, ...]``, or with the nodes along `dim`.
            layer: name for errors and traffic.
            dim: dimension of the nodes.

        Returns:
            ``[N + H, ...]``, or with N + H entries along `dim`.
        """
        call = self.world.call(layer)
        if self.idle:
            return x
        if dim % x.dim():
            return _Expanded.apply(x.movedim(dim, 0).contiguous(), self, call).movedim(0, dim)
        return _Expanded.apply(x, self, call)

    def expand_all(self, tensors: Sequence[Tensor], layer: str) -> list[Tensor]:
        """Returns S x of several tensors of one dtype, see :meth:`expand`, in one exchange."""
        if len(tensors) == 1 or self.idle:
            return [self.expand(x, layer) for x in tensors]
        widths = [x.shape[1:].numel() for x in tensors]
        rows = self.expand(torch.cat([x.reshape(len(x), width) for x, width in zip(tensors, widths)], 1), layer)
        return [part.contiguous().view(len(rows), *x.shape[1:]) for part, x in zip(rows.split(widths, dim=1), tensors)]

    def reduce(self, x: Tensor, layer: str) -> Tensor:
        """Returns S^T x, differentiable: local rows plus the values of other ranks for them.

        Args:
            x: ``[N + H, ...]``, local rows first.
            layer: name for errors and traffic.

        Returns:
            ``[N, ...]``.
        """
        call = self.world.call(layer)
        return x if self.idle else _Reduced.apply(x, self, call)

    def reduce_max(self, x: Tensor, layer: str) -> Tensor:
        """Returns the maximum of local rows and the values of other ranks for them, ``[N, ...]``; not differentiable.

        Args:
            x: ``[N + H, ...]``, local rows first; minus infinity for no value.
            layer: name for errors and traffic.
        """
        call = self.world.call(layer)
        if self.idle:
            return x[: self.num_owned].clone()
        return _Reduced.apply(x.detach(), self, replace(call, operation="max"))

    def sum_over_ranks(self, x: Tensor, operation: str) -> Tensor:
        """Returns the sum of equal-shaped tensors of all ranks, bit-identical on every rank; errors name `operation`."""
        return self.world.all_reduce_(x.clone(), operation)

    def max_over_ranks(self, x: Tensor, operation: str) -> Tensor:
        """Returns the elementwise maximum of equal-shaped tensors of all ranks, on every rank; errors name `operation`."""
        return self.world.all_gather(x, operation).amax(0)

    # Methods for schemes #########################################################

    def now(self, call: Call) -> Moment:
        """Returns the current time on host and device, at which packing the rows of an exchange begins; see :meth:`send`."""
        return Moment.now(self.world.device, "send", call.layer, call.direction)

    def send(
        self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call, began: Moment
    ) -> Callable[[], None]:
        """Starts one message to and from every peer with rows to exchange; returns a function that waits and records traffic.

        Args:
            out: send buffer, contiguous, rows in rank order. It must not change before the returned function has returned.
            out_counts: rows for each rank, ``[P]``.
            into: receive buffer, contiguous, of the dtype of `out`, rows in rank order. Not to be used before the returned
                function has returned.
            into_counts: rows from each rank, ``[P]``.
            call: identifier of the exchange, for traffic and errors.
            began: time at which packing began, see :meth:`now`.

        Raises:
            CommunicationError: a peer does not answer. The returned function may raise it, too.
        """
        transport = self.world.transport
        with self.world.watch.during(call.name, joint=False):
            sends, receives, traffic, around = transport.messages(out, out_counts, into, into_counts, call, self)
            wait = transport.start_each(sends, receives)
        return count_messages(self.world, self.meter, call, began, traffic, wait if around is None else around(wait))


class Matrix(ABC):
    """One rank's block of a matrix over all nodes, ``[n, n]``, and of its transpose."""

    @abstractmethod
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        """Returns this rank's rows of the product, ``[N, F]``, in at least float32.

        Args:
            x: this rank's rows, ``[N, F]``, contiguous.
            call: identifier of the exchange. In the backward pass, the matrix is transposed.
        """

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """Exchanges that the product uses."""
        return ()


class HaloExchange(Exchange):
    """Exchange by direct messages between the owner of a node and the ranks whose edges start at it.

    Args:
        plan: send indices and receive counts.
        world, meter: see :class:`Exchange`.
    """

    def __init__(self, plan: HaloPlan, world: World, meter: Meter) -> None:
        self.plan = plan
        self.recv_counts = list(plan.recv_counts)
        self.send_counts = [len(rows) for rows in plan.send_rows]
        self.send_rows = torch.from_numpy(np.concatenate(plan.send_rows)).to(world.device)
        num_halo = sum(self.recv_counts)
        self._send_parts = self.send_rows.split(self.send_counts)
        super().__init__(plan.num_owned, num_halo, world, meter, num_halo == 0 and len(self.send_rows) == 0)

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        began = Moment.now(self.world.device, "send", call.layer, call.direction)
        packed = self.world.transport.scratch((len(self.send_rows), *x.shape[1:]), x.dtype)
        torch.index_select(x.detach(), 0, self.send_rows, out=packed)
        return self.send(packed, self.send_counts, halo, self.recv_counts, call, began)

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        """See :class:`Exchange`. Peers are added one by one, with distinct rows each: the paper's non-atomic backward."""
        began = Moment.now(self.world.device, "send", call.layer, call.direction)
        arrived = self.buffers.take((len(self.send_rows), *halo.shape[1:]), halo.dtype)
        wait = self.send(halo, self.recv_counts, arrived, self.send_counts, call, began)

        def finish(out: Tensor) -> None:
            wait()
            self.add_arrived(out, arrived, call)
            self.buffers.give_back(arrived)

        return finish

    def add_arrived(self, out: Tensor, arrived: Tensor, call: Call) -> None:
        """Add values of other ranks to local rows in place, in the order of :attr:`send_rows`, or take the maximum."""
        for rows, values in zip(self._send_parts, arrived.split(self.send_counts)):
            if len(rows) and call.operation == "sum":
                out.index_add_(0, rows, values)
            elif len(rows):
                out[rows] = torch.maximum(out[rows], values)


class _Expanded(torch.autograd.Function):
    """S as a concatenation, ``[N, ...]`` to ``[N + H, ...]``, for code that indexes local and halo rows together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, call: Call) -> Tensor:
        ctx.exchange, ctx.call = exchange, call
        out = x.new_empty((exchange.num_owned + exchange.num_halo, *x.shape[1:]))
        wait = exchange.start_expand(x.contiguous(), out[exchange.num_owned :], call)
        out[: exchange.num_owned] = x
        wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Reduced.forward(ctx, grad, ctx.exchange, ctx.call.backward()), None, None


class _Reduced(torch.autograd.Function):
    """S^T, ``[N + H, ...]`` to ``[N, ...]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, call: Call) -> Tensor:
        ctx.exchange, ctx.call = exchange, call
        finish = exchange.start_reduce(x[exchange.num_owned :].contiguous(), call)
        own = x[: exchange.num_owned].clone()
        finish(own)
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Expanded.forward(ctx, grad, ctx.exchange, ctx.call.backward()), None, None
