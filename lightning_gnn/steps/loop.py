"""Lightning's loop around steps: what hooks are given, and where a rank is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_gnn.comm.call import Step
from lightning_gnn.comm.group import CommunicationError, World
from lightning_gnn.comm.processes import here
from lightning_gnn.private_lightning import END_QUESTION, EXAMPLE

SKIPPED = object()
"""What a strategy returns in place of None, which Lightning refuses of several ranks."""


class _Result(ClosureResult):
    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        return super().from_training_step_output(None if training_step_output is SKIPPED else training_step_output, normalize)


@contextmanager
def loss_in_outputs(trainer: pl.Trainer, loss: Callable[[], Tensor | None]) -> Iterator[None]:
    """While open, ``on_train_batch_end`` gets the loss of all ranks in ``outputs["loss"]``, where Lightning puts this rank's own.

    Callbacks and hooks decide by it. It is Lightning's loop that puts it there, and no callback, since the learning-rate finder
    puts its own in place of all others. In manual optimisation, `outputs` is what the step returned, of this rank. `loss` returns
    None where it is not known. A step that is `SKIPPED` has no backward, as on one device.
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
    """While open, the question that Lightning asks in each step, whether rank 0 was asked to end, is an operation like others.

    Lightning takes a time-out for a no, and goes on to wait for the same rank once more.
    """
    loop, name = trainer.fit_loop.epoch_loop, END_QUESTION

    def ask() -> None:
        if world.told_by_rank_0(trainer.received_sigterm, "Lightning's question whether to end"):
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
    """While open, a module that is bound to its part of the graph has no ``example_input_array``, which is a graph of its own:
    summaries leave sizes out."""
    given = getattr(module, EXAMPLE)
    setattr(module, EXAMPLE, None)
    try:
        yield
    finally:
        setattr(module, EXAMPLE, given)


def hooks_move_batches(module: pl.LightningModule, data: pl.LightningDataModule) -> bool:
    """Returns whether a hook of the user's module or datamodule sees batches before they are on the device, or moves them there:
    then they are left to Lightning."""
    users = ((module, pl.LightningModule), (data, pl.LightningDataModule))
    hooks = "on_before_batch_transfer", "transfer_batch_to_device"
    return any(is_overridden(hook, owner, base) for owner, base in users for hook in hooks)


class Progress(pl.Callback):
    """Notes where this rank is, for those that ask once it has ended or hangs. Each stage has its own, which counts steps anew:
    workers that trained independently may have made different numbers of them."""

    def __init__(self) -> None:
        self._steps: Counter[str] = Counter()

    def begin_step(self, stage: str, trainer: pl.Trainer, world: World) -> Step:
        """Notes that a step of a stage begins, in messages of the watchdog, too; returns which."""
        phase: Any = {"training": "train", "prediction": "predict"}.get(stage, stage)
        step = Step(phase, trainer.current_epoch, self._steps[stage])
        self._steps[stage] += 1
        world.watch.place = f"{stage} step {self._steps[stage]}"
        self.at("forward" if stage == "training" else stage, trainer)
        return step

    def at(self, phase: str, trainer: pl.Trainer) -> None:
        phase = "the sanity check" if trainer.sanity_checking else phase
        here().at(phase, trainer.current_epoch if trainer.state.fn == TrainerFn.FITTING else None)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at("the epoch's start", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at("the epoch's end", trainer)
