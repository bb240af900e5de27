"""What each rank does when: a trace that opens in Perfetto, with communication on a track of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from lightning_gnn.callbacks.communication import metrics_of
from lightning_gnn.comm.traffic import Span

COMPUTE, COMMUNICATION = 0, 1
"""Tracks of a rank."""


class CommunicationTrace(pl.Callback):
    """Writes a Chrome trace of some epochs: open it at https://ui.perfetto.dev. A process per rank, two tracks each.

    On ``compute`` are the stages of a step, forward, backward and the optimizer's, and in it the forward calls of convs. On
    ``communication`` are, by layer and direction, packing and starting messages (send), waiting for them and taking them in
    (wait), and the sum of gradients. Time between send and wait is hidden behind computation. CUDA ranks show when the host
    started what, not when the device did it.

    Args:
        path: of the file; by default ``trace.json`` in the logger's folder.
        first_epoch: the first that is traced; epoch 0 makes much that later ones keep.
        epochs: how many.

    Raises:
        ValueError: numbers below 0 or 1; from ``fit``, a strategy whose ranks exchange no rows.
    """

    def __init__(self, path: str | Path | None = None, first_epoch: int = 1, epochs: int = 2) -> None:
        if first_epoch < 0 or epochs < 1:
            raise ValueError(f"first_epoch is at least 0 and epochs at least 1 (got {first_epoch} and {epochs}).")
        self.path, self.first_epoch, self.epochs = path, first_epoch, epochs
        self._spans: list[tuple[int, Span]] = []
        self._stage: tuple[str, float] | None = None
        self._hooks: list[Any] = []
        self._convs: dict[torch.nn.Module, str] = {}
        self._calls: dict[str, float] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics_of(trainer, self)
        self._spans = []

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not 0 <= trainer.current_epoch - self.first_epoch < self.epochs:
            return
        trainer.strategy.meter.spans = []  # type: ignore[attr-defined]
        self._convs = {each: name for name, each in pl_module.named_modules() if isinstance(each, MessagePassing)}
        # Hooks of all modules: a pickle of a module has the module's own.
        self._hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        if module in self._convs:
            self._calls[self._convs[module]] = time.perf_counter()

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        if module in self._convs:
            name = self._convs[module]
            self._spans.append((COMPUTE, Span("", name, "forward", self._calls.pop(name), time.perf_counter())))

    def _next(self, trainer: pl.Trainer, stage: str | None) -> None:
        """Ends the stage of a step, and begins another, or none."""
        if trainer.strategy.meter.spans is None:  # type: ignore[attr-defined]
            return
        now = time.perf_counter()
        if self._stage is not None:
            name, began = self._stage
            track = COMMUNICATION if name == "sum of gradients" else COMPUTE
            self._spans.append((track, Span(name, "", "", began, now)))
        self._stage = None if stage is None else (stage, now)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._next(trainer, "forward")

    @override
    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._next(trainer, "backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._next(trainer, "sum of gradients")

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self._next(trainer, "optimizer")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._next(trainer, None)

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._next(trainer, "validation")

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._next(trainer, None)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        meter = getattr(trainer.strategy, "meter", None)
        if meter is None or meter.spans is None:
            return
        self._spans += [(COMMUNICATION, span) for span in meter.spans]
        meter.spans = self._stage = None
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._convs = [], {}

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_epoch_end(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # all ranks take part
        path = Path(folder) / "trace.json" if self.path is None else Path(self.path)
        world = trainer.strategy.world  # type: ignore[attr-defined]
        # Ranks of different machines agree on the time of day only, whose seconds are too many for fractions of a microsecond.
        ahead = time.time() - time.perf_counter()
        ahead -= world.broadcast_object(ahead)
        own = [
            (track, replace(span, began=span.began + ahead, ended=span.ended + ahead)) for track, span in self._spans
        ]
        self._spans = []
        by_rank = world.all_gather_object(own)
        if trainer.is_global_zero and any(by_rank):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(chrome_trace(by_rank)))
            rank_zero_info(f"Trace of {self.epochs} epochs: {path}, for https://ui.perfetto.dev")


def chrome_trace(by_rank: Sequence[Sequence[tuple[int, Span]]]) -> dict[str, Any]:
    """Returns the spans of each rank in the Trace Event Format: microseconds, a process per rank, a thread per track."""
    zero = min((span.began for spans in by_rank for _, span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(by_rank):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for track, name in ((COMPUTE, "compute"), (COMMUNICATION, "communication")):
            events.append({"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}})
        for track, span in spans:
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": track,
                    "name": " ".join(filter(None, (span.what, span.layer, span.direction))),
                    "cat": span.what or "layer",
                    "ts": (span.began - zero) * 1e6,
                    "dur": (span.ended - span.began) * 1e6,
                    "args": {"layer": span.layer, "direction": span.direction},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
