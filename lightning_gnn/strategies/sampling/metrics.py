"""Metrics of sampling."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_gnn.callbacks.loggers import log_values
from lightning_gnn.comm.group import World
from lightning_gnn.strategies.sampling.loader import SampledBatches


class SamplingMetrics(pl.Callback):
    """Callback that logs metrics of mini-batches after each training epoch; added by ``sampling``.

    - ``sampling/seconds``: longest time of a rank for making its batches, summed over its samplers.
    - ``sampling/wait_s``: longest time of a rank for waiting for batches; ``1 - wait_s / seconds`` was overlapped with training.
    - ``sampling/remote_bytes``, with several machines: bytes that all ranks received from other machines.
    - ``sampling/cache_hit_rate``, with several machines: share of the feature rows of other machines that were in the remote
      cache.
    - ``sampling/feature_cache_hits`` and ``sampling/feature_cache_misses``, with ``local_cache``: feature rows that ranks read on
      their own machines, for their batches and for other machines, from memory and from the store.
    """

    def __init__(self, batches: Callable[[], SampledBatches | None], world: World) -> None:
        self._batches, self._world = batches, world

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = self._batches()
        if batches is None:
            return
        seconds, waited = batches.take_seconds()
        stores = [maker.store for maker in batches.makers]
        counts = [sum(each) for each in zip(*(store.take_counts() for store in stores))]
        own = torch.tensor([seconds, waited, *counts], dtype=torch.float64, device=self._world.device)
        by_rank = self._world.all_gather(own, "Sampling metrics").cpu()
        longest, total = by_rank.amax(0), by_rank.sum(0)
        asked, hits, received, near_hits, near_misses = total[2:]
        values = {"sampling/seconds": longest[0], "sampling/wait_s": longest[1]}
        if stores[0].channel is not None:
            values["sampling/remote_bytes"] = received
            values["sampling/cache_hit_rate"] = hits / asked.clamp(min=1)
        if stores[0].near_cache is not None:
            values["sampling/feature_cache_hits"] = near_hits
            values["sampling/feature_cache_misses"] = near_misses
        log_values(trainer, values)
