"""torchmetrics over ranks that may have nothing to add."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_gnn.comm.group import World


class StandInMetrics:
    """Wraps the metrics of a module: rows that only stand in for an empty mask are not counted.

    Many metrics raise on an empty update, so a rank without labelled nodes has one stand-in row in its mask; an update
    with as many rows is skipped there. And states that are lists of tensors (AUROC, average precision) must have one
    dtype and shape on all ranks before they are gathered: a rank without data takes those of another.

    Args:
        module: its metrics are wrapped until :meth:`release`.
        world: the ranks.
    """

    def __init__(self, module: pl.LightningModule, world: World) -> None:
        self._world = world
        self._stand_ins = 0
        self._wrapped: list[tuple[Metric, Any]] = []
        if world.size == 1:
            return
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._wrapped.append((metric, metric.update))
                self._wrap(metric)

    def release(self) -> None:
        """Gives the metrics their own methods back."""
        for metric, update in self._wrapped:
            metric.update = update  # type: ignore[method-assign]
            metric.__dict__.pop("_sync_dist", None)
        self._wrapped = []

    def enter(self, stand_ins: int) -> None:
        """Starts a step; `stand_ins` is the number of stand-in rows in its mask on this rank, 0 if it has real ones."""
        self._stand_ins = stand_ins

    def leave(self) -> None:
        """Ends the step."""
        self._stand_ins = 0

    def _wrap(self, metric: Metric) -> None:
        update, sync = metric.update, metric._sync_dist

        def skip_stand_ins(*args: Any, **kwargs: Any) -> None:
            rows = next((a.size(0) for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.dim()), None)
            if rows is not None and (rows == 0 or rows == self._stand_ins):
                metric._update_count += 1  # seen, so that compute() does not warn
                metric._computed = None
                return
            update(*args, **kwargs)

        def sync_lists_first(*args: Any, **kwargs: Any) -> None:
            self._agree_on_lists(metric)
            sync(*args, **kwargs)

        metric.update = skip_stand_ins  # type: ignore[method-assign]
        if any(isinstance(default, list) for default in metric._defaults.values()):
            object.__setattr__(metric, "_sync_dist", sync_lists_first)

    def _agree_on_lists(self, metric: Metric) -> None:
        lists = [name for name, default in metric._defaults.items() if isinstance(default, list)]
        own: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name in lists:
            values = getattr(metric, name)
            if values:
                joined = dim_zero_cat(values)
                setattr(metric, name, [joined])
                own[name] = (joined.dtype, tuple(joined.shape[1:]))
        everyone = self._world.all_gather_object(own)
        for name in lists:
            form = next((forms[name] for forms in everyone if name in forms), None)
            if name not in own and form is not None:
                dtype, shape = form
                setattr(metric, name, [torch.empty((0, *shape), dtype=dtype, device=metric.device)])
