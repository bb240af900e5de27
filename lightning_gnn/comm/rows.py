"""Rows of any nodes, whoever owns them, where which ones are wanted changes from step to step: no plan lasts.

P pulls the rows that a rank asks for, its transpose adds gradients at their owners. Source: DistDGL (2020) section III-C, the
pull and push of its feature store, here for what layers compute. Owners are asked first, so a call costs a message more than a
halo exchange, but each row travels to a rank once, however often the rank wants it.

N nodes of the whole graph, n of this rank, U distinct rows that a rank wants; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.comm.exchange import counted, during_exchange, starting
from lightning_gnn.comm.group import Call, Direction, World
from lightning_gnn.comm.traffic import Meter, Traffic


@dataclass(frozen=True)
class _Wanted:
    """What one call moves.

    Attributes:
        counts: distinct rows that this rank wants of each rank; they lie in rank order.
        own: those of its own, local ids.
        asked: rows of this rank that each other one wants, local ids.
    """

    counts: list[int]
    own: Tensor
    asked: dict[int, Tensor]


class AnyRows:
    """Fetches rows by the ids that their nodes have in the original graph. All ranks call it alike.

    Args:
        n_id: original ids of all ranks' nodes in rank order, int64 ``[N]``.
        counts: nodes of each rank.
        world: the ranks.
        meter: where traffic is counted.
    """

    def __init__(self, n_id: Tensor, counts: Sequence[int], world: World, meter: Meter) -> None:
        self.num_nodes = len(n_id)
        self._n_id, self._world, self._meter = n_id, world, meter
        self._first = torch.tensor([0, *counts], device=world.device).cumsum(0)
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
        rows = _Fetch.apply(x, self, self._ask(places, layer), layer)
        return rows.index_select(0, inverse).view(*ids.shape, *x.shape[1:])

    def _places(self) -> Tensor:
        if self._place is None:
            with torch.inference_mode(False):  # evaluation may come first, and training use it later
                n_id = self._n_id.to(self._world.device)
                self._place = torch.empty_like(n_id)
                self._place[n_id] = torch.arange(self.num_nodes, device=n_id.device)
        return self._place

    def _ask(self, places: Tensor, layer: str) -> _Wanted:
        """Tells each rank which of its rows this one wants; `places` ascend."""
        rank, size = self._world.rank, self._world.size
        counts = torch.searchsorted(places, self._first).diff().tolist()
        wanted = [part - first for part, first in zip(places.split(counts), self._first)]
        if size == 1:
            return _Wanted(counts, wanted[0], {})
        began, peers = time.perf_counter(), [peer for peer in range(size) if peer != rank]
        # Their number goes first, so that no message is empty.
        questions = [(peer, torch.cat([wanted[peer].new_tensor([counts[peer]]), wanted[peer]])) for peer in peers]
        traffic = Traffic.of((peer, each.nbytes) for peer, each in questions)
        with during_exchange(self._world, layer, "question"):
            self._world.watch.begins(joint=False)
            found = self._world.wire.start_varied([(peer, each.view(torch.uint8)) for peer, each in questions], peers)()
        traffic.seconds = self._meter.since(began, "wait", layer, "forward")
        self._meter.record(layer, "forward", traffic)
        return _Wanted(counts, wanted[rank], {peer: found[peer].view(torch.int64)[1:] for peer in peers})

    def pull(self, x: Tensor, wanted: _Wanted, layer: str) -> Tensor:
        """Returns the rows that this rank wants, ``[U, ...]``; not differentiable."""
        out = x.new_empty((sum(wanted.counts), *x.shape[1:]))
        parts = out.split(wanted.counts)
        sends = [(peer, x.index_select(0, rows)) for peer, rows in wanted.asked.items()]
        wait = self._start(sends, [(peer, parts[peer]) for peer in wanted.asked], layer, "forward")
        torch.index_select(x, 0, wanted.own, out=parts[self._world.rank])
        wait()
        return out

    def push(self, grad: Tensor, wanted: _Wanted, num_rows: int, layer: str) -> Tensor:
        """Returns for each row of this rank the sum of what all ranks have for it, ``[num_rows, ...]``: the transpose of pull.

        Args:
            grad: for the rows that this rank wants, ``[U, ...]``.
            wanted: of the call to :meth:`pull`.
            num_rows: of its argument.
            layer: named in errors and counted under.
        """
        parts = grad.contiguous().split(wanted.counts)
        arrived = {peer: grad.new_empty((len(rows), *grad.shape[1:])) for peer, rows in wanted.asked.items()}
        wait = self._start([(peer, parts[peer]) for peer in wanted.asked], list(arrived.items()), layer, "backward")
        out = grad.new_zeros((num_rows, *grad.shape[1:]))
        out.index_add_(0, wanted.own, parts[self._world.rank])
        wait()
        for peer, rows in wanted.asked.items():  # in rank order; the rows of one peer are distinct
            out.index_add_(0, rows, arrived[peer])
        return out

    def _start(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], layer: str, direction: Direction
    ) -> Callable[[], None]:
        began, wire = time.perf_counter(), self._world.wire
        sends = [(peer, rows) for peer, rows in sends if rows.numel()]
        receives = [(peer, rows) for peer, rows in receives if rows.numel()]
        sent = ((peer, wire.message_bytes(rows)) for peer, rows in sends)
        traffic = Traffic.of(sent, sum(len(rows) for _, rows in sends))
        call = Call(layer, direction=direction)
        with starting(self._world, self._meter, call, traffic, began):
            wait = wire.start_each(sends, receives)
        return counted(wait, self._world, self._meter, call, traffic)


class _Fetch(torch.autograd.Function):
    """P; backward is its transpose. It communicates on every rank, also on one that wants nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: AnyRows, wanted: _Wanted, layer: str) -> Tensor:
        ctx.rows, ctx.wanted, ctx.layer, ctx.num_rows = rows, wanted, layer, len(x)
        return rows.pull(x, wanted, layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.rows.push(grad, ctx.wanted, ctx.num_rows, ctx.layer), None, None, None
