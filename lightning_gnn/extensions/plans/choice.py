"""Which plan is the fastest for rows of which width, by the cost model of DGCL section 5.1 with the time that stages take.

Relaying in more stages saves what crosses slow links and costs the time of the stages: narrow rows go directly, wide ones over
relays.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gnn.console import progress_bar
from lightning_gnn.extensions.plans.plan import Plan
from lightning_gnn.extensions.plans.plan_cost import PlanCost, plan_cost
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.topology import Topology

STAGES = (3, 2, 1)
"""How many stages the plans may have that are compared with the one of any number; 1 is the direct exchange."""

WIDEST = 20
"""Plans are made that are the fastest for rows of some power of two bytes, up to this power."""


@dataclass(frozen=True)
class PricedPlan:
    """A plan and its cost.

    Attributes:
        plan: named ``"p2p"`` if it has one stage at most, in which rows go directly.
        cost: on the topology that it was made for.
    """

    plan: Plan
    cost: PlanCost


def fastest_plans(relation: Relation, topology: Topology) -> list[PricedPlan]:
    """Returns the plans that are each the fastest for rows of some width, fewest stages first.

    Raises:
        ValueError: the relation and the topology are of different numbers of devices.
    """
    with progress_bar(f"Planning over {topology.name}", 1 + len(STAGES), "plans") as told:
        plans = [spst(relation, topology)]
        for most in STAGES:
            told(1)
            if most < plans[0].num_stages:
                try:
                    plans.append(spst(relation, topology, max_stages=most))
                except ValueError:  # not all devices reach each other in so few stages
                    break
    made = [PricedPlan(plan, plan_cost(plan, topology)) for plan in reversed(plans)]
    chosen = {id(fastest(made, 2.0**power)) for power in range(WIDEST + 1)}
    return [each for each in made if id(each) in chosen]


def fastest(plans: list[PricedPlan], row_bytes: float) -> PricedPlan:
    """Returns the plan that takes the least time for rows of so many bytes, of equal ones the first."""
    return min(plans, key=lambda each: each.cost.seconds(row_bytes))
