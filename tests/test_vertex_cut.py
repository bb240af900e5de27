"""Training over a vertex cut equals one device, and its caches agree about what was sent (gloo ranks, float64)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from common import assert_same, awkward_graph, single, train

from lightning_gnn import VertexCutStrategy


@cache
def on_one_device(model: str, module: str = "library") -> dict[str, Any]:
    return single(awkward_graph(), model, module=module)


def trained(rank: int, world_size: int, model: str, options: dict[str, Any], **others: Any) -> dict[str, Any]:
    return train(rank, world_size, awkward_graph(), model, strategy=VertexCutStrategy, options=options, **others)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_trained_as_on_one_device(ranks, world_size):
    for found in ranks.run(world_size, trained, "gcn", {}):
        assert_same(found, on_one_device("gcn"), rtol=1e-8, atol=1e-10)


MODELS = ["graphconv", "sage", "sage_max", "gat", "gatv2", "transformer", "gat_edges", "gin_batch_norm", "own", "pna"]


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_conv(ranks, model):
    for found in ranks.run(3, trained, model, {"partition": "random"}, self_check=False):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)
