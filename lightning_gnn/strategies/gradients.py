"""The sum of parameter gradients over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor

from lightning_gnn.comm.group import World


class GradientSum:
    """Adds to each parameter's ``grad`` the sum over ranks of what one backward pass added; runs on every rank.

    Args:
        world: the ranks.
        parameters: those that learn, in the same order on every rank.

    Only what the backward adds is summed: what stood in ``grad`` before, as in manual optimisation with several
    backwards, has been summed already. While :meth:`blocked`, gradients stay local and are summed with the next
    backward that is not.
    """

    def __init__(self, world: World, parameters: Sequence[Tensor]) -> None:
        self._world = world
        self._groups = [list(group) for _, group in groupby(sorted(parameters, key=_kind), key=_kind)]
        self._aside: dict[Tensor, Tensor] = {}
        self._blocked = False
        self._local = False

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Backwards inside leave their gradients unsummed."""
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def before(self) -> None:
        """Sets gradients aside that are summed already."""
        if self._blocked or self._local or self._world.size == 1:
            return
        for group in self._groups:
            for parameter in group:
                if parameter.grad is not None:
                    self._aside[parameter], parameter.grad = parameter.grad, None

    def after(self) -> None:
        """Sums what the backward has added, and adds what was set aside."""
        self._local = self._blocked
        if self._blocked or self._world.size == 1:
            return
        for group in self._groups:
            self._sum(group)
        for parameter, grad in self._aside.items():
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self._aside = {}

    def _sum(self, group: Sequence[Tensor]) -> None:
        # One message. The tail counts the ranks that have each gradient: a parameter that no rank used keeps None,
        # as on one device, where the optimizer then leaves it alone.
        sizes = [parameter.numel() for parameter in group]
        flat = torch.zeros(sum(sizes) + len(group), dtype=group[0].dtype, device=group[0].device)
        *pieces, used = flat.split([*sizes, len(group)])
        for index, (parameter, piece) in enumerate(zip(group, pieces)):
            if parameter.grad is not None:
                piece.copy_(parameter.grad.reshape(-1))
                used[index] = 1
        self._world.all_reduce_(flat, "Sum of gradients")
        for parameter, piece, count in zip(group, pieces, used.tolist()):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(piece.view_as(parameter))


def _kind(parameter: Tensor) -> tuple[str, str]:
    return str(parameter.dtype), str(parameter.device)
