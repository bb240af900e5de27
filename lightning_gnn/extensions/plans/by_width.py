"""The exchange whose rows go one way or another by their width: narrow ones directly, wide ones over relays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans.plan import Plan
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange


class ExchangeByWidth(Exchange):
    """Sends rows by the exchange that takes the least predicted time for rows of their width (DGCL section 5.1).

    All ranks have the same prices and exchange rows of the same width, so they choose alike.

    Args:
        choices: exchanges of the same rows, each with its :attr:`~lightning_gnn.extensions.plans.plan_cost.PlanCost.price`.
        world, meter: see :class:`~lightning_gnn.comm.exchange.Exchange`.
    """

    in_stages = True

    def __init__(self, choices: Sequence[tuple[Exchange, tuple[float, float]]], world: World, meter: Meter) -> None:
        self._exchanges, self._prices = zip(*choices)
        first = self._exchanges[0]
        idle = all(exchange.idle for exchange in self._exchanges)
        super().__init__(first.num_owned, first.num_halo, world, meter, idle)

    def of(self, row_bytes: int) -> Exchange:
        """Returns the exchange of rows of so many bytes."""
        seconds = [fixed + row_bytes * each for fixed, each in self._prices]
        return self._exchanges[seconds.index(min(seconds))]

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        return self.of(_row_bytes(x)).start_expand(x, halo, call)

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        return self.of(_row_bytes(halo)).start_reduce(halo, call)


def relayed_by(exchange: Exchange | None, row_bytes: int) -> PlannedExchange | None:
    """Returns the exchange in stages by which rows of so many bytes travel; None if they travel directly."""
    if isinstance(exchange, ExchangeByWidth):
        exchange = exchange.of(row_bytes)
    return exchange if isinstance(exchange, PlannedExchange) else None


def route_of(exchange: Exchange | None, row_bytes: int) -> Plan | None:
    """Returns the plan by which rows of so many bytes travel, where it is kept; None if they travel directly."""
    relayed = relayed_by(exchange, row_bytes)
    return None if relayed is None else relayed.route


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()
