"""What the running ranks are joined by, as far as host names, NVIDIA's management library (NVML) and Linux tell."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import machine_key
from lightning_gnn.extensions.plans.machine_topology import PCIE3_X16, V100_NVLINK, LocalGPUs, Machine, Port, detected
from lightning_gnn.extensions.plans.presets import ETHERNET, NVLINK, PCIE, SHARED_MEMORY
from lightning_gnn.extensions.plans.sysfs import SYSFS, NetworkPort, PCIeDevice, interfaces, pcie_device, rdma_ports
from lightning_gnn.extensions.plans.topology import Topology


class UnknownGPUsError(RuntimeError):
    """How GPUs are joined cannot be found out; says why, and what would help."""


def detect(world: World, sysfs: Path = SYSFS) -> Topology:
    """Returns the topology of the ranks, on every rank the same; called by all of them.

    Ranks of one host name belong to one machine. For those on CUDA devices, the first rank of each machine asks NVML (package
    ``nvidia-ml-py``, imported as ``pynvml``) and Linux how they are joined; without it they are taken as alike. Of several
    machines, it also asks Linux for the ports between them. What it does not find out is taken as DGCL measured it, and a line of
    rank 0's log says so; ``lightning-gnn topology measure`` measures.

    Args:
        world: the ranks.
        sysfs: where Linux tells of devices.
    """
    hosts, uuids = hosts_of(world), world.all_gather_object(device_uuid(world.device))
    ranks = next(host for host in hosts if world.rank in host)
    machine, assumed = Machine(ranks), list[str]()
    if ranks[0] == world.rank:
        machine, assumed = _machine(ranks, [uuids[rank] for rank in ranks], world, len(hosts) > 1, sysfs)
    tables = world.all_gather_object((machine, assumed))
    found = [tables[host[0]] for host in hosts]
    for machine, assumed in found:
        if assumed:
            rank_zero_info(
                f"Assumed of the machine of ranks {', '.join(map(str, machine.ranks))}: {'; '.join(assumed)}. Or measure: "
                "lightning-gnn topology measure."
            )
    topology = detected([machine for machine, _ in found])
    if qpi := {hop.gb_per_s for hop in topology.hops if hop.kind == "qpi"}:
        rank_zero_info(
            f"Assumed between sockets, and between host bridges: {', '.join(map(str, sorted(qpi)))} GB/s, in proportion to PCIe. "
            "Or measure: lightning-gnn topology measure."
        )
    return topology


def hosts_of(world: World) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each machine, by host names; called by all ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, key in enumerate(world.all_gather_object(machine_key() or socket.gethostname())):
        ranks.setdefault(key, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def _machine(
    ranks: tuple[int, ...], uuids: Sequence[str | None], world: World, several: bool, sysfs: Path
) -> tuple[Machine, list[str]]:
    """Returns this machine, with ports if there are `several`, and what is assumed of it."""
    gpus, devices, assumed = None, list[PCIeDevice | None](), list[str]()
    if world.device.type == "cuda" and (len(ranks) > 1 or several):
        try:
            gpus, devices, assumed = local_gpus(uuids, sysfs)
        except UnknownGPUsError as error:
            assumed.append(f"GPUs joined alike, by {SHARED_MEMORY} GB/s, since {error}")
    found = _ports(world.device.type == "cuda", sysfs) if several else []
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
        return _read([str(uuid) for uuid in uuids], nvml, sysfs)
    except nvml.NVMLError as error:
        raise UnknownGPUsError(f"NVML knows too little of them ({error})") from error
    finally:
        nvml.nvmlShutdown()


def _read(uuids: Sequence[str], nvml: ModuleType, sysfs: Path) -> tuple[LocalGPUs, list[PCIeDevice | None], list[str]]:
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
