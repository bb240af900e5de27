"""What a CPU rank frees stays with its process while it trains.

A full-graph step allocates and frees the same few large tensors each time. glibc gives each of them back to the system and
asks for new pages, which the system clears: on the benchmark machine that took as long as the products that fill them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Parameters of glibc's mallopt, see `man mallopt`, and their defaults.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}
_LARGEST = 2**31 - 1


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
    set_option, _ = found
    set_option(_MMAP_THRESHOLD, least_bytes)
    try:
        yield True
    finally:
        set_option(_MMAP_THRESHOLD, _DEFAULTS[_MMAP_THRESHOLD])


def _malloc() -> tuple[Callable[[int, int], int], Callable[[int], int]] | None:
    """Returns glibc's mallopt and malloc_trim; None with another C library."""
    try:
        libc = ctypes.CDLL(None)
        return libc.mallopt, libc.malloc_trim
    except (AttributeError, OSError):
        return None
