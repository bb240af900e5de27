"""One worker's part of a fit: its batches, its averages with others, and the common result."""

from __future__ import annotations

import io
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch_geometric.data import Data
from typing_extensions import override

from lightning_gnn.extensions.codecs.codec import Codec
from lightning_gnn.strategies.gossip.averaging import Averages, Comparison, mean_of, weights_of
from lightning_gnn.strategies.gossip.clusters import ClusterBatches, Clusters, PooledBatches
from lightning_gnn.strategies.gossip.differences import Differences
from lightning_gnn.strategies.gossip.worker import Scores, Worker


class WorkerFit(pl.Callback):
    """Callback that connects a worker with Lightning's loop.

    Args:
        module: the module that is trained.
        worker: this worker.
        clusters: clusters of the graph.
        gradients: whether to average gradients, not parameters.
        comparison: choice of the result.
        device: device for which batches are made in advance; None makes them when they are needed.
        leaves_snapshots: whether to publish snapshots, from which restarted workers continue.
        codec: codec of the differences that partners send each other; None sends vectors.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        worker: Worker,
        clusters: Clusters,
        gradients: bool,
        comparison: Comparison,
        device: torch.device | None,
        leaves_snapshots: bool,
        codec: Codec | None,
    ) -> None:
        self.worker, self.comparison, self._leaves_snapshots = worker, comparison, leaves_snapshots
        self._module, self._clusters = module, clusters
        self._averages = Averages(module, gradients, worker.through_host)
        if codec is not None:
            worker.differences = Differences(codec, self._averages.sizes)
        self._pooled = PooledBatches(worker, clusters, self._epoch, device)
        self._is_placed = False  # whether the pool starts at the position of a checkpoint
        self._validates_every: int | None = None  # number of epochs, from the Trainer

    def _epoch(self) -> tuple[int, bool]:
        """Returns the epoch, and whether it is the last."""
        trainer = self._module.trainer
        # trainer.current_epoch is briefly one too low if a run resumes from a checkpoint of an epoch's end.
        progress: Any = trainer.fit_loop.epoch_progress.current
        return progress.processed, progress.processed + 1 == trainer.max_epochs

    def batches(self, mask: str | None, saved: dict[str, Any]) -> PooledBatches | ClusterBatches | None:
        """Returns the pool's batches for training, the clusters with validation nodes for validation, None otherwise.

        Args:
            mask: mask of the loader.
            saved: :meth:`position` in the checkpoint that the run resumes from; empty without one.
        """
        if mask == "val_mask":
            return ClusterBatches(self._clusters, self._clusters.draw_validation_clusters())
        if mask != "train_mask":
            return None
        if not self._is_placed:  # the epoch of a checkpoint is only known now
            pool, self._is_placed = self.worker.pool, True
            pool.begin = self._epoch()[0] * pool.size
            if saved.get("size") == pool.size:
                pool.begin, pool.done_before = saved["begin"], frozenset(saved["done"])
            if self.worker.life:
                self.worker.give_back_all()
        return self._pooled

    def position(self) -> dict[str, Any]:
        """Returns the position of the pool, for checkpoints."""
        begin, done = self.worker.position()
        return {"size": self.worker.pool.size, "begin": begin, "done": done}

    def pop_batch(self) -> Data:
        """Returns the batch that was started first, on the device."""
        return self._pooled.pop_batch()

    def left_over(self) -> Data | None:
        """Returns a batch of all items that others left undone at the end of the pool; None once all are done."""
        self.worker.leave(self._averages.vector)
        return self._pooled.left_over()

    def average(self) -> None:
        total = self.worker.meet(self._averages.vector)
        if total is not None:
            self._averages.take(total)

    def end(self, seconds: float) -> dict[int, Scores]:
        """Returns the scores of the workers that reached the end; waits up to `seconds` seconds for workers that are alive."""
        self.worker.leave(self._averages.vector)
        self._pooled.give_back()
        self.worker.publish(self._module.parameters())
        return self.worker.agree(self.comparison.scores, weights_of(self._module), seconds)

    def load_result(self, scores: dict[int, Scores]) -> str:
        """Load the result of the workers with these scores into the module; returns a description of the result."""
        chosen, result = self.comparison.choose(scores, self.worker.me)
        self._module.load_state_dict(mean_of([self.worker.weights_of(worker) for worker in chosen]))
        return result

    def leave_snapshot(self, trainer: pl.Trainer) -> None:
        if self._leaves_snapshots:
            self.worker.leave_snapshot(snapshot_of(trainer, self._module))

    def _rejoin(self, trainer: pl.Trainer) -> None:
        """Continue after a restart with the state of another worker, in the current epoch of all workers."""
        other, snapshot = self.worker.newest_snapshot()
        load_snapshot(trainer, self._module, snapshot)
        progress: Any = trainer.fit_loop.epoch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = self._pooled.first_epoch()
        total = self.worker.enter(self._averages.vector)
        if total is not None:
            self._averages.take(total)
        epoch = trainer.current_epoch
        print(f"Worker {self.worker.me} rejoined in epoch {epoch}, with the state of worker {other}.", file=sys.stderr)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.worker.life:
            self._rejoin(trainer)
        if trainer.enable_validation:
            between = "stale rows" if self._clusters.with_halo else "nothing"
            rank_zero_info(
                f"Validation during fit is approximate: each worker validates its own weights, on clusters that read {between} "
                "from the nodes outside. trainer.validate and trainer.test after fit are exact."
            )

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hook called at the start of an epoch; enables validation in the last epoch.

        The best worker is chosen by its last weights, so the last epoch always validates.
        """
        self.leave_snapshot(trainer)
        epochs, every = trainer.max_epochs, trainer.check_val_every_n_epoch
        if self.worker.size > 1 and self.comparison.compares and every and trainer.current_epoch + 1 == epochs:
            self._validates_every, trainer.check_val_every_n_epoch = every, epochs if epochs % every else every

    def release(self, trainer: pl.Trainer) -> None:
        """End the thread that makes batches, and restore the Trainer's settings."""
        self._pooled.close()
        if self._validates_every is not None:
            trainer.check_val_every_n_epoch = self._validates_every

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._pooled.finish_batch()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.comparison.end_epoch()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.worker.leave(self._averages.vector, for_good=False)  # so that no worker waits in the meantime

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.worker.come_back()
        if self.worker.size > 1:
            self.comparison.end_validation(trainer)


def snapshot_of(trainer: pl.Trainer, module: pl.LightningModule) -> bytes:
    """Returns weights, buffers, and states of optimizers and schedulers, between two epochs."""
    file = io.BytesIO()
    state = {
        "weights": module.state_dict(),
        "optimizers": [each.state_dict() for each in trainer.optimizers],
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
    }
    torch.save(state, file)
    return file.getvalue()


def load_snapshot(trainer: pl.Trainer, module: pl.LightningModule, snapshot: bytes) -> None:
    """Load the state that :func:`snapshot_of` returned for another worker."""
    state = torch.load(io.BytesIO(snapshot), map_location="cpu", weights_only=True)
    module.load_state_dict(state["weights"])
    for optimizer, its_state in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(its_state)
    for config, its_state in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(its_state)
