"""The ways in which rows may travel over links, by the cost model, and the exchange that takes the fastest for each width."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans.by_width import ExchangeByWidth
from lightning_gnn.extensions.plans.choice import PricedPlan, fastest_plans
from lightning_gnn.extensions.plans.hierarchy import loads, plan_through_hosts, prices
from lightning_gnn.extensions.plans.plan import Plan, p2p
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.tables import RankPlan, rank_plan
from lightning_gnn.extensions.plans.topology import Hosts, Topology
from lightning_gnn.partition.shard import HaloPlan, Ids


def follow_links(
    plan: str,
    topology: Topology | Hosts,
    rows: HaloPlan,
    halos: Sequence[Ids],
    offsets: Ids,
    world: World,
    meter: Meter,
) -> Exchange:
    """Returns this rank's exchange under a plan that looks at links; arguments as of
    :func:`~lightning_gnn.extensions.plans.make_exchange.make_exchange`."""
    if isinstance(topology, Hosts):
        ways = [Way()] if plan == "p2p" else _ways_through_hosts(topology, rows, halos, offsets, world)
        return follow(ways, rows, world, meter)
    relation = Relation.from_halos(halos, offsets)
    if plan == "p2p":
        p2p(relation, topology)  # refuses what it cannot send
        return HaloExchange(rows, world, meter)
    # One rank plans, and the others get its trees, some bytes per group of nodes: were each to plan, machines whose
    # topology files or roundings differ would wait for each other forever.
    found = planned(relation, topology) if world.rank == 0 else []
    trees = [(each.cost.price, each.plan.bounds, each.plan.parent, each.plan.stage) for each in found]
    ways = []
    for price, bounds, parent, stage in world.broadcast_object(trees):
        route = Plan("spst", relation, bounds, parent, stage)
        ways.append(Way.of(route, price, world.rank, keep=world.rank == 0))
    return follow(ways, rows, world, meter)


@dataclass(frozen=True)
class Way:
    """One of the ways in which rows may travel.

    Attributes:
        price: of its cost, by which the fastest is taken.
        tables: this rank's part of a plan; None for directly.
        route: the plan of all ranks, where it is kept to be shown.
    """

    price: tuple[float, float] = (0.0, 0.0)
    tables: RankPlan | None = None
    route: Plan | None = None

    @classmethod
    def of(cls, plan: Plan, price: tuple[float, float], rank: int, keep: bool = False) -> Way:
        return cls(price, rank_plan(plan, rank), plan if keep else None) if plan.num_stages > 1 else cls(price)


def _ways_through_hosts(hosts: Hosts, rows: HaloPlan, halos: Sequence[Ids], offsets: Ids, world: World) -> list[Way]:
    """Returns direct rows and the plan of two stages, or one of them where the other is slower at any width."""
    tables = plan_through_hosts(world.rank, hosts, rows, halos, offsets)
    mine = torch.from_numpy(loads(world.rank, hosts, rows, tables)).to(world.device)
    everyones = world.all_gather(mine, "Gathering what plans cost").cpu().numpy()
    direct, staged = prices(hosts, everyones)
    across, through = (int(each) for each in everyones[:, :2, 0].sum(0))
    if staged[0] >= direct[0] and staged[1] >= direct[1]:
        rank_zero_info(f"Rows travel directly: between {hosts.name}, no relay would be faster")
        return [Way(direct)]
    rank_zero_info(f"Between {hosts.name}, an exchange moves {through:,} rows, each once to a machine ({across:,} directly)")
    ways = [Way(direct), Way(staged, tables)]
    return ways[1:] if staged[0] <= direct[0] and staged[1] <= direct[1] else ways


def planned(relation: Relation, topology: Topology) -> list[PricedPlan]:
    """Returns the plans that are the fastest for some width, and says in the log of rank 0 which."""
    began = time.perf_counter()
    found = fastest_plans(relation, topology)
    rank_zero_info(_told(found, topology, time.perf_counter() - began))
    return found


def follow(ways: Sequence[Way], rows: HaloPlan, world: World, meter: Meter) -> Exchange:
    """Returns the exchange that takes the fastest of several ways for rows of each width."""
    choices: list[tuple[Exchange, tuple[float, float]]] = []
    for way in ways:
        if way.tables is None:
            choices.append((HaloExchange(rows, world, meter), way.price))
        else:
            choices.append((PlannedExchange(way.tables, world, meter, way.route), way.price))
    return choices[0][0] if len(choices) == 1 else ExchangeByWidth(choices, world, meter)


def _told(found: list[PricedPlan], topology: Topology, seconds: float) -> str:
    """Returns what is said of the plans that were found."""
    relayed = [each.plan for each in found if each.plan.num_stages > 1]
    if not relayed:
        return f"Rows travel directly: over {topology.name}, no relay would be faster"
    rows = relayed[0].relation.pair_rows.sum()
    plans = " or ".join(f"{plan.traffic.sum():,} rows in {plan.num_stages} stages" for plan in relayed)
    narrow = "; narrow rows travel directly" if len(relayed) < len(found) else ""
    return f"SPST over {topology.name}: an exchange moves {plans} ({rows:,} directly){narrow}; planned in {seconds:.1f} s"
