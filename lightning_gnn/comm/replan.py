"""The exchange whose plans are made anew where links turn out to be others than it was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.by_width import ExchangeByWidth, row_bytes_of
from lightning_gnn.comm.call import Call
from lightning_gnn.comm.group import World
from lightning_gnn.comm.plans import choices_of, planned, ways_of_all
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.console import without_bars
from lightning_gnn.partition.shard import HaloPlan, Ids
from lightning_gnn.planning import PricedPlan, Relation, Topology, fastest_plans, plan_cost
from lightning_gnn.planning.choice import fastest

GAIN = 0.2
"""Other plans are followed if exchanges take by so much less time, by the cost model over the links as measured."""


def seconds_of(found: Sequence[PricedPlan], widths: Mapping[int, int], topology: Topology) -> float:
    """Returns what exchanges take over `topology` if each follows the fastest plan by the costs that plans have.

    Args:
        found: plans, with their costs over the topology that they were made for.
        widths: how many exchanges there are of rows of so many bytes.
        topology: of the links as they are.
    """
    total = 0.0
    for row_bytes, count in widths.items():
        total += count * plan_cost(fastest(list(found), row_bytes).plan, topology).seconds(row_bytes)
    return total


class ReplannedExchange(ExchangeByWidth):
    """Follows the plans that are the fastest over a topology, as SPST has them, until :meth:`replan` finds faster ones.

    Args:
        topology: what is known of the links.
        rows, halos, offsets, world, meter: see :func:`~lightning_gnn.comm.plans.make_exchange`.
    """

    def __init__(
        self, topology: Topology, rows: HaloPlan, halos: Sequence[Ids], offsets: Ids, world: World, meter: Meter
    ) -> None:
        self._rows, self._relation = rows, Relation.from_halos(halos, offsets)
        self._found = planned(self._relation, topology) if world.rank == 0 else []
        self._widths = Counter[int]()
        ways = ways_of_all(self._found, self._relation, world)
        super().__init__(choices_of(ways, rows, world, meter), world, meter)

    def replan(self, topology: Topology) -> bool:
        """Follows the plans that are the fastest over the links as measured, if these are enough faster for the exchanges that
        there have been; returns whether. All ranks must call it between two steps; rank 0 decides.

        Sums of gradients that meet on other ranks than before may differ in their last bits.
        """
        found: list[PricedPlan] | None = None
        if self.world.rank == 0:
            with without_bars():  # beside Lightning's own
                found = fastest_plans(self._relation, topology)
            before, after = (seconds_of(each, self._widths, topology) for each in (self._found, found))
            what = f"Over the links as measured, exchanges take {1e3 * before:.3g} ms by the plans in use"
            if after > (1 - GAIN) * before:
                rank_zero_info(f"{what}, and {1e3 * after:.3g} ms by others: these stay")
                found = None
            else:
                rank_zero_info(f"{what}, and {1e3 * after:.3g} ms by those that are followed from now on")
                self._found = found
        self._widths.clear()
        ways = ways_of_all(found, self._relation, self.world)
        if ways:
            self.take(choices_of(ways, self._rows, self.world, self.meter))
        return bool(ways)

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        self._widths[row_bytes_of(x)] += 1
        return super().start_expand(x, halo, call)

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        self._widths[row_bytes_of(halo)] += 1
        return super().start_reduce(halo, call)
