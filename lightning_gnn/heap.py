"""Tensors of this process, and memory that glibc caches: kept during training on the CPU, returned during partitioning.

A full-graph step allocates and frees the same few large tensors each time. glibc returns each of them to the system and requests
new pages, which the system clears. On the benchmark machine this took as long as the products that fill the tensors.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_gnn.devices import available_bytes

# Parameters of glibc's mallopt, see `man mallopt`, and their defaults.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}
_MOST_KEPT = 32 * 1024 * 1024
"""Maximal block size with a separate mapping to which glibc raises its threshold; it caches twice as much (64-bit systems)."""
_LARGEST = 2**31 - 1
_MOST_BLOCKS = 1 << 16


_frozen: list[weakref.ref[Tensor]] = []


def freeze_objects() -> None:
    """Exclude all objects of this process from garbage collection; their tensors remain in :func:`tensors_now`."""
    _frozen.extend(map(weakref.ref, tensors_now()))
    gc.freeze()


def tensors_now() -> list[Tensor]:
    """Returns all tensors of this process."""
    found = [x for x in gc.get_referrers(Tensor) if type(x) is Tensor]  # faster than a pass over all objects
    return found + [x for known in _frozen if (x := known()) is not None]


def _set_options(options: Mapping[int, int]) -> bool:
    """Set options of glibc's malloc and return cached memory to the system; returns False for other C libraries and values."""
    try:
        libc = ctypes.CDLL(None)
        are_set = [libc.mallopt(option, value) for option, value in options.items()]
        libc.malloc_trim(0)
    except (AttributeError, OSError):
        return False
    return all(are_set)


@contextmanager
def keeping_freed_memory() -> Iterator[bool]:
    """Context manager in which this process caches freed memory, and returns it at the end; yields whether glibc supports it."""
    try:  # older versions allow a threshold of at most 32 MB
        yield _set_options({_TRIM_THRESHOLD: _LARGEST, _MMAP_THRESHOLD: 1 << 30}) or _set_options({_MMAP_MAX: 0})
    finally:
        _set_options(_DEFAULTS)


_FRAGMENTED = 3.5
"""Maximal memory of a step with cached memory relative to a step without, in measurements.

To align a tensor, malloc needs a block larger than the tensor: a freed block often does not fit a tensor of the same size.
"""


class StepMemory(pl.Callback):
    """Returns freed memory to the system in the first training step, and caches it in later steps if enough is available.

    Args:
        in_use: stack that is closed at the end of the stage.
        sharing: number of ranks of this machine; None to cache nothing.
    """

    def __init__(self, in_use: ExitStack, sharing: int | None) -> None:
        self._in_use, self._sharing, self._steps, self._before = in_use, sharing, 0, 0

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == 1:
            self._in_use.enter_context(giving_back_freed_memory())
            reset_peak()
            self._before = process_bytes("VmRSS")
        elif self._steps == 2 and self._sharing is not None:
            kept = int(_FRAGMENTED * self._sharing * (process_bytes("VmHWM") - self._before))
            free = available_bytes()
            if free is None or kept <= free:
                self._in_use.enter_context(keeping_freed_memory())
            else:
                rank_zero_info(
                    f"reuse_buffers=True has no effect: ranks of this machine may need {kept / 1e9:.3g} GB, and {free / 1e9:.3g} "
                    "GB are available. Steps are slower, because they return freed memory to the system (docs/memory.md)."
                )


peaks: list[int] = []
"""Peaks of this process's memory before each reset, in bytes."""


def reset_peak() -> None:
    """Begin a new peak of this process's memory, where the system supports it."""
    peaks.append(process_bytes("VmHWM"))
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Returns the peak of this process's memory since it started, also before :func:`reset_peak`; 0 if it is unknown."""
    return max(*peaks, process_bytes("VmHWM"), 0)


def process_bytes(field: str) -> int:
    """Returns a field of this process's status in bytes, such as ``"VmHWM"``, the peak since a reset; 0 if it is unknown."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


@contextmanager
def freed_at_once(least_bytes: int) -> Iterator[bool]:
    """Context manager in which allocated blocks of at least `least_bytes` have their own memory mapping, unmapped when freed.

    Yields whether the C library supports it.
    """
    if not _set_options({_MMAP_THRESHOLD: least_bytes}):
        yield False
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    # Free space in the heap would be used first. So it is allocated; untouched, it takes no memory.
    taken = [libc.malloc(least_bytes)]
    while not end_of_own_mapping(taken[-1]) and len(taken) < _MOST_BLOCKS:
        taken.append(libc.malloc(least_bytes))
    try:
        yield end_of_own_mapping(taken[-1]) > 0  # False if another library replaces glibc's malloc
    finally:
        for block in taken:
            libc.free(block)
        _set_options({_MMAP_THRESHOLD: _DEFAULTS[_MMAP_THRESHOLD]})


@contextmanager
def giving_back_freed_memory() -> Iterator[None]:
    """Context manager in which freed memory is returned to the system; otherwise glibc caches up to 64 MB, depending on chance.

    Holes between blocks that exist on entry are returned on entry, but not after they are used again. At the end, glibc caches as
    much as after a process has freed a large block.
    """
    _set_options({option: _DEFAULTS[option] for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)})  # not adjusted by glibc any more
    try:
        yield
    finally:
        _set_options({_TRIM_THRESHOLD: 2 * _MOST_KEPT, _MMAP_THRESHOLD: _MOST_KEPT})


HEADER_BYTES = 16
"""Size of the header of an allocation of glibc."""


def end_of_own_mapping(address: int) -> int:
    """Returns the end of the separate mapping that glibc made for an allocation, from its header; 0 if there is none."""
    before, size = (ctypes.c_size_t * 2).from_address(address - HEADER_BYTES)
    begin, flags, size = address - HEADER_BYTES - before, size & 7, size & ~7
    page = mmap.PAGESIZE
    own = flags == 2 and begin % page == 0 and (before + size) % page == 0
    return address - HEADER_BYTES + size if own else 0
