"""What a rank's loss weighs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def loss_scale(
    output: Any,
    counts: Sequence[int],
    rank: int,
    reduction: str,
    gather: Callable[[Tensor], Tensor],
    stand_ins: int = 0,
    sizes: Sequence[int] = (),
) -> float:
    """Returns what to multiply a rank's loss with, so that the sum over ranks is the loss of one device.

    Args:
        output: of ``training_step``; a mapping with ``loss_weight`` says what its mean is over.
        counts: labelled nodes of the stage's mask on each rank: what it is over otherwise.
        rank: whose loss it is.
        reduction: ``"mean"`` or ``"sum"``.
        gather: returns the tensors of all ranks, ``[P, ...]``.
        stand_ins: rows that only stand in for this rank's empty mask, which weigh nothing.
        sizes: nodes and edges of this rank. A weight of all of them, or of several columns of each, is none of the mask.

    Raises:
        ValueError: on all ranks: a ``loss_weight`` may count rows that stand in, and others.
    """
    if isinstance(output, Mapping) and "loss_weight" in output:
        own = float(output["loss_weight"])
        of_all = any(size and own % size == 0 for size in sizes)
        everyone = gather(torch.tensor([own, stand_ins, of_all], dtype=torch.float64)).tolist()
        weights = _without_stand_ins(everyone, counts)
        return weights[rank] / sum(weights) if any(weights) else 0.0
    if reduction == "sum":
        return 0.0 if stand_ins else 1.0
    return counts[rank] / sum(counts) if sum(counts) else 1.0


def _without_stand_ins(everyone: Sequence[Sequence[float]], counts: Sequence[int]) -> list[float]:
    """Returns the weights of all ranks, without what rows that stand in add to them."""
    per_row = {weight / count for (weight, *_), count in zip(everyone, counts) if count}
    alike = len({weight for weight, *_ in everyone}) == 1
    weights = []
    for rank, (weight, stand_ins, of_all) in enumerate(everyone):
        if stand_ins and (weight <= stand_ins or per_row == {weight / stand_ins}):
            weight = 0.0
        elif stand_ins and not (alike or of_all):
            raise ValueError(
                f"Rank {rank} has no labelled node of the mask that it trains on. A row stands in there, which must weigh nothing, "
                f"and whether it is among those that loss_weight={weight:g} counts cannot be told. Give each rank a training "
                'node: GraphDataModule(partition="metis_masks"), or a partition of your own that does.'
            )
        weights.append(weight)
    return weights
