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


def draw_others(keys: Tensor, nodes: Tensor, count: int, num_nodes: int, *seeds: int) -> Tensor:
    """Returns for each key random nodes other than its own one, int64 ``[n, count]``, uniform and with replacement.

    They are the same for a key wherever it is drawn.

    Args:
        keys: int64 ``[n]``; equal keys draw equal numbers.
        nodes: of each key, the node that is not drawn, int64 ``[n]``.
        count: nodes for each key.
        num_nodes: of the whole graph, at least 2.
        seeds: other numbers that draws depend on.
    """
    x = keys.view(-1, 1)
    for seed in seeds:
        x = _mix(x + _signed((seed + 1) * _STEP))
    x = _mix(_mix(x) + torch.arange(1, count + 1, device=keys.device) * _signed(_STEP))
    drawn = ((x >> 1) & (_BITS >> 1)) % (num_nodes - 1)
    return drawn + (drawn >= nodes.view(-1, 1)).long()
