"""What workers of gossip have done, as logged metrics and as a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_gnn.gossip.worker import Counts, Worker


class GossipMetrics(pl.Callback):
    """Logs after each epoch of rank 0 what every worker had done when it ended an epoch last; ``gossip`` brings it.

    By worker: ``gossip/batches/R``, ``gossip/averages/R``, ``gossip/waited/R`` (seconds of waiting for partners); and
    ``gossip/staleness``: the most batches of a worker less the fewest; ``gossip/consensus``: how far their parameters were from
    each other, see :meth:`~lightning_gnn.gossip.worker.Worker.consensus`.

    Args:
        worker: of this process.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._worker.tell(pl_module.parameters())
        if not trainer.is_global_zero:
            return
        everyone = self._worker.everyones()
        values = {
            "gossip/staleness": float(spread(everyone)),
            "gossip/consensus": self._worker.consensus(everyone),
        }
        for worker, counts in everyone.items():
            values[f"gossip/batches/{worker}"] = float(counts.batches)
            values[f"gossip/averages/{worker}"] = float(counts.averages)
            values[f"gossip/waited/{worker}"] = counts.waited
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)


def spread(everyone: Mapping[int, Counts]) -> int:
    """Returns how many batches the worker with most has more than the one with fewest."""
    batches = [counts.batches for counts in everyone.values()]
    return max(batches) - min(batches)


def table(everyone: Mapping[int, Counts], lost: Sequence[int], undone: int, consensus: float) -> Table:
    """Returns what each worker has done, a row each (Tables 4.8 and 4.9 of the thesis, and what it took).

    Args:
        everyone: by worker, as far as it has told.
        lost: workers that have not come to the end.
        undone: batches that nobody has done.
        consensus: how far the workers' parameters are from each other, relative to their mean.
    """
    title = f"Workers, {100 * consensus:.2g} % apart"
    title += f"; {undone} batches were left undone, by workers that ended last" if undone else ""
    found = Table(
        "worker", "batches", "averages", "waits", "in vain", "waited, s", "idle, %", "taken over", title=title
    )
    for worker in sorted({*everyone, *lost}):
        name, counts = f"{worker}{' (lost)' if worker in lost else ''}", everyone.get(worker)
        if counts is None:  # before its first epoch had ended
            found.add_row(name, *["-"] * 7)
            continue
        seconds = max(counts.seconds, 1e-9)
        found.add_row(
            name,
            *map(str, (counts.batches, counts.averages, counts.waits, counts.in_vain)),
            f"{counts.waited:.2f}",
            f"{100 * (counts.waited + counts.idle) / seconds:.1f}",
            str(counts.taken_over),
        )
    return found


def show(everyone: Mapping[int, Counts], lost: Sequence[int], undone: int, consensus: float) -> None:
    """Prints :func:`table`, where there were several workers."""
    if len(everyone) > 1 or lost:
        Console(file=sys.stderr, width=100).print(table(everyone, lost, undone, consensus))
