"""Captured steps of Adam, AdamW and SGD: all numbers that change between steps are tensors, filled before each replay.

The operations, their order and the precision of the numbers are as in torch's steps without ``capturable``, which computes the
numbers on the host in float64. The options and the state of the optimizer stay as the user set them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_gnn.private_torch import FOREACH

_UNSUPPORTED = ("capturable", "fused", "differentiable")


def obstacle_of(optimizer: Optimizer) -> str:
    """Returns the reason why steps of an optimizer cannot be captured; empty if they can."""
    if type(optimizer) not in (Adam, AdamW, SGD):
        return f"{type(optimizer).__name__} is not captured. Use Adam, AdamW or SGD"
    for group in optimizer.param_groups:
        for name in _UNSUPPORTED:
            if group.get(name):
                return f"{type(optimizer).__name__}({name}=True) is not captured. Remove {name}"
        if any(isinstance(value, Tensor) for name, value in group.items() if name != "params"):
            return f"{type(optimizer).__name__} has an option that is a tensor. Pass a number"
    return ""


@dataclass
class _Group:
    """Captured part of a step: parameters of one group, dtype and number of steps.

    Attributes:
        options: options of the group.
        states: state of each parameter.
        numbers: numbers that change between steps, on the device, by name.
        is_decoupled: whether weights decay without changing gradients.
    """

    options: dict[str, Any]
    parameters: list[Tensor]
    states: list[dict[str, Any]]
    numbers: dict[str, Tensor]
    is_decoupled: bool

    @property
    def is_sgd(self) -> bool:
        return "dampening" in self.options

    def values(self) -> dict[str, float]:
        """Returns the numbers of the next step, after the counts of steps were increased."""
        options = self.options
        lr = float(options["lr"])
        if self.is_sgd:
            return {"step": -lr}
        (beta1, beta2), step = options["betas"], self.states[0]["step"].item()
        found = {"step": -(lr / (1 - beta1**step)), "root": (1 - beta2**step) ** 0.5}
        return found | {"decay": 1 - lr * options["weight_decay"]}

    def fixed(self) -> tuple[Any, ...]:
        """Returns what is part of the graph: a step that differs in it is captured again."""
        options = {name: value for name, value in self.options.items() if name not in ("params", "lr", "initial_lr")}
        tensors = [id(value) for state in self.states for value in state.values() if isinstance(value, Tensor)]
        counts = {float(state["step"]) for state in self.states} if not self.is_sgd else ()
        return repr(options), tensors, len(counts)


class CapturedOptimizer:
    """Step of an optimizer on given gradients, for capture and replay.

    Args:
        optimizer: optimizer that has made at least one step, so that its state exists.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._groups = optimizer, list[_Group]()
        for options in optimizer.param_groups:
            by_kind: dict[Any, list[Tensor]] = {}
            for parameter in options["params"]:
                if parameter.grad is not None:
                    count = optimizer.state[parameter].get("step")
                    by_kind.setdefault((parameter.dtype, None if count is None else float(count)), []).append(parameter)
            for (dtype, _), parameters in by_kind.items():
                self._groups.append(self._make(options, parameters, dtype))
        self._fixed, self._kept = (
            self._known(),
            [*self.tensors, *(each.grad for group in self._groups for each in group.parameters)],
        )

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """Returns whether an optimizer can be captured now: its state exists."""
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        states = [optimizer.state.get(each) for each in parameters]
        needs = any(group.get("momentum") or "betas" in group for group in optimizer.param_groups)
        is_there = all(state and all(value is not None for value in state.values()) for state in states) or not needs
        return bool(parameters) and is_there and not obstacle_of(optimizer)

    def _make(self, options: dict[str, Any], parameters: list[Tensor], dtype: torch.dtype) -> _Group:
        wide = torch.promote_types(dtype, torch.float32)
        states = [self._optimizer.state[each] for each in parameters]
        decoupled = options.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW))
        group = _Group(options, parameters, states, {}, decoupled)
        for name in ("step",) if group.is_sgd else ("step", "root", "decay"):
            group.numbers[name] = torch.zeros((), dtype=wide, device=parameters[0].device)
        return group

    def _known(self) -> list[Any]:
        grads = [id(each.grad) for options in self._optimizer.param_groups for each in options["params"]]
        return [grads, *(group.fixed() for group in self._groups)]

    @property
    def has_changed(self) -> bool:
        """Whether gradients, options or the state are not the captured ones."""
        return self._known() != self._fixed

    def prepare(self) -> None:
        """Count the step, and set its numbers."""
        for group in self._groups:
            counts = [state["step"] for state in group.states if not group.is_sgd]
            if counts:
                FOREACH.add_(counts, 1)
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

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters and state that a step changes."""
        state = [value for group in self._groups for each in group.states for value in each.values() if isinstance(value, Tensor)]
        return [*(each for group in self._groups for each in group.parameters), *(each for each in state if each.dim())]


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
