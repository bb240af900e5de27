"""The loss that hooks are given after a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor


@contextmanager
def loss_in_outputs(trainer: pl.Trainer, loss: Callable[[], Tensor | None]) -> Iterator[None]:
    """While open, ``on_train_batch_end`` gets the loss of all ranks in ``outputs["loss"]``, where Lightning puts this rank's own.

    Callbacks and hooks decide by it. It is Lightning's loop that puts it there, and no callback, since the learning-rate finder
    puts its own in place of all others. In manual optimisation, `outputs` is what the step returned, of this rank.

    Args:
        trainer: whose loop it is.
        loss: returns the loss of all ranks in the step that has ended; None where it is not known.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    run = loop.run

    def with_loss_of_all(*args: Any, **kwargs: Any) -> dict[str, Any]:
        outputs, found = run(*args, **kwargs), loss()
        if found is not None and isinstance(outputs.get("loss"), Tensor):
            outputs["loss"] = found.to(outputs["loss"])
        return outputs

    loop.run = with_loss_of_all  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.__dict__.pop("run", None)
