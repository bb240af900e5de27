"""State of a fit in memory: Lightning's whole checkpoint at the begin of the last two epochs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_gnn.comm.group import World
from lightning_gnn.devices import random_states, set_random_states
from lightning_gnn.private_lightning import METRICS_SO_FAR, RESTARTING, dump_checkpoint
from lightning_gnn.private_torch import copy_all
from lightning_gnn.steps.metrics import metrics_in, set_states, states_across_epochs

_IMMUTABLE = {type(None), bool, int, float, str, bytes, type, torch.Size, torch.dtype, torch.device}


class Copies:
    """Copies of nested states; tensors are copied into the memory of the last copy."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def copy(self, value: Any) -> Any:
        """Returns a copy, which the next call overwrites."""
        sources, targets = list[Tensor](), list[Tensor]()
        copied = self._copy(value, sources, targets)
        if targets:
            copy_all(targets, sources)
        self._memory = targets
        return copied

    def _copy(self, value: Any, sources: list[Tensor], targets: list[Tensor]) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if isinstance(value, Tensor):
            source, number = value.detach(), len(targets)
            old = self._memory[number] if number < len(self._memory) else None
            if old is None or (old.shape, old.dtype, old.device) != (source.shape, source.dtype, source.device):
                old = torch.empty_like(source)
            targets.append(old)
            sources.append(source)
            return old
        if kind is dict:
            return {key: self._copy(each, sources, targets) for key, each in value.items()}
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps versions of modules, which state dicts have as an attribute
            for key, each in value.items():
                copied[key] = self._copy(each, sources, targets)
            return copied
        if kind is list or kind is tuple:
            return kind(self._copy(each, sources, targets) for each in value)
        return copy.deepcopy(value)


class Flags:
    """Whether each module trains, and whether each parameter needs a gradient: an interrupted validation changes it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules, self._parameters = list(module.modules()), list(module.parameters())

    def state(self) -> list[list[bool]]:
        """Returns the flags."""
        return [[each.training for each in self._modules], [each.requires_grad for each in self._parameters]]

    def load(self, flags: Sequence[Sequence[bool]]) -> None:
        """Set the result of :meth:`state`."""
        for module, training in zip(self._modules, flags[0]):
            module.training = training
        for parameter, requires_grad in zip(self._parameters, flags[1]):
            parameter.requires_grad = requires_grad


class Snapshots(pl.Callback):
    """Callback that keeps the state of a fit at the begin of the last two epochs.

    Rank 0 may be lost after other ranks have begun an epoch, and before it has written the logs of the last one. The last one is
    then repeated.

    Args:
        state: state that another process has kept; empty without one.
        save: function that receives each state; None for none.
        begin: function called with each epoch before its state is copied.
    """

    def __init__(
        self,
        state: dict[str, Any] | None = None,
        save: Callable[[dict[str, Any]], object] | None = None,
        begin: Callable[[int], object] | None = None,
    ) -> None:
        self._states: list[dict[str, Any]] = [state] if state else []
        self._copies, self._save, self._begin = [Copies(), Copies()], save, begin
        self._metrics, self._flags = list[Metric](), Flags(torch.nn.Module())
        self._restored: dict[str, Any] | None = None

    @property
    def epochs(self) -> list[int]:
        """Epochs whose states are kept, in order."""
        return [state["epoch"] for state in self._states]

    @property
    def epoch(self) -> int:
        """Newest epoch whose state is kept; -1 without one."""
        return self.epochs[-1] if self._states else -1

    @property
    def newest(self) -> dict[str, Any]:
        """State of the newest epoch."""
        return self._states[-1]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._metrics = [each for each in metrics_in([pl_module, *callbacks]) if isinstance(each, Metric)]
        self._flags = Flags(pl_module)
        restored, self._restored = self._restored, None
        if restored is not None:
            setattr(trainer.fit_loop, RESTARTING, False)  # with max_steps alone, Lightning would skip the epoch
            trainer.fit_loop.epoch_loop.restarting = False
            self._flags.load(restored["flags"])
            set_states(self._metrics, restored["metrics"])
            for names, values in zip(METRICS_SO_FAR, restored["logged"]):
                names(trainer).update(values)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch
        if self._begin is not None:
            self._begin(epoch)
        state = dump_checkpoint(trainer)
        for counts in state["loops"]["fit_loop"]["epoch_progress"].values():
            counts["ready"] = counts["started"]  # like a checkpoint after the last epoch: Lightning has counted this one
        loops, copies = state.pop("loops"), self._copies.pop(0)  # the state of loops is a copy
        streams = random.getstate(), np.random.get_state(), random_states(trainer.strategy.root_device)  # noqa: NPY002
        found = {
            "checkpoint": state,
            "flags": self._flags.state(),
            "metrics": states_across_epochs(self._metrics),
            "logged": [names(trainer) for names in METRICS_SO_FAR],
        }
        self._states = [each for each in self._states[-1:] if each["epoch"] < epoch]
        kept = copies.copy(found)
        kept["checkpoint"]["loops"] = loops
        self._states.append({"epoch": epoch, "streams": streams, **kept})
        self._copies.append(copies)
        if self._save is not None:
            self._save(self._states[-1])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._save is not None:  # a process that starts again does not repeat a fit
            self.on_train_epoch_start(trainer, pl_module)

    def state(self, world: World, source: int, epoch: int) -> dict[str, Any]:
        """Returns the checkpoint of rank `source` on all ranks, and sets the random streams; collective."""
        own = next((state for state in self._states if state["epoch"] == epoch), {})
        found = world.broadcast_object(own if world.rank == source else {}, source)
        python, numpy, streams = found["streams"]
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        set_random_states(world.device, streams)
        self._restored = copied = Copies().copy({name: found[name] for name in ("checkpoint", "flags", "metrics", "logged")})
        checkpoint: dict[str, Any] = copied["checkpoint"]
        return checkpoint

    def checkpoint(self, epoch: int) -> dict[str, Any]:
        """Returns the checkpoint of an epoch, or of the newest one if there is none."""
        found: dict[str, Any] = next((each for each in self._states if each["epoch"] == epoch), self._states[-1])["checkpoint"]
        return found
