"""The loops of neighbourhood expansion, compiled by numba at first use and kept on disk.

A part is a set of nodes that grows, and every edge between two of them that is still free. The node of the set that has fewest
free edges is taken next (the *core*): its neighbours join, with their edges into the set. Nodes wait for that in lists by
their number of free edges, linked in both directions.

Hubs count as part of every set: an edge to one goes to the part that its other end joins. So their rows, which are long, and
whose nodes would be in most parts anyway, are never read; edges between hubs stay free.

N nodes, E edges, M entries: two for each edge, one for a self-loop.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import numba
import numpy as np

compiled = numba.njit(cache=True, nogil=True)


@compiled
def incidence(source, target, indptr, neighbour, edge_of):
    """Writes for each node the other ends of its edges, and which edges they are, ``[M]``, as `indptr` ``[N + 1]`` says."""
    place = indptr[:-1].copy()
    for edge in range(len(source)):
        u, v = source[edge], target[edge]
        neighbour[place[u]], edge_of[place[u]] = v, edge
        place[u] += 1
        if u != v:
            neighbour[place[v]], edge_of[place[v]] = u, edge
            place[v] += 1


@compiled
def _wait(node, key, first, after, before):
    """Puts a node at the head of the list `key`."""
    after[node], before[node] = first[key], -1
    if first[key] >= 0:
        before[first[key]] = node
    first[key] = node


@compiled
def _leave(node, key, first, after, before):
    """Takes a node out of the list `key`."""
    if before[node] >= 0:
        after[before[node]] = after[node]
    else:
        first[key] = after[node]
    if after[node] >= 0:
        before[after[node]] = before[node]


@compiled
def expand(indptr, end, neighbour, edge_of, hub, num_free, budget, lane, rank, free, part, held):
    """Lets a part grow by `budget` edges, or until only edges between hubs are free; returns the edges and nodes it gained.

    Kept up to date: end int64 ``[N]``: a node's entries from there on are of edges that are given away, as some before may be;
    num_free int32 ``[N]``: edges of a node that are not; free bool ``[E]``; part ``[E]``; held uint8 ``[N, B]``.
    """
    num_nodes = len(hub)
    block, bit = lane >> 3, np.uint8(1 << (lane & 7))
    most = 0
    for node in range(num_nodes):
        if not hub[node]:
            most = max(most, num_free[node])
    first = np.full(most + 1, -1, np.int32)
    after, before = np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int32)
    inside, joining = np.zeros(num_nodes, np.bool_), np.empty(most + 1, np.int64)
    for node in range(num_nodes):
        inside[node] = held[node, block] & bit != 0 or hub[node]
        if inside[node] and not hub[node]:
            _wait(node, num_free[node], first, after, before)
    edges = nodes = seed = 0
    lowest = 1
    while edges < budget:
        while lowest <= most and first[lowest] < 0:
            lowest += 1
        if lowest > most:
            while seed < num_nodes and (inside[seed] or num_free[seed] == 0):
                seed += 1
            if seed == num_nodes:
                break
            core, number = seed, 0
        else:
            core, number = first[lowest], 0
            for slot in range(indptr[core], end[core]):
                if free[edge_of[slot]] and not inside[neighbour[slot]]:
                    joining[number] = neighbour[slot]
                    number += 1
        # The core is last: a seed joins so, and edges into the set are left to it if the budget ended when its ends joined.
        joining[number] = core
        for k in range(number + 1):
            node = joining[k]
            if edges == budget:
                break
            if num_free[node] == 0 or (inside[node] and node != core):  # a duplicate edge's end joins once
                continue
            if inside[node]:
                _leave(node, num_free[node], first, after, before)
            inside[node] = True
            nodes += held[node, block] & bit == 0
            held[node, block] |= bit
            slot, stop = indptr[node], end[node]
            while slot < stop and edges < budget:
                edge, other = edge_of[slot], neighbour[slot]
                if free[edge]:
                    if not inside[other]:
                        slot += 1
                        continue
                    free[edge] = False
                    part[edge] = rank
                    edges += 1
                    num_free[node] -= 1
                    if hub[other]:
                        nodes += held[other, block] & bit == 0
                        held[other, block] |= bit
                        num_free[other] -= 1
                    elif other != node:
                        _leave(other, num_free[other], first, after, before)
                        num_free[other] -= 1
                        _wait(other, num_free[other], first, after, before)
                        lowest = min(lowest, max(num_free[other], 1))
                stop -= 1
                edge_of[slot], neighbour[slot] = edge_of[stop], neighbour[stop]
            end[node] = stop
            _wait(node, num_free[node], first, after, before)
            lowest = min(lowest, max(num_free[node], 1))
    return edges, nodes
