"""``self.log`` with global values: a plain call logs the value of one device, not that of a rank."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_gnn.comm.group import World

_Call = tuple[str, Any, dict[str, Any]]  # name, value, options
_REDUCTIONS = {"mean", "sum", "max", "min"}


class GlobalLogs:
    """Wraps ``module.log``: scalars become those of all ranks before they are logged.

    Args:
        module: its ``log`` is wrapped until :meth:`release`.
        world: the ranks.

    A mean is weighted by the ranks' labelled nodes of the stage's mask, or by ``batch_size`` where a call gives it;
    ``reduce_fx`` of ``"sum"``, ``"max"`` and ``"min"`` reduces over ranks likewise. Calls with ``sync_dist``,
    ``rank_zero_only`` or a metric object are Lightning's own affair. The values of one step travel in one message.
    """

    def __init__(self, module: pl.LightningModule, world: World) -> None:
        self._module, self._world = module, world
        self._log = module.log
        # Lightning would advise sync_dist=True for values that are global already.
        warnings.filterwarnings("ignore", message=".*It is recommended to use `self.log\\(.*sync_dist=True.*")
        self._counts: Sequence[int] | None = None
        self._held: list[_Call] | None = None
        self._in_step = False
        object.__setattr__(module, "log", self._wrapped)

    def release(self) -> None:
        """Gives the module its own ``log`` back."""
        self._module.__dict__.pop("log", None)

    def enter(self, counts: Sequence[int]) -> None:
        """Starts a step in which rank r's values weigh ``counts[r]``; its calls are held until :meth:`leave`."""
        self._counts, self._held, self._in_step = counts, [], True

    def leave(self) -> None:
        """Ends the step: makes the held values global and logs them, in order."""
        held, self._held = self._held, None
        self._flush(held or [])
        self._in_step = False

    def _wrapped(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:  # positional prog_bar and so on
            kwargs.update(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args))
        if self._held is None:
            self._flush([(name, value, kwargs)])
        else:
            self._held.append((name, value, kwargs))

    def _flush(self, calls: Sequence[_Call]) -> None:
        local = [index for index, call in enumerate(calls) if self._is_rank_local(call)]
        reduced: dict[int, tuple[Tensor, int]] = {}
        if local and self._world.size > 1:
            reduced = dict(zip(local, self._reduce([calls[index] for index in local])))
        total = sum(self._counts) if self._counts else None
        for index, (name, value, kwargs) in enumerate(calls):
            weight = kwargs.get("batch_size")
            if index in reduced:
                given = value.dtype if isinstance(value, Tensor) else torch.float32
                value, weight = reduced[index]
                value = value.to(given if given.is_floating_point else torch.float32)
            if index in local:
                # What the steps of an epoch weigh in its mean; of one batch, it only tells Lightning not to guess.
                kwargs = {**kwargs, "batch_size": weight or total or 1}
            self._log(name, value, **kwargs)

    def _reduce(self, calls: Sequence[_Call]) -> list[tuple[Tensor, int]]:
        """Returns the values of all ranks as one each, and their weight; ranks of weight 0 have nothing to say."""
        device = self._world.device
        values = [value.detach().to(torch.float64) if isinstance(value, Tensor) else value for _, value, _ in calls]
        own = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).reshape(()) for value in values])
        weights = [self._weight(self._world.rank, kwargs.get("batch_size")) for *_, kwargs in calls]
        own = torch.stack([own, torch.tensor(weights, dtype=torch.float64, device=device)])
        everyone, weight = self._world.all_gather(own, f"Logged values {[name for name, *_ in calls]}").unbind(
            1
        )  # [P, calls] each
        present = (weight > 0) | (weight == 0).all(0)
        means = everyone.where(present, 0.0).mul(weight).sum(0) / weight.sum(0)
        hows = [kwargs.get("reduce_fx", "mean") for *_, kwargs in calls]
        return [
            (means[call] if how == "mean" else getattr(torch, how)(everyone[present[:, call], call]), int(total))
            for call, (how, total) in enumerate(zip(hows, weight.sum(0)))
        ]

    def _weight(self, rank: int, batch_size: int | None) -> int:
        if self._counts is None:
            return batch_size or 1
        if self._in_step and self._counts[rank] == 0:
            return 0  # its mask holds a stand-in row at most, whatever the call counts
        return self._counts[rank] if batch_size is None else batch_size

    def _is_rank_local(self, call: _Call) -> bool:
        _, value, kwargs = call
        scalar = isinstance(value, numbers.Number) or (isinstance(value, Tensor) and value.numel() == 1)
        plain = not kwargs.get("sync_dist") and not kwargs.get("rank_zero_only")
        return scalar and plain and kwargs.get("reduce_fx", "mean") in _REDUCTIONS
