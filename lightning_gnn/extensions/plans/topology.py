"""Devices, the links between them, and the physical hops that links share (DGCL section 5.1).

A link is an ordered pair of devices; it passes one or more hops, such as PCIe switch, QPI, PCIe switch. Links that pass the
same hop in the same stage share its bandwidth. Every physical connection is full duplex: its two directions are two hops, at
positions 2 i and 2 i + 1, so that ``hop ^ 1`` is the other direction.

P devices, L links, H hops.

As a JSON file:

::

    {"devices": 4,
     "hosts": [{"name": "h0", "devices": [0, 1]}, {"name": "h1", "devices": [2, 3], "sockets": [[2], [3]]}],
     "hops": [{"name": "nic0", "kind": "ib", "gb_per_s": 6.37}, {"name": "nic1", "kind": "ib", "gb_per_s": 6.37}],
     "links": [{"a": 0, "b": 1, "kind": "nvlink", "gb_per_s": 48.35},
               {"a": 0, "b": 2, "via": ["nic0", "-nic1"]}, ...],
     "memory": [{"device": 0, "via": ["pcie0"]}, ...],
     "stage_seconds": 2e-05, "message_seconds": 2e-06}

A link describes both directions between a and b. ``via`` lists shared hops in the order from a to b, ``-name`` in their reverse
direction; b to a passes them the other way round. ``gb_per_s`` (10^9 bytes per second and direction) is the bandwidth of a
connection of the link's own, alone or in addition. Optional: ``hosts`` (default: one), ``sockets`` of a host (default: one),
``memory`` (the hops from each device to its host's memory, for predicting swaps), ``name``, ``kind`` (any word; default "link"),
``stage_seconds`` and ``message_seconds`` (that a stage takes whatever its size, and each further message of a device in it;
default 0).
``ranks`` may stand for ``devices``, ``bandwidth_mbit`` (10^6 bit/s) for ``gb_per_s``. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.arguments import shown

MAX_DEVICES = 64
"""Sets of devices are the bits of one 64-bit word."""

MAX_HOPS = 8192
"""Twice what links between all pairs of devices need, in both directions; tables have an entry per link and hop."""

NVLINK_PAIR, NVLINK, PCIE, QPI, INFINIBAND, ETHERNET = 48.35, 24.22, 11.13, 9.56, 6.37, 3.12
"""GB/s and direction: two NVLinks, one NVLink, ... (DGCL Table 1)."""

SHARED_MEMORY = 8.0
"""GB/s and direction between CPU ranks of one machine: measured among four that share a 2-core virtual machine."""

SOCKET_STAGE, SOCKET_MESSAGE = 0.2e-3, 0.18e-3
"""Seconds of a stage between CPU ranks over gloo's sockets, and of each further message of a rank: measured, four ranks on two
cores."""

SOCKET_LATENCY = {"stage_seconds": SOCKET_STAGE, "message_seconds": SOCKET_MESSAGE}


def check_devices(num_devices: int) -> None:
    """Raises ValueError for a number of devices that no topology has."""
    if not 1 <= num_devices <= MAX_DEVICES:
        raise ValueError(f"A topology has 1 to {MAX_DEVICES} devices (got {shown(num_devices)}).")


@dataclass(frozen=True)
class Hop:
    """One direction of a physical connection; ``gb_per_s`` in 10^9 bytes per second."""

    name: str
    kind: str
    gb_per_s: float


@dataclass(frozen=True)
class Topology:
    """What devices are joined by.

    Attributes:
        name: in words.
        num_devices: P.
        hops: the directed hops.
        links: per ordered pair of devices that are joined, the positions in `hops` that it passes.
        hosts: the devices of each machine.
        sockets: the devices of each group inside the machines.
        memory: per device the hops to its host's memory, or empty if unknown.
        stage_seconds: that a stage of messages takes whatever their size: until the first of them has arrived.
        message_seconds: that each further message takes of a device that sends or receives several in one stage.

    Raises:
        ValueError: unknown devices or hops, bandwidths that are not positive, times that are negative, a device that cannot reach
            another.
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
                    f"Hop {shown(hop.name)} needs a positive bandwidth in GB/s (got {hop.gb_per_s}), from 1e-9 to 1e9."
                )
        for name in ("stage_seconds", "message_seconds"):
            if not 0 <= getattr(self, name) <= 1e9:
                raise ValueError(f"{name} must be from 0 to 1e9 seconds (got {getattr(self, name)}).")
        for (a, b), via in self.links.items():
            if a not in devices or b not in devices or a == b:
                raise ValueError(f"Link {shown(a)}-{shown(b)} must join two of the devices 0 to {self.num_devices - 1}.")
            if not via:
                raise ValueError(f"Link {a}-{b} passes no hop; give it gb_per_s or via.")
        for title, groups in (("hosts", self.hosts), ("sockets", self.sockets)):
            if sorted(device for group in groups for device in group) != list(devices):
                raise ValueError(f"{title} must name each device 0 to {self.num_devices - 1} once (got {shown(groups)}).")
        for socket in self.sockets:
            if not any(set(socket) <= set(host) for host in self.hosts):
                raise ValueError(f"The devices {shown(socket)} of a socket belong to several hosts.")
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
        """1 where a link from a to b passes a hop, ``[P, P, H]``."""
        table = np.zeros((self.num_devices, self.num_devices, len(self.hops)), np.int64)
        for (a, b), via in self.links.items():
            table[a, b, list(via)] = 1
        return table

    @property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The devices by socket by host, as a hierarchical partition takes them."""
        return tuple(tuple(socket for socket in self.sockets if set(socket) <= set(host)) for host in self.hosts)

    @property
    def uniform(self) -> bool:
        """Whether all links are alike: each pair joined by hops of its own of one bandwidth."""
        ways = list(self.links.values())
        return (
            len(ways) == self.num_devices * (self.num_devices - 1)
            and len({hop for way in ways for hop in way}) == sum(map(len, ways))
            and len({min(self.hops[hop].gb_per_s for hop in way) for way in ways}) <= 1
        )

    def for_ranks(self, num_ranks: int) -> Topology:
        """Returns the topology of the first `num_ranks` devices, a ValueError if there are too few or they are not connected."""
        if num_ranks == self.num_devices:
            return self
        if not 1 <= num_ranks < self.num_devices:
            raise ValueError(
                f"Topology {self.name!r} has {self.num_devices} devices, but there are {num_ranks} ranks. "
                "Name a topology with at least one device per rank."
            )

        def kept(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
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
            hosts=kept(self.hosts),
            sockets=kept(self.sockets),
            memory=tuple(tuple(new_hop[hop] for hop in via) for via in memory),
        )

    @cached_property
    def host_of(self) -> NDArray[np.int64]:
        """The machine of each device, int64 ``[P]``."""
        return _host_of(self.hosts)


@dataclass(frozen=True)
class Hosts:
    """Machines of which no more is known than their ranks.

    Attributes:
        ranks: of each machine, ascending; each rank is on one.
    """

    ranks: tuple[tuple[int, ...], ...]
    uniform = False

    @property
    def name(self) -> str:
        return f"{len(self.ranks)} machines"

    @cached_property
    def host_of(self) -> NDArray[np.int64]:
        """The machine of each rank, int64 ``[P]``."""
        return _host_of(self.ranks)


def _host_of(hosts: tuple[tuple[int, ...], ...]) -> NDArray[np.int64]:
    host_of = np.empty(sum(map(len, hosts)), np.int64)
    for host, ranks in enumerate(hosts):
        host_of[list(ranks)] = host
    return host_of


class Wiring:
    """A topology that is being described, in the terms of its file: hops are added before the links that name them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._hops: dict[str, dict[str, Any]] = {}
        self._links: list[dict[str, Any]] = []
        self._hosts: list[dict[str, Any]] = []
        self._memory: list[dict[str, Any]] = []

    def hop(self, name: str, kind: str, gb_per_s: float) -> str:
        """Adds a hop unless there is one of that name; returns the name."""
        self._hops.setdefault(name, {"name": name, "kind": kind, "gb_per_s": gb_per_s})
        return name

    def host(self, devices: Sequence[int], sockets: Sequence[Sequence[int]] = ()) -> None:
        self._hosts.append({"devices": [*devices], "sockets": [[*each] for each in sockets or [devices]]})

    def link(self, a: int, b: int, **way: Any) -> None:
        """Adds a link both ways, over hops (`via`), over a connection of its own (`gb_per_s`, `kind`), or both."""
        self._links.append({"a": a, "b": b, **way})

    def link_each_two(self, devices: Sequence[int], gb_per_s: float) -> None:
        for a, b in combinations(devices, 2):
            self.link(a, b, gb_per_s=gb_per_s)

    def link_hosts(self, to_port: Mapping[int, Sequence[str]]) -> None:
        """Links devices of different hosts: by the way of one to its port, and the way of the other back."""
        for one, other in combinations((host["devices"] for host in self._hosts), 2):
            for a, b in product(one, other):
                self.link(a, b, via=[*to_port[a], *map(_reverse, reversed(to_port[b]))])

    def memory(self, device: int, via: Sequence[str]) -> None:
        self._memory.append({"device": device, "via": [*via]})

    def topology(self, **latency: float) -> Topology:
        """Returns the topology; of memory, if the way of every device to it is known."""
        num_devices = sum(len(host["devices"]) for host in self._hosts)
        memory = self._memory if len(self._memory) == num_devices else []
        parts = {"hosts": self._hosts, "hops": [*self._hops.values()], "links": self._links, "memory": memory}
        return topology_from_dict({"name": self.name, "devices": num_devices, **parts, **latency})


def _reverse(step: str) -> str:
    return step.removeprefix("-") if step.startswith("-") else f"-{step}"


def uniform(num_devices: int, gb_per_s: float = 1.0, name: str = "uniform", **latency: float) -> Topology:
    """Returns devices that are all joined to each other by links of their own, of one bandwidth in GB/s."""
    made = Wiring(name)
    made.host(range(num_devices))
    made.link_each_two(range(num_devices), gb_per_s)
    return made.topology(**latency)


def machines(
    ranks_per_host: Sequence[int], inside_gb_per_s: float = SHARED_MEMORY, between_gb_per_s: float = ETHERNET
) -> Topology:
    """Returns machines whose ranks are all alike inside, joined by one full duplex network port each.

    Args:
        ranks_per_host: number of ranks of each machine; those of a machine follow each other. With one machine, the topology
            is :func:`uniform`.
        inside_gb_per_s: bandwidth of the link that each two ranks of a machine have for themselves.
        between_gb_per_s: bandwidth of a port, which all traffic of its machine with others shares; by default Ethernet as
            DGCL measured it (Table 1).
    """
    counts = list(ranks_per_host)
    if not counts or min(counts) < 1:
        raise ValueError(f"Each machine needs one or more ranks (got {counts}).")
    if len(counts) == 1:
        return uniform(counts[0], inside_gb_per_s)
    made, to_port = Wiring(f"{len(counts)} machines"), dict[int, list[str]]()
    for number, (count, end) in enumerate(zip(counts, accumulate(counts))):
        ranks = range(end - count, end)
        made.host(ranks)
        made.link_each_two(ranks, inside_gb_per_s)
        port = made.hop(f"port{number}", "network", between_gb_per_s)
        to_port |= {rank: [port] for rank in ranks}
    made.link_hosts(to_port)
    return made.topology(**SOCKET_LATENCY)


# Files #########################################################################

_MOST_BYTES = 1 << 24
"""Of a file: many times what 64 devices with links between all need."""


def load_topology(path: str | Path) -> Topology:
    """Returns the topology of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no JSON or describes no topology; says which field is wrong.
    """
    size = Path(path).stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; a topology has at most {_MOST_BYTES:,}.")
    try:
        return topology_from_dict(json.loads(Path(path).read_text()), Path(path).stem)
    except (json.JSONDecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def topology_from_dict(description: Any, name: str = "topology") -> Topology:
    """Returns the topology of a description in the JSON format."""
    num_devices = _get(description, "devices", int, "topology", instead="ranks")
    check_devices(num_devices)
    hops: list[Hop] = []
    shared: dict[str, int] = {}  # position of the forward direction
    for where, entry in _entries(description, "hops", "topology", []):
        title = _get(entry, "name", str, where)
        if title in shared or title.startswith("-"):
            raise ValueError(f"{where}: the name {title!r} is taken, or starts with '-'.")
        shared[title] = len(hops)
        hops += _duplex(title, entry, where)

    def way(entry: Mapping[str, Any], where: str) -> tuple[int, ...]:
        steps = _get(entry, "via", list, where, [])
        for step in steps:
            if not isinstance(step, str) or step.removeprefix("-") not in shared:
                raise ValueError(
                    f"{where}: via names the hop {shown(step)}; the hops are {', '.join(list(shared)[:20]) or 'none'}."
                )
        return tuple(shared[step.removeprefix("-")] + step.startswith("-") for step in steps)

    links: dict[tuple[int, int], tuple[int, ...]] = {}
    for where, entry in _entries(description, "links", "topology", [] if num_devices == 1 else None):
        a, b = _get(entry, "a", int, where), _get(entry, "b", int, where)
        if (a, b) in links:
            raise ValueError(f"{where}: there is another link between {shown(a)} and {shown(b)}.")
        via = way(entry, where)
        if "gb_per_s" in entry or "bandwidth_mbit" in entry:
            via = (*via, len(hops))
            hops += _duplex(f"{a}-{b}", entry, where)
        links[a, b] = via
        links[b, a] = tuple(hop ^ 1 for hop in reversed(via))

    hosts, sockets = [], []
    one_host = [{"devices": list(range(num_devices))}]
    for where, entry in _entries(description, "hosts", "topology", one_host):
        host = _devices(_get(entry, "devices", list, where, instead="ranks"), f"{where}: 'devices'")
        hosts.append(host)
        sockets += [_devices(each, f"{where}: 'sockets'") for each in _get(entry, "sockets", list, where, [list(host)])]
    memory: dict[int, tuple[int, ...]] = {}
    for where, entry in _entries(description, "memory", "topology", []):
        device = _get(entry, "device", int, where)
        if device in memory:
            raise ValueError(f"{where}: there is another entry of device {device}.")
        memory[device] = way(entry, where)
    if memory and sorted(memory) != list(range(num_devices)):
        raise ValueError(f"'memory' must name each device 0 to {num_devices - 1} (got {shown(sorted(memory))}).")
    return Topology(
        _get(description, "name", str, "topology", name),
        num_devices,
        tuple(hops),
        links,
        tuple(hosts),
        tuple(sockets),
        tuple(memory[device] for device in sorted(memory)),
        *(_get(description, key, (int, float), "topology", 0.0) for key in ("stage_seconds", "message_seconds")),
    )


def topology_to_dict(topology: Topology) -> dict[str, Any]:
    """Returns `topology` in the JSON format; connections of one link's own are listed as hops too."""

    def via(way: tuple[int, ...]) -> list[str]:
        return [topology.hops[hop].name for hop in way]

    return {
        "name": topology.name,
        "devices": topology.num_devices,
        "hosts": [
            {"devices": list(host), "sockets": [list(socket) for socket in sockets]}
            for host, sockets in zip(topology.hosts, topology.groups)
        ],
        "hops": [{"name": h.name, "kind": h.kind, "gb_per_s": h.gb_per_s} for h in topology.hops[::2]],
        "links": [{"a": a, "b": b, "via": via(way)} for (a, b), way in topology.links.items() if a < b],
        "memory": [{"device": device, "via": via(way)} for device, way in enumerate(topology.memory)],
        "stage_seconds": topology.stage_seconds,
        "message_seconds": topology.message_seconds,
    }


def _duplex(title: str, entry: Mapping[str, Any], where: str) -> list[Hop]:
    gb_per_s = _get(entry, "gb_per_s", (int, float), where, instead="bandwidth_mbit")
    if not 0 < gb_per_s < 1e300:  # Python's integers may be larger than any float; NaN is neither
        raise ValueError(f"{where}: {title} needs a positive bandwidth in GB/s (got {shown(gb_per_s)}).")
    if "gb_per_s" not in entry:
        gb_per_s /= 8000
    reference = entry.get("reference")  # where an emulator notes what it stands for
    usual = reference.get("type") if isinstance(reference, dict) else None
    kind = _get(entry, "kind", str, where, usual if isinstance(usual, str) else "link")
    kind = {"nv1": "nvlink", "nv2": "nvlink"}.get(kind.lower(), kind.lower())
    return [Hop(title, kind, float(gb_per_s)), Hop(f"-{title}", kind, float(gb_per_s))]


def _devices(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(device) is int for device in value):
        raise ValueError(f"{where} must be a list of integers (got {shown(value)}).")
    return tuple(value)


def _entries(description: Any, key: str, where: str, default: Any) -> list[tuple[str, Any]]:
    return [(f"{key}[{index}]", entry) for index, entry in enumerate(_get(description, key, list, where, default))]


def _get(entry: Any, key: str, kind: type | tuple[type, ...], where: str, default: Any = None, instead: str | None = None) -> Any:
    """Returns a field, under the name `instead` if it is there under that name only; without a `default` it must be there."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a JSON object (got {shown(entry)}).")
    if instead is not None and key not in entry and instead in entry:
        key = instead
    if key not in entry and default is not None:
        return default
    value = entry.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{where}: {key!r} must be {wanted} ({f'got {shown(value)}' if key in entry else 'it is missing'}).")
    return value
