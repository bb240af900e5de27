"""The least that an edge cut allows to send: minimum vertex covers of the edges between each two parts.

An edge from part p to part q needs either a copy of its source's row at q, or its target's partial result, made at p. What serves
all edges from p to q at the least cost is a minimum vertex cover of them, in which a source weighs what a copy costs, and a
target what a partial result costs; each pair of parts is a problem of its own. It weighs as much as a maximum flow from sources
to targets (max-flow min-cut; Koenig's theorem, where both cost the same). SuperGCN (arXiv 2411.16025) has the latter for GCN.

N nodes, E edges, P parts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition.adjacency import compiled
from lightning_gnn.partition.shard import Ids

ORIGIN, FLOW, AFTER = REACHED, FIRST, BACK = 0, 1, 2


def cover_edges(edge_index: Ids, part: NDArray[np.integer], num_parts: int, copy_cost: int = 1, result_cost: int = 1) -> Ids:
    """Returns the part that computes each edge, ``[E]``, so that the least is sent: its target's or its source's.

    Of several minimum covers it is the one with the fewest partial results, so that most edges stay with their targets: a node
    whose partial results travel to a part is in every minimum cover.

    Args:
        edge_index: int64 ``[2, E]``, source and target; self-loops and duplicates may be among them.
        part: of each node, ``[N]``.
        num_parts: P.
        copy_cost, result_cost: of the copy of a source and of the partial result of a target, at least 1 and below 2^31.
    """
    source, target = (np.ascontiguousarray(ends) for ends in edge_index)
    part = np.ascontiguousarray(part, np.int32)
    computed_by = part[target].astype(np.int64)
    _cover_pairs(source, target, part, num_parts, computed_by, copy_cost, result_cost)
    return computed_by


@compiled
def _cover_pairs(source, target, part, num_parts, computed_by, copy_cost, result_cost):  # type: ignore[no-untyped-def]
    """Gives the edges of covered targets to their sources' parts, pair of parts after pair."""
    first, pair_of = np.zeros(num_parts * num_parts + 1, np.int64), np.empty(len(source), np.int32)
    for edge in range(len(source)):
        p, q = part[source[edge]], computed_by[edge]
        pair_of[edge] = p * num_parts + q if p != q else -1
        if p != q:
            first[pair_of[edge] + 1] += 1
    first = np.cumsum(first)
    # Ends lie side by side, pair after pair: reading them from all edges in turn would take most of the time.
    order, ends, place = np.empty(first[-1], np.int64), np.empty((first[-1], 2), source.dtype), first[:-1].copy()
    for edge in range(len(source)):
        if pair_of[edge] >= 0:
            at = place[pair_of[edge]]
            order[at], ends[at, 0], ends[at, 1] = edge, source[edge], target[edge]
            place[pair_of[edge]] += 1
    number_of = np.full(len(part), -1, np.int32)  # among the ends in a pair: parts differ, so one array is enough
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


@compiled
def _covered_targets(u, v, sources, targets, copy_cost, result_cost):  # type: ignore[no-untyped-def]
    """Returns which targets are in the minimum cover of edges from `u` to `v`, bool ``[targets]``; its sources are those of the
    other edges.

    A maximum flow, to which each source gives at most `copy_cost` and of which each target takes at most `result_cost`, by
    depth-first searches with lookahead, in phases (for matchings: Pothen and Fan, ACM TOMS 1990). What the last one reaches in
    vain, from sources that could give more, are the targets of the cover.
    """
    indptr = np.zeros(sources + 1, np.int32)
    for each in u:
        indptr[each + 1] += 1
    indptr = np.cumsum(indptr).astype(np.int32)
    place, adjacent = indptr[:-1].copy(), np.empty(len(u), np.int32)
    for edge in range(len(u)):
        adjacent[place[u[edge]]] = v[edge]
        place[u[edge]] += 1
    # Of an edge: its source, its flow, and the edge after it in the list of its target's edges with flow; -2 if not in the list.
    edges = np.empty((len(u), 3), np.int32)
    for source in range(sources):
        for edge in range(indptr[source], indptr[source + 1]):
            edges[edge, ORIGIN], edges[edge, FLOW], edges[edge, AFTER] = source, 0, -2
    # Of a target: the last phase that reached it, the first of its list, and the next of it for a path to go back by.
    ends = np.empty((targets, 3), np.int32)
    ends[:, REACHED], ends[:, FIRST] = 0, -1
    gives, takes = np.full(sources, copy_cost, np.int32), np.full(targets, result_cost, np.int32)  # what is left
    # The next edge of a source to look at: for a target that takes more; for a way on, also the one by which the path goes on.
    ahead, place = indptr[:-1].copy(), indptr[:-1].copy()
    path, backs = (
        np.empty(sources, np.int32),
        np.empty(sources, np.int32),
    )  # sources, and the edge that led back to each
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
                                length = step  # the path is kept as far as it lets more through
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


@compiled
def _with_flow(edge, edges):  # type: ignore[no-untyped-def]
    """Takes the edges without flow out of a list; returns its first."""
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
