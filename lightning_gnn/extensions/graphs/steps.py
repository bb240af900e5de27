"""Training steps that are captured as graphs of a device after warm-up, and replayed while nothing that they read changes.

A step has three graphs: forward pass, backward pass with the sum of gradients, and optimizer. Lightning's hooks, gradient clipping
and logging run between them, as in any step. Before each step, ranks agree on what to do:

1. The first steps run as usual and fill the caches of layers and row semantics.
2. The next step is recorded: code of the user, values that it may read, operations.
3. The next step is captured, and replayed once, because capture runs nothing.
4. Later steps are replayed. If a value has changed, the step runs as usual, and is recorded again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, update_wrapper
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
from lightning_gnn.extensions.graphs.source import Source
from lightning_gnn.lightning_packages import is_overridden
from lightning_gnn.private_torch import tree_map_only
from lightning_gnn.rows.mode import place, placement_of

EAGER, RECORD, CAPTURE, REPLAY = range(4)
_WARM_UP = 2
"""Number of steps before the first recorded step."""
_MOST_CHANGES = 4
"""Number of recorded steps without a replay in between after which steps are not captured."""

OPERATION = "captured step"


class NotCapturedError(RuntimeError):
    """Raised with ``cuda_graph=True`` for a step that cannot be captured; names the user's line."""


class _SameStream:
    """Stand-in for the random streams of a step that is captured: a device's state cannot be read then."""

    def inside(self, step: bool = True) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class _Captured:
    """What is known of a step.

    Attributes:
        reads: values that the step may read.
        graphs: graphs of forward and backward pass; empty before capture.
        output: output of the step, which each replay computes again.
        calls: calls of ``self.log``: positional and keyword arguments.
        traffic: traffic of layers: layer, direction and amount.
        messages, bytes_sent: messages of operations by name, and their bytes.
        gradients: gradient of each parameter before and after the backward pass.
        loss: loss of all ranks.
        changed: tensors that the step changes in place.
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
    changed: list[Tensor] = field(default_factory=list)


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
        self._known: _Captured | None = None
        self._optimizer: CapturedOptimizer | None = None
        self._optimizer_graph: Any = None
        self._count = self._num_changes = self._num_optimizers = self.replays = 0
        self._plan, self._in_optimizer, self._pool = EAGER, False, None
        self._source, self._operations, self._late = Source(), Operations(self._device), ""
        self.obstacle = ""
        self._steps.in_use.callback(self._release)
        if reason := self._unsupported(strategy):
            self._stop(reason)
        else:
            self._replace_step(strategy.optimizers[0])

    def _unsupported(self, strategy: Any) -> str:
        """Returns why no step of the run can be captured; empty if there is no reason."""
        optimizers, module = strategy.optimizers, self._module
        checks = {
            f"{self._device.type} devices have no graphs": self._device.type == "cpu"
            or not hasattr(functions_of(self._device), "CUDAGraph"),
            "manual optimization is not captured": not module.automatic_optimization or len(optimizers) != 1,
            "precision='16-mixed' reads whether gradients are finite": getattr(strategy.precision_plugin, "scaler", None)
            is not None,
            "checkpoint_convs=True runs Python code in the backward pass": strategy.checkpoint_convs,
            "a codec is not captured": strategy.codec is not None,
            "elastic=True is not captured": strategy.recovery is not None,
            "distributed embeddings are not captured": bool(self._steps.shared.learned_rows),
            f"{type(module).__name__}.backward runs Python code in the backward pass": is_overridden("backward", module),
        }
        return next((reason for reason, holds in checks.items() if holds), "") or obstacle_of(optimizers[0])

    def _stop(self, obstacle: str) -> None:
        """Run the following steps as usual.

        Raises:
            NotCapturedError: captured steps are required.
        """
        self.obstacle, self._known = obstacle, None
        if self._required:
            raise NotCapturedError(f'Training steps cannot be captured: {obstacle}. Change this, or set cuda_graph="auto".')
        rank_zero_info(f"Training steps run without a captured graph: {obstacle}.")

    def _release(self) -> None:
        """Drop graphs, and references to the module's tensors."""
        self._known = self._optimizer = self._optimizer_graph = self._pool = None

    # A step ######################################################################

    def forward(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of a training step."""
        self._plan, given = EAGER, (batch, *args, *kwargs.values())
        if self._in_optimizer and not self.obstacle:
            self._choose(given)
        run = partial(step, batch, *args, **kwargs)
        if self._plan == RECORD:
            return self._record(run, given)
        if self._plan == CAPTURE:
            self._capture(run, given)
        if self._plan in (CAPTURE, REPLAY):
            return self._replay()
        return run()

    def _choose(self, given: Any) -> None:
        """Set the plan of this step, equally on all ranks."""
        self._count += 1
        if self._count <= _WARM_UP:
            return
        known, plan = self._known, RECORD
        changed = "" if known is None else known.reads.changed(given)
        if known is not None and not changed:
            plan = REPLAY if known.graphs else CAPTURE
        if self._world.size > 1:
            plan = int(self._world.all_gather(torch.tensor([plan]), OPERATION).min())
        if known is not None and plan == RECORD:
            self._num_changes += 1
            if self._num_changes >= _MOST_CHANGES:
                self._share(f"{changed} changes between steps")
                return
        self._plan = plan
        self._num_changes *= plan != REPLAY

    def _share(self, obstacle: str) -> None:
        """Stop if any rank has an obstacle."""
        found = next(filter(None, self._world.all_gather_object(obstacle)), "")
        if found:
            self._stop(found)

    def _record(self, run: Callable[[], Any], given: Any) -> Any:
        self._source, self._operations = Source(), Operations(self._device)
        states = _random_numbers()
        with ExitStack() as stack:
            if self._world.size > 1:
                stack.enter_context(_replaced(self._steps.rows.mode, "common_draws", self._noted_draws()))
            stack.enter_context(self._operations)
            stack.enter_context(self._source.record())
            output = run()
        reads = Reads(self._source, self._module, given)
        self._known = _Captured(reads)
        loss = _loss_of(output)
        self._late = self._source.obstacle or self._operations.obstacle or reads.obstacle
        if _random_numbers() != states:
            self._late = self._late or "the step draws random numbers of Python or NumPy, which a replay would repeat"
        if loss is None or not loss.requires_grad:
            self._late = self._late or "the step returns no loss with a gradient"
        return output

    def _noted_draws(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns the context manager of draws that are equal on all ranks, which notes them as an obstacle."""
        operations, common_draws = self._operations, self._steps.rows.mode.common_draws

        @contextmanager
        def draws() -> Iterator[None]:
            before, operations.draws = operations.draws, False
            with common_draws():
                yield
            if operations.draws and not operations.obstacle:
                operations.obstacle = "random numbers that are equal on all ranks are not captured"
            operations.draws |= before

        return draws

    def backward(self, backward: Callable[[Tensor], Any], loss: Tensor, closure_loss: Tensor) -> None:
        """Compute and sum the gradients of a step, see :meth:`~lightning_gnn.strategy.steps.Steps.differentiate`."""
        run, known = self._steps.differentiate, self._known
        if self._plan == RECORD:
            with self._operations:
                run(backward, loss, closure_loss)
            self._share(self._late or self._operations.obstacle)
        elif self._plan == CAPTURE:
            self._capture_backward(partial(run, backward))
            self._replay_backward(closure_loss)
            self._share(self._late)
        elif self._plan == REPLAY and known is not None:
            self._replay_backward(closure_loss)
            self._steps.rows.ranks.messages.update(known.messages)
            self._steps.rows.ranks.bytes_sent += known.bytes_sent
            self.replays += 1
        else:
            run(backward, loss, closure_loss)

    # Capture #####################################################################

    @contextmanager
    def _capturing(self) -> Iterator[Any]:
        """Context manager that captures operations; yields the graph."""
        functions = functions_of(self._device)
        if self._pool is None:
            self._pool = functions.graph_pool_handle()
        graph, autocast = functions.CUDAGraph(), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with ExitStack() as stack:
                stack.enter_context(_replaced(self._steps, "random", _SameStream()))
                stack.enter_context(_replaced(self._steps.rows.mode, "common_draws", nullcontext))
                stack.enter_context(_replaced(self._meter, "since", lambda *_: 0.0))  # events of a graph cannot be read
                stack.enter_context(functions.graph(graph, pool=self._pool, capture_error_mode="thread_local"))
                yield graph
        finally:
            torch.set_autocast_cache_enabled(autocast)

    def _capture(self, run: Callable[[], Any], given: Any) -> None:
        known = self._known
        assert known is not None
        known.graphs = []
        known.reads.note_versions()
        known.calls, known.traffic, known.messages, known.bytes_sent = [], [], Counter(), 0
        with self._noting_traffic(known), _replaced(self._module, "log", partial(_note_call, known)), self._capturing() as graph:
            known.output = run()
        known.graphs.append(graph)
        changed = known.reads.changed(given, versions=False)
        self._late = f"{changed} is changed by the step" if changed else ""
        known.changed = known.reads.changed_tensors()
        known.reads.note_versions(known.changed)

    @contextmanager
    def _noting_traffic(self, known: _Captured) -> Iterator[None]:
        """Context manager that notes traffic, which replays record again."""
        ranks = self._steps.rows.ranks
        messages, sent = ranks.messages.copy(), ranks.bytes_sent
        with _replaced(self._meter, "record", lambda *given: known.traffic.append(given)):
            yield
        known.messages += ranks.messages - messages
        known.bytes_sent += ranks.bytes_sent - sent

    def _capture_backward(self, run: Callable[[Tensor, Tensor], Any]) -> None:
        known, loss = self._known, None if self._known is None else _loss_of(self._known.output)
        assert known is not None and loss is not None
        before = [(parameter, parameter.grad) for parameter in self._module.parameters()]
        with self._noting_traffic(known), self._capturing() as graph:
            # As Lightning divides the loss; its own division is not part of the graph.
            part = loss / self._trainer.accumulate_grad_batches
            run(part, part)
        known.graphs.append(graph)
        known.gradients = [(parameter, grad, parameter.grad) for parameter, grad in before]
        known.loss = self._steps.loss
        for parameter, grad in before:
            parameter.grad = grad

    # Replay ######################################################################

    def _run_graph(self, graph: Any) -> None:
        with self._world.watch.during(OPERATION, RuntimeError, joint=True) if self._world.size > 1 else nullcontext():
            graph.replay()

    def _replay(self) -> Any:
        known = self._known
        assert known is not None
        self._run_graph(known.graphs[0])
        if self._plan == REPLAY and known.changed:
            increment_version(known.changed)
        for args, options in known.calls:
            self._module.log(*tree_map_only(Tensor, _copied, args), **tree_map_only(Tensor, _copied, options))
        return tree_map_only(Tensor, _copied, known.output)

    def _replay_backward(self, closure_loss: Tensor) -> None:
        known = self._known
        assert known is not None
        now = [parameter.grad for parameter, _, _ in known.gradients]
        for (_, before, _), grad in zip(known.gradients, now):
            if before is not None and grad is not before:
                before.zero_() if grad is None else before.copy_(grad)
        self._run_graph(known.graphs[1])
        for (parameter, before, after), grad in zip(known.gradients, now):
            if before is None and grad is not None and after is not None:
                after = grad.add_(after)
            parameter.grad = after
        self._steps.loss = None if known.loss is None else known.loss.clone()
        for layer, direction, traffic in known.traffic:
            self._meter.record(layer, direction, traffic)

    # Optimizer ###################################################################

    def _replace_step(self, optimizer: Optimizer) -> None:
        """Replace the step of an optimizer until the end of the stage; hooks on the optimizer stay."""
        before, plain = optimizer.step, getattr(type(optimizer).step, "__wrapped__")  # noqa: B009 (unknown to mypy)

        def run(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if not self._optimize(optimizer):
                plain(optimizer, None if closure is None else lambda: loss)
            return loss

        hooked = optimizer.profile_hook_step(run)

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if self.obstacle or self._count < _WARM_UP or kwargs:
                self._count += 1
                return before(closure, **kwargs)
            self._in_optimizer = True
            try:
                return hooked(optimizer, closure)
            finally:
                self._in_optimizer, self._plan = False, EAGER

        # Schedulers set attributes on the method that they wrap.
        self._steps.in_use.enter_context(_replaced(optimizer, "step", update_wrapper(step, before)))

    def _optimize(self, optimizer: Optimizer) -> bool:
        """Run the captured step of the optimizer; returns False if it must run as usual."""
        if self._plan not in (CAPTURE, REPLAY) or self.obstacle or self._num_optimizers >= _MOST_CHANGES:
            return False
        if self._optimizer is None or self._optimizer.has_changed:
            if not CapturedOptimizer.fits(optimizer):
                return False
            self._num_optimizers += 1
            if self._num_optimizers >= _MOST_CHANGES:
                rank_zero_info(
                    f"Steps of {type(optimizer).__name__} run without a captured graph: its options or gradients change."
                )
                return False
            captured = self._optimizer = CapturedOptimizer(optimizer)
            captured.prepare()
            with self._capturing() as self._optimizer_graph:
                captured.run()
        else:
            self._num_optimizers = 0
            self._optimizer.prepare()
        self._run_graph(self._optimizer_graph)
        increment_version(self._optimizer.tensors)
        return True


def _note_call(known: _Captured, *args: Any, **options: Any) -> None:
    known.calls.append((args, options))


def _loss_of(output: Any) -> Tensor | None:
    """Returns the loss in the output of a training step; None if there is none."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def _copied(x: Tensor) -> Tensor:
    """Returns a copy of a tensor that replays overwrite, with its placement."""
    copy, placement = x.detach().clone(), placement_of(x)
    if placement is not None:
        place(copy, placement)
    return copy.requires_grad_(x.requires_grad)


def _random_numbers() -> tuple[Any, ...]:
    """Returns the states of Python's and NumPy's random numbers."""
    name, keys, *others = np.random.get_state()  # noqa: NPY002 (what users draw from)
    return random.getstate(), name, np.asarray(keys).tobytes(), *others


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager in which an object has another attribute."""
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        own.update(before)
