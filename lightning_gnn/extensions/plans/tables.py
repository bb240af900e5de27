"""Send and receive tables of one rank for each stage of a plan (DGCL section 6.1), and sub-stages (section 6.2).

A rank works on one buffer: N rows of local nodes, H rows of halo nodes (by ascending relabeled ids), and R relayed rows. Tables
hold positions in this buffer.

- Forward: for each stage in order, a rank sends the rows of `sends`, then writes received rows to the rows of `receives`. A sent
  row is local or was received in an earlier stage. So a rank may start a stage as soon as its own earlier stages are complete.
- Backward: the buffer holds gradients, initially zero where none exist, including the R rows. For each stage in order, a rank
  sends the rows of `sends`, and *adds* received rows to the rows of `receives`, peer by peer. So additions need no atomics and
  have a fixed order.

In the paper's sub-stages, no row is received from two ranks in one sub-stage. This serves the same purpose with more messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_gnn.extensions.plans.plan import Plan
from lightning_gnn.extensions.plans.relation import Ids


@dataclass(frozen=True)
class Stage:
    """Messages of one rank that may be sent at the same time.

    Attributes:
        sends: for each peer, the positions of the rows sent to it, int64 ``[rows]``; empty for no message.
        receives: for each peer, the positions of the rows received from it, in the order in which the peer sends them.
    """

    sends: tuple[Ids, ...]
    receives: tuple[Ids, ...]

    @property
    def idle(self) -> bool:
        return not any(map(len, (*self.sends, *self.receives)))


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan; the module docstring describes the buffer.

    Attributes:
        num_owned, num_halo, num_relayed: N, H, R.
        forward: the K stages, the same number on every rank.
        backward: the forward stages in reverse order, with sends and receives swapped; or their sub-stages.
    """

    num_owned: int
    num_halo: int
    num_relayed: int
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]

    @property
    def num_rows(self) -> int:
        return self.num_owned + self.num_halo + self.num_relayed

    @property
    def table_bytes(self) -> int:
        """Memory of the tables; both directions share them, except for sub-stages."""
        stages = (*self.forward, *self.backward)
        tables = {id(table): table.nbytes for stage in stages for table in (*stage.sends, *stage.receives)}
        return sum(tables.values())


def rank_plan(plan: Plan, rank: int, sub_stages: bool = False) -> RankPlan:
    """Returns the part of `rank` in `plan`.

    Rows of a message are sorted by id, regardless of their groups.

    Args:
        sub_stages: whether to split the stages of the backward pass as in section 6.2, for comparisons.
    """
    relation, edges = plan.relation, plan.edges
    begin, end = relation.offsets[rank : rank + 2]
    halo = relation.halo(rank)
    relays = (plan.parent[:, rank] >= 0) & ~relation.needs[plan.group_class, rank]
    relayed = np.sort(_nodes(plan, np.flatnonzero(relays)))
    num_owned, num_halo = int(end - begin), len(halo)

    def positions(nodes: Ids) -> Ids:
        owned = (nodes >= begin) & (nodes < end)
        at_halo = np.searchsorted(halo, nodes)
        in_halo = np.append(halo, -1)[at_halo] == nodes
        elsewhere = np.where(in_halo, num_owned + at_halo, num_owned + num_halo + np.searchsorted(relayed, nodes))
        return np.where(owned, nodes - begin, elsewhere)

    def tables(own_end: Ids, other_end: Ids, slots: Ids, num_slots: int) -> list[tuple[Ids, ...]]:
        """Returns, for each slot (stage or sub-stage) and peer, the rows of this rank's tree edges."""
        chosen = np.flatnonzero(own_end == rank)
        groups = edges.group[chosen]
        nodes = _nodes(plan, groups)
        message = np.repeat(slots[chosen] * plan.num_devices + other_end[chosen], plan.counts[groups])
        order = np.lexsort((nodes, message))
        bounds = np.searchsorted(message[order], np.arange(num_slots * plan.num_devices + 1))
        rows = positions(nodes[order])
        each = [rows[low:high] for low, high in pairwise(bounds)]
        return [tuple(each[slot * plan.num_devices : (slot + 1) * plan.num_devices]) for slot in range(num_slots)]

    def stages(slots: Ids, num_slots: int) -> list[Stage]:
        sends = tables(edges.sender, edges.receiver, slots, num_slots)
        receives = tables(edges.receiver, edges.sender, slots, num_slots)
        return [Stage(*both) for both in zip(sends, receives)]

    forward = stages(edges.stage, plan.num_stages)
    backward = forward
    if sub_stages:
        per_stage = np.zeros(plan.num_stages, np.int64)
        np.maximum.at(per_stage, edges.stage, edges.sub_stage + 1)
        first = np.cumsum(per_stage) - per_stage
        backward = stages(first[edges.stage] + edges.sub_stage, int(per_stage.sum()))
    swapped = tuple(Stage(stage.receives, stage.sends) for stage in reversed(backward))
    return RankPlan(num_owned, num_halo, len(relayed), tuple(forward), swapped)


def _nodes(plan: Plan, groups: Ids) -> Ids:
    counts = plan.counts[groups]
    ends = np.cumsum(counts)
    position = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return plan.relation.nodes[np.repeat(plan.bounds[groups], counts) + position]
