"""Topologies described in code, by uniform machines, or by a JSON file.

JSON format:

::

    {"devices": 4,
     "hosts": [{"name": "h0", "devices": [0, 1]}, {"name": "h1", "devices": [2, 3], "sockets": [[2], [3]]}],
     "hops": [{"name": "nic0", "kind": "ib", "gb_per_s": 6.37}, {"name": "nic1", "kind": "ib", "gb_per_s": 6.37}],
     "links": [{"a": 0, "b": 1, "kind": "nvlink", "gb_per_s": 48.35},
               {"a": 0, "b": 2, "via": ["nic0", "-nic1"]}, ...],
     "memory": [{"device": 0, "via": ["pcie0"]}, ...],
     "stage_seconds": 2e-05, "message_seconds": 2e-06}

A link describes both directions between a and b. ``via`` lists shared hops in the order from a to b, with ``-name`` for the
reverse direction of a hop. The direction from b to a uses the same hops reversed. ``gb_per_s`` (10^9 bytes per second and
direction) is the bandwidth of a connection that only this link uses. It may be given alone or in addition to ``via``.

Optional fields:

- ``hosts`` (default: one), and ``sockets`` of a host (default: one).
- ``memory``: the hops from each device to its host's memory, used to predict swaps.
- ``name``, and ``kind`` (any string; default "link").
- ``stage_seconds`` and ``message_seconds``: time of a stage regardless of size, and of each further message of a device in the
  stage (default 0).

``ranks`` is accepted for ``devices``, and ``bandwidth_mbit`` (10^6 bit/s) for ``gb_per_s``. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations, product
from pathlib import Path
from typing import Any

from lightning_gnn.arguments import quote
from lightning_gnn.extensions.plans.topology import ETHERNET, SHARED_MEMORY, SOCKET_LATENCY, Hop, Topology, check_devices


class Wiring:
    """Builder of a topology in the terms of its JSON format: hops are added before the links that refer to them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._hops: dict[str, dict[str, Any]] = {}
        self._links: list[dict[str, Any]] = []
        self._hosts: list[dict[str, Any]] = []
        self._memory: list[dict[str, Any]] = []

    def hop(self, name: str, kind: str, gb_per_s: float) -> str:
        """Add a hop unless a hop of that name exists; return the name."""
        self._hops.setdefault(name, {"name": name, "kind": kind, "gb_per_s": gb_per_s})
        return name

    def host(self, devices: Sequence[int], sockets: Sequence[Sequence[int]] = ()) -> None:
        self._hosts.append({"devices": [*devices], "sockets": [[*each] for each in sockets or [devices]]})

    def link(self, a: int, b: int, **way: Any) -> None:
        """Add a link in both directions, over shared hops (`via`), a separate connection (`gb_per_s`, `kind`), or both."""
        self._links.append({"a": a, "b": b, **way})

    def link_each_two(self, devices: Sequence[int], gb_per_s: float) -> None:
        for a, b in combinations(devices, 2):
            self.link(a, b, gb_per_s=gb_per_s)

    def link_hosts(self, to_port: Mapping[int, Sequence[str]]) -> None:
        """Link devices of different hosts through the ports of both; `to_port` maps each device to the hops to its port."""
        for one, other in combinations((host["devices"] for host in self._hosts), 2):
            for a, b in product(one, other):
                self.link(a, b, via=[*to_port[a], *map(_reverse, reversed(to_port[b]))])

    def memory(self, device: int, via: Sequence[str]) -> None:
        self._memory.append({"device": device, "via": [*via]})

    def topology(self, **latency: float) -> Topology:
        """Returns the topology; it includes host memory only if the hops of every device to it are given."""
        num_devices = sum(len(host["devices"]) for host in self._hosts)
        memory = self._memory if len(self._memory) == num_devices else []
        parts = {"hosts": self._hosts, "hops": [*self._hops.values()], "links": self._links, "memory": memory}
        return topology_from_dict({"name": self.name, "devices": num_devices, **parts, **latency})


def _reverse(step: str) -> str:
    return step.removeprefix("-") if step.startswith("-") else f"-{step}"


def uniform(num_devices: int, gb_per_s: float = 1.0, name: str = "uniform", **latency: float) -> Topology:
    """Returns devices with a separate link between each pair, all of one bandwidth in GB/s."""
    made = Wiring(name)
    made.host(range(num_devices))
    made.link_each_two(range(num_devices), gb_per_s)
    return made.topology(**latency)


def machines(
    ranks_per_host: Sequence[int], inside_gb_per_s: float = SHARED_MEMORY, between_gb_per_s: float = ETHERNET
) -> Topology:
    """Returns machines with uniform links inside, connected by one full-duplex network port each.

    Args:
        ranks_per_host: number of ranks of each machine; ranks of a machine are consecutive. With one machine, the topology is
            :func:`uniform`.
        inside_gb_per_s: bandwidth of the separate link between each pair of ranks of a machine.
        between_gb_per_s: bandwidth of a port, shared by all traffic between its machine and others. Default: Ethernet as measured
            by DGCL (Table 1).
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
"""Limit of the file size; many times the size needed for 64 devices with links between all pairs."""


def load_topology(path: str | Path) -> Topology:
    """Returns the topology of a JSON file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not JSON or describes no topology; the message names the invalid field.
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
            raise ValueError(f"{where}: name must be unique and must not start with '-', got {title!r}.")
        shared[title] = len(hops)
        hops += _duplex(title, entry, where)

    def way(entry: Mapping[str, Any], where: str) -> tuple[int, ...]:
        steps = _get(entry, "via", list, where, [])
        for step in steps:
            if not isinstance(step, str) or step.removeprefix("-") not in shared:
                raise ValueError(
                    f"{where}: via names the hop {quote(step)}; the hops are {', '.join(list(shared)[:20]) or 'none'}."
                )
        return tuple(shared[step.removeprefix("-")] + step.startswith("-") for step in steps)

    links: dict[tuple[int, int], tuple[int, ...]] = {}
    for where, entry in _entries(description, "links", "topology", [] if num_devices == 1 else None):
        a, b = _get(entry, "a", int, where), _get(entry, "b", int, where)
        if (a, b) in links:
            raise ValueError(f"{where}: the link between {quote(a)} and {quote(b)} is defined twice.")
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
            raise ValueError(f"{where}: device {device} is defined twice.")
        memory[device] = way(entry, where)
    if memory and sorted(memory) != list(range(num_devices)):
        raise ValueError(f"'memory' must have an entry for each device 0 to {num_devices - 1} (got {quote(sorted(memory))}).")
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
    """Returns `topology` in the JSON format; a connection that only one link uses is also listed as a hop."""

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
    if not 0 < gb_per_s < 1e300:  # a Python int may exceed any float; NaN fails both comparisons
        raise ValueError(f"{where}: {title} needs a positive bandwidth in GB/s (got {quote(gb_per_s)}).")
    if "gb_per_s" not in entry:
        gb_per_s /= 8000
    reference = entry.get("reference")  # used by an emulator to record the emulated hardware
    usual = reference.get("type") if isinstance(reference, dict) else None
    kind = _get(entry, "kind", str, where, usual if isinstance(usual, str) else "link")
    kind = {"nv1": "nvlink", "nv2": "nvlink"}.get(kind.lower(), kind.lower())
    return [Hop(title, kind, float(gb_per_s)), Hop(f"-{title}", kind, float(gb_per_s))]


def _devices(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(device) is int for device in value):
        raise ValueError(f"{where} must be a list of integers (got {quote(value)}).")
    return tuple(value)


def _entries(description: Any, key: str, where: str, default: Any) -> list[tuple[str, Any]]:
    return [(f"{key}[{index}]", entry) for index, entry in enumerate(_get(description, key, list, where, default))]


def _get(entry: Any, key: str, kind: type | tuple[type, ...], where: str, default: Any = None, instead: str | None = None) -> Any:
    """Returns a field, or the field `instead` if only that exists; raises ValueError for another type, or without a `default`."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a JSON object (got {quote(entry)}).")
    if instead is not None and key not in entry and instead in entry:
        key = instead
    if key not in entry and default is not None:
        return default
    value = entry.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{where}: {key!r} must be {wanted} ({f'got {quote(value)}' if key in entry else 'it is missing'}).")
    return value
