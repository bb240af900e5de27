"""Symmetric graph for node partitioners."""

# mypy: disable-error-code="call-arg"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from lightning_gnn.kernels.loops import compile_loop, prefetch

AHEAD = 16
"""Prefetch distance in neighbors or edges: node data of large graphs is in no cache."""

COPIED = 1 << 18
"""Number of edges that are copied to int64 at once."""


@compile_loop
def mix(value):  # type: ignore[no-untyped-def]
    """Returns a hash that orders ties: splitmix64's last steps."""
    mixed = np.uint64(value) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@compile_loop
def ask_for_ends(values, source, target, edge):  # type: ignore[no-untyped-def]
    """Prefetch the values of both ends of a later edge."""
    later = min(edge + AHEAD, len(source) - 1)
    prefetch(values, source[later])
    prefetch(values, target[later])


@compile_loop
def ask_for_clusters(values, extra_values, of, source, target, edge):  # type: ignore[no-untyped-def]
    """Prefetch the clusters of both ends of a distant later edge, and two values of each cluster of a nearer edge."""
    later, farther = min(edge + AHEAD, len(source) - 1), min(edge + 2 * AHEAD, len(source) - 1)
    prefetch(of, source[farther])  # not ask_for_ends: numba counts references of arrays passed on twice, 100 ns per edge
    prefetch(of, target[farther])
    one, other = of[source[later]], of[target[later]]
    prefetch(values, one)
    prefetch(values, other)
    prefetch(extra_values, one)
    prefetch(extra_values, other)


def edge_pieces(edge_index: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Splits edges ``[2, E]``: yields the index of each piece's first edge, and its sources and targets, int64 ``[n]``.

    The edges may be memory-mapped. Pieces are views if the edges are int64, and copies otherwise.
    """
    for begin in range(0, edge_index.shape[1], COPIED):
        source, target = (np.ascontiguousarray(ends[begin : begin + COPIED], np.int64) for ends in edge_index)
        yield begin, source, target


@dataclass(frozen=True)
class Adjacency:
    """Symmetric graph without self-loops and duplicates.

    Attributes:
        indptr: first entry of each node and the end, int64 ``[N + 1]``.
        indices: neighbors, int32 ``[E]``, each edge in both directions.
        weights: edge weights, int32 ``[E]``; None for equal weights.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    weights: NDArray[np.int32] | None = None

    @classmethod
    def of(cls, edge_index: NDArray[np.integer], num_nodes: int) -> Adjacency:
        """Returns the graph of directed edges ``[2, E]`` with both directions of each; takes 8 bytes per directed edge."""
        source, target = (np.ascontiguousarray(ends) for ends in edge_index)
        indptr = np.zeros(num_nodes + 1, np.int64)
        _count(source, target, indptr)
        np.cumsum(indptr, out=indptr)
        indices = np.empty(indptr[-1], np.int32)
        _fill(source, target, indptr[:-1].copy(), indices)
        indices.resize(_deduplicate(indptr, indices), refcheck=False)  # in place: a copy would be the memory peak
        return cls(indptr, indices)

    def among(self, nodes: NDArray[np.integer]) -> Adjacency:
        """Returns the induced subgraph of nodes, with their positions in `nodes` as ids."""
        weights = np.ones(len(self.indices), np.int8) if self.weights is None else self.weights
        matrix = csr_matrix((weights, self.indices, self.indptr), (self.num_nodes, self.num_nodes))[nodes][:, nodes]
        kept = None if self.weights is None else matrix.data
        return Adjacency(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), kept)

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1


@compile_loop
def _count(source, target, indptr):  # type: ignore[no-untyped-def]
    for edge in range(len(source)):
        ask_for_ends(indptr, source, target, edge)
        if source[edge] != target[edge]:
            indptr[source[edge] + 1] += 1
            indptr[target[edge] + 1] += 1


@compile_loop
def _fill(source, target, free, indices):  # type: ignore[no-untyped-def]
    for edge in range(len(source)):
        ask_for_ends(free, source, target, edge)
        one, other = source[edge], target[edge]
        if one != other:
            indices[free[one]], indices[free[other]] = other, one
            free[one] += 1
            free[other] += 1


@compile_loop
def _deduplicate(indptr, indices):  # type: ignore[no-untyped-def]
    """Sort each row and move distinct entries to the front, in place; returns the number of remaining entries."""
    kept = begin = 0
    for node in range(len(indptr) - 1):
        end, last = indptr[node + 1], -1
        row = indices[begin:end]
        row.sort()
        for place in range(begin, end):
            if indices[place] != last:
                last = indices[place]
                indices[kept] = last
                kept += 1
        begin, indptr[node + 1] = end, kept
    return kept
