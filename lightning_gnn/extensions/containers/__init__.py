"""Containers with limits: a small ``/dev/shm``, and no folder that numba can write to."""

from __future__ import annotations

import io
import os
from functools import cache
from multiprocessing import reduction
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import Any

import numba
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.multiprocessing import reductions


@cache
def _warn_of_copies() -> None:
    """Warn, once per process, that tensors are copied because ``/dev/shm`` is full."""
    rank_zero_warn(
        "/dev/shm has no space for the tensors that ranks receive. They are copied to other memory and take twice their size. "
        "Enlarge /dev/shm, for example by docker run --shm-size, or use a strategy without _spawn in a script."
    )


class MemfdPickler:
    """Pickler that sends objects to running processes, with CPU tensors in anonymous memory, as ``/dev/shm`` is too small.

    The copies are shared by all processes that receive them.

    Args:
        error: error of torch when it shared a tensor; raised again unless it is about shared memory.
    """

    def __init__(self, error: RuntimeError) -> None:
        if "shared memory" not in str(error):
            raise error
        _warn_of_copies()
        self._copies: dict[int, int] = {}  # descriptors by address

    def dumps(self, value: Any) -> Any:
        """Returns the pickled bytes of a value."""
        pickler = reduction.ForkingPickler(file := io.BytesIO())
        known: Any = pickler
        known.dispatch_table = {**known.dispatch_table, torch.UntypedStorage: self._reduce}
        pickler.dump(value)
        return file.getbuffer()

    def _reduce(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or not storage.nbytes():
            return reductions.reduce_storage(storage)
        address = storage.data_ptr()
        if address not in self._copies:
            self._copies[address] = os.memfd_create("lightning_gnn")
            content: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            with open(self._copies[address], "wb", closefd=False) as file:
                file.write(content)
        shared = reduction.DupFd(self._copies[address])
        return reductions.rebuild_storage_fd, (type(storage), shared, storage.nbytes())

    def __del__(self) -> None:
        for descriptor in self._copies.values():
            os.close(descriptor)


def ensure_kernel_cache() -> None:
    """Let numba cache kernels in the temporary folder if it can write neither in the package nor in the home folder."""
    settings: Any = numba.config
    if settings.DISABLE_JIT:
        return
    try:
        folder = numba.njit(cache=True)(ensure_kernel_cache).stats.cache_path or ""
    except RuntimeError:  # otherwise every kernel would raise it
        folder = "~"
    if not folder.startswith("~"):  # without a home folder, numba makes a folder with this name
        return
    place = Path(gettempdir()) / f"lightning_gnn-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.lstat().st_uid != os.getuid():  # kernels of another user must not be loaded
        place = Path(mkdtemp(prefix=place.name))
    settings.CACHE_DIR = str(place)
    rank_zero_info(
        f"Compiled kernels are cached in {place}, since neither package nor home folder can be written. "
        "Set NUMBA_CACHE_DIR to a folder that lasts."
    )
