"""The contract of a scheme: what its class has, and what is registered for it."""

from __future__ import annotations

import json
from typing import Any

from processes import REPOSITORY

from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.memory import memory_advice
from lightning_gnn.strategy.scheme import Scheme, twin_of

LIMITS = json.loads((REPOSITORY / ".ci" / "limits.json").read_text())


class Own(Scheme):
    """A scheme of a user's."""

    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return LayoutSpec("edge_cut", world_size)

    def exchange(self, shard: Any, world: Any, meter: Any) -> Any:
        raise NotImplementedError


class Derived(DGCLScheme):
    """A scheme that derives from one of ours."""


def test_a_scheme_has_few_members():
    members = {name for name in vars(Scheme) if not name.startswith("_")}
    assert members == {"approximation", "layout", "exchange", "state_dict", "load_state_dict"}
    assert len(members) <= LIMITS["members of Scheme"]


def test_what_nothing_is_registered_for_has_defaults():
    own = Own()
    assert twin_of(own) is own and memory_advice(own).rehearsed is own
    assert memory_advice(own).working_bytes([1, 2], 8) == 0 and "more machines" in memory_advice(own).less(2)


def test_what_is_registered_holds_for_derived_classes():
    twin = twin_of(Derived("replicate", topology=None, hops=2))
    assert isinstance(twin, DGCLScheme) and twin.hops > 2 and twin.plan == "replicate"
    assert "communicate instead" in memory_advice(Derived("replicate", topology=None, hops=2)).less(2)
