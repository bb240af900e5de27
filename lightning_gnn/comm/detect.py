"""What the running ranks are joined by, as far as host names and NVIDIA's management library (NVML) tell."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from types import ModuleType

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import machine_key
from lightning_gnn.planning.detect import LocalGPUs, Machine, detected
from lightning_gnn.planning.topology import Topology


class UnknownGPUsError(RuntimeError):
    """How GPUs are joined cannot be found out; says why, and what would help."""


def detect(world: World) -> Topology:
    """Returns the topology of the ranks, on every rank the same; called by all of them.

    Ranks of one host name belong to one machine. For those on CUDA devices, the first rank of each machine asks NVML (package
    ``nvidia-ml-py``, imported as ``pynvml``) how they are joined; without it they are taken as alike, and a line of rank 0's log
    says so. Bandwidths are DGCL's; ``lightning-gnn topology measure`` measures them.
    """
    mine = machine_key() or socket.gethostname()
    told = world.all_gather_object((mine, device_uuid(world.device)))
    keys = list(dict.fromkeys(key for key, _ in told))
    ranks = {key: tuple(rank for rank, (other, _) in enumerate(told) if other == key) for key in keys}
    gpus: LocalGPUs | None = None
    trouble = ""
    if world.device.type == "cuda" and ranks[mine][0] == world.rank and len(ranks[mine]) > 1:
        try:
            gpus = local_gpus([told[rank][1] for rank in ranks[mine]])
        except UnknownGPUsError as error:
            trouble = str(error)
    tables = world.all_gather_object((gpus, trouble))
    for key in keys:
        if reason := tables[ranks[key][0]][1]:
            rank_zero_info(
                f"The GPUs of ranks {', '.join(map(str, ranks[key]))} are taken to be joined alike: {reason} Or measure: "
                "lightning-gnn topology measure."
            )
    return detected([Machine(ranks[key], tables[ranks[key][0]][0]) for key in keys])


def device_uuid(device: torch.device) -> str | None:
    """Returns the UUID of a CUDA device as NVML has it, whatever CUDA_VISIBLE_DEVICES says; None for others, or if unknown."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # torch 2.5 or newer
    return None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


def local_gpus(uuids: Sequence[str | None]) -> LocalGPUs:
    """Returns how the GPUs of this machine with these UUIDs are joined.

    Raises:
        UnknownGPUsError: without pynvml, if NVML does not work, or does not know these devices.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise UnknownGPUsError("pip install nvidia-ml-py tells their NVLinks and PCIe switches.") from error
    if None in uuids:
        raise UnknownGPUsError("this torch does not tell their UUIDs; torch 2.5 does.")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise UnknownGPUsError(f"NVML does not start ({error}); nvidia-smi may tell why.") from error
    try:
        return _read([str(uuid) for uuid in uuids], nvml)
    except nvml.NVMLError as error:
        raise UnknownGPUsError(f"NVML knows too little of them ({error}).") from error
    finally:
        nvml.nvmlShutdown()


def _read(uuids: Sequence[str], nvml: ModuleType) -> LocalGPUs:
    handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    position = {_bus_id(nvml.nvmlDeviceGetPciInfo(handle)): index for index, handle in enumerate(handles)}
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
    ancestors = [
        [0 if a is b else int(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)) for b in handles] for a in handles
    ]
    return LocalGPUs(tuple(map(tuple, nvlinks)), tuple(switch_nvlinks), tuple(map(tuple, ancestors)))


def _bus_id(info: object) -> str:
    """Returns a PCI bus id in one spelling: NVML's are bytes or text, with 4 or 8 digits of the domain."""
    bus_id = info.busId  # type: ignore[attr-defined]
    text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}"
