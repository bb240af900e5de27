"""What one exchange of rows moves under a scheme, and how long it takes by the cost model (DGCL section 5.1), without ranks.

An exchange serves one propagation, forward or backward; both move the same rows, in opposite directions of the same hops.

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
    """What is trained, cut into parts.

    Attributes:
        relation: which rows are needed where.
        edge_index: all edges in the relation's ids, source and target, int64 ``[2, E]``.
        num_layers: propagations of the model.
        columns: width of the rows that layers exchange.
        features: width of the graph's features.
        element_bytes: of one number.
        value_bytes: of an edge's weight, which travels where blocks of the matrix do; 0 if all are one.
        holder: of a vertex cut, the rank that computes each edge, ``[E]``; None where its target's owner does.
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
                raise ValueError(f"{name} is a number above 0 (got {getattr(self, name)}).")

    @property
    def row_bytes(self) -> int:
        return self.columns * self.element_bytes

    @property
    def feature_bytes(self) -> int:
        return self.features * self.element_bytes

    @cached_property
    def owner(self) -> Ids:
        """The rank of each node, int64 ``[N]``."""
        return np.repeat(np.arange(self.relation.num_devices), np.diff(self.relation.offsets))

    @cached_property
    def replication_factors(self) -> tuple[float, ...]:
        """Nodes held by all ranks over N after 1 to `num_layers` hops (DGCL Figure 4)."""
        return replication_factors(self.edge_index, self.owner, self.relation.num_devices, self.num_layers)


@dataclass(frozen=True)
class ExchangeCost:
    """One exchange of a scheme; see the top of this file.

    Attributes:
        scheme: its name, and of a product on a process grid its form: ``"spmm_15d c=2 blocks"``.
        followed: ``fit`` exchanges in this way.
        reason: why there is no time: the scheme does not apply to the topology.
        rows: that cross links, relayed ones each time, summed over ranks; of a swap those written and those read; of products
            in columns of blocks, words over columns.
        seconds: on a topology; None without one, or where the scheme does not apply.
        edges: that each rank sums over in all columns, ``[P]``.
        replication: rows that all ranks hold over N; None where blocks of rows only pass through.
        matrix_bytes: of the matrix's blocks, which travel too (2D and 3D).
        paper_rows: by the count of the paper's algorithm, which sends whole blocks; None where it has no formula.
        choice: what a scheme that chooses between several such exchanges knows of each, with ``rows`` and ``bytes_held``: for
            ``spmm_15d``, whose `rows` are an upper bound if sparsity-aware.
        plan, cost: what moves, where the scheme follows a plan, and what it puts on each hop.
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
        """Edges that the rank with most sums over, over the mean; of 2D and 3D by columns too."""
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
    """Returns the ways to exchange rows that ``lightning-gnn plan`` shows of a scheme, one of them followed; no ranks are there.

    By default none: nothing is predicted. ``@exchange_costs.register`` adds a function for a class of schemes.
    """
    return []


@exchange_costs.register
def _(scheme: EdgeCutScheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    return [edge_exchange("", work, topology, followed=True)]


def sent_directly(scheme: str, traffic: NDArray[Any], work: Workload, topology: Topology | None, **more: Any) -> ExchangeCost:
    """Returns an exchange that sends each row from its owner to where it is needed, in the stages of `traffic`."""
    more.setdefault("rows", int(traffic.sum()))
    if topology is None:
        return ExchangeCost(scheme, **more)
    check_devices(work.relation, topology)
    try:
        cost = direct_cost(traffic, topology)
    except ValueError as error:  # two ranks without a link
        return ExchangeCost(scheme, reason=str(error), **more)
    return ExchangeCost(scheme, seconds=cost.seconds(work.row_bytes), cost=cost, **more)


def edge_exchange(scheme: str, work: Workload, topology: Topology | None, holder: Ids | None = None, **more: Any) -> ExchangeCost:
    """Returns the exchange of any scheme that sends only the rows that an edge needs, and partial sums that it adds to.

    `holder` is the rank that computes each edge, ``[E]``, by default as `work` has it; `more` are of :class:`ExchangeCost`.
    """
    relation = work.relation
    if holder is None:
        holder = work.owner[work.edge_index[1]] if work.holder is None else work.holder
    traffic = edge_traffic(holder, relation.offsets, work.edge_index)
    more.setdefault("edges", np.bincount(holder, minlength=relation.num_devices))
    nodes = int(relation.offsets[-1])
    return sent_directly(scheme, traffic, work, topology, replication=float((nodes + traffic[0].sum()) / max(1, nodes)), **more)


def planned_edges(direct: ExchangeCost, work: Workload, topology: Topology, holder: Ids, **more: Any) -> ExchangeCost:
    """Returns an exchange of :func:`edge_exchange` along trees: copies go down them, and then partial sums up such trees.

    Each by the plan that is the fastest for rows of the width of `work`; the way up takes as long as the way down.
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
    """Returns the plan by which ``plan="spst"`` moves rows of the width of `work`."""
    return fastest(fastest_plans(relation, topology), work.row_bytes)


def edge_traffic(holder: Ids, offsets: Ids, edge_index: Ids) -> Ids:
    """Returns the rows of a sparse exchange, int64 ``[2, P, P]``: those that are expanded, then partial sums that are reduced.

    A rank gets each node that one of its edges leaves from its owner, once, and sends its owner a partial sum of each node that
    one leads to; `holder` is each edge's rank, ``[E]``. Where that is the target's owner, these are halos, and nothing.
    """
    num_ranks = len(offsets) - 1
    traffic = np.zeros((2, num_ranks, num_ranks), np.int64)
    for stage, ends in enumerate(edge_index):
        # A flag per node and rank: less work than to sort all edges.
        used = np.zeros((int(offsets[-1]), num_ranks), np.bool_)
        used[ends, holder] = True
        for owner in range(num_ranks):
            traffic[stage, owner] = used[offsets[owner] : offsets[owner + 1]].sum(0)
    traffic[1] = traffic[1].T.copy()
    return traffic * (1 - np.eye(num_ranks, dtype=np.int64))
