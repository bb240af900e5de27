"""Training batches in the same tensors in each step, as captured steps need them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class StaticBatches:
    """Training batches whose values are copied into the tensors of the first batch.

    Args:
        trainer: Trainer of the run.
        total: number of samples of a full global batch; other batches keep their tensors.
    """

    def __init__(self, trainer: Any, total: int) -> None:
        self._trainer, self._total, self._info = trainer, total, None
        self._tensors = dict[str, Tensor]()

    def copy_batch(self, batch: Any) -> Any:
        """Replace the tensors of the samples of a full training batch, with the values of the batch; returns the batch."""
        info = batch.sample_info
        if not self._trainer.training or info.total != self._total:
            return batch
        for name in info.node_dims:
            kind, _, of_kind = name.rpartition(".")
            store = batch[kind] if kind else batch
            static = self._tensors.setdefault(name, store[of_kind])
            if static is not store[of_kind]:
                store[of_kind] = static.copy_(store[of_kind])
        self._info = self._info or info
        vars(self._info).update(vars(info), is_static=True)
        batch.sample_info = self._info
        return batch
