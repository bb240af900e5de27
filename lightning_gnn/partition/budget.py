"""Predicted memory and seconds of partitioners, and selection of a partitioner that fits this machine.

Node partitioners store the coarse graphs of the graph to partition. How the graph shrinks differs most between graphs of equal
size, so it is simulated: nodes are matched by reading the edges, with memory for nodes only.

N nodes, E directed edges; entries are the entries of a symmetric graph: both directions of each edge, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.console import text_table
from lightning_gnn.devices import available_bytes
from lightning_gnn.partition import kaminpar
from lightning_gnn.partition.adjacency import ask_for_clusters, compile_loop, edge_pieces, mix
from lightning_gnn.partition.layout import KAMINPAR, Groups
from lightning_gnn.registry import partitioners

SAMPLED = 1 << 18
"""Number of edges from which entries are estimated by a sample of pairs; below it, all pairs are counted."""

MATCHINGS, FEWEST = 4, 250
"""Number of simulated levels, and number of nodes of the last level in the prediction."""

BUILDING = 8
"""Bytes per directed edge during construction of the graph (:meth:`~lightning_gnn.partition.adjacency.Adjacency.of`)."""

CUT_WHOLE = 100_000
"""Number of nodes up to which KaMinPar partitions the graph itself in blocks, whose edges it copies.

Its first clusters leave fewer than 8,000 of these nodes, where it begins to have eight parts. It partitions coarse graphs of
larger graphs.
"""


@dataclass(frozen=True)
class Cost:
    """Cost coefficients of a method, fitted to measured CPU seconds and memory peaks (partitioning-benchmarks.md).

    Attributes:
        node, entry: bytes per node and per entry, including 4 for the symmetric graph; in a vertex cut, per directed edge.
        coarse: bytes per entry of the coarse graphs of all levels together (:meth:`Levels.coarse`).
        node_s, entry_s, coarse_s: CPU seconds, with all balance settings.
    """

    node: float = 0
    entry: float = 0
    coarse: float = 0
    node_s: float = 0
    entry_s: float = 0
    coarse_s: float = 0


COSTS = {
    "metis": Cost(node=151, entry=34.4, coarse=15.6, node_s=6.5e-6, coarse_s=0.32e-6),
    "kaminpar": Cost(node_s=4.5e-6, coarse_s=0.16e-6),
    "kaminpar_compressed": Cost(node_s=4.5e-6, coarse_s=0.22e-6),
}
"""Cost coefficients in the order of ``"auto"``: from the best cuts to the least memory.

:data:`~lightning_gnn.registry.PARTITIONERS` follow in this order.

For all methods but METIS, :func:`_kaminpar` computes memory from the contents at each time.
"""


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a partitioning method.

    Attributes:
        method: method name, as in ``partition=``.
        bytes: peak memory in bytes, without the edges.
        seconds: seconds on one core.
        installed: whether its package is installed.
    """

    method: str
    bytes: int
    seconds: float
    installed: bool = True

    def fits(self, free: int | None) -> bool:
        """Returns whether `free` bytes are enough; None, for unknown memory, is enough."""
        return self.installed and (free is None or self.bytes <= free)


@dataclass(frozen=True)
class Levels:
    """Sizes of a graph during coarsening.

    Attributes:
        nodes: number of nodes of each level, the graph first, down to `FEWEST`.
        entries: number of entries of the symmetric graph of each level.
    """

    nodes: tuple[float, ...]
    entries: tuple[float, ...]

    @staticmethod
    def count_pairs(edge_index: NDArray[np.integer], of: NDArray[np.int32], mate: NDArray[np.int32]) -> int:
        """Returns the number of pairs of node groups with edges, and matches groups whose `mate` is -1."""
        share = max(1, edge_index.shape[1] // SAMPLED)
        pieces = [_match(source, target, of, mate, share) for _, source, target in edge_pieces(edge_index)]
        keys = np.concatenate([np.empty(0, np.uint64), *pieces])
        keys.sort()  # np.unique takes six times as long
        return share * (min(1, len(keys)) + int(np.count_nonzero(keys[1:] != keys[:-1])))

    @classmethod
    def of(cls, edge_index: NDArray[np.integer], num_nodes: int) -> Levels:
        """Returns the levels of edges ``[2, E]``: `MATCHINGS` simulated levels, and extrapolated levels.

        Nodes are matched along the edges in their order; later levels extrapolate the last two. With more than `SAMPLED` edges,
        entries are estimated by distinct pairs whose hash is in a sample. Reads the edges 2 `MATCHINGS` + 1 times.
        """
        of, nodes, entries = np.arange(num_nodes, dtype=np.int32), [num_nodes], list[int]()
        while True:
            mate = np.full(nodes[-1], -1, np.int32)
            entries.append(2 * cls.count_pairs(edge_index, of, mate))
            if len(entries) > MATCHINGS or nodes[-1] <= FEWEST or not entries[-1]:
                return cls(tuple(nodes), tuple(entries))._led_on()
            waiting = np.full(nodes[-1], -1, np.int32)
            for _, source, target in edge_pieces(edge_index):
                _match_over_two(source, target, of, mate, waiting)
            del waiting
            nodes.append(_merge(mate, of))

    @classmethod
    def upper_bound(cls, num_nodes: int, num_edges: int) -> Levels:
        """Returns levels with at least as many entries as the levels of any graph with `num_edges` edges."""
        return cls((num_nodes, num_nodes / 2), (2.0 * num_edges, 2.0 * num_edges))._led_on()

    def _led_on(self) -> Levels:
        nodes, entries = [*self.nodes], [*self.entries]
        if len(nodes) > 1:
            fewer, less = min(0.9, nodes[-1] / nodes[-2]), entries[-1] / max(1, entries[-2])
            while nodes[-1] > FEWEST:
                nodes.append(nodes[-1] * fewer)
                entries.append(min(entries[-1] * less, nodes[-1] ** 2))
        return Levels(tuple(nodes), tuple(entries))

    def coarse(self) -> float:
        """Returns the entries of METIS's coarse graphs of all levels; METIS behaves as if it stopped at 1/125 of the nodes."""
        least = max(self.nodes[0] / 125, FEWEST)
        return sum(entries for before, entries in zip(self.nodes, self.entries[1:]) if before > least)


Candidates = Iterator[tuple[str, NDArray[np.int32]]]
"""Assignments under balance settings, the cheapest first: description of the balance, and owner of each node, ``[N]``."""


class Partitioner(Protocol):
    """Interface of node partitioners in the registry, see :data:`~lightning_gnn.registry.PARTITIONERS`."""

    settings: int
    """Maximum number of balance settings that it tries."""

    def predict(self, edge_index: NDArray[np.integer], levels: Levels, num_parts: int) -> Prediction:
        """Returns its predicted cost for edges ``[2, E]`` with these levels."""

    def upper_bound(self, num_nodes: int, num_edges: int, num_parts: int) -> Prediction:
        """Returns an upper bound of its cost for graphs of this size."""

    def candidates(self, edge_index: NDArray[np.integer], num_nodes: int, groups: Groups, seed: int) -> Candidates:
        """Yields assignments of the nodes of edges ``[2, E]``."""


def predict(method: str, num_edges: int, levels: Levels) -> Prediction:
    """Returns the predicted memory and time of a partitioner.

    Args:
        method: partitioner, a key of `COSTS`.
        num_edges: directed edges of the graph.
        levels: sizes of the graph and of its coarser versions.
    """
    cost, num_nodes, num_entries, coarse = COSTS[method], levels.nodes[0], levels.entries[0], levels.coarse()
    seconds = cost.node_s * num_nodes + cost.entry_s * num_entries + cost.coarse_s * coarse
    if method in KAMINPAR:
        needed = _kaminpar(levels, method == "kaminpar_compressed")
    else:
        needed = cost.node * num_nodes + cost.entry * num_entries + cost.coarse * coarse
    installed = method not in KAMINPAR or kaminpar.is_installed()
    return Prediction(method, int(max(needed, BUILDING * (num_edges + 2 * num_nodes))), seconds, installed)


def _kaminpar(levels: Levels, compressed: bool) -> float:
    """Returns the bytes of KaMinPar, whose wheels have 8-byte ids.

    Besides the symmetric graph, weights and parts, it stores its own graph. In addition, it first has the file from which it
    reads the graph. Later it has its working memory: tables of fixed size, clusters and coarse graphs, of 16 bytes per entry or
    more, and copies of blocks. The working memory is fitted. Label propagation leaves about all entries that matchings leave in
    large graphs, fewer in small graphs.
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


def most_seconds(method: str, num_nodes: int, num_edges: int, num_parts: int, plugin: Partitioner | None = None) -> float | None:
    """Returns an upper bound of a method's CPU seconds, without reading the edges; None for fast methods.

    Args:
        method: method name.
        num_nodes, num_edges, num_parts: size of the graph and number of ranks.
        plugin: partitioner that implements `method`, if it is not one of `COSTS`.
    """
    method = method.removesuffix("_masks").removesuffix("_cover")
    if not num_nodes:
        return None
    if plugin is not None:
        return plugin.upper_bound(num_nodes, num_edges, num_parts).seconds
    return predict(method, num_edges, Levels.upper_bound(num_nodes, num_edges)).seconds if method in COSTS else None


def predictions(
    edge_index: NDArray[np.integer], num_nodes: int, num_parts: int, plugins: Mapping[str, Partitioner] | None = None
) -> list[Prediction]:
    """Returns the predicted cost of each of `COSTS` and of `plugins` for edges ``[2, E]``, in the order of ``"auto"``.

    `plugins` are by default the registry's partitioners.
    """
    levels = Levels.of(edge_index, num_nodes)
    found = [predict(method, edge_index.shape[1], levels) for method in COSTS]
    return [*found, *(each.predict(edge_index, levels, num_parts) for each in (plugins or partitioners()).values())]


def choose(costs: Sequence[Prediction], free: int | None) -> Prediction:
    """Returns the first prediction that fits.

    Raises:
        MemoryError: no prediction fits.
    """
    for cost in costs:
        if cost.fits(free):
            return cost
    least = min((cost for cost in costs if cost.installed), key=lambda cost: cost.bytes)
    assert free is not None
    raise MemoryError(
        f"No partitioner fits: {least.method!r} needs the least, about {least.bytes / 1e9:.1f} GB in addition to the "
        f'edges, and {free / 1e9:.1f} GB are free. Use partition="random", or partition elsewhere and pass the result, '
        "partition=array."
    )


def check_metis(edge_index: NDArray[np.int64], num_nodes: int, num_parts: int) -> None:
    """Raises MemoryError if METIS needs more than the free memory for edges ``[2, E]``; the message lists alternatives."""
    free, num_edges = available_bytes(), edge_index.shape[1]
    most = predict("metis", num_edges, Levels.upper_bound(num_nodes, num_edges))
    if most.fits(free):
        return  # for any number of reversed edges, and any coarsening
    found = predictions(edge_index, num_nodes, num_parts)
    needed = found[0]
    if needed.fits(free) or free is None:
        return
    others = ", ".join(f'"{each.method}" ({each.bytes / 1e9:.1f} GB)' for each in found[1:] if each.fits(free))
    raise MemoryError(
        f"METIS needs about {needed.bytes / 1e9:.1f} GB for {num_edges:,} edges, and {free / 1e9:.1f} GB are free. "
        + (f'Use partition="auto"; these fit: {others}. ' if others else 'Only partition="random" fits. ')
        + "Or partition elsewhere and pass the rank of every node, partition=array."
        + ("" if kaminpar.is_installed() else f" KaMinPar may need less ({kaminpar.INSTALL}).")
    )


def table(costs: Sequence[Prediction], free: int | None, method: str | None) -> Table:
    """Returns the predictions as a table with a row per method; `method` is marked."""
    result = text_table("partition", "memory", "seconds", "fits", "", title="Partitioners, predicted", num_left=1)
    for each in costs:
        fits = "not installed" if not each.installed else "yes" if each.fits(free) else "no"
        mark = "taken" if each.method == method else ""
        result.add_row(each.method, f"{each.bytes / 1e9:,.2f} GB", f"{each.seconds:,.1f}", fits, mark)
    known = "not known" if free is None else f"{free / 1e9:,.2f} GB"
    result.caption = f"memory in addition to the edges (free: {known}); seconds of one core"
    return result


@compile_loop
def _match(source, target, of, mate, share):  # type: ignore[no-untyped-def]
    """Match clusters along edges; returns pairs of clusters whose hash is in a sample of 1 / `share`, once per edge."""
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


@compile_loop
def _match_over_two(source, target, of, mate, waiting):  # type: ignore[no-untyped-def]
    """Match unmatched clusters with a common neighbor, as METIS does (two-hop matching)."""
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


@compile_loop
def _merge(mate, of):  # type: ignore[no-untyped-def]
    """Renumber matched pairs and single clusters in place; returns their number."""
    count = 0
    for each in range(len(mate)):  # the partner's new number is stored as -2 - number
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
