"""The parts of a run that depend on whether its graph has node and edge types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.nn.bind import Binding, check_module, context_of
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.registry import feature

if TYPE_CHECKING:
    from lightning_gnn.checks.small_graph import SmallGraph


def check_model(module: torch.nn.Module, of: Shard | Cut, checkpoint_convs: bool) -> None:
    """Raises :class:`UnsupportedModelError` for a model that cannot run on the graph."""
    if checkpoint_convs and not supports_checkpoints(of):
        raise ValueError("checkpoint_convs=True does not support HeteroData. Remove it.")
    (feature("check_typed_module") if of.types.is_hetero else check_module)(module)


def bind(module: torch.nn.Module, shard: Shard, world: World, make: Callable[[Shard], GraphContext]) -> Binding:
    """Returns the module bound to a rank's shard; `make` creates the graph context."""
    if shard.types.is_hetero:
        return feature("TypedBinding")(module, feature("TypedGraph")(shard, world, make))
    return Binding(module, context_of(module, shard, world, make))


def make_small_graph(shard: Shard, samples: Any = None, stage: str = "fit", **options: Any) -> Callable[..., SmallGraph]:
    """Returns a function that makes small graphs with the attributes of a shard, and with samples of a stage if given.

    Args:
        shard: part of the graph.
        samples, stage, **options: see :class:`~lightning_gnn.extensions.samples.small_graph.SampleGraphs` and its `maker`.
    """
    from lightning_gnn.checks.small_graph import small_graph

    types = shard.types
    make = partial(feature("typed_small_graph"), input_type=types.input_type) if types.is_hetero else small_graph
    return make if samples is None else samples.maker(shard, stage, make=make, **options)  # type: ignore[no-any-return]


def supports_checkpoints(of: Shard | Cut) -> bool:
    """Returns whether strategies support ``checkpoint_convs``."""
    return not of.types.is_hetero


def describe_graph(shard: Shard) -> dict[str, Any]:
    """Returns the entries of a run's configuration for the graph: its number of features, or its types."""
    types = shard.types
    if not types.is_hetero:
        return {"features": shard.batch.x.size(1)}
    return {
        "nodes_of_type": {name: int(counts.sum()) for name, counts in types.nodes.items()},
        "edges_of_type": {"__".join(name): int(counts.sum()) for name, counts in types.edges.items()},
    }


def check_for_layout(module: torch.nn.Module, layout: LayoutSpec) -> None:
    """Raises as :func:`check_model`, before the types of the graph are available."""
    check_module(module, layout.takes_types)
