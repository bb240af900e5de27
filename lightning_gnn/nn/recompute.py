"""Layers that keep their arguments only: what they make of them, halo rows included, is made and fetched again in the backward.

Source: SAR, Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training of Graph Neural Networks on
Large Graphs" (MLSys'22), whose backward fetches the rows of other ranks once more where gradients depend on them.
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


def recomputed(forward: Callable[..., Any], context: GraphContext) -> Callable[..., Any]:
    """Returns the forward of a conv that keeps nothing but its arguments for the backward; the same numbers, bit for bit.

    In the backward, all ranks come to a layer in one order, so they exchange again as they did before. Random numbers are those
    of the first time.

    Args:
        forward: a function of the bound conv and its arguments.
        context: the rank's graph.
    """

    def run(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        # The backward finds other objects in their place, one for each. What needs no gradient, such as edges, stays as it is:
        # what is kept of it is known by identity.
        learnt = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        places = [list(learnt).index(id(leaf)) if id(leaf) in learnt else None for leaf in leaves]
        others = [leaf if place is None else None for leaf, place in zip(leaves, places)]

        # Checkpoints keep the random state of the devices that arguments are on: of rows that need no gradient none are given.
        anchor = torch.empty(0, device=context.exchange.world.device)

        def make(_: Tensor, *given: Tensor) -> Any:
            found = [other if place is None else given[place] for other, place in zip(others, places)]
            args, kwargs = tree_unflatten(found, spec)
            with local_rows():
                return forward(self, *args, **kwargs)

        contexts = nullcontext(), _Again(self, context)
        return checkpoint(make, anchor, *learnt.values(), use_reentrant=False, context_fn=lambda: contexts)

    return run


class _Again:
    """Where a layer is made once more: it has been counted, and its running statistics have been updated."""

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
            buffer.data.copy_(before)  # leaves its version, too: it may be kept for the backward
