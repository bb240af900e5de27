"""Metrics and table of the workers of gossip."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from rich.table import Table
from typing_extensions import override

from lightning_gnn.callbacks.loggers import log_values
from lightning_gnn.console import text_console
from lightning_gnn.strategies.gossip.history import HistoryExchange
from lightning_gnn.strategies.gossip.worker import Counts, Worker


class GossipMetrics(pl.Callback):
    """Callback that shows the progress of all workers and logs counts of each worker after each epoch of rank 0.

    The counts are from the last end of an epoch of each worker. On the progress bar: ``pool``, see :func:`progress`. Logged, with
    worker R:

    - ``gossip/batches/R``, ``gossip/averages/R``: numbers of batches and averages.
    - ``gossip/waited/R``: seconds of waiting for partners.
    - ``gossip/sent/R``: bytes of averages.
    - ``gossip/staleness``: batches of the most advanced worker minus batches of the slowest worker.
    - ``gossip/consensus``: distance between the workers' parameters, see
      :meth:`~lightning_gnn.strategies.gossip.worker.Worker.consensus`.
    - ``gossip/halo_age``, with a history: mean age in epochs of the halo rows that rank 0 read in the epoch.
    - ``gossip/halo_unknown``, with a history: share of these halo rows that had not been computed before.
    """

    def __init__(self, worker: Worker, history: HistoryExchange | None = None) -> None:
        self._worker, self._history = worker, history

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The bar's own numbers are from rank 0. Lightning's progress bars call this method for additional values.
        bar: Any = trainer.progress_bar_callback
        if bar is not None:
            plain = bar.get_metrics
            bar.get_metrics = lambda *of: {**plain(*of), "pool": progress(self._worker)}

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        vars(trainer.progress_bar_callback or self).pop("get_metrics", None)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._worker.publish(pl_module.parameters())
        if not trainer.is_global_zero:
            return
        counts_of = self._worker.all_counts()
        batches = [counts.batches for counts in counts_of.values()]
        values: dict[str, float] = {
            "gossip/staleness": max(batches) - min(batches),
            "gossip/consensus": self._worker.consensus(counts_of),
        }
        for worker, counts in counts_of.items():
            names = ("batches", "averages", "waited", "sent")
            values |= {f"gossip/{name}/{worker}": getattr(counts, name) for name in names}
        if self._history is not None:
            age, values["gossip/halo_unknown"] = self._history.take_ages()
            values["gossip/halo_age"] = age / self._worker.pool.size
        log_values(trainer, values)


def progress(worker: Worker) -> str:
    """Returns the share of all epochs that workers have taken from the pool; without an end, the number of epochs."""
    pool = worker.pool
    if pool.end is None:
        return f"{worker.reached / pool.size:.1f} epochs"
    return f"{100 * worker.reached / pool.end:.0f} %"


def show(counts_of: Mapping[int, Counts], lost: Sequence[int], undone: int, consensus: float, result: str) -> None:
    """Print a table of the workers' counts, if there are several (Tables 4.8 and 4.9 of the thesis, and times).

    Args:
        counts_of: counts by worker.
        lost: workers that did not reach the end.
        undone: number of batches left undone.
        consensus: distance between the workers' parameters, relative to their mean.
        result: description of the result.
    """
    if len(counts_of) < 2 and not lost:
        return
    title = f"Workers, {100 * consensus:.2g} % from each other; the result is {result}"
    title += f"; {undone} batches were left undone, by workers that ended last" if undone else ""
    columns = ("batches", "averages", "waits", "in vain", "waited, s", "idle, %", "taken over")
    found = Table("worker", *columns, title=title)
    for worker in sorted({*counts_of, *lost}):
        counts = counts_of.get(worker)
        returned = " (started again)" if counts is not None and counts.lives else ""
        name = f"{worker}{' (lost)' if worker in lost else returned}"
        if counts is None:  # before the end of its first epoch
            found.add_row(name, *["-"] * len(columns))
            continue
        seconds = max(counts.seconds, 1e-9)
        found.add_row(
            name,
            *map(str, (counts.batches, counts.averages, counts.waits, counts.in_vain)),
            f"{counts.waited:.2f}",
            f"{100 * (counts.waited + counts.idle) / seconds:.1f}",
            str(counts.taken_over),
        )
    text_console(100, sys.stderr).print(found)
