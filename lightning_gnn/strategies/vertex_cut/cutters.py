"""Vertex cuts: the rank of each edge, and the master of each node.

Edges are divided between ranks, and nodes are not, so that graphs with hubs are balanced too. A node has a replica on each rank
that has an edge of it. All methods and the choice of masters are deterministic. Methods:

``"ebv"``: Zhang et al., *An efficient and balanced graph partition algorithm for the subgraph-centric programming model* (EBV).
Edges in ascending order of the sum of their ends' degrees, each to the rank with the lowest sum of new replicas and loads. With
hosts: CDFGNN section 6, equation 24, which also counts replicas on new hosts.

``"random"``: each edge to a random rank.

``"streaming"``: 2PS-L, Mayer, Orujzade and Jacobsen, ICDE'22 (arXiv:2203.12721). Two readings of the edges form clusters of
bounded volume, which are assigned to partitions. Two more readings assign each edge to a partition of one of its ends' clusters.
The time is linear in the edges, independent of P. Memory depends on the nodes only, plus the result; edges may be in files.

``"ne"``: neighborhood expansion, Zhang et al., KDD'17, with hubs as in HEP (Mayer and Jacobsen, SIGMOD'21). Edges between hubs
are streamed afterwards as in EBV. Partitions grow in turns; the one with the lowest load is next. By far the fewest replicas on
graphs with any structure, for more time and memory.

``"hdrf"``, ``"dbh"``, ``"grid"`` and ``"dne"``, for comparison: see the modules of ``baselines/``.

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
"""Maximum number of partitions: the values of a score's last bits."""

EDGE_BOUND = 1.045
"""Maximum edges of a partition in expansion, relative to the mean.

With 1, all partitions have equal numbers of edges, regardless of their rows. Edges between hubs, which are streamed, are not
included (cnr-2000: 1.046). It is also the target for the number of masters and for their in-edges.
"""

TURNS = 32
"""Turns of a partition in neighborhood expansion. More turns balance rows better, with more replicas.

ego-Twitter: replication factor 1.21 for 1 turn, 1.44 for 32.
"""

STREAM_BOUND, CLUSTER_READINGS, CLUSTER_SHARE = 1.05, 2, 0.125
"""Constants of ``"streaming"``; the first is used by ``"hdrf"`` too.

- Maximum edges of a partition, relative to the mean.
- Number of readings that form clusters.
- Maximum share of a partition's volume in one cluster. With a share of 1, hubs of R-MAT fill partitions, and the other edges go
  to arbitrary partitions: replication factor 4.0, not 2.7.
"""

VERTEX_CUTS = {
    "ne": Cost(node=34, entry=17.7, node_s=1e-6, entry_s=0.25e-6),
    "ebv": Cost(node=8, entry=13, node_s=0.3e-6, entry_s=0.05e-6),
    "streaming": Cost(node=57, entry=0.8, node_s=0.1e-6, entry_s=0.29e-6),
}
"""Costs of the partitioners of edges, in the order of ``"auto"``. Choosing masters needs as much memory as ``"streaming"``."""

SETS = 3
"""Number of bit sets of partitions per node: partitions that have it, read it and add to it."""

READINGS = {"ne": 1, "streaming": CLUSTER_READINGS + 2}
"""Number of times that each edge is reported to a progress bar. Other methods are a single call and report nothing."""

HUB = 100
"""Minimum degree of a hub, relative to the mean. Expansion does not read the adjacency lists of hubs.

If it reads them all, cnr-2000 has a replication factor of 1.18, not 1.06.
"""


@dataclass(frozen=True)
class VertexCutReport:
    """Counts per rank, ``[P]`` each; rows are counted for one layer and direction.

    A rank reads a node if it has an edge from it, and adds to it if it has an edge to it. The node's master sends its features to
    every other rank that reads it. Every other rank that adds to it sends a partial sum to the master.

    Attributes:
        masters: nodes whose master is the rank.
        replicas: rows that it stores: nodes with an edge here, and its masters.
        edges: edges that it computes.
        in_edges: in-edges of its masters, which it loads; it computes them for convs that need all edges at the master.
        copies: features that it receives for nodes that it reads.
        partials: partial sums that it sends.
        inner, outer: rows that it sends to ranks of its host and of other hosts: features and partial sums (CDFGNN Table 3: the
            maximum).
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
        """Rows of all ranks divided by the number of nodes (CDFGNN section 6)."""
        return int(self.replicas.sum()) / max(1, int(self.masters.sum()))

    @property
    def edge_balance(self) -> float:
        """Computed edges of the heaviest rank divided by the mean (CDFGNN section 6: edge imbalance factor)."""
        return balance(self.edges)

    @property
    def loaded_balance(self) -> float:
        """Loaded edges of the heaviest rank divided by the mean."""
        return balance(self.in_edges)

    @property
    def replica_balance(self) -> float:
        """Rows of the heaviest rank divided by the mean (CDFGNN section 6: vertex imbalance factor)."""
        return balance(self.replicas)

    @property
    def master_balance(self) -> float:
        """Masters of the heaviest rank divided by the mean: the balance of dense layers."""
        return balance(self.masters)

    @property
    def sent_balance(self) -> float:
        """Sent rows of the heaviest rank divided by the mean."""
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
        table = text_table("part", *heads, title="Vertex cut", num_left=0)
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
    """Ranks with an edge from each node, and ranks with an edge to it: bits, uint8 ``[N, ceil(P / 8)]`` each."""

    reads: Sets
    adds: Sets

    @classmethod
    def of(cls, edge_index: NDArray[np.integer], part: NDArray[np.integer], num_nodes: int, num_parts: int) -> Ends:
        """Returns the ends of edges ``[2, E]`` that are assigned to the ranks `part` ``[E]``."""
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
        num_parts: P.
        host: host of each rank, ``[P]``; None if all ranks share one.
        ends: ends of this assignment, if they are available.
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
    """Assignment of edges and masters to ranks.

    Attributes:
        part: rank of each edge, uint8 ``[E]``, or uint16 for more than 256 ranks.
        master: rank of each node, int32 ``[N]``. It has an edge of the node, unless the node has none or a mask needed it
            elsewhere.
        method: one of `METHODS`, for ``"auto"`` the chosen one; or ``"given"``.
        report: counts of the assignment.
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
    """Returns a rank for each edge and a master for each node.

    Each directed edge is assigned separately. Masters are chosen so that few rows are sent, and that sent rows, masters and their
    in-edges, which are loaded, are balanced. Nodes without edges balance the number of masters.

    Args:
        edge_index: int64 or int32 ``[2, E]``, source and target; may include self-loops and duplicates. It may be memory-mapped.
        num_nodes: N.
        num_parts: P.
        method: one of `METHODS`, see the module's docstring; or the rank of each edge, ``[E]``. ``"auto"`` is the first of
            ``"ne"``, ``"ebv"`` and ``"streaming"`` whose predicted memory is available (:mod:`~lightning_gnn.partition.budget`).
        groups: ranks by host, the outermost level: ``((0, 1), (2, 3))``; None for one host.
        host_weight: the paper's gamma, 0 to 1: weight of a replica on a new host; a replica on a new rank has the weight 1 -
            gamma. 0 ignores hosts. Used by ``"ebv"``, the streamed part of ``"ne"``, and the choice of masters.
        seed: random seed of ``"random"``, ``"dbh"``, ``"grid"``, ``"streaming"`` and ``"dne"``.
        masks: bool ``[N]`` each; every rank becomes the master of a node of each mask that has at least P nodes.
        part: output for the ranks of edges, ``[E]`` of :func:`part_dtype`, such as a memory-mapped file.

    Raises:
        ValueError: an unknown method, fewer edges than ranks, nodes beyond N, groups that do not fit, a weight out of range.
        MemoryError: under ``"auto"``, no method fits.
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
        with progress_bar(f"Partitioning ({method})", total, expected=expected) as advance:
            cut_edges(edge_index, num_nodes, hosts, method, host_weight, seed, part, advance)
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
    """Returns the predicted cost of each of `VERTEX_CUTS` for edges ``[2, E]``, in the order of ``"auto"``.

    Edges that are not int64, as in files, are copied for all methods except ``"streaming"``.
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
    """Returns the dtype of ranks of edges: uint8, or uint16 for more than 256 partitions."""
    return np.min_scalar_type(num_parts - 1)


def cut_edges(
    edge_index: NDArray[np.integer],
    num_nodes: int,
    hosts: list[list[int]],
    method: str,
    host_weight: float = 0.1,
    seed: int = 0,
    part: Parts | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Parts:
    """Returns a rank for each edge; see :func:`assign_edges`, which checks arguments and chooses masters.

    Args:
        hosts: ranks of each host.
        part: output; None allocates it.
        advance: function called with numbers of edges, for a progress bar; see `READINGS`.
    """
    num_parts = sum(map(len, hosts))
    if part is None:
        part = np.empty(edge_index.shape[1], part_dtype(num_parts))
    if method == "streaming":
        _two_phases(edge_index, num_nodes, num_parts, seed, part, advance)
        return part
    source, target = (np.ascontiguousarray(ends, np.int64) for ends in edge_index)
    if method in ("ebv", "ne"):
        lanes = Lanes.of(hosts if host_weight > 0 else [list(range(num_parts))], num_nodes, len(source), host_weight)
        if method == "ebv":
            degree, everything = degrees(source, target, num_nodes), np.empty(0, np.bool_)
            _stream(source, target, degree, everything, lanes, lanes.no_load(), lanes.no_holders(num_nodes), part)
        else:
            _expansion(source, target, num_nodes, lanes, part, advance)
    elif method == "random":
        part[:] = np.random.default_rng(seed).integers(0, num_parts, len(source), part.dtype)
    else:
        baseline_cutter(method)(source, target, num_nodes, num_parts, seed, part)
    return part


def _check(
    edge_index: NDArray[np.integer], num_nodes: int, num_parts: int, method: str | NDArray[np.integer], host_weight: float
) -> None:
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, or the rank of every edge, got {method!r}.")
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}.")
    if num_parts > MOST_PARTS:
        raise ValueError(f"num_parts must be at most {MOST_PARTS}, got {num_parts}.")
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype not in (np.int64, np.int32):
        raise ValueError(
            f"edge_index must be int64 or int32 of shape [2, E] (got {edge_index.dtype} of {list(edge_index.shape)})."
        )
    num_edges = edge_index.shape[1]
    if not isinstance(method, str):
        if method.shape != (num_edges,):
            raise ValueError(
                f"A vertex cut must have a rank for each of {num_edges} edges, got shape {list(method.shape)}. An edge cut, "
                "with a rank for each node, is not supported."
            )
        if num_edges and (method.min() < 0 or method.max() >= num_parts):
            raise ValueError(
                f"Ranks of a vertex cut must be from 0 to {num_parts - 1}, for {num_parts} parts, got {method.min()} to "
                f"{method.max()}."
            )
    if num_parts > num_edges:
        raise ValueError(
            f"A vertex cut needs at least one edge per part, got {num_edges} edges for {num_parts} parts. "
            + (f"Use at most {num_edges} parts." if num_edges else "Use a strategy with an edge cut, such as 'dgcl'.")
        )
    low, high = edge_index.min(), edge_index.max()
    if low < 0 or high >= num_nodes:
        raise ValueError(f"Node ids in edge_index must be from 0 to {num_nodes - 1}, for {num_nodes} nodes, got {low} to {high}.")
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
            f"All groups (the parts of a machine) must have the same number of parts, got {groups}. Use the same number of "
            "parts per machine, or cut without groups."
        )
    return hosts


@dataclass(frozen=True)
class Lanes:
    """Arrangement of ranks in blocks of eight lanes, and the costs of equation 24, in fixed point.

    Hosts of up to eight ranks share blocks, and the table of sets of eight lanes includes their costs. Larger hosts fill several
    blocks.

    Attributes:
        rank: rank of each lane, -1 for none, ``[8 B]``.
        blocks_per_host: 1, or more for hosts of more than eight ranks.
        penalty: int64 ``[256, 8]``, see :func:`~lightning_gnn.strategies.vertex_cut.loops.ebv`.
        host_penalty: cost of a new host of several blocks.
        edge_step, replica_step: increase of a rank's load by an edge and by a replica.
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
        share = max(1, 8 // size)  # hosts per block
        blocks_per_host = -(-size // 8)
        rows = [list(chain(*hosts[first : first + share])) for first in range(0, len(hosts), share)]
        rank = np.full((len(rows), 8 * blocks_per_host), -1)
        for row, ranks in zip(rank, rows):
            row[: len(ranks)] = ranks
        if rank.size > MOST_PARTS:  # including gaps
            raise ValueError(
                f"{len(hosts)} hosts of {size} parts do not fit into {MOST_PARTS} parts. Hosts of up to 8 parts share groups "
                "of 8; larger hosts are rounded up to a multiple of 8. Use host_weight=0."
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
    source: Ids, target: Ids, degree: Degrees, edge_mask: NDArray[np.bool_], lanes: Lanes, load: Ids, holders: Sets, part: Parts
) -> None:
    """Write the ranks of the chosen edges, given the current loads and nodes of the partitions."""
    number = int(edge_mask.sum()) if len(edge_mask) else len(source)
    pairs = np.empty((number, 2), _smallest_integers(len(degree)))
    order = np.empty(number, _smallest_integers(len(source)))
    loops.by_degree_sum(source, target, degree, edge_mask, pairs, order)
    steps = lanes.edge_step, lanes.replica_step
    penalties = lanes.penalty, lanes.blocks_per_host, lanes.host_penalty
    loops.ebv(pairs, order, *penalties, load, *steps, lanes.rank, holders, part)


def _expansion(source: Ids, target: Ids, num_nodes: int, lanes: Lanes, part: Parts, advance: Callable[[int], None]) -> None:
    num_edges = len(source)
    degree = degrees(source, target, num_nodes)
    indptr, neighbor, edge_of = incidence(source, target, degree)
    num_free, end = np.diff(indptr).astype(np.int32), indptr[1:].copy()
    hub = degree > HUB * degree.mean()
    free, holders = np.ones(num_edges, np.bool_), lanes.no_holders(num_nodes)
    ranks = [(lane, rank) for lane, rank in enumerate(lanes.rank.tolist()) if rank >= 0]
    slice_of_edges = num_edges // (TURNS * len(ranks)) + 1
    max_edges = -(-int(EDGE_BOUND * num_edges) // len(ranks))
    edges, nodes = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    growing = list(ranks)
    while growing:
        chosen = min(growing, key=lambda lane: edges[lane] * num_nodes + nodes[lane] * num_edges)  # EBV's balance terms
        budget = min(slice_of_edges, max_edges - edges[chosen])
        more = loops.expand(indptr, end, neighbor, edge_of, hub, num_free, budget, *chosen, free, part, holders)
        edges[chosen] += more[0]
        nodes[chosen] += more[1]
        advance(int(more[0]))
        if more[0] < budget:
            break
        if edges[chosen] == max_edges:
            growing.remove(chosen)
    del neighbor, edge_of
    load = lanes.no_load()
    for each in ranks:
        load[each[0]] += edges[each] * lanes.edge_step + nodes[each] * lanes.replica_step
    _stream(source, target, degree, free, lanes, load, holders, part)


def _two_phases(
    edge_index: NDArray[np.integer], num_nodes: int, num_parts: int, seed: int, part: Parts, advance: Callable[[int], None]
) -> None:
    degree = degrees(edge_index[0], edge_index[1], num_nodes)
    of, volume = np.arange(num_nodes, dtype=np.int32), degree.astype(np.int64)
    share = edge_index.shape[1] / num_parts
    for _ in range(CLUSTER_READINGS):
        for _, source, target in edge_pieces(edge_index):
            loops.cluster(source, target, degree, int(CLUSTER_SHARE * 2 * share), of, volume)
            advance(len(source))
    clusters, home = np.flatnonzero(volume), np.zeros(num_nodes, np.int32)
    loops.schedule(clusters[np.argsort(-volume[clusters], kind="stable")], volume, num_parts, home)
    del clusters
    holders, load = np.zeros((num_nodes, -(-num_parts // 8)), np.uint8), np.zeros(num_parts, np.int64)
    max_edges = ceil(STREAM_BOUND * share)
    for between in (False, True):
        for first, source, target in edge_pieces(edge_index):
            piece = part[first : first + len(source)]
            loops.two_phases(source, target, between, degree, of, volume, home, max_edges, seed, load, holders, piece)
            advance(len(source))


def incidence(source: Ids, target: Ids, degree: Degrees) -> tuple[Ids, NDArray[Any], NDArray[Any]]:
    """Returns the first entry of each node, ``[N + 1]``, and each entry's other end and edge; a self-loop has one entry."""
    entries = degree - np.bincount(source[source == target], minlength=len(degree))
    indptr = np.concatenate([[0], np.cumsum(entries, dtype=np.int64)])
    neighbor, edge_of = (np.empty(indptr[-1], _smallest_integers(max(len(source), len(degree)))) for _ in range(2))
    loops.incidence(source, target, indptr, neighbor, edge_of)
    return indptr, neighbor, edge_of


def _smallest_integers(number: int) -> type[np.signedinteger]:
    """Returns the dtype of ids below `number`: int32 if possible, for half the memory."""
    return np.int32 if number <= np.iinfo(np.int32).max else np.int64


def degrees(source: ShortIds, target: ShortIds, num_nodes: int) -> Degrees:
    """Returns the number of edges that begin or end at each node, int32 ``[N]``; a self-loop counts twice."""
    return (counts_of(source, num_nodes) + counts_of(target, num_nodes)).astype(np.int32)
