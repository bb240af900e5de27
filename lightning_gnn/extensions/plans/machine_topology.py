"""What the system says of a machine's GPUs and network ports, as a topology with the bandwidths that DGCL measured (section 5.1,
Tables 1 and 3), in proportion to the rates that are reported.

A :class:`Machine` is a small table; :func:`detected` makes the topology of several of it. Who reads the tables from NVML and from
Linux is ``extensions/plans/hardware.py``.

n GPUs of one machine. Rates are nominal, in 10^9 bytes per second and direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from lightning_gnn.extensions.plans.presets import nccl_latency
from lightning_gnn.extensions.plans.topology import (
    ETHERNET,
    NVLINK,
    NVLINK_PAIR,
    PCIE,
    QPI,
    SHARED_MEMORY,
    SOCKET_LATENCY,
    Topology,
    Wiring,
)

ONE_SWITCH, HOST_BRIDGE, NUMA_NODE, SYSTEM = 10, 30, 40, 50
"""What two devices have in common, by NVML: a PCIe switch; the host bridge (20: switches below it); the NUMA node; the system."""

V100_NVLINK = 25.781
"""Rate of one NVLink of a V100, as NVML has it: 24.22 GB/s of it (94 %) were measured (DGCL Table 1)."""

PCIE3_X16 = 8 * 16 * 128 / 130 / 8
"""Rate of 16 lanes of PCIe 3, 15.75 GB/s: 11.13 GB/s of it (71 %) were measured (DGCL Table 1); of PCIe 4's, 22.70 GB/s (72 %;
CDFGNN Table 2). For others the share of PCIe 3 is assumed."""


@dataclass(frozen=True)
class LocalGPUs:
    """How the GPUs of one machine's ranks are joined, in the order of the ranks.

    Attributes:
        nvlinks: number of active NVLinks between each two, ``[n][n]``.
        switch_nvlinks: number of each one's NVLinks into NVSwitches, ``[n]``.
        ancestors: what each two have in common over PCIe, ``[n][n]``; see :data:`ONE_SWITCH`.
        nvlink_rates: of one of each one's NVLinks, ``[n]``.
        pcie_rates: of each one's slot, ``[n]``.
    """

    nvlinks: tuple[tuple[int, ...], ...]
    switch_nvlinks: tuple[int, ...]
    ancestors: tuple[tuple[int, ...], ...]
    nvlink_rates: tuple[float, ...]
    pcie_rates: tuple[float, ...]


@dataclass(frozen=True)
class Port:
    """A network port of a machine.

    Attributes:
        name: unique in its machine.
        gb_per_s: its rate, of which nothing is taken off: DGCL measured 3.12 GB/s of Ethernet's 25 Gbit/s.
        ancestors: what it has in common with each GPU over PCIe, ``[n]``; empty if unknown.
    """

    name: str
    gb_per_s: float
    ancestors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """The ranks of one machine.

    Attributes:
        ranks: ascending.
        gpus: how they are joined; None where that is unknown or they have none: all alike.
        ports: that its ranks may use to reach other machines; empty where none is known: one of DGCL's Ethernet.
    """

    ranks: tuple[int, ...]
    gpus: LocalGPUs | None = None
    ports: tuple[Port, ...] = ()


def nvlink_gb_per_s(count: int, rate: float = V100_NVLINK) -> float:
    """Returns the bandwidth of so many NVLinks side by side: of a V100's one and two as in DGCL's Table 1, else 24.2 GB/s each;
    of others in proportion to their rate."""
    return round({1: NVLINK, 2: NVLINK_PAIR}.get(count, 24.2 * count) * rate / V100_NVLINK, 2)


def pcie_gb_per_s(rate: float) -> float:
    """Returns the bandwidth of a slot of a rate."""
    return round(rate * PCIE / PCIE3_X16, 2)


def qpi_gb_per_s(rate: float) -> float:
    """Returns the bandwidth between sockets, and between host bridges, of a machine whose slots have a rate.

    Nothing reports it. That of QPI (DGCL Table 1) is assumed, in proportion to the rate, since a machine's parts are of one age.
    """
    return round(rate * QPI / PCIE3_X16, 2)


def detected(machines: Sequence[Machine]) -> Topology:
    """Returns the topology of machines: their GPUs as reported, other ranks with a link for each two, and their network ports.

    Two GPUs use their NVLinks, direct or over NVSwitches, if they have any, else PCIe: the switch above each group of GPUs, and
    QPI where a host bridge or socket lies between. A GPU has a slot of its own where two under one switch talk over it.

    A rank reaches other machines over the port that is nearest to its GPU, as NCCL does; of several, the one that the fewest use.
    What lies between is shared with other traffic over PCIe; under the same switch, nothing does. A machine of which no port is
    known has one of Ethernet (DGCL Table 1).

    Args:
        machines: with all ranks.
    """
    made, to_port = Wiring("detected"), dict[int, list[str]]()
    for number, machine in enumerate(machines):
        ports = _nearest(machine.ports or (Port("", ETHERNET),), len(machine.ranks)) if len(machines) > 1 else []
        if machine.gpus is None:
            made.link_each_two(machine.ranks, SHARED_MEMORY)
            made.host(machine.ranks)
            ways: list[list[str]] = [[] for _ in machine.ranks]
        else:
            ways = _add_gpus(made, number, machine.ranks, machine.gpus, ports)
        for rank, way, port in zip(machine.ranks, ways, ports):
            name = f"port{number}" + (f".{port.name}" if port.name else "")
            to_port[rank] = [*way, made.hop(name, "network", port.gb_per_s)]
    made.link_hosts(to_port)
    return made.topology(**(nccl_latency(len(machines)) if any(machine.gpus for machine in machines) else SOCKET_LATENCY))


class _Place(NamedTuple):
    """Where a device or port is on PCIe: groups of GPUs by number, and further numbers for ports apart from all of them.

    Attributes:
        switch: -1 for a port under no GPU's switch.
    """

    switch: int
    bridge: int
    node: int


def _nearest(ports: Sequence[Port], n: int) -> list[Port]:
    """Returns the port of each of n ranks."""
    used = Counter[str]()
    chosen: list[Port] = []
    for i in range(n):
        common = [port.ancestors[i] if port.ancestors else SYSTEM for port in ports]
        near = [port for port, ancestor in zip(ports, common) if ancestor == min(common)]
        chosen.append(min(near, key=lambda port: used[port.name]))
        used[chosen[-1].name] += 1
    return chosen


def _add_gpus(made: Wiring, number: int, ranks: Sequence[int], gpus: LocalGPUs, ports: Sequence[Port]) -> list[list[str]]:
    """Adds a machine of GPUs, its hops and links; returns the way of each GPU to its port, if any."""
    n = len(ranks)
    levels = (ONE_SWITCH, HOST_BRIDGE, NUMA_NODE)
    groups = [_groups(gpus, level) for level in levels]
    switches, bridges, nodes = groups

    def place(ancestors: Sequence[int], apart: _Place) -> _Place:
        """Returns where something is that has this in common with each GPU; `apart` where it is in no GPU's group."""
        return _Place(
            *(
                next((at for at, group in enumerate(each) if any(ancestors[i] <= level for i in group)), elsewhere)
                for level, each, elsewhere in zip(levels, groups, apart)
            )
        )

    places = [place(ancestors, _Place(-1, -1, -1)) for ancestors in gpus.ancestors]
    bare = [
        (i, j)
        for i, j in combinations(range(n), 2)
        if not gpus.nvlinks[i][j] and not (gpus.switch_nvlinks[i] and gpus.switch_nvlinks[j])
    ]
    slots = any(places[i].switch == places[j].switch for i, j in bare)
    slot = [[made.hop(f"slot{rank}", "pcie", pcie_gb_per_s(rate))] if slots else [] for rank, rate in zip(ranks, gpus.pcie_rates)]
    switch = [
        made.hop(f"pcie{number}.{at}", "pcie", pcie_gb_per_s(max(gpus.pcie_rates[i] for i in group)))
        for at, group in enumerate(switches)
    ]

    def across(name: str, one: int, other: int) -> str:
        """Returns the step over the connection of two sockets or bridges, which goes forward from the first to the second."""
        low, high = sorted((one, other))
        gb_per_s = qpi_gb_per_s(max(gpus.pcie_rates))
        return ("" if one < other else "-") + made.hop(f"{name}{number}.{low}-{high}", "qpi", gb_per_s)

    def between(one: _Place, other: _Place) -> list[str]:
        """Returns the way from the switch of a GPU to another place."""
        if one.switch == other.switch:
            return []
        way = [switch[one.switch]]
        if one.node != other.node:
            way.append(across("qpi", one.node, other.node))
        elif one.bridge != other.bridge:
            way.append(across("bridge", one.bridge, other.bridge))
        return way if other.switch < 0 else [*way, f"-{switch[other.switch]}"]

    for i, j in combinations(range(n), 2):
        if gpus.nvlinks[i][j]:
            rate = min(gpus.nvlink_rates[i], gpus.nvlink_rates[j])
            made.link(ranks[i], ranks[j], kind="nvlink", gb_per_s=nvlink_gb_per_s(gpus.nvlinks[i][j], rate))
        elif (i, j) not in bare:
            # Any GPU reaches any other at its full width, but all its traffic shares that.
            ends = [
                made.hop(f"nvswitch{ranks[k]}", "nvlink", nvlink_gb_per_s(gpus.switch_nvlinks[k], gpus.nvlink_rates[k]))
                for k in (i, j)
            ]
            made.link(ranks[i], ranks[j], via=[ends[0], f"-{ends[1]}"])
        else:
            via = [*slot[i], *between(places[i], places[j]), *(f"-{name}" for name in slot[j])]
            made.link(ranks[i], ranks[j], via=via)
    for i, rank in enumerate(ranks):
        made.memory(rank, [*slot[i], switch[places[i].switch]])
    made.host(ranks, [[ranks[i] for i in node] for node in nodes])
    ways: list[list[str]] = []
    for i, port in enumerate(ports):
        apart = _Place(-1, len(bridges) + ports.index(port), len(nodes))
        # Without ancestors it is not known what lies between.
        ways.append([*slot[i], *between(places[i], place(port.ancestors, apart))] if port.ancestors else [])
    return ways


def _groups(gpus: LocalGPUs, level: int) -> list[list[int]]:
    """Returns the GPUs that have something up to `level` in common, by their first one, ``[groups][members]``."""
    groups: dict[int, list[int]] = {}
    for i in range(len(gpus.ancestors)):
        first = next((first for first in groups if gpus.ancestors[first][i] <= level), i)
        groups.setdefault(first, []).append(i)
    return list(groups.values())
