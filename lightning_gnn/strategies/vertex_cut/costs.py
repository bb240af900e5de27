"""Communication volume and time of one exchange of ``vertex_cut``, for ``lightning-gnn plan``."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload, edge_exchange, exchange_costs
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.strategies.vertex_cut.strategy import VertexCutScheme


@exchange_costs.register
def _(scheme: VertexCutScheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    return [edge_exchange("", work, topology, followed=True)]
