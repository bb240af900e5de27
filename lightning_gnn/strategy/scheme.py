"""Communication schemes: the layout of the graph and the exchange between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategy.graph_kinds import bind

TIMES_FEATURES = 4
"""Maximal memory of cached input aggregations, as a multiple of the memory of the features."""


class Scheme(ABC):
    """Communication scheme: the layout, the exchange, and a description of approximations.

    Further properties of a scheme are optional, and registered for its class: the scheme of the self-check (:func:`twin_of`), its
    memory model (:func:`~lightning_gnn.strategy.memory.memory_advice`), and the cost of one exchange
    (:func:`~lightning_gnn.extensions.plans.exchanges.exchange_costs`).

    Attributes:
        approximation: short description of the differences from training on one device; empty if there are none.
    """

    approximation: str = ""

    @abstractmethod
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        """Returns the layout of the shards.

        Args:
            world_size: number of ranks, P.
            num_hosts: number of machines; each has equally many consecutive ranks.
        """

    @abstractmethod
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        """Returns the exchange of this rank, with the tensors of `shard` on the rank's device; called on every rank.

        For a module that uses out-edges it is called twice, first for the graph with reversed edges.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load the result of :meth:`state_dict`, possibly of another scheme."""


class EdgeCutScheme(Scheme):
    """Edge cut: each rank has all in-edges of its local nodes.

    S receives halo nodes directly from their owners. R is the identity.
    """

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return LayoutSpec.edge_cut(world_size)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        return HaloExchange(shard.plan, world, meter)


@dataclass(frozen=True)
class Run:
    """Call of the Trainer under a scheme, as input of checks.

    Attributes:
        strategy: name of the strategy's class.
        stages: stages whose steps must give the results of one device.
        on_batches: whether training steps use mini-batches; otherwise the whole graph.
        self_check, cache_input_aggregation, checkpoint_convs: arguments of :class:`~lightning_gnn.strategy.base.GNNStrategy`.
        device: device of this rank.
        here: ranks on this machine.
        layout: layout of the graph.
        samples: small graphs with the run's samples, see :class:`~lightning_gnn.extensions.samples.small_graph.SampleGraphs`;
            None without samples.
    """

    strategy: str
    scheme: Scheme
    module: pl.LightningModule
    trainer: pl.Trainer
    stages: Sequence[str]
    on_batches: bool
    self_check: bool
    cache_input_aggregation: bool
    checkpoint_convs: bool
    device: torch.device
    world_size: int
    machines: int
    here: range
    layout: LayoutSpec
    samples: Any

    @property
    def keeps_activations(self) -> bool:
        """True if the run fits with steps on a rank's whole part of the graph, whose activations may exceed memory."""
        whole = not self.on_batches if self.samples is None else self.samples.trains
        return self.trainer.state.fn == TrainerFn.FITTING and whole


@singledispatch
def twin_of(scheme: Scheme) -> Scheme:
    """Returns the scheme of the self-check, for two ranks in one process, without settings for the ranks of the run.

    The default is the scheme itself. ``@twin_of.register`` adds a function for a class of schemes.
    """
    return scheme


def bind_module(
    scheme: Scheme, module: torch.nn.Module, shard: Shard, world: World, meter: Meter, cache_input_aggregation: bool = True
) -> Binding:
    """Bind `module` to this rank's `shard`, with the exchange of the scheme; called on every rank.

    Args:
        cache_input_aggregation: whether layers cache results that depend only on the graph's input features.
    """
    make = partial(make_context, scheme, world=world, meter=meter, cache_input_aggregation=cache_input_aggregation)
    return bind(module, shard, world, make)


def make_context(scheme: Scheme, shard: Shard, world: World, meter: Meter, cache_input_aggregation: bool) -> GraphContext:
    """Returns the graph context of this rank for bound layers; called on every rank."""
    exchange, batch = scheme.exchange(shard, world, meter), shard.batch
    node_ids = target_ids = None
    if exchange.products is not None:
        node_ids = torch.from_numpy(shard.node_ids(world.rank)).to(world.device)
        target_ids = torch.from_numpy(shard.target_ids(world.rank)).to(world.device)
    graph = batch.x, batch.edge_index, batch.get("edge_weight"), TIMES_FEATURES if cache_input_aggregation else 0
    if shard.targets is not None:
        return GraphContext(exchange, *graph, None, node_ids, target_ids, shard.targets[world.rank])
    return GraphContext(exchange, *graph, AnyRows(shard.n_id, shard.counts, world, meter), node_ids, target_ids, None)
