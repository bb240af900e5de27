"""Samples of a stage: comparison of datasets between ranks, and files of predictions. Graph ranks must read equal samples."""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.comm.group import World

_FIX = (
    "Read the same files on all ranks. In __getitem__, use the global generators of torch, NumPy (such as np.random.rand) and "
    "random, which are seeded for each sample. Seed your own generators with the index."
)


class SampleChecks(pl.Callback):
    """Comparison of samples between ranks.

    All ranks compare three samples of each dataset when a stage begins. Graph ranks compare the samples of each training batch
    in the first epoch, and in each hundredth batch of later epochs.

    Args:
        world: all ranks; collective.
        data: datasets of the stage, a :class:`~lightning_gnn.extensions.samples.data.SampleData`.
        seed: seed of random states in items.

    Raises:
        ValueError: on all ranks: numbers of samples, or samples, differ between ranks.
    """

    _files: Any = None  # of predictions

    def __init__(self, world: World, data: Any, seed: int) -> None:
        self._world = world
        sizes = world.all_gather_object(data.sizes)
        for rank, size in enumerate(sizes):
            if size != sizes[0]:
                raise ValueError(
                    f"Datasets must have the same numbers of samples on all ranks, got {size} on rank {rank} and {sizes[0]} "
                    "on rank 0. Read the same files on all ranks."
                )
        with world.shared_failures("Samples could not be read"):
            own = data.digests(seed) if world.size > 1 else {}
        by_rank = world.all_gather_object(own)
        for (rank, found), (name, index) in product(enumerate(by_rank), by_rank[0]):
            if found.get((name, index)) != by_rank[0][name, index]:
                raise ValueError(
                    f"{name}[{index}] must be equal on all ranks, but differs between ranks 0 and {rank} at the start. {_FIX}"
                )

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.predictions == "file" and strategy.steps.rows is not None:
            from lightning_gnn.extensions.samples.predictions import SampleFiles

            self._files = SampleFiles(trainer, self._world, strategy.steps.predictions_folder)
            strategy.steps.combine = self._files.join
            strategy.steps.in_use.callback(self._files.remove_parts)

    @override
    def on_predict_batch_start(self, *arguments: Any) -> None:
        if self._files is not None:
            self._files.begin_batch(arguments[2].sample_info)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        info = batch.sample_info
        if not info.is_compared:
            return
        own = dict(zip(info.positions.tolist(), zip(info.indices, info.digests)))
        found = dict[int, tuple[int, tuple[int, int]]]()
        for rank, samples in enumerate(self._world.all_gather_object(own)):
            for position, sample in samples.items():
                first, expected = found.setdefault(position, (rank, sample))
                if sample != expected:
                    raise ValueError(
                        f"Sample {sample[0]} must be equal on all graph ranks, but differs between ranks {first} and {rank} in "
                        f"epoch {trainer.current_epoch}. {_FIX}"
                    )
