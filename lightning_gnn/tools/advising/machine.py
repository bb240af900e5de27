"""Time of a simulated step on a machine: ranks compute on its cores, and messages use the hops of its topology.

A message costs latency plus bytes over bandwidth (alpha-beta model, CAGNET section 3), on the hops of DGCL's model (section 5.1).
Between CPU ranks that share cores, a message through a socket also takes core time at both ends.
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
"""Latency of a message between CPU ranks, within and between machines; mostly the time to wake up the receiver."""

SOCKET_S_PER_BYTE = 0.27e-9
"""Core seconds per byte at each end of a socket message: gloo on the loopback device, four ranks on two cores."""

_TINY = 8
"""Maximum bytes of a message that needs no link and occupies none."""

_SMALL = 3
"""Number of small collectives in a step: whether to continue, logged values, waiting times."""

_FEW, _MANY = 2, 6
"""Numbers of consecutive simulated steps; the difference of their times gives the time of a step."""


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Machine:
    """Hardware that runs the steps.

    Attributes:
        topology: topology with one device per rank.
        cores: number of cores shared by the ranks of each host; None for a separate device per rank.
        speed: speed of a device relative to the simulating core.
        latency: seconds of a message regardless of size; `socket_latency`: between CPU ranks, through a socket.
        contention: slowdown of a core when all ranks of a host compute, as they share caches and memory.
        shared_memory: whether ranks of one host avoid sockets.
        socket_s, socket_s_per_byte: core seconds at each end of a socket message; 0 for a separate device.
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
        """Returns the core seconds of a message at each of its ends."""
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
        """Slowdown of computation when all ranks compute: contention times the ratio of ranks to cores, if above 1."""
        return self.contention * (1.0 if self.cores is None else max(1.0, len(self.topology.hosts[0]) / self.cores))

    @property
    def slowness(self) -> float:
        """Seconds of a rank on a core per second of the simulating core."""
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
        """Returns this machine, or `hosts` machines like it; or the machine of a topology, with one device per rank.

        Args:
            ranks: number of ranks of all hosts, divided equally.
            hosts: number of hosts; ignored with a topology.
            topology: a name, a JSON file, or a topology (docs/planning.md).
            cores: number of cores shared by the ranks of a host; default: this machine's cores, or one per rank with a topology.
            speed: see :class:`Machine`.
        """
        if ranks < 2:
            raise ValueError(f"advice needs at least 2 ranks, got {ranks}.")
        if cores is not None and cores < 1:
            raise ValueError(f"cores must be at least 1 (got {cores}).")
        if not speed > 0:
            raise ValueError(f"speed must be above 0 (got {speed}).")
        if topology is not None:
            return cls(find_topology(topology, ranks), cores, speed)
        if ranks % hosts:
            raise ValueError(f"{ranks} ranks cannot be divided equally among {hosts} machines.")
        on_each = ranks // hosts
        return cls(machines([on_each] * hosts), cores or available_cores(), speed, contention=measured_contention(on_each))


_ROUNDS, _ROWS, _EDGES, _WIDTH = 7, 8_000, 60_000, 64
"""Sizes of the measurement: a layer of a small graph, whose messages fill the caches of each core."""


@cache
def measured_contention(ranks: int) -> float:
    """Returns the slowdown of a thread of this process, at least 1, when `ranks` threads compute at the same time.

    The measurement has the operations of layers: gather rows by edges, sum them, and a matrix product. It takes a quarter of a
    second for few ranks.
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
    """Returns the mean CPU seconds of `count` threads that compute at the same time."""
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
    """Time of a step until the last rank ends, and the time without message costs."""

    seconds: float
    compute_seconds: float

    @property
    def exchange_seconds(self) -> float:
        return max(0.0, self.seconds - self.compute_seconds)


def with_trainer_messages(events: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Returns a step's events with the small messages of the Trainer, around a ring, which synchronizes the ranks at its end."""
    ranks = len(events)

    def once_round(rank: int) -> list[Event]:
        return [Send((rank + 1) % ranks, _TINY), Take((rank - 1) % ranks)] * (ranks - 1)

    return [[*each, *once_round(rank) * _SMALL] for rank, each in enumerate(events)]


def timing(events: Sequence[Sequence[Event]], machine: Machine) -> Timing:
    """Returns the time of a step in a sequence: ranks wait for each other as in `events`, but not between steps."""

    def step_seconds(free: bool) -> float:
        few, many = (_run([list(each) * steps for each in events], machine, free) for steps in (_FEW, _MANY))
        # A rank that waits at the end of few steps may not wait at the end of many: the difference can be slightly too small.
        return max((many - few) / (_MANY - _FEW), _least_seconds(events, machine))

    return Timing(step_seconds(free=False), step_seconds(free=True))


def _least_seconds(events: Sequence[Sequence[Event]], machine: Machine) -> float:
    """Returns a lower bound: computation of the busiest rank, or of all ranks of a host on its cores."""
    busy = [sum(event.seconds for event in each if isinstance(event, Compute)) * machine.slowness for each in events]
    hosts = (sum(busy[rank] for rank in host) / (machine.cores or len(host)) for host in machine.topology.hosts)
    return max(*busy, *hosts)


def _run(events: Sequence[Sequence[Event]], machine: Machine, free: bool) -> float:
    """Returns the time at which the last rank ends, by processing all events in order of time.

    A hop sends one message at a time, and a core runs one computation at a time; first come, first served.
    """
    hop_free = [0.0] * len(machine.topology.hops)
    cores = [[0.0] * (machine.cores or len(host)) for host in machine.topology.hosts]
    arrivals: dict[tuple[int, int], deque[tuple[float, float]]] = {}  # arrival time, and the receiver's computation
    position, last = [0] * len(events), 0.0
    waiting: dict[tuple[int, int], float] = {}  # (sender, receiver): start of waiting
    ready = [(0.0, rank) for rank in range(len(events))]

    def compute(rank: int, now: float, seconds: float) -> float:
        of_host = cores[machine.host_of[rank]]
        end = max(now, heapq.heappop(of_host)) + seconds
        heapq.heappush(of_host, end)
        return end

    def take(rank: int, now: float, arrived: float, seconds: float) -> float:
        # Copying bytes into and out of sockets overlaps with sending others.
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
