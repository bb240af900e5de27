"""Random numbers as functions of their purpose, independent of which ranks draw, and of how many.

Source: the mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = (1 << 64) - 1


def _to_signed(number: int) -> int:
    number &= _BITS
    return number - (1 << 64) if number >> 63 else number


_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, _to_signed(0xBF58476D1CE4E5B9)), (27, _to_signed(0x94D049BB133111EB)), (31, 1))


def _mix(x: Tensor) -> Tensor:
    """Returns each number with mixed bits; int64 represents uint64, whose products wrap equally."""
    for shift, factor in _ROUNDS:
        x = (x ^ ((x >> shift) & (_BITS >> shift))) * factor
    return x


def draw_others(keys: Tensor, nodes: Tensor, count: int, num_nodes: int | Tensor, *seeds: int) -> Tensor:
    """Returns random nodes for each key, except its own node, int64 ``[n, count]``, uniform and with replacement.

    The draws of a key are equal on all ranks.

    Args:
        keys: int64 ``[n]``; equal keys draw equal numbers.
        nodes: node of each key that is not drawn, int64 ``[n]``.
        count: number of draws for each key.
        num_nodes: number of nodes of the whole graph, at least 2. Or a number for each key, int64 ``[n, 1]``, to draw from the
            first nodes only.
        seeds: random seeds; equal seeds give equal draws.
    """
    x = keys.view(-1, 1)
    for seed in seeds:
        x = _mix(x + _to_signed((seed + 1) * _STEP))
    x = _mix(_mix(x) + torch.arange(1, count + 1, device=keys.device) * _to_signed(_STEP))
    drawn = ((x >> 1) & (_BITS >> 1)) % (num_nodes - 1)
    return drawn + (drawn >= nodes.view(-1, 1)).long()


class OtherNodes:
    """Uniform draws of nodes other than the targets of edges, among the nodes that exist at the time of the edge.

    PyG also draws negatives like this if nodes have times. But PyG tries a few times and then takes the earliest node of all.
    Here the draw is exact, and the earliest other node is taken only if no other node exists. Draws depend on original ids, not
    on the partition.

    Args:
        n_id: original id of each node, ``[N]``.
        time: time from which each node exists, int64 ``[N]``; None if all nodes always exist.
    """

    def __init__(self, n_id: Tensor, time: Tensor | None = None) -> None:
        self._order, self._place, self._times = n_id.argsort(), n_id, None
        if time is not None:
            self._order = self._order[time[self._order].argsort(stable=True)]
            self._place = torch.empty_like(self._order).scatter_(0, self._order, torch.arange(len(n_id)))
            self._times = time[self._order]

    def draw(self, keys: Tensor, targets: Tensor, until: Tensor | None, count: int, *seeds: int) -> Tensor:
        """Returns `count` nodes per edge, such as negative samples, int64 ``[n, count]``, with replacement.

        Args:
            keys: keys of the edges, see :func:`draw_others`.
            targets: targets of the edges, ``[n]``.
            until: times of the edges, ``[n]``, if nodes have times.
            count: number of draws for each edge.
            seeds: other numbers that the draws depend on.
        """
        place = self._place[targets]
        size = torch.full_like(place, len(self._order))
        if self._times is not None:
            assert until is not None
            there = torch.searchsorted(self._times, until, right=True)
            # The target is excluded if it exists at that time.
            size = (there + (place >= there)).clamp(min=2)
        return self._order[draw_others(keys, place, count, size.view(-1, 1), *seeds)]
