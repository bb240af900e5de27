"""How long a rehearsed step takes on a machine: ranks compute on its cores, and messages travel over its topology's hops.

The cost of a message is latency plus bytes over bandwidth (alpha-beta, CAGNET section 3), on the hops of DGCL's model
(section 5.1).
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_gnn.advising.rehearsal import Compute, Event, Send
from lightning_gnn.planning.presets import find_topology, machines
from lightning_gnn.planning.topology import Topology

LATENCY_S = 50e-6
"""Of a message, between CPU ranks of one machine as between machines: mostly waking up who waits."""


_FEW, _MANY = 2, 6
"""Steps that are run one after the other: a step takes what more of them take longer."""


def available_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Machine:
    """What steps run on.

    Attributes:
        topology: of as many devices as there are ranks.
        cores: that the ranks of each host share; None for a device of its own for each rank.
        speed: how many times faster a device computes than the one that rehearsed.
        latency: seconds that a message takes whatever its size.
    """

    topology: Topology
    cores: int | None = None
    speed: float = 1.0
    latency: float = LATENCY_S

    @property
    def ranks(self) -> int:
        """One per device."""
        return self.topology.num_devices

    @property
    def threads(self) -> int:
        """That a rank computes with, as strategies have it."""
        return 1 if self.cores is None else max(1, self.cores // len(self.topology.hosts[0]))

    @property
    def crowding(self) -> float:
        """How much longer computing takes where all ranks do it at once: ranks over cores, at least 1."""
        return 1.0 if self.cores is None else max(1.0, len(self.topology.hosts[0]) / self.cores)

    @classmethod
    def of(
        cls,
        ranks: int,
        hosts: int = 1,
        topology: str | Path | Topology | None = None,
        cores: int | None = None,
        speed: float = 1.0,
    ) -> Machine:
        """Returns this machine, or so many like it; or one of a topology, with a device for each rank.

        Args:
            ranks: of all hosts.
            hosts: machines like this one, with equally many ranks each; of no meaning with a topology.
            topology: a name, a JSON file, or a topology (docs/planning.md).
            cores: that the ranks of a host share; by default this machine's, or one each with a topology.
            speed: see :class:`Machine`.

        Raises:
            ValueError: a number that is none, an unknown topology, ranks that hosts do not share evenly.
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
        return cls(machines([ranks // hosts] * hosts), cores or available_cores(), speed)


@dataclass(frozen=True)
class Timing:
    """Of a step.

    Attributes:
        seconds: until the last rank has ended.
        compute_seconds: the same if messages took no time.
    """

    seconds: float
    compute_seconds: float

    @property
    def exchange_seconds(self) -> float:
        """What messages add."""
        return max(0.0, self.seconds - self.compute_seconds)


def timing(events: Sequence[Sequence[Event]], machine: Machine) -> Timing:
    """Returns how long a step takes, once others went before: ranks do not wait for each other between steps.

    Args:
        events: of each rank, as rehearsed.
        machine: with a device for each.

    Raises:
        ValueError: two ranks exchange rows and have no link.
    """

    def of_one(free: bool) -> float:
        few, many = (_run([list(each) * steps for each in events], machine, free) for steps in (_FEW, _MANY))
        # Who waits at the end of few steps may not at the end of many: the difference can be a little too small.
        return max((many - few) / (_MANY - _FEW), _least_seconds(events, machine))

    return Timing(of_one(free=False), of_one(free=True))


def _least_seconds(events: Sequence[Sequence[Event]], machine: Machine) -> float:
    """Returns what the busiest rank computes, or all ranks of a host on its cores: no step is shorter."""
    busy = [sum(event.seconds for event in each if isinstance(event, Compute)) / machine.speed for each in events]
    hosts = (sum(busy[rank] for rank in host) / (machine.cores or len(host)) for host in machine.topology.hosts)
    return max(*busy, *hosts)


def _run(events: Sequence[Sequence[Event]], machine: Machine, free: bool) -> float:
    """Returns when the last rank ends, by going through all events in the order of time.

    A hop carries one message after the other, a core computes one stretch after the other; first come, first served.
    """
    topology = machine.topology
    hop_free = [0.0] * len(topology.hops)
    host_of = {rank: number for number, host in enumerate(topology.hosts) for rank in host}
    cores = [[0.0] * (machine.cores or len(host)) for host in topology.hosts]
    arrivals: dict[tuple[int, int], deque[float]] = {}
    position, last = [0] * len(events), 0.0
    waiting: dict[tuple[int, int], float] = {}  # who waits for whom, since when
    ready = [(0.0, rank) for rank in range(len(events))]
    while ready:
        now, rank = heapq.heappop(ready)
        last = max(last, now)
        if position[rank] == len(events[rank]):
            continue
        event = events[rank][position[rank]]
        if isinstance(event, Compute):
            begin = max(now, heapq.heappop(cores[host_of[rank]]))
            now = begin + event.seconds / machine.speed
            heapq.heappush(cores[host_of[rank]], now)
        elif isinstance(event, Send):
            arrived = now if free else _arrival(topology, hop_free, now, rank, event, machine.latency)
            arrivals.setdefault((rank, event.to), deque()).append(arrived)
            since = waiting.pop((rank, event.to), None)
            if since is not None:
                position[event.to] += 1
                heapq.heappush(ready, (max(since, arrivals[rank, event.to].popleft()), event.to))
        else:
            there = arrivals.get((event.sender, rank))
            if not there:
                waiting[event.sender, rank] = now
                continue
            now = max(now, there.popleft())
        position[rank] += 1
        heapq.heappush(ready, (now, rank))
    return last


def _arrival(topology: Topology, hop_free: list[float], now: float, rank: int, event: Send, latency: float) -> float:
    if not event.num_bytes:
        return now + latency
    via = topology.links.get((rank, event.to))
    if via is None:
        raise ValueError(
            f"Ranks {rank} and {event.to} exchange rows, and topology {topology.name!r} has no link between them."
        )
    begin = max(now, *(hop_free[hop] for hop in via))
    for hop in via:
        hop_free[hop] = begin + event.num_bytes / (topology.hops[hop].gb_per_s * 1e9)
    return max(hop_free[hop] for hop in via) + latency
