"""Mini-batch training over ranks: whole neighbourhoods give the numbers of the full graph, and no rank waits in vain."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from common import (
    assert_same,
    awkward_graph,
    single,
    train,
)

from lightning_gnn import SamplingStrategy
from lightning_gnn.comm.group import World

WHOLE: dict[str, Any] = {"fanouts": [-1, -1], "batch_size": 1000}


@cache
def on_one_device(model: str, module: str = "library") -> dict[str, Any]:
    return single(awkward_graph(), model, module=module)


def trained(rank: int, world_size: int, model: str, options: dict[str, Any], apart: bool, **others: Any) -> Any:
    if apart:  # as if every rank were on a machine of its own
        World.ranks_here = lambda world: [world.rank]  # type: ignore[method-assign]
    try:
        graph = others.pop("graph", None) or awkward_graph()
        return train(rank, world_size, graph, model, strategy=SamplingStrategy, options=options, **others)
    finally:
        if apart:
            World.ranks_here = RANKS_HERE  # type: ignore[method-assign]


RANKS_HERE = World.ranks_here


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("world_size", "model"), [(1, "sage"), (2, "sage"), (3, "gat"), (4, "gin")])
def test_whole_neighbourhoods_in_one_batch_are_the_full_graph(ranks, world_size, model, apart):
    for found in ranks.run(world_size, trained, model, WHOLE, apart, self_check=model == "sage"):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_users_module_with_and_without_prefetching(ranks, prefetch):
    options = {**WHOLE, "prefetch": prefetch, "shared_memory": False}
    for found in ranks.run(2, trained, "sage", options, True, module="user", self_check=False):
        assert_same(found, on_one_device("sage", "user"), rtol=1e-8, atol=1e-10)
