"""What a rank's loss weighs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def loss_scale(
    output: Any, counts: Sequence[int], rank: int, reduction: str, total: Callable[[Tensor], Tensor]
) -> float:
    """Returns what to multiply a rank's loss with, so that the sum over ranks is the loss of one device.

    Args:
        output: of ``training_step``; a mapping with ``loss_weight`` says what its mean is over.
        counts: labelled nodes of the stage's mask on each rank: what it is over otherwise.
        rank: whose loss it is.
        reduction: ``"mean"`` or ``"sum"``.
        total: sums a tensor over ranks.
    """
    if isinstance(output, Mapping) and "loss_weight" in output:
        own = torch.as_tensor(float(output["loss_weight"]), dtype=torch.float64)
        everyone = float(total(own.clone()))
        return float(own) / everyone if everyone else 0.0
    if reduction == "sum":
        return 1.0
    return counts[rank] / sum(counts) if sum(counts) else 1.0
