"""Cora and Amazon Computers over 2 and 3 ranks equal one device (gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import assert_same, single, train
from torch_geometric.datasets import Amazon, Planetoid


def dataset(shared: Any, name: str) -> tuple[Any, dict[str, Any]]:
    if name == "cora":
        return Planetoid(shared / "planetoid", "Cora"), {}
    return Amazon(shared / "amazon", "Computers"), {"split": (0.5, 0.25, 0.25)}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("name", ["cora", "computers"])
def test_equals_one_device(ranks, shared, name, model, world_size):
    source, options = dataset(shared, name)
    graph = source[0]
    graph.x = graph.x.double()
    sizes = (graph.x.size(1), int(graph.y.max()) + 1)
    run: dict[str, Any] = {"data": options, "sizes": sizes, "module": "user" if model == "sage" else "library"}
    expected = single(graph, model, **run)
    for found in ranks.run(world_size, train, graph, model, timeout=300, **run):
        metrics = {k: found["test"].pop(k) for k in list(found["test"]) if k in ("test_f1", "test_auroc")}
        wanted = {k: expected["test"][k] for k in metrics}
        torch.testing.assert_close(metrics, wanted, rtol=1e-5, atol=1e-6)  # torchmetrics works in float32
        reference = {**expected, "test": {k: v for k, v in expected["test"].items() if k not in metrics}}
        assert_same(_without_f1(found), _without_f1(reference), rtol=1e-8, atol=1e-9)


def _without_f1(result: dict[str, Any]) -> dict[str, Any]:
    skip = ("f1", "auroc", "acc")
    return {**result, "epochs": [{k: v for k, v in e.items() if not k.endswith(skip)} for e in result["epochs"]]}
