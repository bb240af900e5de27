"""What partitioners need: memory and seconds, predicted from the graph; which of them fits this machine.

Those of nodes keep the graphs to which they coarsen the one that is cut. How it shrinks differs between graphs of one size by
more than anything else, so it is tried: nodes are matched, and gathered in clusters, by reading the edges, in memory of nodes.
N nodes, E directed edges; entries are those of a symmetric graph: both directions of each edge, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.console import text_table
from lightning_gnn.devices import available_bytes
from lightning_gnn.extensions.graph_files import streaming
from lightning_gnn.extensions.graph_files.in_edges import edge_pieces
from lightning_gnn.extensions.graph_files.streaming import mix
from lightning_gnn.partition import kaminpar
from lightning_gnn.partition.adjacency import ask_for_clusters, ask_for_ends, compiled

SAMPLED = 1 << 18
"""Edges from which entries are estimated by a sample of pairs; below, all are looked at."""

MATCHINGS, FEWEST = 4, 250
"""Levels that are looked at, and the nodes of the last that is reckoned with."""

BUILDING = 8
"""Bytes per directed edge while the symmetric graph is made (:meth:`~lightning_gnn.partition.adjacency.Adjacency.of`)."""

FEWER_PAIRS = 1.2
"""Pairs of clusters of nodes gathered once, over those where label propagation has moved nodes five times."""

CUT_WHOLE = 100_000
"""Nodes up to which KaMinPar cuts the graph itself in blocks, whose edges it copies: fewer than 8,000 are left of so many by its
first clusters, and that is where it begins to have eight parts. Of larger graphs, it cuts coarser ones."""


@dataclass(frozen=True)
class Cost:
    """Of one method, fitted to the peaks beside the edges, and to the CPU seconds, that were measured (docs/numbers.md).

    Attributes:
        node, entry: bytes per node and per entry, of which 4 hold the symmetric graph; in a vertex cut, per directed edge.
        coarse: bytes per entry of the coarser graphs, of all levels together (:meth:`Levels.coarse`).
        node_s, entry_s, coarse_s, pair_s: CPU seconds, with all balance settings tried, the last per pair of clusters; of
            ``"streaming"`` one setting in two cycles, as most graphs take (:data:`~lightning_gnn.partition.edge_cut.CYCLES`).
    """

    node: float = 0
    entry: float = 0
    coarse: float = 0
    node_s: float = 0
    entry_s: float = 0
    coarse_s: float = 0
    pair_s: float = 0


COSTS = {
    "metis": Cost(node=151, entry=34.4, coarse=15.6, node_s=6.5e-6, coarse_s=0.32e-6),
    "kaminpar": Cost(node_s=4.5e-6, coarse_s=0.16e-6),
    "kaminpar_compressed": Cost(node_s=4.5e-6, coarse_s=0.22e-6),
    "streaming": Cost(node_s=3.7e-6, entry_s=0.49e-6, pair_s=3.6e-6),
}
"""From the best cuts to the least memory, the order in which ``"auto"`` tries them. What is in memory when is known of all but
METIS: :func:`_kaminpar`, :func:`_streaming`."""

VERTEX_CUTS = {
    "ne": Cost(node=34, entry=17.7, node_s=1e-6, entry_s=0.25e-6),
    "ebv": Cost(node=8, entry=13, node_s=0.3e-6, entry_s=0.05e-6),
    "streaming": Cost(node=57, entry=0.8, node_s=0.1e-6, entry_s=0.29e-6),
}
"""Of partitioners of edges, in the order of ``"auto"``. What ``"streaming"`` takes, masters take after all."""

SETS = 3
"""Sets of parts that vertex cuts keep of each node, of one bit a part: those that hold it, read it and add to it."""


@dataclass(frozen=True)
class Prediction:
    """What a method would take beside the edges.

    Attributes:
        method: as in ``partition=``.
        bytes: of memory at its peak.
        seconds: of one core.
        installed: whether its package is there.
    """

    method: str
    bytes: int
    seconds: float
    installed: bool = True

    def fits(self, free: int | None) -> bool:
        """Returns whether `free` bytes are enough; unknown memory is."""
        return self.installed and (free is None or self.bytes <= free)


@dataclass(frozen=True)
class Levels:
    """How a graph shrinks while partitioners coarsen it.

    Attributes:
        nodes, entries: of each level, the graph first, down to `FEWEST` nodes; entries are those of the symmetric graph there.
        clusters, pairs: of clusters that are each a small share of a part, as ``"streaming"`` makes them: how many, and how many
            pairs of them are neighbours.
    """

    nodes: tuple[float, ...]
    entries: tuple[float, ...]
    clusters: float = 0
    pairs: float = 0

    @classmethod
    def of(cls, edge_index: NDArray[np.integer], num_nodes: int, num_parts: int) -> Levels:
        """Returns the levels of edges ``[2, E]``: the first `MATCHINGS` by matching nodes along the edges as they come, the
        others as the last two lead on.

        Entries and pairs are estimated, if there are more than `SAMPLED` edges, by distinct pairs among those whose hash falls
        into a sample. Takes 32 bytes a node, and reads the edges 2 `MATCHINGS` + 5 times.
        """
        clusters, pairs = cls._gathered(edge_index, num_nodes, num_parts)
        return replace(cls._matched(edge_index, num_nodes), clusters=clusters, pairs=pairs)

    @classmethod
    def _gathered(cls, edge_index: NDArray[np.integer], num_nodes: int, num_parts: int) -> tuple[int, int]:
        shares = num_parts * streaming.CLUSTERS_PER_PART
        most_nodes, most_ends = max(1, num_nodes // shares), max(1, 2 * edge_index.shape[1] // shares)
        ends, of, size = (
            np.zeros(num_nodes, np.int64),
            np.arange(num_nodes, dtype=np.int32),
            np.ones(num_nodes, np.int32),
        )
        for _, source, target in edge_pieces(edge_index):
            _count_ends(source, target, ends)
        filled, alone = ends.copy(), np.count_nonzero(ends == 0)
        for _, source, target in edge_pieces(edge_index):
            _gather(source, target, of, size, ends, filled, most_nodes, most_ends)
        waiting, waits = np.full(num_nodes, -1, np.int32), np.zeros(num_nodes, np.bool_)
        for _, source, target in edge_pieces(edge_index):
            _gather_single(source, target, of, size, ends, filled, most_nodes, most_ends, waiting, waits)
        del filled, ends, waiting, waits
        pairs = cls._count_pairs(edge_index, of, np.zeros(num_nodes, np.int32))
        return int(np.count_nonzero(size) - alone), pairs

    @staticmethod
    def _count_pairs(edge_index: NDArray[np.integer], of: NDArray[np.int32], mate: NDArray[np.int32]) -> int:
        """Returns how many pairs of groups of nodes have edges; matches those groups whose `mate` is -1."""
        share = max(1, edge_index.shape[1] // SAMPLED)
        pieces = [_match(source, target, of, mate, share) for _, source, target in edge_pieces(edge_index)]
        keys = np.concatenate([np.empty(0, np.uint64), *pieces])
        keys.sort()  # np.unique takes six times as long
        return share * (min(1, len(keys)) + int(np.count_nonzero(keys[1:] != keys[:-1])))

    @classmethod
    def _matched(cls, edge_index: NDArray[np.integer], num_nodes: int) -> Levels:
        of, nodes, entries = np.arange(num_nodes, dtype=np.int32), [num_nodes], list[int]()
        while True:
            mate = np.full(nodes[-1], -1, np.int32)
            entries.append(2 * cls._count_pairs(edge_index, of, mate))
            if len(entries) > MATCHINGS or nodes[-1] <= FEWEST or not entries[-1]:
                return cls(tuple(nodes), tuple(entries))._led_on()
            waiting = np.full(nodes[-1], -1, np.int32)
            for _, source, target in edge_pieces(edge_index):
                _match_over_two(source, target, of, mate, waiting)
            del waiting
            nodes.append(_merge(mate, of))

    @classmethod
    def at_most(cls, num_nodes: int, num_edges: int) -> Levels:
        """Returns levels none of which has fewer entries than that of any graph with so many edges."""
        levels = cls((num_nodes, num_nodes / 2), (2.0 * num_edges, 2.0 * num_edges))._led_on()
        return replace(levels, clusters=num_nodes, pairs=num_edges)

    def _led_on(self) -> Levels:
        nodes, entries = [*self.nodes], [*self.entries]
        if len(nodes) > 1:
            fewer, less = min(0.9, nodes[-1] / nodes[-2]), entries[-1] / max(1, entries[-2])
            while nodes[-1] > FEWEST:
                nodes.append(nodes[-1] * fewer)
                entries.append(min(entries[-1] * less, nodes[-1] ** 2))
        return Levels(tuple(nodes), tuple(entries))

    def coarse(self) -> float:
        """Returns the entries of all levels that METIS makes beside the graph: it is as if it stopped at a 125th of the nodes."""
        least = max(self.nodes[0] / 125, FEWEST)
        return sum(entries for before, entries in zip(self.nodes, self.entries[1:]) if before > least)

    def kept_pairs(self) -> float:
        """Returns how many pairs of clusters METIS gets under ``"streaming"``."""
        return min(self.pairs / FEWER_PAIRS, streaming.most_pairs(int(self.nodes[0])))


def predict(method: str, num_edges: int, levels: Levels, num_parts: int, in_files: bool = False) -> Prediction:
    """Returns what `method`, one of `COSTS`, takes for a graph of so many directed edges that shrinks by these levels.

    Of a graph `in_files`, ``"streaming"`` reads the edges from there.
    """
    cost, num_nodes, num_entries, coarse = COSTS[method], levels.nodes[0], levels.entries[0], levels.coarse()
    seconds = cost.node_s * num_nodes + cost.entry_s * num_entries
    seconds += cost.coarse_s * coarse + cost.pair_s * levels.kept_pairs()
    if method == "streaming":
        needed = _streaming(levels, num_parts, in_files)
    elif method in kaminpar.METHODS:
        needed = _kaminpar(levels, method == "kaminpar_compressed")
    else:
        needed = cost.node * num_nodes + cost.entry * num_entries + cost.coarse * coarse
    building = 0 if in_files and method == "streaming" else BUILDING * (num_edges + 2 * num_nodes)
    installed = method not in kaminpar.METHODS or kaminpar.is_installed()
    return Prediction(method, int(max(needed, building)), seconds, installed)


def _kaminpar(levels: Levels, compressed: bool) -> float:
    """Returns the bytes of KaMinPar, of which the wheels have ids of 8 bytes.

    Beside the symmetric graph, weights and parts it keeps its own graph, and first the file from which this is read, then what
    it cuts with: tables of fixed size, clusters and coarser graphs, of 16 bytes an entry or more, and copies of blocks. Cutting
    is fitted. Of the entries that matchings leave, label propagation leaves about all in large graphs, fewer in small ones.
    """
    num_nodes, num_entries = levels.nodes[0], max(1, levels.entries[0])
    coarser = levels.entries[min(3, len(levels.entries) - 1)]
    held, file = 4 * num_entries + 48 * num_nodes, 4 * num_entries + 16 * num_nodes
    own = 1.25 * num_entries + 34 * num_nodes if compressed else 8 * num_entries + 24 * num_nodes
    share = min(1, CUT_WHOLE / max(1, num_nodes))
    blocks = (79 * num_nodes + 10.6 * (num_entries - coarser)) * share**2
    small = 5e6 + 187 * num_nodes * coarser / num_entries + 4.1 * coarser + blocks
    large = (1 - share) * (5e6 + 30 * num_nodes + 19.5 * coarser)
    return held + own + max(file, small, large)


def _streaming(levels: Levels, num_parts: int, in_files: bool) -> float:
    """Returns the bytes of ``"streaming"``: the graph, if not `in_files`, and arrays of nodes; beside them clusters, or the table
    of pairs, or METIS, which keeps all the pairs it gets, two entries of 16 bytes, at each of its levels: it halves the clusters
    until 30 are left for each part.
    """
    num_nodes, kept, pairs = levels.nodes[0], streaming.most_pairs(int(levels.nodes[0])), levels.pairs / FEWER_PAIRS
    table = 12 * streaming.PairCounts.slots(kept) + 24 * min(pairs, streaming.PairCounts.ROOM * kept)
    halvings = 0.94 * np.log2(max(2, levels.clusters / (30 * num_parts)))
    metis = levels.kept_pairs() * (16 + 32 * halvings)
    graph = 0 if in_files else 4 * levels.entries[0] + 8 * num_nodes
    return graph + max(38 * num_nodes + 4 * streaming.ENTRIES, 28 * num_nodes + table, 32 * num_nodes + metis)


def most_seconds(method: str, num_nodes: int, num_edges: int, num_parts: int) -> float | None:
    """Returns the CPU seconds that a method takes at most, as predicted without a look at the edges; None if it takes few."""
    method = method.removesuffix("_masks").removesuffix("_cover")
    if method not in COSTS or not num_nodes:
        return None
    return predict(method, num_edges, Levels.at_most(num_nodes, num_edges), num_parts).seconds


def predictions(
    edge_index: NDArray[np.integer], num_nodes: int, num_parts: int, in_files: bool = False
) -> list[Prediction]:
    """Returns what each of `COSTS` takes for edges ``[2, E]``, in the order of ``"auto"``."""
    levels = Levels.of(edge_index, num_nodes, num_parts)
    return [predict(method, edge_index.shape[1], levels, num_parts, in_files) for method in COSTS]


def edge_predictions(edge_index: NDArray[np.integer], num_nodes: int, num_parts: int) -> list[Prediction]:
    """Returns what each of `VERTEX_CUTS` takes for edges ``[2, E]``, in the order of ``"auto"``.

    Edges that are not int64, as in files, are copied for all but ``"streaming"``.
    """
    num_edges, sets = edge_index.shape[1], SETS * -(-num_parts // 8) * num_nodes
    copied = 0 if edge_index.dtype == np.int64 else 16 * num_edges
    masters, result = VERTEX_CUTS["streaming"], []
    for method, cost in VERTEX_CUTS.items():
        cutting = cost.node * num_nodes + cost.entry * num_edges + (copied if cost is not masters else 0)
        needed = sets + max(cutting, masters.node * num_nodes + masters.entry * num_edges)
        result.append(Prediction(method, int(needed), cost.node_s * num_nodes + cost.entry_s * num_edges))
    return result


def choose(found: Sequence[Prediction], free: int | None) -> Prediction:
    """Returns the first that fits.

    Raises:
        MemoryError: none does.
    """
    for each in found:
        if each.fits(free):
            return each
    least = min((each for each in found if each.installed), key=lambda each: each.bytes)
    assert free is not None
    raise MemoryError(
        f"No partitioner fits: {least.method!r} needs the least, about {least.bytes / 1e9:.1f} GB beside the edges, and "
        f'{free / 1e9:.1f} GB are free. Use partition="random", or partition elsewhere and pass what came out, '
        "partition=array."
    )


def check_metis(edge_index: NDArray[np.int64], num_nodes: int, num_parts: int) -> None:
    """Raises MemoryError if METIS needs more than is free for edges ``[2, E]``, and says what would fit."""
    free, num_edges = available_bytes(), edge_index.shape[1]
    most = predict("metis", num_edges, Levels.at_most(num_nodes, num_edges), num_parts)
    if most.fits(free):
        return  # however many edges have their reverse beside them, and however badly the graph shrinks
    found = predictions(edge_index, num_nodes, num_parts)
    needed = found[0]
    if needed.fits(free) or free is None:
        return
    others = ", ".join(f'"{each.method}" ({each.bytes / 1e9:.1f} GB)' for each in found[1:] if each.fits(free))
    raise MemoryError(
        f"METIS needs about {needed.bytes / 1e9:.1f} GB for {num_edges:,} edges, and {free / 1e9:.1f} GB are free. "
        + (
            f'Use partition="auto"; these fit: {others}. '
            if others
            else 'None of the others fits. Use partition="random". '
        )
        + "Or partition elsewhere and pass the rank of every node, partition=array."
        + ("" if kaminpar.is_installed() else f" More may fit with KaMinPar ({kaminpar.INSTALL}).")
    )


def table(found: Sequence[Prediction], free: int | None, taken: str | None) -> Table:
    """Returns the predictions as a table, a row per method; `taken` is marked."""
    result = text_table("partition", "memory", "seconds", "fits", "", title="Partitioners, predicted", left=1)
    for each in found:
        fits = "not installed" if not each.installed else "yes" if each.fits(free) else "no"
        mark = "taken" if each.method == taken else ""
        result.add_row(each.method, f"{each.bytes / 1e9:,.2f} GB", f"{each.seconds:,.1f}", fits, mark)
    known = "not known" if free is None else f"{free / 1e9:,.2f} GB"
    result.caption = f"memory beside the edges, of which free: {known}; seconds of one core"
    return result


@compiled
def _match(source, target, of, mate, share):  # type: ignore[no-untyped-def]
    """Matches clusters along edges; returns the pairs of clusters whose hash is among a `share` of all, each once per edge."""
    keys, found, most = np.empty(len(source), np.uint64), 0, np.uint64(2**64 - 1) // np.uint64(share)
    for edge in range(len(source)):
        ask_for_clusters(mate, mate, of, source, target, edge)
        one, other = np.int64(of[source[edge]]), np.int64(of[target[edge]])
        if one == other:
            continue
        if mate[one] < 0 and mate[other] < 0:
            mate[one], mate[other] = other, one
        key = np.uint64((min(one, other) << 32) | max(one, other))
        if mix(key) <= most:
            keys[found] = key
            found += 1
    return keys[:found].copy()


@compiled
def _match_over_two(source, target, of, mate, waiting):  # type: ignore[no-untyped-def]
    """Matches clusters that are left and have a neighbour in common, as METIS does (two hops)."""
    for edge in range(len(source)):
        ask_for_clusters(mate, waiting, of, source, target, edge)
        one, other = of[source[edge]], of[target[edge]]
        for _ in range(2):
            if mate[one] < 0 and one != other:
                found = waiting[other]
                if found >= 0 and found != one and mate[found] < 0:
                    mate[one], mate[found] = found, one
                else:
                    waiting[other] = one
            one, other = other, one


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
def _gather_single(  # type: ignore[no-untyped-def]
    source, target, of, size, ends, filled, most_nodes, most_ends, waiting, waits
):
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


@compiled
def _merge(mate, of):  # type: ignore[no-untyped-def]
    """Numbers matched pairs and what is single anew, in place; returns how many there are."""
    count = 0
    for each in range(len(mate)):  # the partner's new number stands where it is named: -2 - number
        other = mate[each]
        if other <= -2:
            continue
        mate[each] = -2 - count
        if other >= 0:
            mate[other] = -2 - count
        count += 1
    for node in range(len(of)):
        of[node] = -2 - mate[of[node]]
    return count
