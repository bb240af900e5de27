"""The exchange contract: S brings halo rows, its transpose adds what ranks hold for the rows of others at their owners.

Source: DGCL (EuroSys'21), graph allgather (section 4.1) and its backward counterpart (section 6.2). :class:`HaloExchange` sends
one direct message per pair of ranks, which is the paper's peer-to-peer baseline;
:class:`~lightning_gnn.extensions.plans.planned_exchange.PlannedExchange` follows a plan.

N owned rows, H halo rows, P ranks; ``...`` stands for any trailing dimensions.
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
from lightning_gnn.kernels import add_rows, take_rows
from lightning_gnn.partition.shard import HaloPlan


def count_messages(
    world: World, meter: Meter, call: Call, began: Moment, traffic: Traffic, wait: Callable[[], None]
) -> Callable[[], None]:
    """Counts the messages of a call, which have been started; returns the function that waits for them.

    Args:
        world, meter: the ranks, and where traffic is counted.
        call: counted under, and named in errors.
        began: when packing the messages began.
        traffic: what they send.
        wait: waits for them.

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
    """Starts the messages of a call, and counts them; returns the function that waits for them."""
    with world.watch.during(call.name, joint=False):
        traffic, wait = world.transport.traffic(sends), world.transport.start_each(sends, receives)
    return count_messages(world, meter, call, began, traffic, wait)


class Triples:
    """Entries of a matrix over all nodes, ids as in the relabelled graph.

    Attributes:
        row, col: int64 ``[E]``.
        value: ``[E]``; None for ones.
    """

    def __init__(self, row: Tensor, col: Tensor, value: Tensor | None) -> None:
        self.row, self.col, self.value = row, col, value

    def transpose(self) -> Triples:
        return Triples(self.col, self.row, self.value)

    def __getitem__(self, chosen: Tensor) -> Triples:
        return Triples(self.row[chosen], self.col[chosen], None if self.value is None else self.value[chosen])


@dataclass(frozen=True)
class Products:
    """How layers compute over edges that several ranks hold.

    Attributes:
        matrix: makes the matrix by which a sum over edges is a product over ranks, of the entries of this rank's rows;
            communicates.
        spread: for edges that are attended over, or whose extremes are taken, returns what makes the same of them. It is given
            the bytes that a step sends for a copy of a source's row, and for a target's partial result, as a scheme may choose
            by their ratio who computes which edge. None where a rank computes its own nodes' edges.
    """

    matrix: Callable[[Triples], Matrix]
    spread: Callable[[int, int], Callable[[Triples], Matrix]] | None = None


class Exchange(ABC):
    """S and its transpose for one rank: all rows that layers read of other ranks come by it, whatever layers compute.

    A scheme has two methods, :meth:`start_expand` and :meth:`start_reduce`. Any number of exchanges may be under way, and be
    waited for in any order; all ranks start them in the same order.

    Args:
        num_owned, num_halo: N, H.
        world: the ranks.
        meter: where traffic is counted.
        idle: this rank neither sends nor receives anything, on behalf of others included.

    Attributes:
        own_lengths: where a rank holds rows of others too: by the length of a tensor with one entry per row or edge, how many
            are this rank's own. These come first, and they alone count in sums over ranks.
        most_propagations: how often rows may travel along edges in a step; None for any number.
        products: of edges that several ranks hold; None where a rank computes all edges of its own nodes.
        present: which halo rows come in this step, bool ``[H]``; None for all. Layers leave the edges of the others out, whose
            rows are 0, and multiply the sums of those that come by `scale`.
        in_stages: sends more while it is waited for, so that no other exchange of the same call may be started before.
        one_way: no gradients come back for rows that were read. What a layer makes of its input before it exchanges would learn
            nothing of its readers, so layers exchange first.
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
        """Returns this exchange for layers whose edges several ranks hold."""
        self.products = products
        return self

    # What a scheme is #########################################################

    @abstractmethod
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        """Starts S: sends rows that others read, and receives into `halo`; returns the function that waits.

        Args:
            x: owned rows, ``[N, ...]``, contiguous; unchanged until the returned function has returned.
            halo: receives the halo rows in place, ``[H, ...]``, contiguous.
            call: which exchange of the step this is.
        """

    @abstractmethod
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        """Starts S^T: sends what this rank has for halo rows to their owners; returns the function that waits.

        Args:
            halo: ``[H, ...]``, contiguous; unchanged until the returned function has returned.
            call: which exchange of the step this is.

        Returns:
            ``finish(own)``: adds what arrives to ``own`` ``[N, ...]`` in place, or takes the maximum, as ``call.operation``
            has it; in an order that does not depend on timing.
        """

    def begin_step(self, step: Step) -> None:  # noqa: B027 (most need not know)
        """Is told which step begins, before anything of it travels."""

    def drain(self) -> None:  # noqa: B027
        """Waits for all that is under way: before evaluation and checkpoints, and at the end of a run."""

    @property
    def approximate(self) -> bool:
        """Whether rows may be approximate now: in training, but not in its last epoch, nor for what is kept."""
        return self.world.transport.approximate

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of this rank's exchange: plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Takes what :meth:`state_dict` gave on this rank of a run of as many ranks."""

    # What layers use ##########################################################

    def expand(self, x: Tensor, layer: str, dim: int = 0) -> Tensor:
        """Returns S x, differentiable: owned rows first, halo rows after them.

        Args:
            x: ``[N, ...]``, or with the nodes along `dim`.
            layer: named in errors and counted under.

        Returns:
            ``[N + H, ...]``, or longer along `dim`.
        """
        call = self.world.call(layer)
        if self.idle:
            return x
        if dim % x.dim():
            return _Expanded.apply(x.movedim(dim, 0).contiguous(), self, call).movedim(0, dim)
        return _Expanded.apply(x, self, call)

    def expand_all(self, tensors: Sequence[Tensor], layer: str) -> list[Tensor]:
        """Returns S x of several tensors of one dtype, as :meth:`expand` does, in the messages of one: side by side."""
        if len(tensors) == 1 or self.idle:
            return [self.expand(x, layer) for x in tensors]
        widths = [x.shape[1:].numel() for x in tensors]
        rows = self.expand(torch.cat([x.reshape(len(x), width) for x, width in zip(tensors, widths)], 1), layer)
        return [part.contiguous().view(len(rows), *x.shape[1:]) for part, x in zip(rows.split(widths, dim=1), tensors)]

    def reduce(self, x: Tensor, layer: str) -> Tensor:
        """Returns S^T x, differentiable: each owned row plus what other ranks hold for it in their halo rows.

        Args:
            x: ``[N + H, ...]``, owned rows first.
            layer: named in errors and counted under.

        Returns:
            ``[N, ...]``.
        """
        call = self.world.call(layer)
        return x if self.idle else _Reduced.apply(x, self, call)

    def reduce_max(self, x: Tensor, layer: str) -> Tensor:
        """Returns the largest of each owned row and of what other ranks hold for it, ``[N, ...]``; not differentiable.

        Args:
            x: ``[N + H, ...]``, owned rows first; minus infinity for nothing.
            layer: named in errors and counted under.
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

    # What schemes use #########################################################

    def now(self, call: Call) -> Moment:
        """Returns this moment, of the host and of its device, at which the packing of a call's rows begins: see :meth:`send`."""
        return Moment.now(self.world.device, "send", call.layer, call.direction)

    def send(
        self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call, began: Moment
    ) -> Callable[[], None]:
        """Starts one message to and from every peer that has rows to exchange, and counts it; returns the function that waits.

        Args:
            out, into: what is sent and what is filled, contiguous, of one dtype, rows in rank order; both are left alone until
                the returned function has returned.
            out_counts, into_counts: rows for and from each rank, ``[P]``.
            call: counted under, and named in errors.
            began: when packing them began, see :meth:`now`.

        Raises:
            CommunicationError: from the returned function too: a peer does not answer.
        """
        transport = self.world.transport
        with self.world.watch.during(call.name, joint=False):
            sends, receives, traffic, around = transport.messages(out, out_counts, into, into_counts, call, self)
            wait = transport.start_each(sends, receives)
        return count_messages(self.world, self.meter, call, began, traffic, wait if around is None else around(wait))


class Matrix(ABC):
    """One rank's part of a matrix over all nodes, ``[n, n]``, and of its transpose."""

    @abstractmethod
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        """Returns this rank's rows of the product, ``[N, F]``, in at least float32.

        Args:
            x: this rank's rows, ``[N, F]``, contiguous.
            call: which one of the step; in the backward pass, it is multiplied with the transpose.
        """

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """Those by which rows travel."""
        return ()


class HaloExchange(Exchange):
    """Moves rows directly between the owner of a node and the ranks whose edges read it.

    Args:
        plan: which rows go to whom.
        world, meter: see :class:`Exchange`.
    """

    def __init__(self, plan: HaloPlan, world: World, meter: Meter) -> None:
        self.plan = plan
        self.recv_counts = list(plan.recv_counts)
        self.send_counts = [len(rows) for rows in plan.send_rows]
        self.send_rows = torch.from_numpy(np.concatenate(plan.send_rows)).to(world.device)
        num_halo = sum(self.recv_counts)
        super().__init__(plan.num_owned, num_halo, world, meter, num_halo == 0 and len(self.send_rows) == 0)

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        began = self.now(call)
        packed = self.world.transport.scratch((len(self.send_rows), *x.shape[1:]), x.dtype)
        take_rows(x, self.send_rows, packed)
        return self.send(packed, self.send_counts, halo, self.recv_counts, call, began)

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        """Peer after peer: the rows of one are distinct, so no two additions meet, the paper's non-atomic backward."""
        began = self.now(call)
        arrived = self.buffers.take((len(self.send_rows), *halo.shape[1:]), halo.dtype)
        wait = self.send(halo, self.recv_counts, arrived, self.send_counts, call, began)

        def finish(own: Tensor) -> None:
            wait()
            self.add_arrived(own, arrived, call)
            self.buffers.give_back(arrived)

        return finish

    def add_arrived(self, own: Tensor, arrived: Tensor, call: Call) -> None:
        """Adds what other ranks have for this rank's rows, in the order of :attr:`send_rows`, or takes the maximum; in place."""
        for rows, values in zip(self.send_rows.split(self.send_counts), arrived.split(self.send_counts)):
            if len(rows) and call.operation == "sum":
                add_rows(own, rows, values)
            elif len(rows):
                own[rows] = torch.maximum(own[rows], values)


class _Expanded(torch.autograd.Function):
    """S as a concatenation, ``[N, ...]`` to ``[N + H, ...]``, for code that indexes owned and halo rows alike."""

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
