"""Training steps that are captured as graphs of a device after warm-up, and replayed while nothing that they read changes.

A step has three graphs: forward pass, backward pass with the sum of gradients, and optimizer. Lightning's hooks, clipping and
logging run between them, as in any step. Before each step, ranks agree on what to do:

1. The first steps run as usual and fill the caches of layers and row semantics.
2. The next step is recorded: code of the user, values that it may read, operations.
3. The next step is captured, and replayed once, because capture runs nothing.
4. Later steps are replayed. If a value has changed, the step runs as usual, and is recorded again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_gnn.comm.traffic import Traffic
from lightning_gnn.devices import functions_of
from lightning_gnn.extensions.graphs.operations import Operations
from lightning_gnn.extensions.graphs.optimizers import CapturedOptimizer, obstacle_of
from lightning_gnn.extensions.graphs.reads import Reads
from lightning_gnn.extensions.graphs.source import Source, loads_argument
from lightning_gnn.lightning_packages import is_overridden
from lightning_gnn.private_torch import MODULES, ORIGINAL, tree_map_only
from lightning_gnn.rows.placement import ATTRIBUTE, OF_SAMPLES

EAGER, RECORD, CAPTURE, REPLAY = range(4)
_WARM_UP = 2
"""Number of steps before the first recorded step."""
_MOST_CHANGES = 4
"""Number of recorded steps without a replay in between after which steps are not captured."""

OPERATION = "captured step"

_SAME_STREAM = SimpleNamespace(inside=lambda *_: nullcontext())
"""Stand-in for the random streams of a step that is captured: a device's state cannot be read then."""


class NotCapturedError(RuntimeError):
    """Raised with ``cuda_graph=True`` for a step that cannot be captured; names the user's line."""


@dataclass
class _Step:
    """A step that was recorded, and its graphs.

    Attributes:
        reads: values that the step may read.
        graphs: graphs of forward and backward pass; empty before capture.
        output: output of the step, which each replay computes again.
        calls: calls of ``self.log``: positional and keyword arguments.
        traffic: traffic of layers: layer, direction and amount.
        messages, bytes_sent: messages of operations by name, and their bytes.
        gradients: gradient of each parameter before and after the backward pass.
        loss: loss of all ranks.
        changes: tensors that the step changes in place.
    """

    reads: Reads
    graphs: list[Any] = field(default_factory=list)
    output: Any = None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    traffic: list[tuple[str, str, Traffic]] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)
    loss: Tensor | None = None
    changes: list[Tensor] = field(default_factory=list)


class StepGraphs:
    """Captured training steps of a fit.

    Args:
        strategy: strategy of the run, whose stage has begun.
        trainer: Trainer of the run.
        required: whether a step that cannot be captured raises an error; otherwise the reason is logged once.

    Attributes:
        replays: number of replayed steps.
        obstacle: reason why steps are not captured; empty if they are.
    """

    def __init__(self, strategy: Any, trainer: pl.Trainer, required: bool) -> None:
        self._steps, self._trainer, self._required = strategy.steps, trainer, required
        self._world, self._meter, self._device = strategy.world, strategy.meter, strategy.root_device
        self._module: Any = trainer.lightning_module
        self._step: _Step | None = None
        self._optimizer_step: Any = None
        self._optimizer: CapturedOptimizer | None = None
        self._count = self._num_changes = self._num_optimizers = self.replays = 0
        self._plan, self._in_optimizer, self._pool = EAGER, False, None
        self._operations, self._late, self.obstacle = Operations(self._device), "", ""
        self._steps.in_use.callback(self._release)
        if reason := self._obstacle_of_run(strategy):
            self._stop(reason)
        else:
            self._replace_step(strategy.optimizers[0])

    def _obstacle_of_run(self, strategy: Any) -> str:
        """Returns why no step of the run can be captured; empty if there is no reason."""
        optimizers, module, device = strategy.optimizers, self._module, self._device
        checks = {
            f"{device.type} devices have no graphs": device.type == "cpu" or not hasattr(functions_of(device), "CUDAGraph"),
            "manual optimization": not module.automatic_optimization or len(optimizers) != 1,
            "precision='16-mixed' reads gradients": getattr(strategy.precision_plugin, "scaler", None) is not None,
            "checkpoint_convs=True runs Python code in the backward pass": strategy.checkpoint_convs,
            "codec": strategy.codec is not None,
            "elastic=True": strategy.recovery is not None,
            "distributed embeddings": bool(self._steps.shared.learned_rows),
            "a compiled model": any(ORIGINAL in getattr(part, MODULES) for part in module.modules()),
            f"{type(module).__name__}.backward": is_overridden("backward", module),
        }
        return next((reason for reason, holds in checks.items() if holds), "") or obstacle_of(optimizers[0])

    def _stop(self, obstacle: str) -> None:
        """Run the following steps as usual.

        Raises:
            NotCapturedError: captured steps are required.
        """
        self.obstacle, self._step = obstacle, None
        if self._required:
            raise NotCapturedError(f'Training steps cannot be captured: {obstacle}. Change this, or set cuda_graph="auto".')
        rank_zero_info(f"Training steps run without a captured graph: {obstacle}.")

    def _release(self) -> None:
        """Drop graphs, and references to the module's tensors."""
        self._step = self._optimizer = self._optimizer_step = self._pool = None

    # A step ######################################################################

    def forward(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of a training step."""
        self._plan, others = EAGER, (*args, *kwargs.values())
        arguments = (batch, *(each for place, each in enumerate(others, 2) if loads_argument(self._module.training_step, place)))
        info = getattr(batch, "sample_info", None)
        if self._in_optimizer and not self.obstacle and (info is None or info.is_static):
            self._choose(arguments)
        run = partial(step, batch, *args, **kwargs)
        if self._plan == RECORD:
            return self._record(run, arguments)
        if self._plan == EAGER or self._step is None:
            return run()
        if self._plan == CAPTURE:
            self._step = _Step(self._step.reads)
            self._capture(self._step, run, arguments)
        return self._replay(self._step)

    def _choose(self, arguments: Any) -> None:
        """Set the plan of this step, equally on all ranks."""
        state, plan = self._step, RECORD
        changed = "" if state is None else state.reads.difference(arguments)
        if state is not None and not changed:
            plan = REPLAY if state.graphs else CAPTURE
        if self._world.size > 1:
            plan = int(self._world.all_gather(torch.tensor([plan]), OPERATION).min())
        self._num_changes = (self._num_changes + (state is not None and plan == RECORD)) * (plan != REPLAY)
        if self._num_changes < _MOST_CHANGES:
            self._plan = plan
        else:
            self._share(f"{changed} changes between steps")

    def _share(self, obstacle: str) -> None:
        """Stop if any rank has an obstacle."""
        if first := next(filter(None, self._world.all_gather_object(obstacle)), ""):
            self._stop(first)

    def _record(self, run: Callable[[], Any], arguments: Any) -> Any:
        source, operations = Source(), Operations(self._device)
        self._operations, states = operations, _random_numbers()

        @contextmanager
        def draws(common_draws: Any) -> Iterator[None]:
            with common_draws(), _attribute_as(operations, "is_common", self._world.size > 1):
                yield

        with ExitStack() as stack:
            for mode in self._steps.rows.modes:
                stack.enter_context(_attribute_as(mode, "common_draws", partial(draws, mode.common_draws)))
            stack.enter_context(operations)
            stack.enter_context(source.record())
            output = run()
        reads = Reads(source, self._module, arguments, self._settings)
        self._step, loss = _Step(reads), _loss_of(output)
        late = "" if loss is not None and loss.requires_grad else "the step returns no loss with a gradient"
        if _random_numbers() != states:
            late = "the step draws random numbers of Python or NumPy"
        self._late = source.obstacle or operations.obstacle or reads.obstacle or late
        return output

    def _settings(self) -> tuple[Any, ...]:
        """Returns settings outside of the module on which a step depends."""
        deterministic, scale = torch.are_deterministic_algorithms_enabled(), self._steps.values.scale
        return torch.is_grad_enabled(), deterministic, torch.get_default_dtype(), scale

    def backward(self, backward: Callable[[Tensor], Any], loss: Tensor, closure_loss: Tensor) -> None:
        """Compute and sum the gradients of a step, see :meth:`~lightning_gnn.strategy.steps.Steps.differentiate`."""
        run, state = self._steps.differentiate, self._step
        if self._plan == RECORD:
            with self._operations:
                run(backward, loss, closure_loss)
            self._share(self._late or self._operations.obstacle)
        elif self._plan == EAGER or state is None:
            run(backward, loss, closure_loss)
        elif self._plan == CAPTURE:
            self._capture_backward(state, partial(run, backward))
            self._replay_backward(state)
            self._share(self._late)
        else:
            self._replay_backward(state)
            self._steps.rows.ranks.messages.update(state.messages)
            self._steps.rows.ranks.bytes_sent += state.bytes_sent
            self.replays += 1

    # Capture #####################################################################

    @contextmanager
    def _capturing(self, state: _Step) -> Iterator[None]:
        """Context manager that captures operations as the next graph of a step, and notes traffic and calls of ``self.log``."""
        functions, steps, cache = functions_of(self._device), self._steps, torch.is_autocast_cache_enabled()
        self._pool = self._pool or functions.graph_pool_handle()
        graph, ranks = functions.CUDAGraph(), steps.rows.ranks
        messages, sent = ranks.messages.copy(), ranks.bytes_sent
        replaced: list[tuple[Any, str, Any]] = [
            (steps, "random", _SAME_STREAM),
            *((mode, "common_draws", nullcontext) for mode in steps.rows.modes),
            (self._meter, "since", lambda *_: 0.0),  # events of a graph cannot be read
            (self._meter, "record", lambda *traffic: state.traffic.append(traffic)),
            (self._module, "log", lambda *args, **options: state.calls.append((args, options))),
        ]
        torch.set_autocast_cache_enabled(False)
        try:
            with ExitStack() as stack:
                for each in replaced:
                    stack.enter_context(_attribute_as(*each))
                stack.enter_context(functions.graph(graph, pool=self._pool, capture_error_mode="thread_local"))
                yield
        finally:
            torch.set_autocast_cache_enabled(cache)
        state.graphs.append(graph)
        state.messages += ranks.messages - messages
        state.bytes_sent += ranks.bytes_sent - sent

    def _capture(self, state: _Step, run: Callable[[], Any], arguments: Any) -> None:
        state.reads.note_versions()
        with self._capturing(state):
            state.output = run()
        difference = state.reads.difference(arguments, versions=False)
        self._late = f"{difference} is changed by the step" if difference else ""
        state.changes = state.reads.changing_tensors()
        state.reads.note_versions(state.changes)

    def _capture_backward(self, state: _Step, run: Callable[[Tensor, Tensor], Any]) -> None:
        loss: Any = _loss_of(state.output)
        parameters = list(self._module.parameters())
        before = [parameter.grad for parameter in parameters]
        with self._capturing(state):
            # As Lightning divides the loss; its own division is not part of the graph.
            part = loss / self._trainer.accumulate_grad_batches
            run(part, part)
        state.gradients = [(x, grad, x.grad) for x, grad in zip(parameters, before)]
        state.loss = self._steps.loss
        for parameter, grad in zip(parameters, before):
            parameter.grad = grad

    # Replay ######################################################################

    def _run_graph(self, graph: Any) -> None:
        with self._world.watch.during(OPERATION, RuntimeError, joint=True) if self._world.size > 1 else nullcontext():
            graph.replay()

    def _replay(self, state: _Step) -> Any:
        self._run_graph(state.graphs[0])
        if self._plan == REPLAY and state.changes:
            increment_version(state.changes)
        for args, options in state.calls:
            self._module.log(*tree_map_only(Tensor, _copy_of, args), **tree_map_only(Tensor, _copy_of, options))
        return tree_map_only(Tensor, _copy_of, state.output)

    def _replay_backward(self, state: _Step) -> None:
        now = [parameter.grad for parameter, _, _ in state.gradients]
        for (_, before, _), grad in zip(state.gradients, now):
            if before is not None and grad is not before:
                before.zero_() if grad is None else before.copy_(grad)
        self._run_graph(state.graphs[1])
        for (parameter, before, after), grad in zip(state.gradients, now):
            if before is None and grad is not None and after is not None:
                after = grad.add_(after)
            parameter.grad = after
        self._steps.loss = None if state.loss is None else state.loss.clone()
        for layer, direction, traffic in state.traffic:
            self._meter.record(layer, direction, traffic)

    # Optimizer ###################################################################

    def _replace_step(self, optimizer: Optimizer) -> None:
        """Replace the step of an optimizer until the end of the stage; hooks on the optimizer stay."""
        before, plain = optimizer.step, getattr(type(optimizer).step, "__wrapped__")  # noqa: B009 (unknown to mypy)

        def run(_: Optimizer, closure: Callable[[], Any]) -> Any:
            with torch.enable_grad():
                loss = closure()
            if not self._optimize(optimizer):
                plain(optimizer, lambda: loss)
            return loss

        hooked = optimizer.profile_hook_step(run)

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if self.obstacle or self._count < _WARM_UP or closure is None or kwargs:
                self._count += 1
                return before(closure, **kwargs)
            with _attribute_as(self, "_in_optimizer", True), _attribute_as(self, "_plan", EAGER):
                return hooked(optimizer, closure)

        # Schedulers set attributes on the method that they wrap.
        self._steps.in_use.enter_context(_attribute_as(optimizer, "step", update_wrapper(step, before)))

    def _optimize(self, optimizer: Optimizer) -> bool:
        """Run the captured step of the optimizer; returns False if it must run as usual."""
        if self._plan < CAPTURE or self._step is None or self._num_optimizers >= _MOST_CHANGES:
            return False
        if self._optimizer is None or self._optimizer.has_changed:
            self._num_optimizers += 1
            if self._num_optimizers == _MOST_CHANGES:
                rank_zero_info("The optimizer runs without a captured graph: its options or gradients change.")
            if self._num_optimizers == _MOST_CHANGES or not CapturedOptimizer.fits(optimizer):
                return False
            captured = self._optimizer = CapturedOptimizer(optimizer)
            captured.prepare()
            self._optimizer_step = _Step(self._step.reads)
            with self._capturing(self._optimizer_step):
                captured.run()
        else:
            self._num_optimizers = 0
            self._optimizer.prepare()
        self._run_graph(self._optimizer_step.graphs[0])
        increment_version(self._optimizer.tensors)
        return True


def _loss_of(output: Any) -> Tensor | None:
    """Returns the loss in the output of a training step; None if there is none."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def _copy_of(x: Tensor) -> Tensor:
    """Returns a copy of a tensor that replays overwrite, with its placement."""
    copy = x.detach().clone()
    vars(copy).update({name: vars(x)[name] for name in (ATTRIBUTE, OF_SAMPLES) if name in vars(x)})
    return copy.requires_grad_(x.requires_grad)


def _random_numbers() -> tuple[Any, ...]:
    """Returns the states of Python's and NumPy's random numbers."""
    numbers: Any = np.random.get_state()  # noqa: NPY002 (what users draw from)
    return random.getstate(), numbers[2:]


@contextmanager
def _attribute_as(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager in which an object has another attribute."""
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        own.update(before)
