"""METIS k-way partitioning by the library in the pymetis wheel, with one or several balance constraints."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pymetis
from numpy.typing import NDArray

from lightning_gnn.partition.adjacency import Adjacency

_OPTIONS, _CUTS, _SEED, _NUMBERING = 40, 7, 8, 17  # METIS_NOPTIONS, the indices of three options (metis.h, 5.1)

FEW_PARTS = 8
"""Parts up to which METIS's recursive bisection satisfies several bounds that its k-way cuts exceed (measured)."""


DEFAULT_BOUND = 1.03
"""METIS's default imbalance of one weight in k-way cuts."""


class MetisUnavailable(RuntimeError):
    """Error if the library cannot be called with several constraints; gives the reason."""


def part_graph(graph: Adjacency, num_parts: int, seed: int, weights: NDArray[np.integer] | None = None) -> NDArray[np.int32]:
    """Returns the part of each node, int32 ``[N]``, with balanced nodes or, if given, balanced node weights ``[N]``."""
    if weights is not None and len(weights) != graph.num_nodes:
        raise ValueError(f"{len(weights)} weights for {graph.num_nodes} nodes.")  # METIS would misread them silently
    if num_parts > 1 and graph.num_nodes:
        with suppress(MetisUnavailable):
            # Like pymetis, which holds Python's lock while METIS runs: no progress bar would move.
            ones = np.ones((graph.num_nodes, 1), np.int64) if weights is None else weights.reshape(-1, 1)
            return part_graph_constrained(graph, num_parts, seed, ones, np.array([DEFAULT_BOUND], np.float32))
    dtype = _index_dtype()
    _, part = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(graph.indptr.astype(dtype, copy=False), graph.indices.astype(dtype, copy=False)),
        vweights=weights,
        eweights=graph.weights,
        recursive=False,
        options=pymetis.Options(seed=seed),
    )
    return np.asarray(part, dtype=np.int32)


def part_graph_constrained(
    graph: Adjacency, num_parts: int, seed: int, weights: NDArray[np.integer], bounds: NDArray[np.float32], halve: bool = False
) -> NDArray[np.int32]:
    """Returns the part of each node, int32 ``[N]``, with several weights balanced at once.

    Args:
        graph: graph to partition.
        num_parts: number of parts.
        seed: random seed.
        weights: node weights, ``[N, constraints]``.
        bounds: allowed ratio of the heaviest part to the average for each constraint, such as 1.05, ``[constraints]``.
        halve: whether to use bisection, the best of four each, instead of k-way; takes about three times as long.

    Raises:
        MetisUnavailable: this build of METIS cannot be called directly.
    """
    k_way, bisection, dtype = _library()
    count = np.array([graph.num_nodes], dtype)
    constraints = np.array([weights.shape[1]], dtype)
    parts = np.array([num_parts], dtype)
    options = np.full(_OPTIONS, -1, dtype)
    options[_SEED], options[_NUMBERING], options[_CUTS] = seed, 0, 4 if halve else 1
    cut, part = np.zeros(1, dtype), np.zeros(graph.num_nodes, dtype)
    indptr, indices = (each.astype(dtype, copy=False) for each in (graph.indptr, graph.indices))
    edge_weights = None if graph.weights is None else graph.weights.astype(dtype, copy=False)
    flat = np.ascontiguousarray(weights, dtype)
    allowed = np.zeros(2 * len(bounds), np.float32)  # room for 8-byte reals
    allowed[: len(bounds)] = bounds

    arguments = (count, constraints, indptr, indices, flat, None, edge_weights, parts, None, allowed, options, cut, part)
    code = (bisection if halve else k_way)(*(_pointer(argument) for argument in arguments))
    if code != 1:
        raise MetisUnavailable(f"METIS returned {code}")
    return part.astype(np.int32)


def _index_dtype() -> Any:
    return np.dtype(pymetis.zero_copy_dtype()).type if hasattr(pymetis, "zero_copy_dtype") else np.int32


@cache
def _library() -> tuple[Any, Any, Any]:
    """Returns METIS_PartGraphKway, METIS_PartGraphRecursive and their index dtype, verified with a graph of four nodes."""
    try:
        library = ctypes.CDLL(pymetis._internal.__file__)
        function, bisection = library.METIS_PartGraphKway, library.METIS_PartGraphRecursive
    except (AttributeError, OSError) as error:
        raise MetisUnavailable(f"pymetis does not export METIS's functions ({error})") from error
    function.restype = bisection.restype = ctypes.c_int
    # A wrong width reads zeros between or beyond the numbers, so a graph with a known result reveals it.
    dtype = _index_dtype()

    def array(*values: int) -> NDArray[Any]:
        return np.array([*values, *[0] * 8], dtype)

    size, constraints, indptr, indices, parts = array(4), array(1), array(0, 1, 2, 3, 4), array(1, 0, 3, 2), array(2)
    cut, part = array(-1), array(-1, -1, -1, -1)
    order = (size, constraints, indptr, indices, None, None, None, parts, None, None, None, cut, part)
    code = function(*(_pointer(argument) for argument in order))
    if code != 1 or cut[0] != 0 or sorted(part[:4].tolist()) != [0, 0, 1, 1]:
        raise MetisUnavailable(f"METIS_PartGraphKway does not take indices of type {dtype.__name__}")
    return function, bisection, dtype


def _pointer(array: NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)
