"""Lightning's training loop around steps: inputs of hooks, and the position of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from lightning_gnn.private_lightning import END_QUESTION, EXAMPLE

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


@contextmanager
def asking_whether_to_end(trainer: pl.Trainer, world: World) -> Iterator[None]:
    """Context manager that turns Lightning's check for SIGTERM in each step into a regular operation.

    Lightning interprets a timeout as a negative answer, and waits for the same rank again.
    """
    loop, name = trainer.fit_loop.epoch_loop, END_QUESTION

    def ask() -> None:
        if world.broadcast_flag(trainer.received_sigterm, "Lightning's question whether to end"):
            with suppress(CommunicationError):
                world.barrier("End")
            raise SIGTERMException

    if world.size > 1 and hasattr(loop, name):  # since Lightning 2.6
        vars(loop)[name] = ask
    try:
        yield
    finally:
        vars(loop).pop(name, None)


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
