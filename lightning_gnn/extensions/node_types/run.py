"""What a run does on a graph with types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from lightning_gnn.checks.small_graph import SmallGraph
from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.node_types.binding import TypedBinding, TypedGraph, check_typed_module
from lightning_gnn.extensions.node_types.shards import TypedShard
from lightning_gnn.extensions.node_types.small_graph import typed_small_graph
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.partition.types import Types
from lightning_gnn.strategy.graph_kinds import OneType


class SeveralTypes(OneType):
    """Of a graph with types."""

    predicts_memory = False

    @override
    def check_model(self, module: torch.nn.Module, recompute: bool) -> None:
        if recompute:
            raise ValueError("recompute=True is for graphs of one type. Leave it out for a HeteroData.")
        check_typed_module(module)

    @override
    def bind(
        self, module: torch.nn.Module, shard: TypedShard, world: World, make: Callable[[Shard], GraphContext]
    ) -> Binding:
        return TypedBinding(module, TypedGraph(shard, world, make))

    @override
    def small_graph(self, types: Types) -> Callable[..., SmallGraph]:
        return partial(typed_small_graph, input_type=types.input_type)

    @override
    def sizes(self, shard: Shard) -> dict[str, Any]:
        types = shard.types
        return {
            "nodes_of_type": {name: int(counts.sum()) for name, counts in types.nodes.items()},
            "edges_of_type": {"__".join(name): int(counts.sum()) for name, counts in types.edges.items()},
        }
