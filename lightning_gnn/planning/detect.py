"""What the driver says of a machine's GPUs, as a topology with the bandwidths that DGCL measured (section 5.1, Tables 1 and 3).

A :class:`LocalGPUs` is a small table; :func:`detected` makes the topology of several machines of it. Who reads the table from
NVML is ``comm/detect.py``.

n GPUs of one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from lightning_gnn.planning.presets import (
    ETHERNET,
    NVLINK,
    NVLINK_PAIR,
    PCIE,
    QPI,
    SHARED_MEMORY,
    SOCKET_LATENCY,
    nccl_latency,
    ports,
)
from lightning_gnn.planning.topology import Topology
from lightning_gnn.planning.topology_file import topology_from_dict

ONE_SWITCH, HOST_BRIDGE, NUMA_NODE, SYSTEM = 10, 30, 40, 50
"""What two GPUs have in common, by NVML: a PCIe switch; the host bridge (20: switches below it); the NUMA node; the system."""


@dataclass(frozen=True)
class LocalGPUs:
    """How the GPUs of one machine's ranks are joined, in the order of the ranks.

    Attributes:
        nvlinks: number of active NVLinks between each two, ``[n][n]``.
        switch_nvlinks: number of each one's NVLinks into NVSwitches, ``[n]``.
        ancestors: what each two have in common over PCIe, ``[n][n]``; see :data:`ONE_SWITCH`.
    """

    nvlinks: tuple[tuple[int, ...], ...]
    switch_nvlinks: tuple[int, ...]
    ancestors: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Machine:
    """The ranks of one machine.

    Attributes:
        ranks: ascending.
        gpus: how they are joined; None where that is unknown or they have none: all alike.
    """

    ranks: tuple[int, ...]
    gpus: LocalGPUs | None = None


def nvlink_gb_per_s(count: int) -> float:
    """Returns the bandwidth of so many NVLinks side by side: of one and two as in DGCL's Table 1, else 24.2 GB/s each."""
    return {1: NVLINK, 2: NVLINK_PAIR}.get(count, 24.2 * count)


def detected(
    machines: Sequence[Machine], alike_gb_per_s: float = SHARED_MEMORY, between_gb_per_s: float = ETHERNET
) -> Topology:
    """Returns the topology of machines: their GPUs as reported, other ranks with a link for each two, a network port per machine.

    Two GPUs use their NVLinks, direct or over NVSwitches, if they have any, else PCIe: the switch above each group of GPUs, and
    QPI where a host bridge or socket lies between. A GPU has a slot of its own where two under one switch talk over it.

    Args:
        machines: with all ranks.
        alike_gb_per_s: bandwidth between two ranks of a machine without a table.
        between_gb_per_s: bandwidth of a machine's port; by default Ethernet (DGCL Table 1).
    """
    hops: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    hosts = []
    for number, machine in enumerate(machines):
        if machine.gpus is None:
            links += [{"a": a, "b": b, "gb_per_s": alike_gb_per_s} for a, b in combinations(machine.ranks, 2)]
            hosts.append({"devices": list(machine.ranks)})
        else:
            hosts.append(_add_gpus(number, machine.ranks, machine.gpus, hops, links, memory))
    port_hops, port_links = ports([machine.ranks for machine in machines], between_gb_per_s)
    num_ranks = sum(len(machine.ranks) for machine in machines)
    return topology_from_dict(
        {
            "name": "detected",
            "devices": num_ranks,
            "hosts": hosts,
            "hops": hops + port_hops,
            "links": links + port_links,
            "memory": memory if len(memory) == num_ranks else [],
            **(nccl_latency(len(machines)) if any(machine.gpus for machine in machines) else SOCKET_LATENCY),
        }
    )


def _add_gpus(
    number: int,
    ranks: Sequence[int],
    gpus: LocalGPUs,
    hops: list[dict[str, Any]],
    links: list[dict[str, Any]],
    memory: list[dict[str, Any]],
) -> dict[str, Any]:
    n = len(ranks)
    switches, bridges, nodes = (_groups(gpus, level) for level in (ONE_SWITCH, HOST_BRIDGE, NUMA_NODE))
    switch_of, bridge_of, node_of = (
        {i: place for place, group in enumerate(groups) for i in group} for groups in (switches, bridges, nodes)
    )
    bare = [
        (i, j)
        for i, j in combinations(range(n), 2)
        if not gpus.nvlinks[i][j] and not (gpus.switch_nvlinks[i] and gpus.switch_nvlinks[j])
    ]
    slots = any(switch_of[i] == switch_of[j] for i, j in bare)

    def add(name: str, kind: str, gb_per_s: float) -> str:
        if all(hop["name"] != name for hop in hops):
            hops.append({"name": name, "kind": kind, "gb_per_s": gb_per_s})
        return name

    def between(name: str, one: int, other: int) -> str:
        """Returns the step over the connection of two sockets or bridges, which goes forward from the first to the second."""
        low, high = sorted((one, other))
        return ("" if one < other else "-") + add(f"{name}{number}.{low}-{high}", "qpi", QPI)

    slot = [[add(f"slot{rank}", "pcie", PCIE)] if slots else [] for rank in ranks]
    switch = [add(f"pcie{number}.{place}", "pcie", PCIE) for place in range(len(switches))]
    for i, j in combinations(range(n), 2):
        link: dict[str, Any] = {"a": ranks[i], "b": ranks[j]}
        if gpus.nvlinks[i][j]:
            link.update(kind="nvlink", gb_per_s=nvlink_gb_per_s(gpus.nvlinks[i][j]))
        elif (i, j) not in bare:
            # Any GPU reaches any other at its full width, but all its traffic shares that.
            ends = [add(f"nvswitch{ranks[k]}", "nvlink", nvlink_gb_per_s(gpus.switch_nvlinks[k])) for k in (i, j)]
            link.update(via=[ends[0], f"-{ends[1]}"])
        else:
            middle = [] if switch_of[i] == switch_of[j] else [switch[switch_of[i]], f"-{switch[switch_of[j]]}"]
            if node_of[i] != node_of[j]:
                middle.insert(1, between("qpi", node_of[i], node_of[j]))
            elif bridge_of[i] != bridge_of[j]:
                middle.insert(1, between("bridge", bridge_of[i], bridge_of[j]))
            link.update(via=[*slot[i], *middle, *(f"-{name}" for name in slot[j])])
        links.append(link)
    memory += [{"device": rank, "via": [*slot[i], switch[switch_of[i]]]} for i, rank in enumerate(ranks)]
    return {"devices": list(ranks), "sockets": [[ranks[i] for i in node] for node in nodes]}


def _groups(gpus: LocalGPUs, level: int) -> list[list[int]]:
    """Returns the GPUs that have something up to `level` in common, by their first one, ``[groups][members]``."""
    groups: dict[int, list[int]] = {}
    for i in range(len(gpus.ancestors)):
        first = next((first for first in groups if gpus.ancestors[first][i] <= level), i)
        groups.setdefault(first, []).append(i)
    return list(groups.values())
