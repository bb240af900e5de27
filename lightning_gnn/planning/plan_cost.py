"""The time that a plan takes, by the cost model of DGCL section 5.1: stages follow each other, hops work side by side.

K stages, H hops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.planning.plan import Plan, check_devices, p2p
from lightning_gnn.planning.relation import Relation
from lightning_gnn.planning.topology import Topology


@dataclass(frozen=True)
class PlanCost:
    """What a plan puts on each hop.

    Attributes:
        topology: whose hops.
        hop_rows: rows that cross each hop in each stage, ``[K, H]``; no whole numbers where parts of rows travel.
    """

    topology: Topology
    hop_rows: NDArray[np.int64] | NDArray[np.float64]

    @cached_property
    def hop_seconds(self) -> NDArray[np.float64]:
        """Time of each hop in each stage for rows of one byte, ``[K, H]``."""
        return self.hop_rows / (self.topology.gb_per_s * 1e9)

    def stage_seconds(self, row_bytes: float = 1) -> NDArray[np.float64]:
        """Returns the time of each stage, that of its busiest hop, ``[K]``."""
        return self.hop_seconds.max(1, initial=0) * row_bytes

    def seconds(self, row_bytes: float = 1) -> float:
        """Returns the time of one allgather of rows of so many bytes."""
        return float(self.stage_seconds(row_bytes).sum())

    def kind_seconds(self, row_bytes: float = 1) -> dict[str, float]:
        """Returns the time if all other kinds of hops took none (DGCL Table 7): alike, if the plan balances them."""
        kinds = np.array([hop.kind for hop in self.topology.hops])
        return {
            str(kind): float(self.hop_seconds[:, kinds == kind].max(1).sum() * row_bytes) for kind in np.unique(kinds)
        }


def plan_cost(plan: Plan, topology: Topology) -> PlanCost:
    """Returns the cost of `plan` on `topology`.

    Raises:
        ValueError: they are of different numbers of devices.
    """
    check_devices(plan.relation, topology)
    return PlanCost(topology, np.einsum("kab,abh->kh", plan.traffic, topology.passes))


def direct_cost(traffic: NDArray[np.int64] | NDArray[np.float64], topology: Topology) -> PlanCost:
    """Returns the cost of rows that each device sends to each other one directly, in stages, ``[K, P, P]``.

    Raises:
        ValueError: the topology has another number of devices, or two devices that exchange rows have no link.
    """
    if traffic.shape[1] != topology.num_devices:
        raise ValueError(
            f"{traffic.shape[1]} ranks exchange rows, but topology {topology.name!r} has {topology.num_devices} devices. "
            f"Take topology.for_ranks({traffic.shape[1]}), or one that is large enough."
        )
    for sender, receiver in np.argwhere(traffic.any(0)).tolist():
        if (sender, receiver) not in topology.links:
            raise ValueError(
                f"Device {sender} has rows for device {receiver}, but topology {topology.name!r} has no link between them, and "
                'products on a process grid relay nothing. Let a plan relay: strategy="dgcl".'
            )
    return PlanCost(topology, np.einsum("kab,abh->kh", traffic, topology.passes))


WORTH_RELAYING = 1.05
"""Stages cost something beside their rows: measured up to 3 % where relays save nothing."""


def direct_is_as_fast(plan: Plan, topology: Topology) -> bool:
    """Returns whether all that `plan` moves could go directly, in about the same time."""
    try:
        direct = p2p(plan.relation, topology)
    except ValueError:  # two devices without a link
        return False
    return plan_cost(direct, topology).seconds() <= plan_cost(plan, topology).seconds() * WORTH_RELAYING


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
