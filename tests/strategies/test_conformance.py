"""Every strategy keeps the contract of schemes; a scheme that does not is told what it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies import GNNStrategy, Scheme, registered
from lightning_gnn.testing import conformance

OWN = [name for name, kind in registered().items() if name == kind.strategy_name != "auto_gnn"]


@pytest.mark.parametrize("name", OWN)
def test_our_strategies_conform(name):
    ranks = {"spmm_2d": (4,), "spmm_3d": (8,)}.get(name, (2, 3))
    done = conformance(registered()[name](), ranks)
    assert len(done) == 5 * len(ranks)


class Broken(HaloExchange):
    """Keeps the contract but for what subclasses break."""


class Lost(Broken):
    """The first halo row is not brought."""

    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        wait = super().start_expand(x, halo, call)

        def finish() -> None:
            wait()
            halo[:1] = 0

        return finish


class Twice(Broken):
    """What comes back is added twice."""

    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        finish = super().start_reduce(halo, call)

        def twice(own: Tensor) -> None:
            before = own.clone()
            finish(own)
            own += own - before

        return twice


class Module(Broken):
    """Its state is more than plain values."""

    def state_dict(self) -> dict[str, Any]:
        return {"plan": self.plan}


class BrokenScheme(Scheme):
    def __init__(self, kind: type[Exchange], approximation: str) -> None:
        self.kind, self.approximation = kind, approximation

    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        if world_size == 5:
            raise ValueError("not for five")
        return LayoutSpec("edge_cut", world_size)

    def exchange(self, shard: Any, world: Any, meter: Any) -> Exchange:
        return self.kind(shard.plan, world, meter)


class BrokenStrategy(GNNStrategy):
    def __init__(self, kind: type[Exchange], approximation: str = "broken, so that steps are not compared") -> None:
        super().__init__(BrokenScheme(kind, approximation))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Lost, "start_expand brings other rows"),
        (Twice, "start_reduce adds something else"),
        (Module, "the exchange's state_dict.. has more than plain values"),
    ],
)
def test_what_is_broken_is_told(kind, says):
    with pytest.raises(AssertionError, match=says):
        conformance(BrokenStrategy(kind), (2,))


def test_steps_that_differ_are_told():
    with pytest.raises(AssertionError, match="GCN. on 2 ranks"):
        conformance(BrokenStrategy(Lost, approximation=""), (2,))


def test_a_strategy_for_no_number_of_ranks():
    with pytest.raises(AssertionError, match="BrokenStrategy runs on none of 5 ranks"):
        conformance(BrokenStrategy(Broken), (5,))
    assert torch.is_grad_enabled()
