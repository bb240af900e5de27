"""Which convs get a forward of their own while they are bound: the same function of the same parameters, at less cost."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.nn import MessagePassing, PNAConv

from lightning_gnn.nn import aggregations, attention, pyg, reorder
from lightning_gnn.nn.adapters import LINEAR_MESSAGES
from lightning_gnn.nn.context import GraphContext

# By class: returns the forward for a conv, or None where its settings do not allow it.
_MAKERS: dict[type, Callable[[type, Any, GraphContext, str], Callable[..., Any] | None]] = {
    **dict.fromkeys(reorder.FORWARDS, reorder.reordered),
    **dict.fromkeys(attention.KINDS, attention.attention),
    PNAConv: aggregations.pna,
}

# By class: the linear maps whose weights the forward reads; the others call their maps.
_MAPS: dict[type, Callable[[Any], list[Any]]] = {
    **{kind: maps for kind, (_, maps) in reorder.FORWARDS.items()},
    PNAConv: aggregations.maps_of,
}


def _kind_of(conv: MessagePassing) -> type | None:
    """Returns the class whose forward, messages and edge updates a conv has unchanged."""
    kind = next((kind for kind in type(conv).__mro__ if kind in _MAKERS), None)
    same = ("forward", "message", "edge_update")
    unchanged = kind and all(getattr(type(conv), name) is getattr(kind, name) for name in same)
    return kind if unchanged else None


def kernel_groups(module: torch.nn.Module) -> set[str]:
    """Returns which loops a model's convs may run, as groups of :func:`lightning_gnn.kernels.warm_up.warm_up`."""
    groups = set()
    for conv in module.modules():
        if isinstance(conv, MessagePassing):
            groups.add("attention" if isinstance(conv, attention.KINDS) else "sums")
            of_rows = type(conv).message in LINEAR_MESSAGES or isinstance(conv, PNAConv)
            if of_rows and pyg.linear_aggregation(conv) is None:
                groups.add("statistics")
    return groups


def may_be_fused(module: Any) -> bool:
    """Returns whether the parts of a module may be given other rows, or be left out, when it is bound."""
    return isinstance(module, MessagePassing) and _kind_of(module) is not None


def fused(conv: MessagePassing, context: GraphContext, layer: str, own: Callable[..., Any]) -> dict[str, Any]:
    """Returns the forward, as an adapter does; nothing for a conv of another form.

    Args:
        conv: to be bound.
        context: its rank's graph.
        layer: its name.
        own: its forward otherwise, a function of the conv. It is what runs in calls that hooks watch, or whose linear maps are
            more than their weights: those may change at any time, as pruning does.
    """
    kind = _kind_of(conv)
    forward = None if kind is None else _MAKERS[kind](kind, conv, context, layer)
    if forward is None:
        return {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (forward if pyg.is_plain(self) and _may_read_weights(kind, self) else own)(self, *args, **kwargs)

    return {"forward": types.MethodType(run, conv)}


def _may_read_weights(kind: Any, conv: Any) -> bool:
    """Returns whether the weights that a forward reads past the conv's maps are all that these maps do."""
    if kind not in _MAPS:
        return True
    maps = _MAPS[kind](conv)
    return bool(maps) and all(map(pyg.is_plain_map, maps))
