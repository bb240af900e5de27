"""``dgcl``: an edge cut whose ranks fetch halo rows before each layer (graph allgather).

Source: DGCL, "An Efficient Communication Library for Distributed GNN Training" (EuroSys'21): sections 4 (what is exchanged), 5
(plans) and 6 (how ranks follow them).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_gnn.comm.exchange import HaloExchange, RowExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.planned import PlannedExchange
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.datamodules.store import Shard
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.planning import Plan, Relation, Topology, find_topology, rank_plan, spst
from lightning_gnn.strategies.base import GNNStrategy, Scheme

PlanName = Literal["auto", "p2p", "spst"]


class DGCLScheme(Scheme):
    """Each rank holds all in-edges of its nodes; S fetches the halo rows, R is the identity.

    Args:
        keep_constant, plan, topology: see :class:`DGCLStrategy`.

    Raises:
        ValueError: an unknown plan, or a plan without a topology.
    """

    def __init__(
        self,
        keep_constant: bool = True,
        plan: PlanName = "auto",
        topology: str | Path | Topology | None = None,
    ) -> None:
        if plan not in get_args(PlanName):
            raise ValueError(f"plan must be 'auto', 'p2p' or 'spst' (got {plan!r}).")
        if plan == "spst" and topology is None:
            raise ValueError(
                'plan="spst" plans for a topology, and none is given. Pass topology="dgx1", "dgx1x2", "pcie8", a JSON file '
                '(docs/planning.md) or a Topology; without one, use plan="auto" or "p2p".'
            )
        self.keep_constant, self.plan, self.topology = keep_constant, plan, topology

    @override
    def layout(self, world_size: int) -> LayoutSpec:
        """Returns what each rank must hold.

        Raises:
            ValueError: there is no such topology, or it is not for so many ranks. Here, since this is asked for before
                anything is partitioned or started.
        """
        self._topology(world_size)
        return LayoutSpec("edge_cut", world_size)

    @override
    def for_self_check(self) -> DGCLScheme:
        return DGCLScheme(self.keep_constant)

    @override
    def bind(self, module: torch.nn.Module, shard: Shard, world: World, meter: Meter) -> Binding:
        batch = shard.batch
        exchange = self._exchange(shard, world, meter)
        kept_widths = 4 if self.keep_constant else 0
        context = GraphContext(exchange, batch.x, batch.edge_index, batch.get("edge_weight"), kept_widths)
        return Binding(module, context)

    def plan_for(self, topology: Topology) -> Literal["p2p", "spst"]:
        """Returns how rows travel over `topology`."""
        return "p2p" if self.plan == "p2p" or (self.plan == "auto" and topology.uniform) else "spst"

    def _topology(self, world_size: int) -> Topology | None:
        return None if self.topology is None else find_topology(self.topology, world_size)

    def _exchange(self, shard: Shard, world: World, meter: Meter) -> RowExchange:
        topology = self._topology(world.size)
        if topology is None or self.plan_for(topology) == "p2p":
            return HaloExchange(shard.plan, world, meter)
        relation = Relation.from_halos(shard.halos, np.cumsum([0, *shard.counts]))
        # One rank plans, and the others get its trees, some bytes per group of nodes: were each to plan, machines whose
        # topology files or roundings differ would wait for each other forever.
        trees = None
        if world.rank == 0:
            began = time.perf_counter()
            made = spst(relation, topology)
            trees = made.bounds, made.parent, made.stage
            rank_zero_info(
                f"SPST over {topology.name}: an exchange moves {made.traffic.sum():,} rows in {made.num_stages} stages "
                f"({relation.pair_rows.sum():,} directly); planned in {time.perf_counter() - began:.1f} s"
            )
        plan = Plan("spst", relation, *world.broadcast_object(trees))  # type: ignore[misc]
        return PlannedExchange(rank_plan(plan, world.rank), world, meter)


class DGCLStrategy(GNNStrategy):
    """Full-graph training over an edge cut, exact; ``Trainer(strategy="dgcl")``.

    Rows travel directly from their owner to each rank that reads them, and exactly those rows; or, where links differ, along
    the trees of a plan, over other ranks too (docs/planning.md).

    Args:
        keep_constant: keep what the layers' sums over neighbours make of the graph's own features, which is the same in every
            step: at most four times the memory of the features. Without, it is computed and sent anew.
        plan: how rows travel: ``"p2p"`` directly; ``"spst"`` along shortest path spanning trees over `topology` (DGCL section
            5.2); ``"auto"`` directly if all links are alike or nothing is known of them, by SPST otherwise.
        topology: what the ranks are joined by, rank i being device i: ``"dgx1"``, ``"dgx1x2"``, ``"pcie8"``, ``"uniform"``, the
            path of a JSON file, or a topology; of larger ones the first devices are taken. None for links that are alike.
        **options: see :class:`~lightning_gnn.strategies.base.GNNStrategy`.

    Raises:
        ValueError: an unknown plan, or ``"spst"`` without a topology; and, once the number of ranks is known, a topology that is
            not there, is too small or is not connected.
    """

    strategy_name = "dgcl"

    def __init__(
        self,
        keep_constant: bool = True,
        plan: PlanName = "auto",
        topology: str | Path | Topology | None = None,
        **options: Any,
    ) -> None:
        super().__init__(DGCLScheme(keep_constant, plan, topology), **options)
