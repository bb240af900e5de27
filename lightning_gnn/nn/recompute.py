"""Checkpointed convs: store their arguments only, and recompute activations and gather halo rows in the backward pass.

Source: SAR, whose backward pass receives the rows of other ranks again if gradients depend on them. Mostafa, "Sequential
Aggregation and Rematerialization: Distributed Full-batch Training of Graph Neural Networks on Large Graphs" (MLSys'22).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing

from lightning_gnn.nn.context import GraphContext
from lightning_gnn.private_torch import tree_flatten, tree_unflatten
from lightning_gnn.rows.mode import local_rows


def recompute_in_backward(forward: Callable[..., Any], context: GraphContext) -> Callable[..., Any]:
    """Returns a forward that saves only its arguments for the backward pass; results are bit-identical.

    In the backward pass, all ranks reach the layers in the same order, so they can repeat the exchanges. Random numbers are
    repeated.

    Args:
        forward: function of the bound conv and its arguments.
        context: graph context of the rank.
    """

    def run(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        # The backward pass gets other tensor objects, one for each. Arguments without gradient, such as edges, stay the same
        # objects, because caches compare them by identity.
        learnt = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        places = [list(learnt).index(id(leaf)) if id(leaf) in learnt else None for leaf in leaves]
        others = [leaf if place is None else None for leaf, place in zip(leaves, places)]

        # Checkpoints save the random state of the devices of their arguments, and rows without gradient are not among them.
        anchor = torch.empty(0, device=context.exchange.world.device)

        def make(_: Tensor, *tensors: Tensor) -> Any:
            all_leaves = [other if place is None else tensors[place] for other, place in zip(others, places)]
            args, kwargs = tree_unflatten(all_leaves, spec)
            with local_rows():
                return forward(self, *args, **kwargs)

        contexts = nullcontext(), _Again(self, context)
        return checkpoint(make, anchor, *learnt.values(), use_reentrant=False, context_fn=lambda: contexts)

    return run


class _Again:
    """Context of a recomputation: restores counters and running statistics, which the first forward has updated."""

    def __init__(self, conv: MessagePassing, context: GraphContext) -> None:
        self._conv, self._context, self._world = conv, context, context.exchange.world
        self._first = self._world.calls.copy()

    def __enter__(self) -> None:
        self._propagations = self._context.propagations.copy()
        self._calls, self._world.calls = self._world.calls, self._first.copy()
        self._buffers = [(buffer, buffer.clone()) for buffer in self._conv.buffers()]

    def __exit__(self, *_: object) -> None:
        self._context.propagations = self._propagations
        self._world.calls = self._calls
        for buffer, before in self._buffers:
            buffer.data.copy_(before)  # without a new version: it may be saved for the backward pass
