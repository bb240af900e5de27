"""Stand-ins for what a step may touch when it runs without a Trainer: in the self-check and in rehearsals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_gnn.comm.group import no_process_group
from lightning_gnn.comm.in_process import kept_random_state
from lightning_gnn.nn.embedding import untrained_embeddings


@contextmanager
def aside() -> Iterator[None]:
    """Steps inside leave no trace: no rank is asked, random streams and embeddings stay as they are, warnings are not heard."""
    with ExitStack() as stack:
        stack.enter_context(no_process_group())
        stack.enter_context(kept_random_state())
        stack.enter_context(untrained_embeddings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


@contextmanager
def kept_state(module: torch.nn.Module) -> Iterator[None]:
    """Gives a module and those inside it their attributes, buffers and states of metrics back; parameters are not looked at."""
    tensors: list[tuple[Tensor, Tensor]] = []
    held: list[tuple[torch.nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
    for each in module.modules():
        attributes = dict(vars(each))
        found = [*attributes.values(), *each._buffers.values()]
        tensors += [(value, value.detach().clone()) for value in found if isinstance(value, Tensor)]
        holders = [(value, copy.copy(value)) for value in attributes.values() if isinstance(value, (list, dict, set))]
        held.append((each, attributes, holders))
    try:
        yield
    finally:
        for each, attributes, holders in held:
            vars(each).clear()
            vars(each).update(attributes)
            for holder, before in holders:
                holder.clear()
                (holder.extend if isinstance(holder, list) else holder.update)(before)
        with torch.no_grad():
            for value, values in tensors:
                if not torch.equal(value, values):
                    value.copy_(values)


def uncompiled() -> AbstractContextManager[Any]:
    """Returns what leaves compiled models eager while it is open: compiling would take longer than a few steps."""
    return (
        torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
    )  # torch 2.6


def ignore(*_: Any, **__: Any) -> None:
    """Does nothing."""


class QuietTrainer:
    """The Trainer as a step may read it, without its loggers; with another datamodule, if one is given.

    Attributes:
        epoch: that the step finds itself in; None for the Trainer's own.
        reads_epoch: whether a step has asked for its epoch, or how many steps there were.
    """

    logger, loggers = DummyLogger(), [DummyLogger()]
    epoch: int | None = None
    reads_epoch = False

    def __init__(self, trainer: pl.Trainer, datamodule: pl.LightningDataModule | None = None) -> None:
        self._trainer = trainer
        if datamodule is not None:
            self.datamodule = datamodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    @property
    def current_epoch(self) -> int:
        """The number of epochs before this one."""
        self.reads_epoch = True
        return self._trainer.current_epoch if self.epoch is None else self.epoch

    @property
    def global_step(self) -> int:
        """The number of steps before this one; an epoch is one."""
        self.reads_epoch = True
        return self._trainer.global_step if self.epoch is None else self.epoch

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Saves nothing."""


class _IdleOptimizer:
    """Takes every call of manual optimisation, and leaves parameters and their gradients alone."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.zero_grad = ignore

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> None:
        if closure is not None:
            closure()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def without_optimizers(model: pl.LightningModule, scale: float) -> None:
    """Lets a step with manual optimisation add to gradients only."""
    configured = model.configure_optimizers()
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], Sequence):
        configured = configured[0]  # the second are schedulers
    given = list(configured) if isinstance(configured, Sequence) else [configured]
    idle = [_IdleOptimizer(one["optimizer"] if isinstance(one, Mapping) else one) for one in given]

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * scale).backward(*args, **kwargs)

    replaced: dict[str, Callable[..., Any]] = {
        "optimizers": lambda *_, **__: idle[0] if len(idle) == 1 else idle,
        "lr_schedulers": lambda: None,
        "manual_backward": manual_backward,
        **dict.fromkeys(("toggle_optimizer", "untoggle_optimizer", "clip_gradients"), ignore),
    }
    for name, method in replaced.items():
        object.__setattr__(model, name, method)


M = TypeVar("M", bound=torch.nn.Module)


def copied(module: M, shared: Iterable[Tensor] = ()) -> M:
    """Returns a copy of a module that has the `shared` tensors themselves, whatever its last step has left on it.

    What pruning, weight norm and convs that keep their scores leave are tensors in the middle of a graph of autograd, which
    ``copy.deepcopy`` refuses: the copy has their values.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    for part in module.modules():
        for left in torch.utils._pytree.tree_leaves(part.__dict__):
            if isinstance(left, Tensor) and not left.is_leaf:
                memo[id(left)] = left.detach().clone()
    return copy.deepcopy(module, memo)


def quiet(model: pl.LightningModule, trainer: QuietTrainer | None) -> pl.LightningModule:
    """Returns the module, whose logs nobody hears from now on, with that trainer."""
    model._trainer = trainer  # type: ignore[assignment]
    for name in ("log", "log_dict", "print"):
        object.__setattr__(model, name, ignore)
    return model


def run_step(model: pl.LightningModule, name: str, batch: Any) -> Any:
    """Returns what a step of that name returns, after the module's own hooks on batches."""
    batch = model.on_after_batch_transfer(model.on_before_batch_transfer(batch, 0), 0)
    step = getattr(model, name)
    return step(batch, 0) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else step(batch)
