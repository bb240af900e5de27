"""``partition="streaming"``: an edge cut in memory that grows with nodes, not with edges, and its predicted costs.

The graph is read in blocks of rows, several times. The method is semi-external multilevel partitioning (Akhremtsev, Sanders and
Schulz, arXiv:1404.4887). Size-constrained label propagation over the stream builds clusters, and METIS partitions the small graph
of clusters. Then passes move single nodes between parts if that cuts fewer edges and keeps the bounds. If moves improve the cut
much, all steps run once more with clusters inside the parts (the paper's V-cycles). Buffered one-pass methods (HeiStream,
arXiv:2102.09384; CUTTANA, arXiv:2312.08356) assign each node permanently from the data read so far; these passes use the whole
graph.

The numbers of clusters and of neighboring cluster pairs for METIS are estimated beforehand. The estimate gathers nodes in
clusters while reading the edges, in memory that grows with nodes.

N nodes, E directed edges or row entries, P parts, C clusters, W balanced weights.
"""

# mypy: disable-error-code="call-arg"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from lightning_gnn.console import progress_bar
from lightning_gnn.data.store import writing
from lightning_gnn.extensions.graph_files.in_edges import InEdges, in_degrees, is_symmetric
from lightning_gnn.kernels.loops import prefetch
from lightning_gnn.partition.adjacency import AHEAD, Adjacency, ask_for_clusters, ask_for_ends, compile_loop, edge_pieces, mix
from lightning_gnn.partition.budget import BUILDING, Candidates, Levels, Prediction
from lightning_gnn.partition.edge_cut import EDGE_BOUNDS, SHARE_BOUND, cut_within
from lightning_gnn.partition.layout import Groups, devices

CLUSTERS_PER_PART = 128
"""Minimum number of clusters per part, if there are enough nodes. It limits the weight of a cluster so that METIS can balance."""

CLUSTER_PASSES, REFINE_PASSES = 5, 4
"""Number of passes over the whole stream; refinement ends early if a pass moves fewer than 0.1 % of the nodes."""

PAIRS_PER_NODE, LEAST_PAIRS = 3 / 16, 3 << 15
"""Maximum number of pairs of neighboring clusters for METIS, the heaviest; METIS needs 80 to 260 bytes per pair."""

ENTRIES = 1 << 20
"""Number of entries of a block that is read at once."""

Block = tuple[int, NDArray[np.int64], NDArray[np.integer]]
"""First node of a range, the offsets of each node's neighbors, int64 ``[n + 1]`` from 0, and the neighbors."""


@dataclass(frozen=True)
class RowBlocks:
    """Graph that is read in ranges of nodes, in order, any number of times.

    The ranges are rows of one or two CSR arrays, in memory or memory-mapped; they are sliced and never copied as a whole. The
    neighbors of a node are the entries of its row in all arrays. So in-edges and out-edges together give an undirected graph.
    Self-loops are ignored; duplicate neighbors count twice.

    Attributes:
        rows: pairs of ``indptr``, int ``[N + 1]``, and ``indices``, int ``[E]``, or objects that support the same slices.
        entries: maximum number of entries of a block; only a single row may exceed it.
    """

    rows: tuple[tuple[Any, Any], ...]
    entries: int = ENTRIES

    @property
    def num_nodes(self) -> int:
        return len(self.rows[0][0]) - 1

    def __iter__(self) -> Iterator[Block]:
        first = 0
        while first < self.num_nodes:
            # As many rows as fit; the offsets are also read in ranges.
            offsets = [np.asarray(indptr[first : first + self.entries // 4 + 2], np.int64) for indptr, _ in self.rows]
            begin = [int(each[0]) for each in offsets]
            total = sum(each - each[0] for each in offsets)
            count = max(1, int(np.searchsorted(total, self.entries, "right")) - 1)
            pieces = [
                (each[: count + 1] - start, np.asarray(indices[start : int(each[count])]))
                for each, start, (_, indices) in zip(offsets, begin, self.rows)
            ]
            yield (first, *(pieces[0] if len(pieces) == 1 else _side_by_side(pieces, total[: count + 1])))
            first += count


def _side_by_side(pieces: list[Any], indptr: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.integer]]:
    indices, before = np.empty(indptr[-1], np.int64), np.zeros(len(indptr) - 1, np.int64)
    for offsets, values in pieces:
        lengths = np.diff(offsets)
        indices[np.arange(len(values)) + np.repeat(indptr[:-1] + before - offsets[:-1], lengths)] = values
        before += lengths
    return indptr, indices


@dataclass(frozen=True)
class Refinement:
    """Result of refinement.

    Attributes:
        load: weights of the parts, int64 ``[P, W]``.
        before, after: cost of the entries between parts: 2 each, or 1 if both parts are on one of several machines.
    """

    load: NDArray[np.int64]
    before: int
    after: int

    def exceeds(self, limits: NDArray[np.int64]) -> bool:
        """Returns whether a part exceeds `limits`, ``[W]``."""
        return bool((self.load > limits).any())


def cluster_graph(
    blocks: RowBlocks, weights: NDArray[np.int32], num_parts: int, seed: int = 0, part: NDArray[np.int32] | None = None
) -> tuple[NDArray[np.int32], Adjacency]:
    """Returns the cluster of each node, int32 ``[N]``, and the graph of clusters with the number of edges between them.

    Args:
        blocks: the graph.
        weights: int32 ``[N, W]``; a cluster of several nodes never exceeds its share of a part in any weight.
        num_parts: P.
        seed: seed for ties.
        part: int32 ``[N]``; each cluster is inside one of these parts.
    """
    num_nodes, inside = blocks.num_nodes, np.empty(0, np.int32) if part is None else part
    limits = np.clip(weights.sum(0, np.int64) // (num_parts * CLUSTERS_PER_PART), 1, np.iinfo(np.int32).max)
    cluster, load = np.arange(num_nodes, dtype=np.int32), weights.copy()
    counts = np.zeros(num_nodes, np.int32)
    for step in range(CLUSTER_PASSES):
        moved = 0
        for first, indptr, indices in blocks:
            moved += _propagate(first, indptr, indices, cluster, inside, load, weights, limits, counts, seed + step)
        if moved <= num_nodes // 1000:
            break
    # Single nodes whose neighbors' clusters are full join other nodes with the same favorite cluster, as in KaMinPar (two hops).
    waiting = np.full(num_nodes + 1, -1, np.int32)
    for first, indptr, indices in blocks:
        _join(first, indptr, indices, cluster, inside, load, weights, limits, counts, waiting, seed)
    num_clusters = _renumber(cluster, counts)
    del load, waiting, counts
    pairs = PairCounts(most_pairs(num_nodes))
    for first, indptr, indices in blocks:
        pairs.add(first, indptr, indices, cluster)
    return cluster, pairs.graph(num_clusters)


def most_pairs(num_nodes: int) -> int:
    """Returns the maximum number of pairs of clusters for METIS."""
    return max(LEAST_PAIRS, int(PAIRS_PER_NODE * num_nodes))


def refine_parts(
    blocks: RowBlocks,
    part: NDArray[np.int32],
    weights: NDArray[np.int32],
    limits: NDArray[np.int64],
    machine: NDArray[np.integer],
    seed: int = 0,
) -> Refinement:
    """Move nodes to the parts of most of their neighbors, in place.

    No part is filled above `limits`. If a part is above it initially, nodes move away, first only without additional cut edges,
    then at any cost, to parts with room. Nodes that fit nowhere stay.

    Args:
        part: int32 ``[N]``.
        weights: int32 ``[N, W]``.
        limits: maximum weights of a part, ``[W]``.
        machine: machine of each part, ``[P]``; a neighbor in another part of the same machine counts half.
    """
    load = np.stack([np.bincount(part, each, len(machine)) for each in weights.T], 1).astype(np.int64)
    shared, gained = len(np.unique(machine)) > 1, 0
    before = sum(_cost(first, indptr, indices, part, machine, shared) for first, indptr, indices in blocks)
    for step in range(REFINE_PASSES + 2):
        force = step >= REFINE_PASSES
        if force and (load <= limits).all():
            break
        moved = 0
        for first, indptr, indices in blocks:
            here = _move(first, indptr, indices, part, load, weights, limits, machine, shared, force, seed + step)
            moved, gained = moved + here[0], gained + here[1]
        if not force and moved <= blocks.num_nodes // 1000 and (load <= limits).all():
            break
    return Refinement(load, before, before - 2 * gained)


class PairCounts:
    """Number of edges between clusters, for the heaviest pairs, in a table of fixed size.

    When the table is full, the lightest pairs are dropped; later counts of these start from zero. So the table has room for
    `ROOM` times `max_pairs` pairs.
    """

    ROOM = 4

    def __init__(self, max_pairs: int) -> None:
        self.keys = np.full(self.slots(max_pairs), -1, np.int64)
        self.counts = np.zeros(len(self.keys), np.int32)
        self.max_pairs, self.capacity, self.used = max_pairs, self.ROOM * max_pairs, 0

    @classmethod
    def slots(cls, max_pairs: int) -> int:
        """Returns the size of the table, a power of two, of which at most three quarters are used."""
        return 1 << (cls.ROOM * max_pairs * 4 // 3 - 1).bit_length()

    def add(self, first: int, indptr: NDArray[np.int64], indices: NDArray[np.integer], cluster: NDArray[np.int32]) -> None:
        row = 0
        while row < len(indptr) - 1:
            row, self.used = _count_pairs(first, row, indptr, indices, cluster, self.keys, self.counts, self.used, self.capacity)
            if self.used > self.capacity:
                self._drop()

    def _drop(self) -> None:
        there = np.flatnonzero(self.keys >= 0)
        keys, counts = self.keys[there], self.counts[there]
        threshold = np.partition(counts, len(counts) - self.max_pairs)[len(counts) - self.max_pairs]
        selected = counts > threshold
        _keep_ties(counts, threshold, self.max_pairs - np.count_nonzero(selected), selected)
        self.keys.fill(-1)
        self.counts.fill(0)
        _insert(keys[selected], counts[selected], self.keys, self.counts)
        self.used = self.max_pairs

    def graph(self, num_clusters: int) -> Adjacency:
        """Returns the graph of clusters; empties the table."""
        if self.used > self.max_pairs:
            self._drop()
        there = np.flatnonzero(self.keys >= 0)
        one, other = np.divmod(self.keys[there], 1 << 32)
        pairs = csr_matrix((self.counts[there], (one, other)), (num_clusters, num_clusters))
        del self.keys, self.counts, there, one, other
        both = pairs + pairs.T
        return Adjacency(both.indptr.astype(np.int64), both.indices, both.data)


@compile_loop
def _fits(load, group, weights, node, limits):  # type: ignore[no-untyped-def]
    for each in range(len(limits)):  # noqa: SIM110 - compiled
        if np.int64(load[group, each]) + weights[node, each] > limits[each]:
            return False
    return True


@compile_loop
def _is_outside(inside, cluster, node):  # type: ignore[no-untyped-def]
    """Returns whether a node and a cluster, named after a node of its part, are in different parts, if `inside` is given."""
    return len(inside) > 0 and inside[cluster] != inside[node]


@compile_loop
def _propagate(first, indptr, indices, cluster, inside, load, weights, limits, counts, seed):  # type: ignore[no-untyped-def]
    """Move each node of a block to the cluster of most of its neighbors that has room; return the number of moves.

    If `inside` is not empty, nodes move only to clusters in the same part of `inside`.
    """
    moved, last = 0, len(indices) - 1
    for row in range(len(indptr) - 1):
        node = first + row
        begin, end = indptr[row], indptr[row + 1]
        own = cluster[node]
        for place in range(begin, end):
            prefetch(cluster, indices[min(place + 2 * AHEAD, last)])
            soon = cluster[indices[min(place + AHEAD, last)]]
            prefetch(counts, soon)
            prefetch(load, soon)
            if indices[place] != node:
                counts[cluster[indices[place]]] += 1
        best, most_edges, salt = own, counts[own], node ^ (seed << 40)
        counts[own] = 0
        for place in range(begin, end):
            there = cluster[indices[place]]
            edges = counts[there]
            if edges:
                counts[there] = 0
                if _is_outside(inside, there, node):
                    continue
                better = edges > most_edges
                if edges == most_edges == 1:  # the larger grows: else clusters stay small if all counts are 1
                    size, other = load[there, 0], load[best, 0] - (best == own)
                    better = size > other or (size == other and best != own and mix(there ^ salt) < mix(best ^ salt))
                elif edges == most_edges and best != own:
                    better = mix(there ^ salt) < mix(best ^ salt)
                if better and _fits(load, there, weights, node, limits):
                    best, most_edges = there, edges
        if best != own:
            cluster[node] = best
            for each in range(len(limits)):
                load[own, each] -= weights[node, each]
                load[best, each] += weights[node, each]
            moved += 1
    return moved


@compile_loop
def _join(first, indptr, indices, cluster, inside, load, weights, limits, counts, waiting, seed):  # type: ignore[no-untyped-def]
    """Add single nodes to a cluster of other nodes with the same favorite; the last entry of `waiting` is for isolated nodes."""
    for row in range(len(indptr) - 1):
        node = first + row
        own = cluster[node]
        alone = own == node
        for each in range(len(limits)):
            alone &= load[own, each] == weights[node, each]
        if not alone:
            continue
        begin, end = indptr[row], indptr[row + 1]
        favorite, most_edges, salt = len(cluster), 0, seed << 40
        for place in range(begin, end):
            if indices[place] != node:
                counts[cluster[indices[place]]] += 1
        for place in range(begin, end):
            there = cluster[indices[place]]
            edges = counts[there]
            if edges:
                counts[there] = 0
                if _is_outside(inside, there, node):
                    continue
                if edges > most_edges or (edges == most_edges and mix(there ^ salt) < mix(favorite ^ salt)):
                    favorite, most_edges = there, edges
        open_one = waiting[favorite]
        fits = open_one >= 0 and open_one != own and _fits(load, open_one, weights, node, limits)
        if fits and not _is_outside(inside, open_one, node):  # isolated nodes share one favorite
            cluster[node] = open_one
            for each in range(len(limits)):
                load[own, each] -= weights[node, each]
                load[open_one, each] += weights[node, each]
        else:
            waiting[favorite] = own


@compile_loop
def _renumber(cluster, numbers):  # type: ignore[no-untyped-def]
    """Number clusters in the order of their first nodes, in place; return the number of clusters."""
    numbers[:] = -1
    found, last = 0, len(cluster) - 1
    for node in range(len(cluster)):
        prefetch(numbers, cluster[min(node + AHEAD, last)])
        if numbers[cluster[node]] < 0:
            numbers[cluster[node]] = found
            found += 1
        cluster[node] = numbers[cluster[node]]
    return found


@compile_loop
def _count_pairs(first, row, indptr, indices, cluster, keys, counts, used, capacity):  # type: ignore[no-untyped-def]
    """Count edges between clusters from a row on, until the table is full; return the next row and the number of pairs."""
    mask, last = np.uint64(len(keys) - 1), len(indices) - 1
    while row < len(indptr) - 1 and used <= capacity:
        one = np.int64(cluster[first + row])
        for place in range(indptr[row], indptr[row + 1]):
            prefetch(cluster, indices[min(place + AHEAD, last)])
            other = np.int64(cluster[indices[place]])
            if one != other:
                slot = mix((min(one, other) << 32) | max(one, other)) & mask
                prefetch(keys, slot)
                prefetch(counts, slot)
        for place in range(indptr[row], indptr[row + 1]):
            other = np.int64(cluster[indices[place]])
            if one != other:
                key = (min(one, other) << 32) | max(one, other)
                slot = mix(key) & mask
                while keys[slot] != key and keys[slot] >= 0:
                    slot = (slot + np.uint64(1)) & mask
                if keys[slot] < 0:
                    if used > capacity and 8 * used >= 7 * len(keys):
                        continue  # a row with more pairs than the table has room for
                    keys[slot] = key
                    used += 1
                counts[slot] += 1
        row += 1
    return row, used


@compile_loop
def _keep_ties(counts, threshold, room, selected):  # type: ignore[no-untyped-def]
    """Keep `room` of the pairs with count `threshold`, at even distances: long runs of full slots make searches slow."""
    ties, seen, taken = np.count_nonzero(counts == threshold), 0, 0
    for place in range(len(counts)):
        if counts[place] == threshold:
            seen += 1
            if seen * room // ties > taken:
                selected[place], taken = True, taken + 1


@compile_loop
def _insert(new_keys, new_counts, keys, counts):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(keys) - 1)
    for place in range(len(new_keys)):
        slot = mix(new_keys[place]) & mask
        while keys[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        keys[slot], counts[slot] = new_keys[place], new_counts[place]


@compile_loop
def _cost(first, indptr, indices, part, machine, shared):  # type: ignore[no-untyped-def]
    """Returns the cost of a block's entries between parts (:class:`Refinement`); `shared`: whether there are several machines."""
    cost, last = 0, len(indices) - 1
    for row in range(len(indptr) - 1):
        own = part[first + row]
        for place in range(indptr[row], indptr[row + 1]):
            prefetch(part, indices[min(place + AHEAD, last)])
            there = part[indices[place]]
            if there != own:
                cost += 1 if shared and machine[there] == machine[own] else 2
    return cost


@compile_loop
def _move(  # type: ignore[no-untyped-def]
    first, indptr, indices, part, load, weights, limits, machine, shared, force, seed
):
    """Move nodes of a block between parts; return the number of moves and the reduction of their own entries' :func:`_cost`."""
    num_parts, num_weights, moved, gained, last = len(load), len(limits), 0, 0, len(indices) - 1
    edges, around = np.zeros(num_parts, np.int64), np.zeros(num_parts, np.int64)
    for row in range(len(indptr) - 1):
        node = first + row
        own = part[node]
        begin, end = indptr[row], indptr[row + 1]
        edges[:] = 0
        inside = True
        for place in range(begin, end):
            prefetch(part, indices[min(place + AHEAD, last)])
            if indices[place] != node:
                there = part[indices[place]]
                edges[there] += 1
                inside &= there == own
        worst, fullness = 0.0, 0.0
        for each in range(num_weights):
            share = load[own, each] / limits[each]
            fullness += share
            if weights[node, each]:
                worst = max(worst, share)
        over = worst > 1
        if inside and not (over and (force or begin == end)):
            continue
        if shared:
            around[:] = 0
            for there in range(num_parts):
                around[machine[there]] += edges[there]
        stays = 2 * edges[own] + (around[machine[own]] - edges[own] if shared else 0)
        best, best_score, best_fullness = own, stays, fullness
        if over and force:
            best_score, best_fullness = np.int64(-1), np.inf
        for there in range(num_parts):
            if there == own:
                continue
            score = 2 * edges[there] + (around[machine[there]] - edges[there] if shared else 0)
            if score < best_score:
                continue
            then, full = 0.0, 0.0
            for each in range(num_weights):
                share = (load[there, each] + weights[node, each]) / limits[each]
                full += share
                if weights[node, each]:
                    then = max(then, share)
            if then > 1 and then >= worst:
                continue
            if score > best_score or full < best_fullness:
                best, best_score, best_fullness = there, score, full
        if best != own:
            part[node] = best
            for each in range(num_weights):
                load[own, each] -= weights[node, each]
                load[best, each] += weights[node, each]
            moved, gained = moved + 1, gained + best_score - stays
    return moved, gained


NODE_S, ENTRY_S, PAIR_S = 3.7e-6, 0.49e-6, 3.6e-6
"""CPU seconds per node, entry and pair of clusters, for one balance setting in two cycles, which is typical."""

FEWER_PAIRS = 1.2
"""Ratio of the pairs of clusters in the estimate to the pairs after five passes of label propagation."""

CYCLES, WELL_CLUSTERED, NO_BETTER = 3, 0.9, 0.99
"""Maximum number of cycles of ``"streaming"``, and the conditions for another cycle. The best result is kept.

A cycle clusters, partitions and moves nodes. Another one runs if two conditions hold. Moves left less than `WELL_CLUSTERED` of
the cut edges, as happens if clusters have nodes of several communities. The cost is below `NO_BETTER` times the best before.
"""


def count_clusters(edge_index: NDArray[np.integer], num_nodes: int, num_parts: int) -> tuple[int, int]:
    """Returns the numbers of clusters, each a small share of a part, and of neighboring cluster pairs for edges ``[2, E]``.

    Pairs are estimated like the entries of :class:`~lightning_gnn.partition.budget.Levels`. Uses 32 bytes per node and reads the
    edges four times.
    """
    shares = num_parts * CLUSTERS_PER_PART
    most_nodes, most_ends = max(1, num_nodes // shares), max(1, 2 * edge_index.shape[1] // shares)
    ends, size = np.zeros(num_nodes, np.int64), np.ones(num_nodes, np.int32)
    of = np.arange(num_nodes, dtype=np.int32)
    for _, source, target in edge_pieces(edge_index):
        _count_ends(source, target, ends)
    filled, alone = ends.copy(), np.count_nonzero(ends == 0)
    for _, source, target in edge_pieces(edge_index):
        _gather(source, target, of, size, ends, filled, most_nodes, most_ends)
    waiting, waits = np.full(num_nodes, -1, np.int32), np.zeros(num_nodes, np.bool_)
    for _, source, target in edge_pieces(edge_index):
        _gather_single(source, target, of, size, ends, filled, most_nodes, most_ends, waiting, waits)
    del filled, ends, waiting, waits
    pairs = Levels.count_pairs(edge_index, of, np.zeros(num_nodes, np.int32))
    return int(np.count_nonzero(size) - alone), pairs


class Streaming:
    """Streaming partitioner, see :class:`~lightning_gnn.partition.budget.Partitioner`.

    Args:
        work: for a graph in files, the folder of its sorted in-edges, from which neighbors are read; None for a graph in memory.
        memory: bytes that sorting out-edges may use in addition to memory that grows with nodes.
    """

    settings = len(EDGE_BOUNDS)

    def __init__(self, work: Path | None = None, memory: int = 0) -> None:
        self._work, self._memory = work, memory

    def predict(self, edge_index: NDArray[np.integer], levels: Levels, num_parts: int) -> Prediction:
        clusters = count_clusters(edge_index, int(levels.nodes[0]), num_parts)
        return self._predict(edge_index.shape[1], levels, num_parts, *clusters)

    def upper_bound(self, num_nodes: int, num_edges: int, num_parts: int) -> Prediction:
        return self._predict(num_edges, Levels.upper_bound(num_nodes, num_edges), num_parts, num_nodes, num_edges)

    def _predict(self, num_edges: int, levels: Levels, num_parts: int, clusters: int, pairs: int) -> Prediction:
        """Returns the predicted memory and time.

        Memory is the graph, unless read from files, and arrays over nodes, plus the maximum of clusters, pair table and METIS.
        METIS stores each pair as two entries of 16 bytes at each of its levels. It halves the clusters until 30 are left for each
        part.
        """
        num_nodes, num_entries, fewer = levels.nodes[0], levels.entries[0], pairs / FEWER_PAIRS
        max_pairs = most_pairs(int(num_nodes))
        num_pairs = min(fewer, max_pairs)
        table = 12 * PairCounts.slots(max_pairs) + 24 * min(fewer, PairCounts.ROOM * max_pairs)
        metis = num_pairs * (16 + 32 * (0.94 * np.log2(max(2, clusters / (30 * num_parts)))))
        needed = max(38 * num_nodes + 4 * ENTRIES, 28 * num_nodes + table, 32 * num_nodes + metis)
        if self._work is None:
            needed = max(needed + 4 * num_entries + 8 * num_nodes, BUILDING * (num_edges + 2 * num_nodes))
        return Prediction("streaming", int(needed), NODE_S * num_nodes + ENTRY_S * num_entries + PAIR_S * num_pairs)

    def candidates(self, edge_index: NDArray[np.integer], num_nodes: int, groups: Groups, seed: int) -> Candidates:
        blocks = self._blocks(edge_index, num_nodes)
        weights = np.ones((num_nodes, 2), np.int32)
        weights[:, 1] = in_degrees(edge_index, num_nodes)
        return streaming_candidates(blocks, weights, groups, seed)

    def _blocks(self, edge_index: NDArray[np.integer], num_nodes: int) -> RowBlocks:
        """Returns the neighbors in both directions."""
        if self._work is None:
            graph = Adjacency.of(edge_index, num_nodes)
            return RowBlocks(((graph.indptr, graph.indices),))
        found, out = [InEdges.sorted_in(self._work, edge_index, num_nodes, self._memory)], self._work / "out"
        if not is_symmetric(edge_index):
            out.mkdir(exist_ok=True)
            with writing(self._work.parent), progress_bar("Sorting edges by source", 2 * edge_index.shape[1]) as advance:
                found.append(InEdges.sorted_in(out, edge_index[::-1], num_nodes, self._memory, advance))
        return _Watched(tuple((each.indptr, each.source) for each in found))


@dataclass(frozen=True)
class _Watched(RowBlocks):
    """Blocks with a progress bar for each pass."""

    passes: Iterator[int] = field(default_factory=lambda: count(1))

    def __iter__(self) -> Iterator[Block]:
        entries = sum(len(indices) for _, indices in self.rows)
        with progress_bar(f"Partitioning, pass {next(self.passes)}", entries) as advance:
            for block in super().__iter__():
                yield block
                advance(len(block[2]))


def streaming_candidates(blocks: RowBlocks, weights: NDArray[np.int32], groups: Groups, seed: int) -> Candidates:
    """Yields assignments by :mod:`~lightning_gnn.extensions.graph_files.partitioner`, with tight and loose balance of edges.

    A part has at most 1.1 times the mean number of nodes (1.3 for the second). In-edges are limited by `EDGE_BOUNDS`, other
    weights by `SHARE_BOUND`. The limit is never below the mean, rounded up, or the heaviest node. The name of an assignment
    states if a limit is exceeded.

    Args:
        blocks: the graph, read up to fourteen times in each of the `CYCLES` of a candidate.
        weights: int32 ``[N, W]``: ones, in-degrees, and other balanced weights.
        groups: parts, by machines.
        seed: seed for ties and METIS.

    Raises:
        MetisUnavailable: if METIS does not support several weights.
    """
    parts = devices(groups)
    machine = np.zeros(len(parts), np.int64)
    for number, each in enumerate(groups):
        machine[devices(each)] = 0 if isinstance(each, int) else number
    mean, heaviest = weights.sum(0, np.int64) / len(parts), weights.max(0, initial=0)
    for bound in EDGE_BOUNDS:
        bounds = np.array([max(bound, 1.1), bound, *[SHARE_BOUND] * (weights.shape[1] - 2)])
        limits = np.maximum(np.maximum(np.floor(bounds * mean), np.ceil(mean)), np.maximum(heaviest, 1)).astype(np.int64)
        part, best_part, best = None, np.empty(0, np.int32), (True, np.inf)
        # The first cycle builds the same clusters for each bound; caching them would take memory all the time.
        for _ in range(CYCLES):
            cluster, coarse = cluster_graph(blocks, weights, len(parts), seed, part)
            by_cluster = np.stack([np.bincount(cluster, each, coarse.num_nodes).astype(int) for each in weights.T], 1)
            part = cut_within(bounds, coarse, groups, by_cluster, seed)[cluster]
            del cluster, coarse, by_cluster
            found = refine_parts(blocks, part, weights, limits, machine, seed)
            now = (found.exceeds(limits), found.after)
            better = now < (best[0], NO_BETTER * best[1])
            if now < best:
                best_part, best = part, now
            if not better or found.after >= WELL_CLUSTERED * found.before:
                break
        yield f"nodes and edges within {bound}{', not kept' if best[0] else ''}", best_part


@compile_loop
def _count_ends(source, target, ends):  # type: ignore[no-untyped-def]
    for edge in range(len(source)):
        ask_for_ends(ends, source, target, edge)
        ends[source[edge]] += 1
        ends[target[edge]] += 1


@compile_loop
def _gather(source, target, of, size, ends, filled, most_nodes, most_ends):  # type: ignore[no-untyped-def]
    """Move one end of each edge to the cluster of the other end, if it has room (Hollocou et al., arXiv:1703.02955).

    The moved end is the one whose cluster has fewer `ends` of edges.
    """
    for edge in range(len(source)):
        ask_for_clusters(filled, size, of, source, target, edge)
        ask_for_ends(ends, source, target, edge)
        node, other = source[edge], target[edge]
        if filled[of[node]] > filled[of[other]]:
            node, other = other, node
        _enter(node, of[other], of, size, ends, filled, most_nodes, most_ends)


@compile_loop
def _gather_single(source, target, of, size, ends, filled, most_nodes, most_ends, waiting, waits):  # type: ignore[no-untyped-def]
    """Join single nodes with a common neighboring cluster: each node joins a node waiting at that cluster, or waits itself."""
    for edge in range(len(source)):
        ask_for_clusters(size, waiting, of, source, target, edge)
        node, other = source[edge], target[edge]
        for _ in range(2):
            own, beside = of[node], of[other]
            if size[own] == 1 and own != beside and not waits[node]:
                found = waiting[beside]
                if found < 0 or not _enter(node, found, of, size, ends, filled, most_nodes, most_ends):
                    waiting[beside], waits[node] = own, True
            node, other = other, node


@compile_loop
def _enter(node, cluster, of, size, ends, filled, most_nodes, most_ends):  # type: ignore[no-untyped-def]
    own = of[node]
    if own == cluster or size[cluster] == 0 or size[cluster] >= most_nodes or filled[cluster] + ends[node] > most_ends:
        return False
    of[node] = cluster
    size[own] -= 1
    size[cluster] += 1
    filled[own] -= ends[node]
    filled[cluster] += ends[node]
    return True
