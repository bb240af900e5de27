"""A trained checkpoint on another graph, which has neither labels nor masks: on ranks, on one device, and in plain PyG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from common import CLASSES, FEATURES, awkward_graph, build, quiet_trainer
from torch_geometric.data import Data

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier


def new_graph() -> Data:
    graph = awkward_graph(num_nodes=47, seed=8, dtype=torch.float32)
    return Data(x=graph.x, edge_index=graph.edge_index)


def trained(rank: int, world_size: int, folder: Path) -> Path:
    """Trains on the first graph and saves a checkpoint."""
    module = NodeClassifier(build("gcn_batch_norm"), lr=0.02)
    trainer = quiet_trainer(DGCLStrategy(timeout=60) if world_size > 1 else "auto", world_size)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph(dtype=torch.float32)))
    trainer.save_checkpoint(folder / "model.ckpt")
    return folder / "model.ckpt"


def predict(rank: int, world_size: int, checkpoint: Path, source: Any, way: str) -> torch.Tensor:
    model = build("gcn_batch_norm", seed=99)  # other weights, to be replaced
    trainer = quiet_trainer(DGCLStrategy(timeout=60) if world_size > 1 else "auto", world_size)
    data = GraphDataModule(source)
    if way == "load_from_checkpoint":
        module = NodeClassifier.load_from_checkpoint(checkpoint, model=model)
        assert module.lr == 0.02
        return trainer.predict(module, datamodule=data)[0]
    return trainer.predict(NodeClassifier(model), datamodule=data, ckpt_path=checkpoint)[0]


@pytest.mark.parametrize("way", ["load_from_checkpoint", "ckpt_path"])
def test_every_world_size_predicts_alike(ranks, tmp_path, way):
    [checkpoint, *_] = ranks.run(3, trained, tmp_path)
    graph = new_graph()
    module = NodeClassifier.load_from_checkpoint(checkpoint, model=build("gcn_batch_norm", seed=99)).eval()
    with torch.no_grad():
        plain = module.model(graph.x, graph.edge_index)  # a PyG model like any other
    assert plain.shape == (47, CLASSES)
    torch.testing.assert_close(predict(0, 1, checkpoint, graph, way), plain)
    for world_size in (2, 4):
        for found in ranks.run(world_size, predict, checkpoint, graph, way):
            torch.testing.assert_close(found, plain)


def test_a_graph_by_its_path(ranks, tmp_path):
    """Partitioned in a process of its own, which must know that no masks are needed."""
    [checkpoint, *_] = ranks.run(2, trained, tmp_path)
    expected = predict(0, 1, checkpoint, new_graph(), "ckpt_path")
    for found in ranks.run(2, predict, checkpoint, "test_new_graph.new_graph", "ckpt_path"):
        torch.testing.assert_close(found, expected)


def test_training_on_it_says_what_is_missing():
    with pytest.raises(ValueError, match="no train_mask"):
        quiet_trainer("auto", 1).fit(NodeClassifier(build("gcn")), datamodule=GraphDataModule(new_graph()))
    assert new_graph().x.size(1) == FEATURES
