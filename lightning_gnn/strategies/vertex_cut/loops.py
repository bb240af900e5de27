"""Loops of vertex cuts, compiled by numba at first use and cached on disk: see :mod:`.cutters`.

Sets of ranks are bits: ``holders[u, b]`` has bit l if lane 8 b + l has an edge of u. If hosts matter, lanes are ranks in the
order of hosts. Gaps make eight lanes a whole number of hosts, or a host a whole number of eights. Otherwise a lane is a rank.

Scores of edges are fixed-point integers with the lane in their last bits. Sums in any order are equal, the minimum includes its
lane, and ties go to the lowest lane. Scores of masters are float64, each summed in a fixed order. Therefore the same graph has
the same partition on every machine.

N nodes, E edges, P ranks, B blocks of eight lanes; M entries of expansion: two for each edge, one for a self-loop.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment,call-arg"

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from lightning_gnn.kernels.loops import prefetch
from lightning_gnn.partition.adjacency import AHEAD, ask_for_clusters, compile_loop, mix

LANE_BITS = 12
"""Bits of a score for the lane: at most 4,096 lanes."""

ONE = 1 << 36
"""The number 1 in fixed point, above the lane. Balance terms are at most about the replication factor, so 14 bits suffice."""

NEVER = 1 << 62
"""Load of a lane that has no rank."""

ELECTIONS = 16
"""Maximum number of rounds in which masters are chosen.

One round suffices on most graphs. On cnr-2000 in 8 partitions with expansion, the heaviest partition has 1.24 times the mean of
in-edges after one round, and 1.07 after all.
"""

STEEP = 1e4
"""Cost of a load of one mean above the bound, in rows: a hundredth of a percent costs one row."""

LANES = (1 << LANE_BITS) - 1
"""Mask of a score's last bits."""


@compile_loop
def by_degree_sum(source, target, degree, edge_mask, pairs, order):
    """Sort the C selected edges by the sum of their ends' degrees, stably.

    Writes the ends to `pairs` ``[C, 2]`` and the edges' indices to `order` ``[C]``. `edge_mask` is bool ``[E]``, or
    empty to select all edges.
    """
    max_degree = 0
    for each in degree:
        max_degree = max(max_degree, each)
    place = np.zeros(2 * max_degree + 1, np.int64)
    for edge in range(len(source)):
        if len(edge_mask) == 0 or edge_mask[edge]:
            place[degree[source[edge]] + degree[target[edge]]] += 1
    before = 0
    for key in range(len(place)):
        place[key], before = before, before + place[key]
    for edge in range(len(source)):
        if len(edge_mask) == 0 or edge_mask[edge]:
            u, v = source[edge], target[edge]
            position = place[degree[u] + degree[v]]
            place[degree[u] + degree[v]] += 1
            pairs[position, 0] = u
            pairs[position, 1] = v
            order[position] = edge


@compile_loop
def ebv(pairs, order, penalty, blocks_per_host, host_penalty, load, edge_step, replica_step, rank_of, holders, part):
    """Assign each edge in turn to the lane of the lowest score: ``part[order[k]] = rank_of[lane]``.

    `load` and `holders` are updated in place.

    Args:
        penalty: cost of each lane of a block, by the set of the block's lanes that have an end, int64 ``[256, 8]``.
        host_penalty: cost of all lanes of a host of several blocks if none of its lanes has the end.
        load: balance terms and lanes, int64 ``[8 B]``.
    """
    blocks = holders.shape[1]
    for k in range(len(order)):
        u, v = pairs[k, 0], pairs[k, 1]
        best = NEVER
        away = 0
        for block in range(blocks):
            if blocks_per_host > 1 and block % blocks_per_host == 0:
                here_u = here_v = np.uint8(0)
                for each in range(block, block + blocks_per_host):
                    here_u |= holders[u, each]
                    here_v |= holders[v, each]
                away = host_penalty * (np.int64(here_u == 0) + np.int64(here_v == 0))
            of_u, of_v = penalty[holders[u, block]], penalty[holders[v, block]]
            loads = load[8 * block : 8 * block + 8]
            for lane in range(8):
                best = min(best, loads[lane] + of_u[lane] + of_v[lane] + away)
        chosen = best & LANES
        block, bit = chosen >> 3, np.uint8(1 << (chosen & 7))
        gained = np.int64(holders[u, block] & bit == 0)
        holders[u, block] |= bit
        gained += np.int64(holders[v, block] & bit == 0)  # after u: a self-loop has one end
        holders[v, block] |= bit
        step = edge_step + gained * replica_step
        # All eight are written, as they are read: a store of another width would delay the next edge's load.
        loads = load[8 * block : 8 * block + 8]
        for lane in range(8):
            loads[lane] += step if lane == chosen & 7 else 0
        part[order[k]] = rank_of[chosen]


@compile_loop
def cluster(source, target, degree, max_volume, of, volume):
    """Move one end of each edge to the other end's cluster if it has room; returns the number of moves.

    Args:
        of: cluster of each node, int32 ``[N]``.
        volume: sum of degrees of each cluster, int64 ``[N]``; at most `max_volume` for clusters of several nodes.
    """
    moved = 0
    for edge in range(len(source)):
        ask_for_clusters(volume, volume, of, source, target, edge)
        later = min(edge + AHEAD, len(source) - 1)  # not ask_for_ends: see ask_for_clusters
        prefetch(degree, source[later])
        prefetch(degree, target[later])
        u, v = source[edge], target[edge]
        a, b = of[u], of[v]
        if a == b or volume[a] > max_volume or volume[b] > max_volume:
            continue
        if volume[a] - degree[u] > volume[b] - degree[v]:
            u, a, b = v, b, a
        if volume[b] + degree[u] <= max_volume:
            volume[a] -= degree[u]
            volume[b] += degree[u]
            of[u] = b
            moved += 1
    return moved


@compile_loop
def schedule(clusters, volume, num_parts, home):
    """Assign clusters, the largest first, to the partition of the lowest volume: ``home[cluster]``."""
    loads = [(np.int64(0), rank) for rank in range(num_parts)]
    for each in clusters:
        load, rank = loads[0]
        home[each] = rank
        heapreplace(loads, (load + volume[each], rank))


@compile_loop
def two_phases(source, target, between, degree, of, volume, home, max_edges, seed, load, holders, part):
    """Assign edges inside a partition's clusters to it, or edges between two partitions to one of these.

    An edge whose partitions are full goes to a partition chosen by a hash of its end of higher degree. If this partition is full
    too, the edge goes to the one with the fewest edges. `load`, int64 ``[P]``, and `holders` are updated in place.

    Args:
        between: whether to assign the edges between partitions, not the edges inside.
        home: partition of each cluster, ``[N]``.
        max_edges: maximum edges of a partition.
    """
    salt = np.int64(seed) << 40
    for edge in range(len(source)):
        ask_for_clusters(home, volume, of, source, target, edge)
        later = min(edge + AHEAD, len(source) - 1)  # as in cluster
        for node in (source[later], target[later]):
            prefetch(degree, node)
            prefetch(holders, node)
        u, v = source[edge], target[edge]
        one, other = home[of[u]], home[of[v]]
        if (one != other) != between:
            continue
        if between:
            total, volumes = degree[u] + degree[v], volume[of[u]] + volume[of[v]]
            best, best_score = one, -1.0
            for there in (one, other):
                block, bit = there >> 3, there & 7
                score = volume[of[u] if there == one else of[v]] / volumes
                if holders[u, block] >> bit & 1:
                    score += 1 + degree[v] / total
                if holders[v, block] >> bit & 1:
                    score += 1 + degree[u] / total
                if score > best_score:
                    best, best_score = there, score
            one = best if load[best] < max_edges else one + other - best
        if load[one] >= max_edges:
            one = np.int32(mix((u if degree[u] >= degree[v] else v) ^ salt) % np.uint64(len(load)))
        if load[one] >= max_edges:
            one = np.int32(np.argmin(load))
        part[edge] = one
        load[one] += 1
        bit = np.uint8(1 << (one & 7))
        holders[u, one >> 3] |= bit
        holders[v, one >> 3] |= bit


@compile_loop
def ends(source, target, part, reads, adds):
    """Mark the ranks with an edge from each node, and the ranks with an edge to it; uint8 ``[N, B]``, lanes are ranks."""
    for edge in range(len(source)):
        block, bit = part[edge] >> 3, np.uint8(1 << (part[edge] & 7))
        reads[source[edge], block] |= bit
        adds[target[edge], block] |= bit


@compile_loop
def elect(reads, adds, in_degree, largest_first, host, host_weight, max_load, master):
    """Choose a master for each node among the ranks that have an edge of it.

    Nodes without edges fill ranks that own less than an equal share. The cost of a master is the number of rows then sent, plus
    the load of its rank relative to the mean: owned nodes, sent rows and in-edges. The share of in-edges is weighted by the
    node's number of in-edges. A load above `max_load` times the mean costs far more. Masters are chosen again until no rank
    exceeds it, or nothing changes: late nodes cannot correct the choices of earlier nodes.

    Args:
        in_degree: number of in-edges of each node, int64 ``[N]``.
        largest_first: nodes in descending order of `in_degree`, int64 ``[N]``.
        host: host of each rank, int64 ``[P]``.
        host_weight: additional cost of a row between hosts.
        master: output, int32 ``[N]``.
    """
    num_nodes, num_parts = len(master), len(host)
    master[:] = -1
    num_holders = np.zeros(num_nodes, np.int64)
    owned, sent, loaded = np.zeros(num_parts), np.zeros(num_parts), np.zeros(num_parts)
    rows = 1.0  # approximate number of rows sent: as if every master both reads and adds
    for node in range(num_nodes):
        for rank in range(num_parts):
            block, lane = rank >> 3, rank & 7
            reading, adding = reads[node, block] >> lane & 1, adds[node, block] >> lane & 1
            num_holders[node] += reading | adding
            rows += reading + adding
            sent[rank] += adding
        rows -= 2 * (num_holders[node] > 0)
    num_edges = in_degree.sum()
    per_row, per_node, per_edge = num_parts / max(rows, 1), num_parts / num_nodes, num_parts / num_edges
    ends_in = np.zeros(num_parts, np.int64)  # by host: ranks that read the node plus ranks that add to it
    # Nodes with a single choice come first, then nodes with the most in-edges: later nodes balance their loads.
    for turn in range(1 + ELECTIONS):
        changes = 0
        for node in largest_first:
            if num_holders[node] == 0 or (num_holders[node] > 1) != (turn > 0):
                continue
            ends_in[:] = 0
            copies = total = 0
            for rank in range(num_parts):
                block, lane = rank >> 3, rank & 7
                reading, adding = reads[node, block] >> lane & 1, adds[node, block] >> lane & 1
                ends_in[host[rank]] += reading + adding
                copies += reading
                total += reading + adding
            before = master[node]
            if before >= 0:
                block, lane = before >> 3, before & 7
                owned[before] -= 1
                loaded[before] -= in_degree[node]
                sent[before] -= copies - (reads[node, block] >> lane & 1) - (adds[node, block] >> lane & 1)
            best, chosen, change = np.inf, 0, 0
            size = in_degree[node] * num_nodes / num_edges
            for rank in range(num_parts):
                block, lane = rank >> 3, rank & 7
                reading, adding = reads[node, block] >> lane & 1, adds[node, block] >> lane & 1
                if reading | adding:
                    nodes, edges = per_node * owned[rank], per_edge * loaded[rank]
                    score = 2 - reading - adding + (total - ends_in[host[rank]]) * host_weight
                    score += per_row * sent[rank] + nodes + size * edges
                    score += STEEP * (max(nodes - max_load, 0) + size * max(edges - max_load, 0))
                    if score < best:
                        best, chosen, change = score, rank, copies - reading - adding
            master[node] = chosen
            owned[chosen] += 1
            loaded[chosen] += in_degree[node]
            sent[chosen] += change
            changes += chosen != before
        if turn > 0 and (changes == 0 or max(per_node * owned.max(), per_edge * loaded.max()) <= max_load):
            break
    rank, share = 0, -(-num_nodes // num_parts)
    for node in range(num_nodes):
        if num_holders[node] == 0:
            while owned[rank] >= share:
                rank += 1
            master[node] = rank
            owned[rank] += 1


@compile_loop
def traffic(reads, adds, master, host):
    """Returns per rank: stored rows, features received, partial sums sent, rows sent inside and outside its host.

    int64 ``[5, P]``.
    """
    num_parts = len(host)
    counts = np.zeros((5, num_parts), np.int64)
    for node in range(len(master)):
        owner = master[node]
        for rank in range(num_parts):
            block, lane = rank >> 3, rank & 7
            reading, adding = reads[node, block] >> lane & 1, adds[node, block] >> lane & 1
            counts[0, rank] += (reading | adding) != 0 or rank == owner
            if rank != owner:
                where = 3 if host[rank] == host[owner] else 4
                counts[1, rank] += reading
                counts[where, owner] += reading
                counts[2, rank] += adding
                counts[where, rank] += adding
    return counts


# Neighborhood expansion #######################################################

# A partition is a growing set of nodes, with every free edge between two of them. The node of the set with the fewest free edges
# is next (the *core*): its neighbors join, with their edges into the set. Waiting nodes are in doubly linked lists by their
# number of free edges.
#
# Hubs count as members of every set: an edge to a hub goes to the partition that its other end joins. The long adjacency lists of
# hubs, which would be in most partitions anyway, are then never read. Edges between hubs stay free.


@compile_loop
def incidence(source, target, indptr, neighbor, edge_of):
    """Write the other ends of each node's edges, and the edges' indices, ``[M]``, at the positions in `indptr` ``[N + 1]``."""
    place = indptr[:-1].copy()
    for edge in range(len(source)):
        u, v = source[edge], target[edge]
        neighbor[place[u]], edge_of[place[u]] = v, edge
        place[u] += 1
        if u != v:
            neighbor[place[v]], edge_of[place[v]] = u, edge
            place[v] += 1


@compile_loop
def _wait(node, key, first, after, before):
    """Insert a waiting node at the head of the linked list number `key`, stored in `first`, `after` and `before`."""
    after[node], before[node] = first[key], -1
    if first[key] >= 0:
        before[first[key]] = node
    first[key] = node


@compile_loop
def _leave(node, key, first, after, before):
    """Remove a node from the linked list number `key`."""
    if before[node] >= 0:
        after[before[node]] = after[node]
    else:
        first[key] = after[node]
    if after[node] >= 0:
        before[after[node]] = before[node]


@compile_loop
def expand(indptr, end, neighbor, edge_of, hub, num_free, budget, lane, rank, free, part, holders):
    """Grow a partition by `budget` edges, or until only edges between hubs are free; returns the edges and nodes added.

    Updated in place:
        end: a node's entries from this index on are assigned edges (earlier entries may be too), int64 ``[N]``.
        num_free: free edges of each node, int32 ``[N]``.
        free: whether an edge is free, bool ``[E]``.
        part: rank of each edge, ``[E]``.
        holders: sets of lanes, uint8 ``[N, B]``.
    """
    num_nodes = len(hub)
    block, bit = lane >> 3, np.uint8(1 << (lane & 7))
    max_free = 0
    for node in range(num_nodes):
        if not hub[node]:
            max_free = max(max_free, num_free[node])
    first = np.full(max_free + 1, -1, np.int32)
    after, before = np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int32)
    inside, joining = np.zeros(num_nodes, np.bool_), np.empty(max_free + 1, np.int64)
    for node in range(num_nodes):
        inside[node] = holders[node, block] & bit != 0 or hub[node]
        if inside[node] and not hub[node]:
            _wait(node, num_free[node], first, after, before)
    edges = nodes = seed = 0
    lowest = 1
    while edges < budget:
        while lowest <= max_free and first[lowest] < 0:
            lowest += 1
        if lowest > max_free:
            while seed < num_nodes and (inside[seed] or num_free[seed] == 0):
                seed += 1
            if seed == num_nodes:
                break
            core, number = seed, 0
        else:
            core, number = first[lowest], 0
            for slot in range(indptr[core], end[core]):
                if free[edge_of[slot]] and not inside[neighbor[slot]]:
                    joining[number] = neighbor[slot]
                    number += 1
        # The core is last. A seed joins this way, and the core gets the remaining edges into the set if the budget ends early.
        joining[number] = core
        for k in range(number + 1):
            node = joining[k]
            if edges == budget:
                break
            if num_free[node] == 0 or (inside[node] and node != core):  # the end of a duplicate edge joins once
                continue
            if inside[node]:
                _leave(node, num_free[node], first, after, before)
            inside[node] = True
            nodes += holders[node, block] & bit == 0
            holders[node, block] |= bit
            slot, stop = indptr[node], end[node]
            while slot < stop and edges < budget:
                edge, other = edge_of[slot], neighbor[slot]
                if free[edge]:
                    if not inside[other]:
                        slot += 1
                        continue
                    free[edge] = False
                    part[edge] = rank
                    edges += 1
                    num_free[node] -= 1
                    if hub[other]:
                        nodes += holders[other, block] & bit == 0
                        holders[other, block] |= bit
                        num_free[other] -= 1
                    elif other != node:
                        _leave(other, num_free[other], first, after, before)
                        num_free[other] -= 1
                        _wait(other, num_free[other], first, after, before)
                        lowest = min(lowest, max(num_free[other], 1))
                stop -= 1
                edge_of[slot], neighbor[slot] = edge_of[stop], neighbor[stop]
            end[node] = stop
            _wait(node, num_free[node], first, after, before)
            lowest = min(lowest, max(num_free[node], 1))
    return edges, nodes
