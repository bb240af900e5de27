"""Which exchange follows which plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans.topology import Hosts, Topology
from lightning_gnn.partition.shard import HaloPlan, Ids

PlanName = Literal["auto", "p2p", "spst", "swap"]

NO_TOPOLOGY = (
    '{} looks at a topology, and none is given. Pass topology="dgx1", "dgx1x2", "pcie8", a JSON file (docs/planning.md) or a '
    'Topology; without one, use plan="auto" or "p2p".'
)


def check_plan(plan: str, topology: object) -> None:
    """Raises ValueError for an unknown plan, or one that needs a topology where none is given."""
    if plan not in get_args(PlanName):
        raise ValueError(f"plan must be one of {', '.join(map(repr, get_args(PlanName)))} (got {plan!r}).")
    if plan == "spst" and topology is None:
        raise ValueError(NO_TOPOLOGY.format('plan="spst"'))


def make_exchange(
    plan: PlanName,
    topology: Topology | Hosts | None,
    rows: HaloPlan,
    halos: Sequence[Ids],
    offsets: Ids,
    world: World,
    meter: Meter,
) -> Exchange:
    """Returns this rank's exchange; all ranks must call it.

    Args:
        plan: ``"p2p"`` directly; ``"spst"`` along trees over `topology`, for rows of each width those that the cost model (DGCL
            section 5.1) finds the fastest, direct ones included; ``"swap"`` through host memory; ``"auto"`` as ``"spst"`` between
            ranks on the CPU, else directly.
        topology: of the ranks, or their machines, between which plans have two stages; None for links that are alike.
        rows: which rows go directly from and to this rank.
        halos: of each rank, the ids that it reads from others, ascending.
        offsets: first id of each rank and the end, ``[P + 1]``.
        world: the ranks.
        meter: where traffic is counted.

    Raises:
        ValueError: ``"p2p"`` for ranks that `topology` does not join, ``"swap"`` for ranks that share no memory.
    """
    if plan == "swap":
        from lightning_gnn.extensions.plans.swap import SwapExchange  # most runs send rows directly, and load no plans

        return SwapExchange(rows, halos[world.rank], offsets, world, meter)
    if topology is None or not looks_at_links(plan, topology, world):
        return HaloExchange(rows, world, meter)
    from lightning_gnn.extensions.plans.ways import follow_links

    return follow_links(plan, topology, rows, halos, offsets, world, meter)


def looks_at_links(plan: PlanName, topology: Topology | Hosts | None, world: World) -> bool:
    """Returns whether how rows travel depends on the topology.

    On devices relays have not been measured: trees are followed there where they are asked for by name.
    """
    if topology is None or world.size == 1:
        return False
    return plan != "auto" or (world.device.type == "cpu" and not topology.uniform)
