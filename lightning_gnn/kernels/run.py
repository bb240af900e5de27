"""Runs compiled loops over the rows of a matrix: numba's on the CPU, in as many threads as torch would use, else a backend's.

Says when numba's are compiled.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from numba.core import event
from numba.core.dispatcher import Dispatcher
from typing_extensions import override

from lightning_gnn.console import is_live, progress_bar, shows_bars
from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.loops import LOOPS
from lightning_gnn.registry import triton_loops

_SMALL = 1 << 17
"""Below so many multiplications another thread costs more than it saves."""

_PACKAGE = __name__.partition(".")[0]

Backend = Callable[[str, tuple[Any, ...]], None]
"""Runs the loop of this name over all rows, with what it takes but `low` and `high`; a matrix is there for its `indptr`."""


def _on_gpu(name: str, arguments: tuple[Any, ...]) -> None:
    # Imported at first use: it takes a while, and is of no use on the CPU.
    loops = triton_loops()
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    assert all(tensor.is_contiguous() for tensor in tensors), f"{name} wants contiguous tensors"
    # Triton launches on the current device, which need not be that of the tensors.
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(loops, name)(*(value.detach() if isinstance(value, torch.Tensor) else value for value in arguments))


BACKENDS: dict[str, Backend] = {"cuda": _on_gpu} if find_spec("triton") else {}
"""By type of device, what runs loops there; the CPU needs none."""


_in_place_of: list[torch.device] = []
"""The device whose ways tensors of the CPU go now, see :func:`in_place_of`."""


def has_loops(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether :func:`over_rows` runs there on, and writes, floats of this dtype."""
    if device.type in BACKENDS:
        return dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    there = _in_place_of[-1].type if _in_place_of else "cpu"
    known = there == "cpu" or there in BACKENDS
    return device.type == "cpu" and known and dtype in (torch.float32, torch.float64)


@contextmanager
def in_place_of(device: torch.device) -> Iterator[None]:
    """While open, tensors of the CPU take the ways that a device's would, so that a step on few nodes tells what one keeps."""
    _in_place_of.append(device)
    try:
        yield
    finally:
        _in_place_of.pop()


def has_loops_for(x: torch.Tensor, num_edges: int, columns: int | None = None) -> bool:
    """Returns whether loops over edges take rows like `x` ``[n, F]``, on the CPU as float32 where need be.

    Warns once on a device without loops: PyG's path, which is taken then, makes `columns` numbers, by default F, for each edge.
    """
    wide = x.dtype if x.device.type != "cpu" else torch.promote_types(x.dtype, torch.float32)
    if has_loops(x.device, wide):
        return True
    if x.device.type not in ("cpu", *BACKENDS):
        _warn_of_rows_per_edge(x.device.type, num_edges * (columns or x.size(1)) * x.itemsize)
    return False


_warned: set[str] = set()
"""Types of devices that :func:`has_loops_for` has warned of."""


def _warn_of_rows_per_edge(device: str, num_bytes: int) -> None:
    if device in _warned:
        return
    _warned.add(device)
    more = "Triton brings them: pip install lightning-gnn[cuda]." if device == "cuda" else "There are some for CPU and CUDA."
    rank_zero_warn(
        f"There are no kernels on {device} here for attention, maxima and variances: such layers make rows of edges times "
        f"columns, each of {num_bytes / 1e6:,.1f} MB in the first one, and keep several. {more}"
    )


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def over_rows(loop: Any, csr: CSR, *arguments: Any, work: int) -> None:
    """Runs ``loop(csr.indptr, *arguments, low, high)`` over all rows, or what a backend has in its place.

    On the CPU a row is computed by one thread, so results do not depend on their number.

    Args:
        loop: one of :mod:`lightning_gnn.kernels.loops`.
        csr: the matrix whose rows are run over, on a device with loops, see :func:`has_loops`.
        arguments: tensors, handed over as arrays to numba, and numbers.
        work: multiplications in all.
    """
    backend = BACKENDS.get(csr.device.type)
    if backend is not None:
        backend(loop.py_func.__name__, (csr, *arguments))
        return
    if work < _SMALL:  # most of what a small graph's step takes is calls
        loop(*_arrays(csr.indptr, *arguments), 0, csr.num_rows)
        return
    over_ranges(loop, csr.indptr, *arguments, size=csr.num_rows, ranges=csr.chunks, work=work)


def _arrays(*arguments: Any) -> list[Any]:
    """Returns tensors as arrays, and numbers. Of bfloat16 there are no arrays: it is refused here, not read as something else."""
    found = []
    for value in arguments:
        found.append(value.detach().numpy() if isinstance(value, torch.Tensor) else value)
    return found


def over_ranges(loop: Any, *arguments: Any, size: int, ranges: Callable[[int], Iterable[tuple[int, int]]], work: int) -> None:
    """Runs ``loop(*arguments, low, high)`` over all of 0 to `size`, in `ranges` of about so many where threads pay."""
    arrays = _arrays(*arguments)
    threads = min(torch.get_num_threads(), size)
    if threads <= 1 or work < _SMALL:
        loop(*arrays, 0, size)
        return
    pool = _pool(threads)
    # Several chunks a thread even out what their numbers of edges do not tell.
    chunks = [pool.submit(partial(loop, *arrays, low, high)) for low, high in ranges(4 * threads)]
    for chunk in chunks:
        chunk.result()


def over_range(loop: Any, num_rows: int, *arguments: Any, work: int) -> None:
    """Runs ``loop(*arguments, low, high)`` over all of `num_rows` rows that take equally long; see :func:`over_rows`.

    The first of the arguments is a tensor on the device whose backend has the loop.
    """
    backend = BACKENDS.get(arguments[0].device.type)
    if backend is not None:
        backend(loop.py_func.__name__, arguments)
        return

    def ranges(count: int) -> Iterable[tuple[int, int]]:
        return pairwise([num_rows * part // count for part in range(count + 1)])

    over_ranges(loop, *arguments, size=num_rows, ranges=ranges, work=work)


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)  # a forked process has its parent's pools without their threads
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="lightning_gnn")
    return _pools[key]


def timed_compilation(use: Callable[[], Any]) -> float:
    """Calls `use`, which runs loops; returns the seconds it took if some were compiled for it, 0 if they were kept on disk."""
    before, began = _compiled(), time.perf_counter()
    with _announcer.in_set_up():
        use()
    return time.perf_counter() - began if _compiled() > before else 0.0


def _compiled() -> int:
    return sum(sum(loop.stats.cache_misses.values()) for loop in LOOPS)


def cache_folder() -> Path:
    """Returns where compiled loops are kept; there once one was compiled."""
    return Path(str(LOOPS[0].stats.cache_path))


class _Announcer(event.Listener):
    """Says on rank 0 that a module's loops are compiled before the first one is: a first run stands still meanwhile.

    It hears of each loop that numba compiles; of those that it finds on disk, it does not.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._bars: list[ExitStack] = []
        self._in_set_up = False

    @contextmanager
    def in_set_up(self) -> Iterator[None]:
        """While it is open, nothing of Lightning's is on the terminal, and compiling shows a bar even if it is the only one."""
        self._in_set_up = True
        try:
            yield
        finally:
            self._in_set_up = False

    @override
    def on_start(self, event: Any) -> None:
        loop = event.data["dispatcher"]
        module = loop.py_func.__module__
        if module.partition(".")[0] == _PACKAGE and (is_live() or (self._in_set_up and shows_bars())):
            bar = ExitStack()
            if not self._bars:  # else a loop that the one which is shown calls
                bar.enter_context(progress_bar(f"Compiling {module.rpartition('.')[2]}.{loop.py_func.__name__}, once"))
            self._bars.append(bar)
        if module in self._told or module.partition(".")[0] != _PACKAGE:
            return
        self._told.add(module)
        count = sum(isinstance(each, Dispatcher) for each in vars(sys.modules[module]).values())
        rank_zero_info(f"Compiling up to {count} kernels of {module} once, about 0.5 s each; cached in {loop.stats.cache_path}")

    @override
    def on_end(self, event: Any) -> None:
        ours = event.data["dispatcher"].py_func.__module__.partition(".")[0] == _PACKAGE
        if ours and self._bars and threading.current_thread() is threading.main_thread():
            self._bars.pop().close()


_announcer = _Announcer()
event.register("numba:compile", _announcer)
