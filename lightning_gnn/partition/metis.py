"""METIS k-way through the library inside the pymetis wheel, with one or several balance constraints."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pymetis
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csr_matrix

_OPTIONS, _CUTS, _SEED, _NUMBERING = 40, 7, 8, 17  # METIS_NOPTIONS, the indices of three options (metis.h, 5.1)
_BYTES_PER_EDGE = 140  # METIS's working memory per directed edge, measured 95 to 140

FEW_PARTS = 8
"""Up to so many, METIS's recursive bisection keeps to several bounds that its k-way cuts overstep (docs/numbers.md)."""


class MetisUnavailable(RuntimeError):
    """The library cannot be called with several constraints; says why."""


@dataclass(frozen=True)
class Adjacency:
    """A symmetric graph without self-loops and duplicates, in METIS's form.

    Attributes:
        indptr, indices: of the dtype that METIS was built with, ``[N + 1]`` and ``[E]``.
    """

    indptr: NDArray[np.integer]
    indices: NDArray[np.integer]

    @classmethod
    def of(cls, edge_index: NDArray[np.int64], num_nodes: int) -> Adjacency:
        """Returns the graph of directed edges ``[2, E]`` with both directions of each."""
        _check_memory(edge_index.shape[1])
        source, target = edge_index
        keep = source != target
        ones = np.ones(int(keep.sum()), np.int8)
        matrix = coo_matrix((ones, (source[keep], target[keep])), (num_nodes, num_nodes)).tocsr()
        matrix = (matrix + matrix.T).tocsr()
        dtype = pymetis.zero_copy_dtype() if hasattr(pymetis, "zero_copy_dtype") else np.int32
        return cls(matrix.indptr.astype(dtype), matrix.indices.astype(dtype))

    def among(self, nodes: NDArray[np.integer]) -> Adjacency:
        """Returns the graph among some nodes, by their positions in `nodes`."""
        ones = np.ones(len(self.indices), np.int8)
        matrix = csr_matrix((ones, self.indices, self.indptr), (self.num_nodes, self.num_nodes))[nodes][:, nodes]
        return Adjacency(matrix.indptr.astype(self.indptr.dtype), matrix.indices.astype(self.indices.dtype))

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1


def _check_memory(num_edges: int) -> None:
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return  # unknown on this system
    needed = num_edges * _BYTES_PER_EDGE
    if needed > available:
        raise MemoryError(
            f"METIS needs about {needed / 1e9:.0f} GB for {num_edges:,} edges, and {available / 1e9:.0f} GB are free. "
            'Use partition="random", or partition elsewhere and pass the rank of every node, partition=array.'
        )


def part_graph(
    graph: Adjacency, num_parts: int, seed: int, weights: NDArray[np.integer] | None = None
) -> NDArray[np.int32]:
    """Returns the part of each node, int32 ``[N]``, with balanced nodes or, if given, balanced node weights ``[N]``."""
    if weights is not None and len(weights) != graph.num_nodes:
        raise ValueError(f"{len(weights)} weights for {graph.num_nodes} nodes.")  # METIS would misread them silently
    _, part = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(graph.indptr, graph.indices),
        vweights=weights,
        recursive=False,
        options=pymetis.Options(seed=seed),
    )
    return np.asarray(part, dtype=np.int32)


def part_graph_constrained(
    graph: Adjacency,
    num_parts: int,
    seed: int,
    weights: NDArray[np.integer],
    bounds: NDArray[np.float32],
    halve: bool = False,
) -> NDArray[np.int32]:
    """Returns the part of each node, int32 ``[N]``, with several weights balanced at once.

    Args:
        weights: ``[N, constraints]``.
        bounds: allowed heaviest part over average of each constraint, such as 1.05, ``[constraints]``.
        halve: by bisection, the best of four each, instead of k-way; takes about three times as long.

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
    indptr, indices = graph.indptr.astype(dtype), graph.indices.astype(dtype)
    flat = np.ascontiguousarray(weights, dtype)
    allowed = np.zeros(2 * len(bounds), np.float32)  # room for 8-byte reals
    allowed[: len(bounds)] = bounds

    arguments = (count, constraints, indptr, indices, flat, None, None, parts, None, allowed, options, cut, part)
    code = (bisection if halve else k_way)(*(_pointer(argument) for argument in arguments))
    if code != 1:
        raise MetisUnavailable(f"METIS returned {code}")
    return part.astype(np.int32)


@cache
def _library() -> tuple[Any, Any, Any]:
    """Returns METIS_PartGraphKway, METIS_PartGraphRecursive and their index dtype, found by a graph of four nodes."""
    try:
        library = ctypes.CDLL(pymetis._internal.__file__)
        function, bisection = library.METIS_PartGraphKway, library.METIS_PartGraphRecursive
    except (AttributeError, OSError) as error:
        raise MetisUnavailable(f"pymetis does not export METIS's functions ({error})") from error
    function.restype = bisection.restype = ctypes.c_int
    # A wrong width reads zeros between the numbers, or beyond them: hence the graph whose answer is known.
    dtype = np.dtype(pymetis.zero_copy_dtype()).type if hasattr(pymetis, "zero_copy_dtype") else np.int32

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
