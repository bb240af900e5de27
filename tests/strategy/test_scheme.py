"""The contract of a scheme: what its class has, and what is registered for it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch.strategies import ParallelStrategy
from processes import REPOSITORY

from lightning_gnn import DGCLStrategy
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.base import GNNStrategy
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


def members_of(kind: type) -> set[str]:
    """Names the methods and properties of a strategy and all its bases that Lightning's strategies have not."""
    ours = [vars(each) for each in kind.__mro__ if each.__module__.startswith("lightning_gnn.")]
    kinds = property, classmethod, staticmethod
    found = {name for each in ours for name, value in each.items() if callable(value) or isinstance(value, kinds)}
    return found - set(dir(ParallelStrategy))


def takers_of_strategies() -> Iterator[str]:
    """Names the functions of the core, but for launchers, that are given a strategy: they are methods of it by another name."""
    package = REPOSITORY / "lightning_gnn"
    outer = ("extensions", "functional", "launching", "strategies", "testing.py", "tools")
    for file in package.rglob("*.py"):
        if file.relative_to(package).parts[0] in outer:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                of = {each.arg: ast.unparse(each.annotation or ast.Constant("")) for each in node.args.args}
                if any("Strategy" in kind or (name == "strategy" and kind != "str") for name, kind in of.items()):
                    yield f"{file.stem}.{node.name}"


@pytest.mark.parametrize("kind", [GNNStrategy, DGCLStrategy])
def test_a_strategy_has_few_methods_beside_those_of_lightning(kind):
    """Limits are only lowered."""
    found = members_of(kind) | set(takers_of_strategies())
    assert {"begin_stage", "world", "run_config.log_run"} <= found
    assert len(found) <= LIMITS["methods of the strategy"], sorted(found)


def test_a_strategy_has_its_parts_from_the_constructor_on():
    strategy = DGCLStrategy()
    assert strategy.steps.state() == {} and strategy.steps.gradient_seconds == (0.0, 0.0)
    assert strategy.steps.weights is None and strategy.steps.binding.context.propagations == {}
    strategy.steps.end()
    with strategy.ranks.turn():
        strategy.ranks.check([], 1)


def test_what_nothing_is_registered_for_has_defaults():
    own = Own()
    assert twin_of(own) is own and memory_advice(own).rehearsed is own
    assert memory_advice(own).working_bytes([1, 2], 8) == 0 and "more machines" in memory_advice(own).less(2)


def test_what_is_registered_holds_for_derived_classes():
    twin = twin_of(Derived("replicate", topology=None, num_hops=2))
    assert isinstance(twin, DGCLScheme) and twin.num_hops > 2 and twin.plan == "replicate"
    assert "communicate instead" in memory_advice(Derived("replicate", topology=None, num_hops=2)).less(2)
