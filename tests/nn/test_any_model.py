"""Models that users build from PyG's parts train alike on ranks and on one device (gloo ranks, float64)."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from any_models import MODELS
from common import (
    CLASSES,
    FEATURES,
    UserModule,
    assert_same,
    awkward_graph,
    build,
    campaign,
    quiet_trainer,
    single,
    train,
)
from conftest import RankFailed
from torch_geometric.nn import GCNConv

from lightning_gnn import DGCLStrategy, GraphDataModule, SpMM15DStrategy, local_rows


@pytest.mark.parametrize("normalised", [False, True])
def test_together_they_equal_one_device(ranks, normalised):
    """All but compiled ones beside each other."""
    names = [name for name in MODELS if "compiled" not in name and ("norm" in name) == normalised]
    expected = single(awkward_graph(), names)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if normalised else {"rtol": 1e-8, "atol": 1e-10}
    for found in ranks.run(3, train, awkward_graph(), names, timeout=280):
        assert_same(found, expected, **tolerance)


@pytest.mark.parametrize("model", campaign(*MODELS))
def test_equals_one_device(ranks, model):
    graph = awkward_graph()
    expected = single(graph, model)
    world_size = 2 if "compiled" in model else 3  # each rank compiles
    for found in ranks.run(world_size, train, graph, model):
        if "norm" in model:  # a bias before BatchNorm has no gradient but rounding, which Adam scales up
            assert_same(found, expected, rtol=1e-5, atol=1e-5)
        else:
            assert_same(found, expected, rtol=1e-8, atol=1e-10)
        losses = [[epoch["train_loss"] for epoch in result["epochs"]] for result in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@pytest.mark.parametrize("strategy", [DGCLStrategy, SpMM15DStrategy])
def test_self_loops_on_one_rank_only(ranks, strategy):
    """Without any, edges with self-loops and without are the same: ranks must agree on whether they are."""
    graph = awkward_graph()
    keep = (graph.edge_index[0] != graph.edge_index[1]) | (graph.edge_index[0] < 10)
    for name in ("edge_index", "edge_weight", "edge_attr"):
        graph[name] = graph[name][..., keep] if name == "edge_index" else graph[name][keep]
    data = {"partition": (torch.arange(60) >= 25).long()}
    expected = single(graph, "commnet beside sage")
    for found in ranks.run(2, train, graph, "commnet beside sage", strategy=strategy, data=data, self_check=False):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


class Centred(torch.nn.Module):
    """Wrong on ranks, where it switches row semantics off: the mean is over one rank's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        with local_rows():
            x -= x.mean(0)
        return self.conv(x, edge_index)


class TooSmall(UserModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch.x) > 60:
            raise ValueError("no such graph")
        return super().training_step(batch, batch_idx)


def fit(rank: int, world_size: int, kind: Any, model: Any, **options: Any) -> list[str]:
    """Returns what the run says."""
    module = kind(model)
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("always")
        patched.setattr("lightning_gnn.strategy.self_checks.rank_zero_info", said.append)
        trainer = quiet_trainer(DGCLStrategy(timeout=60, **options), world_size, self_check=True)
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph(dtype=torch.float32)))
    return said + [str(warning.message) for warning in caught]


def test_the_self_check_runs_refuses_on_all_ranks_and_can_be_turned_off(ranks):
    fine, *_ = ranks.run(2, fit, UserModule, build("gcn"))
    steps = "training_step, validation_step, test_step, predict_step of UserModule"
    assert any(re.match(rf"Self-check passed in \d+\.\d\d s: {steps} match one device", text) for text in fine)
    with pytest.raises(RankFailed) as failed:
        ranks.run(3, fit, UserModule, Centred())
    assert len(failed.value.errors) == 3
    for line in failed.value.errors.values():
        assert line.startswith(
            "UnsupportedModelError: UserModule.training_step does not match single-device results"
        )
        assert "the output of 'model.conv' (GCNConv) differs by" in line
        assert "DGCLStrategy(self_check=False)" in line
    off, *_ = ranks.run(2, fit, UserModule, Centred(), self_check=False)
    assert not any("Self-check" in text for text in off)


def test_a_check_that_could_not_run_is_said(ranks):
    said, *_ = ranks.run(2, fit, TooSmall, build("gcn"))
    assert any("could not run TooSmall.training_step on a small graph (ValueError: no such graph)" in t for t in said)
