"""Which convs get a forward of their own while they are bound: the same function of the same parameters, at less cost."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from lightning_gnn.nn import attention, pyg, reorder, several
from lightning_gnn.nn.adapters import LINEAR_MESSAGES
from lightning_gnn.nn.context import GraphContext

# By class: returns the forward for a conv, or None where its settings do not allow it.
_MAKERS: dict[type, Callable[[type, Any, GraphContext, str], Callable[..., Any] | None]] = {
    **dict.fromkeys(reorder.KINDS, reorder.reordered),
    **dict.fromkeys(attention.KINDS, attention.attention),
    **dict.fromkeys(several.KINDS, several.pna),
}


def _kind_of(conv: MessagePassing) -> type | None:
    """Returns the class whose forward, messages and edge updates a conv has unchanged."""
    kind = next((kind for kind in type(conv).__mro__ if kind in _MAKERS), None)
    same = ("forward", "message", "edge_update")
    return kind if kind and all(getattr(type(conv), name) is getattr(kind, name) for name in same) else None


def kernel_groups(module: torch.nn.Module) -> set[str]:
    """Returns which loops a model's convs may run, as groups of :func:`lightning_gnn.kernels.warm_up.warm_up`."""
    groups = set()
    for conv in module.modules():
        if isinstance(conv, MessagePassing):
            groups.add("attention" if isinstance(conv, attention.KINDS) else "sums")
            of_rows = pyg.message_of(conv) in LINEAR_MESSAGES or isinstance(conv, several.KINDS)
            if of_rows and pyg.linear_aggregation(conv) is None:
                groups.add("statistics")
    return groups


def may_be_fused(module: Any) -> bool:
    """Returns whether the parts of a module may be given other rows, or be left out, when it is bound."""
    return isinstance(module, MessagePassing) and _kind_of(module) is not None


def fused(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    """Returns the forward, as an adapter does; nothing for a conv of another form, or one that is watched by hooks."""
    kind = _kind_of(conv)
    if kind is None or not pyg.is_plain(conv):
        return {}
    forward = _MAKERS[kind](kind, conv, context, layer)
    return {} if forward is None else {"forward": types.MethodType(forward, conv)}
