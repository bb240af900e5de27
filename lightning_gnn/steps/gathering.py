"""Tensors of all ranks, of different lengths too: what ``self.all_gather`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.comm.group import World
from lightning_gnn.steps.weights import RowWeights


class _Gather(torch.autograd.Function):
    """The rows of all ranks; its transpose sums over ranks what each has for a row."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, world: World, counts: Sequence[int]) -> Tensor:
        ctx.world, ctx.counts = world, counts
        return world.all_gather_rows(own.detach().contiguous(), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.world.all_reduce_(grad.contiguous().clone(), "Gradient of all_gather")
        return total.split(list(ctx.counts))[ctx.world.rank], None, None


def gather_rows(tensor: Tensor, world: World, weights: RowWeights | None, sync_grads: bool) -> Tensor:
    """Returns the tensors of all ranks: ``[P, *shape]`` where all have one shape, else their rows as ``[1, sum of n, ...]``.

    So ``.flatten(0, 1)``, ``.view(-1, C)`` and ``torch.cat(list(...))`` give all rows, those of rank 0 first. All ranks call it.

    Args:
        tensor: ``[n, ...]``, or without dimensions.
        world: the ranks.
        weights: know which rows only stand in; these are left out.
        sync_grads: let gradients flow back to all ranks.

    Raises:
        ValueError: on all ranks: shapes differ in other dimensions than the first.
    """
    stand_ins = 0 if weights is None else weights.stand_ins
    may_stand_in = tensor.dim() > 0 and 0 < len(tensor) <= stand_ins
    everyone = world.all_gather_object((tuple(tensor.shape), tensor.dtype, may_stand_in))
    shapes = [shape for shape, *_ in everyone]
    some = [each for each in everyone if each[0] != () and 0 not in each[0][:1]] or everyone
    dtype = reduce(torch.promote_types, (dtype for _, dtype, _ in some))
    if any(stands_in for *_, stands_in in everyone):
        assert weights is not None
        # Of one shape on all ranks, they may be no rows at all, such as losses: unless that is what masks have.
        of_mask = all(not count or shape[0] == count for shape, count in zip(shapes, weights.counts))
        if len(set(shapes)) == 1 and not of_mask:
            may_stand_in = False
        else:
            shapes = [(0, *shape[1:]) if stands_in else shape for shape, _, stands_in in everyone]
            some = [each for each in everyone if not each[2]]
    forms = {shape[1:] for shape, *_ in some}
    if len(forms) > 1 or (len(set(shapes)) > 1 and () in shapes):
        found = ", ".join(f"{list(shape)} on rank {rank}" for rank, (shape, *_) in enumerate(everyone))
        raise ValueError(f"all_gather joins rows: shapes may differ in their first dimension only (got {found}).")
    alike = len(set(shapes)) == 1
    own = (tensor[:0] if may_stand_in else tensor).to(world.device, dtype)
    own = own.unsqueeze(0) if alike else own.reshape(len(own), *forms.pop())
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        joined = _Gather.apply(own, world, [1] * world.size if alike else [shape[0] for shape in shapes])
    return joined if alike else joined.unsqueeze(0)
