"""Cora and Amazon Computers over 2 to 4 ranks equal one device (gloo ranks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from common import Recorder, assert_same, campaign, quiet_trainer, single, train
from torch_geometric.datasets import Amazon, Planetoid
from torch_geometric.nn.models import GCN

from lightning_gnn import (
    DGCLStrategy,
    GraphDataModule,
    NodeClassifier,
    SpMM2DStrategy,
    SpMM15DStrategy,
    VertexCutStrategy,
)


def dataset(shared: Any, name: str) -> tuple[Any, dict[str, Any]]:
    if name == "cora":
        return Planetoid(shared / "planetoid", "Cora"), {}
    return Amazon(shared / "amazon", "Computers"), {"split": (0.5, 0.25, 0.25)}


COLUMNS = 32  # of the features: more would take longer, and be no harder to get right


@pytest.fixture(scope="module", params=["cora", *campaign("computers")])
def graph(request, shared) -> tuple[Any, dict[str, Any]]:
    source, options = dataset(shared, request.param)
    graph = source[0]
    graph.x = graph.x[:, :COLUMNS].double()
    sizes = (COLUMNS, int(graph.y.max()) + 1)
    return graph, {"data": options, "sizes": sizes, "trainer": {"max_epochs": 2}}


@pytest.fixture(scope="module", params=["gcn", *campaign("sage", "gat")])
def trained(request, graph) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A model's name, how it is trained, and what comes out on one device."""
    run = {**graph[1], "module": "user" if request.param == "sage" else "library"}
    return request.param, run, single(graph[0], request.param, **run)


def assert_equals_one_device(found: dict[str, Any], expected: dict[str, Any]) -> None:
    metrics = {k: found["test"].pop(k) for k in list(found["test"]) if k in ("test_f1", "test_auroc")}
    wanted = {k: expected["test"][k] for k in metrics}
    torch.testing.assert_close(metrics, wanted, rtol=1e-5, atol=1e-6)  # torchmetrics works in float32
    reference = {**expected, "test": {k: v for k, v in expected["test"].items() if k not in metrics}}
    assert_same(_without_f1(found), _without_f1(reference), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("world_size", [2, *campaign(3)])
def test_equals_one_device(ranks, graph, trained, world_size):
    model, run, expected = trained
    for found in ranks.run(world_size, train, graph[0], model, timeout=300, **run):
        assert_equals_one_device(found, expected)


PRODUCTS = {
    "1.5d": (SpMM15DStrategy, {}),
    "1.5d in blocks": (SpMM15DStrategy, {"replication_factor": 2, "sparsity_aware": False}),
    "2d": (SpMM2DStrategy, {}),
}


@pytest.mark.parametrize("products", [*campaign("1.5d", "1.5d in blocks"), "2d"])
@pytest.mark.parametrize("trained", ["gcn", *campaign("sage")], indirect=True)
def test_products_equal_one_device(ranks, graph, trained, products):
    model, run, expected = trained
    strategy, options = PRODUCTS[products]
    for found in ranks.run(
        4, train, graph[0], model, timeout=300, strategy=strategy, options=options, self_check=False, **run
    ):
        assert_equals_one_device(found, expected)


def _without_f1(result: dict[str, Any]) -> dict[str, Any]:
    skip = ("f1", "auroc", "acc")
    return {**result, "epochs": [{k: v for k, v in e.items() if not k.endswith(skip)} for e in result["epochs"]]}


def curves(rank: int, world_size: int, root: Path, strategies: list[Any]) -> list[list[float]]:
    """Returns the training and validation losses of ten epochs on all of Cora under each strategy."""
    graph = Planetoid(root, "Cora")[0]
    graph.x = graph.x[:, :COLUMNS].double()
    found = []
    for strategy in strategies:
        L.seed_everything(2, verbose=False)
        model = GCN(COLUMNS, 16, num_layers=2, out_channels=7, norm="batch_norm", bias=False)
        recorder = Recorder()
        made = strategy(timeout=60, self_check=False) if isinstance(strategy, type) else strategy
        trainer = quiet_trainer(made, world_size, max_epochs=10, callbacks=[recorder])
        trainer.fit(NodeClassifier(model.double(), num_classes=7), datamodule=GraphDataModule(graph))
        found.append([epoch[name] for epoch in recorder.epochs for name in ("train_loss", "val_loss")])
    return found


@pytest.mark.campaign
def test_loss_curves_of_1_2_4_and_8_ranks_agree(ranks, shared):
    """Epoch by epoch, in float64: rounding must not grow while the weights part."""
    Planetoid(shared / "planetoid", "Cora")  # processed once
    [expected] = curves(0, 1, shared / "planetoid", ["auto"])
    assert len(expected) == 20 and expected[-2] < 0.8 * expected[0]
    for world_size in (1, 2, 4, 8):
        kinds = [DGCLStrategy, VertexCutStrategy][: 1 if world_size == 8 else 2]  # eight on two cores take their time
        for found in ranks.run(world_size, curves, shared / "planetoid", kinds, timeout=300):
            for losses in found:
                assert losses == pytest.approx(expected, rel=1e-9), f"{world_size} ranks"
