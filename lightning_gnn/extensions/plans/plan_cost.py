"""Load of a plan on hops and links, and its time by the cost model of DGCL section 5.1.

Stages are sequential, and hops work in parallel. In addition to the paper's bandwidths, each stage has a fixed time. So does each
message of a device after the first (alpha-beta model, CAGNET section 3).

K stages, H hops.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.extensions.plans.plan import Plan, check_devices, check_links
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import Topology


@dataclass(frozen=True)
class PlanCost:
    """Load of a plan on each hop.

    Attributes:
        topology: topology with the hops.
        hop_rows: number of rows that cross each hop in each stage, ``[K, H]``; not integral if parts of rows are sent.
        messages: maximum number of messages that a device sends or receives in each stage, ``[K]``.
    """

    topology: Topology
    hop_rows: NDArray[np.int64] | NDArray[np.float64]
    messages: NDArray[np.int64]

    @classmethod
    def of(cls, traffic: NDArray[np.int64] | NDArray[np.float64], topology: Topology) -> PlanCost:
        """Returns the cost of `traffic`: rows that each device sends to each other device in each stage, ``[K, P, P]``."""
        sent = traffic > 0
        messages = np.maximum(sent.sum(1), sent.sum(2)).max(1, initial=0)
        return cls(topology, np.einsum("kab,abh->kh", traffic, topology.passes), messages)

    @cached_property
    def hop_seconds(self) -> NDArray[np.float64]:
        """Seconds that each of H hops takes in each of K stages, if a row has one byte, ``[K, H]``."""
        return self.hop_rows / (self.topology.gb_per_s * 1e9)

    @property
    def fixed_seconds(self) -> NDArray[np.float64]:
        """Seconds of each stage regardless of the row size, ``[K]``; 0 for a stage without messages."""
        more = (self.messages - 1) * self.topology.message_seconds
        return np.where(self.messages > 0, self.topology.stage_seconds + more, 0.0)

    @property
    def seconds_per_byte(self) -> float:
        """Seconds that each byte of a row adds to one halo exchange: the sum over the busiest hop of each stage."""
        return float(self.hop_seconds.max(1, initial=0).sum())

    @property
    def price(self) -> tuple[float, float]:
        """Seconds of one halo exchange regardless of the row size, and additional seconds per byte of a row."""
        return float(self.fixed_seconds.sum()), self.seconds_per_byte

    def stage_seconds(self, row_bytes: float) -> NDArray[np.float64]:
        """Returns the seconds of each stage, ``[K]``: fixed time plus the time of the busiest hop."""
        return self.fixed_seconds + self.hop_seconds.max(1, initial=0) * row_bytes

    def seconds(self, row_bytes: float) -> float:
        """Returns the seconds of one halo exchange with rows of `row_bytes`."""
        return float(self.stage_seconds(row_bytes).sum())

    def kind_seconds(self, row_bytes: float = 1) -> dict[str, float]:
        """Returns the seconds of each kind of hop if other kinds took no time (DGCL Table 7); equal if the plan balances them."""
        kinds = np.array([hop.kind for hop in self.topology.hops])
        return {str(kind): float(self.hop_seconds[:, kinds == kind].max(1).sum() * row_bytes) for kind in np.unique(kinds)}


def plan_cost(plan: Plan, topology: Topology) -> PlanCost:
    """Returns the cost of `plan` on `topology`; raises ValueError if their numbers of devices differ."""
    check_devices(plan.relation.num_devices, topology)
    return PlanCost.of(plan.traffic, topology)


def direct_cost(traffic: NDArray[np.int64] | NDArray[np.float64], topology: Topology) -> PlanCost:
    """Returns the cost of `traffic` sent directly: rows from each device to each other device, in stages, ``[K, P, P]``."""
    check_devices(traffic.shape[1], topology, "rank")
    advice = ', and products on a process grid are not relayed. Use strategy="dgcl", which relays.'
    check_links(traffic.sum(0), topology, advice)
    return PlanCost.of(traffic, topology)


def swap_cost(relation: Relation, topology: Topology) -> PlanCost:
    """Returns the cost of NeuGraph's exchange: each device writes all of its rows to host memory, then reads its halo.

    A device is assumed to read over the hops to the memory of its own socket. Reads from another socket take longer, so this is a
    lower bound.
    """
    check_devices(relation.num_devices, topology)
    if len(topology.hosts) > 1:
        raise ValueError(f'plan="swap" needs the memory of one machine, but topology {topology.name!r} has several.')
    if not topology.memory:
        raise ValueError(f"Topology {topology.name!r} has no links between devices and host memory. Add 'memory' to it.")
    rows = np.zeros((2, len(topology.hops)), np.int64)
    for device, via in enumerate(topology.memory):
        rows[0, list(via)] += relation.offsets[device + 1] - relation.offsets[device]
        rows[1, [hop ^ 1 for hop in via]] += relation.pair_rows[:, device].sum()
    return PlanCost(topology, rows, np.ones(2, np.int64))  # one write and one read of each device


@dataclass(frozen=True)
class LinkLoad:
    """Traffic of a link from one device to another in one forward exchange.

    Attributes:
        sender, receiver: devices.
        kinds: distinct kinds of the hops on the link, in order.
        rows: number of rows in each stage, ``[K]``.
        seconds: time of the rows on the link's slowest hop without other traffic.
        busiest_hop: label of the link's busiest hop, including rows of other links.
        hop_seconds: time that this hop is busy in all stages.
    """

    sender: int
    receiver: int
    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    seconds: float
    busiest_hop: str
    hop_seconds: float

    def as_dict(self, row_bytes: int) -> dict[str, Any]:
        return asdict(self) | {"bytes": [rows * row_bytes for rows in self.rows]}


def link_loads(plan: Plan, topology: Topology, row_bytes: float = 1) -> list[LinkLoad]:
    """Returns the links that rows cross, sorted by descending time of the busiest hop; seconds are for rows of `row_bytes`."""
    busy = plan_cost(plan, topology).hop_seconds.sum(0) * row_bytes
    labels, loads = hop_labels(topology), []
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
                labels[busiest],
                float(busy[busiest]),
            )
        )
    return sorted(loads, key=lambda load: (-load.hop_seconds, -load.seconds, load.sender, load.receiver))


def hop_labels(topology: Topology) -> list[str]:
    """Returns a label for each directed hop: ``0→3`` for a hop of a single link, else ``qpi0`` or ``qpi0 back``."""
    passing: list[list[tuple[int, int]]] = [[] for _ in topology.hops]
    for pair, via in topology.links.items():
        for hop in via:
            passing[hop].append(pair)
    labels = []
    for number, pairs in enumerate(passing):
        name = topology.hops[number & ~1].name
        own = len(pairs) == 1 and re.fullmatch(r"\d+-\d+", name)  # name given by topologies to a link's separate connection
        labels.append(f"{pairs[0][0]}→{pairs[0][1]}" if own else name + " back" * (number & 1))
    return labels


@dataclass(frozen=True)
class Balance:
    """Balance of a plan over the kinds of hops (DGCL Table 7).

    Attributes:
        kinds: for each kind, the seconds of an exchange if all other kinds took no time.
        others_seconds: seconds of all kinds except NVLink together, as in the paper; None without NVLink or without other kinds.
        spread: relative difference of the slowest kind to the fastest kind; None if a kind is idle.
        paper_spread: relative difference between NVLink and all other kinds together, as in the paper.
    """

    kinds: dict[str, float]
    others_seconds: float | None
    spread: float | None
    paper_spread: float | None


def balance(cost: PlanCost, row_bytes: float = 1) -> Balance:
    """Returns the seconds of each kind of hop in an exchange of rows of `row_bytes`."""
    kinds = cost.kind_seconds(row_bytes)
    spread = _difference([*kinds.values()])
    if "nvlink" not in kinds or len(kinds) == 1:
        return Balance(kinds, None, spread, None)
    others = np.array([hop.kind != "nvlink" for hop in cost.topology.hops])
    others_seconds = float(cost.hop_seconds[:, others].max(1).sum() * row_bytes)
    return Balance(kinds, others_seconds, spread, _difference([kinds["nvlink"], others_seconds]))


def _difference(seconds: Sequence[float]) -> float | None:
    return max(seconds) / min(seconds) - 1 if seconds and min(seconds) > 0 else None
