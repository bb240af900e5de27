"""Halo exchanges that relay rows in the stages of a plan, or go through host memory.

Sources: DGCL sections 6.1 and 6.2 (plans with relays), and sections 3 and 7.1 (host memory).

N local nodes, H halo nodes, R nodes whose rows this rank only relays, P ranks; ``...`` stands for any trailing dimensions.
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
from lightning_gnn.kernels import take_rows
from lightning_gnn.partition.shard import HaloPlan, Ids


@dataclass(frozen=True)
class _Run:
    """Consecutive rows of a stage's messages that are stored in one tensor.

    Messages are sorted by node id, and each rank owns one range of ids, so a message has at most three runs.

    Attributes:
        owned: whether the rows belong to local nodes; other rows are in a separate tensor.
        rows: indices into that tensor, int64 ``[K]``.
        place: slice of the stage's messages, which are concatenated in peer order.
    """

    owned: bool
    rows: Tensor
    place: slice


def _runs(tables: Sequence[Ids], num_owned: int, device: torch.device) -> list[_Run]:
    """Returns the runs of the concatenated `tables`; no run spans two tables."""
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
    """Plan stage in which this rank sends or receives.

    Attributes:
        send_counts, receive_counts: number of rows for and from each peer.
        sends: runs of the rows to send.
        arrives: slice of the receive buffer for the rows of this stage.
        adds: backward only: runs of the rows that the received rows are added to, in peer order.
    """

    send_counts: list[int]
    receive_counts: list[int]
    sends: list[_Run]
    arrives: slice
    adds: list[_Run]


def _stages(stages: Sequence[Stage], position: Ids, num_owned: int, device: torch.device, adds: bool) -> tuple[list[_Stage], int]:
    """Returns the stages that are not idle, with sent rows renumbered by `position`, and the total number of received rows."""
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
    """Halo exchange along the trees of a plan, with the results of the direct exchange (S and S^T).

    Forward, each row that is not local is received exactly once. The receive buffer holds the rows of all stages in order, and
    later stages send from it. Finally, the halo rows are copied out in their own order. Backward, gradients are added up in halo
    and relayed rows and sent to the parents in the trees. Received gradients are added in peer order.

    If the transport supports it, the receives of all stages start at once, so that an expected message does not wait for others.

    In each stage, a rank waits only for its own peers; there is no coordinator and no barrier. Deadlock is impossible: a rank
    waits only for ranks that are in an earlier stage or have not sent yet in the same stage. Some rank is always the furthest
    behind.

    Args:
        plan: this rank's part of a plan that all ranks follow.
        world, meter: see :class:`~lightning_gnn.comm.exchange.Exchange`; relayed rows are also counted.
        route: the plan of all ranks, if it is kept for display.
    """

    in_stages = True

    def __init__(self, plan: RankPlan, world: World, meter: Meter, route: Plan | None = None) -> None:
        idle = all(stage.idle for stage in plan.forward)
        super().__init__(plan.num_owned, plan.num_halo, world, meter, idle)
        self.num_relayed, self.route = plan.num_relayed, route
        owned, device = plan.num_owned, world.device
        arriving = np.concatenate([np.empty(0, np.int64), *(rows for stage in plan.forward for rows in stage.receives)])
        # Maps the plan's order of rows to an order in which rows of other ranks are in order of arrival.
        position = np.arange(plan.num_rows)
        position[arriving] = np.arange(owned, plan.num_rows)
        self._halo_rows = torch.from_numpy(position[owned : owned + plan.num_halo] - owned).to(device)

        self._forward, _ = _stages(plan.forward, position, owned, device, adds=False)
        self._backward, self._num_added = _stages(plan.backward, np.arange(plan.num_rows), owned, device, adds=True)

    def _take_buffer(self, halo: Tensor) -> Tensor:
        """Returns a buffer from the pool for rows that are not local, ``[H + R, ...]``, shaped and typed like `halo`."""
        return self.buffers.take((self.num_halo + self.num_relayed, *halo.shape[1:]), halo.dtype)

    def _go(
        self, stages: Sequence[_Stage], sources: Sequence[Tensor], arriving: Tensor, call: Call, then: Callable[[_Stage], None]
    ) -> Callable[[], None]:
        """Starts the first of `stages`; returns a function that waits for it and runs the others.

        Args:
            sources: the rows that are not local, and the local rows; the latter may be omitted if no stage sends them.
            arriving: receive buffer of all stages; the rows of each stage are in peer order.
            then: function called with each stage after its rows are received.
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
        """Starts the first stage; returns a function that runs the other stages and waits for `halo`."""
        remote = self._take_buffer(halo)
        go_on = self._go(self._forward, (remote, x), remote, call, lambda stage: None)

        def finish() -> None:
            go_on()
            take_rows(remote, self._halo_rows, halo)
            self.buffers.give_back(remote)

        return finish

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        """Starts the first stage; returns a function that runs the other stages. Relays add received rows or take the maximum."""
        remote = self._take_buffer(halo)
        remote[: self.num_halo] = halo
        remote[self.num_halo :] = 0 if call.operation == "sum" else -torch.inf
        arrived = self.buffers.take((self._num_added, *halo.shape[1:]), halo.dtype)
        owned: list[Tensor] = []

        def add(stage: _Stage) -> None:
            values = arrived[stage.arrives]
            for run in stage.adds:
                into, arriving = (remote, *owned)[run.owned], values[run.place]
                if call.operation == "sum":
                    into.index_add_(0, run.rows, arriving)
                else:
                    into[run.rows] = torch.maximum(into[run.rows], arriving)

        go_on = self._go(self._backward, (remote,), arrived, call, add)

        def finish(local: Tensor) -> None:
            owned.append(local)
            go_on()
            self.buffers.give_back(remote)
            self.buffers.give_back(arrived)

        return finish


class SwapExchange(HaloExchange):
    """Halo exchange through memory that all ranks of one machine map.

    Forward (S), each rank writes all of its rows to this memory and reads the rows that it needs. Backward (S^T) is the direct
    exchange, which uses the same memory. This is NeuGraph's scheme as DGCL describes it; it serves as a baseline.

    Args:
        plan: rows to send to each rank.
        halo: ids of this rank's halo nodes, ascending, ``[H]``.
        offsets: first id of each rank and the end, ``[P + 1]``.
        world: the ranks.
        meter: counts traffic: rows written.

    Raises:
        ValueError: if the ranks do not share memory.
    """

    def __init__(self, plan: HaloPlan, halo: Ids, offsets: Ids, world: World, meter: Meter) -> None:
        if world.size > 1 and not world.transport.shares_memory:
            raise ValueError('plan="swap" needs CPU ranks on one machine, and shared_memory=True. Use plan="p2p" or "spst" here.')
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
