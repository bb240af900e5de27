"""Exchanges that do not send rows directly: in the stages of a plan, with relays (DGCL sections 6.1 and 6.2), or by way of host
memory (sections 3 and 7.1).

N owned rows, H halo rows, R rows that this rank only relays, P ranks; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, HaloExchange, count_messages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import Accept
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.extensions.plans.plan import Plan
from lightning_gnn.extensions.plans.tables import RankPlan, Stage
from lightning_gnn.kernels import add_rows, take_rows
from lightning_gnn.partition.shard import HaloPlan, Ids


@dataclass(frozen=True)
class _Run:
    """Successive rows of a stage's messages that lie in one tensor.

    Messages are in the order of ids, of which a rank owns one range, so one message is at most three runs.

    Attributes:
        owned: whether these are owned rows; the others are kept in a tensor of their own.
        rows: where in that tensor, int64 ``[K]``.
        place: where in the stage's messages, which lie one after the other in peer order.
    """

    owned: bool
    rows: Tensor
    place: slice


def _runs(tables: Sequence[Ids], num_owned: int, device: torch.device) -> list[_Run]:
    """Returns the runs of `tables`, which follow each other; none spans two of them."""
    runs, first = [], 0
    for table in tables:
        owned = table < num_owned
        bounds = [0, *(np.flatnonzero(owned[1:] != owned[:-1]) + 1).tolist(), len(table)]
        for low, high in pairwise(bounds):
            if high > low:
                rows = table[low:high] - (0 if owned[low] else num_owned)
                place = slice(first + low, first + high)
                runs.append(_Run(bool(owned[low]), torch.from_numpy(rows).to(device), place))
        first += len(table)
    return runs


@dataclass(frozen=True)
class _Stage:
    """One stage in which this rank has something to do.

    Attributes:
        send_counts, receive_counts: rows for and from each peer.
        sends: where the rows to send lie.
        arrives: where in the memory for arriving rows to receive.
        adds: backward: the rows that arriving ones are added to, those of one peer after the other.
    """

    send_counts: list[int]
    receive_counts: list[int]
    sends: list[_Run]
    arrives: slice
    adds: list[_Run]


def _stages(stages: Sequence[Stage], position: Ids, num_owned: int, device: torch.device, adds: bool) -> tuple[list[_Stage], int]:
    """Returns the stages that are not idle, sent rows renumbered by `position`, and how many rows arrive in all of them."""
    found, arrived = [], 0
    for stage in stages:
        if not stage.idle:
            receive_counts = [len(rows) for rows in stage.receives]
            arrives = slice(arrived, arrived + sum(receive_counts))
            sends = _runs([position[np.concatenate(stage.sends)]], num_owned, device)
            added = _runs(stage.receives, num_owned, device) if adds else []
            found.append(_Stage([len(rows) for rows in stage.sends], receive_counts, sends, arrives, added))
            arrived = arrives.stop
    return found, arrived


class PlannedExchange(Exchange):
    """Moves rows along the trees of a plan: S and S^T of the direct exchange, over other ways.

    Forward, each row that is not owned arrives exactly once, so rows are received in place, one stage behind the other, and
    sent on from there; at the end the halo is taken out in its order. Backward, gradients are collected in the halo rows and
    relayed rows, and go to the parents in the trees. Those that arrive are added peer after peer.

    Where the transport can, all receiving starts at once: a message that is expected is not held up behind others.

    A rank waits for its own peers of each stage; there is neither a coordinator nor a barrier. That cannot lock up: whoever is
    waited for is in an earlier stage, or has still to send in this one, and some rank is the furthest behind.

    Args:
        plan: this rank's part of a plan that all ranks follow.
        world, meter: see :class:`~lightning_gnn.comm.exchange.Exchange`; relayed rows are counted, too.
        route: the plan of all ranks, where it is kept to be shown.
    """

    in_stages = True

    def __init__(self, plan: RankPlan, world: World, meter: Meter, route: Plan | None = None) -> None:
        idle = all(stage.idle for stage in plan.forward)
        super().__init__(plan.num_owned, plan.num_halo, world, meter, idle)
        self.num_relayed, self.route = plan.num_relayed, route
        owned, device = plan.num_owned, world.device
        arriving = np.concatenate([np.empty(0, np.int64), *(rows for stage in plan.forward for rows in stage.receives)])
        # From the plan's order of rows to one in which those that are not owned lie as they arrive.
        position = np.arange(plan.num_rows)
        position[arriving] = np.arange(owned, plan.num_rows)
        self._halo_rows = torch.from_numpy(position[owned : owned + plan.num_halo] - owned).to(device)

        self._forward, _ = _stages(plan.forward, position, owned, device, adds=False)
        self._backward, self._num_added = _stages(plan.backward, np.arange(plan.num_rows), owned, device, adds=True)

    def _others(self, halo: Tensor) -> Tensor:
        """Takes a buffer for the rows that are not owned, ``[H + R, ...]``, for halo rows like `halo`."""
        return self.buffers.take((self.num_halo + self.num_relayed, *halo.shape[1:]), halo.dtype)

    def _go(
        self,
        stages: Sequence[_Stage],
        sources: Sequence[Tensor],
        arriving: Tensor,
        call: Call,
        then: Callable[[_Stage], None],
    ) -> Callable[[], None]:
        """Starts the first of `stages`; returns the function that waits for it and goes through the others.

        Args:
            sources: the rows that are not owned, then the owned ones, unless no stage sends them.
            arriving: receives what arrives in all stages, in peer order each.
            then: called when what a stage brings is there.
        """
        nobody = [0] * self.world.size
        none = arriving[:0]

        def receive(stage: _Stage) -> Callable[[], None]:
            began = self.now(call)
            into = arriving[stage.arrives]
            return self.send(none, nobody, into, stage.receive_counts, call, began)

        early = self.world.transport.receives_early
        coming = [receive(stage) for stage in stages] if early else []
        sent: list[Callable[[], None]] = []

        def start(stage: _Stage) -> Callable[[], None]:
            began = self.now(call)
            shape = (sum(stage.send_counts), *arriving.shape[1:])
            packed = self.world.transport.scratch(shape, arriving.dtype)
            for run in stage.sends:
                take_rows(sources[run.owned], run.rows, packed[run.place])
            into, counts = (none, nobody) if early else (arriving[stage.arrives], stage.receive_counts)
            return self.send(packed, stage.send_counts, into, counts, call, began)

        first = [start(stage) for stage in stages[:1]]

        def finish() -> None:
            for number, stage in enumerate(stages):
                self.world.watch.stage = f"stage {number + 1} of {len(stages)} of this rank"
                wait = start(stage) if number else first[0]
                if early:
                    sent.append(wait)
                    coming[number]()
                else:
                    wait()
                then(stage)
            for wait in sent:
                wait()
            self.world.watch.stage = ""

        return finish

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        """Sends the first stage; the others follow while waiting."""
        others = self._others(halo)
        go_on = self._go(self._forward, (others, x), others, call, lambda stage: None)

        def finish() -> None:
            go_on()
            take_rows(others, self._halo_rows, halo)
            self.buffers.give_back(others)

        return finish

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        """Sends the first stage; the others follow while finishing. Relays add what they receive, or take the maximum."""
        others = self._others(halo)
        others[: self.num_halo] = halo
        others[self.num_halo :] = 0 if call.operation == "sum" else -torch.inf
        arrived = self.buffers.take((self._num_added, *halo.shape[1:]), halo.dtype)
        owned: list[Tensor] = []

        def add(stage: _Stage) -> None:
            values = arrived[stage.arrives]
            for run in stage.adds:
                into, arriving = (others, *owned)[run.owned], values[run.place]
                if call.operation == "sum":
                    add_rows(into, run.rows, arriving)
                else:
                    into[run.rows] = torch.maximum(into[run.rows], arriving)

        go_on = self._go(self._backward, (others,), arrived, call, add)

        def finish(own: Tensor) -> None:
            owned.append(own)
            go_on()
            self.buffers.give_back(others)
            self.buffers.give_back(arrived)

        return finish


class SwapExchange(HaloExchange):
    """S by way of memory that all ranks of one machine map: each writes all of its rows there, and reads those that it needs.

    S^T is that of the direct exchange, which uses the same memory. NeuGraph's scheme, as DGCL describes it; a baseline.

    Args:
        plan: which rows go to whom.
        halo: ids of this rank's halo rows, ascending, ``[H]``.
        offsets: first id of each rank and the end, ``[P + 1]``.
        world: the ranks.
        meter: where traffic is counted: rows written.

    Raises:
        ValueError: the ranks do not share memory.
    """

    def __init__(self, plan: HaloPlan, halo: Ids, offsets: Ids, world: World, meter: Meter) -> None:
        if world.size > 1 and not world.transport.shares_memory:
            raise ValueError(
                'plan="swap" exchanges through the memory of one machine: it takes CPU ranks, all on one machine, and '
                'shared_memory=True. Use plan="p2p" or "spst" here.'
            )
        super().__init__(plan, world, meter)
        bounds = np.searchsorted(halo, offsets)
        self._reads = [torch.from_numpy(halo[low:high] - first) for low, high, first in zip(bounds, bounds[1:], offsets)]
        self._readers = [peer for peer, count in enumerate(self.send_counts) if count]

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        began, block = self.now(call), None

        def look(rows: Tensor, part: Tensor) -> Accept:
            return lambda block: take_rows(block.view(x.dtype).view(-1, *x.shape[1:]), rows, part)

        looks = {
            peer: look(rows, part)
            for peer, (rows, part) in enumerate(zip(self._reads, halo.split(self.recv_counts)))
            if len(rows)
        }
        transport = self.world.transport
        traffic = Traffic()
        with self.world.watch.during(call.name, joint=False):
            if self._readers:
                block = transport.scratch(x.shape, x.dtype)
                block.copy_(x)
                traffic = Traffic(x.nbytes, 1, len(x))
            wait = transport.show(block, self._readers, looks)
        return count_messages(self.world, self.meter, call, began, traffic, wait)
