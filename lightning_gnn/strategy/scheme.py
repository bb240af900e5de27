"""A communication scheme: who holds what, and how rows travel."""

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
"""Memory of what layers keep of the graph's own features, in times that of the features."""


class Scheme(ABC):
    """A communication scheme: who holds what, how rows get there, and what it is not exact in.

    What else can be said of a scheme is registered for its class, and optional: the scheme that the self-check runs
    (:func:`twin_of`), advice on memory (:func:`~lightning_gnn.strategy.memory.memory_advice`), and what one exchange costs
    (:func:`~lightning_gnn.extensions.plans.exchanges.exchange_costs`).

    Attributes:
        approximation: what makes training differ from that of one device, in a few words; empty if nothing does.
    """

    approximation: str = ""

    @abstractmethod
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        """Returns what each rank must hold.

        Args:
            world_size: P.
            num_hosts: machines, on which the ranks lie in order, equally many on each.
        """

    @abstractmethod
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        """Returns how rows get to and from this rank, whose `shard` has its tensors on the rank's device; runs on every rank.

        Of a module that reads out-edges it is asked twice, the first time for the graph whose edges go the other way.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Takes what :meth:`state_dict` gave, perhaps of another scheme."""


class EdgeCutScheme(Scheme):
    """Each rank holds all in-edges of its nodes; S fetches the halo rows directly from their owners, R is the identity."""

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return LayoutSpec.edge_cut(world_size)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        return HaloExchange(shard.plan, world, meter)


@dataclass(frozen=True)
class Run:
    """A call of the Trainer under a scheme, as checks look at it.

    Attributes:
        strategy: the name of the strategy's class.
        stages: whose steps must give the numbers of one device.
        on_batches: training steps are on batches, else on the whole graph.
        self_check, cache_input_aggregation, checkpoint_convs: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.
        device: of this rank.
        here: the ranks on this machine.
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

    @property
    def layout(self) -> LayoutSpec:
        return self.scheme.layout(self.world_size, self.machines)

    @property
    def keeps_activations(self) -> bool:
        """Whether its steps are a fit's on the whole graph, whose activations may not fit into memory."""
        return self.trainer.state.fn == TrainerFn.FITTING and not self.on_batches


@singledispatch
def twin_of(scheme: Scheme) -> Scheme:
    """Returns the scheme that the self-check runs on two ranks in one process, without what holds for the run's own ranks only.

    By default the scheme itself; ``@twin_of.register`` adds a function for a class of schemes.
    """
    return scheme


def bind_module(
    scheme: Scheme, module: torch.nn.Module, shard: Shard, world: World, meter: Meter, cache_input_aggregation: bool = True
) -> Binding:
    """Binds `module` to this rank's `shard`, whose rows travel as the scheme has them; runs on every rank.

    Args:
        cache_input_aggregation: layers keep what they make of the graph's own features alone, which is the same in every step.
    """
    make = partial(_context, scheme, world=world, meter=meter, cache_input_aggregation=cache_input_aggregation)
    return bind(module, shard, world, make)


def _context(scheme: Scheme, shard: Shard, world: World, meter: Meter, cache_input_aggregation: bool) -> GraphContext:
    """Returns what bound layers know of this rank; runs on every rank."""
    exchange, batch = scheme.exchange(shard, world, meter), shard.batch
    node_ids = target_ids = None
    if exchange.products is not None:
        node_ids = torch.from_numpy(shard.node_ids(world.rank)).to(world.device)
        target_ids = torch.from_numpy(shard.target_ids(world.rank)).to(world.device)
    return GraphContext(
        exchange,
        batch.x,
        batch.edge_index,
        batch.get("edge_weight"),
        TIMES_FEATURES if cache_input_aggregation else 0,
        None if shard.targets is not None else AnyRows(shard.n_id, shard.counts, world, meter),
        node_ids,
        target_ids,
        None if shard.targets is None else shard.targets[world.rank],
    )
