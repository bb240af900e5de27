"""Hooks of a LightningModule around a step, in Lightning's order, and the values that they and the step log."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from types import CodeType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gnn.comm.call import Phase
from lightning_gnn.comm.group import World
from lightning_gnn.lightning_packages import is_overridden
from lightning_gnn.private_lightning import HOOK
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.mode import local_rows
from lightning_gnn.steps.logs import GlobalLogs

PHASES: dict[str, Phase] = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
"""Phases of Lightning's stages, as in exchange ids and names of hooks."""


_OF_BACKWARD = ("on_before_backward", "on_after_backward")
_COMMON = {name for kind in (torch.Tensor, torch.nn.Module) for name in dir(kind)} | {"torch"}
"""Names in code that are not attributes of the user."""


class Hooks:
    """Calls the hooks that a module overrides: before a step all, after it hooks that log or share attributes with such hooks.

    Other hooks may have side effects, such as writing files, which a check must avoid. A hook that raises on one device is
    skipped from then on, and its name is added to `skipped`. The stage begins with the step.

    Attributes:
        not_run: errors of skipped hooks that log.
    """

    def __init__(self, stage: str, skipped: set[str]) -> None:
        name = PHASES[stage]
        self._begins = [*(["on_fit_start"] if stage == "fit" else []), f"on_{name}_start"]
        self._before = [*self._begins, f"on_{name}_epoch_start"]
        self._batch, self._epoch_end, self._skipped = f"on_{name}_batch", f"on_{name}_epoch_end", skipped
        self.not_run: dict[str, BaseException] = {}

    def come_before(self, model: pl.LightningModule) -> bool:
        """Returns whether a module overrides hooks that run before a step."""
        return any(is_overridden(hook, model) for hook in (*self._before, f"{self._batch}_start"))

    def see_gradients(self, model: pl.LightningModule) -> bool:
        """Returns whether hooks after a backward pass are called."""
        return any(self._matters(model, hook) for hook in ("on_after_backward", "on_before_optimizer_step"))

    def come_after(self, model: pl.LightningModule) -> bool:
        """Returns whether hooks after a step are called."""
        return any(self._matters(model, hook) for hook in (f"{self._batch}_end", self._epoch_end))

    def _ends_with(self, model: pl.LightningModule, *methods: str) -> bool:
        shared = _names(model, self._epoch_end) & set().union(*(_names(model, each) for each in methods))
        return logs(model, self._epoch_end) and bool(shared)

    def _matters(self, model: pl.LightningModule, hook: str) -> bool:
        return logs(model, hook) or (hook != self._epoch_end and self._ends_with(model, hook))

    def before(self, model: pl.LightningModule, batch: Any, on_one_device: bool, again: bool = False) -> None:
        """Call the hooks before a step; `on_one_device` for one device, `again` if training continues."""
        for hook in self._before[len(self._begins) :] if again and self._batch == "on_train_batch" else self._before:
            self._call(model, hook, (), on_one_device)
        self._call(model, f"{self._batch}_start", (batch, 0), on_one_device)

    @contextmanager
    def around_backward(self, model: pl.LightningModule, loss: Any, optimizer: Any, on_one_device: bool) -> Iterator[None]:
        """Context manager that calls relevant hooks before and after a backward pass.

        Relevant are hooks that log, or share attributes with such hooks. In manual optimization, optimizer hooks are not called.
        """
        of_optimizer = ("on_before_zero_grad", "on_before_optimizer_step") if model.automatic_optimization else ()
        matter = {hook for hook in (*of_optimizer, *_OF_BACKWARD) if self._matters(model, hook)}
        shared = set().union(*(_names(model, hook) for hook in matter))

        def call(hook: str, *args: Any) -> None:
            if hook in matter or (hook in _OF_BACKWARD and shared & _names(model, hook) - _COMMON):
                self._call(model, hook, args, on_one_device)

        for hook in of_optimizer[:1]:
            call(hook, optimizer)
        call("on_before_backward", loss)
        yield
        call("on_after_backward")
        for hook in of_optimizer[1:]:
            call(hook, optimizer)

    def after(self, model: pl.LightningModule, batch: Any, output: Any, on_one_device: bool) -> None:
        given = _training_outputs(output) if self._batch == "on_train_batch" else output
        for hook, args in ((f"{self._batch}_end", (given, batch, 0)), (self._epoch_end, ())):
            if self._matters(model, hook):
                self._call(model, hook, args, on_one_device)

    def _call(self, model: pl.LightningModule, hook: str, args: tuple[Any, ...], on_one_device: bool) -> None:
        if hook in self._skipped or not is_overridden(hook, model):
            return
        before = getattr(model, HOOK)
        setattr(model, HOOK, hook)
        try:
            getattr(model, hook)(*args)
        except BaseException as error:
            *_, (raised_in, _) = walk_tb(error.__traceback__)
            by_itself = isinstance(error, Exception) or raised_in.f_code is _code(getattr(model, hook))
            if not on_one_device or not by_itself:  # otherwise the user interrupted the run
                raise
            self._skipped.add(hook)
            if logs(model, hook):
                self.not_run[hook] = error
        finally:
            setattr(model, HOOK, before)


def _training_outputs(output: Any) -> dict[str, Any]:
    """Returns the outputs that Lightning makes of a training step's return value."""
    given = dict(output) if isinstance(output, Mapping) else {"loss": output}
    return given | {"loss": loss.detach()} if isinstance(loss := given.get("loss"), Tensor) else given


def logs(model: pl.LightningModule, method: str) -> bool:
    """Returns whether the code of a method, or of the module's methods that it calls, contains ``log`` or ``log_dict``."""
    seen: set[CodeType] = set()
    left = [_code(getattr(model, method, None))]
    while left:
        code = left.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        if {"log", "log_dict"} & {*code.co_names}:
            return True
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
        left += [_code(getattr(type(model), name, None)) for name in code.co_names]
    return False


def _names(model: pl.LightningModule, hook: str) -> set[str]:
    """Returns the names in a hook's code that may be attributes of the user."""
    code = _code(getattr(model, hook, None))
    return set() if code is None else {name for name in code.co_names if not hasattr(pl.LightningModule, name)}


def _code(method: Any) -> CodeType | None:
    """Returns the code of a user's method; None for methods of Lightning and torch."""
    function = inspect.unwrap(method) if callable(method) else None
    if str(getattr(function, "__module__", "")).partition(".")[0] in ("lightning", "torch", "pytorch_lightning"):
        return None
    return getattr(function, "__code__", None)


class LoggedValues:
    """Recorder that replaces a module's ``log``; without a world, on one device.

    `values` has the values of all ranks by name, at the end of the epoch.
    """

    def __init__(self, model: pl.LightningModule, world: World | None, rows: GraphRows | None) -> None:
        self.values: dict[str, Tensor] = {}
        self._metrics: dict[str, Metric] = {}
        self._world = world
        model.__dict__.pop("log_dict", None)  # log_dict calls log
        object.__setattr__(model, "log", self._keep)
        self._logs = None if world is None else GlobalLogs(model, world, (), rows)

    def _keep(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Metric):
            self._metrics[name] = value
        else:
            self.values[name] = torch.as_tensor(value).detach().double()

    def given_to_logger(self, name: str, value: Any) -> None:
        """Record a value passed directly to the module's logger; on ranks, only rank 0 has a logger."""
        number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if number and (self._world is None or self._world.rank == 0):
            with local_rows():
                self.values[f"{name} of self.logger"] = torch.as_tensor(value).detach().double()

    def enter(self) -> None:
        if self._logs is not None:
            self._logs.enter_rows()

    def leave(self) -> None:
        """End the step."""
        if self._logs is not None:
            self._logs.check_names()
            self._logs.leave_rows()

    def so_far(self) -> dict[str, Tensor]:
        """Returns values by name, including values of metrics."""
        return {**self.values, **{name: metric.compute() for name, metric in self._metrics.items()}}

    def finish(self, skipped: set[str]) -> None:
        """End the epoch; a metric that raises on one device is added to `skipped`, and skipped on ranks."""
        for name, metric in self._metrics.items():
            if name in skipped:
                continue
            try:
                value = metric.compute()
            except Exception:
                if self._world is not None:
                    raise
                skipped.add(name)
                continue
            if isinstance(value, Tensor):
                self.values[name] = value.detach().double()
