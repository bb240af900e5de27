"""The in-edges of every node, sorted on disk: memory in proportion to the nodes, and as much more as is allowed.

A distribution sort (Knuth, The Art of Computer Programming 3, section 5.2.5) in two passes over a list of edges: the first counts
those of each target; the second puts them where they belong, in ranges of targets that fit into memory, one after the other.
N nodes, E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn.extensions.graph_files.streaming import mix
from lightning_gnn.partition.adjacency import compiled
from lightning_gnn.partition.shard import Ids, ShortIds, id_dtype

PIECE = 1 << 22
"""Edges that are read at once."""

COPIED = 1 << 18
"""Edges of which there are copies as int64 at once."""


@dataclass(frozen=True)
class InEdges:
    """The in-edges of every node, in the order of targets; those of one target in the order of the list.

    Attributes:
        indptr: where those of each target begin, and the end, int64 ``[N + 1]``.
        source: ``[E]``, of :func:`~lightning_gnn.partition.shard.id_dtype`.
        edge_ids: position of each edge in the list, ``[E]``, of the shortest dtype.
    """

    indptr: Ids
    source: ShortIds
    edge_ids: ShortIds

    @classmethod
    def sorted_in(
        cls,
        folder: Path,
        edge_index: ShortIds,
        num_nodes: int,
        memory: int,
        told: Callable[[int], None] = lambda _: None,
    ) -> InEdges:
        """Returns the in-edges of a list ``[2, E]``, which may be memory-mapped, in files of `folder`; found there if whole.

        Args:
            folder: exists.
            memory: bytes that may be used beside 16 for each node.
            told: is told of edges read or written, 3 E in all at least, for a progress bar.
        """
        names = [folder / f"{name}.npy" for name in ("indptr", "source", "edge_ids")]
        if not (folder / "sorted").exists():
            _sort(names, folder, edge_index, num_nodes, memory, told)
            (folder / "sorted").touch()
        indptr, source, edge_ids = (np.load(name, mmap_mode="r") for name in names)
        return cls(np.asarray(indptr[:]), source, edge_ids)

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1


def _sort(
    names: list[Path], folder: Path, edge_index: ShortIds, num_nodes: int, memory: int, told: Callable[[int], None]
) -> None:
    num_edges = edge_index.shape[1]
    indptr = np.concatenate([[0], np.cumsum(in_degrees(edge_index, num_nodes, told))])
    np.save(names[0], indptr)
    dtypes = id_dtype(num_nodes), id_dtype(num_edges)
    ranges = _ranges(indptr, max(1, memory // sum(dtype.itemsize for dtype in dtypes)))
    with ExitStack() as stack:
        stored = stack.enter_context(_Ranges(folder, ranges, edge_index, dtypes, told))
        files = [stack.enter_context(name.open("wb")) for name in names[1:]]
        for file, dtype in zip(files, dtypes):
            write_header(file, (num_edges,), dtype)
        for low, high, pieces in stored:
            begin, end = int(indptr[low]), int(indptr[high])
            columns = np.empty(end - begin, dtypes[0]), np.empty(end - begin, dtypes[1])
            free = indptr[low:high] - begin
            for source, target, first in pieces:
                _place(source, target, low, high, first, free, *columns)
                told(len(source))
            for file, column in zip(files, columns):
                column.tofile(file)
            del columns  # before those of the next range are there


def in_degrees(edge_index: ShortIds, num_nodes: int, told: Callable[[int], None] = lambda _: None) -> Ids:
    """Returns the number of in-edges of each node, int64 ``[N]``, of a list ``[2, E]`` that may be memory-mapped."""
    return counts_of(edge_index[1], num_nodes, 0, told)


def counts_of(ids: ShortIds, size: int, first: int = 0, told: Callable[[int], None] = lambda _: None) -> Ids:
    """Returns how often each number from `first` on is there, int64 ``[size]``; makes nothing of the size of `ids`."""
    counts = np.zeros(size, np.int64)
    for begin in range(0, len(ids), PIECE):
        piece = ids[begin : begin + PIECE]
        _count(piece, first, counts)
        told(len(piece))
    return counts


def edge_pieces(edge_index: ShortIds) -> Iterator[tuple[int, Ids, Ids]]:
    """Yields the number of the first edge, and sources and targets, int64 ``[n]``, of a list ``[2, E]`` that may be
    memory-mapped: views where it has this type, else copies."""
    for begin in range(0, edge_index.shape[1], COPIED):
        source, target = (np.ascontiguousarray(ends[begin : begin + COPIED], np.int64) for ends in edge_index)
        yield begin, source, target


def is_symmetric(edge_index: ShortIds) -> bool:
    """Returns whether each edge has its opposite in a list ``[2, E]``, as often as it is there itself.

    By sums of hashes: wrong for one of 2^64 lists without opposites.
    """
    total = np.zeros(1, np.uint64)
    for begin in range(0, edge_index.shape[1], PIECE):
        _add_hashes(*edge_index[:, begin : begin + PIECE], total)
    return not total[0]


def write_header(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Begins a ``.npy`` file."""
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


def _pieces(edge_index: ShortIds) -> Iterator[tuple[ShortIds, ShortIds, Any]]:
    """Yields sources and targets ``[n]``, and the number of the first edge."""
    for begin in range(0, edge_index.shape[1], PIECE):
        source, target = edge_index[:, begin : begin + PIECE]
        yield source, target, np.arange(begin, begin + len(source))


def _ranges(indptr: Ids, most: int) -> Ids:
    """Returns where ranges of targets begin, and N: as few as have `most` in-edges each, about as many, but for one node's."""
    count = max(1, -(-int(indptr[-1]) // most))
    bounds = np.searchsorted(indptr, np.linspace(0, indptr[-1], count + 1)[1:-1])
    return np.unique(np.array([0, *bounds, len(indptr) - 1]))


class _Ranges:
    """The edges of each range of targets: the list itself where there is one range, else a file for each, written in one pass."""

    def __init__(
        self, folder: Path, bounds: Ids, edge_index: ShortIds, dtypes: tuple[Any, Any], told: Callable[[int], None]
    ) -> None:
        self._folder, self._bounds, self._edges, self._told = folder, bounds, edge_index, told
        self._record = np.dtype([("source", dtypes[0]), ("target", dtypes[0]), ("edge", dtypes[1])])

    def __enter__(self) -> Iterator[tuple[int, int, Iterator[tuple[ShortIds, ShortIds, Any]]]]:
        return self._one_after_the_other()

    def _one_after_the_other(self) -> Iterator[tuple[int, int, Iterator[tuple[ShortIds, ShortIds, Any]]]]:
        bounds = self._bounds
        if len(bounds) == 2:
            yield 0, int(bounds[1]), _pieces(self._edges)
            return
        dtype = self._record
        files = [(self._folder / f"range{number}").open("w+b") for number in range(len(bounds) - 1)]
        for source, target, ids in _pieces(self._edges):
            owner = np.searchsorted(bounds, target, side="right") - 1
            order = np.argsort(owner.astype(np.int16), kind="stable")
            records = np.empty(len(order), dtype)
            records["source"], records["target"], records["edge"] = source[order], target[order], ids[order]
            ends = np.cumsum(np.bincount(owner, minlength=len(files)))
            for file, (begin, end) in zip(files, pairwise([0, *ends.tolist()])):
                records[begin:end].tofile(file)
            self._told(len(source))
        for file, (low, high) in zip(files, pairwise(bounds.tolist())):
            with file:
                file.seek(0)
                yield low, high, _records(file, dtype)
            Path(file.name).unlink()

    def __exit__(self, *_: object) -> None:
        for file in self._folder.glob("range*"):
            file.unlink()


def _records(file: Any, dtype: np.dtype[Any]) -> Iterator[tuple[ShortIds, ShortIds, Any]]:
    while len(found := np.fromfile(file, dtype, PIECE)):
        yield found["source"], found["target"], found["edge"]


@compiled
def _count(ids, first, counts):  # type: ignore[no-untyped-def]
    for place in range(len(ids)):
        counts[ids[place] - first] += 1


@compiled
def _add_hashes(source, target, total):  # type: ignore[no-untyped-def]
    """Adds the hash of each edge, and takes away that of its opposite; numbers wrap around."""
    for edge in range(len(source)):
        one, other = np.uint64(source[edge]), np.uint64(target[edge])
        total[0] += mix(one ^ mix(other)) - mix(other ^ mix(one))


@compiled
def _place(source, target, low, high, ids, free, sources, edge_ids):  # type: ignore[no-untyped-def]
    """Puts edges whose targets are from `low` to `high` into their places; moves `free` on."""
    for edge in range(len(target)):
        if low <= target[edge] < high:
            place = free[target[edge] - low]
            free[target[edge] - low] = place + 1
            sources[place], edge_ids[place] = source[edge], ids[edge]


@dataclass(frozen=True)
class PartEdges:
    """The edges of one part, made a piece at a time; see :class:`~lightning_gnn.partition.shard.EdgeCutPart`.

    Attributes:
        num_edges: E_p.
        dtype: of local ids.
        halo: relabelled ids of the halo rows, ascending, int64 ``[H_p]``.
    """

    num_edges: int
    dtype: np.dtype[Any]
    halo: Ids
    _edges: InEdges
    _nodes: Ids
    _local: ShortIds

    @classmethod
    def of(cls, edges: InEdges, nodes: Ids, first: int, new: Ids, local: Ids) -> PartEdges:
        """Returns the edges into `nodes`, original ids in the order of their rows, of which `first` is the first.

        Args:
            new: row of each node, ``[N]``.
            local: room for a number for each node, ``[N]``, which is overwritten.
        """
        reads = np.zeros(len(new), np.bool_)
        count = _mark(edges.indptr, edges.source, nodes, new, reads)
        reads[first : first + len(nodes)] = False
        halo = np.flatnonzero(reads)
        local[first : first + len(nodes)] = np.arange(len(nodes))
        local[halo] = len(nodes) + np.arange(len(halo))
        return cls(count, id_dtype(len(nodes) + len(halo)), halo, edges, nodes, local[new])

    def sources(self) -> Iterator[ShortIds]:
        """Yields local ids of sources, a piece at a time."""
        for nodes, count in self._blocks():
            out = np.empty(count, self.dtype)
            _take_local(self._edges.indptr, self._edges.source, nodes, self._local, out)
            yield out

    def targets(self) -> Iterator[ShortIds]:
        """Yields local ids of targets, in the same pieces."""
        first = 0
        for nodes, _ in self._blocks():
            degree = self._edges.indptr[nodes + 1] - self._edges.indptr[nodes]
            yield np.repeat(np.arange(first, first + len(nodes), dtype=self.dtype), degree)
            first += len(nodes)

    def edge_ids(self) -> Iterator[ShortIds]:
        """Yields positions in the whole graph's list."""
        for nodes, count in self._blocks():
            out = np.empty(count, self._edges.edge_ids.dtype)
            _take(self._edges.indptr, self._edges.edge_ids, nodes, out)
            yield out

    def _blocks(self) -> Iterator[tuple[Ids, int]]:
        ends = np.cumsum(self._edges.indptr[self._nodes + 1] - self._edges.indptr[self._nodes])
        begin = done = 0
        while begin < len(self._nodes):
            end = max(begin + 1, int(np.searchsorted(ends, done + PIECE, side="right")))
            yield self._nodes[begin:end], int(ends[end - 1]) - done
            begin, done = end, int(ends[end - 1])


@compiled
def _mark(indptr, source, nodes, new, reads):  # type: ignore[no-untyped-def]
    count = 0
    for node in nodes:
        count += indptr[node + 1] - indptr[node]
        for slot in range(indptr[node], indptr[node + 1]):
            reads[new[source[slot]]] = True
    return count


@compiled
def _take(indptr, values, nodes, out):  # type: ignore[no-untyped-def]
    place = 0
    for node in nodes:
        for slot in range(indptr[node], indptr[node + 1]):
            out[place] = values[slot]
            place += 1


@compiled
def _take_local(indptr, source, nodes, local, out):  # type: ignore[no-untyped-def]
    place = 0
    for node in nodes:
        for slot in range(indptr[node], indptr[node + 1]):
            out[place] = local[source[slot]]
            place += 1
