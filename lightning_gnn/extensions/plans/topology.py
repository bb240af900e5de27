"""Devices, the links between them, and the physical hops that links share (DGCL section 5.1).

A link is an ordered pair of devices. It passes one or more hops, such as PCIe switch, QPI, PCIe switch. Links that pass the same
hop in the same stage share its bandwidth. Every physical connection is full duplex. Its two directions are hops at positions 2 i
and 2 i + 1, so ``hop ^ 1`` is the other direction.

P devices, L links, H hops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.arguments import quote

MAX_DEVICES = 64
"""Limit of the number of devices; sets of devices are the bits of one 64-bit integer."""

MAX_HOPS = 8192
"""Limit of the number of hops: twice the number for links between all pairs of devices, in both directions.

Tables have one entry per link and hop.
"""

NVLINK_PAIR, NVLINK, PCIE, QPI, INFINIBAND, ETHERNET = 48.35, 24.22, 11.13, 9.56, 6.37, 3.12
"""GB/s per direction: two NVLinks, one NVLink, ... (DGCL Table 1)."""

SHARED_MEMORY = 8.0
"""GB/s per direction between CPU ranks of one machine, measured with four ranks on a 2-core virtual machine."""

SOCKET_STAGE, SOCKET_MESSAGE = 0.2e-3, 0.18e-3
"""Seconds of a stage between CPU ranks over gloo's sockets, and of each further message of a rank.

Measured with four ranks on two cores.
"""

SOCKET_LATENCY = {"stage_seconds": SOCKET_STAGE, "message_seconds": SOCKET_MESSAGE}


def check_devices(num_devices: int) -> None:
    """Raises ValueError if a topology cannot have this number of devices."""
    if not 1 <= num_devices <= MAX_DEVICES:
        raise ValueError(f"A topology has 1 to {MAX_DEVICES} devices (got {quote(num_devices)}).")


@dataclass(frozen=True)
class Hop:
    """One direction of a physical connection; ``gb_per_s`` in 10^9 bytes per second."""

    name: str
    kind: str
    gb_per_s: float


@dataclass(frozen=True)
class Topology:
    """Devices and the links between them.

    Attributes:
        name: descriptive name.
        num_devices: P.
        hops: directed hops.
        links: for each ordered pair of linked devices, the positions in `hops` that the link passes.
        hosts: devices of each machine.
        sockets: devices of each group inside the machines.
        memory: for each device, the hops to its host's memory; empty if unknown.
        stage_seconds: time of a stage of messages regardless of their size, until the first message is received.
        message_seconds: time of each further message of a device that sends or receives several messages in a stage.

    Raises:
        ValueError: for unknown devices or hops, bandwidths that are not positive, negative times, or devices that cannot reach
            each other.
    """

    name: str
    num_devices: int
    hops: tuple[Hop, ...]
    links: Mapping[tuple[int, int], tuple[int, ...]]
    hosts: tuple[tuple[int, ...], ...]
    sockets: tuple[tuple[int, ...], ...]
    memory: tuple[tuple[int, ...], ...] = field(default=())
    stage_seconds: float = 0.0
    message_seconds: float = 0.0

    def __post_init__(self) -> None:
        devices = range(self.num_devices)
        check_devices(self.num_devices)
        if len(self.hops) > MAX_HOPS:
            raise ValueError(f"A topology has at most {MAX_HOPS:,} hops, two per connection (got {len(self.hops):,}).")
        for hop in self.hops:
            if not 1e-9 <= hop.gb_per_s <= 1e9:
                raise ValueError(
                    f"Hop {quote(hop.name)} needs a positive bandwidth in GB/s (got {hop.gb_per_s}), from 1e-9 to 1e9."
                )
        for name in ("stage_seconds", "message_seconds"):
            if not 0 <= getattr(self, name) <= 1e9:
                raise ValueError(f"{name} must be from 0 to 1e9 seconds (got {getattr(self, name)}).")
        for (a, b), via in self.links.items():
            if a not in devices or b not in devices or a == b:
                raise ValueError(f"Link {quote(a)}-{quote(b)} must join two of the devices 0 to {self.num_devices - 1}.")
            if not via:
                raise ValueError(f"Link {a}-{b} has no hops. Set gb_per_s or via.")
        for title, groups in (("hosts", self.hosts), ("sockets", self.sockets)):
            if sorted(device for group in groups for device in group) != list(devices):
                raise ValueError(f"{title} must contain each device 0 to {self.num_devices - 1} once (got {quote(groups)}).")
        for socket in self.sockets:
            if not any(set(socket) <= set(host) for host in self.hosts):
                raise ValueError(f"The devices {quote(socket)} of a socket belong to several hosts.")
        joined = np.eye(self.num_devices, dtype=bool)
        for pair in self.links:
            joined[pair] = True
        for relay in devices:
            joined |= joined[:, [relay]] & joined[relay]
        for a, b in np.argwhere(~joined)[:1]:
            raise ValueError(f"The topology is not connected: no links lead from device {a} to {b}.")

    @cached_property
    def gb_per_s(self) -> NDArray[np.float64]:
        return np.array([hop.gb_per_s for hop in self.hops])

    @cached_property
    def passes(self) -> NDArray[np.int64]:
        """1 where the link from a to b passes a hop, ``[P, P, H]``."""
        table = np.zeros((self.num_devices, self.num_devices, len(self.hops)), np.int64)
        for (a, b), via in self.links.items():
            table[a, b, list(via)] = 1
        return table

    @property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Devices by socket by host, as a hierarchical partition takes them."""
        return tuple(tuple(socket for socket in self.sockets if set(socket) <= set(host)) for host in self.hosts)

    @property
    def uniform(self) -> bool:
        """Whether all links are equal: each pair is linked by separate hops of one bandwidth."""
        ways = list(self.links.values())
        return (
            len(ways) == self.num_devices * (self.num_devices - 1)
            and len({hop for way in ways for hop in way}) == sum(map(len, ways))
            and len({min(self.hops[hop].gb_per_s for hop in way) for way in ways}) <= 1
        )

    def for_ranks(self, num_ranks: int) -> Topology:
        """Returns the topology of the first `num_ranks` devices.

        Raises:
            ValueError: if there are too few devices, or these are not connected.
        """
        if num_ranks == self.num_devices:
            return self
        if not 1 <= num_ranks < self.num_devices:
            raise ValueError(
                f"Topology {self.name!r} has {self.num_devices} devices, but there are {num_ranks} ranks. Use a topology with "
                "at least one device per rank."
            )

        def keep_devices(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            smaller = (tuple(device for device in group if device < num_ranks) for group in groups)
            return tuple(filter(None, smaller))

        links = {pair: via for pair, via in self.links.items() if max(pair) < num_ranks}
        memory = self.memory[:num_ranks]
        used = {hop & ~1 for via in (*links.values(), *memory) for hop in via}
        new_hop = {old: new for new, old in enumerate(sorted(used | {hop ^ 1 for hop in used}))}
        return replace(
            self,
            name=f"{self.name}, {num_ranks} of {self.num_devices}",
            num_devices=num_ranks,
            hops=tuple(self.hops[old] for old in new_hop),
            links={pair: tuple(new_hop[hop] for hop in via) for pair, via in links.items()},
            hosts=keep_devices(self.hosts),
            sockets=keep_devices(self.sockets),
            memory=tuple(tuple(new_hop[hop] for hop in via) for via in memory),
        )

    @cached_property
    def host_of(self) -> NDArray[np.int64]:
        """Machine of each device, int64 ``[P]``."""
        return _host_of(self.hosts)


@dataclass(frozen=True)
class Hosts:
    """Machines of which only the ranks are known.

    Attributes:
        ranks: ranks of each machine, ascending; each rank is on one machine.
    """

    ranks: tuple[tuple[int, ...], ...]
    uniform = False

    @property
    def name(self) -> str:
        return f"{len(self.ranks)} machines"

    @cached_property
    def host_of(self) -> NDArray[np.int64]:
        """Machine of each rank, int64 ``[P]``."""
        return _host_of(self.ranks)


def _host_of(hosts: tuple[tuple[int, ...], ...]) -> NDArray[np.int64]:
    host_of = np.empty(sum(map(len, hosts)), np.int64)
    for host, ranks in enumerate(hosts):
        host_of[list(ranks)] = host
    return host_of
