"""Vertex cuts: who holds which edge, and who of those that hold a node's edges is its master.

Edges are divided among ranks, and nodes are not, so that graphs with hubs balance too: a node has a replica wherever it has an
edge.
Every method is deterministic, and so are masters. Methods:

``"ebv"``: Zhang et al., *An efficient and balanced graph partition algorithm for the subgraph-centric programming model* (EBV):
    edges in ascending order of the sum of their ends' degrees, each to the rank of the least sum of new replicas and loads; with
    hosts, CDFGNN section 6, equation 24, which counts replicas on new hosts too.
``"random"``: every edge on its own.
``"streaming"``: 2PS-L, Mayer, Orujzade and Jacobsen, ICDE'22 (arXiv:2203.12721): clusters of bounded volume by reading the edges
    twice, parts of clusters, then edges in two readings, each to a part of one of its ends' clusters. Linear in the edges,
    whatever P, and beside them in memory of nodes only; edges may lie in files.
``"ne"``: neighbourhood expansion, Zhang et al., KDD'17, with hubs as in HEP (Mayer and Jacobsen, SIGMOD'21), whose edges are
    streamed afterwards as by EBV. Parts grow in turns, the one of the least load next. The fewest replicas by far where a graph
    has any structure, for more time and memory.
``"hdrf"``, ``"dbh"``, ``"grid"`` and ``"dne"``, to compare with, are described in the modules of ``baselines/``.

N nodes, E edges, P ranks, B blocks of eight lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.console import progress_bar, text_table
from lightning_gnn.devices import available_bytes
from lightning_gnn.extensions.graph_files.in_edges import counts_of, in_degrees
from lightning_gnn.partition.adjacency import edge_pieces
from lightning_gnn.partition.budget import Cost, Prediction, choose
from lightning_gnn.partition.edge_cut import spread_masks
from lightning_gnn.partition.layout import Groups, devices
from lightning_gnn.partition.metrics import Counts, balance
from lightning_gnn.partition.shard import Ids, ShortIds
from lightning_gnn.registry import baseline_cutter
from lightning_gnn.strategies.vertex_cut import loops

Parts = NDArray[np.unsignedinteger]
Degrees = NDArray[np.int32]
Sets = NDArray[np.uint8]

METHODS = ("auto", "ebv", "hdrf", "dbh", "grid", "random", "ne", "dne", "streaming")

MOST_PARTS = 1 << loops.LANE_BITS
"""A score's last bits name one of so many."""

EDGE_BOUND = 1.045
"""The most edges of a part over the average, in expansion; with 1 all parts get as many, whatever their rows. Those between hubs,
which are streamed, come on top (cnr-2000: 1.046). It is the aim for what masters bring, too: their in-edges, and their number."""

TURNS = 32
"""Of a part in neighbourhood expansion: more balance rows better, at more replicas (ego-Twitter: RF 1.21 for 1, 1.44 for 32)."""

STREAM_BOUND, CLUSTER_READINGS, CLUSTER_SHARE = 1.05, 2, 0.125
"""Of ``"streaming"`` and ``"hdrf"``: the most edges of a part over the average. Of ``"streaming"``: how often edges are read for
clusters; and how much of a part's volume is in one at most. With all of it, hubs of R-MAT fill parts, whose other edges go
anywhere: RF 4.0, not 2.7."""

VERTEX_CUTS = {
    "ne": Cost(node=34, entry=17.7, node_s=1e-6, entry_s=0.25e-6),
    "ebv": Cost(node=8, entry=13, node_s=0.3e-6, entry_s=0.05e-6),
    "streaming": Cost(node=57, entry=0.8, node_s=0.1e-6, entry_s=0.29e-6),
}
"""Of partitioners of edges, in the order of ``"auto"``. What ``"streaming"`` takes, masters take after all."""

SETS = 3
"""Sets of parts that vertex cuts keep of each node, of one bit a part: those that hold it, read it and add to it."""

READINGS = {"ne": 1, "streaming": CLUSTER_READINGS + 2}
"""How often each edge is told of to a progress bar; of other methods, which are one call, never."""

HUB = 100
"""Over the mean degree: expansion does not read the rows of such nodes. Reading all, cnr-2000 has RF 1.18, not 1.06."""


@dataclass(frozen=True)
class VertexCutReport:
    """Counts per rank, ``[P]`` each; rows are those of one layer and direction.

    A rank reads a node if it holds an edge from it, and adds to it if it holds an edge to it. The node's master sends a copy to
    every other rank that reads it; every other rank that adds to it sends the master a partial sum.

    Attributes:
        masters: nodes whose master the rank is.
        replicas: rows that it holds: of nodes with an edge here, and those it is the master of.
        edges: edges that it holds: what it computes.
        in_edges: of the nodes whose master it is: what it loads, and computes where a conv reads them at the master.
        copies: rows that it receives, as it reads them.
        partials: rows that it sends, as it adds to them.
        inner, outer: rows that it sends to ranks of its host and of others, copies and partial sums (CDFGNN Table 3: the most).
    """

    masters: Counts
    replicas: Counts
    edges: Counts
    in_edges: Counts
    copies: Counts
    partials: Counts
    inner: Counts
    outer: Counts

    @property
    def replication_factor(self) -> float:
        """Rows that all ranks hold over the nodes (CDFGNN section 6)."""
        return int(self.replicas.sum()) / max(1, int(self.masters.sum()))

    @property
    def edge_balance(self) -> float:
        """Largest rank's edges over the average (CDFGNN section 6: edge imbalance factor)."""
        return balance(self.edges)

    @property
    def loaded_balance(self) -> float:
        """Largest rank's in-edges over the average: of what ranks load."""
        return balance(self.in_edges)

    @property
    def replica_balance(self) -> float:
        """Largest rank's rows over the average (CDFGNN section 6: vertex imbalance factor)."""
        return balance(self.replicas)

    @property
    def master_balance(self) -> float:
        """Largest rank's masters over the average: of the dense work."""
        return balance(self.masters)

    @property
    def sent_balance(self) -> float:
        """Largest rank's sent rows over the average."""
        return balance(self.inner + self.outer)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VertexCutReport:
        return cls(*(np.asarray(values[each.name], np.int64) for each in fields(cls)))

    def as_dict(self) -> dict[str, Any]:
        derived = ("replication_factor", *(f"{name}_balance" for name in ("edge", "loaded", "replica", "master", "sent")))
        counts = {name: values.tolist() for name, values in vars(self).items()}
        return counts | {name: getattr(self, name) for name in derived}

    def table(self) -> Table:
        heads = (
            "masters",
            "rows held",
            "computed edges",
            "loaded edges",
            "copies received",
            "partial sums sent",
            "sent inside",
            "between hosts",
        )
        table = text_table("part", *heads, title="Vertex cut", left=0)
        for part, row in enumerate(zip(*vars(self).values())):
            table.add_row(str(part), *(f"{value:,}" for value in row))
        table.caption = (
            f"replication {self.replication_factor:.2f}, heaviest part / average: computed edges {self.edge_balance:.2f}, "
            f"loaded edges {self.loaded_balance:.2f}, rows held {self.replica_balance:.2f}, masters {self.master_balance:.2f}, "
            f"sent {self.sent_balance:.2f}"
        )
        return table


report_of = VertexCutReport.from_dict


@dataclass(frozen=True)
class Ends:
    """Which ranks hold an edge from each node, and which one to it: bits, uint8 ``[N, P / 8]`` each, rounded up."""

    reads: Sets
    adds: Sets

    @classmethod
    def of(cls, edge_index: NDArray[np.integer], part: NDArray[np.integer], num_nodes: int, num_parts: int) -> Ends:
        """Returns the ends of edges ``[2, E]`` that the ranks `part` ``[E]`` hold."""
        found = cls(*(np.zeros((num_nodes, -(-num_parts // 8)), np.uint8) for _ in range(2)))
        for begin, source, target in edge_pieces(edge_index):
            loops.ends(source, target, part[begin : begin + len(source)], found.reads, found.adds)
        return found


def vertex_cut_report(
    edge_index: NDArray[np.integer],
    part: NDArray[np.integer],
    master: NDArray[np.integer],
    num_parts: int,
    host: NDArray[np.integer] | None = None,
    ends: Ends | None = None,
) -> VertexCutReport:
    """Returns the report of an assignment of edges and masters to ranks.

    Args:
        edge_index: int64 ``[2, E]``, source and target.
        part: rank of each edge, ``[E]``.
        master: rank of each node, ``[N]``.
        host: of each rank, ``[P]``; None if all ranks share one.
        ends: those of this assignment, where they are known.
    """
    if ends is None:
        ends = Ends.of(edge_index, part, len(master), num_parts)
    host = np.zeros(num_parts, np.int64) if host is None else np.asarray(host, np.int64)
    replicas, copies, partials, inner, outer = loops.traffic(ends.reads, ends.adds, master, host)
    masters, edges = (counts_of(each, num_parts) for each in (master, part))
    in_edges = np.bincount(master, in_degrees(edge_index, len(master)), num_parts).astype(np.int64)
    return VertexCutReport(masters, replicas, edges, in_edges, copies, partials, inner, outer)


@dataclass(frozen=True)
class EdgeAssignment:
    """Who holds which edge.

    Attributes:
        part: rank of every edge, uint8 ``[E]``, or uint16 for more than 256 ranks.
        master: rank of every node, int32 ``[N]``: one that holds an edge of it if it has any and no mask needed it elsewhere.
        method: one of `METHODS`, for ``"auto"`` the one that was taken; or ``"given"``.
        report: its quality.
    """

    part: Parts
    master: NDArray[np.int32]
    method: str
    report: VertexCutReport


def assign_edges(
    edge_index: NDArray[np.integer],
    num_nodes: int,
    num_parts: int,
    method: str | NDArray[np.integer] = "ebv",
    *,
    groups: Groups | None = None,
    host_weight: float = 0.1,
    seed: int = 0,
    masks: Mapping[str, NDArray[np.bool_]] | None = None,
    part: Parts | None = None,
) -> EdgeAssignment:
    """Returns a rank for every edge and a master for every node.

    Each directed edge is assigned on its own. Masters are chosen so that few rows are sent, and each rank sends and owns about as
    many as the others, and as many in-edges: those are what it loads. Nodes without edges even out what is owned.

    Args:
        edge_index: int64 or int32 ``[2, E]``, source and target; self-loops and duplicates may be among them. It may
            be memory-mapped.
        method: one of `METHODS`, see the head of this module; ``"auto"`` is the first of ``"ne"``, ``"ebv"`` and ``"streaming"``
            whose predicted memory is free (:mod:`~lightning_gnn.partition.budget`); or the rank of every edge, ``[E]``, taken as
            it is.
        groups: ranks by host, the outermost level: ``((0, 1), (2, 3))``; None for one host.
        host_weight: what a replica on a new host counts beside one on a new rank, the paper's gamma; from 0, which ignores hosts,
            to 1. Looked at by ``"ebv"``, the streamed part of ``"ne"``, and the choice of masters.
        seed: of ``"random"``, ``"dbh"``, ``"grid"``, ``"streaming"`` and ``"dne"``.
        masks: bool ``[N]`` each; every rank gets to be the master of a node of each mask that has at least P.
        part: where ranks of edges are written, ``[E]`` as :func:`part_dtype` says, such as a file's memory map.

    Raises:
        ValueError: an unknown method, fewer edges than ranks, nodes beyond N, groups that do not fit, a weight out of range.
        MemoryError: under ``"auto"``, none fits.
    """
    _check(edge_index, num_nodes, num_parts, method, host_weight)
    hosts = _hosts(groups, num_parts)
    if part is None:
        part = np.empty(edge_index.shape[1], part_dtype(num_parts))
    if not isinstance(method, str):
        part[:], method = method, "given"
    else:
        found = edge_predictions(edge_index, num_nodes, num_parts)
        if method == "auto":
            method = choose(found, available_bytes()).method
        total = READINGS[method] * edge_index.shape[1] if method in READINGS else None
        expected = next((each.seconds for each in found if each.method == method), None)
        with progress_bar(f"Partitioning ({method})", total, expected=expected) as told:
            cut_edges(edge_index, num_nodes, hosts, method, host_weight, seed, part, told)
    ends = Ends.of(edge_index, part, num_nodes, num_parts)
    host = np.empty(num_parts, np.int64)
    for number, ranks in enumerate(hosts):
        host[ranks] = number
    master = np.empty(num_nodes, np.int32)
    in_degree = in_degrees(edge_index, num_nodes)
    largest_first = np.argsort(-in_degree, kind="stable")
    loops.elect(ends.reads, ends.adds, in_degree, largest_first, host, host_weight, EDGE_BOUND, master)
    master = spread_masks(master, num_parts, masks or {})
    report = vertex_cut_report(edge_index, part, master, num_parts, host, ends)
    return EdgeAssignment(part, master, method, report)


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


def part_dtype(num_parts: int) -> np.dtype[np.unsignedinteger]:
    """Returns the type of ranks of edges: uint8, or uint16 for more than 256 parts."""
    return np.min_scalar_type(num_parts - 1)


def cut_edges(
    edge_index: NDArray[np.integer],
    num_nodes: int,
    hosts: list[list[int]],
    method: str,
    host_weight: float = 0.1,
    seed: int = 0,
    part: Parts | None = None,
    told: Callable[[int], None] = lambda _: None,
) -> Parts:
    """Returns a rank for every edge, written to `part` if given, from the ranks of each host; :func:`assign_edges` checks
    arguments and elects masters. `told` is told of edges, for a progress bar, see `READINGS`."""
    num_parts = sum(map(len, hosts))
    if part is None:
        part = np.empty(edge_index.shape[1], part_dtype(num_parts))
    if method == "streaming":
        _two_phases(edge_index, num_nodes, num_parts, seed, part, told)
        return part
    source, target = (np.ascontiguousarray(ends, np.int64) for ends in edge_index)
    if method in ("ebv", "ne"):
        lanes = Lanes.of(hosts if host_weight > 0 else [list(range(num_parts))], num_nodes, len(source), host_weight)
        if method == "ebv":
            degree, everything = degrees(source, target, num_nodes), np.empty(0, np.bool_)
            _stream(source, target, degree, everything, lanes, lanes.no_load(), lanes.no_holders(num_nodes), part)
        else:
            _expansion(source, target, num_nodes, lanes, part, told)
    elif method == "random":
        part[:] = np.random.default_rng(seed).integers(0, num_parts, len(source), part.dtype)
    else:
        baseline_cutter(method)(source, target, num_nodes, num_parts, seed, part)
    return part


def _check(
    edge_index: NDArray[np.integer], num_nodes: int, num_parts: int, method: str | NDArray[np.integer], host_weight: float
) -> None:
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(
            f"A vertex cut is made by one of {', '.join(map(repr, METHODS))}, or given as the rank of every edge "
            f"(got {method!r})."
        )
    if num_parts < 1:
        raise ValueError(f"A vertex cut needs at least one part (got {num_parts}).")
    if num_parts > MOST_PARTS:
        raise ValueError(f"A vertex cut has at most {MOST_PARTS} parts (got {num_parts}).")
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype not in (np.int64, np.int32):
        raise ValueError(
            f"edge_index must be int64 or int32 of shape [2, E] (got {edge_index.dtype} of {list(edge_index.shape)})."
        )
    num_edges = edge_index.shape[1]
    if not isinstance(method, str):
        if method.shape != (num_edges,):
            raise ValueError(
                f"A vertex cut gives a rank to each of {num_edges} edges (got shape {list(method.shape)}); an edge cut "
                "gives one to each node."
            )
        if num_edges and (method.min() < 0 or method.max() >= num_parts):
            raise ValueError(
                f"The cut names ranks {method.min()} to {method.max()}, but there are {num_parts}: 0 to {num_parts - 1}."
            )
    if num_parts > num_edges:
        raise ValueError(
            f"A vertex cut gives each part edges, and the graph has {num_edges} for {num_parts} parts. "
            + (f"Use at most {num_edges} parts." if num_edges else "Use a strategy with an edge cut, such as 'dgcl'.")
        )
    low, high = edge_index.min(), edge_index.max()
    if low < 0 or high >= num_nodes:
        raise ValueError(f"Edges name nodes {low} to {high}, but there are {num_nodes}: 0 to {num_nodes - 1}.")
    if not 0 <= host_weight <= 1:
        raise ValueError(f"host_weight must be from 0, which ignores hosts, to 1 (got {host_weight}).")


def _hosts(groups: Groups | None, num_parts: int) -> list[list[int]]:
    if groups is None:
        return [list(range(num_parts))]
    hosts = [devices(group) for group in groups]
    if sorted(rank for host in hosts for rank in host) != list(range(num_parts)):
        raise ValueError(f"Groups must name the parts 0 to {num_parts - 1}, each once (got {groups}).")
    if len({len(host) for host in hosts}) > 1:
        raise ValueError(
            f"Groups side by side must hold equally many parts (got {groups}). "
            "Take the same number of each machine, or cut without groups."
        )
    return hosts


@dataclass(frozen=True)
class Lanes:
    """How ranks lie in blocks of eight lanes, and what equation 24 charges there, in fixed point.

    Hosts of up to eight ranks share blocks, and a table for the sets of eight lanes knows them; larger ones fill several.

    Attributes:
        rank: of each lane, -1 for none, ``[8 B]``.
        blocks_per_host: 1, or more for hosts of more than eight ranks.
        penalty: int64 ``[256, 8]``, see :func:`~lightning_gnn.strategies.vertex_cut.loops.ebv`.
        host_penalty: that of a host of several blocks.
        edge_step, replica_step: what an edge and a replica add to the load of their rank.
    """

    rank: NDArray[np.int64]
    blocks_per_host: int
    penalty: NDArray[np.int64]
    host_penalty: int
    edge_step: int
    replica_step: int

    @classmethod
    def of(cls, hosts: list[list[int]], num_nodes: int, num_edges: int, host_weight: float) -> Lanes:
        size, num_parts = len(hosts[0]), len(hosts) * len(hosts[0])
        share = max(1, 8 // size)  # hosts of a block
        blocks_per_host = -(-size // 8)
        rows = [list(chain(*hosts[first : first + share])) for first in range(0, len(hosts), share)]
        rank = np.full((len(rows), 8 * blocks_per_host), -1)
        for row, ranks in zip(rank, rows):
            row[: len(ranks)] = ranks
        if rank.size > MOST_PARTS:  # with gaps
            raise ValueError(
                f"{len(hosts)} hosts of {size} parts are too many: those of up to 8 share eights, others take a multiple of 8, "
                f"and there are {MOST_PARTS} in all. Use host_weight=0."
            )
        if len(hosts) == 1:
            host_weight = 0.0
        sets = np.arange(256)[:, None] >> np.arange(8) & 1 == 1
        host = np.arange(8) // size
        host_has = (sets[:, :, None] & (host[:, None] == host)).any(1)
        on_rank, on_host = (round(weight * loops.ONE) << loops.LANE_BITS for weight in (1 - host_weight, host_weight))
        return cls(
            rank=rank.ravel(),
            blocks_per_host=blocks_per_host,
            penalty=~sets * np.int64(on_rank) + ~host_has * np.int64(on_host if blocks_per_host == 1 else 0),
            host_penalty=on_host,
            edge_step=round(loops.ONE * num_parts / num_edges) << loops.LANE_BITS,
            replica_step=round(loops.ONE * num_parts / num_nodes) << loops.LANE_BITS,
        )

    def no_holders(self, num_nodes: int) -> Sets:
        """Returns empty sets of lanes, uint8 ``[N, B]``."""
        return np.zeros((num_nodes, len(self.rank) // 8), np.uint8)

    def no_load(self) -> Ids:
        """Returns the loads of lanes before the first edge, int64 ``[8 B]``."""
        return np.where(self.rank < 0, loops.NEVER, 0) + np.arange(len(self.rank))


def _stream(
    source: Ids, target: Ids, degree: Degrees, chosen: NDArray[np.bool_], lanes: Lanes, load: Ids, held: Sets, part: Parts
) -> None:
    """Writes the ranks of the chosen edges, to parts that have these loads and hold these nodes already."""
    number = int(chosen.sum()) if len(chosen) else len(source)
    pairs = np.empty((number, 2), _smallest_integers(len(degree)))
    order = np.empty(number, _smallest_integers(len(source)))
    loops.by_degree_sum(source, target, degree, chosen, pairs, order)
    steps = lanes.edge_step, lanes.replica_step
    penalties = lanes.penalty, lanes.blocks_per_host, lanes.host_penalty
    loops.ebv(pairs, order, *penalties, load, *steps, lanes.rank, held, part)


def _expansion(source: Ids, target: Ids, num_nodes: int, lanes: Lanes, part: Parts, told: Callable[[int], None]) -> None:
    num_edges = len(source)
    degree = degrees(source, target, num_nodes)
    indptr, neighbour, edge_of = incidence(source, target, degree)
    num_free, end = np.diff(indptr).astype(np.int32), indptr[1:].copy()
    hub = degree > HUB * degree.mean()
    free, held = np.ones(num_edges, np.bool_), lanes.no_holders(num_nodes)
    ranks = [(lane, rank) for lane, rank in enumerate(lanes.rank.tolist()) if rank >= 0]
    slice_of_edges = num_edges // (TURNS * len(ranks)) + 1
    most = -(-int(EDGE_BOUND * num_edges) // len(ranks))
    edges, nodes = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    growing = list(ranks)
    while growing:
        chosen = min(growing, key=lambda each: edges[each] * num_nodes + nodes[each] * num_edges)  # EBV's balance terms
        budget = min(slice_of_edges, most - edges[chosen])
        more = loops.expand(indptr, end, neighbour, edge_of, hub, num_free, budget, *chosen, free, part, held)
        edges[chosen] += more[0]
        nodes[chosen] += more[1]
        told(int(more[0]))
        if more[0] < budget:
            break
        if edges[chosen] == most:
            growing.remove(chosen)
    del neighbour, edge_of
    load = lanes.no_load()
    for each in ranks:
        load[each[0]] += edges[each] * lanes.edge_step + nodes[each] * lanes.replica_step
    _stream(source, target, degree, free, lanes, load, held, part)


def _two_phases(
    edge_index: NDArray[np.integer], num_nodes: int, num_parts: int, seed: int, part: Parts, told: Callable[[int], None]
) -> None:
    degree = degrees(edge_index[0], edge_index[1], num_nodes)
    of, volume = np.arange(num_nodes, dtype=np.int32), degree.astype(np.int64)
    share = edge_index.shape[1] / num_parts
    for _ in range(CLUSTER_READINGS):
        for _, source, target in edge_pieces(edge_index):
            loops.cluster(source, target, degree, int(CLUSTER_SHARE * 2 * share), of, volume)
            told(len(source))
    clusters, home = np.flatnonzero(volume), np.zeros(num_nodes, np.int32)
    loops.schedule(clusters[np.argsort(-volume[clusters], kind="stable")], volume, num_parts, home)
    del clusters
    held, load = np.zeros((num_nodes, -(-num_parts // 8)), np.uint8), np.zeros(num_parts, np.int64)
    most = ceil(STREAM_BOUND * share)
    for between in (False, True):
        for first, source, target in edge_pieces(edge_index):
            piece = part[first : first + len(source)]
            loops.two_phases(source, target, between, degree, of, volume, home, most, seed, load, held, piece)
            told(len(source))


def incidence(source: Ids, target: Ids, degree: Degrees) -> tuple[Ids, NDArray[Any], NDArray[Any]]:
    """Returns where each node's entries begin, ``[N + 1]``, and the other end and the edge of each; a self-loop has one."""
    entries = degree - np.bincount(source[source == target], minlength=len(degree))
    indptr = np.concatenate([[0], np.cumsum(entries, dtype=np.int64)])
    neighbour, edge_of = (np.empty(indptr[-1], _smallest_integers(max(len(source), len(degree)))) for _ in range(2))
    loops.incidence(source, target, indptr, neighbour, edge_of)
    return indptr, neighbour, edge_of


def _smallest_integers(number: int) -> type[np.signedinteger]:
    """Returns the type of ids below `number`: half the memory where 32 bits do."""
    return np.int32 if number <= np.iinfo(np.int32).max else np.int64


def degrees(source: ShortIds, target: ShortIds, num_nodes: int) -> Degrees:
    """Returns how many edges begin or end at each node, int32 ``[N]``; a self-loop does both."""
    return (counts_of(source, num_nodes) + counts_of(target, num_nodes)).astype(np.int32)
