"""Plans over links and their predicted times, and the exchange that selects the fastest plan for each row width.

Source: DGCL section 5.1, extended by fixed times of stages. Relaying in more stages reduces traffic on slow links and adds the
time of the stages. So narrow rows are sent directly, and wide rows over relays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.console import progress_bar
from lightning_gnn.extensions.plans.hierarchy import loads, plan_through_hosts, prices
from lightning_gnn.extensions.plans.plan import Plan, p2p
from lightning_gnn.extensions.plans.plan_cost import PlanCost, plan_cost
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import RankPlan, rank_plan
from lightning_gnn.extensions.plans.topology import Hosts, Topology
from lightning_gnn.partition.shard import HaloPlan, Ids

STAGES = (3, 2, 1)
"""Maximum numbers of stages of the plans compared with the unlimited plan; 1 is the direct exchange."""

WIDEST = 20
"""Largest exponent: plans are compared for rows of 2^0 to 2^WIDEST bytes."""


@dataclass(frozen=True)
class PricedPlan:
    """Plan with its cost.

    Attributes:
        plan: plan named ``"p2p"`` if it has at most one stage, in which rows are sent directly.
        cost: cost on the topology that the plan was made for.
    """

    plan: Plan
    cost: PlanCost


def fastest_plans(relation: Relation, topology: Topology) -> list[PricedPlan]:
    """Returns the plans that are each the fastest for some row width, fewest stages first.

    Raises:
        ValueError: if the relation and the topology have different numbers of devices.
    """
    with progress_bar(f"Planning over {topology.name}", 1 + len(STAGES), "plans") as advance:
        plans = [spst(relation, topology)]
        for max_stages in STAGES:
            advance(1)
            if max_stages < plans[0].num_stages:
                try:
                    plans.append(spst(relation, topology, max_stages=max_stages))
                except ValueError:  # some devices are not reachable within this number of stages
                    break
    priced = [PricedPlan(plan, plan_cost(plan, topology)) for plan in reversed(plans)]
    chosen = {id(fastest(priced, 2.0**power)) for power in range(WIDEST + 1)}
    return [each for each in priced if id(each) in chosen]


def fastest(plans: list[PricedPlan], row_bytes: float) -> PricedPlan:
    """Returns the plan with the least time for rows of `row_bytes`; the first plan on ties."""
    return min(plans, key=lambda plan: plan.cost.seconds(row_bytes))


class ExchangeByWidth(Exchange):
    """Exchange with the least predicted time for the width of the rows (DGCL section 5.1).

    All ranks have the same prices and exchange rows of the same width, so they make the same choice.

    Args:
        choices: exchanges of the same rows, each with its :attr:`~lightning_gnn.extensions.plans.plan_cost.PlanCost.price`.
        world, meter: see :class:`~lightning_gnn.comm.exchange.Exchange`.
    """

    in_stages = True

    def __init__(self, choices: Sequence[tuple[Exchange, tuple[float, float]]], world: World, meter: Meter) -> None:
        self._exchanges, self._prices = zip(*choices)
        first = self._exchanges[0]
        idle = all(exchange.idle for exchange in self._exchanges)
        super().__init__(first.num_owned, first.num_halo, world, meter, idle)

    def of(self, row_bytes: int) -> Exchange:
        """Returns the exchange for rows of `row_bytes`."""
        seconds = [fixed + row_bytes * each for fixed, each in self._prices]
        return self._exchanges[seconds.index(min(seconds))]

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        return self.of(_row_bytes(x)).start_expand(x, halo, call)

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        return self.of(_row_bytes(halo)).start_reduce(halo, call)


def relayed_by(exchange: Exchange | None, row_bytes: int) -> PlannedExchange | None:
    """Returns the exchange in stages that is used for rows of `row_bytes`; None for direct exchange."""
    if isinstance(exchange, ExchangeByWidth):
        exchange = exchange.of(row_bytes)
    return exchange if isinstance(exchange, PlannedExchange) else None


def route_of(exchange: Exchange | None, row_bytes: int) -> Plan | None:
    """Returns the plan that is used for rows of `row_bytes`, if it is stored; None for direct exchange."""
    relayed = relayed_by(exchange, row_bytes)
    return None if relayed is None else relayed.route


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


def follow_links(plan: str, topology: Topology | Hosts, args: tuple[HaloPlan, Sequence[Ids], Ids, World, Meter]) -> Exchange:
    """Returns this rank's exchange under a plan that depends on links.

    The arguments are described in :func:`~lightning_gnn.extensions.plans.scheme.make_exchange`; `args` is the tuple of the last
    five.
    """
    rows, halos, offsets, world, meter = args
    if isinstance(topology, Hosts):
        ways = [Way()] if plan == "p2p" else _ways_through_hosts(topology, rows, halos, offsets, world)
        return follow(ways, rows, world, meter)
    relation = Relation.from_halos(halos, offsets)
    if plan == "p2p":
        p2p(relation, topology)  # raises if rows cannot be sent directly
        return HaloExchange(rows, world, meter)
    # Rank 0 plans and broadcasts its trees, a few bytes per group of nodes. If each rank planned, machines with different
    # topology files or roundings would wait for each other forever.
    found = make_plans(relation, topology) if world.rank == 0 else []
    trees = [(each.cost.price, each.plan.bounds, each.plan.parent, each.plan.stage) for each in found]
    ways = []
    for price, bounds, parent, stage in world.broadcast_object(trees):
        route = Plan("spst", relation, bounds, parent, stage)
        ways.append(Way.of(route, price, world.rank, keep=world.rank == 0))
    return follow(ways, rows, world, meter)


@dataclass(frozen=True)
class Way:
    """Plan for one range of row widths, or the direct exchange.

    Attributes:
        price: price of its cost, used to select the fastest.
        tables: this rank's part of a plan; None for direct exchange.
        route: the plan of all ranks, if it is kept for display.
    """

    price: tuple[float, float] = (0.0, 0.0)
    tables: RankPlan | None = None
    route: Plan | None = None

    @classmethod
    def of(cls, plan: Plan, price: tuple[float, float], rank: int, keep: bool = False) -> Way:
        return cls(price, rank_plan(plan, rank), plan if keep else None) if plan.num_stages > 1 else cls(price)


def _ways_through_hosts(hosts: Hosts, rows: HaloPlan, halos: Sequence[Ids], offsets: Ids, world: World) -> list[Way]:
    """Returns the direct exchange and the two-stage plan, without any of them that is slower at every width."""
    tables = plan_through_hosts(world.rank, hosts, rows, halos, offsets)
    mine = torch.from_numpy(loads(world.rank, hosts, rows, tables)).to(world.device)
    everyones = world.all_gather(mine, "Gathering what plans cost").cpu().numpy()
    direct, staged = prices(hosts, everyones)
    across, through = (int(each) for each in everyones[:, :2, 0].sum(0))
    if staged[0] >= direct[0] and staged[1] >= direct[1]:
        rank_zero_info(f"Using direct exchange: between {hosts.name}, no relay is faster")
        return [Way(direct)]
    rank_zero_info(f"Relaying between {hosts.name}: {through:,} rows per exchange, each once to a machine ({across:,} directly)")
    ways = [Way(direct), Way(staged, tables)]
    return ways[1:] if staged[0] <= direct[0] and staged[1] <= direct[1] else ways


def make_plans(relation: Relation, topology: Topology) -> list[PricedPlan]:
    """Returns each plan that is the fastest for at least one row width; rank 0 logs the plans."""
    began = time.perf_counter()
    priced = fastest_plans(relation, topology)
    rank_zero_info(_log_line(priced, topology, time.perf_counter() - began))
    return priced


def follow(ways: Sequence[Way], rows: HaloPlan, world: World, meter: Meter) -> Exchange:
    """Returns an exchange that uses the fastest of `ways` for each row width."""
    choices: list[tuple[Exchange, tuple[float, float]]] = []
    for way in ways:
        if way.tables is None:
            choices.append((HaloExchange(rows, world, meter), way.price))
        else:
            choices.append((PlannedExchange(way.tables, world, meter, way.route), way.price))
    return choices[0][0] if len(choices) == 1 else ExchangeByWidth(choices, world, meter)


def _log_line(priced: list[PricedPlan], topology: Topology, seconds: float) -> str:
    """Returns the log line about the plans."""
    relayed = [each.plan for each in priced if each.plan.num_stages > 1]
    if not relayed:
        return f"Using direct exchange: over {topology.name}, no relay is faster"
    rows = relayed[0].relation.pair_rows.sum()
    plans = " or ".join(f"{plan.traffic.sum():,} rows in {plan.num_stages} stages" for plan in relayed)
    narrow = "; narrow rows are sent directly" if len(relayed) < len(priced) else ""
    return f"SPST over {topology.name}: an exchange moves {plans} ({rows:,} directly){narrow}; planned in {seconds:.1f} s"
