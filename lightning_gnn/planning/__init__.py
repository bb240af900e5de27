"""Who sends what when, and what it costs; runs without ranks."""

from lightning_gnn.planning.choice import PricedPlan, fastest, fastest_plans
from lightning_gnn.planning.plan import Plan, p2p
from lightning_gnn.planning.plan_cost import plan_cost
from lightning_gnn.planning.presets import find_topology
from lightning_gnn.planning.relation import Relation
from lightning_gnn.planning.spst import spst
from lightning_gnn.planning.tables import rank_plan
from lightning_gnn.planning.topology import Topology

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
