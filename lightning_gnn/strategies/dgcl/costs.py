"""Communication volume and time of one exchange of ``dgcl`` under each plan, for ``lightning-gnn plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload, edge_exchange, exchange_costs, fastest_for
from lightning_gnn.extensions.plans.plan import check_devices, p2p
from lightning_gnn.extensions.plans.plan_cost import plan_cost, swap_cost
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.ways import PricedPlan
from lightning_gnn.partition.layout import Replicas
from lightning_gnn.partition.replicas import hold
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme


@exchange_costs.register
def _(scheme: DGCLScheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    if topology is None:
        return [edge_exchange("p2p", work, None, followed=True)]
    found = {each.scheme: each for each in plan_exchanges(work, topology)}
    plan, name = found["spst"].plan, "spst" if scheme.plan == "auto" else scheme.plan
    direct = plan is None or plan.num_stages <= 1 or (scheme.plan == "auto" and topology.uniform)
    if name == "spst" and direct:
        name = "p2p"
    return [replace(each, followed=each.scheme == name) for each in found.values()]


def plan_exchanges(work: Workload, topology: Topology) -> list[ExchangeCost]:
    """Returns the exchanges of ``DGCLStrategy(plan=...)``: p2p, spst, swap, replicate and dgcl_r."""
    check_devices(work.relation.num_devices, topology)
    parts = edge_exchange("", work, None)  # nodes and edges of each rank under plans that do not replicate
    found = []
    try:
        plan = p2p(work.relation, topology)
        found.append(_price_plan("p2p", PricedPlan(plan, plan_cost(plan, topology)), work, parts))
    except ValueError as error:  # two devices without a link
        found.append(ExchangeCost("p2p", reason=str(error)))
    found.append(_price_plan("spst", fastest_for(work.relation, topology, work), work, parts))
    try:
        cost = swap_cost(work.relation, topology)
        rows = int(work.relation.offsets[-1] + work.relation.pair_rows.sum())
        found.append(replace(parts, scheme="swap", rows=rows, seconds=cost.seconds(work.row_bytes), cost=cost))
    except ValueError as error:  # several machines, or no data about the memory
        found.append(ExchangeCost("swap", reason=str(error)))
    found.append(_price_replication("replicate", work, topology, tuple((device,) for device in range(topology.num_devices))))
    if len(topology.hosts) > 1:
        return [*found, _price_replication("dgcl_r", work, topology, topology.hosts)]
    reason = f"It replicates to avoid messages between machines, but topology {topology.name!r} has one machine."
    return [*found, ExchangeCost("dgcl_r", reason=reason)]


def _price_plan(name: str, priced: PricedPlan, work: Workload, parts: ExchangeCost) -> ExchangeCost:
    plan, cost = priced.plan, priced.cost
    seconds, rows = cost.seconds(work.row_bytes), int(plan.traffic.sum())
    return replace(parts, scheme=name, rows=rows, seconds=seconds, plan=plan, cost=cost)


def _price_replication(name: str, work: Workload, topology: Topology, groups: tuple[tuple[int, ...], ...]) -> ExchangeCost:
    """Returns the exchange of a group of ranks that stores neighborhoods jointly (DGCL-R, Table 5), as in training."""
    held = hold(work.edge_index, work.relation.offsets, Replicas(work.num_layers, groups))
    relation = Relation.from_halos(held.halos, held.offsets)
    factor = float((held.offsets[-1] + relation.pair_rows.sum()) / max(1, work.relation.offsets[-1]))
    parts = ExchangeCost(name, edges=held.num_edges, replication=factor)
    return _price_plan(name, fastest_for(relation, topology, work), work, parts)
