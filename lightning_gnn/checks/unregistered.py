"""Detection of parameters that an optimizer trains and the module has not registered: their gradients would not be summed."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_DEEPEST = 4
"""Maximal depth of nested containers in the search for the name of a parameter."""


def find_unregistered(
    module: torch.nn.Module, optimizers: Iterable[Optimizer], before: Iterable[Tensor] = ()
) -> ValueError | None:
    """Returns an error that names the first trainable parameter of an optimizer that the module lacks; None if there is none.

    Args:
        module: module of the run.
        optimizers: optimizers of the Trainer.
        before: parameters of the module at the begin of the run; pruning and weight norm replace them, and they train no more.
    """
    registered = {id(parameter) for parameter in (*module.parameters(), *before)}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            parameters = [each for each in group["params"] if each.requires_grad and id(each) not in registered]
            if parameters:
                return ValueError(_text(module, type(optimizer).__name__, number, parameters))
    return None


def find_unregistered_in_loss(module: torch.nn.Module, loss: Tensor) -> ValueError | None:
    """Returns an error as :func:`find_unregistered` for optimizers outside of the Trainer with a parameter of this loss."""
    registered = {id(parameter) for parameter in module.parameters()}
    missing_ids = {id(leaf) for leaf in _leaves(loss) if isinstance(leaf, torch.nn.Parameter)} - registered
    if not missing_ids:
        return None
    for optimizer in [each for each in gc.get_objects() if isinstance(each, Optimizer)]:
        for number, group in enumerate(optimizer.param_groups):
            parameters = [each for each in group["params"] if id(each) in missing_ids]
            if parameters:
                return ValueError(_text(module, type(optimizer).__name__, number, parameters))
    return None


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yields the leaves of the loss's autograd graph."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


def _text(module: torch.nn.Module, optimizer: str, group: int, parameters: list[Tensor]) -> str:
    name, first = type(module).__name__, parameters[0]
    place = next(_places(first, module), None)
    more = f" (the first of {len(parameters)})" if len(parameters) > 1 else ""
    return (
        f"{optimizer}, parameter group {group}, trains a parameter of shape {list(first.shape)}{more}, "
        f"{place or 'in no attribute'}, which {name} does not register: its gradient would not be summed over ranks. "
        "Register it in __init__: self.name = torch.nn.Parameter(...). In place of a list or dict, use torch.nn.ParameterList "
        "or ParameterDict for parameters, ModuleList or ModuleDict for modules. For learned rows of nodes, use a "
        "DistributedEmbedding (docs/embeddings.md)."
    )


def _places(parameter: Tensor, module: torch.nn.Module) -> Iterator[str]:
    """Yields the attributes of a module that contain a parameter without registration."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if not attribute.startswith("_"):
                yield from _find_names(parameter, value, ".".join(filter(None, ["self", name, attribute])), _DEEPEST)


def _find_names(parameter: Tensor, value: Any, name: str, depth: int) -> Iterator[str]:
    if value is parameter:
        yield name
    elif isinstance(value, torch.nn.Module):
        yield from (f"{name}.{inner}" for inner, each in value.named_parameters() if each is parameter)
    elif depth and isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from _find_names(parameter, each, f"{name}[{key!r}]", depth - 1)
