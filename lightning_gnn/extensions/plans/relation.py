"""Communication relation: the devices that need each row (DGCL section 4.1), in classes of interchangeable nodes.

For a plan, nodes with the same owner and the same destinations are equivalent. The paper's tuples (d_i, d_j, V_ij) are the unions
of the classes with owner i and j among the destinations.

N nodes of the graph, P devices, C classes, M nodes that are needed on other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.extensions.plans.topology import MAX_DEVICES
from lightning_gnn.partition.replicas import within_hops

Ids = NDArray[np.int64]
Masks = NDArray[np.uint64]


@dataclass(frozen=True)
class Relation:
    """Classes of nodes with the same owner and the same destinations.

    Node ids are ids of a relabeled graph, in which each device owns one contiguous range.

    Attributes:
        offsets: first node of each device and the end, int64 ``[P + 1]``.
        owner: owner of each class, int64 ``[C]``, ascending.
        destinations: bit d is set if device d needs the rows, uint64 ``[C]``; never the owner's bit, never 0.
        bounds: first index of each class in `nodes`, and the end, int64 ``[C + 1]``.
        nodes: node ids by class, ascending within a class, int64 ``[M]``.
    """

    offsets: Ids
    owner: Ids
    destinations: Masks
    bounds: Ids
    nodes: Ids

    @classmethod
    def from_masks(cls, needed_by: Masks, offsets: Ids) -> Relation:
        """Returns the relation of nodes that are each needed by a set of devices.

        Args:
            needed_by: bit d is set if device d needs the node, uint64 ``[N]``; the owner's bit is ignored.
            offsets: int64 ``[P + 1]``.
        """
        num_devices = len(offsets) - 1
        if num_devices > MAX_DEVICES:
            raise ValueError(f"Plans are made for at most {MAX_DEVICES} devices (got {num_devices}).")
        owner = np.repeat(np.arange(num_devices), np.diff(offsets))
        needed_by = needed_by & ~(np.uint64(1) << owner.astype(np.uint64))
        nodes = np.flatnonzero(needed_by)
        order = np.lexsort((needed_by[nodes], owner[nodes]))  # stable: ascending ids within a class
        nodes = nodes[order]
        owner, needed_by = owner[nodes], needed_by[nodes]
        first = np.ones(len(nodes), np.bool_)
        first[1:] = (owner[1:] != owner[:-1]) | (needed_by[1:] != needed_by[:-1])
        starts = np.flatnonzero(first)
        return cls(offsets, owner[starts], needed_by[starts], np.append(starts, len(nodes)), nodes)

    @classmethod
    def from_edges(cls, edge_index: Ids, offsets: Ids) -> Relation:
        """Returns the relation of an edge cut: the owner of an edge's target needs its source; ids are relabeled."""
        num_devices = len(offsets) - 1
        if num_devices > MAX_DEVICES:
            raise ValueError(f"Plans are made for at most {MAX_DEVICES} devices (got {num_devices}).")
        owner = np.repeat(np.arange(num_devices), np.diff(offsets))
        return cls.from_masks(within_hops(edge_index, owner, num_devices, 1)[1], offsets)

    @classmethod
    def from_halos(cls, halos: Sequence[Ids], offsets: Ids) -> Relation:
        """Returns the relation in which device d needs the nodes ``halos[d]`` (relabeled ids without duplicates)."""
        needed_by = np.zeros(offsets[-1], np.uint64)
        for device, halo in enumerate(halos):
            needed_by[halo] |= np.uint64(1 << device)
        return cls.from_masks(needed_by, offsets)

    @property
    def num_devices(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def counts(self) -> Ids:
        """Number of nodes of each class, int64 ``[C]``."""
        return np.diff(self.bounds)

    @cached_property
    def needs(self) -> NDArray[np.bool_]:
        """Whether a class is needed on a device, ``[C, P]``."""
        bits = np.arange(self.num_devices, dtype=np.uint64)
        return (self.destinations[:, None] >> bits & np.uint64(1)).astype(np.bool_)

    @cached_property
    def pair_rows(self) -> Ids:
        """Rows of device i that device j needs, int64 ``[P, P]``: the sizes of V_ij."""
        rows = np.zeros((self.num_devices, self.num_devices), np.int64)
        np.add.at(rows, self.owner, self.needs * self.counts[:, None])
        return rows

    def halo(self, device: int) -> Ids:
        """Returns the halo of `device`: the nodes that it needs from other devices, ascending."""
        classes = np.repeat(self.needs[:, device], self.counts)
        return np.sort(self.nodes[classes])
