"""Who sends what when, and what it costs; runs without ranks."""

from lightning_gnn.extensions.plans.choice import PricedPlan, fastest, fastest_plans
from lightning_gnn.extensions.plans.plan import Plan, p2p
from lightning_gnn.extensions.plans.plan_cost import plan_cost
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.extensions.plans.topology import Topology

__all__ = [
    "Plan",
    "PricedPlan",
    "Relation",
    "Topology",
    "fastest",
    "fastest_plans",
    "find_topology",
    "p2p",
    "plan_cost",
    "rank_plan",
    "spst",
]
