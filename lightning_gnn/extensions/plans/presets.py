"""Topologies by name: the machines of DGCL section 7 and of CAGNET section 5.2, with the bandwidths that these papers give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, combinations, product
from pathlib import Path
from typing import Any

from lightning_gnn.arguments import shown
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.topology_file import load_topology, topology_from_dict

NVLINK_PAIR, NVLINK, PCIE, QPI, INFINIBAND, ETHERNET = 48.35, 24.22, 11.13, 9.56, 6.37, 3.12
"""GB/s and direction: two NVLinks, one NVLink, ... (DGCL Table 1)."""

SHARED_MEMORY = 8.0
"""GB/s and direction between CPU ranks of one machine: measured among four that share a 2-core virtual machine."""

NCCL_STAGE, NCCL_STAGE_BETWEEN_HOSTS = 8.4e-6 + 5.7e-6, 8.4e-6 + 14.0e-6
"""Seconds of a stage of NCCL's messages: its base latency, and that of PCIe or of the network (the values for rings and the
protocol "Simple" in the tuning tables of NCCL 2.19 to 2.27, src/graph/tuning.cc)."""

SOCKET_STAGE, SOCKET_MESSAGE = 0.2e-3, 0.18e-3
"""Seconds of a stage between CPU ranks over gloo's sockets, and of each further message of a rank: measured, four ranks on two
cores."""

SOCKET_LATENCY = {"stage_seconds": SOCKET_STAGE, "message_seconds": SOCKET_MESSAGE}

_CUBE_MESH = {
    NVLINK_PAIR: ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)),
    NVLINK: ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)),
}
"""Pairs of a DGX-1 with V100: each GPU has six NVLinks, to four others."""


def dgx1(num_hosts: int = 1) -> Topology:
    """Returns machines of 8 GPUs: hybrid cube mesh of NVLinks; other pairs through PCIe switches (2 GPUs each) and QPI.

    Machines are joined by one InfiniBand port each, at their first PCIe switch: GPUs elsewhere get to it by way of theirs.
    """
    hops: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    hosts, memory = [], []
    to_port: list[list[str]] = []
    for host in range(num_hosts):
        first = 8 * host
        switch = [f"pcie{first // 2 + i}" for i in range(4)]
        hops += [{"name": name, "kind": "pcie", "gb_per_s": PCIE} for name in switch]
        hops.append({"name": f"qpi{host}", "kind": "qpi", "gb_per_s": QPI})
        nvlinked = {pair for pairs in _CUBE_MESH.values() for pair in pairs}
        for rate, pairs in _CUBE_MESH.items():
            links += [{"a": first + a, "b": first + b, "kind": "nvlink", "gb_per_s": rate} for a, b in pairs]
        for a, b in product(range(4), range(4, 8)):
            if (a, b) not in nvlinked:
                via = [switch[a // 2], f"qpi{host}", f"-{switch[b // 2]}"]
                links.append({"a": first + a, "b": first + b, "via": via})
        for device in range(8):
            across = [f"-qpi{host}"] if device >= 4 else []
            up = [] if device < 2 else [switch[device // 2], *across, f"-{switch[0]}"]
            to_port.append([*up, f"port{host}"] if num_hosts > 1 else [])
            memory.append({"device": first + device, "via": [switch[device // 2]]})
        hosts.append(
            {
                "devices": [*range(first, first + 8)],
                "sockets": [[*range(first, first + 4)], [*range(first + 4, first + 8)]],
            }
        )
    if num_hosts > 1:
        hops += [{"name": f"port{host}", "kind": "ib", "gb_per_s": INFINIBAND} for host in range(num_hosts)]
    links += links_between([host["devices"] for host in hosts], to_port)
    name = "dgx1" if num_hosts == 1 else f"dgx1x{num_hosts}"
    return topology_from_dict(
        {"name": name, "devices": 8 * num_hosts, "hosts": hosts, "hops": hops, "links": links, "memory": memory}
        | nccl_latency(num_hosts)
    )


def pcie8() -> Topology:
    """Returns a machine of 8 GPUs without NVLink: a slot each, a PCIe switch per two, two switches per socket, QPI between."""
    slot, switch = [f"slot{device}" for device in range(8)], [f"pcie{i}" for i in range(4)]
    hops = [{"name": name, "kind": "pcie", "gb_per_s": PCIE} for name in (*slot, *switch)]
    hops.append({"name": "qpi", "kind": "qpi", "gb_per_s": QPI})
    links = []
    for a, b in combinations(range(8), 2):
        between = [] if a // 2 == b // 2 else [switch[a // 2], f"-{switch[b // 2]}"]
        if a // 4 != b // 4:
            between.insert(1, "qpi")
        links.append({"a": a, "b": b, "via": [slot[a], *between, f"-{slot[b]}"]})
    memory = [{"device": device, "via": [slot[device], switch[device // 2]]} for device in range(8)]
    hosts = [{"devices": [*range(8)], "sockets": [[0, 1, 2, 3], [4, 5, 6, 7]]}]
    return topology_from_dict(
        {"name": "pcie8", "devices": 8, "hosts": hosts, "hops": hops, "links": links, "memory": memory} | nccl_latency(1)
    )


SUMMIT_NVLINK, SUMMIT_XBUS, SUMMIT_SOCKET_PORT = 50.0, 64.0, 12.5
"""GB/s and direction: two GPUs of a socket, or a GPU and its CPU; between sockets; out of a socket (CAGNET section 5.2)."""


def summit(num_devices: int = 6, per_host: int = 6) -> Topology:
    """Returns nodes of Summit: 2 sockets of 3 V100 each, all joined by NVLinks, also to their CPU; an X-bus between the CPUs.

    What leaves a node goes over the CPU and its socket's half of the dual-rail InfiniBand, which the socket's GPUs share.
    The 16 GB/s between a socket and the NIC are left out: that half is narrower, and all that passes one passes the other.

    Args:
        num_devices: GPUs in all; nodes are filled one after the other.
        per_host: GPUs that are used of each node, the first ones.

    Source: CAGNET (GNNSys'21) section 5.2 has all bandwidths.
    """
    if not 1 <= per_host <= 6:
        raise ValueError(f"A node of Summit has 6 GPUs (got per_host={per_host}).")
    hosts = [range(first, min(first + per_host, num_devices)) for first in range(0, num_devices, per_host)]
    hops: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    described = []
    socket = {device: 2 * number + (device - host[0]) // 3 for number, host in enumerate(hosts) for device in host}
    for number, host in enumerate(hosts):
        sockets = [[device for device in host if socket[device] == 2 * number + side] for side in (0, 1)]
        described.append({"devices": list(host), "sockets": [each for each in sockets if each]})
        if sockets[1]:
            hops.append({"name": f"xbus{number}", "kind": "xbus", "gb_per_s": SUMMIT_XBUS})
    hops += [{"name": f"cpu{device}", "kind": "nvlink", "gb_per_s": SUMMIT_NVLINK} for device in range(num_devices)]
    if len(hosts) > 1:
        hops += [{"name": f"port{i}", "kind": "ib", "gb_per_s": SUMMIT_SOCKET_PORT} for i in sorted(set(socket.values()))]
    for a, b in combinations(range(num_devices), 2):
        if socket[a] == socket[b]:
            links.append({"a": a, "b": b, "kind": "nvlink", "gb_per_s": SUMMIT_NVLINK})
        else:
            same_host = socket[a] // 2 == socket[b] // 2
            between = [f"xbus{socket[a] // 2}"] if same_host else [f"port{socket[a]}", f"-port{socket[b]}"]
            links.append({"a": a, "b": b, "via": [f"cpu{a}", *between, f"-cpu{b}"]})
    memory = [{"device": device, "via": [f"cpu{device}"]} for device in range(num_devices)]
    return topology_from_dict(
        {"name": "summit", "devices": num_devices, "hosts": described, "hops": hops, "links": links, "memory": memory}
        | nccl_latency(len(hosts))
    )


def uniform(num_devices: int, gb_per_s: float = 1.0) -> Topology:
    """Returns devices that are all joined to each other by links of their own, of one bandwidth in GB/s."""
    links = [{"a": a, "b": b, "gb_per_s": gb_per_s} for a, b in combinations(range(num_devices), 2)]
    return topology_from_dict({"name": "uniform", "devices": num_devices, "links": links})


def machines(
    ranks_per_host: Sequence[int],
    inside_gb_per_s: float | Sequence[float] = SHARED_MEMORY,
    between_gb_per_s: float = ETHERNET,
) -> Topology:
    """Returns machines whose ranks are all alike inside, joined by one full duplex network port each.

    Args:
        ranks_per_host: number of ranks of each machine; those of a machine follow each other. With one machine, the topology
            is :func:`uniform`.
        inside_gb_per_s: bandwidth of the link that each two ranks of a machine have for themselves, of all machines or each.
        between_gb_per_s: bandwidth of a port, which all traffic of its machine with others shares; by default Ethernet as
            DGCL measured it (Table 1).
    """
    counts = list(ranks_per_host)
    inside = [inside_gb_per_s] * len(counts) if isinstance(inside_gb_per_s, (int, float)) else list(inside_gb_per_s)
    if not counts or min(counts) < 1 or len(inside) != len(counts):
        raise ValueError(f"Each machine needs one or more ranks, and a bandwidth inside (got {counts} ranks and {inside} GB/s).")
    if len(counts) == 1:
        return uniform(counts[0], inside[0])
    hosts = [list(range(end - count, end)) for count, end in zip(counts, accumulate(counts))]
    hops = [{"name": f"port{i}", "kind": "network", "gb_per_s": between_gb_per_s} for i in range(len(hosts))]
    links = links_between(hosts, {rank: [f"port{i}"] for i, host in enumerate(hosts) for rank in host})
    for host, gb_per_s in zip(hosts, inside):
        links += [{"a": a, "b": b, "gb_per_s": gb_per_s} for a, b in combinations(host, 2)]
    return topology_from_dict(
        {
            "name": f"{len(hosts)} machines",
            "devices": sum(counts),
            "hosts": [{"devices": host} for host in hosts],
            "hops": hops,
            "links": links,
            **SOCKET_LATENCY,
        }
    )


def nccl_latency(num_hosts: int) -> dict[str, float]:
    """Returns what a stage of messages between GPUs takes whatever its size, as in a file; those of a stage start together."""
    return {"stage_seconds": NCCL_STAGE if num_hosts == 1 else NCCL_STAGE_BETWEEN_HOSTS}


def links_between(
    hosts: Sequence[Sequence[int]], to_port: Mapping[int, Sequence[str]] | Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Returns the links between devices of different hosts, as in a file: a way to the port, and that of the other back."""
    return [
        {"a": a, "b": b, "via": [*to_port[a], *_reverse(to_port[b])]}
        for one, other in combinations(hosts, 2)
        for a, b in product(one, other)
    ]


PRESETS: dict[str, Callable[[int], Topology]] = {
    "dgx1": lambda num_ranks: dgx1(),
    "dgx1x2": lambda num_ranks: dgx1(2),
    "pcie8": lambda num_ranks: pcie8(),
    "summit": lambda num_ranks: summit(num_ranks or 6),
    "uniform": uniform,
}
"""Topologies by name, made for at least so many ranks if they have as many devices."""


def find_topology(source: str | Path | Topology, num_ranks: int | None) -> Topology:
    """Returns a topology.

    Args:
        source: ``"dgx1"``, ``"dgx1x2"``, ``"pcie8"``, ``"summit"``, ``"uniform"``, the path of a JSON file, or a topology.
        num_ranks: how many devices; of larger ones the first are taken. None for all of them.

    Raises:
        ValueError: none of these, too small, or ``"uniform"`` of no number.
    """
    if isinstance(source, str) and source in PRESETS:
        if source == "uniform" and num_ranks is None:
            raise ValueError("uniform has as many devices as there are ranks: say how many.")
        source = PRESETS[source](num_ranks or 0)
    elif not isinstance(source, Topology):
        if not isinstance(source, (str, Path)) or not os.path.isfile(source):
            raise ValueError(f"topology must be one of {', '.join(PRESETS)} or a JSON file (got {shown(str(source))}).")
        source = load_topology(source)
    return source if num_ranks is None else source.for_ranks(num_ranks)


def _reverse(via: Sequence[str]) -> list[str]:
    return [step.removeprefix("-") if step.startswith("-") else f"-{step}" for step in reversed(via)]
