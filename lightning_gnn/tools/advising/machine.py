"""How long a rehearsed step takes on a machine: ranks compute on its cores, and messages travel over its topology's hops.

The cost of a message is latency plus bytes over bandwidth (alpha-beta, CAGNET section 3), on the hops of DGCL's model
(section 5.1). Between CPU ranks that share cores, a message through a socket costs both ends some of the cores' time, too.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.topology import SOCKET_MESSAGE, SOCKET_STAGE, Topology
from lightning_gnn.extensions.plans.wiring import machines
from lightning_gnn.tools.advising.rehearsal import Compute, Event, Send, Take

LATENCY_S = 50e-6
"""Of a message, between CPU ranks of one machine as between machines: mostly waking up who waits."""

SOCKET_S_PER_BYTE = 0.27e-9
"""Of a core, at each end of a message through a socket: gloo on the loopback device, four ranks on two cores."""

_TINY = 8
"""Bytes of a message that needs no link of its own, and fills none."""

_SMALL = 3
"""Times in a step that all ranks exchange a few bytes: whether to go on, what to log, how long they have waited."""

_FEW, _MANY = 2, 6
"""Steps that are run one after the other: a step takes what more of them take longer."""


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Machine:
    """What steps run on.

    Attributes:
        topology: of as many devices as there are ranks.
        cores: that the ranks of each host share; None for a device of its own for each rank.
        speed: how many times faster a device computes than the one that rehearsed.
        latency: seconds that a message takes whatever its size; `socket_latency`: between CPU ranks, through a socket.
        contention: how much longer a core takes for the same when all ranks of a host compute, since they share caches and
            memory.
        shared_memory: ranks of one host do not use sockets.
        socket_s, socket_s_per_byte: of a core, that each end of a message through a socket takes; 0 on a device of its own.
    """

    topology: Topology
    cores: int | None = None
    speed: float = 1.0
    latency: float = LATENCY_S
    contention: float = 1.0
    shared_memory: bool = True
    socket_latency: float = SOCKET_STAGE
    socket_s: float = SOCKET_MESSAGE
    socket_s_per_byte: float = SOCKET_S_PER_BYTE

    def is_socket(self, sender: int, receiver: int) -> bool:
        return self.cores is not None and not (self.shared_memory and self.host_of[sender] == self.host_of[receiver])

    def seconds_at_ends(self, sender: int, receiver: int, num_bytes: int) -> float:
        """Returns what a message takes of a core at each of its ends."""
        return self.socket_s + num_bytes * self.socket_s_per_byte if self.is_socket(sender, receiver) else 0.0

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        return tuple(self.topology.host_of.tolist())

    @property
    def ranks(self) -> int:
        return self.topology.num_devices

    @property
    def threads(self) -> int:
        return 1 if self.cores is None else max(1, self.cores // len(self.topology.hosts[0]))

    @property
    def crowding(self) -> float:
        """How much longer computing takes where all ranks do it at once: by ranks over cores, if that is above 1, and more."""
        return self.contention * (1.0 if self.cores is None else max(1.0, len(self.topology.hosts[0]) / self.cores))

    @property
    def slowness(self) -> float:
        """Seconds that a rank on a core takes for what took the one that rehearsed a second."""
        return self.contention / self.speed

    @classmethod
    def of(
        cls,
        ranks: int,
        hosts: int = 1,
        topology: str | Path | Topology | None = None,
        cores: int | None = None,
        speed: float = 1.0,
    ) -> Machine:
        """Returns this machine, or so many hosts like it; or one of a topology, with a device for each rank.

        Args:
            ranks: of all hosts, which have equally many each.
            hosts: of no meaning with a topology.
            topology: a name, a JSON file, or a topology (docs/planning.md).
            cores: that the ranks of a host share; by default this machine's, or one each with a topology.
            speed: see :class:`Machine`.
        """
        if ranks < 2:
            raise ValueError(f"advice is for several ranks (got {ranks}).")
        if cores is not None and cores < 1:
            raise ValueError(f"cores must be at least 1 (got {cores}).")
        if not speed > 0:
            raise ValueError(f"speed must be above 0 (got {speed}).")
        if topology is not None:
            return cls(find_topology(topology, ranks), cores, speed)
        if ranks % hosts:
            raise ValueError(f"{ranks} ranks are not equally many on {hosts} machines.")
        on_each = ranks // hosts
        return cls(machines([on_each] * hosts), cores or available_cores(), speed, contention=measured_contention(on_each))


_ROUNDS, _ROWS, _EDGES, _WIDTH = 7, 8_000, 60_000, 64
"""Of the measurement: a layer of a small graph, whose messages fill the caches that cores have to themselves."""


@cache
def measured_contention(ranks: int) -> float:
    """Returns how much longer a thread of this process computes, at least 1, when so many do the same at once.

    What is timed is what layers do: to take rows by edges, to add them up, and a product. A quarter of a second for few ranks.
    """
    together = min(ranks, 4 * available_cores())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = [(_seconds_of_threads(1), _seconds_of_threads(together)) for _ in range(_ROUNDS)]
    finally:
        torch.set_num_threads(before)
    alone, crowded = map(median, zip(*rounds))
    return max(1.0, crowded / alone)


def _seconds_of_threads(count: int) -> float:
    """Returns what each of so many threads computes, in the mean, in seconds of a processor."""
    start = threading.Barrier(count)

    def work(_: int) -> float:
        rows, weight = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
        edges = torch.randint(_ROWS, (_EDGES,), generator=torch.Generator().manual_seed(0))
        start.wait()
        began = time.thread_time()
        for _ in range(2):
            torch.zeros_like(rows).index_add_(0, edges, rows.index_select(0, edges)).mm(weight)
        return time.thread_time() - began

    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(work, range(count))) / count


class Timing(NamedTuple):
    """How long a step takes until the last rank has ended, and if messages took no time."""

    seconds: float
    compute_seconds: float

    @property
    def exchange_seconds(self) -> float:
        return max(0.0, self.seconds - self.compute_seconds)


def with_trainer_messages(events: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Returns a step's events with the small messages that a Trainer sends, round a ring: at its end they have met."""
    ranks = len(events)

    def once_round(rank: int) -> list[Event]:
        return [Send((rank + 1) % ranks, _TINY), Take((rank - 1) % ranks)] * (ranks - 1)

    return [[*each, *once_round(rank) * _SMALL] for rank, each in enumerate(events)]


def timing(events: Sequence[Sequence[Event]], machine: Machine) -> Timing:
    """Returns how long a step takes, once others went before: ranks wait for each other as `events` say, not between steps."""

    def of_one(free: bool) -> float:
        few, many = (_run([list(each) * steps for each in events], machine, free) for steps in (_FEW, _MANY))
        # Who waits at the end of few steps may not at the end of many: the difference can be a little too small.
        return max((many - few) / (_MANY - _FEW), _least_seconds(events, machine))

    return Timing(of_one(free=False), of_one(free=True))


def _least_seconds(events: Sequence[Sequence[Event]], machine: Machine) -> float:
    """Returns what the busiest rank computes, or all ranks of a host on its cores: no step is shorter."""
    busy = [sum(event.seconds for event in each if isinstance(event, Compute)) * machine.slowness for each in events]
    hosts = (sum(busy[rank] for rank in host) / (machine.cores or len(host)) for host in machine.topology.hosts)
    return max(*busy, *hosts)


def _run(events: Sequence[Sequence[Event]], machine: Machine, free: bool) -> float:
    """Returns when the last rank ends, by going through all events in the order of time.

    A hop carries one message after the other, a core computes one stretch after the other; first come, first served.
    """
    hop_free = [0.0] * len(machine.topology.hops)
    cores = [[0.0] * (machine.cores or len(host)) for host in machine.topology.hosts]
    arrivals: dict[tuple[int, int], deque[tuple[float, float]]] = {}  # when, and what the receiver then computes
    position, last = [0] * len(events), 0.0
    waiting: dict[tuple[int, int], float] = {}  # who waits for whom, since when
    ready = [(0.0, rank) for rank in range(len(events))]

    def compute(rank: int, now: float, seconds: float) -> float:
        of_host = cores[machine.host_of[rank]]
        end = max(now, heapq.heappop(of_host)) + seconds
        heapq.heappush(of_host, end)
        return end

    def take(rank: int, now: float, arrived: float, seconds: float) -> float:
        # Bytes are copied into and out of sockets while others travel.
        return max(compute(rank, now, seconds), arrived + machine.socket_s) if seconds else max(now, arrived)

    while ready:
        now, rank = heapq.heappop(ready)
        last = max(last, now)
        if position[rank] == len(events[rank]):
            continue
        event = events[rank][position[rank]]
        if isinstance(event, Compute):
            now = compute(rank, now, event.seconds * machine.slowness)
        elif isinstance(event, Send):
            at_ends = 0.0 if free else machine.seconds_at_ends(rank, event.to, event.num_bytes)
            arrived = now if free else _arrival(machine, hop_free, now, rank, event)
            now = compute(rank, now, at_ends) if at_ends else now
            message = arrived, at_ends
            since = waiting.pop((rank, event.to), None)
            if since is None:
                arrivals.setdefault((rank, event.to), deque()).append(message)
            else:
                position[event.to] += 1
                heapq.heappush(ready, (take(event.to, since, *message), event.to))
        else:
            there = arrivals.get((event.sender, rank))
            if not there:
                waiting[event.sender, rank] = now
                continue
            now = take(rank, now, *there.popleft())
        position[rank] += 1
        heapq.heappush(ready, (now, rank))
    return last


def _arrival(machine: Machine, hop_free: list[float], now: float, rank: int, event: Send) -> float:
    topology = machine.topology
    latency = machine.socket_latency if machine.is_socket(rank, event.to) else machine.latency
    if event.num_bytes <= _TINY:
        return now + latency
    via = topology.links.get((rank, event.to))
    if via is None:
        raise ValueError(f"Ranks {rank} and {event.to} exchange rows, and topology {topology.name!r} has no link between them.")
    begin = max(now, *(hop_free[hop] for hop in via))
    for hop in via:
        hop_free[hop] = begin + event.num_bytes / (topology.hops[hop].gb_per_s * 1e9)
    return max(hop_free[hop] for hop in via) + latency
