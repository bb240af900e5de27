"""Hierarchical edge cuts (DGCL section 4.1): what is cut between machines first, then between sockets, then between devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition.edge_cut import assign_nodes

Groups = Sequence["int | Groups"]
"""Devices as nested sequences: ``((0, 1), (2, 3))`` are two machines of two; see ``Topology.groups``."""


def assign_hierarchically(
    edge_index: NDArray[np.int64], num_nodes: int, groups: Groups, *, seed: int = 0
) -> NDArray[np.int32]:
    """Returns an owner for every node, int32 ``[N]``: METIS over the outer groups, then inside each over the inner ones.

    Args:
        edge_index: int64 ``[2, E]``; the owner of a target computes the edge.
        num_nodes: N.
        groups: the devices 0 to P - 1, each once; groups side by side hold equally many.
        seed: of METIS.

    Raises:
        ValueError: groups of unequal size, or other devices than 0 to P - 1.
    """
    devices = _devices(groups)
    if sorted(devices) != list(range(len(devices))):
        raise ValueError(f"Groups must name the devices 0 to {len(devices) - 1}, each once (got {groups}).")
    part = np.empty(num_nodes, np.int32)
    _assign(edge_index, np.arange(num_nodes), groups, seed, part)
    return part


def _assign(
    edge_index: NDArray[np.int64], nodes: NDArray[np.int64], group: Groups | int, seed: int, part: NDArray
) -> None:
    """Writes the owners of `nodes`; `edge_index` holds the edges among them, as positions in `nodes`."""
    if isinstance(group, int):
        part[nodes] = group
        return
    sizes = [len(_devices(each)) for each in group]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"Groups side by side must hold equally many devices (got {sizes} in {group}). "
            "Take the same number of each machine, or cut without hierarchy."
        )
    choice = assign_nodes(edge_index, len(nodes), len(group), seed=seed).part
    for number, each in enumerate(group):
        chosen = choice == number
        position = np.cumsum(chosen) - 1
        inside = chosen[edge_index].all(0)
        _assign(position[edge_index[:, inside]], nodes[chosen], each, seed, part)


def _devices(group: Groups | int) -> list[int]:
    return [group] if isinstance(group, int) else [device for each in group for device in _devices(each)]
