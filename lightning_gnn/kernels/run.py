"""Execution of loops over the rows of a matrix: numba on the CPU, with torch's number of threads, else a device backend.

It also announces compilation by numba.
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
"""Number of multiplications below which another thread does not pay off."""

_PACKAGE = __name__.partition(".")[0]

Backend = Callable[[str, tuple[Any, ...]], None]
"""Function that runs the named loop over all rows, with its arguments except `low` and `high`; the matrix replaces `indptr`."""


def _on_gpu(name: str, arguments: tuple[Any, ...]) -> None:
    # Imported at first use: the import is slow, and useless on the CPU.
    loops = triton_loops()
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    assert all(tensor.is_contiguous() for tensor in tensors), f"{name} requires contiguous tensors"
    # Triton launches on the current device, which may differ from the device of the tensors.
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(loops, name)(*(value.detach() if isinstance(value, torch.Tensor) else value for value in arguments))


BACKENDS: dict[str, Backend] = {"cuda": _on_gpu} if find_spec("triton") else {}
"""Backend of loops by device type; the CPU needs none."""


_in_place_of: list[torch.device] = []
"""Devices whose code paths CPU tensors take now, see :func:`in_place_of`."""


def has_loops(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether :func:`run_over_rows` supports this device and floats of this dtype."""
    if device.type in BACKENDS:
        return dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    there = _in_place_of[-1].type if _in_place_of else "cpu"
    known = there == "cpu" or there in BACKENDS
    return device.type == "cpu" and known and dtype in (torch.float32, torch.float64)


@contextmanager
def in_place_of(device: torch.device) -> Iterator[None]:
    """Context manager that makes CPU tensors take the code paths of a device, so that a small step shows its memory use."""
    _in_place_of.append(device)
    try:
        yield
    finally:
        _in_place_of.pop()


def has_loops_for(x: torch.Tensor, edge_index: torch.Tensor, columns: int | None = None) -> bool:
    """Returns whether loops over edges support rows like `x` ``[n, F]``, on the CPU as float32 if necessary.

    Warns once on a device without loops: PyG's path then creates `columns` numbers, by default F, for each edge.
    """
    wide = x.dtype if x.device.type != "cpu" else torch.promote_types(x.dtype, torch.float32)
    if has_loops(x.device, wide):
        return True
    if x.device.type not in ("cpu", *BACKENDS):
        _warn_of_rows_per_edge(x.device.type, edge_index.size(1) * (columns or x.size(1)) * x.itemsize)
    return False


_warned: set[str] = set()
"""Device types for which :func:`has_loops_for` has warned."""


def _warn_of_rows_per_edge(device: str, num_bytes: int) -> None:
    if device in _warned:
        return
    _warned.add(device)
    more = "Install Triton: pip install lightning-gnn[cuda]." if device == "cuda" else "They exist for CPU and CUDA."
    rank_zero_warn(
        f"Found no kernels on {device} for attention, maxima and variances. Such layers create and keep several tensors of edges "
        f"times columns, each of {num_bytes / 1e6:,.1f} MB in the first layer. {more}"
    )


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def run_over_rows(loop: Any, csr: CSR, *arguments: Any, work: int) -> None:
    """Run ``loop(csr.indptr, *arguments, low, high)`` over all rows, or the corresponding loop of a backend.

    On the CPU, one thread computes a row, so results do not depend on the number of threads.

    Args:
        loop: loop from :mod:`lightning_gnn.kernels.loops`.
        csr: matrix whose rows are processed, on a device with loops, see :func:`has_loops`.
        arguments: tensors, passed as arrays to numba, and numbers.
        work: total number of multiplications.
    """
    backend = BACKENDS.get(csr.device.type)
    if backend is not None:
        backend(loop.py_func.__name__, (csr, *arguments))
        return
    if work >= _SMALL:
        run_over_ranges(loop, csr.indptr, *arguments, size=csr.num_rows, ranges=csr.chunks, work=work)
        return
    arrays: list[Any] = [csr.indptr.numpy()]
    for value in arguments:  # calls dominate the step of a small graph, and a comprehension is one
        arrays.append(value.detach().numpy() if isinstance(value, torch.Tensor) else value)
    loop(*arrays, 0, csr.num_rows)


def run_over_ranges(loop: Any, *arguments: Any, size: int, ranges: Callable[[int], Iterable[tuple[int, int]]], work: int) -> None:
    """Run ``loop(*arguments, low, high)`` over 0 to `size`; large work is split over threads by ``ranges(count)``."""
    arrays = [value.detach().numpy() if isinstance(value, torch.Tensor) else value for value in arguments]
    threads = min(torch.get_num_threads(), size)
    if threads <= 1 or work < _SMALL:
        loop(*arrays, 0, size)
        return
    pool = _pool(threads)
    # Several chunks per thread balance differences that edge counts do not show.
    chunks = [pool.submit(partial(loop, *arrays, low, high)) for low, high in ranges(4 * threads)]
    for chunk in chunks:
        chunk.result()


def run_over_range(loop: Any, num_rows: int, *arguments: Any, work: int) -> None:
    """Run ``loop(*arguments, low, high)`` over all of `num_rows` rows of equal cost; see :func:`run_over_rows`.

    The first argument is a tensor on the device whose backend has the loop.
    """
    backend = BACKENDS.get(arguments[0].device.type)
    if backend is not None:
        backend(loop.py_func.__name__, arguments)
        return

    def ranges(count: int) -> Iterable[tuple[int, int]]:
        return pairwise([num_rows * part // count for part in range(count + 1)])

    run_over_ranges(loop, *arguments, size=num_rows, ranges=ranges, work=work)


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)  # a forked process has its parent's pools without their threads
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="lightning_gnn")
    return _pools[key]


def timed_compilation(use: Callable[[], Any]) -> float:
    """Call `use`, which runs loops; returns its seconds if loops were compiled, 0 if all were cached on disk."""
    before, began = _num_compilations(), time.perf_counter()
    with _announcer.in_set_up():
        use()
    return time.perf_counter() - began if _num_compilations() > before else 0.0


def _num_compilations() -> int:
    return sum(sum(loop.stats.cache_misses.values()) for loop in LOOPS)


def cache_folder() -> Path:
    """Returns the cache folder of compiled loops, which exists after the first compilation."""
    return Path(str(LOOPS[0].stats.cache_path))


class _Announcer(event.Listener):
    """Listener that logs the compilation of a module's loops on rank 0 before the first loop: a first run stalls meanwhile.

    Numba reports each loop that it compiles, not loops from the disk cache.
    """

    def __init__(self) -> None:
        self._announced: set[str] = set()
        self._bars: list[ExitStack] = []
        self._in_set_up = False

    @contextmanager
    def in_set_up(self) -> Iterator[None]:
        """Context manager for the set-up of a run: compilation shows a progress bar, because Lightning shows none yet."""
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
            if not self._bars:  # else a loop that the displayed loop calls
                bar.enter_context(progress_bar(f"Compiling {module.rpartition('.')[2]}.{loop.py_func.__name__}, once"))
            self._bars.append(bar)
        if module in self._announced or module.partition(".")[0] != _PACKAGE:
            return
        self._announced.add(module)
        count = sum(isinstance(each, Dispatcher) for each in vars(sys.modules[module]).values())
        rank_zero_info(f"Compiling up to {count} kernels of {module} once, about 0.5 s each; cached in {loop.stats.cache_path}")

    @override
    def on_end(self, event: Any) -> None:
        ours = event.data["dispatcher"].py_func.__module__.partition(".")[0] == _PACKAGE
        if ours and self._bars and threading.current_thread() is threading.main_thread():
            self._bars.pop().close()


_announcer = _Announcer()
event.register("numba:compile", _announcer)
