"""GPUs, PCIe devices and network ports of a machine as reported by NVML and Linux, and the topology of such machines.

A :class:`Machine` is a small table; :func:`detect_topology` builds a topology from several. Bandwidths are DGCL's measurements
(section 5.1, Tables 1 and 3), scaled by the reported rates. From Linux, files below ``/sys`` are read (kernel: Documentation/ABI,
sysfs-bus-pci, sysfs-class-net, sysfs-class-infiniband).

n GPUs of one machine. Rates are nominal, in 10^9 bytes per second and direction.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

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
)
from lightning_gnn.extensions.plans.wiring import Wiring

ONE_SWITCH, HOST_BRIDGE, NUMA_NODE, SYSTEM = 10, 30, 40, 50
"""Nearest common ancestor of two devices, by NVML: PCIe switch; host bridge (20: several switches); NUMA node; system."""

V100_NVLINK = 25.781
"""Rate of one NVLink of a V100 by NVML; 24.22 GB/s of it (94 %) were measured (DGCL Table 1)."""

PCIE3_X16 = 8 * 16 * 128 / 130 / 8
"""Rate of 16 lanes of PCIe 3, 15.75 GB/s; 11.13 GB/s of it (71 %) were measured (DGCL Table 1).

For PCIe 4, 22.70 GB/s (72 %) were measured (CDFGNN Table 2). For other generations, the share of PCIe 3 is assumed.
"""


@dataclass(frozen=True)
class LocalGPUs:
    """Links between the GPUs of one machine's ranks, in the order of the ranks.

    Attributes:
        nvlinks: number of active NVLinks between each pair, ``[n][n]``.
        switch_nvlinks: number of NVLinks of each GPU to NVSwitches, ``[n]``.
        ancestors: nearest common ancestor of each pair over PCIe, ``[n][n]``; see :data:`ONE_SWITCH`.
        nvlink_rates: rate of one NVLink of each GPU, ``[n]``.
        pcie_rates: rate of each GPU's slot, ``[n]``.
    """

    nvlinks: tuple[tuple[int, ...], ...]
    switch_nvlinks: tuple[int, ...]
    ancestors: tuple[tuple[int, ...], ...]
    nvlink_rates: tuple[float, ...]
    pcie_rates: tuple[float, ...]


@dataclass(frozen=True)
class Port:
    """Network port of a machine.

    Attributes:
        name: name, unique within its machine.
        gb_per_s: full nominal rate; DGCL measured 3.12 GB/s on Ethernet of 25 Gbit/s.
        ancestors: nearest common ancestor with each GPU over PCIe, ``[n]``; empty if unknown.
    """

    name: str
    gb_per_s: float
    ancestors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Ranks of one machine and their hardware.

    Attributes:
        ranks: ranks, ascending.
        gpus: links between the GPUs; None if unknown or without GPUs: links are uniform.
        ports: ports that the ranks may use to reach other machines; empty if unknown: one Ethernet port as measured by DGCL.
    """

    ranks: tuple[int, ...]
    gpus: LocalGPUs | None = None
    ports: tuple[Port, ...] = ()


def nvlink_gb_per_s(count: int, rate: float = V100_NVLINK) -> float:
    """Returns the bandwidth of `count` parallel NVLinks, scaled by their rate.

    For a V100, one and two NVLinks are as in DGCL's Table 1; otherwise each has 24.2 GB/s.
    """
    return round({1: NVLINK, 2: NVLINK_PAIR}.get(count, 24.2 * count) * rate / V100_NVLINK, 2)


def pcie_gb_per_s(rate: float) -> float:
    """Returns the bandwidth of a slot from its rate."""
    return round(rate * PCIE / PCIE3_X16, 2)


def qpi_gb_per_s(rate: float) -> float:
    """Returns the bandwidth between sockets, and between host bridges, of a machine whose slots have this rate.

    No interface reports it. The bandwidth of QPI (DGCL Table 1) is assumed, scaled by the rate, as the parts of a machine are
    from the same generation.
    """
    return round(rate * QPI / PCIE3_X16, 2)


def detect_topology(machines: Sequence[Machine]) -> Topology:
    """Returns the topology of machines: reported GPU links, one link per pair of other ranks, and network ports.

    Two GPUs use their NVLinks, direct or over NVSwitches, if they have any. Otherwise they use PCIe: the switch above each group
    of GPUs, and QPI if a host bridge or socket is between them. A GPU has a separate slot hop if two GPUs under one switch
    communicate over the switch.

    A rank reaches other machines over the port that is nearest to its GPU, as in NCCL; among equally near ports, over the least
    used. The hops between are shared with other PCIe traffic; a port under the same switch has none. A machine without known
    ports gets one Ethernet port (DGCL Table 1).

    Args:
        machines: machines that together have all ranks.
    """
    wires, to_port = Wiring("detected"), dict[int, list[str]]()
    for number, machine in enumerate(machines):
        ports = _nearest(machine.ports or (Port("", ETHERNET),), len(machine.ranks)) if len(machines) > 1 else []
        if machine.gpus is None:
            wires.link_each_two(machine.ranks, SHARED_MEMORY)
            wires.host(machine.ranks)
            ways: list[list[str]] = [[] for _ in machine.ranks]
        else:
            ways = _add_gpus(wires, number, machine.ranks, machine.gpus, ports)
        for rank, way, port in zip(machine.ranks, ways, ports):
            name = f"port{number}" + (f".{port.name}" if port.name else "")
            to_port[rank] = [*way, wires.hop(name, "network", port.gb_per_s)]
    wires.link_hosts(to_port)
    return wires.topology(**(nccl_latency(len(machines)) if any(machine.gpus for machine in machines) else SOCKET_LATENCY))


class _Place(NamedTuple):
    """Location of a device or port on PCIe: numbers of GPU groups, or further numbers for ports outside all groups.

    Attributes:
        switch: -1 for a port that is not under a GPU's switch.
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


def _add_gpus(wires: Wiring, number: int, ranks: Sequence[int], gpus: LocalGPUs, ports: Sequence[Port]) -> list[list[str]]:
    """Add the hops and links of a machine with GPUs; return the hops from each GPU to its port, if any."""
    n = len(ranks)
    levels = (ONE_SWITCH, HOST_BRIDGE, NUMA_NODE)
    groups = [_groups(gpus, level) for level in levels]
    switches, bridges, nodes = groups

    def place(ancestors: Sequence[int], outside: _Place) -> _Place:
        """Returns the location of a device with these common ancestors; `outside` at levels where it is in no GPU's group."""
        return _Place(
            *(
                next((at for at, group in enumerate(each) if any(ancestors[i] <= level for i in group)), elsewhere)
                for level, each, elsewhere in zip(levels, groups, outside)
            )
        )

    places = [place(ancestors, _Place(-1, -1, -1)) for ancestors in gpus.ancestors]
    bare = [
        (i, j)
        for i, j in combinations(range(n), 2)
        if not gpus.nvlinks[i][j] and not (gpus.switch_nvlinks[i] and gpus.switch_nvlinks[j])
    ]
    slots = any(places[i].switch == places[j].switch for i, j in bare)
    slot = [[wires.hop(f"slot{rank}", "pcie", pcie_gb_per_s(r))] if slots else [] for rank, r in zip(ranks, gpus.pcie_rates)]
    switch = [
        wires.hop(f"pcie{number}.{at}", "pcie", pcie_gb_per_s(max(gpus.pcie_rates[i] for i in group)))
        for at, group in enumerate(switches)
    ]

    def across(name: str, start: int, end: int) -> str:
        """Returns the step over the connection of two sockets or bridges; forward is from the first to the second."""
        low, high = sorted((start, end))
        gb_per_s = qpi_gb_per_s(max(gpus.pcie_rates))
        return ("" if start < end else "-") + wires.hop(f"{name}{number}.{low}-{high}", "qpi", gb_per_s)

    def between(start: _Place, end: _Place) -> list[str]:
        """Returns the hops from the switch of a GPU to another location."""
        if start.switch == end.switch:
            return []
        way = [switch[start.switch]]
        if start.node != end.node:
            way.append(across("qpi", start.node, end.node))
        elif start.bridge != end.bridge:
            way.append(across("bridge", start.bridge, end.bridge))
        return way if end.switch < 0 else [*way, f"-{switch[end.switch]}"]

    for i, j in combinations(range(n), 2):
        if gpus.nvlinks[i][j]:
            rate = min(gpus.nvlink_rates[i], gpus.nvlink_rates[j])
            wires.link(ranks[i], ranks[j], kind="nvlink", gb_per_s=nvlink_gb_per_s(gpus.nvlinks[i][j], rate))
        elif (i, j) not in bare:
            # Any GPU reaches any other at its full bandwidth, which all its traffic shares.
            ends = [
                wires.hop(f"nvswitch{ranks[k]}", "nvlink", nvlink_gb_per_s(gpus.switch_nvlinks[k], gpus.nvlink_rates[k]))
                for k in (i, j)
            ]
            wires.link(ranks[i], ranks[j], via=[ends[0], f"-{ends[1]}"])
        else:
            via = [*slot[i], *between(places[i], places[j]), *(f"-{name}" for name in slot[j])]
            wires.link(ranks[i], ranks[j], via=via)
    for i, rank in enumerate(ranks):
        wires.memory(rank, [*slot[i], switch[places[i].switch]])
    wires.host(ranks, [[ranks[i] for i in node] for node in nodes])
    ways: list[list[str]] = []
    for i, port in enumerate(ports):
        outside = _Place(-1, len(bridges) + ports.index(port), len(nodes))
        # Without ancestors, the hops between are unknown.
        ways.append([*slot[i], *between(places[i], place(port.ancestors, outside))] if port.ancestors else [])
    return ways


def _groups(gpus: LocalGPUs, level: int) -> list[list[int]]:
    """Returns groups of GPUs with a common ancestor up to `level`, ordered by their first GPU, ``[groups][members]``."""
    groups: dict[int, list[int]] = {}
    for i in range(len(gpus.ancestors)):
        first = next((first for first in groups if gpus.ancestors[first][i] <= level), i)
        groups.setdefault(first, []).append(i)
    return list(groups.values())


SYSFS = Path("/sys")

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


@dataclass(frozen=True)
class PCIeDevice:
    """PCIe device.

    Attributes:
        path: host bridge, bridges of switches on the path, and the device, such as ``("pci0000:15", "0000:15:01.0",
            "0000:16:00.0")``.
        numa_node: NUMA node of its socket; -1 if unknown.
        gb_per_s: bandwidth of its link by speed and width, in 10^9 bytes per second and direction; None if unknown.
    """

    path: tuple[str, ...]
    numa_node: int
    gb_per_s: float | None

    def common_ancestor(self, device: PCIeDevice) -> int:
        """Returns the nearest common ancestor of two devices, as NVML does for GPUs; several switches count as one."""
        if self.path[:2] == device.path[:2]:
            return ONE_SWITCH
        if self.path[0] == device.path[0]:
            return HOST_BRIDGE
        return NUMA_NODE if self.numa_node == device.numa_node >= 0 else SYSTEM


@dataclass(frozen=True)
class NetworkPort:
    """Network port that is up.

    Attributes:
        name: ``"mlx5_0:1"`` for port 1 of an InfiniBand or RoCE device, ``"eth0"`` for an interface.
        gb_per_s: minimum of its rate and its device's PCIe link, in 10^9 bytes per second and direction.
        device: PCIe device; None if it is not on PCIe.
    """

    name: str
    gb_per_s: float
    device: PCIeDevice | None


def pcie_device(address: str, sysfs: Path = SYSFS) -> PCIeDevice | None:
    """Returns the device at an address such as ``"0000:1b:00.0"``; None if there is none."""
    return _device((sysfs / "bus/pci/devices" / address).resolve())


def rdma_ports(sysfs: Path = SYSFS) -> list[NetworkPort]:
    """Returns the active InfiniBand and RoCE ports with known rates, sorted by name."""
    found = []
    for port in sorted((sysfs / "class/infiniband").glob("*/ports/*")):
        rate = _number(_read(port / "rate"))  # "400 Gb/sec (4X NDR)"
        if rate and _read(port / "state").endswith("ACTIVE"):
            device = port.parent.parent
            found.append(_port(f"{device.name}:{port.name}", rate / 8, device / "device"))
    return found


def interfaces(sysfs: Path = SYSFS, name: str | None = None) -> list[NetworkPort]:
    """Returns device interfaces that are up and have a known speed, sorted by name; or any interface called `name`."""
    found = []
    for interface in sorted((sysfs / "class/net").glob(name or "*")):
        speed = _number(_read(interface / "speed"))  # Mbit/s, -1 if unknown to the driver
        if speed and _read(interface / "operstate") == "up" and (name or (interface / "device").exists()):
            found.append(_port(interface.name, speed / 8000, interface / "device"))
    return found


def _port(name: str, gb_per_s: float, link: Path) -> NetworkPort:
    device = _device(link.resolve())
    return NetworkPort(name, min(gb_per_s, device.gb_per_s or gb_per_s) if device else gb_per_s, device)


def _device(folder: Path) -> PCIeDevice | None:
    """Returns the PCIe device of a sysfs folder; a parent folder describes a virtio device."""
    while folder.name and not _ADDRESS.fullmatch(folder.name):
        folder = folder.parent
    bridge = next((number for number, part in enumerate(folder.parts) if _HOST_BRIDGE.fullmatch(part)), None)
    if bridge is None or not folder.is_dir():
        return None
    numa_node = _read(folder / "numa_node")
    return PCIeDevice(folder.parts[bridge:], int(numa_node) if numa_node else -1, _link_gb_per_s(folder))


def _link_gb_per_s(folder: Path) -> float | None:
    """Returns the bandwidth of the link above a device: by the highest speed that both ends support, as idle links are slow."""
    ends = [folder, folder.parent] if _ADDRESS.fullmatch(folder.parent.name) else [folder]
    speed = min(_number(_read(end / "max_link_speed")) for end in ends)  # "8.0 GT/s PCIe"
    encoding = 0.8 if speed < 8 else 128 / 130  # since PCIe 3
    return speed * encoding * _number(_read(folder / "current_link_width")) / 8 or None


def _number(text: str) -> float:
    """Returns the number at the start of a text; 0 for other text or a negative number."""
    found = re.match(r"[0-9.]+", text)
    return float(found[0]) if found else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # missing file, or no value from the driver
        return ""


def local_machine(
    ranks: tuple[int, ...], uuids: Sequence[str | None], cuda: bool, several: bool, sysfs: Path = SYSFS
) -> tuple[Machine, list[str]]:
    """Returns the machine of these ranks, with ports if there are `several` machines, and the assumptions made about it."""
    gpus, devices, assumed = None, list[PCIeDevice | None](), list[str]()
    if cuda and (len(ranks) > 1 or several):
        try:
            gpus, devices, assumed = local_gpus(uuids, sysfs)
        except UnknownGPUsError as error:
            assumed.append(f"equal links of {SHARED_MEMORY} GB/s between GPUs, because {error}")
    found = _ports(cuda, sysfs) if several else []
    if several and not found:
        assumed.append(f"one network port of {ETHERNET} GB/s, because Linux does not report which port ranks use, and its speed")
    # If ports have several kinds, for example for storage and messages, NCCL prefers the fastest.
    most = max((port.gb_per_s for port in found), default=0.0)
    found = [port for port in found if port.gb_per_s >= most]
    ports = tuple(Port(port.name, port.gb_per_s, _ancestors(port.device, devices)) for port in found)
    return Machine(ranks, gpus, ports), assumed


def _ports(cuda: bool, sysfs: Path) -> list[NetworkPort]:
    """Returns the ports that messages may use, as far as known.

    NCCL uses InfiniBand and RoCE if available, else interfaces. gloo uses one interface: the one named by GLOO_SOCKET_IFNAME or
    the one of the host name. The latter is known only if there is a single interface.
    """
    if cuda:
        return rdma_ports(sysfs) or interfaces(sysfs)
    found = interfaces(sysfs, os.environ.get("GLOO_SOCKET_IFNAME"))
    return found if len(found) == 1 else []


def _ancestors(port: PCIeDevice | None, gpus: Sequence[PCIeDevice | None]) -> tuple[int, ...]:
    """Returns the nearest common ancestor of a port with each GPU; empty unless known for all GPUs."""
    known = [gpu for gpu in gpus if gpu is not None]
    return () if port is None or len(known) < len(gpus) else tuple(port.common_ancestor(gpu) for gpu in known)


class UnknownGPUsError(RuntimeError):
    """Raised if the links between GPUs cannot be detected; the message has the reason and a fix."""


def device_uuid(device: torch.device) -> str | None:
    """Returns the NVML UUID of a CUDA device, independent of CUDA_VISIBLE_DEVICES; None for other devices or if unknown."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # torch 2.5 or newer
    return None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


def local_gpus(uuids: Sequence[str | None], sysfs: Path = SYSFS) -> tuple[LocalGPUs, list[PCIeDevice | None], list[str]]:
    """Returns the links between the GPUs with these UUIDs, their PCIe devices, and the assumptions made about them.

    Raises:
        UnknownGPUsError: if pynvml is missing, NVML does not work, or NVML does not find these devices.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise UnknownGPUsError("pynvml is not installed (pip install nvidia-ml-py)") from error
    if None in uuids:
        raise UnknownGPUsError("this torch does not report their UUIDs; torch 2.5 does")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise UnknownGPUsError(f"NVML does not start ({error}); run nvidia-smi for the reason") from error
    try:
        return _gpus([str(uuid) for uuid in uuids], nvml, sysfs)
    except nvml.NVMLError as error:
        raise UnknownGPUsError(f"NVML lacks data about them ({error})") from error
    finally:
        nvml.nvmlShutdown()


def _gpus(uuids: Sequence[str], nvml: ModuleType, sysfs: Path) -> tuple[LocalGPUs, list[PCIeDevice | None], list[str]]:
    handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    addresses = [_bus_id(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
    position = {address: index for index, address in enumerate(addresses)}
    nvlinks = [[0] * len(handles) for _ in handles]
    switch_nvlinks = [0] * len(handles)
    for index, handle in enumerate(handles):
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                active = nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                break  # no NVLinks, or no more of them
            if not active:
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                switch_nvlinks[index] += 1
                continue
            other = position.get(_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
            if other is not None:  # None: a GPU that no rank uses
                nvlinks[index][other] += 1
    ancestors = [[0 if a is b else int(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)) for b in handles] for a in handles]
    assumed = []
    nvlink_rates = [_nvlink_rate(handle, nvml) for handle in handles]
    if any((rate is None) for rate, own, switched in zip(nvlink_rates, nvlinks, switch_nvlinks) if any(own) or switched):
        assumed.append(f"NVLinks of {NVLINK} GB/s, a V100's, since NVML does not tell their speed")
    devices = [pcie_device(address, sysfs) for address in addresses]
    pcie_rates = [device.gb_per_s if device else None for device in devices]
    if None in pcie_rates:
        assumed.append(f"slots of {PCIE} GB/s, those of PCIe 3, since Linux does not tell their speed")
    gpus = LocalGPUs(
        tuple(map(tuple, nvlinks)),
        tuple(switch_nvlinks),
        tuple(map(tuple, ancestors)),
        tuple(rate or V100_NVLINK for rate in nvlink_rates),
        tuple(rate or PCIE3_X16 for rate in pcie_rates),
    )
    return gpus, devices, assumed


def _nvlink_rate(handle: object, nvml: ModuleType) -> float | None:
    """Returns the rate of each of a GPU's active NVLinks in GB/s per direction; None if NVML does not report it."""
    try:
        [field] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    except nvml.NVMLError:
        return None
    return field.value.uiVal / 1000 or None if field.nvmlReturn == nvml.NVML_SUCCESS else None


def _bus_id(info: object) -> str:
    """Returns a PCI address in Linux spelling; NVML returns bytes or text, with 4 or 8 digits of the domain."""
    bus_id = info.busId  # type: ignore[attr-defined]
    text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
