"""Outputs of a step on a rank, combined over all ranks: the weight of its loss, logged values, metrics and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.data.sources import MASKS, count_labeled, counted_mask
from lightning_gnn.private_torch import version_counter
from lightning_gnn.rows.graph import GraphRows, check_loss
from lightning_gnn.rows.mode import NotExactError
from lightning_gnn.steps.logs import GlobalLogs


class StepValues:
    """Outputs of steps, weighted by each rank's labeled nodes or edges in the mask of the stage; used on every rank.

    The ``log`` method and the metrics of the module are wrapped until :meth:`release`.

    Attributes:
        scale: factor for this rank's loss; inside a step, the factor without the step's ``loss_weight``.
    """

    def __init__(
        self, module: pl.LightningModule, world: World, shard: Shard, loss_reduction: str = "mean", rows: GraphRows | None = None
    ) -> None:
        self._module, self._world, self._shard, self._loss_reduction = module, world, shard, loss_reduction
        self._rows, self._is_whole = rows, False
        callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
        self.logs = GlobalLogs(module, world, callbacks, rows)
        self.scale = 1.0
        given = shard.masks_and_labels(shard.batch)
        self._versions = {name: version_counter(given[name]) for name in ("y", *shard.mask_counts) if given.get(name) is not None}

    def release(self) -> None:
        self.logs.release()

    @contextmanager
    def step(self, batch: Any, mask: str | None, whole: bool = True) -> Iterator[None]:
        """Context manager around a step.

        Args:
            batch: batch of the step.
            mask: mask that the values count; None in prediction.
            whole: whether the step is a full-graph step, if layers are bound to the graph; otherwise the batch is the rank's own.
        """
        self._is_whole = whole and self._rows is not None
        if self._rows is not None and self._is_whole:
            for mode in self._rows.modes:
                mode.lets_rows_leave = mask is None
                mode.exports.clear()
            self._rows.place(batch)
            for x in self._module.buffers():  # some are created in the run, such as masks of pruned weights
                self._rows.note_constant(x)
            self.logs.enter_rows()
            self.scale = 1 / self._world.size
            with self._rows.activate():
                yield
        else:
            if mask is not None:
                self._enter(batch, mask)
            with self.logs.metrics.seeing_new():
                yield

    def hook(self, whole: bool) -> AbstractContextManager[Any]:
        """Returns a context manager around a hook of full-graph steps (`whole`), or of mini-batch steps."""
        return self._rows.activate() if whole and self._rows is not None else self.logs.metrics.seeing_new()

    def _enter(self, batch: Any, mask: str) -> None:
        mask, shard, rank = counted_mask(mask, self._module), self._shard, self._world.rank
        sampled = "seed_counts" in batch
        counts: Sequence[int] = batch.seed_counts if sampled else self._counts(batch, mask)
        stand_ins = 1 if sampled and not counts[rank] else 0
        self.logs.enter(counts, stand_ins, shard.sizes(rank))
        # For manual_backward inside the step, before it returns the weight of its loss.
        self.scale = self.logs.weights.loss_scale(self._loss_reduction)

    def leave(self, output: Any, trains: bool = False) -> None:
        """End the step with its `output`: log the held values.

        Raises:
            NotExactError: the loss is not known to be equal on all ranks.
            ValueError: a mini-batch step returned no loss.
        """
        if self._is_whole and self._rows is not None:
            if trains:
                check_loss(output, self._rows)
            self.logs.leave_rows()
            return
        if trains and output is None and self._module.automatic_optimization:
            raise ValueError("training_step returned None. To skip a step, return `0 * out.sum()` of the model's output.")
        self.scale = self.logs.leave(output, self._loss_reduction if trains else "mean")

    def check_loss(self, loss: Tensor, mean: Tensor | None) -> None:
        """Raises :class:`NotExactError` on ranks whose loss of the whole graph differs from the `mean` over ranks.

        Not checked on devices, where the host would have to wait.
        """
        if not self._is_whole or mean is None or loss.device.type != "cpu" or loss.numel() != 1:
            return
        rtol = 1e-4 if loss.dtype in (torch.float16, torch.bfloat16) else 1e-5
        if not torch.allclose(loss.double(), mean.double().reshape(loss.shape), rtol=rtol, atol=1e-12, equal_nan=True):
            raise NotExactError(
                f"The loss must be equal on all ranks, got {loss.item():.6g} on this rank and a mean of {mean.item():.6g}. "
                "Compute it from values that are equal on all ranks: not from self.global_rank, the time, or rows inside "
                "lightning_gnn.local_rows()."
            )

    def _counts(self, batch: Any, mask: str) -> Sequence[int]:
        """Returns each rank's number of labeled nodes, or edges, in the mask of this step."""
        given, batch = (self._shard.masks_and_labels(of) for of in (self._shard.batch, batch))
        labels = ("y",) if mask in MASKS and given.get("y") is not None else ()
        # The user may have replaced or changed labels and masks.
        if all(
            batch[name] is given[name] and self._versions.get(name) in (None, version_counter(given[name]))
            for name in (mask, *labels)
        ):
            return self._shard.mask_counts[mask]
        own = count_labeled(batch.get("y") if mask in MASKS else None, batch[mask])
        return tuple(self._world.all_gather_object(own))
