"""Communication volume and time of one exchange of ``cover``, for ``lightning-gnn plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload, edge_exchange, exchange_costs, planned_edges
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.strategies.cover.covers import cover_edges
from lightning_gnn.strategies.cover.strategy import CoverScheme


@exchange_costs.register
def _(scheme: CoverScheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    covered = cover_edges(work.edge_index, work.owner, work.relation.num_devices)
    direct = edge_exchange("", work, topology, covered)
    if topology is None or scheme.plan == "p2p":
        return [replace(direct, followed=True)]
    return [direct, planned_edges(direct, work, topology, covered, scheme="cover spst", followed=True)]
