"""``partition="streaming"``: what it needs, predicted from the graph, and its cuts; N nodes, E directed edges, P parts.

METIS gets a graph of clusters. How many there are, and how many pairs of them are neighbours, is tried: nodes are gathered in
clusters by reading the edges, in memory of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.console import progress_bar
from lightning_gnn.data.store import writing
from lightning_gnn.extensions.graph_files import streaming
from lightning_gnn.extensions.graph_files.in_edges import InEdges, in_degrees, is_symmetric
from lightning_gnn.extensions.graph_files.streaming import Block, Blocks, RowBlocks, cluster_graph, refine_parts
from lightning_gnn.partition.adjacency import Adjacency, ask_for_clusters, ask_for_ends, compiled, edge_pieces
from lightning_gnn.partition.budget import BUILDING, Candidates, Levels, Prediction
from lightning_gnn.partition.edge_cut import EDGE_BOUNDS, SHARE_BOUND, cut_within, devices
from lightning_gnn.partition.layout import Groups

NODE_S, ENTRY_S, PAIR_S = 3.7e-6, 0.49e-6, 3.6e-6
"""CPU seconds per node, entry and pair of clusters, of one balance setting in two cycles, as most graphs take."""

FEWER_PAIRS = 1.2
"""Pairs of clusters of nodes gathered once, over those where label propagation has moved nodes five times."""

CYCLES, WELL_CLUSTERED, NO_BETTER = 3, 0.9, 0.99
"""How often ``"streaming"`` clusters, cuts and moves nodes: again if moves left less than `WELL_CLUSTERED` of the edges that were
cut, as where clusters have nodes of several communities, and less than `NO_BETTER` of the best before. The best is kept."""


def count_clusters(edge_index: NDArray[np.integer], num_nodes: int, num_parts: int) -> tuple[int, int]:
    """Returns how many clusters, each a small share of a part, edges ``[2, E]`` lead to, and how many pairs are neighbours.

    Pairs are estimated as entries of :class:`~lightning_gnn.partition.budget.Levels` are. Takes 32 bytes a node, and reads the
    edges four times.
    """
    shares = num_parts * streaming.CLUSTERS_PER_PART
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
    """The partitioner, see :class:`~lightning_gnn.partition.budget.Partitioner`.

    Args:
        work: of a graph in files, where its in-edges have been sorted: neighbours are read from there; None: of one in memory.
        memory: bytes that sorting out-edges may take beside what grows with nodes.
    """

    settings = len(EDGE_BOUNDS)

    def __init__(self, work: Path | None = None, memory: int = 0) -> None:
        self._work, self._memory = work, memory

    def predict(self, edge_index: NDArray[np.integer], levels: Levels, num_parts: int) -> Prediction:
        clusters = count_clusters(edge_index, int(levels.nodes[0]), num_parts)
        return self._predict(edge_index.shape[1], levels, num_parts, *clusters)

    def at_most(self, num_nodes: int, num_edges: int, num_parts: int) -> Prediction:
        return self._predict(num_edges, Levels.at_most(num_nodes, num_edges), num_parts, num_nodes, num_edges)

    def _predict(self, num_edges: int, levels: Levels, num_parts: int, clusters: int, pairs: int) -> Prediction:
        """Returns what is taken: the graph, if it is not read from files, and arrays of nodes; beside them clusters, or the table
        of pairs, or METIS, which keeps all the pairs it gets, two entries of 16 bytes, at each of its levels: it halves the
        clusters until 30 are left for each part."""
        num_nodes, num_entries, fewer = levels.nodes[0], levels.entries[0], pairs / FEWER_PAIRS
        most = streaming.most_pairs(int(num_nodes))
        kept = min(fewer, most)
        table = 12 * streaming.PairCounts.slots(most) + 24 * min(fewer, streaming.PairCounts.ROOM * most)
        metis = kept * (16 + 32 * (0.94 * np.log2(max(2, clusters / (30 * num_parts)))))
        needed = max(38 * num_nodes + 4 * streaming.ENTRIES, 28 * num_nodes + table, 32 * num_nodes + metis)
        if self._work is None:
            needed = max(needed + 4 * num_entries + 8 * num_nodes, BUILDING * (num_edges + 2 * num_nodes))
        return Prediction("streaming", int(needed), NODE_S * num_nodes + ENTRY_S * num_entries + PAIR_S * kept)

    def candidates(self, edge_index: NDArray[np.integer], num_nodes: int, groups: Groups, seed: int) -> Candidates:
        blocks = self._blocks(edge_index, num_nodes)
        weights = np.ones((num_nodes, 2), np.int32)
        weights[:, 1] = in_degrees(edge_index, num_nodes)
        return streaming_candidates(blocks, weights, groups, seed)

    def _blocks(self, edge_index: NDArray[np.integer], num_nodes: int) -> Blocks:
        """Returns neighbours in both directions."""
        if self._work is None:
            graph = Adjacency.of(edge_index, num_nodes)
            return RowBlocks(((graph.indptr, graph.indices),))
        found, out = [InEdges.sorted_in(self._work, edge_index, num_nodes, self._memory)], self._work / "out"
        if not is_symmetric(edge_index):
            out.mkdir(exist_ok=True)
            with writing(self._work.parent), progress_bar("Sorting edges by source", 2 * edge_index.shape[1]) as told:
                found.append(InEdges.sorted_in(out, edge_index[::-1], num_nodes, self._memory, told))
        return _Watched(tuple((each.indptr, each.source) for each in found))


@dataclass(frozen=True)
class _Watched(RowBlocks):
    """Blocks with a bar for each time that they are read."""

    passes: Iterator[int] = field(default_factory=lambda: count(1))

    def __iter__(self) -> Iterator[Block]:
        entries = sum(len(indices) for _, indices in self.rows)
        with progress_bar(f"Partitioning, pass {next(self.passes)}", entries) as told:
            for block in super().__iter__():
                yield block
                told(len(block[2]))


def streaming_candidates(blocks: Blocks, weights: NDArray[np.int32], groups: Groups, seed: int) -> Candidates:
    """Yields assignments by :mod:`~lightning_gnn.extensions.graph_files.streaming`, with edges balanced tightly and loosely.

    A part holds at most 1.1 times the mean of nodes (1.3 in the second), of in-edges what `EDGE_BOUNDS` allow, of other weights
    `SHARE_BOUND`; or the mean, rounded up, or the heaviest node, if more. Where that could not be kept, the name says so.

    Args:
        blocks: the graph, read up to fourteen times in each of `CYCLES` for a candidate.
        weights: int32 ``[N, W]``: ones, in-degrees, and what else is balanced.
        groups: parts, by machines.
        seed: of ties and of METIS.

    Raises:
        MetisUnavailable: METIS cannot be called with several weights.
    """
    parts = devices(groups)
    machine = np.zeros(len(parts), np.int64)
    for number, each in enumerate(groups):
        machine[devices(each)] = 0 if isinstance(each, int) else number
    mean, heaviest = weights.sum(0, np.int64) / len(parts), weights.max(0, initial=0)
    for bound in EDGE_BOUNDS:
        bounds = np.array([max(bound, 1.1), bound, *[SHARE_BOUND] * (weights.shape[1] - 2)])
        most = np.maximum(np.maximum(np.floor(bounds * mean), np.ceil(mean)), np.maximum(heaviest, 1)).astype(np.int64)
        part, kept, best = None, np.empty(0, np.int32), (True, np.inf)
        # The first cycle makes the same clusters for each bound: kept, they would take memory all the while.
        for _ in range(CYCLES):
            cluster, coarse = cluster_graph(blocks, weights, len(parts), seed, part)
            by_cluster = np.stack([np.bincount(cluster, each, coarse.num_nodes).astype(int) for each in weights.T], 1)
            part = cut_within(bounds, coarse, groups, by_cluster, seed)[cluster]
            del cluster, coarse, by_cluster
            found = refine_parts(blocks, part, weights, most, machine, seed)
            now = (found.over(most), found.after)
            better = now < (best[0], NO_BETTER * best[1])
            if now < best:
                kept, best = part, now
            if not better or found.after >= WELL_CLUSTERED * found.before:
                break
        yield f"nodes and edges within {bound}{', not kept' if best[0] else ''}", kept


@compiled
def _count_ends(source, target, ends):  # type: ignore[no-untyped-def]
    for edge in range(len(source)):
        ask_for_ends(ends, source, target, edge)
        ends[source[edge]] += 1
        ends[target[edge]] += 1


@compiled
def _gather(source, target, of, size, ends, filled, most_nodes, most_ends):  # type: ignore[no-untyped-def]
    """Moves the end of each edge that is in the cluster of fewer `ends` of edges to the other's, where that has room (Hollocou et
    al., arXiv:1703.02955)."""
    for edge in range(len(source)):
        ask_for_clusters(filled, size, of, source, target, edge)
        ask_for_ends(ends, source, target, edge)
        node, other = source[edge], target[edge]
        if filled[of[node]] > filled[of[other]]:
            node, other = other, node
        _join(node, of[other], of, size, ends, filled, most_nodes, most_ends)


@compiled
def _gather_single(source, target, of, size, ends, filled, most_nodes, most_ends, waiting, waits):  # type: ignore[no-untyped-def]
    """Unites nodes that are left alone and have a neighbouring cluster in common: each joins one that waits there, or waits."""
    for edge in range(len(source)):
        ask_for_clusters(size, waiting, of, source, target, edge)
        node, other = source[edge], target[edge]
        for _ in range(2):
            own, beside = of[node], of[other]
            if size[own] == 1 and own != beside and not waits[node]:
                found = waiting[beside]
                if found < 0 or not _join(node, found, of, size, ends, filled, most_nodes, most_ends):
                    waiting[beside], waits[node] = own, True
            node, other = other, node


@compiled
def _join(node, cluster, of, size, ends, filled, most_nodes, most_ends):  # type: ignore[no-untyped-def]
    own = of[node]
    if own == cluster or size[cluster] == 0 or size[cluster] >= most_nodes or filled[cluster] + ends[node] > most_ends:
        return False
    of[node] = cluster
    size[own] -= 1
    size[cluster] += 1
    filled[own] -= ends[node]
    filled[cluster] += ends[node]
    return True
