"""The time that a plan takes, by the cost model of DGCL section 5.1: stages follow each other, hops work side by side.

K stages, H hops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.planning.plan import Plan, check_devices
from lightning_gnn.planning.topology import Topology


@dataclass(frozen=True)
class PlanCost:
    """What a plan puts on each hop.

    Attributes:
        topology: whose hops.
        hop_rows: rows that cross each hop in each stage, int64 ``[K, H]``.
    """

    topology: Topology
    hop_rows: NDArray[np.int64]

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
