"""Predicted traffic and time of one exchange of a scheme by the cost model (DGCL section 5.1), computed without ranks.

An exchange serves one propagation, forward or backward. Both directions send the same rows over the same hops in opposite
directions.

N nodes, E edges, P ranks, S stages. Traffic is ``[S, P, P]``: stage, sender, receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.extensions.plans.plan import Plan, check_devices
from lightning_gnn.extensions.plans.plan_cost import PlanCost, direct_cost
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.ways import PricedPlan, fastest, fastest_plans
from lightning_gnn.partition.replicas import replication_factors
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategy.scheme import EdgeCutScheme, Scheme


@dataclass(frozen=True)
class Workload:
    """Partitioned graph and sizes of a model.

    Attributes:
        relation: communication relation: which devices need which rows.
        edge_index: all edges in the relation's ids, source and target, int64 ``[2, E]``.
        num_layers: number of propagations of the model.
        columns: width of the rows that layers exchange.
        features: width of the input features.
        element_bytes: bytes of one element.
        value_bytes: bytes of an edge weight, which is sent with blocks of the matrix; 0 if all weights are one.
        holder: for a vertex cut, the rank that computes each edge, ``[E]``; None if it is the owner of the edge's target.
    """

    relation: Relation
    edge_index: Ids
    num_layers: int
    columns: int
    features: int
    element_bytes: int = 4
    value_bytes: int = 0
    holder: Ids | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "columns", "features", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)}.")

    @property
    def row_bytes(self) -> int:
        return self.columns * self.element_bytes

    @property
    def feature_bytes(self) -> int:
        return self.features * self.element_bytes

    @cached_property
    def owner(self) -> Ids:
        """Rank of each node, int64 ``[N]``."""
        return np.repeat(np.arange(self.relation.num_devices), np.diff(self.relation.offsets))

    @cached_property
    def replication_factors(self) -> tuple[float, ...]:
        """Sum over ranks of stored nodes, with copies, divided by N, for 1 to `num_layers` hops (DGCL Figure 4)."""
        return replication_factors(self.edge_index, self.owner, self.relation.num_devices, self.num_layers)


@dataclass(frozen=True)
class ExchangeCost:
    """Cost of one exchange of a scheme; the module docstring describes exchanges.

    Attributes:
        scheme: name of the scheme; for a product on a process grid with its variant: ``"spmm_15d c=2 blocks"``.
        followed: whether ``fit`` uses this exchange.
        reason: the reason for missing seconds: the scheme does not apply to the topology.
        rows: number of rows that cross links, summed over ranks; relayed rows count each time. For a swap, rows written plus rows
            read; for products in column blocks, words divided by columns.
        seconds: time on a topology; None without a topology or if the scheme does not apply.
        edges: number of edges that each rank aggregates over all columns, ``[P]``.
        replication: rows that all ranks store, divided by N; None if blocks of rows are only passed on.
        matrix_bytes: bytes of the matrix blocks, which 2D and 3D products also send.
        paper_rows: rows by the paper's algorithm, which sends whole blocks; None if it has no formula.
        choice: for a scheme that chooses between several exchanges, data of this one, with ``rows`` and ``bytes_held``. For
            ``spmm_15d``, `rows` is an upper bound if sparsity-aware.
        plan, cost: the plan, if the scheme follows one, and its load on each hop.
    """

    scheme: str
    followed: bool = False
    reason: str = ""
    rows: int = 0
    seconds: float | None = None
    edges: NDArray[Any] = field(default_factory=lambda: np.zeros(1), repr=False, compare=False)
    replication: float | None = None
    matrix_bytes: int = 0
    paper_rows: int | None = None
    choice: Any = None
    plan: Plan | None = field(default=None, repr=False, compare=False)
    cost: PlanCost | None = field(default=None, repr=False, compare=False)

    @property
    def edge_balance(self) -> float:
        """Maximum number of edges per rank, divided by the mean; for 2D and 3D also by columns."""
        return float(self.edges.max() / self.edges.mean()) if self.edges.any() else 1.0

    def as_dict(self) -> dict[str, Any]:
        names = ("scheme", "followed", "reason", "rows", "seconds", "replication", "matrix_bytes", "paper_rows")
        return {name: getattr(self, name) for name in (*names, "edge_balance")} | {
            "edges": round(self.edges.sum()),
            "rows_to_choose_by": self.choice and self.choice.rows,
            "bytes_held": self.choice and self.choice.bytes_held,
        }


@singledispatch
def exchange_costs(scheme: Scheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    """Returns the exchanges that ``lightning-gnn plan`` shows for a scheme, one of them followed; needs no ranks.

    By default, the list is empty: nothing is predicted. ``@exchange_costs.register`` adds a function for a class of schemes.
    """
    return []


@exchange_costs.register
def _(scheme: EdgeCutScheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    return [edge_exchange("", work, topology, followed=True)]


def sent_directly(scheme: str, traffic: NDArray[Any], work: Workload, topology: Topology | None, **more: Any) -> ExchangeCost:
    """Returns an exchange that sends each row directly from its owner to the ranks that need it, in the stages of `traffic`."""
    more.setdefault("rows", int(traffic.sum()))
    if topology is None:
        return ExchangeCost(scheme, **more)
    check_devices(work.relation.num_devices, topology)
    try:
        cost = direct_cost(traffic, topology)
    except ValueError as error:  # two ranks without a link
        return ExchangeCost(scheme, reason=str(error), **more)
    return ExchangeCost(scheme, seconds=cost.seconds(work.row_bytes), cost=cost, **more)


def edge_exchange(scheme: str, work: Workload, topology: Topology | None, holder: Ids | None = None, **more: Any) -> ExchangeCost:
    """Returns the exchange of a scheme that sends only rows needed by an edge, and the partial sums that edges add to.

    Args:
        holder: the rank that computes each edge, ``[E]``; default: as in `work`.
        more: attributes of :class:`ExchangeCost`.
    """
    relation = work.relation
    if holder is None:
        holder = work.owner[work.edge_index[1]] if work.holder is None else work.holder
    traffic = edge_traffic(holder, relation.offsets, work.edge_index)
    more.setdefault("edges", np.bincount(holder, minlength=relation.num_devices))
    nodes = int(relation.offsets[-1])
    return sent_directly(scheme, traffic, work, topology, replication=float((nodes + traffic[0].sum()) / max(1, nodes)), **more)


def planned_edges(direct: ExchangeCost, work: Workload, topology: Topology, holder: Ids, **more: Any) -> ExchangeCost:
    """Returns an exchange of :func:`edge_exchange` along trees: copies are sent down the trees, partial sums up similar trees.

    Each direction uses the fastest plan for rows as wide as in `work`; sending up takes as long as sending down.
    """
    offsets = work.relation.offsets
    found = []
    for ends in work.edge_index:
        needed_by = np.zeros(int(offsets[-1]), np.uint64)
        for rank in range(work.relation.num_devices):
            needed_by[ends[holder == rank]] |= np.uint64(1 << rank)
        found.append(fastest_for(Relation.from_masks(needed_by, offsets), topology, work))
    rows = sum(int(each.plan.traffic.sum()) for each in found)
    seconds = sum(each.cost.seconds(work.row_bytes) for each in found)
    return replace(direct, reason="", cost=None, rows=rows, seconds=seconds, **more)


def fastest_for(relation: Relation, topology: Topology, work: Workload) -> PricedPlan:
    """Returns the plan that ``plan="spst"`` uses for rows as wide as in `work`."""
    return fastest(fastest_plans(relation, topology), work.row_bytes)


def edge_traffic(holder: Ids, offsets: Ids, edge_index: Ids) -> Ids:
    """Returns the rows of a sparse exchange, int64 ``[2, P, P]``: copies of sources, then partial sums.

    A rank receives each source of its edges once from the source's owner. It sends one partial sum for each target of its edges
    to the target's owner. `holder` is the rank of each edge, ``[E]``. If this is the owner of the target, the copies are the halo
    and there are no partial sums.
    """
    num_ranks = len(offsets) - 1
    traffic = np.zeros((2, num_ranks, num_ranks), np.int64)
    for stage, ends in enumerate(edge_index):
        # A flag per node and rank is less work than sorting all edges.
        used = np.zeros((int(offsets[-1]), num_ranks), np.bool_)
        used[ends, holder] = True
        for owner in range(num_ranks):
            traffic[stage, owner] = used[offsets[owner] : offsets[owner + 1]].sum(0)
    traffic[1] = traffic[1].T.copy()
    return traffic * (1 - np.eye(num_ranks, dtype=np.int64))
