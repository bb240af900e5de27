"""What steps give on a rank, made that of all ranks: the weight of its loss, logged values, metrics, predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.data.sources import MASKS, counted_mask
from lightning_gnn.nn.helpers import labelled
from lightning_gnn.steps.logs import GlobalLogs
from lightning_gnn.steps.predictions import PredictedRows, Predictions


class StepValues:
    """Weighs what steps give by the labelled nodes, or edges, of the stage's mask that each rank has; runs on every rank.

    Args:
        module: its ``log`` and its metrics are wrapped until :meth:`release`.
        world: the ranks.
        shard: of this rank, on its device.
        loss_reduction: ``"mean"`` or ``"sum"``, of the training step's loss.

    Attributes:
        logs: of the module.
        scale: what to multiply this rank's loss with; in a step, as long as it has not said what its loss weighs.
    """

    def __init__(self, module: pl.LightningModule, world: World, shard: Shard, loss_reduction: str = "mean") -> None:
        self._module, self._world, self._shard, self._loss_reduction = module, world, shard, loss_reduction
        self.logs = self._wrapped()
        self.scale = 1.0
        names = ("y", *shard.mask_counts) if isinstance(shard.batch, Data) else ()
        self._versions = {name: shard.batch[name]._version for name in names if shard.batch.get(name) is not None}

    def _wrapped(self) -> GlobalLogs:
        return GlobalLogs(self._module, self._world, self._module.trainer.callbacks)  # type: ignore[attr-defined]

    def release(self) -> None:
        """Gives the module its own ``log`` and metrics back."""
        self.logs.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """While open, the module has its own ``log`` and metrics."""
        self.logs.release()
        try:
            yield
        finally:
            self.logs = self._wrapped()

    def enter(self, batch: Any, mask: str) -> Sequence[int]:
        """Begins a step on a batch whose values count a mask; returns the mask's labelled rows by rank."""
        mask, shard, rank = counted_mask(mask, self._module), self._shard, self._world.rank
        sampled = "seed_counts" in batch
        counts: Sequence[int] = batch.seed_counts if sampled else self._counts(batch, mask)
        stand_ins = 0
        if not counts[rank] and mask in MASKS:
            stand_ins = 1 if sampled else int(batch[mask].sum())
        sizes = shard.counts[rank], shard.rows[rank], shard.edge_counts[rank], shard.edges[rank]
        self.logs.enter(counts, stand_ins, sizes)
        self.scale = self.logs.scale(self._loss_reduction)  # for manual_backward, inside the step
        return counts

    def leave(self, output: Any, trains: bool = False) -> None:
        """Ends the step, which has returned `output`: logs what it has logged."""
        self.scale = self.logs.leave(output, self._loss_reduction if trains else "mean")

    def _counts(self, batch: Any, mask: str) -> Sequence[int]:
        """Returns how many labelled nodes, or edges, of the mask each rank has in this step."""
        if self._is_untouched(batch, mask):
            return self._shard.mask_counts[mask]
        own = int(labelled(batch, mask).sum() if mask in MASKS else batch[mask].sum())
        return tuple(self._world.all_gather_object(own))

    def _is_untouched(self, batch: Any, mask: str) -> bool:
        """Returns whether a mask and the labels are those of the shard: the user has neither replaced nor changed them."""
        own = self._shard.batch
        labels = ("y",) if mask in MASKS and own.get("y") is not None else ()
        return all(
            batch[name] is own[name] and self._versions.get(name) in (None, own[name]._version)
            for name in (mask, *labels)
        )

    def mean(self, tensor: Tensor) -> Tensor:
        """Returns the mean over ranks, weighted as logged values are."""
        return self.logs.weights.mean(tensor, "A mean over ranks")

    def predicted(self, output: Any, batch: Any, mode: Predictions) -> Any:
        """Returns what one device predicts in a step; see :class:`~lightning_gnn.steps.predictions.PredictedRows`."""
        rows_of = batch if isinstance(batch, Data) else self._shard.batch
        return PredictedRows(self._world, self._shard, rows_of, mode)(output)
