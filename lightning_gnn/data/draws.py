"""Random numbers that are functions of what they are for, so that they do not depend on who draws them, or how many draw.

Source: the mixing function is SplitMix64's (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = (1 << 64) - 1


def _signed(number: int) -> int:
    number &= _BITS
    return number - (1 << 64) if number >> 63 else number


_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _mix(x: Tensor) -> Tensor:
    """Returns each number's bits mixed; int64 stands for uint64, whose products wrap alike."""
    for shift, factor in _ROUNDS:
        x = (x ^ ((x >> shift) & (_BITS >> shift))) * factor
    return x


def draw_others(keys: Tensor, nodes: Tensor, count: int, num_nodes: int | Tensor, *seeds: int) -> Tensor:
    """Returns for each key random nodes other than its own one, int64 ``[n, count]``, uniform and with replacement.

    They are the same for a key wherever it is drawn.

    Args:
        keys: int64 ``[n]``; equal keys draw equal numbers.
        nodes: of each key, the node that is not drawn, int64 ``[n]``.
        count: nodes for each key.
        num_nodes: of the whole graph, at least 2; or for each key, int64 ``[n, 1]``: the first so many are drawn from.
        seeds: other numbers that draws depend on.
    """
    x = keys.view(-1, 1)
    for seed in seeds:
        x = _mix(x + _signed((seed + 1) * _STEP))
    x = _mix(_mix(x) + torch.arange(1, count + 1, device=keys.device) * _signed(_STEP))
    drawn = ((x >> 1) & (_BITS >> 1)) % (num_nodes - 1)
    return drawn + (drawn >= nodes.view(-1, 1)).long()


class OtherNodes:
    """Draws for edges nodes other than their targets, uniformly, of those that are there at the edge's time.

    So PyG draws negatives where nodes have times; but it tries a few times and then takes the earliest node of all. Here the draw
    is exact, and the earliest other node is taken only where none is there. It depends on original ids, not on the partition.

    Args:
        n_id: original id of each node, ``[N]``.
        time: from when on each is there, int64 ``[N]``; None if all always are.
    """

    def __init__(self, n_id: Tensor, time: Tensor | None = None) -> None:
        self._order, self._place, self._times = n_id.argsort(), n_id, None
        if time is not None:
            self._order = self._order[time[self._order].argsort(stable=True)]
            self._place = torch.empty_like(self._order).scatter_(0, self._order, torch.arange(len(n_id)))
            self._times = time[self._order]

    def draw(self, keys: Tensor, targets: Tensor, until: Tensor | None, count: int, *seeds: int) -> Tensor:
        """Returns nodes for each edge, int64 ``[n, count]``, with replacement.

        Args:
            keys: of the edges, see :func:`draw_others`.
            targets, until: their targets and times, ``[n]``; times where nodes have some.
            seeds: other numbers that draws depend on.
        """
        place = self._place[targets]
        size = torch.full_like(place, len(self._order))
        if self._times is not None:
            assert until is not None
            there = torch.searchsorted(self._times, until, right=True)
            # Of those that are there the target is left out, if it is one of them.
            size = (there + (place >= there)).clamp(min=2)
        return self._order[draw_others(keys, place, count, size.view(-1, 1), *seeds)]
