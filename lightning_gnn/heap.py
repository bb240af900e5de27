"""Tensors of this process, and memory that glibc caches: kept during training on the CPU, returned during partitioning.

A full-graph step allocates and frees the same few large tensors each time. glibc returns each of them to the system and requests
new pages, which the system clears. On the benchmark machine this took as long as the products that fill the tensors.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

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


@contextmanager
def keeping_freed_memory() -> Iterator[bool]:
    """Context manager in which this process caches freed memory, and returns it at the end; yields whether glibc supports it."""
    found = _malloc()
    if found is None:
        yield False
        return
    set_option, trim = found
    set_option(_TRIM_THRESHOLD, _LARGEST)
    if not set_option(_MMAP_THRESHOLD, 1 << 30):  # older versions allow at most 32 MB
        set_option(_MMAP_MAX, 0)
    try:
        yield True
    finally:
        for option, value in _DEFAULTS.items():
            set_option(option, value)
        trim(0)


@contextmanager
def freed_at_once(least_bytes: int) -> Iterator[bool]:
    """Context manager in which allocated blocks of at least `least_bytes` have their own memory mapping, unmapped when freed.

    Yields whether the C library supports it.
    """
    found = _malloc()
    if found is None:
        yield False
        return
    set_option, trim = found
    set_option(_MMAP_THRESHOLD, least_bytes)
    trim(0)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    # Free space in the heap would be used first. So it is allocated; untouched, it takes no memory.
    taken = [libc.malloc(least_bytes)]
    while not end_of_own_mapping(taken[-1]) and len(taken) < _MOST_BLOCKS:
        taken.append(libc.malloc(least_bytes))
    try:
        yield end_of_own_mapping(taken[-1]) > 0  # False if another library replaces glibc's malloc
    finally:
        for block in taken:
            libc.free(block)
        set_option(_MMAP_THRESHOLD, _DEFAULTS[_MMAP_THRESHOLD])


@contextmanager
def giving_back_freed_memory() -> Iterator[None]:
    """Context manager in which freed memory is returned to the system; otherwise glibc caches up to 64 MB, depending on chance.

    Holes between blocks that exist on entry are returned on entry, but not after they are used again. At the end, glibc caches as
    much as after a process has freed a large block.
    """
    found = _malloc()
    if found is None:
        yield
        return
    set_option, trim = found
    trim(0)
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        set_option(option, _DEFAULTS[option])  # also disables glibc's dynamic adjustment
    try:
        yield
    finally:
        set_option(_TRIM_THRESHOLD, 2 * _MOST_KEPT)
        set_option(_MMAP_THRESHOLD, _MOST_KEPT)


HEADER_BYTES = 16
"""Size of the header of an allocation of glibc."""


def end_of_own_mapping(address: int) -> int:
    """Returns the end of the separate mapping that glibc made for an allocation, from its header; 0 if there is none."""
    before, size = (ctypes.c_size_t * 2).from_address(address - HEADER_BYTES)
    begin, flags, size = address - HEADER_BYTES - before, size & 7, size & ~7
    page = mmap.PAGESIZE
    own = flags == 2 and begin % page == 0 and (before + size) % page == 0
    return address - HEADER_BYTES + size if own else 0


def _malloc() -> tuple[Callable[[int, int], int], Callable[[int], int]] | None:
    """Returns glibc's mallopt and malloc_trim; None with another C library."""
    try:
        libc = ctypes.CDLL(None)
        return libc.mallopt, libc.malloc_trim
    except (AttributeError, OSError):
        return None
