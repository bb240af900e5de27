"""What ``lightning-gnn plan`` finds out; printed by ``plan_print.py``.

P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_gnn.checks.memory import training_bytes
from lightning_gnn.data.shards import Cut
from lightning_gnn.partition.cost import SECONDS_PER_EDGE_COLUMN
from lightning_gnn.planning.plan import Plan
from lightning_gnn.planning.plan_cost import PlanCost, direct_is_as_fast
from lightning_gnn.planning.predict import (
    Balance,
    LinkLoad,
    Prediction,
    Workload,
    balance,
    break_even_seconds,
    link_loads,
    predict,
)
from lightning_gnn.planning.predict_grid import Products, grid_name, predict_products
from lightning_gnn.planning.tables import rank_plan
from lightning_gnn.planning.topology import Topology
from lightning_gnn.strategies.spmm import CubeScheme, ProductScheme, SpMMScheme


@dataclass(frozen=True)
class Tables:
    """Memory of the send and receive tables against that of training (DGCL Figure 11), bytes per rank, ``[P]`` each.

    Attributes:
        table_bytes: of both directions.
        training_bytes: a low estimate of the peak, see :func:`~lightning_gnn.checks.memory.training_bytes`.
    """

    table_bytes: tuple[int, ...]
    training_bytes: tuple[int, ...]

    @property
    def largest_share(self) -> float:
        """Of the rank where tables weigh most; rather too large, since the estimate is low."""
        return max(tables / peak for tables, peak in zip(self.table_bytes, self.training_bytes))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON."""
        return {
            "table_bytes": list(self.table_bytes),
            "training_bytes": list(self.training_bytes),
            "largest_share": self.largest_share,
        }


@dataclass(frozen=True)
class PlanDetails:
    """What is told of a plan that is followed.

    Attributes:
        plan, cost: itself.
        links: that it uses, the busiest first.
        balance: between kinds of hops.
        tables: of all ranks.
    """

    plan: Plan
    cost: PlanCost
    links: tuple[LinkLoad, ...]
    balance: Balance
    tables: Tables

    def as_dict(self, row_bytes: int) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON: seconds, bytes, rows."""
        return {
            "plan": self.plan.name,
            "stages": self.plan.num_stages,
            "stage_seconds": self.cost.stage_seconds(row_bytes).tolist(),
            "links": [load.as_dict(row_bytes) for load in self.links],
            "balance": self.balance.as_dict(),
            "tables": self.tables.as_dict(),
        }


@dataclass(frozen=True)
class PlanReport:
    """All that ``plan`` tells.

    Attributes:
        work: what is trained.
        topology: None if no times are asked for.
        follows: the scheme, among the predictions, that ``fit`` would follow.
        products: on a process grid.
        predictions: of all schemes; empty without a topology.
        plan: the one that is followed; None if that is a product.
    """

    work: Workload
    topology: Topology | None
    follows: str
    products: Products
    predictions: tuple[Prediction, ...]
    plan: PlanDetails | None

    @classmethod
    def of(cls, work: Workload, topology: Topology, asked: str, cut: Cut) -> PlanReport:
        """Returns the report on the plan of that name; of SPST for names that have no plan of their own.

        Raises:
            ValueError: the plan does not apply: two devices exchange rows but have no link.
        """
        predictions, products = _all(work, topology)
        by_name = {each.scheme: each for each in predictions}
        planned = by_name["spst"].plan
        direct = asked == "auto" and planned is not None and direct_is_as_fast(planned, topology)
        chosen = by_name["p2p" if direct else asked if asked in ("p2p", "dgcl_r") else "spst"]
        if chosen.plan is None or chosen.cost is None:
            raise ValueError(chosen.reason)
        ranks = [rank_plan(chosen.plan, rank) for rank in range(topology.num_devices)]
        peaks = (
            training_bytes(*size, work.feature_bytes, work.row_bytes, work.num_layers, rank.num_relayed)
            for size, rank in zip(cut.sizes(), ranks)
        )
        details = PlanDetails(
            chosen.plan,
            chosen.cost,
            tuple(link_loads(chosen.plan, topology, work.row_bytes)),
            balance(chosen.cost, work.row_bytes),
            Tables(tuple(rank.table_bytes for rank in ranks), tuple(peaks)),
        )
        return cls(work, topology, chosen.scheme, products, predictions, details)

    @classmethod
    def of_product(cls, work: Workload, topology: Topology | None, scheme: ProductScheme) -> PlanReport:
        """Returns the report on training with products; without a topology, on what they move and hold only."""
        predictions, products = _all(work, topology)
        return cls(work, topology, _followed(scheme, products), products, predictions, None)

    def prediction(self, scheme: str) -> Prediction:
        """Returns the prediction of one scheme."""
        return next(each for each in self.predictions if each.scheme == scheme)

    @property
    def break_even_seconds(self) -> float | None:
        """Seconds per edge and column below which replication beats what is followed; see ``planning/predict.py``."""
        if self.topology is None or not self.prediction(self.follows).applies:
            return None
        return break_even_seconds(self.prediction(self.follows), self.prediction("replicate"))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON: seconds, bytes, rows; None for what is unknown."""
        work = self.work
        return {
            "topology": None if self.topology is None else self.topology.name,
            "parts": work.relation.num_devices,
            "nodes": int(work.relation.offsets[-1]),
            "edges": int(work.edge_index.shape[1]),
            "layers": work.num_layers,
            "columns": work.columns,
            "features": work.features,
            "row_bytes": work.row_bytes,
            "keep_constant": work.keep_constant,
            "seconds_per_edge_column": SECONDS_PER_EDGE_COLUMN,
            "follows": self.follows,
            "predictions": [each.as_dict() for each in self.predictions],
            "products": self.products.as_dict(),
            "break_even_seconds_per_edge_column": self.break_even_seconds,
            "replication_factors": list(work.replication_factors),
            **({} if self.plan is None else self.plan.as_dict(work.row_bytes)),
        }


def _all(work: Workload, topology: Topology | None) -> tuple[tuple[Prediction, ...], Products]:
    products = predict_products(work, topology)
    of_products = (each.prediction for each in products.all if each.prediction is not None)
    return (*([] if topology is None else predict(work, topology)), *of_products), products


def _followed(scheme: ProductScheme, products: Products) -> str:
    """Returns which of the products a strategy makes."""
    if isinstance(scheme, CubeScheme):
        return f"spmm_{scheme.dimensions}d"
    assert isinstance(scheme, SpMMScheme)
    chosen = scheme.replication or products.chosen[not scheme.sparsity_aware]
    return grid_name(chosen, scheme.sparsity_aware)
