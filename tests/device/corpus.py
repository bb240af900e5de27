"""Training steps of the corpus of programs (``tests/rows/programs.py``) under captured steps: which of them are captured.

A program counts if the emulated device can capture it: a step with its loss, run by hand under the device's capture mode.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import emulated
import lightning as L
import torch
from common import quiet_trainer
from rows import programs
from torch import Tensor

from lightning_gnn import DGCLStrategy, GraphDataModule
from lightning_gnn.comm.call import Step
from lightning_gnn.extensions.graphs.steps import StepGraphs
from lightning_gnn.rows import local_rows

EPOCHS = 6
MAKERS = {name: each.function for name, each in vars(programs.Made).items() if isinstance(each, programs._kept)}


class Made:
    """``programs.Made`` without ``__dict__``, by which code could read everything."""

    def __init__(self, net: Any, g: Any) -> None:
        self.net, self._g, self._values = net, g, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        if name not in MAKERS:
            raise AttributeError(name)
        if name not in self._values:
            self._values[name] = MAKERS[name](self)
        return self._values[name]


def expressions() -> dict[str, Any]:
    return {f"{group}: {name}": each for group, forms in programs.FORMS.items() for name, each in forms.items()}


def names(rank: int = 0, size: int = 1) -> list[str]:
    """Returns the programs that return a loss on one device."""
    found = []
    for name, run in expressions().items():
        try:
            value = run(Made(programs.make_net(), g := programs.make_graph()), g)
        except Exception:  # programs that must raise
            continue
        if isinstance(value, Tensor) and value.requires_grad and value.dim() == 0:
            found.append(name)
    return found


class Program(L.LightningModule):
    """A program as a training step."""

    def __init__(self, program: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.net, self.program = programs.make_net(), program

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.program(Made(self.net, batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Seen(L.Callback):
    """Captures a step by hand at its end, as the device would, and keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.graphs: StepGraphs | None = None
        self.is_capturable = True

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().cpu())
        self.graphs = trainer.strategy.steps.graphs


class ByHand(Seen):
    """Tries to capture the step of the third epoch by hand, forward and backward, after it has run twice."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch != 2:
            return
        try:
            for around in (nullcontext(), nullcontext(), emulated.graph(emulated.CUDAGraph())):
                with around:
                    self._run(trainer.strategy.steps, module, batch)
        except Exception:
            self.is_capturable = False
        module.zero_grad()
        gc.collect()

    def _run(self, steps: Any, module: Any, batch: Any) -> None:
        steps.binding.context.begin_step(Step("train", 2, 2))
        with steps.values.step(batch, "train_mask"):
            loss = module.training_step(batch, 0)
        with local_rows():
            steps.differentiate(lambda x: x.backward(), loss, loss)


def fitted(program: Any, cuda_graph: Any, seen: Seen) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(3)
    module = Program(program)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "limit_val_batches": 0, "num_sanity_val_steps": 0, "callbacks": [seen]}
    trainer = quiet_trainer(DGCLStrategy(cuda_graph=cuda_graph), 1, False, **options)
    trainer.fit(module, datamodule=GraphDataModule(programs.make_graph()))
    return seen.losses, [each.detach().clone() for each in module.parameters()]


def is_equal(some: Any, others: Any, rtol: float = 0.0) -> bool:
    pairs = [(a, b) for one, other in zip(some, others) for a, b in zip(one, other)]
    return all(torch.allclose(a, b, rtol=rtol, atol=rtol, equal_nan=True) for a, b in pairs)


def examine(rank: int, size: int, chosen: list[str]) -> dict[str, tuple[bool, int, str, str]]:
    """Returns for each program whether a step can be captured by hand, replays, the obstacle, and differences."""
    found: dict[str, tuple[bool, int, str, str]] = {}
    every = expressions()
    for name in chosen:
        try:
            plain, seen = ByHand(), Seen()
            fitted(every[name], False, plain)
            if not plain.is_capturable:
                found[name] = False, 0, "", ""
                continue
            expected, captured = fitted(every[name], False, Seen()), fitted(every[name], "auto", seen)
        except Exception as error:
            while isinstance(error, RuntimeError) and "swap" in str(error) and error.__context__ is not None:
                error = error.__context__  # type: ignore[assignment]
            found[name] = False, 0, f"{type(error).__name__}: {error}"[:200], ""
            continue
        same = is_equal(captured, expected) or (
            # What CUDA adds atomically is rounded differently each time.
            not is_equal(fitted(every[name], False, Seen()), expected) and is_equal(captured, expected, 1e-9)
        )
        assert seen.graphs is not None
        found[name] = True, seen.graphs.replays, seen.graphs.obstacle, "" if same else "differs"
    return found
