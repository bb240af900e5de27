"""Private names of torch_geometric that the package uses, accessed only in this file.

Tested with torch_geometric 2.8.1 and 2.7.0; `tests/test_private_names.py` checks that no other file has any, and
`tests/nn/test_binding.py` that they exist.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn import Linear, MessagePassing, aggr

from lightning_gnn.private_torch import hooks_of_calls

# Results for one graph that convs cache between calls; on another rank's part, or the whole graph, they would be wrong.
_CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h", "_alpha")

key_of = attrgetter("_key")
"""Type of the nodes or edges in a store of a graph, or None."""

graph_attributes = attrgetter("_global_store")
"""Store of the attributes of a HeteroData that belong to no type."""

CHEB_NORM = "__norm__"
"""Method of ChebConv that computes the Laplacian."""

TRIM = "_trim"
"""Function of PyG's models that selects the rows and edges of a layer in a sampled neighborhood."""

HGT_SOURCES = "_construct_src_node_feat"
"""Method of HGTConv that computes keys and values of sources, by edge type."""

# Methods of a conv with hooks.
_CALLS = ("propagate", "message", "aggregate", "edge_update")
_hooks = attrgetter(*(f"_{name}_forward_{when}hooks" for name in _CALLS for when in ("pre_", "")))


Names = frozenset[str]


def lifted_arguments(conv: MessagePassing, edge_update: bool = False) -> tuple[Names, Names, Names]:
    """Returns the names of the arguments of `propagate` that `message` and related methods use, or of `edge_updater`.

    Returns:
        Names used at edge sources (``x`` for ``x_j``), names used at edge targets, and names passed unchanged.
    """
    return _split_names(tuple(conv._edge_user_args if edge_update else conv._user_args))


@lru_cache(maxsize=1024)
def _split_names(names: tuple[str, ...]) -> tuple[Names, Names, Names]:
    sources = frozenset(name[:-2] for name in names if name.endswith("_j"))
    targets = frozenset(name[:-2] for name in names if name.endswith("_i"))
    return sources, targets, frozenset(name for name in names if name[-2:] not in ("_i", "_j"))


def implements_edge_update(conv: MessagePassing) -> bool:
    """Returns whether the conv computes per-edge values in a separate call."""
    return conv.inspector.implements("edge_update")


def caches(conv: MessagePassing) -> dict[str, Any]:
    """Returns the cached values of a conv for its last graph, by attribute."""
    return {name: conv.__dict__[name] for name in _CACHES if name in conv.__dict__}


def clear_caches(conv: MessagePassing) -> None:
    """Clear the cached values of a conv for its last graph."""
    for name, kept in caches(conv).items():
        if kept is not None:
            setattr(conv, name, None)


def is_plain(conv: MessagePassing) -> bool:
    """Returns whether `propagate` consists only of `message` and the aggregation: no hooks, no explanation."""
    return (
        not any(_hooks(conv))
        and not conv.explain
        and conv.decomposed_layers == 1
        and type(conv).aggregate is MessagePassing.aggregate
        and type(conv).update is MessagePassing.update
    )


def is_plain_map(lin: Any) -> bool:
    """Returns whether a module computes only ``x @ weight.T + bias``: no hooks, and the original forward.

    Pruning, weight norm and spectral norm compute the weight in a hook, or on each access. Hooks may also observe inputs and
    outputs.
    """
    if is_parametrized(lin):
        return False
    own = type(lin).forward in (torch.nn.Linear.forward, Linear.forward) and "forward" not in lin.__dict__
    return own and lin.weight.dim() == 2 and not any(hooks_of_calls(lin))  # [out, in]


def is_watched(module: torch.nn.Module) -> bool:
    """Returns whether a module has hooks, which must get the values of one device."""
    return any(hooks_of_calls(module))


def read_by_update(conv: MessagePassing) -> set[str]:
    """Returns the names of arguments of `propagate` that only `update` uses, not message or aggregation."""
    others = conv.inspector.get_flat_param_names(["message", "aggregate", "edge_update"])
    return set(conv.inspector.get_flat_param_names(["update"])) - set(others)


_REDUCTIONS: dict[type, str] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
    aggr.VarAggregation: "var",
    aggr.StdAggregation: "std",
}


def reductions(aggregation: Any) -> list[str] | None:
    """Returns the names of an aggregation module's reductions over a node's messages; None for other aggregations."""
    if isinstance(aggregation, aggr.MultiAggregation):
        names = [reductions(part) for part in aggregation.aggrs]
        return None if None in names else [name for each in names for name in each or ()]
    variance = getattr(aggregation, "var_aggr", aggregation)
    if getattr(variance, "semi_grad", False) or type(aggregation) not in _REDUCTIONS:
        return None
    return [_REDUCTIONS[type(aggregation)]]


def linear_aggregation(conv: MessagePassing) -> str | None:
    """Returns ``"sum"`` or ``"mean"`` if it is the conv's aggregation, else None."""
    return {aggr.SumAggregation: "sum", aggr.MeanAggregation: "mean"}.get(type(conv.aggr_module))
