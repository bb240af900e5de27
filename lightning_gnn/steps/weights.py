"""Weights of the ranks' values in the values of one device: in steps, in hooks, and in losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.comm.group import World
from lightning_gnn.private_lightning import HOOK


@dataclass
class _Stage:
    """Training, validation or test.

    Attributes:
        counts: labeled rows of each rank in the last step, or the weights that the step returned.
        stand_ins: number of placeholder rows in this rank's empty mask.
        sums: counts of all steps since a hook of an epoch read them.
        sizes: numbers of nodes and edges of this rank.
        says: whether the step returned weights.
        read: whether a hook has read the sums.
    """

    counts: Sequence[float] = ()
    stand_ins: int = 0
    sums: Sequence[float] = ()
    sizes: Sequence[int] = ()
    says: bool = False
    read: bool = False


class RowWeights:
    """Numbers of labeled rows of each rank in the mask of the stage: the current step's, or in a hook the stage of its name."""

    def __init__(self, module: pl.LightningModule, world: World) -> None:
        self._module, self._world = module, world
        self._stages: dict[str, _Stage] = {}
        self._last = ""
        self.in_step = False

    def enter(self, counts: Sequence[int], stand_ins: int = 0, sizes: Sequence[int] = ()) -> None:
        """Begin a step; `stand_ins` is the number of placeholder rows in its mask on this rank, 0 if it has labeled rows."""
        self._last = self._name
        before = self._stages.get(self._name)
        sums = [0] * len(counts) if before is None or before.read else before.sums
        self._stages[self._name] = _Stage(counts, stand_ins, [a + b for a, b in zip(sums, counts)], sizes)
        self.in_step = True

    def take(self, output: Any) -> bool:
        """Set the weights of the step from ``loss_weight`` in its `output`, if present; returns whether it is. Collective.

        A weight equal to all local nodes or edges, or to several columns of each, is not a weight of the mask.

        Raises:
            ValueError: on all ranks: a weight may count placeholder rows together with other rows.
        """
        if not isinstance(output, Mapping) or "loss_weight" not in output:
            return False
        counts, stage, own = self.counts, self._stage, float(output["loss_weight"])
        of_all = any(size and own % size == 0 for size in stage.sizes)
        mine = torch.tensor([own, stage.stand_ins, of_all], dtype=torch.float64)
        by_rank = self._world.all_gather(mine, "Weights of losses").tolist()
        per_row = {weight / count for (weight, *_), count in zip(by_rank, counts) if count}
        alike = len({weight for weight, *_ in by_rank}) == 1
        weights = []
        for rank, (weight, standing_in, is_of_all) in enumerate(by_rank):
            if standing_in and (weight <= standing_in or per_row == {weight / standing_in}):
                weight = 0.0
            elif standing_in and not (alike or is_of_all):
                raise ValueError(
                    f"Rank {rank} has no labeled node of the mask, and its placeholder node must have weight 0. It is unclear "
                    f"whether loss_weight={weight:g} counts that node. Return loss_weight=0 where batch.seed_counts"
                    "[self.global_rank] is 0; or assign each rank a node of each mask, GraphDataModule(partition="
                    '"metis_masks").'
                )
            weights.append(weight)
        stage.sums = [total + weight - count for total, weight, count in zip(stage.sums, weights, stage.counts)]
        stage.counts, stage.says = weights, True
        return True

    def loss_scale(self, reduction: str) -> float:
        """Returns the factor for this rank's loss, so that the sum over ranks is the loss of one device.

        Args:
            reduction: reduction of the loss over local rows, ``"mean"`` or ``"sum"``; ignored if the step returned a weight.
        """
        if self._stage.says and not any(self._stage.counts):
            return 0.0
        if reduction == "sum" and not self._stage.says:
            return 0.0 if self.stand_ins else 1.0
        return self.share

    @property
    def _name(self) -> str:
        hook = getattr(self._module, HOOK)
        if hook is None:
            return self._last
        return next((stage for stage in ("validation", "test") if stage in hook), "training")

    @property
    def _stage(self) -> _Stage:
        return self._stages.get(self._name, _Stage())

    @property
    def counts(self) -> Sequence[float]:
        """Weights of the ranks in the step, or of the epoch in its hooks; equal weights if there are no counts."""
        stage = self._stage
        of_epoch = not self.in_step and "epoch" in (getattr(self._module, HOOK) or "")
        stage.read |= of_epoch
        counts = stage.sums if of_epoch else stage.counts
        return counts if any(counts) else (1,) * self._world.size

    @property
    def shares(self) -> list[float]:
        counts = self.counts
        return [count / sum(counts) for count in counts]

    @property
    def share(self) -> float:
        return self.shares[self._world.rank]

    @property
    def stand_ins(self) -> int:
        """Number of placeholder rows that this rank's mask has because no row is labeled; else 0."""
        return self._stage.stand_ins

    @property
    def sizes(self) -> Sequence[int]:
        return self._stage.sizes

    def mean(self, value: Tensor, operation: str) -> Tensor:
        """Returns the mean of the ranks' values by their labeled rows, on every rank; equal values are returned unchanged.

        Args:
            value: value of this rank, of one shape on all ranks.
            operation: name of the operation in errors.
        """
        value = value.detach() if value.is_floating_point() else value.float()
        by_rank = self._world.all_gather(value, operation)
        if bool((by_rank == by_rank[0]).all()):
            return by_rank[0]
        counts = torch.tensor(self.counts, dtype=torch.float64, device=by_rank.device)
        some = counts > 0
        parts = counts[some].view(-1, *[1] * value.dim()) / counts.sum()
        return (by_rank[some].double() * parts).sum(0).to(value.dtype)


class _Gather(torch.autograd.Function):
    """Autograd function that gathers the rows of all ranks; its transpose sums the gradients of a row over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: Sequence[int]) -> Tensor:
        ctx.world, ctx.counts = world, counts
        return world.all_gather_rows(rows.detach().contiguous(), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.world.all_reduce_(grad.contiguous().clone(), "Gradient of all_gather")
        return total.split(list(ctx.counts))[ctx.world.rank], None, None


def gather_rows(tensor: Tensor, world: World, weights: RowWeights | None, sync_grads: bool) -> Tensor:
    """Returns the tensors of all ranks: ``[P, *shape]`` if all shapes are equal, else their rows as ``[1, sum of n, ...]``.

    So ``.flatten(0, 1)``, ``.view(-1, C)`` and ``torch.cat(list(...))`` give all rows, beginning with rank 0. Collective.

    Args:
        tensor: tensor ``[n, ...]``, or without dimensions.
        world: all ranks.
        weights: weights with the number of placeholder rows, which are left out.
        sync_grads: whether gradients flow back to all ranks.

    Raises:
        ValueError: on all ranks: shapes differ in other dimensions than the first.
    """
    stand_ins = 0 if weights is None else weights.stand_ins
    may_stand_in = tensor.dim() > 0 and 0 < len(tensor) <= stand_ins
    by_rank = world.all_gather_object((tuple(tensor.shape), tensor.dtype, may_stand_in))
    shapes = [shape for shape, *_ in by_rank]
    some = [each for each in by_rank if each[0] != () and 0 not in each[0][:1]] or by_rank
    dtype = reduce(torch.promote_types, (dtype for _, dtype, _ in some))
    if any(stands_in for *_, stands_in in by_rank):
        assert weights is not None
        # Tensors of one shape on all ranks may be no rows, such as losses, unless the shapes match the masks.
        of_mask = all(not count or shape[0] == count for shape, count in zip(shapes, weights.counts))
        if len(set(shapes)) == 1 and not of_mask:
            may_stand_in = False
        else:
            shapes = [(0, *shape[1:]) if stands_in else shape for shape, _, stands_in in by_rank]
            some = [each for each in by_rank if not each[2]]
    forms = {shape[1:] for shape, *_ in some}
    if len(forms) > 1 or (len(set(shapes)) > 1 and () in shapes):
        found = ", ".join(f"{list(shape)} on rank {rank}" for rank, (shape, *_) in enumerate(by_rank))
        raise ValueError(f"Shapes in all_gather must be equal except in their first dimension, got {found}.")
    alike = len(set(shapes)) == 1
    own = (tensor[:0] if may_stand_in else tensor).to(world.device, dtype)
    own = own.unsqueeze(0) if alike else own.reshape(len(own), *forms.pop())
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        joined = _Gather.apply(own, world, [1] * world.size if alike else [shape[0] for shape in shapes])
    return joined if alike else joined.unsqueeze(0)
