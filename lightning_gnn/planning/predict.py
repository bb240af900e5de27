"""What training is predicted to take under each scheme of DGCL's comparison (section 7), and what a plan puts on each link.

Seconds of exchanges are those of the cost model (section 5.1); seconds of sums over edges are edges x columns x the constant
of ``planning/cost.py``, which is a CPU core's. Nothing overlaps, and maps with weights are not counted: they are the same for
all but replication, which has more rows to map.

What is counted, with K layers, all of them `columns` wide:

- Sums: K forward and K - 1 backward, since the graph's features need no gradient. The first is counted in every epoch, though
  ``DGCLStrategy(keep_constant=True)`` keeps it for many models: under any scheme.
- Exchanges: K - 1 forward and K - 1 backward. The features are exchanged once: in the first epoch, at their own width.
- Without `keep_constant`, layers are taken to map before they exchange: K sums and exchanges forward, K backward, and nothing in
  the first epoch beyond. Layers that attend over edges (GAT) always do so.

A backward exchange moves the rows of the forward one over the other directions of the same hops, and takes as long.

N nodes, E edges, P devices, S stages, K layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition.cost import BYTES_PER_ELEMENT, SECONDS_PER_EDGE_COLUMN
from lightning_gnn.partition.layout import Replicas
from lightning_gnn.partition.replicas import hold, replication_factors
from lightning_gnn.planning.plan import Plan, check_devices, p2p
from lightning_gnn.planning.plan_cost import PlanCost, plan_cost, swap_cost
from lightning_gnn.planning.relation import Ids, Relation
from lightning_gnn.planning.spst import spst
from lightning_gnn.planning.topology import Topology

SCHEMES = ("p2p", "spst", "swap", "replicate", "dgcl_r")


@dataclass(frozen=True)
class Workload:
    """What is trained, cut into parts.

    Attributes:
        relation: which rows are needed where.
        edge_index: all edges in the relation's ids, source and target, int64 ``[2, E]``.
        num_layers: K, propagations of the model.
        columns: width of the rows that layers exchange.
        features: width of the graph's features.
        element_bytes: of one number.
        keep_constant: whether the features are exchanged once; see the top of this file.
        value_bytes: of an edge's weight, which travels where blocks of the matrix do; 0 if all are one.

    Raises:
        ValueError: a number below 1.
    """

    relation: Relation
    edge_index: Ids
    num_layers: int
    columns: int
    features: int
    element_bytes: int = BYTES_PER_ELEMENT
    keep_constant: bool = True
    value_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "columns", "features", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a number above 0 (got {getattr(self, name)}).")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that a layer exchanges."""
        return self.columns * self.element_bytes

    @property
    def feature_bytes(self) -> int:
        """Bytes of a node's features."""
        return self.features * self.element_bytes

    @property
    def skipped(self) -> int:
        """Layers, the first ones, that exchange nothing after the first epoch and have nothing to sum backward: 0 or 1."""
        return int(self.keep_constant)

    @cached_property
    def owner(self) -> Ids:
        """The device of each node, int64 ``[N]``."""
        offsets = self.relation.offsets
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))

    @cached_property
    def edges(self) -> Ids:
        """In-edges of each device's own nodes, int64 ``[P]``."""
        return np.bincount(self.owner[self.edge_index[1]], minlength=self.relation.num_devices)

    @cached_property
    def replication_factors(self) -> tuple[float, ...]:
        """Nodes held by all devices over N after 1 to K hops (DGCL Figure 4)."""
        return replication_factors(self.edge_index, self.owner, self.relation.num_devices, self.num_layers)


@dataclass(frozen=True)
class Prediction:
    """One scheme on one topology; all else is 0 or empty if it does not apply.

    Attributes:
        scheme: of :data:`SCHEMES`, or a product on a process grid (``planning/predict_grid.py``).
        reason: why the scheme does not apply here; empty if it does.
        rows: that cross links in one forward exchange, relayed ones each time, summed over devices; of swap those written
            and those read; of products in columns of blocks, words over columns.
        exchange_seconds, compute_seconds: of a layer in one direction; sums are those of the slowest device.
        edges: that all devices together sum over in a layer and direction.
        replication: nodes whose rows of features are held, in all devices, over N; 0 where blocks of rows only pass through.
        epoch_exchange_seconds, epoch_compute_seconds: of an epoch after the first.
        first_exchange_seconds: what the first epoch takes longer: the features' exchange.
        plan, cost: what moves, where the scheme follows a plan or has a cost by hops.
    """

    scheme: str
    reason: str = ""
    rows: int = 0
    exchange_seconds: float = 0.0
    compute_seconds: float = 0.0
    edges: int = 0
    replication: float = 0.0
    epoch_exchange_seconds: float = 0.0
    epoch_compute_seconds: float = 0.0
    first_exchange_seconds: float = 0.0
    plan: Plan | None = field(default=None, repr=False, compare=False)
    cost: PlanCost | None = field(default=None, repr=False, compare=False)

    @property
    def applies(self) -> bool:
        return not self.reason

    @property
    def epoch_seconds(self) -> float:
        """Of an epoch after the first: exchanges, then sums."""
        return self.epoch_exchange_seconds + self.epoch_compute_seconds

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON; only the reason of a scheme that does not apply."""
        if not self.applies:
            return {"scheme": self.scheme, "applies": False, "reason": self.reason}
        names = (
            *("rows", "exchange_seconds", "compute_seconds", "edges", "replication", "epoch_exchange_seconds"),
            *("epoch_compute_seconds", "epoch_seconds", "first_exchange_seconds"),
        )
        return {"scheme": self.scheme, "applies": True} | {name: getattr(self, name) for name in names}


def predict(work: Workload, topology: Topology) -> list[Prediction]:
    """Returns a prediction for each of :data:`SCHEMES`, in that order.

    Raises:
        ValueError: the topology is of another number of devices than the workload.
    """
    check_devices(work.relation, topology)
    return [
        _planned(work, topology, "p2p"),
        _planned(work, topology, "spst"),
        _swapped(work, topology),
        _replicated(work, topology, "replicate"),
        _replicated(work, topology, "dgcl_r"),
    ]


def _planned(work: Workload, topology: Topology, scheme: str) -> Prediction:
    try:
        plan = {"p2p": p2p, "spst": spst}[scheme](work.relation, topology)
    except ValueError as error:  # two devices without a link
        return Prediction(scheme, str(error))
    cost = plan_cost(plan, topology)
    return predicted(work, scheme, cost.seconds, int(plan.traffic.sum()), plan=plan, cost=cost)


def _swapped(work: Workload, topology: Topology) -> Prediction:
    try:
        cost = swap_cost(work.relation, topology)
    except ValueError as error:  # several machines, or nothing known of the memory
        return Prediction("swap", str(error))
    rows = int(work.relation.offsets[-1] + work.relation.pair_rows.sum())
    return predicted(work, "swap", cost.seconds, rows, cost=cost)


def _replicated(work: Workload, topology: Topology, scheme: str) -> Prediction:
    """Of neighbourhoods that each device holds alone, or each machine (DGCL-R, Table 5), as they are trained with."""
    groups = topology.hosts
    if scheme == "replicate":
        groups = tuple((device,) for device in range(topology.num_devices))
    elif len(groups) == 1:
        reason = f"It replicates so that machines need not communicate, and topology {topology.name!r} is one machine."
        return Prediction(scheme, reason)
    held = hold(work.edge_index, work.relation.offsets, Replicas(work.num_layers, groups))
    relation = Relation.from_halos(held.halos, held.offsets)
    plan = spst(relation, topology)
    cost = plan_cost(plan, topology)
    factor = float((held.offsets[-1] + relation.pair_rows.sum()) / max(1, work.relation.offsets[-1]))
    rows = int(plan.traffic.sum())
    return predicted(work, scheme, cost.seconds, rows, edges=held.num_edges, held=factor, plan=plan, cost=cost)


def predicted(
    work: Workload,
    scheme: str,
    seconds: Callable[[int], float],
    rows: int,
    *,
    edges: NDArray[np.number] | None = None,
    held: float | None = None,
    plan: Plan | None = None,
    cost: PlanCost | None = None,
) -> Prediction:
    """Adds layers up to an epoch.

    Args:
        work, scheme, rows, plan, cost: see :class:`Prediction`.
        seconds: of an exchange of rows of so many bytes.
        edges: that each device computes in all columns, ``[P]``; by default those of the parts.
        held: nodes held over N; by default of the parts and their halos.
    """
    edges = work.edges if edges is None else edges
    exchange = seconds(work.row_bytes)
    compute = float(edges.max() * work.columns * SECONDS_PER_EDGE_COLUMN)
    forward, backward = work.num_layers, work.num_layers - work.skipped
    return Prediction(
        scheme,
        rows=rows,
        exchange_seconds=exchange,
        compute_seconds=compute,
        edges=round(edges.sum()),
        replication=work.replication_factors[0] if held is None else held,
        epoch_exchange_seconds=2 * backward * exchange,
        epoch_compute_seconds=(forward + backward) * compute,
        first_exchange_seconds=seconds(work.feature_bytes) * work.skipped,
        plan=plan,
        cost=cost,
    )


def break_even_seconds(planned: Prediction, replicated: Prediction) -> float | None:
    """Returns at how many seconds per edge and column replication takes as long as a plan; below, replication is faster.

    None if there is no such value: the plan is never faster, or sums are no more under replication.
    """
    more = replicated.epoch_compute_seconds - planned.epoch_compute_seconds
    less = planned.epoch_exchange_seconds - replicated.epoch_exchange_seconds
    return SECONDS_PER_EDGE_COLUMN * less / more if more > 0 and less > 0 else None


@dataclass(frozen=True)
class LinkLoad:
    """What crosses a link, from one device to another, in one forward exchange.

    Attributes:
        sender, receiver: devices.
        kinds: of the hops on the way, each once, in their order.
        rows: in each stage, ``[S]``.
        seconds: that its rows take on its slowest hop if nothing else moves.
        busiest_hop: of the hops on the way; others' rows cross it too.
        hop_seconds: that this hop is busy in all stages.
    """

    sender: int
    receiver: int
    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    seconds: float
    busiest_hop: str
    hop_seconds: float

    def as_dict(self, row_bytes: int) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON."""
        found = {name: getattr(self, name) for name in ("sender", "receiver", "seconds", "busiest_hop", "hop_seconds")}
        return found | {
            "kinds": list(self.kinds),
            "rows": list(self.rows),
            "bytes": [rows * row_bytes for rows in self.rows],
        }


def link_loads(plan: Plan, topology: Topology, row_bytes: float = 1) -> list[LinkLoad]:
    """Returns the links that rows cross, those with the busiest hops first; seconds are for rows of `row_bytes`.

    Raises:
        ValueError: plan and topology are of different numbers of devices.
    """
    busy = plan_cost(plan, topology).hop_seconds.sum(0) * row_bytes
    loads = []
    for sender, receiver in np.argwhere(plan.traffic.any(0)).tolist():
        via = topology.links[sender, receiver]
        rows = plan.traffic[:, sender, receiver]
        slowest = min(topology.hops[hop].gb_per_s for hop in via)
        busiest = max(via, key=lambda hop: busy[hop])
        loads.append(
            LinkLoad(
                sender,
                receiver,
                tuple(dict.fromkeys(topology.hops[hop].kind for hop in via)),
                tuple(rows.tolist()),
                float(rows.sum() * row_bytes / (slowest * 1e9)),
                hop_labels(topology)[busiest],
                float(busy[busiest]),
            )
        )
    return sorted(loads, key=lambda load: (-load.hop_seconds, -load.seconds, load.sender, load.receiver))


def hop_labels(topology: Topology) -> list[str]:
    """Returns a name for each directed hop: ``0→3`` for one that a single link passes, else ``qpi0`` or ``qpi0 back``."""
    passing: list[list[tuple[int, int]]] = [[] for _ in topology.hops]
    for pair, via in topology.links.items():
        for hop in via:
            passing[hop].append(pair)
    labels = []
    for number, pairs in enumerate(passing):
        name = topology.hops[number & ~1].name
        own = len(pairs) == 1 and re.fullmatch(r"\d+-\d+", name)  # what a topology calls a link's own connection
        labels.append(f"{pairs[0][0]}→{pairs[0][1]}" if own else name + " back" * (number & 1))
    return labels


@dataclass(frozen=True)
class Balance:
    """How evenly a plan uses the kinds of hops (DGCL Table 7).

    Attributes:
        kinds: seconds of an exchange if all other kinds took none, by kind.
        others_seconds: the same for all kinds but NVLink together, as the paper has them; None without NVLink or others.
    """

    kinds: dict[str, float]
    others_seconds: float | None

    @property
    def spread(self) -> float | None:
        """How much longer the slowest kind takes than the fastest, as a share of the latter; None if a kind is idle."""
        return _difference(list(self.kinds.values()))

    @property
    def paper_spread(self) -> float | None:
        """The same for NVLink and all others together: the paper's relative difference."""
        return None if self.others_seconds is None else _difference([self.kinds["nvlink"], self.others_seconds])

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for JSON."""
        names = ("kinds", "spread", "others_seconds", "paper_spread")
        return {name: getattr(self, name) for name in names}


def balance(cost: PlanCost, row_bytes: float = 1) -> Balance:
    """Returns the time of each kind of hops in an exchange of rows of `row_bytes`."""
    kinds = cost.kind_seconds(row_bytes)
    if "nvlink" not in kinds or len(kinds) == 1:
        return Balance(kinds, None)
    others = np.array([hop.kind != "nvlink" for hop in cost.topology.hops])
    return Balance(kinds, float(cost.hop_seconds[:, others].max(1).sum() * row_bytes))


def _difference(seconds: Sequence[float]) -> float | None:
    return max(seconds) / min(seconds) - 1 if seconds and min(seconds) > 0 else None
