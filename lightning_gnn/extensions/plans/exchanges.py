"""What one exchange of rows moves under a scheme, and how long it takes by the cost model (DGCL section 5.1), without ranks.

An exchange serves one propagation, forward or backward; both move the same rows, in opposite directions of the same hops.

N nodes, E edges, P ranks, S stages. Traffic is ``[S, P, P]``: stage, sender, receiver.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.extensions.plans.choice import PricedPlan, fastest, fastest_plans
from lightning_gnn.extensions.plans.grid import (
    GridCost,
    block_cost,
    block_traffic,
    busiest,
    edge_traffic,
    matrix_traffic,
    product_words,
    products,
    sparse_cost,
    summa_traffic,
    summa_work,
)
from lightning_gnn.extensions.plans.plan import Plan, check_devices, p2p
from lightning_gnn.extensions.plans.plan_cost import PlanCost, direct_cost, plan_cost, swap_cost
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.partition.grid import ProcessCube, ProcessGrid, legal_replications
from lightning_gnn.partition.layout import Replicas
from lightning_gnn.partition.replicas import hold, replication_factors
from lightning_gnn.partition.shard import Ids


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
        choice: what ``spmm_15d`` knows of it when it chooses its replication factor; its `rows` are an upper bound if
            sparsity-aware.
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
    choice: GridCost | None = None
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


def _sent_directly(
    scheme: str, traffic: NDArray[Any], work: Workload, topology: Topology | None, **more: Any
) -> ExchangeCost:
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


def edge_exchange(
    scheme: str, work: Workload, topology: Topology | None, holder: Ids | None = None, **more: Any
) -> ExchangeCost:
    """Returns the exchange of any scheme that sends only the rows that an edge needs, and partial sums that it adds to.

    `holder` is the rank that computes each edge, ``[E]``, by default as `work` has it; `more` are of :class:`ExchangeCost`.
    """
    relation = work.relation
    if holder is None:
        holder = work.owner[work.edge_index[1]] if work.holder is None else work.holder
    traffic = edge_traffic(holder, relation.offsets, work.edge_index)
    more.setdefault("edges", np.bincount(holder, minlength=relation.num_devices))
    nodes = int(relation.offsets[-1])
    return _sent_directly(
        scheme, traffic, work, topology, replication=float((nodes + traffic[0].sum()) / max(1, nodes)), **more
    )


def planned_edges(direct: ExchangeCost, work: Workload, topology: Topology, holder: Ids, **more: Any) -> ExchangeCost:
    """Returns an exchange of :func:`edge_exchange` along trees: copies go down them, and then partial sums up such trees.

    Each by the plan that is the fastest for rows of the width of `work`; the way up takes as long as the way down.
    """
    offsets = work.relation.offsets
    check_devices(work.relation, topology)
    found = []
    for ends in work.edge_index:
        needed_by = np.zeros(int(offsets[-1]), np.uint64)
        for rank in range(work.relation.num_devices):
            needed_by[ends[holder == rank]] |= np.uint64(1 << rank)
        found.append(_fastest(Relation.from_masks(needed_by, offsets), topology, work))
    rows = sum(int(each.plan.traffic.sum()) for each in found)
    seconds = sum(each.cost.seconds(work.row_bytes) for each in found)
    return replace(direct, reason="", cost=None, rows=rows, seconds=seconds, **more)


def plan_exchanges(work: Workload, topology: Topology) -> list[ExchangeCost]:
    """Returns the exchanges of ``DGCLStrategy(plan=...)``: p2p, spst, swap, replicate and dgcl_r."""
    check_devices(work.relation, topology)
    parts = edge_exchange("", work, None)  # what each rank holds and computes under plans that replicate nothing
    found = []
    try:
        plan = p2p(work.relation, topology)
        found.append(_planned("p2p", PricedPlan(plan, plan_cost(plan, topology)), work, parts))
    except ValueError as error:  # two devices without a link
        found.append(ExchangeCost("p2p", reason=str(error)))
    found.append(_planned("spst", _fastest(work.relation, topology, work), work, parts))
    try:
        cost = swap_cost(work.relation, topology)
        rows = int(work.relation.offsets[-1] + work.relation.pair_rows.sum())
        found.append(replace(parts, scheme="swap", rows=rows, seconds=cost.seconds(work.row_bytes), cost=cost))
    except ValueError as error:  # several machines, or nothing known of the memory
        found.append(ExchangeCost("swap", reason=str(error)))
    found.append(_replicated("replicate", work, topology, tuple((device,) for device in range(topology.num_devices))))
    if len(topology.hosts) > 1:
        return [*found, _replicated("dgcl_r", work, topology, topology.hosts)]
    reason = f"It replicates so that machines need not communicate, and topology {topology.name!r} is one machine."
    return [*found, ExchangeCost("dgcl_r", reason=reason)]


def _planned(name: str, found: PricedPlan, work: Workload, parts: ExchangeCost) -> ExchangeCost:
    plan, cost = found.plan, found.cost
    seconds, rows = cost.seconds(work.row_bytes), int(plan.traffic.sum())
    return replace(parts, scheme=name, rows=rows, seconds=seconds, plan=plan, cost=cost)


def _fastest(relation: Relation, topology: Topology, work: Workload) -> PricedPlan:
    """Returns the plan by which ``plan="spst"`` moves rows of the width of `work`."""
    return fastest(fastest_plans(relation, topology), work.row_bytes)


def _replicated(name: str, work: Workload, topology: Topology, groups: tuple[tuple[int, ...], ...]) -> ExchangeCost:
    """Returns the exchange of neighbourhoods that each group of ranks holds together (DGCL-R, Table 5), as they are trained."""
    held = hold(work.edge_index, work.relation.offsets, Replicas(work.num_layers, groups))
    relation = Relation.from_halos(held.halos, held.offsets)
    factor = float((held.offsets[-1] + relation.pair_rows.sum()) / max(1, work.relation.offsets[-1]))
    parts = ExchangeCost(name, edges=held.num_edges, replication=factor)
    return _planned(name, _fastest(relation, topology, work), work, parts)


def grid_name(replication: int, sparsity_aware: bool) -> str:
    name = "spmm_1d" if replication == 1 else f"spmm_15d c={replication}"
    return name if sparsity_aware else f"{name} blocks"


def grid_exchanges(work: Workload, topology: Topology | None) -> list[ExchangeCost]:
    """Returns what the 1D and 1.5D products of CAGNET exchange, sparsity-aware and in blocks, by legal replication factor."""
    offsets, ranks = work.relation.offsets, work.relation.num_devices
    halos = [work.relation.halo(rank) for rank in range(ranks)]
    found = []
    for c in legal_replications(ranks):
        grid = ProcessGrid(ranks, c)
        holder = grid.holders(offsets, work.edge_index[1], work.edge_index[0])
        paper_rows = grid.paper_words(int(offsets[-1]), 1)
        sums = int(edge_traffic(holder, offsets, work.edge_index)[1].sum())
        choice = sparse_cost(grid, offsets, halos, sums, work.feature_bytes)
        sparse = edge_exchange(grid_name(c, True), work, topology, holder, paper_rows=paper_rows, choice=choice)
        blocks = _sent_directly(
            grid_name(c, False),
            block_traffic(grid, offsets),
            work,
            topology,
            edges=sparse.edges,
            paper_rows=paper_rows,
            choice=block_cost(grid, offsets, work.feature_bytes),
        )
        found += [sparse, blocks]
    return found


def product_exchanges(work: Workload, topology: Topology | None) -> list[ExchangeCost]:
    """Returns what each of :func:`~lightning_gnn.extensions.plans.grid.products` exchanges; a forward product takes followed.

    Mirrored ones are left out where they exchange as many rows, as in undirected graphs.
    """
    offsets, (source, target) = work.relation.offsets, work.edge_index
    named = {each.scheme: each for each in grid_exchanges(work, topology)}
    found: list[ExchangeCost] = []
    costs: list[tuple[float, float]] = []
    for product in products(work.relation.num_devices):
        holder = product.holders(offsets, target, source)
        words = product_words(product, offsets, edge_traffic(holder, offsets, work.edge_index), work.columns, False)
        costs.append(busiest(words, work.element_bytes, max(4, work.element_bytes)))
        if isinstance(product.grid, ProcessGrid):
            each = named.get(str(product)) or edge_exchange(str(product), work, topology, holder)
        else:
            cube = cube_exchange(work, topology, product.grid.dimensions)
            assert cube is not None
            each = cube
        least = costs[-1] < min(costs[:-1], default=(np.inf, np.inf))
        if least:
            found = [replace(other, followed=False) for other in found]
        if least or not product.mirrored or each.rows != found[-1].rows:
            found.append(replace(each, followed=least))
    return found


def cube_exchange(
    work: Workload, topology: Topology | None, dimensions: int, keep_blocks: bool = True
) -> ExchangeCost | None:
    """Returns what the 2D or 3D product exchanges; None unless the ranks are a square or a cube.

    With `keep_blocks`, the matrix has travelled before.
    """
    offsets, ranks, columns = work.relation.offsets, work.relation.num_devices, work.columns
    try:
        cube = ProcessCube.of(ranks, dimensions)
    except ValueError:
        return None
    matrix = matrix_traffic(cube, offsets, work.edge_index, work.value_bytes)
    if keep_blocks:
        matrix[:] = 0
    # Words and the matrix in units of rows: the narrower these are, the more the matrix counts.
    traffic = summa_traffic(cube, offsets, columns) / columns + matrix / work.row_bytes
    return _sent_directly(
        f"spmm_{dimensions}d",
        traffic,
        work,
        topology,
        rows=round(cube.words(offsets, columns) / columns),
        edges=summa_work(cube, offsets, work.edge_index, columns) / columns,
        matrix_bytes=int(matrix.sum()),
    )
