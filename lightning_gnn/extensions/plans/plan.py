"""Communication plan: the tree and stages on which each row is sent from its owner to the devices that need it (DGCL 5.1).

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
    """Edges of all trees, sorted by stage, sender, receiver and group; int64, one entry per edge.

    Attributes:
        group: group of the tree.
        stage: stage in which the rows are sent, 0 to K - 1.
        sender, receiver: devices.
        sub_stage: for the backward pass, the index among the edges of the same tree, stage and sender.
    """

    group: Ids
    stage: Ids
    sender: Ids
    receiver: Ids
    sub_stage: Ids


@dataclass(frozen=True)
class Plan:
    """Trees along which groups of nodes are sent.

    The owner is the root. Each device on the tree receives the rows from its parent in its stage, and sends them on in later
    stages. A device may be on a tree only as a relay.

    Attributes:
        name: name of the planner, such as ``"spst"``.
        relation: communication relation: which devices need which rows.
        bounds: first index of each group in ``relation.nodes``, and the end, int64 ``[G + 1]``. The nodes of a
            group have one owner and are needed on the same devices.
        parent: device that sends the group's rows to each device, -1 for none, int8 ``[G, P]``.
        stage: stage in which each device receives them, -1 for never, int8 ``[G, P]``; also -1 for the owner, which has them
            before stage 0.
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
        """Number of nodes of each group, int64 ``[G]``."""
        return np.diff(self.bounds)

    @cached_property
    def group_class(self) -> Ids:
        """Class of the relation that contains each group, int64 ``[G]``."""
        return np.searchsorted(self.relation.bounds, self.bounds[:-1], side="right") - 1

    @cached_property
    def edges(self) -> TreeEdges:
        group, receiver = np.nonzero(self.parent >= 0)
        stage = self.stage[group, receiver].astype(np.int64)
        sender = self.parent[group, receiver].astype(np.int64)
        # Number the edges of the same tree, sender and stage by receiver.
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
        """Rows that each device sends to each other device in each stage, int64 ``[K, P, P]``."""
        rows = np.zeros((self.num_stages, self.num_devices, self.num_devices), np.int64)
        edges = self.edges
        np.add.at(rows, (edges.stage, edges.sender, edges.receiver), self.counts[edges.group])
        return rows


def p2p(relation: Relation, topology: Topology) -> Plan:
    """Returns the direct exchange: one stage, in which each owner sends to each device that needs its rows.

    Raises:
        ValueError: if two devices that exchange rows have no link, or the topology has another number of devices.
    """
    check_devices(relation.num_devices, topology)
    check_links(relation.pair_rows, topology, '. Use plan="spst", which relays them.')
    parent = np.where(relation.needs, relation.owner[:, None], -1).astype(np.int8)
    return Plan("p2p", relation, relation.bounds, parent, np.where(relation.needs, 0, -1).astype(np.int8))


def check_devices(num_devices: int, topology: Topology, unit: str = "part of the graph") -> None:
    """Raises ValueError unless a topology has `num_devices` devices, one per `unit`."""
    if num_devices != topology.num_devices:
        raise ValueError(
            f"Topology {topology.name!r} must have one device per {unit}, {num_devices}, got {topology.num_devices}. Use "
            f"topology.for_ranks({num_devices}) if it has too many devices."
        )


def check_links(rows: NDArray[Any], topology: Topology, advice: str) -> None:
    """Raises ValueError if a device has rows, ``[P, P]``, for a device to which it has no link."""
    for sender, receiver in np.argwhere(rows).tolist():
        if (sender, receiver) not in topology.links:
            raise ValueError(
                f"Device {sender} has rows for device {receiver}, but topology {topology.name!r} has no link between them{advice}"
            )
