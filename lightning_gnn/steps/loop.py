"""Lightning's training loop around steps: inputs of hooks, and the position of a rank."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_gnn.comm.call import Step
from lightning_gnn.comm.group import CommunicationError, World
from lightning_gnn.comm.processes import current_progress
from lightning_gnn.lightning_packages import is_overridden
from lightning_gnn.private_lightning import EXAMPLE, SIGTERM_CHECK

SKIPPED = object()
"""Return value in place of None, which Lightning rejects with several ranks."""


class _Result(ClosureResult):
    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        return super().from_training_step_output(None if training_step_output is SKIPPED else training_step_output, normalize)


@contextmanager
def loss_in_outputs(trainer: pl.Trainer, loss: Callable[[], Tensor | None]) -> Iterator[None]:
    """Context manager that passes the loss of all ranks to ``on_train_batch_end`` in ``outputs["loss"]``.

    Lightning passes the loss of this rank, and callbacks and hooks make decisions with it. Lightning's loop is patched, since the
    learning-rate finder replaces all callbacks by its own. In manual optimization, `outputs` is the local output of the step. A
    step that is `SKIPPED` has no backward pass, as on one device.

    Args:
        trainer: Trainer of the run.
        loss: function that returns the loss of all ranks, or None if it is unavailable.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    run = loop.run

    def with_loss_of_all(*args: Any, **kwargs: Any) -> dict[str, Any]:
        outputs, found = run(*args, **kwargs), loss()
        if found is not None and isinstance(outputs.get("loss"), Tensor):
            outputs["loss"] = found.to(outputs["loss"])
        return outputs

    loop.run, loop.output_result_cls = with_loss_of_all, _Result  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in ("run", "output_result_cls"):
            loop.__dict__.pop(name, None)


class RanksChange(Exception):
    """Raised on all ranks before a step, when other ranks join."""


class SignalCheck(pl.Callback):
    """Lightning's check for SIGTERM in each step as a regular operation, in which ranks also agree on SLURM's signal.

    Lightning interprets a timeout of the check as a negative answer, and waits for the same rank again. SLURM's signal announces
    the end of a job. Lightning saves a checkpoint where the signal arrives; ranks at different places would wait for each other.
    Here all ranks call Lightning's handler before the same step, after the signal has reached rank 0.

    Args:
        world: all ranks.
        must_change: function that returns, on rank 0, whether the ranks must leave this stage.
    """

    def __init__(self, world: World, must_change: Callable[[], bool]) -> None:
        self._world, self._signals, self._must_change = world, list[int](), must_change
        self._requeue: Any = None

    @contextmanager
    def replace_check(self, trainer: pl.Trainer) -> Iterator[None]:
        """Context manager in which this check replaces the check of Lightning's loop."""
        loop, name = trainer.fit_loop.epoch_loop, SIGTERM_CHECK
        if self._world.size > 1 and hasattr(loop, name):  # since Lightning 2.6
            vars(loop)[name] = lambda: self._check(trainer)
        try:
            yield
        finally:
            vars(loop).pop(name, None)

    def _check(self, trainer: pl.Trainer) -> None:
        state = trainer.received_sigterm + 2 * bool(self._signals) + 4 * self._must_change()
        state = self._world.broadcast_number(state, "Lightning's check for SIGTERM")
        if state & 1:
            with suppress(CommunicationError):
                self._world.barrier("End")
            raise SIGTERMException
        if state & 4:
            raise RanksChange
        if state & 2 and self._requeue:
            self._signals.clear()
            self._requeue(0, None)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        environment: Any = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        is_new = not self._requeue and SIGTERM_CHECK in vars(trainer.fit_loop.epoch_loop)
        if is_new and getattr(environment, "auto_requeue", False) and current_thread() is main_thread():
            handler = signal.getsignal(environment.requeue_signal)  # Lightning restores it at the end of the run
            if callable(handler):
                self._requeue = handler
                signal.signal(environment.requeue_signal, lambda number, _: self._signals.append(number))

    on_train_start = on_sanity_check_start  # the first hooks after Lightning has set its handler

    def on_train_batch_start(self, *_: Any) -> None:
        if self._world.size == 1 and self._must_change():  # Lightning has no check there
            raise RanksChange


@contextmanager
def without_example(module: pl.LightningModule) -> Iterator[None]:
    """Context manager that hides ``example_input_array`` of a bound module; summaries then omit sizes.

    The example is not the graph that the module is bound to.
    """
    given = getattr(module, EXAMPLE)
    setattr(module, EXAMPLE, None)
    try:
        yield
    finally:
        setattr(module, EXAMPLE, given)


def hooks_move_batches(module: pl.LightningModule, data: pl.LightningDataModule) -> bool:
    """Returns whether a hook of the user handles the transfer of batches to the device; Lightning then moves them.

    Hooks of the module and of the datamodule count.
    """
    hooks = "on_before_batch_transfer", "transfer_batch_to_device"
    return any(is_overridden(hook, owner) for owner in (module, data) for hook in hooks)


class Progress(pl.Callback):
    """Callback that records the position of this rank, for reports when it ends or hangs.

    Each stage has its own callback, with step counts from 0: independent workers may have made different numbers of steps.
    """

    def __init__(self) -> None:
        self._steps: Counter[str] = Counter()

    def begin_step(self, stage: str, trainer: pl.Trainer, world: World) -> Step:
        """Record the begin of a step of a stage, also for messages of the watchdog; returns the step."""
        phase: Any = {"training": "train", "prediction": "predict"}.get(stage, stage)
        step = Step(phase, trainer.current_epoch, self._steps[stage])
        self._steps[stage] += 1
        world.watch.place = f"{stage} step {self._steps[stage]}"
        self.at("forward" if stage == "training" else stage, trainer)
        return step

    def at(self, phase: str, trainer: pl.Trainer) -> None:
        phase = "the sanity check" if trainer.sanity_checking else phase
        current_progress().at(phase, trainer.current_epoch if trainer.state.fn == TrainerFn.FITTING else None)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at("the epoch's start", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at("the epoch's end", trainer)
