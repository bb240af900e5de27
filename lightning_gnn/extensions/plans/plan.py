"""A communication plan: along which tree, and in which stages, each row gets from its owner to where it is needed (DGCL 5.1).

G groups of nodes that share a tree, P devices, K stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.extensions.plans.relation import Ids, Relation
from lightning_gnn.extensions.plans.topology import Topology


class TreeEdges(NamedTuple):
    """The edges of all trees, by stage, sender, receiver and group; int64, one entry per edge.

    Attributes:
        group: whose tree.
        stage: when its rows cross, 0 to K - 1.
        sender, receiver: devices.
        sub_stage: of the backward pass: which of the edges that leave the sender in this tree and stage it is.
    """

    group: Ids
    stage: Ids
    sender: Ids
    receiver: Ids
    sub_stage: Ids


@dataclass(frozen=True)
class Plan:
    """Trees over which groups of nodes travel.

    The owner is the root; a device that is on the tree gets the rows from its parent in its stage, and sends them on in later
    ones. Devices may be on a tree as relays only.

    Attributes:
        name: how it was made, such as ``"spst"``.
        relation: which rows are needed where.
        bounds: where each group begins in ``relation.nodes``, and the end; no group spans two classes; int64 ``[G + 1]``.
        parent: who sends the group's rows to each device, -1 for none, int8 ``[G, P]``.
        stage: when they arrive, -1 for never, int8 ``[G, P]``; the owner has them before stage 0, and -1.
    """

    name: str
    relation: Relation
    bounds: Ids
    parent: NDArray[np.int8]
    stage: NDArray[np.int8]

    @property
    def num_devices(self) -> int:
        return self.relation.num_devices

    @cached_property
    def num_stages(self) -> int:
        return int(self.stage.max(initial=-1)) + 1

    @cached_property
    def counts(self) -> Ids:
        """Nodes of each group, int64 ``[G]``."""
        return np.diff(self.bounds)

    @cached_property
    def group_class(self) -> Ids:
        """The class of the relation that each group belongs to, int64 ``[G]``."""
        return np.searchsorted(self.relation.bounds, self.bounds[:-1], side="right") - 1

    @cached_property
    def edges(self) -> TreeEdges:
        group, receiver = np.nonzero(self.parent >= 0)
        stage = self.stage[group, receiver].astype(np.int64)
        sender = self.parent[group, receiver].astype(np.int64)
        # Edges of one tree that leave one device in one stage, numbered by receiver.
        order = np.lexsort((receiver, sender, stage, group))
        siblings = np.stack([group, stage, sender])[:, order]
        first = np.ones(len(order), np.bool_)
        first[1:] = (siblings[:, 1:] != siblings[:, :-1]).any(0)
        position = np.arange(len(order))
        sub_stage = np.empty(len(order), np.int64)
        sub_stage[order] = position - np.maximum.accumulate(np.where(first, position, 0))
        order = np.lexsort((group, receiver, sender, stage))
        return TreeEdges(group[order], stage[order], sender[order], receiver[order], sub_stage[order])

    @cached_property
    def traffic(self) -> Ids:
        """Rows that each device sends to each other one in each stage, int64 ``[K, P, P]``."""
        rows = np.zeros((self.num_stages, self.num_devices, self.num_devices), np.int64)
        edges = self.edges
        np.add.at(rows, (edges.stage, edges.sender, edges.receiver), self.counts[edges.group])
        return rows


def p2p(relation: Relation, topology: Topology) -> Plan:
    """Returns the direct exchange: one stage, in which each owner sends to each device that needs its rows.

    Raises:
        ValueError: a pair of devices that exchange rows has no link, or the topology is for another number of devices.
    """
    check_devices(relation, topology)
    check_links(relation.pair_rows, topology, '. Let a plan relay them: plan="spst".')
    parent = np.where(relation.needs, relation.owner[:, None], -1).astype(np.int8)
    return Plan("p2p", relation, relation.bounds, parent, np.where(relation.needs, 0, -1).astype(np.int8))


def check_devices(relation: Relation, topology: Topology) -> None:
    """Raises ValueError unless the relation and the topology are of as many devices."""
    if relation.num_devices != topology.num_devices:
        raise ValueError(
            f"The graph is cut into {relation.num_devices} parts, but topology {topology.name!r} has "
            f"{topology.num_devices} devices. Take topology.for_ranks({relation.num_devices}), or one that is large enough."
        )


def check_links(rows: NDArray[Any], topology: Topology, advice: str) -> None:
    """Raises ValueError if a device has rows ``[P, P]`` for one to which it has no link."""
    for sender, receiver in np.argwhere(rows).tolist():
        if (sender, receiver) not in topology.links:
            raise ValueError(
                f"Device {sender} has rows for device {receiver}, but topology {topology.name!r} has no link between them{advice}"
            )
