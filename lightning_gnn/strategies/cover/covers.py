"""Minimum vertex covers of the edges between each two partitions.

For an edge from partition p to q, either q receives the features of the source, or p computes a partial aggregate for the target.
The cheapest set of these for all edges from p to q is a minimum vertex cover. Its weights are the cost of the features of a
source, and the cost of a partial aggregate of a target. Each ordered pair of partitions is a separate problem.

The weight of a minimum cover equals a maximum flow from sources to targets (max-flow min-cut; Koenig's theorem for equal
weights). SuperGCN (arXiv 2411.16025) uses equal weights for GCN.

N nodes, E edges, P partitions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition.adjacency import compile_loop
from lightning_gnn.partition.shard import Ids

ORIGIN, FLOW, AFTER = REACHED, FIRST, BACK = 0, 1, 2


def cover_edges(edge_index: Ids, part: NDArray[np.integer], num_parts: int, copy_cost: int = 1, result_cost: int = 1) -> Ids:
    """Returns the partition that computes each edge with minimum communication: its target's or its source's, ``[E]``.

    If several covers are minimal, the result is the cover with the fewest partial aggregates. Most edges then stay with their
    targets: a node whose partial aggregates are sent to a partition is in every minimum cover.

    Args:
        edge_index: int64 ``[2, E]``, source and target; may include self-loops and duplicates.
        part: partition of each node, ``[N]``.
        num_parts: P.
        copy_cost, result_cost: cost of the features of a source, and of a partial aggregate of a target; at least 1 and below
            2^31.
    """
    source, target = (np.ascontiguousarray(ends) for ends in edge_index)
    part = np.ascontiguousarray(part, np.int32)
    computed_by = part[target].astype(np.int64)
    _cover_pairs(source, target, part, num_parts, computed_by, copy_cost, result_cost)
    return computed_by


@compile_loop
def _cover_pairs(source, target, part, num_parts, computed_by, copy_cost, result_cost):  # type: ignore[no-untyped-def]
    """Assign the edges of covered targets to the partitions of their sources, one pair of partitions at a time."""
    first, pair_of = np.zeros(num_parts * num_parts + 1, np.int64), np.empty(len(source), np.int32)
    for edge in range(len(source)):
        p, q = part[source[edge]], computed_by[edge]
        pair_of[edge] = p * num_parts + q if p != q else -1
        if p != q:
            first[pair_of[edge] + 1] += 1
    first = np.cumsum(first)
    # The ends of a pair's edges are contiguous: random reads from all edges would take most of the time.
    order, ends, place = np.empty(first[-1], np.int64), np.empty((first[-1], 2), source.dtype), first[:-1].copy()
    for edge in range(len(source)):
        if pair_of[edge] >= 0:
            at = place[pair_of[edge]]
            order[at], ends[at, 0], ends[at, 1] = edge, source[edge], target[edge]
            place[pair_of[edge]] += 1
    number_of = np.full(len(part), -1, np.int32)  # per pair; its two partitions are distinct, so one array suffices
    for pair in range(num_parts * num_parts):
        low, high = first[pair], first[pair + 1]
        sources = targets = 0
        u, v = np.empty(high - low, np.int32), np.empty(high - low, np.int32)
        for at in range(low, high):
            begin, end = ends[at]
            if number_of[begin] < 0:
                number_of[begin] = sources
                sources += 1
            if number_of[end] < 0:
                number_of[end] = targets
                targets += 1
            u[at - low], v[at - low] = number_of[begin], number_of[end]
        covered = _covered_targets(u, v, sources, targets, copy_cost, result_cost)
        for at in range(low, high):
            if covered[v[at - low]]:
                computed_by[order[at]] = pair // num_parts
            number_of[ends[at, 0]] = number_of[ends[at, 1]] = -1


@compile_loop
def _covered_targets(u, v, sources, targets, copy_cost, result_cost):  # type: ignore[no-untyped-def]
    """Returns which targets are in the minimum cover of edges from `u` to `v`, bool ``[targets]``.

    The cover's sources are the sources of all other edges.

    Computes a maximum flow with at most `copy_cost` from each source and at most `result_cost` into each target. Uses depth-first
    searches with lookahead, in phases (for matchings: Pothen and Fan, ACM TOMS 1990). The targets of the cover are those that the
    last phase reaches from sources with remaining supply.
    """
    indptr = np.zeros(sources + 1, np.int32)
    for each in u:
        indptr[each + 1] += 1
    indptr = np.cumsum(indptr).astype(np.int32)
    place, adjacent = indptr[:-1].copy(), np.empty(len(u), np.int32)
    for edge in range(len(u)):
        adjacent[place[u[edge]]] = v[edge]
        place[u[edge]] += 1
    # Per edge: its source, its flow, and the next edge in its target's list of edges with flow; -2 if not in a list.
    edges = np.empty((len(u), 3), np.int32)
    for source in range(sources):
        for edge in range(indptr[source], indptr[source + 1]):
            edges[edge, ORIGIN], edges[edge, FLOW], edges[edge, AFTER] = source, 0, -2
    # Per target: the last phase that reached it, the first edge of its list, and the next edge for backtracking along a path.
    ends = np.empty((targets, 3), np.int32)
    ends[:, REACHED], ends[:, FIRST] = 0, -1
    gives, takes = np.full(sources, copy_cost, np.int32), np.full(targets, result_cost, np.int32)  # remaining supply and capacity
    # The next edge of a source to examine: in `ahead` for a target with capacity, in `place` for an edge that extends the path.
    ahead, place = indptr[:-1].copy(), indptr[:-1].copy()
    path, backs = (np.empty(sources, np.int32), np.empty(sources, np.int32))  # sources, and the edge that led back to each
    seen, phase = np.zeros(sources, np.int32), np.int32(0)
    giving, found = np.arange(sources).astype(np.int32), True
    while found:
        found, phase = False, phase + np.int32(1)
        still = 0
        for start in giving:
            path[0], length = start, 1
            if seen[start] != phase:
                seen[start], place[start] = phase, indptr[start]
            while length > 0 and gives[start] > 0:
                at, last = path[length - 1], indptr[path[length - 1] + 1]
                while ahead[at] < last and takes[adjacent[ahead[at]]] == 0:
                    ahead[at] += 1
                if ahead[at] < last:
                    edge, found = ahead[at], True
                    amount = min(gives[start], takes[adjacent[edge]])
                    for step in range(1, length):
                        amount = min(amount, edges[backs[step], FLOW])
                    gives[start] -= amount
                    takes[adjacent[edge]] -= amount
                    for step in range(length - 1, -1, -1):
                        if edges[edge, AFTER] == -2:
                            edges[edge, AFTER], ends[adjacent[edge], FIRST] = ends[adjacent[edge], FIRST], edge
                        edges[edge, FLOW] += amount
                        if step > 0:
                            back, edge = backs[step], place[path[step - 1]]
                            edges[back, FLOW] -= amount
                            if edges[back, FLOW] == 0:
                                length = step  # the path stays up to the first saturated edge
                    continue
                back = np.int32(-1)
                while place[at] < last and back < 0:
                    end = adjacent[place[at]]
                    if ends[end, REACHED] != phase:
                        ends[end, REACHED] = phase
                        ends[end, BACK] = ends[end, FIRST] = _with_flow(ends[end, FIRST], edges)
                    while ends[end, BACK] >= 0 and back < 0:
                        edge = ends[end, BACK]
                        ends[end, BACK] = edges[edge, AFTER]
                        if edges[edge, FLOW] > 0 and seen[edges[edge, ORIGIN]] != phase:
                            back = edge
                    if back < 0:
                        place[at] += 1
                if back < 0:
                    length -= 1
                    continue
                at = edges[back, ORIGIN]
                seen[at], place[at], path[length], backs[length] = phase, indptr[at], at, back
                length += 1
            if gives[start] > 0:
                giving[still] = start
                still += 1
        giving = giving[:still]
    return ends[:, REACHED] == phase


@compile_loop
def _with_flow(edge, edges):  # type: ignore[no-untyped-def]
    """Remove the edges without flow from a list; returns the first edge of the list."""
    first = last = np.int32(-1)
    while edge >= 0:
        following = edges[edge, AFTER]
        if edges[edge, FLOW] == 0:
            edges[edge, AFTER] = -2
        elif last < 0:
            first = last = edge
        else:
            edges[last, AFTER], last = edge, edge
        edge = following
    if last >= 0:
        edges[last, AFTER] = -1
    return first
