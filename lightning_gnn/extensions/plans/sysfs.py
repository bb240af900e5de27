"""What Linux tells of PCIe devices and network ports: the files below ``/sys`` (kernel: Documentation/ABI, sysfs-bus-pci,
sysfs-class-net, sysfs-class-infiniband)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightning_gnn.extensions.plans.machine_topology import HOST_BRIDGE, NUMA_NODE, ONE_SWITCH, SYSTEM

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
