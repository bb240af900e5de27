"""What ``lightning-gnn plan`` tells: the exchanges of a strategy and of others, the load of links, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_gnn.checks.memory import training_bytes
from lightning_gnn.data.shards import Cut
from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload
from lightning_gnn.extensions.plans.plan_cost import Balance, LinkLoad, balance, link_loads
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.registry import costs_of
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.scheme import Scheme
from lightning_gnn.tools.advising.candidates import candidates


@dataclass(frozen=True)
class PlanReport:
    """All that ``plan`` prints.

    Attributes:
        work, topology: what is trained, on what; no topology for no times.
        exchanges: of the strategy first, then of all others that are registered.
        links: of the plan that is followed, the busiest first; empty if it is none, and so is what follows.
        balance: between kinds of hops.
        table_bytes: of the send and receive tables, of each rank.
        training_bytes: a low estimate of each rank's peak, see :func:`~lightning_gnn.checks.memory.training_bytes`.
    """

    work: Workload
    topology: Topology | None
    exchanges: tuple[ExchangeCost, ...]
    links: tuple[LinkLoad, ...] = ()
    balance: Balance | None = None
    table_bytes: tuple[int, ...] = ()
    training_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, scheme: Scheme, work: Workload, topology: Topology | None, cut: Cut) -> PlanReport:
        """Returns the report on a strategy's scheme."""
        own = [replace(each, scheme=each.scheme or name) for each in costs_of(scheme, work, topology)]
        if not own:
            reason = f"no prediction, since {type(scheme).__name__} registers no exchange_costs (docs/own-scheme.md)"
            own = [ExchangeCost(name, followed=True, reason=reason)]
        report = cls(work, topology, (*own, *_others(own, scheme, work, topology)))
        followed = report.followed
        if followed.plan is None or topology is None:
            if isinstance(scheme, DGCLScheme) and followed.reason:
                raise ValueError(followed.reason)
            return report
        ranks = [rank_plan(followed.plan, rank) for rank in range(topology.num_devices)]
        peaks = (
            training_bytes(*size, work.feature_bytes, work.row_bytes, work.num_layers, rank.num_relayed)
            for size, rank in zip(cut.sizes(), ranks)
        )
        assert followed.cost is not None
        return replace(
            report,
            links=tuple(link_loads(followed.plan, topology, work.row_bytes)),
            balance=balance(followed.cost, work.row_bytes),
            table_bytes=tuple(rank.table_bytes for rank in ranks),
            training_bytes=tuple(peaks),
        )

    @property
    def followed(self) -> ExchangeCost:
        return next(each for each in self.exchanges if each.followed)

    @property
    def largest_share(self) -> float:
        """Memory of tables over that of training (DGCL Figure 11) on the rank where it is most; the latter is too low."""
        return max(tables / peak for tables, peak in zip(self.table_bytes, self.training_bytes))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON: seconds, bytes, rows; None for what is unknown."""
        work, plan, cost = self.work, self.followed.plan, self.followed.cost
        found = {
            "topology": self.topology and self.topology.name,
            "parts": work.relation.num_devices,
            "nodes": int(work.relation.offsets[-1]),
            "edges": int(work.edge_index.shape[1]),
            "layers": work.num_layers,
            "columns": work.columns,
            "features": work.features,
            "row_bytes": work.row_bytes,
            "follows": self.followed.scheme,
            "exchanges": [each.as_dict() for each in self.exchanges],
            "replication_factors": list(work.replication_factors),
        }
        if plan is None or cost is None or self.balance is None:
            return found
        return found | {
            "plan": plan.name,
            "stages": plan.num_stages,
            "stage_seconds": cost.stage_seconds(work.row_bytes).tolist(),
            "links": [load.as_dict(work.row_bytes) for load in self.links],
            "balance": self.balance.as_dict(),
            "tables": {
                "table_bytes": list(self.table_bytes),
                "training_bytes": list(self.training_bytes),
                "largest_share": self.largest_share,
            },
        }


def _others(own: Sequence[ExchangeCost], scheme: Scheme, work: Workload, topology: Topology | None) -> list[ExchangeCost]:
    found, seen = {each.scheme: each for each in own}, {type(scheme)}
    kind = scheme.layout(work.relation.num_devices).kind
    for candidate in candidates(work.relation.num_devices):
        other = candidate.strategy().scheme
        if type(other) in seen or not candidate.full_graph or other.layout(work.relation.num_devices).kind != kind:
            continue
        seen.add(type(other))
        for each in costs_of(other, work, topology):
            name = each.scheme or candidate.name
            found.setdefault(name, replace(each, scheme=name, followed=False))
    return list(found.values())[len(own) :]
