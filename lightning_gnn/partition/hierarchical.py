"""Hierarchical edge cuts (DGCL section 4.1): what is cut between machines first, then between sockets, then between devices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition.layout import Groups

Cut = Callable[[NDArray[np.int64], int, int], NDArray[np.int32]]
"""Of edges ``[2, E]``, the number of nodes and that of parts: the part of each node."""


def assign_hierarchically(edge_index: NDArray[np.int64], num_nodes: int, groups: Groups, cut: Cut) -> NDArray[np.int32]:
    """Returns an owner for every node, int32 ``[N]``: cut over the outer groups, then inside each over the inner ones.

    Raises:
        ValueError: groups side by side that do not hold equally many devices, or other devices than 0 to P - 1, each once.
    """
    named = devices(groups)
    if sorted(named) != list(range(len(named))):
        raise ValueError(f"Groups must name the devices 0 to {len(named) - 1}, each once (got {groups}).")
    if not alike(groups):
        raise ValueError(
            f"Groups side by side must hold equally many devices (got {groups}). "
            "Take the same number of each machine, or cut without hierarchy."
        )
    part = np.empty(num_nodes, np.int32)
    _assign(edge_index, np.arange(num_nodes), groups, cut, part)
    return part


def alike(groups: Groups | int) -> bool:
    """Returns whether groups side by side hold equally many devices, on all levels."""
    if isinstance(groups, int):
        return True
    return len({len(devices(each)) for each in groups}) <= 1 and all(map(alike, groups))


def _assign(
    edge_index: NDArray[np.int64], nodes: NDArray[np.int64], group: Groups | int, cut: Cut, part: NDArray
) -> None:
    """Writes the owners of `nodes`; `edge_index` holds the edges among them, as positions in `nodes`."""
    if isinstance(group, int):
        part[nodes] = group
        return
    choice = cut(edge_index, len(nodes), len(group))
    for number, each in enumerate(group):
        chosen = choice == number
        position = np.cumsum(chosen) - 1
        inside = chosen[edge_index].all(0)
        _assign(position[edge_index[:, inside]], nodes[chosen], each, cut, part)


def devices(group: Groups | int) -> list[int]:
    return [group] if isinstance(group, int) else [device for each in group for device in devices(each)]
