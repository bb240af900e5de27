"""A lower bound on the time of any plan.

Whatever the stages are, a plan takes at least as long as any one hop is busy over all of them, and so at least as long as any
weighted mean of the hops, weights y with sum 1. Under fixed weights each link has a price, and a row can do no better than its
cheapest tree: sum over classes of count x cheapest tree is a bound. The best weights solve a linear program over y and the
costs c(S, v) of the cheapest trees from device v to the set S (Dreyfus and Wagner's recursion, as inequalities). It is the dual
of routing all rows, in fractions, over relayed trees such that the busiest hop is least busy.

P devices, H hops.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csc_matrix

from lightning_gnn.extensions.plans.plan import check_devices
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import Topology

LP_DEVICES = 8
"""Up to here the linear program is solved (1 s); it has 3^P rows."""

TREE_DEVICES = 16
"""Up to here the cheapest trees are found (1 s); there are P 2^P, and finding one takes 2^P."""


def lower_bound(relation: Relation, topology: Topology, hops: NDArray[np.integer] | None = None) -> float:
    """Returns seconds per byte of a row that no plan can beat, whatever its trees and stages.

    Args:
        relation: which rows are needed where.
        topology: of as many devices, up to 16. Up to 8 the bound is the best of its kind; for more each of `hops` is tried.
        hops: of more than 8 devices: positions of hops that may be the bottleneck, such as the busiest ones of a good plan.

    Raises:
        ValueError: more than 16 devices, or another number than the relation's.
    """
    check_devices(relation.num_devices, topology)
    if topology.num_devices > TREE_DEVICES:
        raise ValueError(f"The bound is computed for up to {TREE_DEVICES} devices (got {topology.num_devices}).")
    if not len(relation.nodes):
        return 0.0
    if topology.num_devices <= LP_DEVICES:
        return _bound(relation, topology, _best_weights(relation, topology))
    tried = np.arange(len(topology.hops)) if hops is None else hops
    return max(_bound(relation, topology, np.arange(len(topology.hops)) == hop) for hop in tried)


def _bound(relation: Relation, topology: Topology, weights: NDArray) -> float:
    """Returns the bound under `weights` of hops, ``[H]``: any that are not negative give a valid one."""
    weights = np.maximum(weights, 0)
    seconds = weights / weights.sum() / (topology.gb_per_s * 1e9)
    price = np.full((topology.num_devices, topology.num_devices), np.inf)
    for (a, b), via in topology.links.items():
        price[a, b] = seconds[list(via)].sum()
    trees = _cheapest_trees(price)
    return float((trees[relation.destinations.astype(np.int64), relation.owner] * relation.counts).sum())


@numba.njit(cache=True)
def _cheapest_trees(price: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the cost of the cheapest tree from each device to each set of devices, ``[2^P, P]`` (Dreyfus and Wagner)."""
    num_devices = len(price)
    path = price.copy()
    for c in range(num_devices):
        path[c, c] = 0
    for c in range(num_devices):
        for a in range(num_devices):
            for b in range(num_devices):
                path[a, b] = min(path[a, b], path[a, c] + path[c, b])
    cost = np.full((1 << num_devices, num_devices), np.inf)
    cost[0] = 0
    split = np.empty(num_devices)
    for wanted in range(1, 1 << num_devices):
        lowest = wanted & -wanted
        if wanted == lowest:
            for d in range(num_devices):
                if wanted == 1 << d:
                    cost[wanted] = path[:, d]
            continue
        split[:] = np.inf
        part = (wanted - 1) & wanted
        while part:
            if part & lowest:  # each split once
                for v in range(num_devices):
                    split[v] = min(split[v], cost[part, v] + cost[wanted ^ part, v])
            part = (part - 1) & wanted
        for v in range(num_devices):
            for u in range(num_devices):
                cost[wanted, v] = min(cost[wanted, v], path[v, u] + split[u])
    return cost


def _best_weights(relation: Relation, topology: Topology) -> NDArray[np.float64]:
    """Returns the weights of hops that give the best bound, ``[H]``.

    Variables: y_h, and c(S, v) for v outside S (else c(S, v) = c(S - v, v), and c(empty, v) = 0).
    """
    num_devices, num_hops = topology.num_devices, len(topology.hops)
    sets, devices = np.meshgrid(np.arange(1 << num_devices), np.arange(num_devices), indexing="ij")
    inside = (sets >> devices & 1).astype(np.bool_)
    column = np.full(sets.shape, -1)
    free = ~inside & (sets > 0)
    column[free] = num_hops + np.arange(free.sum())
    column[inside] = column[sets[inside] & ~(1 << devices[inside]), devices[inside]]  # -1 if that set is empty
    rows: list[NDArray] = []
    columns: list[NDArray] = []
    values: list[NDArray] = []
    height = 0

    def at_most(plus: NDArray, *minus: tuple[NDArray, float]) -> None:
        """Adds the rows plus <= sum of the minus; a column of -1 stands for 0."""
        nonlocal height
        row = height + np.arange(len(plus))
        for where, value in ((plus, 1.0), *((where, -factor) for where, factor in minus)):
            there = where >= 0
            rows.append(row[there])
            columns.append(where[there])
            values.append(np.full(there.sum(), value))
        height += len(plus)

    for (a, b), via in topology.links.items():  # c(S, a) <= price(a, b) + c(S, b)
        wanted = np.flatnonzero(free[:, a])
        ones = np.ones(len(wanted), np.int64)
        at_most(column[wanted, a], (column[wanted, b], 1.0), *((hop * ones, 1 / topology.gb_per_s[hop]) for hop in via))
    for whole in range(1, 1 << num_devices):  # c(S, v) <= c(S', v) + c(S - S', v)
        outside = np.flatnonzero(free[whole])
        parts = np.arange(1, whole)
        parts = parts[((parts & whole) == parts) & (parts & (whole & -whole) > 0)]
        part, v = (each.ravel() for each in np.meshgrid(parts, outside))
        at_most(column[whole, v], (column[part, v], 1.0), (column[whole ^ part, v], 1.0))
    matrix = csc_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), (height, num_hops + int(free.sum()))
    )
    gain = np.zeros(matrix.shape[1])
    np.add.at(
        gain, column[relation.destinations.astype(np.int64), relation.owner], relation.counts / len(relation.nodes)
    )
    total = np.zeros((1, matrix.shape[1]))
    total[0, :num_hops] = 1
    found = linprog(-gain, matrix, np.zeros(height), total, [1.0], method="highs-ipm")
    if found.x is None:
        raise RuntimeError(f"HiGHS did not solve the linear program of the bound: {found.message}")
    return found.x[:num_hops]


def staged_bound(relation: Relation, topology: Topology) -> float:
    """Returns seconds per byte of a row that no plan in stages can beat, rows divided at will and waiting anywhere.

    A linear program over time: each destination of a class is reached by a flow from the owner over (device, stage), rows may
    stay where they are, and an edge carries of a class what its largest flow does, since copies are made behind it. Whatever a
    plan does is such a flow, so this is a bound; that of trees in fractions may be higher. Up to some 5 devices.

    Raises:
        RuntimeError: HiGHS did not solve it.
    """
    check_devices(relation.num_devices, topology)
    devices, stages = topology.num_devices, max(1, topology.num_devices - 1)
    links = [(stage, a, b, via) for stage in range(stages) for (a, b), via in topology.links.items()]
    waits = [(stage, a, a, ()) for stage in range(stages) for a in range(devices)]
    moves, num_hops = [*links, *waits], len(topology.hops)
    leaves = np.array([stage * devices + a for stage, a, _, _ in moves])
    arrives = np.array([(stage + 1) * devices + b for stage, _, b, _ in moves])
    crossing = [(edge, links[edge][0] * num_hops + hop) for edge in range(len(links)) for hop in links[edge][3]]
    edge_of, slot_of = np.array(crossing).T.reshape(2, -1)
    # Rows, columns, values of: used - longest <= 0, flow - used <= 0
    entries: list[tuple[NDArray, NDArray, NDArray]] = []
    kept: list[tuple[NDArray, NDArray, NDArray]] = []  # of: what arrives at a device leaves it or stays
    column, height, places, wanted = stages, stages * num_hops, 0, []
    for number, needs in enumerate(relation.needs):
        used = column + np.arange(len(links))
        column += len(links)
        seconds = relation.counts[number] / len(relation.nodes) / topology.gb_per_s[slot_of % num_hops]
        entries.append((slot_of, used[edge_of], seconds))
        for device in np.flatnonzero(needs):
            flow = column + np.arange(len(moves))
            column += len(moves)
            rows = height + np.arange(len(links))
            height += len(links)
            entries += [(rows, flow[: len(links)], np.ones(len(rows))), (rows, used, -np.ones(len(rows)))]
            kept += [(places + leaves, flow, -np.ones(len(flow))), (places + arrives, flow, np.ones(len(flow)))]
            balance = np.zeros((stages + 1) * devices)
            balance[relation.owner[number]] -= 1  # leaves the owner in the first stage
            balance[stages * devices + device] += 1
            wanted.append(balance)
            places += len(balance)
    slots = np.arange(stages * num_hops)
    entries.append((slots, slots // num_hops, -np.ones(len(slots))))
    at_most = csc_matrix(_triples(entries), (height, column))
    equal = csc_matrix(_triples(kept), (places, column))
    cost = np.zeros(column)
    cost[:stages] = 1
    found = linprog(cost, at_most, np.zeros(height), equal, np.concatenate(wanted), method="highs")
    if found.x is None:
        raise RuntimeError(f"HiGHS did not solve the linear program of the bound: {found.message}")
    return float(found.fun * len(relation.nodes) / 1e9)


def _triples(entries: list[tuple[NDArray, NDArray, NDArray]]) -> tuple[NDArray, tuple[NDArray, NDArray]]:
    rows, columns, values = (np.concatenate(each) for each in zip(*entries))
    return values, (rows, columns)
