"""SPST node by node, as DGCL's algorithms 1 and 2 have it: what the planner over classes is measured against.

Plain: for each node in random order and each of its destinations, the cost of all links in all stages is computed, then Dijkstra
runs over (device, depth) from all reached devices until the nearest destination is settled. Left out are the two shortcuts
that the paper names but does not use either (costs on demand) or that are the planner's own (classes, chunks). Compiled by
numba it says what the planner's algorithm saves; as plain Python, what a plain implementation takes.
"""

from __future__ import annotations

import numba
import numpy as np

from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import Topology

TIE = 1e-4
"""Costs below a stage's maximum are 0; the link that is faster by itself is then taken. The paper is silent on ties."""


def reference_cost(relation: Relation, topology: Topology, seed: int = 0, compiled: bool = True) -> float:
    """Returns the plan's seconds for rows of one byte."""
    group = np.repeat(np.arange(len(relation.owner)), relation.counts)
    pairs = sorted(topology.links)
    link = np.full((topology.num_devices,) * 2, -1)
    for number, pair in enumerate(pairs):
        link[pair] = number
    first_hop = np.cumsum([0, *(len(topology.links[pair]) for pair in pairs)])
    hops = np.concatenate([topology.links[pair] for pair in pairs])
    order = np.random.default_rng(seed).permutation(len(group))
    plan = _plan if compiled else _plan.py_func
    load = plan(
        relation.owner[group], relation.destinations[group], order, link, first_hop, hops, 1 / topology.gb_per_s
    )
    return float(load.max(1).sum() * 1e-9)


@numba.njit(cache=True)
def _plan(owner, destinations, order, link, first_hop, hops, inverse):
    """Returns the time of each hop in each stage, ``[P - 1, H]``."""
    num_devices, num_links = len(link), len(first_hop) - 1
    num_stages = num_devices - 1
    load = np.zeros((num_stages, len(inverse)))
    time = np.zeros(num_stages)
    cost = np.empty((num_stages, num_links))
    depth = np.empty(num_devices, np.int64)
    distance = np.empty((num_devices, num_stages + 1))
    settled = np.empty((num_devices, num_stages + 1), np.bool_)
    previous = np.empty((num_devices, num_stages + 1), np.int64)
    for node in order:
        depth[:] = -1
        depth[owner[node]] = 0
        left = destinations[node]
        while left:
            for stage in range(num_stages):  # algorithm 2
                for number in range(num_links):
                    longest, own = time[stage], 0.0
                    for i in range(first_hop[number], first_hop[number + 1]):
                        then = load[stage, hops[i]] + inverse[hops[i]]
                        if then > longest:  # numba's max() is slow
                            longest = then
                        if inverse[hops[i]] > own:
                            own = inverse[hops[i]]
                    cost[stage, number] = longest - time[stage] + TIE * own
            distance[:] = np.inf
            settled[:] = False
            for device in range(num_devices):
                if depth[device] >= 0:
                    distance[device, depth[device]] = 0
            while True:  # Dijkstra; with so few states the next one is found by looking
                nearest = np.inf
                a, k = -1, -1
                for device in range(num_devices):
                    for at in range(num_stages + 1):
                        if not settled[device, at] and distance[device, at] < nearest:
                            nearest, a, k = distance[device, at], device, at
                settled[a, k] = True
                if depth[a] < 0 and left >> np.uint64(a) & np.uint64(1):
                    break
                if k == num_stages:
                    continue
                for b in range(num_devices):
                    if link[a, b] < 0 or depth[b] >= 0:
                        continue
                    through = nearest + cost[k, link[a, b]]
                    if through < distance[b, k + 1]:
                        device, at = a, k  # a path passes a device once
                        while depth[device] < 0 and device != b:
                            device, at = previous[device, at], at - 1
                        if device != b:
                            distance[b, k + 1] = through
                            previous[b, k + 1] = a
            while depth[a] < 0:
                depth[a] = k
                left &= ~(np.uint64(1) << np.uint64(a))
                b, a, k = a, previous[a, k], k - 1
                for i in range(first_hop[link[a, b]], first_hop[link[a, b] + 1]):
                    load[k, hops[i]] += inverse[hops[i]]
                    time[k] = max(time[k], load[k, hops[i]])
    return load
