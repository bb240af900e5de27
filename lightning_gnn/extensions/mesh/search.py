"""Search of the batch size by Lightning's ``BatchSizeFinder``, in which all ranks make one decision.

A rank that runs out of memory inside a step leaves operations in which other ranks wait for it. Each rank therefore watches a key
in the store where ranks meet, and ends its own connections when a rank has set the key. All ranks leave the step by errors, agree
on the outcome in the store, connect again, and raise one error of memory, after which Lightning tries a smaller batch.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_gnn.comm.group import next_store
from lightning_gnn.comm.processes import current_progress
from lightning_gnn.comm.watchdog import CommunicationError
from lightning_gnn.extensions.elastic.connections import Connections
from lightning_gnn.extensions.elastic.snapshots import Flags
from lightning_gnn.rows.mode import local_rows

_LOOK_S = 0.05
_FAILED = "out of memory"
"""Key in the store of a trial: a rank and its error."""


def prepare_finder(finder: Any, data: Any) -> None:
    """Let a ``BatchSizeFinder`` search on the ranks of a run, which Lightning rejects; called before its ``setup``.

    Args:
        finder: callback of Lightning.
        data: datamodule of the run.

    Raises:
        ValueError: the datamodule has no ``batch_size``.
    """
    for name in ("setup", "scale_batch_size"):  # of an earlier run
        vars(finder).pop(name, None)
    if data.batch_size is None:
        reason = "global_batch_size fixes the size" if data.has_samples else "without it, the whole graph is one batch"
        raise ValueError(
            f"BatchSizeFinder requires GraphDataModule(batch_size=...): {reason}. Set batch_size, or remove the callback."
        )
    if data.has_samples and hasattr(data.trainer.strategy, "mesh_shape"):
        finder.setup = lambda *_, **__: None
        finder.scale_batch_size = partial(_search, finder)


def _search(finder: Any, trainer: Any, module: Any) -> None:
    search = partial(type(finder).scale_batch_size, finder, trainer, module)
    if trainer.world_size == 1:
        search()
        return
    with local_rows(), JointTrials(trainer).replace_trials():
        search()


class JointTrials:
    """Trials of batch sizes on this rank, which succeed or fail together with the trials of all ranks.

    Args:
        trainer: Trainer of the fit, which has begun its stage.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._strategy, self._shard = trainer, trainer.strategy, trainer.datamodule.shard
        self._callbacks = trainer.callbacks  # list with the callbacks of the stage
        self._flags = Flags(trainer.lightning_module)
        self._trial, self._path = 0, ""

    @contextmanager
    def replace_trials(self) -> Iterator[None]:
        """Context manager in which Lightning's search uses these trials, and checkpoints of rank 0."""
        trainer, strategy, loop = self._trainer, self._strategy, self._trainer.fit_loop
        run, save, load, callbacks = loop.run, trainer.save_checkpoint, strategy.load_checkpoint, trainer.callbacks

        def save_on_rank_0(path: Any, *args: Any, **kwargs: Any) -> None:
            self._path = strategy.broadcast(path)  # Lightning draws a name on each rank
            save(self._path, *args, **kwargs)

        self._connect()
        replaced = (loop, "run", lambda: self._run(run)), (trainer, "save_checkpoint", save_on_rank_0)
        for owner, name, value in (*replaced, (strategy, "load_checkpoint", lambda _, **options: load(self._path, **options))):
            setattr(owner, name, value)
        try:
            yield
        finally:
            if self._path:
                strategy.remove_checkpoint(self._path)  # Lightning leaves it after an error
            self._end_watch()
            for owner, name in ((loop, "run"), (loop, "setup_data"), (trainer, "save_checkpoint"), (strategy, "load_checkpoint")):
                vars(owner).pop(name, None)
        if self._callbacks is not callbacks:
            self._begin_stage()

    def _run(self, run: Any) -> None:
        """Run the steps of a trial.

        Raises:
            RuntimeError: on all ranks: one ran out of memory; Lightning recognizes it.
        """
        trainer, flags = self._trainer, self._flags.state()
        try:
            run()
        except Exception as error:
            if _is_about_memory(error):
                self._store.compare_set(_FAILED, "", f"{error}" if is_oom_error(error) else f"CUDA out of memory: {error}")
            elif not self._store.check([_FAILED]):
                trainer.fit_loop.setup_data = partial(_raise, error)  # Lightning restores the loop, and would wait for others
                raise
            _drop_frames(error)
        message = self._agree()
        if message:
            self._strategy.world.watch.stop()
            self._strategy.world.watch.alarm = message  # the ranks do not wait for each other's messages
            self._connect()
            self._flags.load(flags)
            trainer.training = True  # the error may have interrupted a validation
            raise RuntimeError(message)

    def _agree(self) -> str:
        """Returns the error of a rank without memory once the trials of all ranks have ended; empty without one."""
        self._trial += 1
        ended, deadline = f"ended {self._trial}", time.monotonic() + self._strategy.timeout.total_seconds()
        self._store.add(ended, 1)
        while (count := self._store.add(ended, 0)) < self._strategy.world_size:
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"{self._strategy.world_size - count} ranks have not ended a trial of BatchSizeFinder before the deadline "
                    f"of {self._strategy.timeout.total_seconds():.0f} s (argument `timeout` of the strategy)."
                )
            time.sleep(_LOOK_S)
        return self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else ""

    def _connect(self) -> None:
        """Connect the ranks again, and begin the stage again."""
        strategy = self._strategy
        self._end_watch()
        self._end_stage()
        strategy.world.close()
        if strategy.world.is_connected:
            raise ValueError(
                "BatchSizeFinder on several ranks does not support a process group that you have made: it connects ranks again. "
                "Remove init_process_group()."
            )
        gc.collect()
        connections = Connections()
        strategy.setup_environment()
        self._begin_stage()
        connections.note()
        world = strategy.world
        world.barrier()  # so that no rank counts connections of the store that others make later
        self._store, self._end = next_store(world.rank, world.size, strategy.timeout), threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(connections,), name="batch sizes", daemon=True)
        self._thread.start()

    def _begin_stage(self) -> None:
        self._end_stage()
        self._callbacks = self._trainer.callbacks
        self._strategy.begin_stage(self._trainer, self._shard)

    def _end_stage(self) -> None:
        """End the stage, whose callbacks are in the list that the Trainer had when it began."""
        now, self._trainer.callbacks = self._trainer.callbacks, self._callbacks
        self._strategy.steps.end()
        self._trainer.callbacks = now

    _thread: threading.Thread | None = None

    def _end_watch(self) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()

    def _watch(self, connections: Connections) -> None:
        """End the waits of this rank when a rank has run out of memory."""
        with suppress(RuntimeError):  # the store has ended, and with it rank 0
            while not self._end.wait(_LOOK_S):
                if self._store.check([_FAILED]):
                    current_progress().loss = self._strategy.global_rank, "ends a trial of BatchSizeFinder"
                    connections.end()
                    return


def _is_about_memory(error: Exception) -> bool:
    return is_oom_error(error) or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _drop_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and of errors before it, whose tensors take memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _raise(error: Exception) -> None:
    raise error
