"""Whether what is freed stays with this process: while a CPU rank trains it does, while a graph is partitioned it does not.

A full-graph step allocates and frees the same few large tensors each time. glibc gives each of them back to the system and
asks for new pages, which the system clears: on the benchmark machine that took as long as the products that fill them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Parameters of glibc's mallopt, see `man mallopt`, and their defaults.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}
_MOST_KEPT = 32 * 1024 * 1024
"""glibc raises the size of blocks with a mapping of their own up to this by itself, and keeps twice as much (64-bit systems)."""
_LARGEST = 2**31 - 1
_MOST_BLOCKS = 1 << 16


@contextmanager
def keeping_freed_memory() -> Iterator[bool]:
    """Lets this process keep what it frees; on leaving, gives it back. Yields whether that is possible: with glibc it is."""
    found = _malloc()
    if found is None:
        yield False
        return
    set_option, trim = found
    set_option(_TRIM_THRESHOLD, _LARGEST)
    if not set_option(_MMAP_THRESHOLD, 1 << 30):  # older ones allow at most 32 MB
        set_option(_MMAP_MAX, 0)
    try:
        yield True
    finally:
        for option, value in _DEFAULTS.items():
            set_option(option, value)
        trim(0)


@contextmanager
def freed_at_once(least_bytes: int) -> Iterator[bool]:
    """Has each block of so many bytes in a mapping of its own, given back when it is freed. Yields whether that is so."""
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
    # Room in the heap, of what was freed before, would be used first. So it is taken; with nothing in it, it is no memory.
    taken = [libc.malloc(least_bytes)]
    while not end_of_own_mapping(taken[-1]) and len(taken) < _MOST_BLOCKS:
        taken.append(libc.malloc(least_bytes))
    try:
        yield end_of_own_mapping(taken[-1]) > 0  # else another library's malloc is in place of glibc's
    finally:
        for block in taken:
            libc.free(block)
        set_option(_MMAP_THRESHOLD, _DEFAULTS[_MMAP_THRESHOLD])


@contextmanager
def giving_back_freed_memory() -> Iterator[None]:
    """Gives what is freed back to the system, of which glibc would keep up to 64 MB, more or less by chance. Holes between
    blocks that were in use before are given back on entering, and stay once something was in them again.

    On leaving, glibc keeps as much as it does once a process has freed a large block.
    """
    found = _malloc()
    if found is None:
        yield
        return
    set_option, trim = found
    trim(0)
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        set_option(option, _DEFAULTS[option])  # also has glibc not raise them by itself
    try:
        yield
    finally:
        set_option(_TRIM_THRESHOLD, 2 * _MOST_KEPT)
        set_option(_MMAP_THRESHOLD, _MOST_KEPT)


HEADER_BYTES = 16
"""In front of what glibc allocates."""


def end_of_own_mapping(address: int) -> int:
    """Returns where the mapping ends that glibc has made for what it has allocated at an address, as its header says; 0 if that
    has no mapping of its own."""
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
