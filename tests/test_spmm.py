"""1D and 1.5D products on a process grid equal one device (gloo ranks, float64)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from common import assert_same, awkward_graph, single, train

from lightning_gnn.strategies.spmm import SpMM15DStrategy


@cache
def on_one_device(model: str) -> dict[str, Any]:
    return single(awkward_graph(), model)


def trained(rank: int, world_size: int, model: str, options: dict[str, Any], **others: Any) -> dict[str, Any]:
    strategy = SpMM15DStrategy(timeout=60, **options)
    return train(rank, world_size, awkward_graph(), model, strategy=strategy, **others)


@pytest.mark.parametrize("sparsity_aware", [True, False])
@pytest.mark.parametrize(("world_size", "replication"), [(2, 1), (2, 2), (3, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "graphconv", "gin_batch_norm", "sage_max"])
def test_trained_as_on_one_device(ranks, model, world_size, replication, sparsity_aware):
    options = {"replication": replication, "sparsity_aware": sparsity_aware, "self_check": model == "gcn"}
    for found in ranks.run(world_size, trained, model, options):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)
