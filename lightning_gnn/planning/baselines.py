"""What DGCL is compared with (sections 3 and 7.1): exchange through host memory, and replication instead of communication.

N nodes, E edges, P parts, K layers (propagations of the model).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_gnn.planning.plan import check_devices
from lightning_gnn.planning.plan_cost import PlanCost, plan_cost
from lightning_gnn.planning.relation import Ids, Masks, Relation
from lightning_gnn.planning.spst import spst
from lightning_gnn.planning.topology import Topology


def swap_cost(relation: Relation, topology: Topology) -> PlanCost:
    """Returns the cost of NeuGraph's exchange: each device writes all of its rows to host memory, then reads its halo.

    A device reads over the hops to the memory of its own socket: rows that lie in another socket's take longer, so this is a
    lower estimate.

    Raises:
        ValueError: several machines, or a topology that does not say how devices get to the memory.
    """
    check_devices(relation, topology)
    if len(topology.hosts) > 1:
        raise ValueError(f"Swapping goes through the memory of one machine; topology {topology.name!r} has several.")
    if not topology.memory:
        raise ValueError(f"Topology {topology.name!r} does not say how devices get to host memory; add 'memory' to it.")
    rows = np.zeros((2, len(topology.hops)), np.int64)
    for device, via in enumerate(topology.memory):
        rows[0, list(via)] += relation.offsets[device + 1] - relation.offsets[device]
        rows[1, [hop ^ 1 for hop in via]] += relation.pair_rows[:, device].sum()
    return PlanCost(topology, rows)


@dataclass(frozen=True)
class Replication:
    """What parts hold and compute if they replicate neighbourhoods instead of communicating.

    Attributes:
        nodes: nodes of the closure of each part after 0 to K hops, int64 ``[K + 1, P]``: owned nodes first.
        edges: edges that each part computes in layers 1 to K, int64 ``[K, P]``.
    """

    nodes: Ids
    edges: Ids

    @property
    def factor(self) -> float:
        """Nodes that all parts together hold over those of the graph (DGCL Figure 4)."""
        return float(self.nodes[-1].sum() / max(1, self.nodes[0].sum()))


def replication(edge_index: Ids, part: NDArray[np.integer], num_parts: int, num_layers: int) -> Replication:
    """Returns what it takes to replicate: layer l is computed for all nodes within K - l hops of the part's own.

    Args:
        edge_index: int64 ``[2, E]``.
        part: of each node, ``[N]``.
        num_parts, num_layers: P, at most 64, and K.
    """
    held = [np.uint64(1) << part.astype(np.uint64)]
    edges = []
    for _ in range(num_layers):
        grown, computed = _grow(edge_index[0], edge_index[1], held[-1], num_parts)
        held.append(grown)
        edges.append(computed)
    counts = [[(masks >> np.uint64(p) & np.uint64(1)).sum() for p in range(num_parts)] for masks in held]
    return Replication(np.array(counts, np.int64), np.array(edges[::-1], np.int64).reshape(num_layers, num_parts))


def dgcl_r_seconds(
    edge_index: Ids,
    machine: NDArray[np.integer],
    topology: Topology,
    num_layers: int,
    cut: Callable[[Ids, int, int], NDArray[np.integer]],
) -> NDArray[np.float64]:
    """Returns the time of the allgather of each layer under DGCL-R, for rows of one byte, ``[K]`` (DGCL Table 5).

    Each machine holds the K-hop neighbourhood of its own nodes, divided over its devices, and plans by SPST among these. In layer
    l it computes the nodes within K - l hops, and needs their sources. The slowest machine counts.

    Args:
        edge_index: int64 ``[2, E]``.
        machine: host of each node, a position in ``topology.hosts``, ``[N]``.
        topology: its hosts are of at least one device each.
        num_layers: K.
        cut: divides a machine's nodes over its devices: of ``(edge_index, num_nodes, num_parts)`` the part of each node.
    """
    seconds = np.zeros((num_layers, len(topology.hosts)))
    for number, host in enumerate(topology.hosts):
        inside = topology.among(host)
        within = [machine == number]
        for _ in range(num_layers):
            grown = within[-1].copy()
            grown[edge_index[0, within[-1][edge_index[1]]]] = True
            within.append(grown)
        held = np.flatnonzero(within[-1])
        local = np.cumsum(within[-1]) - 1
        reached = local[edge_index[:, within[-2][edge_index[1]]]]
        part = cut(reached, len(held), len(host))
        order = np.argsort(part, kind="stable")
        new = np.empty_like(order)
        new[order] = np.arange(len(order))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(part, minlength=len(host)))])
        for layer in range(num_layers):
            computed = within[num_layers - 1 - layer][held]
            relation = Relation.from_edges(new[reached[:, computed[reached[1]]]], offsets)
            seconds[layer, number] = plan_cost(spst(relation, inside), inside).seconds()
    return seconds.max(1)


@numba.njit(cache=True)
def _grow(source: Ids, target: Ids, held: Masks, num_parts: int) -> tuple[Masks, Ids]:
    """Returns the closure of each part by one hop, as bits per node, and the edges that were followed, ``[P]``."""
    grown, edges = held.copy(), np.zeros(num_parts, np.int64)
    for edge in range(len(source)):
        parts = held[target[edge]]
        grown[source[edge]] |= parts
        for p in range(num_parts):
            edges[p] += np.int64(parts >> np.uint64(p) & np.uint64(1))
    return grown, edges
