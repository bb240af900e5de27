"""Operations on a rank's device of any type: ``torch.cuda`` and similar modules have equal functions."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def backend_of(device: torch.device) -> str:
    """Returns the backend of process groups for tensors of this device: "gloo" for CPU, "nccl" for CUDA.

    Raises:
        ValueError: torch has no backend for such devices, or only one for CPU tensors.
    """
    backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        raise ValueError(
            f"Ranks on {device.type} devices cannot exchange tensors: torch {torch.__version__} has no communication backend "
            'for them. Use Trainer(accelerator="cpu").'
        )
    return str(backend)


def functions_of(device: torch.device) -> Any:
    """Returns the torch module of such devices, ``torch.cuda`` for CUDA; not for the CPU."""
    return getattr(torch, device.type)


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed its queued operations."""
    if device.type != "cpu":
        functions_of(device).synchronize(device)


def can_pin(device: torch.device) -> bool:
    """Returns whether host memory can be pinned for asynchronous copies to and from a device."""
    return device.type == "cuda"


def copy_to_host(tensor: Tensor, deadline_s: float) -> Tensor:
    """Returns a device's tensor on the CPU, in pinned memory if possible, after the copy is complete.

    Raises:
        TimeoutError: the copy is not complete after `deadline_s` seconds.
    """
    functions = functions_of(tensor.device)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=can_pin(tensor.device)).copy_(tensor, non_blocking=True)
    copied = functions.Event()
    copied.record(functions.current_stream(tensor.device))
    began = time.monotonic()
    while not copied.query():
        if time.monotonic() - began > deadline_s:
            raise TimeoutError(f"timed out: {tensor.device} did not finish a copy within {deadline_s:.0f} s")
        time.sleep(1e-5)
    return host


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on a device; if memory can be pinned, the host does not wait for the device."""
    pinned = tensor.pin_memory() if can_pin(device) else tensor
    return pinned.to(device, non_blocking=True)


def free_bytes(device: torch.device) -> int:
    """Returns the bytes available for new tensors on a device, including memory cached by torch's allocator.

    For the CPU, see :func:`available_bytes`.
    """
    functions = functions_of(device)
    free, _ = functions.mem_get_info(device)
    return int(free + functions.memory_reserved(device) - functions.memory_allocated(device))


def available_bytes() -> int | None:
    """Returns the memory that is available on this machine, or in this container; None if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return free
    for _, controllers, path in groups:
        if controllers in _GROUP_FILES:
            root, *names = _GROUP_FILES[controllers]
            group = Path(root + path)
            # SLURM and systemd limit groups above a process's; in a container, the path may be a path of the host.
            above = [each for each in (group, *group.parents) if each.is_relative_to(root)]
            free = int(min(free, *(_left_in(each, *names) for each in above)))
    return free


_GROUP_FILES = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Control groups of version 2 and 1, by controllers: their folder, and the files with their limit and their usage."""


def _left_in(group: Path, limit: str, used: str) -> float:
    """Returns the remaining memory of a control group; pages of files, which count as used, can be dropped."""
    try:
        most, taken = (group / limit).read_text().strip(), int((group / used).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        names = "active_file", "inactive_file"
        # In version 1, a count without "total_" leaves out the groups below.
        pages = sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in names)
        return math.inf if most == "max" else max(int(most) - taken + pages, 0)
    except (OSError, ValueError):
        return math.inf


def random_states(device: torch.device) -> list[Tensor]:
    """Returns the states of torch's generators for a rank on this device, uint8: the CPU's, and the device's."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, functions_of(device).get_rng_state(device).cpu()]


def set_random_states(device: torch.device, states: list[Tensor]) -> None:
    """Restore the result of :func:`random_states`; states from a rank on another type of device may lack the device's."""
    # Copies: set_rng_state reads beyond a tensor that shares its storage with others.
    torch.set_rng_state(states[0].cpu().clone())
    if device.type != "cpu" and len(states) > 1:
        functions_of(device).set_rng_state(states[1].cpu().clone(), device)
