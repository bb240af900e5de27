"""Losses of several means, each over rows of its own, on ranks of which one has no training node (float64).

Test tiers: without ranks; ranks of one process; gloo ranks in the pool.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import Recorder, UserModule, awkward_graph, build, campaign, quiet_trainer
from torch_geometric.data import Data

from lightning_gnn import DGCLStrategy, GraphDataModule, UnsupportedModelError, check_parity, gather_halo
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.steps.weights import RowWeights

PART = (~awkward_graph().train_mask).long()
"""Rank 1 owns no training node."""


class SeveralMeans(UserModule):
    """Cross-entropy over labelled nodes, consistency over all, smoothness over edges."""

    def __init__(self, way: str) -> None:
        super().__init__(build("gcn").double())
        self.way = way

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        out = self.model(batch.x, batch.edge_index).log_softmax(1)
        rows, (source, target) = batch.train_mask & (batch.y >= 0), batch.edge_index
        soft = (out.detach() / 2).softmax(1)
        everywhere = F.kl_div(out, soft, reduction="none").sum(1).mean(0)
        everywhere = everywhere + 0.1 * (gather_halo(out)[source] - out[target]).square().mean()
        own = F.nll_loss(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)
        of_all = F.nll_loss(out[rows], batch.y[rows], reduction="none").mean()
        loss = (own if self.way == "beside the mask's" else of_all) + everywhere
        self.log_dict({"train_loss": loss, "everywhere": everywhere})
        return {"loss": loss, "loss_weight": rows.sum()} if self.way == "counted" else loss


@pytest.mark.parametrize("way", ["beside the mask's", "means alone", *campaign("counted")])
def test_each_mean_is_over_the_rows_of_all_ranks(way):
    data = GraphDataModule(awkward_graph(), partition=PART)
    strategies = [DGCLStrategy(), DGCLStrategy(plan="replicate", num_hops=3), "spmm_15d"]
    report = check_parity(SeveralMeans(way), data, strategies)
    assert report.ok and all(each.verdict == "same" for each in report.schemes), report
    assert max(max(filter(None, each.differences.values())) for each in report.schemes) < 1e-13


def fit(rank: int, world_size: int, strategy: Any) -> Any:
    module, recorder = SeveralMeans("own"), Recorder()
    trainer = quiet_trainer(strategy or DGCLStrategy(timeout=60), world_size, callbacks=[recorder])
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph(), partition=PART))
    return recorder.epochs, recorder.gradients, module.state_dict()


def test_training_is_that_of_one_device(ranks):
    expected = fit(0, 1, "auto")
    for found in ranks.run(2, fit, None):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # torchmetrics computes F1 in float32
        torch.testing.assert_close(found[1:], expected[1:], rtol=1e-9, atol=1e-11)


def test_helpers_work_on_the_graph_of_the_run_that_is_going_on(context):
    """Also when an earlier one, which has failed, is collected meanwhile; and after another has been tried out in this thread."""
    failed = graph_in_use(None)
    failed.__enter__()
    with graph_in_use(context):
        del failed
        gc.collect()
        with graph_in_use(None, this_thread_only=True):
            assert gather_halo(torch.ones(7, 1)).shape == (7, 1)
        with pytest.raises(UnsupportedModelError, match="gather_halo"):
            gather_halo(torch.ones(7, 1))
    assert gather_halo(torch.ones(7, 1)).shape == (7, 1)


def test_a_weight_that_may_count_a_row_that_stands_in_is_refused_with_what_to_return():
    """Rank 1 has no seed, and a row in its mask that stands in."""

    def gather(own: torch.Tensor, operation: str) -> torch.Tensor:
        return torch.stack([own.new_tensor([3, 0, 0]), own])

    def scale(weight: int) -> Any:
        module: Any = SimpleNamespace(_current_fx_name="training_step")
        world: Any = SimpleNamespace(rank=1, size=2, all_gather=gather)
        weights = RowWeights(module, world)
        weights.enter((2, 0), 1, (5, 7))
        assert weights.take({"loss": None, "loss_weight": weight})
        return weights.loss_scale("mean"), weights.counts

    with pytest.raises(ValueError, match="Rank 1 .* loss_weight=2 .* Return loss_weight=0 where batch.seed_counts"):
        scale(2)
    assert scale(0) == (0.0, [3.0, 0.0])


def with_default_device(rank: int, world_size: int, device: str) -> str:
    """Returns what a fit is refused with."""
    torch.set_default_device(device)
    try:
        trainer = quiet_trainer("dgcl", world_size, max_epochs=1)
        trainer.fit(UserModule(build("gcn", 12, 5)).double(), datamodule=GraphDataModule(awkward_graph()))
    except ValueError as error:
        return str(error)
    finally:
        torch.set_default_device(None)
    return ""


def test_a_default_device_with_a_number_is_refused(ranks):
    """Metrics that are made in steps would not be seen."""
    for text in ranks.run(2, with_default_device, "cpu:0"):
        assert "torch.set_default_device('cpu:0') sets the same device on each rank" in text
        assert "torch.set_default_device('cpu')" in text
    assert ranks.run(2, with_default_device, "cpu") == ["", ""]
