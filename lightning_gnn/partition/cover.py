"""The fewest rows that an edge cut allows: minimum vertex covers of the edges between each two parts.

An edge from part p to part q needs either its source's row at q, or its target's partial sum, made at p. Both cost one row from p
to q. The fewest rows that serve all edges from p to q are a minimum vertex cover of them, as many as the edges of a maximum
matching has (Koenig's theorem), and each pair of parts is a problem of its own. SuperGCN (arXiv 2411.16025) has this for GCN.

N nodes, E edges, P parts.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition.shard import Ids

compiled: Any = numba.njit(cache=True, nogil=True)


def cover_edges(edge_index: Ids, part: NDArray[np.integer], num_parts: int) -> Ids:
    """Returns the part that computes each edge, ``[E]``, so that the fewest rows travel: its target's or its source's.

    Of several minimum covers it is the one with the fewest partial sums, so that most edges stay with their targets: a node whose
    partial sums travel to a part is in every minimum cover.

    Args:
        edge_index: int64 ``[2, E]``, source and target; self-loops and duplicates may be among them.
        part: of each node, ``[N]``.
        num_parts: P.
    """
    source, target = (np.ascontiguousarray(ends) for ends in edge_index)
    part = np.ascontiguousarray(part, np.int32)
    computed_by = part[target].astype(np.int64)
    _cover_pairs(source, target, part, num_parts, computed_by)
    return computed_by


@compiled
def _cover_pairs(source, target, part, num_parts, computed_by):  # type: ignore[no-untyped-def]
    """Gives the edges of covered targets to their sources' parts, pair of parts after pair."""
    first, pair_of = np.zeros(num_parts * num_parts + 1, np.int64), np.empty(len(source), np.int32)
    for edge in range(len(source)):
        p, q = part[source[edge]], computed_by[edge]
        pair_of[edge] = p * num_parts + q if p != q else -1
        if p != q:
            first[pair_of[edge] + 1] += 1
    first = np.cumsum(first)
    order, place = np.empty(first[-1], np.int64), first[:-1].copy()
    for edge in range(len(source)):
        if pair_of[edge] >= 0:
            order[place[pair_of[edge]]] = edge
            place[pair_of[edge]] += 1
    number_of = np.full(
        len(part), -1, np.int32
    )  # of a node among the ends in a pair: parts differ, so one array is enough
    for pair in range(num_parts * num_parts):
        edges = order[first[pair] : first[pair + 1]]
        if len(edges) == 0:
            continue
        sources = targets = 0
        u, v = np.empty(len(edges), np.int32), np.empty(len(edges), np.int32)
        for place_of, edge in enumerate(edges):
            if number_of[source[edge]] < 0:
                number_of[source[edge]] = sources
                sources += 1
            if number_of[target[edge]] < 0:
                number_of[target[edge]] = targets
                targets += 1
            u[place_of], v[place_of] = number_of[source[edge]], number_of[target[edge]]
        covered = _covered_targets(u, v, sources, targets)
        for place_of, edge in enumerate(edges):
            if covered[v[place_of]]:
                computed_by[edge] = pair // num_parts
            number_of[source[edge]] = number_of[target[edge]] = -1


@compiled
def _covered_targets(u, v, sources, targets):  # type: ignore[no-untyped-def]
    """Returns which targets are in the minimum cover of edges from `u` to `v`, bool ``[targets]``; its sources are those of the
    other edges.

    A maximum matching by depth-first searches with lookahead, in phases (Pothen and Fan, ACM TOMS 1990). What the last one
    reaches from unmatched sources, in vain, are the targets of Koenig's cover.
    """
    indptr = np.zeros(sources + 1, np.int64)
    for each in u:
        indptr[each + 1] += 1
    indptr = np.cumsum(indptr)
    place, adjacent = indptr[:-1].copy(), np.empty(len(u), np.int32)
    for edge in range(len(u)):
        adjacent[place[u[edge]]] = v[edge]
        place[u[edge]] += 1
    of_source, of_target = np.full(sources, -1, np.int32), np.full(targets, -1, np.int32)
    ahead, place = indptr[:-1].copy(), indptr[:-1].copy()  # the next edge to look at: for a free target, for a way on
    path = np.empty(sources, np.int32)
    reached, phase = np.zeros(targets, np.int32), np.int32(0)
    free, found = np.arange(sources).astype(np.int32), True
    while found:
        found, phase = False, phase + np.int32(1)
        still = 0
        for start in free:
            path[0], length, place[start] = start, 1, indptr[start]
            while length > 0:
                at, last = path[length - 1], indptr[path[length - 1] + 1]
                end = np.int32(-1)
                while ahead[at] < last and end < 0:
                    if of_target[adjacent[ahead[at]]] < 0:
                        end = adjacent[ahead[at]]
                    ahead[at] += 1
                if end >= 0:  # the path's edges change sides
                    for step in range(length - 1, -1, -1):
                        before = of_source[path[step]]
                        of_source[path[step]], of_target[end] = end, path[step]
                        end = before
                    break
                while place[at] < last and reached[adjacent[place[at]]] == phase:
                    place[at] += 1
                if place[at] == last:
                    length -= 1
                    continue
                end = adjacent[place[at]]
                reached[end] = phase
                path[length] = of_target[end]
                place[path[length]] = indptr[path[length]]
                length += 1
            if length > 0:
                found = True
            else:
                free[still] = start
                still += 1
        free = free[:still]
    return reached == phase
