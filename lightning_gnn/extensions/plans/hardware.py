"""What NVML tells of the GPUs of this machine's ranks, and Linux of PCIe devices and network ports.

Of Linux, the files below ``/sys`` are read (kernel: Documentation/ABI, sysfs-bus-pci, sysfs-class-net, sysfs-class-infiniband).
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from lightning_gnn.extensions.plans.machine_topology import (
    HOST_BRIDGE,
    NUMA_NODE,
    ONE_SWITCH,
    PCIE3_X16,
    SYSTEM,
    V100_NVLINK,
    LocalGPUs,
    Machine,
    Port,
)
from lightning_gnn.extensions.plans.topology import ETHERNET, NVLINK, PCIE, SHARED_MEMORY

SYSFS = Path("/sys")

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


@dataclass(frozen=True)
class PCIeDevice:
    """A device on PCIe.

    Attributes:
        path: the host bridge, the bridges of switches on the way, and the device, such as ``("pci0000:15", "0000:15:01.0",
            "0000:16:00.0")``.
        numa_node: of its socket; -1 if unknown.
        gb_per_s: that its link carries by speed and width, in 10^9 bytes per second and direction; None if unknown.
    """

    path: tuple[str, ...]
    numa_node: int
    gb_per_s: float | None

    def common_ancestor(self, other: PCIeDevice) -> int:
        """Returns what two devices have in common, as NVML does for GPUs; several switches count as one."""
        if self.path[:2] == other.path[:2]:
            return ONE_SWITCH
        if self.path[0] == other.path[0]:
            return HOST_BRIDGE
        return NUMA_NODE if self.numa_node == other.numa_node >= 0 else SYSTEM


@dataclass(frozen=True)
class NetworkPort:
    """A port that is up.

    Attributes:
        name: ``"mlx5_0:1"`` for port 1 of an InfiniBand or RoCE device, ``"eth0"`` for an interface.
        gb_per_s: by its rate and by its device's PCIe link, in 10^9 bytes per second and direction.
        device: None if it is on no PCIe.
    """

    name: str
    gb_per_s: float
    device: PCIeDevice | None


def pcie_device(address: str, sysfs: Path = SYSFS) -> PCIeDevice | None:
    """Returns the device at an address such as ``"0000:1b:00.0"``; None if there is none."""
    return _device((sysfs / "bus/pci/devices" / address).resolve())


def rdma_ports(sysfs: Path = SYSFS) -> list[NetworkPort]:
    """Returns the active InfiniBand and RoCE ports whose rate is known, by name."""
    found = []
    for port in sorted((sysfs / "class/infiniband").glob("*/ports/*")):
        rate = _number(_read(port / "rate"))  # "400 Gb/sec (4X NDR)"
        if rate and _read(port / "state").endswith("ACTIVE"):
            device = port.parent.parent
            found.append(_port(f"{device.name}:{port.name}", rate / 8, device / "device"))
    return found


def interfaces(sysfs: Path = SYSFS, name: str | None = None) -> list[NetworkPort]:
    """Returns the interfaces of devices that are up and whose speed is known, by name; or the one of this name of any kind."""
    found = []
    for interface in sorted((sysfs / "class/net").glob(name or "*")):
        speed = _number(_read(interface / "speed"))  # Mbit/s, -1 where the driver does not know
        if speed and _read(interface / "operstate") == "up" and (name or (interface / "device").exists()):
            found.append(_port(interface.name, speed / 8000, interface / "device"))
    return found


def _port(name: str, gb_per_s: float, link: Path) -> NetworkPort:
    device = _device(link.resolve())
    return NetworkPort(name, min(gb_per_s, device.gb_per_s or gb_per_s) if device else gb_per_s, device)


def _device(folder: Path) -> PCIeDevice | None:
    """Returns the PCIe device that a folder describes, or a part of one, as with virtio."""
    while folder.name and not _ADDRESS.fullmatch(folder.name):
        folder = folder.parent
    bridge = next((number for number, part in enumerate(folder.parts) if _HOST_BRIDGE.fullmatch(part)), None)
    if bridge is None or not folder.is_dir():
        return None
    numa_node = _read(folder / "numa_node")
    return PCIeDevice(folder.parts[bridge:], int(numa_node) if numa_node else -1, _link_gb_per_s(folder))


def _link_gb_per_s(folder: Path) -> float | None:
    """Returns what the link above a device carries: an idle one is slow, so the highest speed that both of its ends can."""
    ends = [folder, folder.parent] if _ADDRESS.fullmatch(folder.parent.name) else [folder]
    speed = min(_number(_read(end / "max_link_speed")) for end in ends)  # "8.0 GT/s PCIe"
    encoding = 0.8 if speed < 8 else 128 / 130  # since PCIe 3
    return speed * encoding * _number(_read(folder / "current_link_width")) / 8 or None


def _number(text: str) -> float:
    """Returns the number that a text begins with; 0 for another text or a negative one."""
    found = re.match(r"[0-9.]+", text)
    return float(found[0]) if found else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # missing, or the driver has no answer
        return ""


def local_machine(
    ranks: tuple[int, ...], uuids: Sequence[str | None], cuda: bool, several: bool, sysfs: Path = SYSFS
) -> tuple[Machine, list[str]]:
    """Returns the machine of these ranks, with ports if there are `several` machines, and what is assumed of it."""
    gpus, devices, assumed = None, list[PCIeDevice | None](), list[str]()
    if cuda and (len(ranks) > 1 or several):
        try:
            gpus, devices, assumed = local_gpus(uuids, sysfs)
        except UnknownGPUsError as error:
            assumed.append(f"GPUs joined alike, by {SHARED_MEMORY} GB/s, since {error}")
    found = _ports(cuda, sysfs) if several else []
    if several and not found:
        assumed.append(f"one network port, of {ETHERNET} GB/s, since Linux does not tell which one ranks use and how fast it is")
    # Of ports of several kinds, as for storage and messages, NCCL prefers the fastest.
    most = max((port.gb_per_s for port in found), default=0.0)
    found = [port for port in found if port.gb_per_s >= most]
    ports = tuple(Port(port.name, port.gb_per_s, _ancestors(port.device, devices)) for port in found)
    return Machine(ranks, gpus, ports), assumed


def _ports(cuda: bool, sysfs: Path) -> list[NetworkPort]:
    """Returns the ports that messages may take, as far as they are known.

    NCCL uses InfiniBand and RoCE where it can, else interfaces; gloo one interface: the one that GLOO_SOCKET_IFNAME names, or the
    host's name has, which is known where there is one only.
    """
    if cuda:
        return rdma_ports(sysfs) or interfaces(sysfs)
    found = interfaces(sysfs, os.environ.get("GLOO_SOCKET_IFNAME"))
    return found if len(found) == 1 else []


def _ancestors(port: PCIeDevice | None, gpus: Sequence[PCIeDevice | None]) -> tuple[int, ...]:
    """Returns what a port has in common with each GPU; nothing unless that is known of all."""
    known = [gpu for gpu in gpus if gpu is not None]
    return () if port is None or len(known) < len(gpus) else tuple(port.common_ancestor(gpu) for gpu in known)


class UnknownGPUsError(RuntimeError):
    """How GPUs are joined cannot be found out; says why, and what would help."""


def device_uuid(device: torch.device) -> str | None:
    """Returns the UUID of a CUDA device as NVML has it, whatever CUDA_VISIBLE_DEVICES says; None for others, or if unknown."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # torch 2.5 or newer
    return None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


def local_gpus(uuids: Sequence[str | None], sysfs: Path = SYSFS) -> tuple[LocalGPUs, list[PCIeDevice | None], list[str]]:
    """Returns how the GPUs of this machine with these UUIDs are joined, where they are on PCIe, and what is assumed of them.

    Raises:
        UnknownGPUsError: without pynvml, if NVML does not work, or does not know these devices.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise UnknownGPUsError("pynvml is not installed (pip install nvidia-ml-py)") from error
    if None in uuids:
        raise UnknownGPUsError("this torch does not tell their UUIDs; torch 2.5 does")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise UnknownGPUsError(f"NVML does not start ({error}); nvidia-smi may tell why") from error
    try:
        return _gpus([str(uuid) for uuid in uuids], nvml, sysfs)
    except nvml.NVMLError as error:
        raise UnknownGPUsError(f"NVML knows too little of them ({error})") from error
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
                break  # it has no NVLinks, or not so many
            if not active:
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                switch_nvlinks[index] += 1
                continue
            other = position.get(_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
            if other is not None:  # else a GPU that no rank uses
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
    """Returns the rate of each of a GPU's active NVLinks in GB/s and direction; None if NVML does not tell it."""
    try:
        [field] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    except nvml.NVMLError:
        return None
    return field.value.uiVal / 1000 or None if field.nvmlReturn == nvml.NVML_SUCCESS else None


def _bus_id(info: object) -> str:
    """Returns a PCI address as Linux spells it: NVML's are bytes or text, with 4 or 8 digits of the domain."""
    bus_id = info.busId  # type: ignore[attr-defined]
    text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
