"""What partitioners of nodes need: memory and seconds, predicted from the graph's size; which of them fits this machine.

N nodes, E directed edges, S entries of the symmetric graph that is cut: both directions of each edge, once.
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
from lightning_gnn.partition.streaming import mix

SAMPLED = 1 << 22
"""Edges from which S is estimated by a sample of pairs; below, all are looked at."""

BUILDING = 8
"""Bytes per directed edge while the symmetric graph is made (:meth:`~lightning_gnn.partition.adjacency.Adjacency.of`)."""


@dataclass(frozen=True)
class Cost:
    """Of one method, beside the edges, fitted to the peaks and CPU seconds of graphs without much structure, 8 to 40 entries per
    node (docs/numbers.md): graphs that shrink well while they are coarsened take less, down to half.

    Attributes:
        base: bytes, whatever the graph.
        node, entry: bytes per node and per entry, of which 4 hold the symmetric graph.
        node_s, entry_s: CPU seconds, with all balance settings tried.
    """

    base: float
    node: float
    entry: float
    node_s: float
    entry_s: float


COSTS = {
    "metis": Cost(0, 515, 115, 3e-6, 2e-6),
    "kaminpar": Cost(24e6, 199, 20, 5e-6, 0.3e-6),
    "kaminpar_compressed": Cost(26e6, 209, 12.5, 7e-6, 0.4e-6),
    "streaming": Cost(0, 60, 4, 2e-6, 0.2e-6),
}
"""From the best cuts to the least memory, the order in which ``"auto"`` tries them."""

VERTEX_CUTS = {
    "ne": Cost(0, 60, 20, 1e-6, 0.2e-6),
    "ebv": Cost(0, 60, 13, 0.5e-6, 0.05e-6),
    "streaming": Cost(0, 60, 1, 0.5e-6, 0.05e-6),
}
"""Of partitioners of edges, per node and directed edge, with masters; 1 byte of an edge is its rank."""

SETS = 3
"""Sets of parts that vertex cuts keep of each node, of one bit a part: those that hold it, read it and add to it."""

PAIR = 150
"""Bytes per pair of clusters that ``"streaming"`` keeps, most of them METIS's: 106 to 180 measured."""


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


def count_entries(edge_index: NDArray[np.int64]) -> int:
    """Returns S, of more than `SAMPLED` edges an estimate: distinct pairs among those whose hash falls into a sample."""
    share = max(1, edge_index.shape[1] // SAMPLED)
    keys = _sampled_pairs(np.ascontiguousarray(edge_index[0]), np.ascontiguousarray(edge_index[1]), share)
    return 2 * share * len(np.unique(keys))


def predict(method: str, num_nodes: int, num_edges: int, num_entries: int, in_files: bool = False) -> Prediction:
    """Returns what `method`, one of `COSTS`, takes for a graph of so many nodes, directed edges, and entries.

    Of a graph `in_files`, ``"streaming"`` reads the edges from there.
    """
    cost = COSTS[method]
    needed = cost.base + cost.node * num_nodes + cost.entry * num_entries
    seconds = cost.node_s * num_nodes + cost.entry_s * num_entries
    if method == "streaming":
        pairs = min(num_entries / 2, max(streaming.LEAST_PAIRS, streaming.PAIRS_PER_NODE * num_nodes))
        needed += PAIR * pairs
    building = BUILDING * (num_edges + 2 * num_nodes)
    if method == "streaming" and in_files:
        needed, building = needed - cost.entry * num_entries, 0
    installed = method not in kaminpar.METHODS or kaminpar.is_installed()
    return Prediction(method, int(max(needed, building)), seconds, installed)


def predictions(edge_index: NDArray[np.int64], num_nodes: int, in_files: bool = False) -> list[Prediction]:
    """Returns what each of `COSTS` takes for edges ``[2, E]``, in the order of ``"auto"``."""
    entries = count_entries(edge_index)
    return [predict(method, num_nodes, edge_index.shape[1], entries, in_files) for method in COSTS]


def edge_predictions(edge_index: NDArray[np.integer], num_nodes: int, num_parts: int) -> list[Prediction]:
    """Returns what each of `VERTEX_CUTS` takes for edges ``[2, E]``, in the order of ``"auto"``.

    Edges that are not int64, as in files, are copied for all but ``"streaming"``.
    """
    num_edges, sets = edge_index.shape[1], SETS * -(-num_parts // 8)
    result = []
    for method, cost in VERTEX_CUTS.items():
        copied = 0 if method == "streaming" or edge_index.dtype == np.int64 else 16
        needed = cost.base + (cost.node + sets) * num_nodes + (cost.entry + copied) * num_edges
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


def check_metis(edge_index: NDArray[np.int64], num_nodes: int) -> None:
    """Raises MemoryError if METIS needs more than is free for edges ``[2, E]``, and says what would fit."""
    free, num_edges = available_bytes(), edge_index.shape[1]
    most = predict("metis", num_nodes, num_edges, 2 * num_edges)
    if most.fits(free):
        return  # whatever share of the edges has its reverse beside it
    found = predictions(edge_index, num_nodes)
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
def _sampled_pairs(source, target, share):  # type: ignore[no-untyped-def]
    """Returns the undirected pairs of edges whose hash is 0 modulo `share`, each as often as it is there; no self-loops."""
    keys = np.empty(len(source) if share == 1 else 0, np.uint64)
    found = 0
    for count in range(2 if share > 1 else 1):  # counts, then fills
        keys = np.empty(found, np.uint64) if count else keys
        found = 0
        for edge in range(len(source)):
            one, other = source[edge], target[edge]
            if one == other:
                continue
            key = np.uint64((min(one, other) << 32) | max(one, other))
            if share == 1 or mix(key) % np.uint64(share) == 0:
                if found < len(keys):
                    keys[found] = key
                found += 1
    return keys[:found]
