"""Topologies as JSON files.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_gnn.arguments import shown
from lightning_gnn.extensions.plans.topology import Hop, Topology, check_devices

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
