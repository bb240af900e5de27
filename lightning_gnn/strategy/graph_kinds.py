"""What a run does that depends on whether its graph has node and edge types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.nn import HANConv, HGTConv

from lightning_gnn.checks.small_graph import SmallGraph, small_graph
from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.bind import Binding, check_module
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.directed import context_of
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.types import Types
from lightning_gnn.registry import feature

OF_ALL_TYPES = (HANConv, HGTConv)
"""Convs that are called on all types at once."""


class OneType:
    """Of a graph without types; a subclass is of those with types.

    Attributes:
        predicts_memory: what training takes is predicted before it starts.
    """

    predicts_memory = True

    def check_model(self, module: torch.nn.Module, recompute: bool) -> None:
        """Raises :class:`UnsupportedModelError` for a model that cannot run on such a graph."""
        check_module(module)

    def bind(self, module: torch.nn.Module, shard: Any, world: World, make: Callable[[Shard], GraphContext]) -> Binding:
        """Returns the module bound to a rank's shard, of which `make` makes graphs."""
        return Binding(module, context_of(module, shard, world, make))

    def small_graph(self, types: Types) -> Callable[..., SmallGraph]:
        """Returns what makes small graphs that look like a graph of these types."""
        return small_graph

    def sizes(self, shard: Shard) -> dict[str, Any]:
        """Returns what a run's configuration tells of the graph."""
        return {"features": shard.batch.x.size(1)}


def kind_of(types: Types) -> OneType:
    """Returns what a run does on a graph of these types."""
    return feature("SeveralTypes")() if types.is_hetero else OneType()


def check_for_layout(module: torch.nn.Module, layout: LayoutSpec) -> None:
    """As :meth:`OneType.check_model`, before it is known whether the graph has types."""
    check_module(module, OF_ALL_TYPES if layout.takes_types else ())
