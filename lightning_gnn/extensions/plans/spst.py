"""Planner with shortest path spanning trees (DGCL section 5.2, algorithms 1 and 2), over classes of nodes, with rerouting.

Nodes of a class are interchangeable, so one tree is grown per chunk of a class, not per node. Otherwise, the first pass follows
the paper. Chunks are in random order. From the devices reached so far, the tree grows along the path to the nearest unreached
destination. An edge costs the increase of the plan's time if the chunk crosses it at that depth. Costs are computed only for
edges that the search visits.

Further passes remove one or several chunks at a time and plan them again, given all other chunks. A row may also wait on a device
for a later stage, so that a slow or shared link can be used in every stage. Changes that make the plan longer are reverted.
Removing several chunks at a time helps if two hops are equally busy: the plan becomes shorter only if both get less load.

P devices, K stages, H hops, G chunks, W hops of the longest link.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_gnn.extensions.plans.plan import Plan, check_devices
from lightning_gnn.extensions.plans.relation import Ids, Relation
from lightning_gnn.extensions.plans.topology import Topology

TIE = 1e-4
"""Weight of the row's own time on a link. It breaks ties between links that lengthen the plan equally (often by 0)."""

TAKEN_OUT = (1, 8, 64)
"""Number of chunks that are planned again together, for successive passes in turn."""

GAIN = 1e-3
"""Minimum relative gain of rerouting.

Rerouting stops after ``len(TAKEN_OUT)`` consecutive passes that each shorten the plan by less. It also stops if no plan can be
shorter by more, because of the time of all rows that must cross one hop.
"""


def spst(
    relation: Relation, topology: Topology, *, max_stages: int | None = None, passes: int = 12, chunks: int = 2000, seed: int = 0
) -> Plan:
    """Returns a plan by shortest path spanning trees; deterministic.

    Args:
        max_stages: maximum number of stages; None for the maximum depth of trees.
        passes: maximum number of passes. 1 is the paper's algorithm: rows cross the edges at depth k of their tree in stage k.
            Further passes reroute.
        chunks: approximate number of chunks; more chunks are slower and, up to a point, better.
        seed: seed of the order of the chunks.

    Raises:
        ValueError: if the number of devices differs from the topology, or a device is not reachable in `max_stages`.
    """
    check_devices(relation.num_devices, topology)
    bounds = _split(relation, max(1, -(-len(relation.nodes) // max(1, chunks))))
    group_class = np.searchsorted(relation.bounds, bounds[:-1], side="right") - 1
    rng = np.random.default_rng(seed)
    orders = np.stack([rng.permutation(len(bounds) - 1) for _ in range(passes)])
    deepest = max(1, relation.num_devices - 1)
    parent, arrival = _plan(
        relation.owner[group_class],
        relation.destinations[group_class],
        np.diff(bounds),
        orders,
        _links(topology),
        deepest if max_stages is None else min(max_stages, deepest),
    )
    if (relation.needs[group_class] & (parent < 0)).any():
        raise ValueError(f"Not all devices of topology {topology.name!r} reach each other in {max_stages} stages.")
    used, stage = np.unique(arrival, return_inverse=True)  # some stages may be empty now; -1 and 0: not sent
    stage = stage.reshape(arrival.shape) - np.count_nonzero(used <= 0)
    name = "p2p" if stage.max(initial=-1) <= 0 else "spst"  # in one stage, owners send directly
    return Plan(name, relation, bounds, parent, np.where(parent >= 0, stage, -1).astype(np.int8))


def _split(relation: Relation, rows: int) -> Ids:
    """Returns the bounds of chunks of at most `rows` nodes, of even sizes within a class, ``[G + 1]``."""
    pieces = -(-relation.counts // rows)
    of = np.repeat(np.arange(len(pieces)), pieces)
    position = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = relation.bounds[of] + position * relation.counts[of] // pieces[of]
    return np.append(starts, len(relation.nodes))


class _Links(NamedTuple):
    """Topology as arrays for the planner.

    Attributes:
        hops: hops of the link from a to b, int32 ``[P, P, W]``.
        num_hops: number of hops of the link, 0 for no link, int32 ``[P, P]``.
        seconds: time of a row on each hop, ``[H]``; the unit is arbitrary.
        own: time of a row on a link without other traffic, ``[P, P]``.
        shortest: time of a row from a to b, also over relays, without other traffic, ``[P, P]``.
    """

    hops: NDArray[np.int32]
    num_hops: NDArray[np.int32]
    seconds: NDArray[np.float64]
    own: NDArray[np.float64]
    shortest: NDArray[np.float64]


class _Load(NamedTuple):
    """Load of the trees so far: time of each hop in each stage ``[K, H]``, and of each stage ``[K]``."""

    hop: NDArray[np.float64]
    stage: NDArray[np.float64]


class _Search(NamedTuple):
    """Working arrays of one search.

    Attributes:
        cost, via: cost of the cheapest path on which a relay has the rows by stage k, and the device before it, ``[K + 1, P]``.
        near: lower bound of the cost of a path from a relay to a destination, infinite for other devices, ``[P]``.
    """

    cost: NDArray[np.float64]
    via: NDArray[np.int64]
    near: NDArray[np.float64]


def _links(topology: Topology) -> _Links:
    num_devices = topology.num_devices
    hops = np.zeros((num_devices, num_devices, max(map(len, topology.links.values()), default=0)), np.int32)
    num_hops = np.zeros((num_devices, num_devices), np.int32)
    own = np.full((num_devices, num_devices), np.inf)
    seconds = 1 / topology.gb_per_s
    for (a, b), via in topology.links.items():
        hops[a, b, : len(via)] = via
        num_hops[a, b] = len(via)
        own[a, b] = seconds[list(via)].max()
    shortest = own.copy()
    for relay in range(num_devices):
        shortest = np.minimum(shortest, shortest[:, relay, None] + shortest[relay])
    return _Links(hops, num_hops, seconds, own, shortest)


@numba.njit(cache=True, nogil=True)
def _plan(owner, destinations, counts, orders, links, num_stages):  # type: ignore[no-untyped-def]
    """Returns the parents and arrivals of each chunk, int8 ``[G, P]``.

    Arrival k + 1 means after stage k, 0 at the owner, and -1 never. `orders` is the order of the chunks in each pass, ``[passes,
    G]``.
    """
    num_devices = len(links.own)
    load = _Load(np.zeros((num_stages, len(links.seconds))), np.zeros(num_stages))
    cost = np.empty((num_stages + 1, num_devices))
    search = _Search(cost, np.empty(cost.shape, np.int64), np.empty(num_devices))
    parents = np.full((len(owner), num_devices), -1, np.int8)
    arrivals = np.full((len(owner), num_devices), -1, np.int8)
    stalled = 0
    for number in range(len(orders)):
        began = load.stage.sum()
        if number and _least_seconds(owner, destinations, counts, links, load) >= began * (1 - GAIN):
            break
        at_once = TAKEN_OUT[(number - 1) % len(TAKEN_OUT)] if number else 1
        for first in range(0, len(owner), at_once):
            chunks = orders[number, first : first + at_once]
            before = load.stage.sum()
            old_parents, old_arrivals = parents[chunks], arrivals[chunks]  # copies
            if number:
                for chunk in chunks:
                    _carry(parents[chunk], arrivals[chunk], -float(counts[chunk]), links, load)
            complete = True
            for chunk in chunks:
                parent, arrival = parents[chunk], arrivals[chunk]
                parent[:] = -1
                arrival[:] = -1
                arrival[owner[chunk]] = 0
                left, found = destinations[chunk], True
                while left and found:
                    rows = float(counts[chunk])
                    left, found = _reach_nearest(left, parent, arrival, rows, number > 0, links, load, search)
                complete &= found
            if number and (not complete or load.stage.sum() > before * (1 + 1e-12)):
                for chunk in chunks:
                    _carry(parents[chunk], arrivals[chunk], -float(counts[chunk]), links, load)
                parents[chunks], arrivals[chunks] = old_parents, old_arrivals
                for chunk in chunks:
                    _carry(parents[chunk], arrivals[chunk], float(counts[chunk]), links, load)
        stalled = stalled + 1 if number and load.stage.sum() > began * (1 - GAIN) else 0
        if stalled == len(TAKEN_OUT):
            break
    return parents, arrivals


@numba.njit(cache=True, nogil=True)
def _least_seconds(owner, destinations, counts, links, load):  # type: ignore[no-untyped-def]
    """Returns the minimum time of the busiest hop in any plan: for the rows that cannot reach all destinations without it."""
    num_devices = len(links.own)
    if not len(links.seconds):
        return 0.0
    hop = load.hop.sum(0).argmax()
    one = np.uint64(1)
    without = one << np.arange(num_devices).astype(np.uint64)  # bits: devices reached over other hops
    for a in range(num_devices):
        for b in range(num_devices):
            if links.num_hops[a, b] and not (links.hops[a, b, : links.num_hops[a, b]] == hop).any():
                without[a] |= one << np.uint64(b)
    for relay in range(num_devices):
        for a in range(num_devices):
            if without[a] >> np.uint64(relay) & one:
                without[a] |= without[relay]
    rows = 0
    for chunk in range(len(owner)):
        if destinations[chunk] & ~without[owner[chunk]]:
            rows += counts[chunk]
    return rows * links.seconds[hop]


@numba.njit(cache=True, nogil=True)
def _reach_nearest(remaining, parent, arrival, rows, may_wait, links, load, search):  # type: ignore[no-untyped-def]
    """Add the cheapest path from a reached device to a device of `remaining` to the tree.

    The path ends at its first destination, so the devices between are relays, which do not need the rows. `remaining` is a bit
    mask. With `may_wait`, rows may be sent later than in the stage after their arrival. Modifies the tree and the load.

    Returns:
        The remaining bits of `remaining`, and whether a path exists.
    """
    cost, via, nearest = search
    num_stages, num_devices = len(load.stage), len(parent)
    one = np.uint64(1)
    bound, goal, goal_via, goal_stage = np.inf, -1, -1, -1
    latest = 0  # latest arrival of a source
    for a in range(num_devices):
        nearest[a] = np.inf
        if arrival[a] < 0:
            if not remaining >> np.uint64(a) & one:
                for d in range(num_devices):
                    if remaining >> np.uint64(d) & one:
                        least = TIE * rows * links.shortest[a, d]
                        if least < nearest[a]:
                            nearest[a] = least
            continue
        latest = max(latest, arrival[a])
        for stage in range(arrival[a], num_stages if may_wait else min(arrival[a] + 1, num_stages)):
            for d in range(num_devices):
                if remaining >> np.uint64(d) & one and links.num_hops[a, d]:
                    added = _extra_seconds(a, d, stage, rows, bound, links, load)
                    if added < bound:
                        bound, goal, goal_via, goal_stage = added, d, a, stage
    cost[:] = np.inf
    for stage in range(num_stages):
        alive = may_wait or stage <= latest
        for a in range(num_devices):
            if arrival[a] >= 0:  # a source, from its arrival on
                if arrival[a] > stage or (arrival[a] < stage and not may_wait):
                    continue
                so_far = 0.0
            else:
                so_far = cost[stage, a]
                if so_far + nearest[a] >= bound:
                    continue
                alive = True
                if may_wait and so_far < cost[stage + 1, a]:
                    cost[stage + 1, a], via[stage + 1, a] = so_far, a
                for d in range(num_devices):
                    if remaining >> np.uint64(d) & one and links.num_hops[a, d]:
                        added = so_far + _extra_seconds(a, d, stage, rows, bound - so_far, links, load)
                        if added < bound:
                            bound, goal, goal_via, goal_stage = added, d, a, stage
            for b in range(num_devices):
                best = min(bound - nearest[b], cost[stage + 1, b])
                # `nearest` is infinite, and so `best` is negative, unless b is a relay.
                if so_far >= best or not links.num_hops[a, b]:
                    continue
                added = so_far + _extra_seconds(a, b, stage, rows, best - so_far, links, load)
                if added < best and not _is_on_path(a, stage, b, arrival, via):
                    cost[stage + 1, b], via[stage + 1, b] = added, a
        if not alive:
            break
    if goal < 0:
        return remaining, False
    remaining &= ~(one << np.uint64(goal))
    d, a, stage = goal, goal_via, goal_stage
    while True:
        parent[d], arrival[d] = a, stage + 1
        _cross(a, d, stage, rows, links, load)
        if arrival[a] >= 0:
            return remaining, True
        while via[stage, a] == a:  # the rows waited
            stage -= 1
        d, a, stage = a, via[stage, a], stage - 1


@numba.njit(cache=True, inline="always")
def _extra_seconds(a, b, stage, rows, limit, links, load):  # type: ignore[no-untyped-def]
    """Returns the increase of the plan's time if `rows` cross a -> b in `stage`, or a value of at least `limit`."""
    tie = TIE * rows * links.own[a, b]
    longest = load.stage[stage]
    if tie >= limit:
        return tie
    for i in range(links.num_hops[a, b]):
        hop = links.hops[a, b, i]
        then = load.hop[stage, hop] + rows * links.seconds[hop]
        if then > longest:  # numba's max() handles NaNs, and made the planner three times slower
            longest = then
    return longest - load.stage[stage] + tie


@numba.njit(cache=True, inline="always")
def _is_on_path(a, stage, b, arrival, via):  # type: ignore[no-untyped-def]
    """Returns whether the path that reaches relay `a` by `stage` contains `b`."""
    while arrival[a] < 0:
        if a == b:
            return True
        a, stage = via[stage, a], stage - 1
    return False


@numba.njit(cache=True, nogil=True)
def _cross(a, b, stage, rows, links, load):  # type: ignore[no-untyped-def]
    """Add `rows` on a -> b in `stage`; a negative number leaves the stage's time too high."""
    for i in range(links.num_hops[a, b]):
        hop = links.hops[a, b, i]
        load.hop[stage, hop] += rows * links.seconds[hop]
        if load.hop[stage, hop] > load.stage[stage]:
            load.stage[stage] = load.hop[stage, hop]


@numba.njit(cache=True, nogil=True)
def _carry(parent, arrival, rows, links, load):  # type: ignore[no-untyped-def]
    """Add `rows`, which may be negative, on all edges of a tree."""
    for b in range(len(parent)):
        if parent[b] >= 0:
            _cross(parent[b], b, arrival[b] - 1, rows, links, load)
    if rows < 0:
        for b in range(len(parent)):
            if parent[b] >= 0:
                load.stage[arrival[b] - 1] = load.hop[arrival[b] - 1].max()
