"""State of a fit in memory: Lightning's whole checkpoint at the start of the last two epochs."""

from __future__ import annotations

import ctypes
import io
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_gnn.comm.group import World
from lightning_gnn.devices import random_states, set_random_states
from lightning_gnn.private_lightning import METRICS_SO_FAR, RESTARTING, Checkpoints
from lightning_gnn.private_torch import copy_all
from lightning_gnn.steps.metrics import metrics_in, set_states, states_across_epochs


class _Pickler(pickle.Pickler):
    """Pickler that appends tensors to a list, and pickles their positions."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    @override
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        self._tensors.append(value.detach())
        return _tensor, (len(self._tensors) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def find_class(self, module: str, name: str) -> Any:
        return self._tensors.__getitem__ if (module, name) == (__name__, _tensor.__name__) else super().find_class(module, name)


def _tensor(position: int) -> Tensor:
    """Stand-in, in pickled states, for the tensor at a position."""
    raise NotImplementedError


class Copy:
    """Copy of nested states: tensors, and everything else pickled.

    Args:
        states: dicts, lists, tensors and other objects that can be pickled.
        memory: earlier copy, whose tensors this copy overwrites where their shapes agree.

    Raises:
        ValueError: an object cannot be pickled.
    """

    def __init__(self, states: Any, memory: Copy | None = None) -> None:
        sources, file = list[Tensor](), io.BytesIO()
        try:
            _Pickler(file, sources).dump(states)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                "elastic=True copies the state of a fit at the start of each epoch, and a part of it cannot be pickled, see the "
                "error above. Look at hyper-parameters, on_save_checkpoint, and state_dict of callbacks, or set elastic=False."
            ) from error
        old: list[Tensor] = [] if memory is None else memory._tensors
        self._pickled = file.getvalue()
        self._tensors: list[Tensor] = [_like(*each) for each in zip_longest(sources, old[: len(sources)])]
        if sources:
            copy_all(self._tensors, sources)

    def load(self) -> Any:
        """Returns the states, with tensors of their own."""
        return _Unpickler(io.BytesIO(self._pickled), [each.clone() for each in self._tensors]).load()


def _like(source: Tensor, old: Tensor | None) -> Tensor:
    """Returns `old`, or memory of its own if it differs from `source` in shape, dtype or device."""
    if old is None or (old.shape, old.dtype, old.device) != (source.shape, source.dtype, source.device):
        return torch.empty_like(source)
    return old


class _NumpyStream:
    """Random stream of numpy, whose state is read only if it has changed: that takes as long as all other streams."""

    def __init__(self) -> None:
        self._memory = b""
        self._state: Any = np.random.get_state()  # noqa: NPY002

    def state(self) -> Any:
        """Returns the result of ``numpy.random.get_state()``."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        memory = ctypes.string_at(bits.ctypes.state_address, 2500) if isinstance(bits, np.random.MT19937) else b""
        # A normal draw that is kept for the next call is not in this memory, and makes the last field of the state not zero.
        if not memory or memory != self._memory or self._state[3]:
            self._memory, self._state = memory, np.random.get_state()  # noqa: NPY002
        return self._state


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


@dataclass(frozen=True)
class _State:
    """State of a fit at the start of an epoch.

    Attributes:
        epoch: the epoch.
        streams: states of random streams, which are not changed in place.
        copy: checkpoint, flags, and metrics.
        loops: function that returns the entry "loops" of the checkpoint; None if it is complete.
    """

    epoch: int
    streams: Any
    copy: Copy
    loops: Callable[[], dict[str, Any]] | None = None

    def load(self) -> dict[str, Any]:
        """Returns the state as a dict."""
        found: dict[str, Any] = self.copy.load()
        if self.loops is not None:
            loops = found["checkpoint"]["loops"] = self.loops()
            for counts in loops["fit_loop"]["epoch_progress"].values():
                counts["ready"] = counts["started"]  # like a checkpoint after the last epoch: Lightning has counted this one
        return {"epoch": self.epoch, "streams": self.streams, **found}


class Snapshots(pl.Callback):
    """Callback that keeps the state of a fit at the start of the last two epochs.

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
        self._states = list[_State]()
        if state:
            of_copy = {name: value for name, value in state.items() if name not in ("epoch", "streams")}
            self._states.append(_State(state["epoch"], state["streams"], Copy(of_copy)))
        self._save, self._begin, self._numpy = save, begin, _NumpyStream()
        self._metrics, self._flags = list[Metric](), Flags(torch.nn.Module())
        self._restored: dict[str, Any] | None = None

    @property
    def epochs(self) -> list[int]:
        """Epochs whose states are kept, in order."""
        return [kept.epoch for kept in self._states]

    @property
    def epoch(self) -> int:
        """Newest epoch whose state is kept; -1 without one."""
        return self.epochs[-1] if self._states else -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._metrics = [each for each in metrics_in([pl_module, *callbacks]) if isinstance(each, Metric)]
        self._flags, self._checkpoints = Flags(pl_module), Checkpoints(trainer)
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
        checkpoint = self._checkpoints.dump()
        loops = partial(self._checkpoints.complete, checkpoint.pop("loops"))
        states = {
            "checkpoint": checkpoint,
            "flags": self._flags.state(),
            "metrics": states_across_epochs(self._metrics),
            "logged": [names(trainer) for names in METRICS_SO_FAR],
        }
        streams = random.getstate(), self._numpy.state(), random_states(trainer.strategy.root_device)
        dropped, self._states = self._states[:-1], [kept for kept in self._states[-1:] if kept.epoch < epoch]
        self._states.append(_State(epoch, streams, Copy(states, dropped[0].copy if dropped else None), loops))
        if self._save is not None:
            self._save(self._states[-1].load())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._save is not None:  # a process that starts again does not repeat a fit
            self.on_train_epoch_start(trainer, pl_module)

    def state(self, world: World, source: int, epoch: int) -> dict[str, Any]:
        """Returns the checkpoint of rank `source` on all ranks, and sets the random streams; collective."""
        found = world.broadcast_object(self.at(epoch) if world.rank == source else {}, source)
        python, numpy, streams = found["streams"]
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        set_random_states(world.device, streams)
        self._restored = found
        checkpoint: dict[str, Any] = found["checkpoint"]
        return checkpoint

    def at(self, epoch: int) -> dict[str, Any]:
        """Returns the state at the start of an epoch, or of the newest one if there is none."""
        return next((kept for kept in self._states if kept.epoch == epoch), self._states[-1]).load()
