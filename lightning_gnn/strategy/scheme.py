"""A communication scheme: what a strategy needs to know of how rows travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload, edge_exchange
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategy.graph_kinds import bind

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Scheme(ABC):
    """A communication scheme: who holds what, how rows get there, and what it is not exact in.

    Attributes:
        approximation: what makes training differ from that of one device, in a few words; empty if nothing does.
        keep_constant: keep what layers make of the graph's own features alone, which is the same in every step.
        survives_lost_ranks: the other ranks may go on when one has failed.
        restarts: how often each of them that was killed is started again, where they may go on without.
        takes_no_codec: why rows cannot be encoded; empty if they can.
        keeps_layers: why what layers keep is not made again; empty if it can be.
        follows_plan: rows follow a plan over a topology, the scheme's attribute ``topology``.
    """

    approximation: str = ""
    keep_constant = True
    survives_lost_ranks = False
    restarts = 0
    takes_no_codec = ""
    keeps_layers = ""
    follows_plan = False

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

    def context(self, shard: Shard, world: World, meter: Meter) -> GraphContext:
        """Returns what bound layers know of this rank; runs on every rank."""
        exchange, batch = self.exchange(shard, world, meter), shard.batch
        node_ids = target_ids = None
        if exchange.make_matrix is not None:
            node_ids = torch.from_numpy(shard.node_ids(world.rank)).to(world.device)
            target_ids = torch.from_numpy(shard.target_ids(world.rank)).to(world.device)
        rows = None if shard.targets is not None else AnyRows(shard.n_id, shard.counts, world, meter)
        return GraphContext(
            exchange,
            batch.x,
            batch.edge_index,
            batch.get("edge_weight"),
            4 if self.keep_constant else 0,
            rows,
            node_ids,
            target_ids,
            None if shard.targets is None else shard.targets[world.rank],
        )

    def bind(self, module: torch.nn.Module, shard: Shard, world: World, meter: Meter) -> Binding:
        """Binds `module` to this rank's `shard`; runs on every rank."""
        make = partial(self.context, world=world, meter=meter)
        return bind(module, shard, world, make)

    def unbind(self) -> None:  # noqa: B027
        """Forgets what :meth:`bind` has kept; the model has been released, and the run is over."""

    def working_bytes(self, counts: Sequence[int], row_bytes: int) -> int:
        """Returns what a rank needs beside its part of the graph, at the least.

        Args:
            counts: owned rows of each rank.
            row_bytes: of a node's features.
        """
        return 0

    def less_memory(self, world_size: int) -> str:
        """Says how a run takes less memory."""
        return "Use more machines (num_nodes), fewer columns, or float16 features."

    def take_loss(self, part: torch.Tensor) -> None:  # noqa: B027
        """Takes this rank's part of a loss before its backward, a scalar; those of all ranks sum to one device's loss."""

    def callbacks(self, world: World) -> Sequence[pl.Callback]:
        """Returns callbacks for a run whose ranks are `world`; asked for once the model is bound."""
        return ()

    def followed(self) -> dict[str, Any]:
        """Returns what rows follow, as plain values for loggers; known once the model is bound. Nothing if arguments tell."""
        return {}

    def picture(self, shard: Shard) -> Figure | None:
        """Returns a picture of what :meth:`followed` tells of; None for no picture. On one rank."""
        return None

    def exchanges(self, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
        """Returns the ways to exchange rows that ``lightning-gnn plan`` shows, one of them followed; no ranks are there.

        By default one, without a name: rows go directly from their owners to the ranks whose edges need them.
        """
        return [edge_exchange("", work, topology, followed=True)]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Takes what :meth:`state_dict` gave, perhaps of another scheme."""

    def for_memory(self) -> Scheme:
        """Returns the scheme whose steps on two ranks tell what each rank of this one keeps in memory."""
        return self.for_self_check()

    def for_self_check(self) -> Scheme:
        """Returns the scheme for two ranks in one process, without what holds for the run's own ranks only."""
        return self
