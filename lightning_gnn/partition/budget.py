"""What partitioners need: memory and seconds, predicted from the graph; which of them fits this machine.

Those of nodes keep the graphs to which they coarsen the one that is cut. How it shrinks differs between graphs of one size by
more than anything else, so it is tried: nodes are matched by reading the edges, in memory of nodes.
N nodes, E directed edges; entries are those of a symmetric graph: both directions of each edge, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.console import text_table
from lightning_gnn.devices import available_bytes
from lightning_gnn.partition import kaminpar, streaming
from lightning_gnn.partition.adjacency import compiled
from lightning_gnn.partition.in_edges import edge_pieces
from lightning_gnn.partition.streaming import mix

SAMPLED = 1 << 18
"""Edges from which entries are estimated by a sample of pairs; below, all are looked at."""

MATCHINGS, FEWEST = 4, 250
"""Levels that are looked at, and the nodes of the last that is reckoned with."""

BUILDING = 8
"""Bytes per directed edge while the symmetric graph is made (:meth:`~lightning_gnn.partition.adjacency.Adjacency.of`)."""


@dataclass(frozen=True)
class Cost:
    """Of one method, beside the edges, fitted to the peaks and CPU seconds that were measured (docs/numbers.md).

    Attributes:
        base: bytes, whatever the graph.
        node, entry: bytes per node and per entry, of which 4 hold the symmetric graph; in a vertex cut, per directed edge.
        coarse: bytes per entry of the coarser graphs, of all levels together (:meth:`Levels.coarse`).
        node_s, entry_s, coarse_s: CPU seconds, with all balance settings tried.
    """

    base: float = 0
    node: float = 0
    entry: float = 0
    coarse: float = 0
    node_s: float = 0
    entry_s: float = 0
    coarse_s: float = 0


COSTS = {
    "metis": Cost(node=90, entry=37, coarse=17.5, node_s=5e-6, coarse_s=0.27e-6),
    "kaminpar": Cost(5.5e6, node=208, entry=14, coarse=1.6, node_s=3e-6, coarse_s=0.13e-6),
    "kaminpar_compressed": Cost(3.7e6, node=208, entry=10, coarse=1.6, node_s=3e-6, coarse_s=0.18e-6),
    "streaming": Cost(3e6, node=70, entry=3.2, node_s=1.6e-6, coarse_s=0.1e-6),
}
"""From the best cuts to the least memory, the order in which ``"auto"`` tries them."""

VERTEX_CUTS = {
    "ne": Cost(node=34, entry=17.7, node_s=1e-6, entry_s=0.14e-6),
    "ebv": Cost(node=8, entry=13, node_s=0.3e-6, entry_s=0.05e-6),
    "streaming": Cost(node=57, entry=0.8, node_s=0.1e-6, entry_s=0.07e-6),
}
"""Of partitioners of edges, in the order of ``"auto"``. What ``"streaming"`` takes, masters take after all."""

SETS = 3
"""Sets of parts that vertex cuts keep of each node, of one bit a part: those that hold it, read it and add to it."""

PAIR = 123
"""Bytes per pair of clusters that ``"streaming"`` keeps, most of them METIS's."""


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
    """

    nodes: tuple[float, ...]
    entries: tuple[float, ...]

    @classmethod
    def of(cls, edge_index: NDArray[np.integer], num_nodes: int) -> Levels:
        """Returns the levels of edges ``[2, E]``: the first `MATCHINGS` by matching nodes along the edges as they come, the
        others as the last two lead on.

        Entries are estimated, if there are more than `SAMPLED` edges, by distinct pairs among those whose hash falls into a
        sample. Takes 12 bytes a node, and reads the edges 2 `MATCHINGS` + 1 times.
        """
        share = max(1, edge_index.shape[1] // SAMPLED)
        of, nodes, entries = np.arange(num_nodes, dtype=np.int32), [num_nodes], list[int]()
        while True:
            mate = np.full(nodes[-1], -1, np.int32)
            keys = [_match(source, target, of, mate, share) for _, source, target in edge_pieces(edge_index)]
            entries.append(2 * share * len(np.unique(np.concatenate([np.empty(0, np.uint64), *keys]))))
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
        """Returns the entries of all levels that METIS makes beside the graph: it stops at about a sixtieth of the nodes."""
        return sum(
            entries for before, entries in zip(self.nodes, self.entries[1:]) if before > max(self.nodes[0] / 60, FEWEST)
        )

    def entries_at(self, nodes: float) -> float:
        """Returns the entries of a level of so many nodes."""
        known, entries = (np.log(np.maximum(1, np.array(each[::-1], float))) for each in (self.nodes, self.entries))
        return float(np.exp(np.interp(np.log(max(1, nodes)), known, entries)))


def predict(method: str, num_edges: int, levels: Levels, num_parts: int, in_files: bool = False) -> Prediction:
    """Returns what `method`, one of `COSTS`, takes for a graph of so many directed edges that shrinks by these levels.

    Of a graph `in_files`, ``"streaming"`` reads the edges from there.
    """
    cost, num_nodes, num_entries, coarse = COSTS[method], levels.nodes[0], levels.entries[0], levels.coarse()
    needed = cost.base + cost.node * num_nodes + cost.entry * num_entries + cost.coarse * coarse
    seconds = cost.node_s * num_nodes + cost.entry_s * num_entries + cost.coarse_s * coarse
    building = BUILDING * (num_edges + 2 * num_nodes)
    if method == "streaming":
        pairs = levels.entries_at(streaming.CLUSTERS_PER_PART * num_parts) / 2
        needed += PAIR * min(pairs, max(streaming.LEAST_PAIRS, streaming.PAIRS_PER_NODE * num_nodes))
        if in_files:
            needed, building = needed - cost.entry * num_entries, 0
    installed = method not in kaminpar.METHODS or kaminpar.is_installed()
    return Prediction(method, int(max(needed, building)), seconds, installed)


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
    levels = Levels.of(edge_index, num_nodes)
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
    """Matches clusters along edges; returns the pairs of clusters whose hash is 0 modulo `share`, each once per edge."""
    keys, found = np.empty(len(source) // share + 1, np.uint64), 0
    for edge in range(len(source)):
        one, other = np.int64(of[source[edge]]), np.int64(of[target[edge]])
        if one == other:
            continue
        if mate[one] < 0 and mate[other] < 0:
            mate[one], mate[other] = other, one
        key = np.uint64((min(one, other) << 32) | max(one, other))
        if share == 1 or mix(key) % np.uint64(share) == 0:
            if found == len(keys):
                keys = np.concatenate((keys, np.empty_like(keys)))
            keys[found] = key
            found += 1
    return keys[:found].copy()


@compiled
def _match_over_two(source, target, of, mate, waiting):  # type: ignore[no-untyped-def]
    """Matches clusters that are left and have a neighbour in common, as METIS does (two hops)."""
    for edge in range(len(source)):
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
