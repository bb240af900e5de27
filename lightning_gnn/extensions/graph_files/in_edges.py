"""In-edges of every node, sorted on disk, with memory proportional to the number of nodes plus a fixed amount.

A distribution sort (Knuth, The Art of Computer Programming 3, section 5.2.5) in two passes over a list of edges. The first pass
counts the edges of each target. The second puts edges into their places, for one range of targets at a time that fits into
memory.

N nodes, E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from os import posix_fallocate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from torch_geometric.data import HeteroData
from torch_geometric.typing import EdgeType

from lightning_gnn.data.shards import JoinedGraph, Orders
from lightning_gnn.data.store import ArrayWriter, EdgeFiles, read_array, write_header
from lightning_gnn.partition.adjacency import compile_loop, mix
from lightning_gnn.partition.shard import Ids, Relabelling, ShortIds, id_dtype

PIECE = 1 << 22
"""Number of edges read at once."""


@dataclass(frozen=True)
class InEdges:
    """In-edges of every node, sorted by target; edges of one target are in the order of the list.

    Attributes:
        indptr: first in-edge of each target, and the end, int64 ``[N + 1]``.
        source: sources, ``[E]``, of :func:`~lightning_gnn.partition.shard.id_dtype`.
        edge_ids: position of each edge in the list, ``[E]``, of the shortest dtype.
    """

    indptr: Ids
    source: ShortIds
    edge_ids: ShortIds

    @classmethod
    def sorted_in(
        cls, folder: Path, edge_index: ShortIds, num_nodes: int, memory: int, advance: Callable[[int], None] = lambda _: None
    ) -> InEdges:
        """Returns the in-edges of a list ``[2, E]``, which may be memory-mapped, in files of `folder`; reuses complete files.

        Args:
            folder: existing folder.
            memory: bytes that may be used in addition to 16 per node.
            advance: progress callback with numbers of edges read or written, at least 3 E in total.
        """
        names = [folder / f"{name}.npy" for name in ("indptr", "source", "edge_ids")]
        if not (folder / "sorted").exists():
            _sort(names, folder, edge_index, num_nodes, memory, advance)
            (folder / "sorted").touch()
        indptr, source, edge_ids = (np.load(name, mmap_mode="r") for name in names)
        return cls(np.asarray(indptr[:]), source, edge_ids)


def _sort(
    names: list[Path], folder: Path, edge_index: ShortIds, num_nodes: int, memory: int, advance: Callable[[int], None]
) -> None:
    num_edges = edge_index.shape[1]
    indptr = np.concatenate([[0], np.cumsum(in_degrees(edge_index, num_nodes, advance))])
    np.save(names[0], indptr)
    dtypes = id_dtype(num_nodes), id_dtype(num_edges)
    ranges = _ranges(indptr, max(1, memory // sum(dtype.itemsize for dtype in dtypes)))
    with ExitStack() as stack:
        stored = stack.enter_context(closing(_split_ranges(folder, ranges, edge_index, dtypes, advance)))
        files = [stack.enter_context(name.open("wb")) for name in names[1:]]
        for file, dtype in zip(files, dtypes):
            write_header(file, (num_edges,), dtype)
        for low, high, pieces in stored:
            begin, end = int(indptr[low]), int(indptr[high])
            columns = np.empty(end - begin, dtypes[0]), np.empty(end - begin, dtypes[1])
            free = indptr[low:high] - begin
            for source, target, first in pieces:
                _place(source, target, low, high, first, free, *columns)
                advance(len(source))
            for file, column in zip(files, columns):
                column.tofile(file)
            del columns  # free before the columns of the next range are allocated


def in_degrees(edge_index: ShortIds, num_nodes: int, advance: Callable[[int], None] = lambda _: None) -> Ids:
    """Returns the number of in-edges of each node, int64 ``[N]``, of a list ``[2, E]`` that may be memory-mapped."""
    return counts_of(edge_index[1], num_nodes, 0, advance)


def counts_of(ids: ShortIds, size: int, first: int = 0, advance: Callable[[int], None] = lambda _: None) -> Ids:
    """Returns the count of each number from `first` on, int64 ``[size]``; allocates nothing of the size of `ids`."""
    counts = np.zeros(size, np.int64)
    for begin in range(0, len(ids), PIECE):
        piece = ids[begin : begin + PIECE]
        _count(piece, first, counts)
        advance(len(piece))
    return counts


def is_symmetric(edge_index: ShortIds) -> bool:
    """Returns whether each edge in a list ``[2, E]`` has its reverse edge there, equally often.

    Compares sums of hashes: wrong for one of 2^64 asymmetric lists.
    """
    total = np.zeros(1, np.uint64)
    for begin in range(0, edge_index.shape[1], PIECE):
        _add_hashes(*edge_index[:, begin : begin + PIECE], total)
    return not total[0]


def _pieces(edge_index: ShortIds) -> Iterator[tuple[ShortIds, ShortIds, Any]]:
    """Yields sources and targets, ``[n]``, and edge numbers."""
    for begin in range(0, edge_index.shape[1], PIECE):
        source, target = edge_index[:, begin : begin + PIECE]
        yield source, target, np.arange(begin, begin + len(source))


def _ranges(indptr: Ids, max_edges: int) -> Ids:
    """Returns the bounds of target ranges, ending with N: about equal ranges of at most about `max_edges` in-edges each.

    A single node may exceed `max_edges`.
    """
    count = max(1, -(-int(indptr[-1]) // max_edges))
    bounds = np.searchsorted(indptr, np.linspace(0, indptr[-1], count + 1)[1:-1])
    return np.unique(np.array([0, *bounds, len(indptr) - 1]))


def _split_ranges(
    folder: Path, bounds: Ids, edge_index: ShortIds, dtypes: tuple[Any, Any], advance: Callable[[int], None]
) -> Generator[tuple[int, int, Iterator[tuple[ShortIds, ShortIds, Any]]]]:
    """Yields the edges of each range of targets: the list itself for a single range, else one file each, written in one pass."""
    dtype = np.dtype([("source", dtypes[0]), ("target", dtypes[0]), ("edge", dtypes[1])])
    try:
        if len(bounds) == 2:
            yield 0, int(bounds[1]), _pieces(edge_index)
            return
        files = [(folder / f"range{number}").open("w+b") for number in range(len(bounds) - 1)]
        for source, target, ids in _pieces(edge_index):
            owner = np.searchsorted(bounds, target, side="right") - 1
            order = np.argsort(owner.astype(np.int16), kind="stable")
            records = np.empty(len(order), dtype)
            records["source"], records["target"], records["edge"] = source[order], target[order], ids[order]
            ends = np.cumsum(np.bincount(owner, minlength=len(files)))
            for file, (begin, end) in zip(files, pairwise([0, *ends.tolist()])):
                records[begin:end].tofile(file)
            advance(len(source))
        for file, (low, high) in zip(files, pairwise(bounds.tolist())):
            with file:
                file.seek(0)
                yield low, high, _records(file, dtype)
            Path(file.name).unlink()
    finally:
        for left in folder.glob("range*"):
            left.unlink()


def _records(file: Any, dtype: np.dtype[Any]) -> Iterator[tuple[ShortIds, ShortIds, Any]]:
    while len(found := np.fromfile(file, dtype, PIECE)):
        yield found["source"], found["target"], found["edge"]


@compile_loop
def _count(ids, first, counts):  # type: ignore[no-untyped-def]
    for place in range(len(ids)):
        counts[ids[place] - first] += 1


@compile_loop
def _add_hashes(source, target, total):  # type: ignore[no-untyped-def]
    """Add each edge's hash minus its reverse edge's to `total[0]`, modulo 2^64: 0 if every edge has a reverse edge."""
    for edge in range(len(source)):
        one, other = np.uint64(source[edge]), np.uint64(target[edge])
        total[0] += mix(one ^ mix(other)) - mix(other ^ mix(one))


@compile_loop
def _place(source, target, low, high, ids, free, sources, edge_ids):  # type: ignore[no-untyped-def]
    """Put edges with targets from `low` to `high` into their places; advance `free`."""
    for edge in range(len(target)):
        if low <= target[edge] < high:
            place = free[target[edge] - low]
            free[target[edge] - low] = place + 1
            sources[place], edge_ids[place] = source[edge], ids[edge]


@dataclass(frozen=True)
class PartEdges:
    """Edges of one part, generated in pieces; see :class:`~lightning_gnn.partition.shard.EdgeCutPart`.

    Attributes:
        num_edges: E_p.
        dtype: dtype of local ids.
        halo: relabeled ids of the halo nodes, ascending, int64 ``[H_p]``.
    """

    num_edges: int
    dtype: np.dtype[Any]
    halo: Ids
    _edges: InEdges
    _nodes: Ids
    _local: ShortIds
    _first: int = 0
    _type: tuple[int, int] | None = None

    @classmethod
    def of(cls, edges: InEdges, nodes: Ids, first: int, new: Ids, local: Ids) -> PartEdges:
        """Returns the edges into `nodes`, which are original ids in row order.

        Args:
            first: relabeled id of the first of `nodes`.
            new: relabeled id of each node, ``[N]``.
            local: scratch array with an element per node, ``[N]``, which is overwritten.
        """
        reads = np.zeros(len(new), np.bool_)
        count = _mark(edges.indptr, edges.source, nodes, new, reads)
        reads[first : first + len(nodes)] = False
        halo = np.flatnonzero(reads)
        local[first : first + len(nodes)] = np.arange(len(nodes))
        local[halo] = len(nodes) + np.arange(len(halo))
        return cls(count, id_dtype(len(nodes) + len(halo)), halo, edges, nodes, local[new])

    def select_type(self, nodes: Ids, first: int, ids: tuple[int, int]) -> PartEdges:
        """Returns the edges of one type.

        Args:
            nodes: local nodes of the type of the targets.
            first: row of the first of `nodes`.
            ids: first position of the type in the list of all edges, and the end.
        """
        return replace(self, _nodes=nodes, _first=first, _type=ids)

    def sources(self) -> Iterator[ShortIds]:
        """Yields local ids of sources in pieces."""
        for nodes in self._gather_values(self._edges.source):
            yield self._local[nodes].astype(self.dtype, copy=False)

    def targets(self) -> Iterator[ShortIds]:
        """Yields local ids of targets in the same pieces."""
        first = self._first
        for nodes, selected in self._blocks():
            degree = self._edges.indptr[nodes + 1] - self._edges.indptr[nodes]
            yield np.repeat(np.arange(first, first + len(nodes), dtype=self.dtype), degree)[selected]
            first += len(nodes)

    def edge_ids(self) -> Iterator[ShortIds]:
        """Yields positions in the edge list of the whole graph."""
        return self._gather_values(self._edges.edge_ids)

    def _gather_values(self, values: ShortIds) -> Iterator[ShortIds]:
        for nodes, selected in self._blocks():
            yield self._take_values(values, nodes)[selected]

    def _take_values(self, values: ShortIds, nodes: Ids) -> ShortIds:
        out = np.empty(int((self._edges.indptr[nodes + 1] - self._edges.indptr[nodes]).sum()), values.dtype)
        _take(self._edges.indptr, values, nodes, out)
        return out

    def _blocks(self) -> Iterator[tuple[Ids, Any]]:
        """Yields ranges of nodes, and the index that selects the edges of the type among the edges into these."""
        ends = np.cumsum(self._edges.indptr[self._nodes + 1] - self._edges.indptr[self._nodes])
        begin = done = 0
        while begin < len(self._nodes):
            end = max(begin + 1, int(np.searchsorted(ends, done + PIECE, side="right")))
            nodes: Ids = self._nodes[begin:end]
            selected: Any = slice(None)
            if self._type is not None:
                ids = self._take_values(self._edges.edge_ids, nodes)
                selected = (ids >= self._type[0]) & (ids < self._type[1])
            yield nodes, selected
            begin, done = end, int(ends[end - 1])


@compile_loop
def _mark(indptr, source, nodes, new, reads):  # type: ignore[no-untyped-def]
    count = 0
    for node in nodes:
        count += indptr[node + 1] - indptr[node]
        for slot in range(indptr[node], indptr[node + 1]):
            reads[new[source[slot]]] = True
    return count


@compile_loop
def _take(indptr, values, nodes, out):  # type: ignore[no-untyped-def]
    place = 0
    for node in nodes:
        for slot in range(indptr[node], indptr[node + 1]):
            out[place] = values[slot]
            place += 1


def write_parts(edges: InEdges, advance: Callable[[int], None], part: np.ndarray, num_parts: int, out: ArrayWriter) -> EdgeFiles:
    """Write edges, halos and ids of all parts in pieces; local nodes of a part are in the order of the graph."""
    relabelling = Relabelling.from_assignment(part, num_parts)
    n_id, offsets = relabelling.n_id, relabelling.offsets
    new, local = relabelling.new_ids(), np.empty(len(part), id_dtype(len(part)))
    out.save("n_id", n_id)
    counts = list[int]()

    def ids() -> Iterator[np.ndarray]:
        for number, (low, high) in enumerate(pairwise(offsets.tolist())):
            piece = PartEdges.of(edges, n_id[low:high], low, new, local)
            rows = chain(piece.sources(), piece.targets())
            out.save_pieces(f"part{number}.edge_index", (2, piece.num_edges), piece.dtype, rows)
            out.save(f"part{number}.halo", piece.halo)
            counts.append(piece.num_edges)
            for edge_ids in piece.edge_ids():
                yield edge_ids
                advance(len(edge_ids))

    e_id = read_array(out.save_pieces("e_id", edges.edge_ids.shape, edges.edge_ids.dtype, ids()))
    ends = np.cumsum([0, *counts])
    edge_orders = [e_id[begin:end] for begin, end in pairwise(ends.tolist())]
    return EdgeFiles(offsets, Orders.homogeneous(relabelling, counts, e_id), edge_orders, None)


def new_array(file: Path, dtype: np.dtype[Any], length: int) -> np.memmap[Any, Any]:
    """Returns a new array ``[length]``, mapped; its bytes are allocated: a failing write would kill the process."""
    array = open_memmap(file, "w+", dtype, (length,))
    with file.open("rb+") as opened:
        posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return array


def join_edges(data: HeteroData, folder: Path) -> JoinedGraph:
    """Returns a graph with types as one list of nodes and edges, whose edges are written to `folder` and mapped.

    Without the type of each edge, which follows from its position.
    """
    nodes, edges = {each: data[each].num_nodes for each in data.node_types}, [data[kind].edge_index for kind in data.edge_types]
    first = dict(zip(nodes, np.cumsum([0, *nodes.values()]).tolist()))
    ends = np.cumsum([0, *(each.size(1) for each in edges)]).tolist()
    dtype = id_dtype(sum(nodes.values()))
    with (folder / "joined.npy").open("wb") as file:
        write_header(file, (2, ends[-1]), dtype)
        for row in range(2):
            for kind, each in zip(data.edge_types, edges):
                for begin in range(0, each.size(1), PIECE):
                    (each[row, begin : begin + PIECE].numpy() + first[kind[2 * row]]).astype(dtype).tofile(file)
    kinds = np.repeat(np.arange(len(nodes), dtype=np.int16), list(nodes.values()))
    firsts = dict(zip(data.edge_types, ends))
    return JoinedGraph(read_array(folder / "joined.npy"), len(kinds), kinds, None, first, firsts)


def write_typed_parts(
    edges: InEdges,
    advance: Callable[[int], None],
    joined: JoinedGraph,
    input_type: str,
    folder: Path,
    part: np.ndarray,
    num_parts: int,
    out: ArrayWriter,
) -> EdgeFiles:
    """Write all parts of a graph with types as :func:`write_parts` does; nodes and edges of a part are type after type.

    Args:
        edges: in-edges of `joined`.
        folder: folder for a temporary file, with the order of all edges.
    """
    relabelling, types = Relabelling.from_assignment(part, num_parts), joined.types(part, num_parts, input_type)
    n_id, offsets, new = relabelling.n_id, relabelling.offsets.tolist(), relabelling.new_ids()
    local, bounds = np.empty(len(part), id_dtype(len(part))), [*(joined.edge_firsts or {}).values(), joined.edge_index.shape[1]]
    ranges = dict(zip(types.edges, pairwise(bounds)))

    def select(piece: PartEdges, rank: int, kind: EdgeType) -> PartEdges:
        row, count = int(types.begins(kind[2])[rank]), int(types.nodes[kind[2]][rank])
        begin = offsets[rank] + row
        return piece.select_type(n_id[begin : begin + count], row, ranges[kind])

    for rank, (low, high) in enumerate(pairwise(offsets)):
        piece = PartEdges.of(edges, n_id[low:high], low, new, local)
        pieces = [select(piece, rank, kind) for kind in types.edges]
        rows = chain(*(each.sources() for each in pieces), *(each.targets() for each in pieces))
        out.save_pieces(f"part{rank}.edge_index", (2, piece.num_edges), piece.dtype, rows)
        out.save(f"part{rank}.halo", piece.halo)
    order = new_array(folder / "order.npy", edges.edge_ids.dtype, len(edges.edge_ids))
    ends = np.cumsum([0, *np.sum([*types.edges.values()], 0)]).tolist()
    nothing = PartEdges(0, local.dtype, n_id[:0], edges, n_id[:0], local[:0])

    def ids() -> Iterator[np.ndarray]:
        for kind, (first, _) in ranges.items():
            for rank, begin in enumerate(types.begins(kind)):
                place = ends[rank] + int(begin)
                for found in select(nothing, rank, kind).edge_ids():
                    order[place : place + len(found)] = found
                    place += len(found)
                    yield found - found.dtype.type(first)
                    advance(len(found))

    e_id = read_array(out.save_pieces("e_id", order.shape, order.dtype, ids()))
    kinds = (joined.node_kinds if joined.node_kinds is not None else n_id)[n_id]
    by_type: dict[Any, Any] = {
        name: n_id[kinds == number] - first for number, (name, first) in enumerate((joined.node_firsts or {}).items())
    }
    orders = Orders(types, by_type | {kind: e_id[types.place(kind)] for kind in types.edges})
    out.save("n_id", orders.n_id())
    return EdgeFiles(relabelling.offsets, orders, [order[begin:end] for begin, end in pairwise(ends)], None)
