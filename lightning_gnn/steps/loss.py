"""What a rank's loss weighs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.nn.helpers import left_stand_in_out


def loss_scale(
    output: Any,
    counts: Sequence[float],
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
        gather, sizes: see :func:`weights_of`.
        stand_ins: rows that only stand in for this rank's empty mask, unless the step has left them out.
    """
    stand_ins = 0 if left_stand_in_out() else stand_ins
    return scale_by(weights_of(output, counts, gather, stand_ins, sizes), counts, rank, reduction, stand_ins)


def scale_by(
    weights: Sequence[float] | None, counts: Sequence[float], rank: int, reduction: str, stand_ins: int = 0
) -> float:
    """Returns what to multiply a rank's loss with, by what the step says that ranks weigh, if it does; see :func:`loss_scale`."""
    if weights is not None:
        return weights[rank] / sum(weights) if any(weights) else 0.0
    if reduction == "sum":
        return 0.0 if stand_ins else 1.0
    return counts[rank] / sum(counts) if any(counts) else 1 / len(counts)


def weights_of(
    output: Any,
    counts: Sequence[float],
    gather: Callable[[Tensor], Tensor],
    stand_ins: int = 0,
    sizes: Sequence[int] = (),
) -> list[float] | None:
    """Returns what the values of each rank weigh in a step whose output says it by ``loss_weight``; None where it does not.

    Args:
        output: of a step.
        counts: labelled nodes of the stage's mask on each rank.
        gather: returns the tensors of all ranks, ``[P, ...]``.
        stand_ins: rows that only stand in for this rank's empty mask, which weigh nothing.
        sizes: nodes and edges of this rank. A weight of all of them, or of several columns of each, is none of the mask.

    Raises:
        ValueError: on all ranks: a weight may count rows that stand in, and others.
    """
    if not isinstance(output, Mapping) or "loss_weight" not in output:
        return None
    own = float(output["loss_weight"])
    of_all = any(size and own % size == 0 for size in sizes)
    everyone = gather(torch.tensor([own, stand_ins, of_all], dtype=torch.float64)).tolist()
    per_row = {weight / count for (weight, *_), count in zip(everyone, counts) if count}
    alike = len({weight for weight, *_ in everyone}) == 1
    weights = []
    for rank, (weight, standing_in, is_of_all) in enumerate(everyone):
        if standing_in and (weight <= standing_in or per_row == {weight / standing_in}):
            weight = 0.0
        elif standing_in and not (alike or is_of_all):
            raise ValueError(
                f"Rank {rank} has no labelled node of the mask. A row stands in there, which must weigh nothing, and whether it "
                f"is among those that loss_weight={weight:g} counts cannot be told. Take the mask without it: "
                'lightning_gnn.labelled(batch, "train_mask"); or give each rank a node of each mask, GraphDataModule(partition='
                '"metis_masks").'
            )
        weights.append(weight)
    return weights
