"""Captured steps of Adam, AdamW and SGD: all numbers that change between steps are tensors, filled before each replay.

The operations, their order and the precision of the numbers are as in torch's steps without ``capturable``, which computes the
numbers on the host in float64. The options and the state of the optimizer stay as the user set them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_gnn.private_torch import FOREACH

_UNSUPPORTED = ("capturable", "fused", "differentiable")


def obstacle_of(optimizer: Optimizer) -> str:
    """Returns the reason why steps of an optimizer cannot be captured; empty if they can."""
    kind = type(optimizer).__name__
    if type(optimizer) not in (Adam, AdamW, SGD):
        return f"{kind} is not captured. Use Adam, AdamW or SGD"
    options = [(name, value) for group in optimizer.param_groups for name, value in group.items()]
    unsupported = (name for name, value in options if isinstance(value, Tensor) or (name in _UNSUPPORTED and value))
    return next((f"{kind} with the option {name} is not captured. Remove it, or pass a number" for name in unsupported), "")


class _Group:
    """Parameters of one group of options, dtype and number of steps.

    Attributes:
        numbers: numbers that change between steps, on the device, by name.
        is_decoupled: whether weights decay without changing gradients.
    """

    def __init__(self, optimizer: Optimizer, options: dict[str, Any], parameters: list[Tensor]) -> None:
        self.options, self.parameters, self.is_sgd = options, parameters, "dampening" in options
        self.states = [optimizer.state[each] for each in parameters]
        self.is_decoupled = options.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
        wide = torch.promote_types(parameters[0].dtype, torch.float32)
        names = ("step",) if self.is_sgd else ("step", "root", "decay")
        self.numbers = {name: torch.zeros((), dtype=wide, device=parameters[0].device) for name in names}

    def values(self) -> dict[str, float]:
        """Returns the numbers of the next step, after the counts of steps were increased."""
        lr = float(self.options["lr"])
        if self.is_sgd:
            return {"step": -lr}
        (beta1, beta2), step = self.options["betas"], self.states[0]["step"].item()
        decay = 1 - lr * self.options["weight_decay"]
        return {"step": -(lr / (1 - beta1**step)), "root": (1 - beta2**step) ** 0.5, "decay": decay}


class CapturedOptimizer:
    """Step of an optimizer on its present gradients, for capture and replay.

    Args:
        optimizer: optimizer that has made at least one step, so that its state exists.

    Attributes:
        tensors: parameters and state that a step changes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._groups = optimizer, list[_Group]()

        def kind(x: Tensor) -> tuple[str, float]:
            return str(x.dtype), float(optimizer.state[x].get("step", 0))

        for options in optimizer.param_groups:
            for _, parameters in groupby(sorted(_with_gradients(options), key=kind), key=kind):
                self._groups.append(_Group(optimizer, options, [*parameters]))
        self._captured_inputs = self._inputs()
        _, self.tensors, self._counts, _ = self._captured_inputs

    def _inputs(self) -> tuple[Any, ...]:
        """Returns the dependencies of the graph: gradients, parameters with their state, counts of steps, options."""
        grads = [each.grad for options in self._optimizer.param_groups for each in options["params"]]
        states = [value for group in self._groups for state in group.states for value in state.values() if value is not None]
        parameters = [each for group in self._groups for each in group.parameters]
        counts = [len({float(state.get("step", 0)) for state in group.states}) for group in self._groups]
        options = [{**group, "params": None, "lr": None, "initial_lr": None} for group in self._optimizer.param_groups]
        return grads, [*parameters, *(x for x in states if x.dim())], [x for x in states if not x.dim()], repr((options, counts))

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """Returns whether an optimizer can be captured now: its state exists."""
        for options in optimizer.param_groups:
            states = [optimizer.state.get(each) for each in _with_gradients(options)]
            if ("betas" in options or options["momentum"]) and any(not state or None in state.values() for state in states):
                return False
        return not obstacle_of(optimizer)

    @property
    def has_changed(self) -> bool:
        """Whether gradients, options or the state are not the captured ones."""
        *tensors, options = self._inputs()
        *captured, captured_options = self._captured_inputs
        alike = all([*map(id, these)] == [*map(id, those)] for these, those in zip(tensors, captured))
        return not alike or options != captured_options

    def prepare(self) -> None:
        """Count the step, and set its numbers."""
        if self._counts:
            FOREACH.add_(self._counts, 1)
        for group in self._groups:
            for name, value in group.values().items():
                group.numbers[name].fill_(value)

    @torch.no_grad()
    def run(self) -> None:
        """Run the operations of a step."""
        for group in self._groups:
            grads: Sequence[Tensor] = [each.grad for each in group.parameters if each.grad is not None]
            if group.options["maximize"]:
                grads = FOREACH.neg(grads)
            (_descend if group.is_sgd else _adapt)(group, grads)


def _with_gradients(options: dict[str, Any]) -> list[Tensor]:
    """Returns the parameters of a group that have gradients."""
    return [each for each in options["params"] if each.grad is not None]


def _adapt(group: _Group, grads: Sequence[Tensor]) -> None:
    """Run a step of Adam or AdamW."""
    options, parameters, numbers = group.options, group.parameters, group.numbers
    beta1, beta2 = options["betas"]
    means, squares = ([state[name] for state in group.states] for name in ("exp_avg", "exp_avg_sq"))
    if options["weight_decay"] != 0:
        if group.is_decoupled:
            FOREACH.mul_(parameters, numbers["decay"])
        else:
            grads = FOREACH.add(grads, parameters, alpha=options["weight_decay"])
    FOREACH.lerp_(means, grads, 1 - beta1)
    FOREACH.mul_(squares, beta2)
    FOREACH.addcmul_(squares, grads, grads, 1 - beta2)
    if options["amsgrad"]:
        largest = [state["max_exp_avg_sq"] for state in group.states]
        FOREACH.maximum_(largest, squares)
        squares = largest
    scale = FOREACH.sqrt(squares)
    FOREACH.div_(scale, numbers["root"])
    FOREACH.add_(scale, options["eps"])
    changes = FOREACH.mul(means, numbers["step"])
    FOREACH.div_(changes, scale)
    FOREACH.add_(parameters, changes)


def _descend(group: _Group, grads: Sequence[Tensor]) -> None:
    """Run a step of SGD."""
    options, parameters = group.options, group.parameters
    if options["weight_decay"] != 0:
        grads = FOREACH.add(grads, parameters, alpha=options["weight_decay"])
    if options["momentum"] != 0:
        buffers = [state["momentum_buffer"] for state in group.states]
        FOREACH.mul_(buffers, options["momentum"])
        FOREACH.add_(buffers, grads, alpha=1 - options["dampening"])
        grads = FOREACH.add(grads, buffers, alpha=options["momentum"]) if options["nesterov"] else buffers
    for parameter, grad in zip(parameters, grads):
        parameter.addcmul_(grad, group.numbers["step"])
