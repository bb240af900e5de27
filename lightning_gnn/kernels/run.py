"""Runs compiled loops over the rows of a matrix, in as many threads as torch would use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.loops import LOOPS

_SMALL = 1 << 17
"""Below so many multiplications another thread costs more than it saves."""

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def over_rows(loop: Any, csr: CSR, *arguments: Any, work: int) -> None:
    """Runs ``loop(csr.indptr, *arguments, low, high)`` over all rows.

    A row is computed by one thread, so results do not depend on their number.

    Args:
        loop: one of :mod:`lightning_gnn.kernels.loops`.
        csr: the matrix whose rows are run over.
        arguments: tensors, handed over as arrays, and numbers.
        work: multiplications in all.
    """
    over_ranges(loop, csr.indptr, *arguments, size=csr.num_rows, ranges=csr.chunks, work=work)


def over_ranges(
    loop: Any, *arguments: Any, size: int, ranges: Callable[[int], Iterable[tuple[int, int]]], work: int
) -> None:
    """Runs ``loop(*arguments, low, high)`` over all of 0 to `size`, in `ranges` of about so many where threads pay."""
    arrays = [_array(value) if isinstance(value, torch.Tensor) else value for value in arguments]
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
    """Runs ``loop(*arguments, low, high)`` over all of `num_rows` rows that take equally long; see :func:`over_rows`."""
    over_ranges(loop, *arguments, size=num_rows, ranges=partial(_equal_ranges, num_rows), work=work)


def _equal_ranges(size: int, count: int) -> Iterable[tuple[int, int]]:
    return pairwise([size * part // count for part in range(count + 1)])


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)  # a forked process has its parent's pools without their threads
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="lightning_gnn")
    return _pools[key]


def timed_compilation(use: Callable[[], Any]) -> float:
    """Calls `use`, which runs loops; returns the seconds it took if some were compiled for it, 0 if they were kept on disk."""
    before, began = _compiled(), time.perf_counter()
    use()
    return time.perf_counter() - began if _compiled() > before else 0.0


def _compiled() -> int:
    return sum(sum(loop.stats.cache_misses.values()) for loop in LOOPS)


def cache_folder() -> Path:
    """Returns where compiled loops are kept; there once one was compiled."""
    return Path(str(LOOPS[0].stats.cache_path))
