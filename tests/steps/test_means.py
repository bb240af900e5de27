"""Losses of several means, each over rows of its own, on ranks of which one has no training node (float64).

Test tiers: without ranks; ranks of one process; gloo ranks in the pool.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import FEATURES, Recorder, UserModule, awkward_graph, build, campaign, quiet_trainer
from torch_geometric.data import Data

from lightning_gnn import (
    DGCLStrategy,
    GraphDataModule,
    UnsupportedModelError,
    check_parity,
    expand,
    labelled,
    mean_over_ranks,
)
from lightning_gnn.data.shards import split_graph
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.partition.layout import LayoutSpec

PART = (~awkward_graph().train_mask).long()
"""Rank 1 owns no training node."""


class SeveralMeans(UserModule):
    """Cross-entropy over labelled nodes, consistency over all, smoothness over edges."""

    def __init__(self, way: str) -> None:
        super().__init__(build("gcn").double())
        self.way = way

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        out = self.model(batch.x, batch.edge_index).log_softmax(1)
        rows, (source, target) = labelled(batch, "train_mask"), batch.edge_index
        soft = (out.detach() / 2).softmax(1)
        everywhere = mean_over_ranks(F.kl_div(out, soft, reduction="none").sum(1))
        everywhere = everywhere + 0.1 * mean_over_ranks((expand(out)[source] - out[target]).square()).mean()
        own = F.nll_loss(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)
        of_all = mean_over_ranks(F.nll_loss(out[rows], batch.y[rows], reduction="none"))
        loss = (own if self.way == "beside the mask's" else of_all) + everywhere
        self.log_dict({"train_loss": loss, "everywhere": everywhere})
        weights = {"counted": rows.sum(), "each rank alike": 1}
        return {"loss": loss, "loss_weight": weights[self.way]} if self.way in weights else loss


@pytest.mark.parametrize("way", ["beside the mask's", "counted", *campaign("means alone", "each rank alike")])
def test_each_mean_is_over_the_rows_of_all_ranks(way):
    data = GraphDataModule(awkward_graph(), partition=PART)
    strategies = [DGCLStrategy(), DGCLStrategy(plan="replicate", hops=3), "spmm_15d"]
    report = check_parity(SeveralMeans(way), data, strategies)
    assert report.ok and all(each.verdict == "same" for each in report.schemes), report
    assert max(max(filter(None, each.differences.values())) for each in report.schemes) < 1e-13


def test_a_sum_of_losses_counts_it_once_with_a_weight_and_is_refused_without():
    data = GraphDataModule(awkward_graph(), partition=PART)
    assert check_parity(SeveralMeans("each rank alike"), data, [DGCLStrategy(loss_reduction="sum")]).ok
    data = GraphDataModule(awkward_graph(), partition="metis")  # a rank without training nodes would weigh nothing
    report = check_parity(SeveralMeans("means alone"), data, [DGCLStrategy(loss_reduction="sum")])
    assert not report.ok and "'loss_weight': 1" in str(report)


def fit(rank: int, world_size: int, strategy: Any) -> Any:
    module, recorder = SeveralMeans("beside the mask's"), Recorder()
    trainer = quiet_trainer(strategy or DGCLStrategy(timeout=60), world_size, callbacks=[recorder])
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph(), partition=PART))
    return recorder.epochs, recorder.gradients, module.state_dict()


def test_training_is_that_of_one_device(ranks):
    expected = fit(0, 1, "auto")
    for found in ranks.run(2, fit, None):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # torchmetrics computes F1 in float32
        torch.testing.assert_close(found[1:], expected[1:], rtol=1e-9, atol=1e-11)


def test_a_mean_of_rows():
    x = torch.randn(5, 2, 3, requires_grad=True)
    torch.testing.assert_close(mean_over_ranks(x), x.mean(0))
    torch.testing.assert_close(mean_over_ranks(torch.tensor([True, False])), torch.tensor(0.5))
    assert mean_over_ranks(torch.full((1000,), 0.1, dtype=torch.bfloat16)) == torch.tensor(0.1, dtype=torch.bfloat16)
    nothing = mean_over_ranks(x[:0])
    nothing.sum().backward()
    assert torch.equal(nothing, torch.zeros(2, 3)) and not x.grad.any()


def test_labelled_leaves_stand_ins_out():
    graph = awkward_graph()
    graph.train_mask[3] = True  # has no label
    with_some, without = split_graph(graph, PART.numpy(), LayoutSpec("edge_cut", 2))
    for shard, count in ((with_some, int(graph.train_mask.sum()) - 1), (without, 0)):
        batch = copy.copy(shard.batch)
        assert batch.train_mask.any() and int(labelled(batch, "train_mask").sum()) == count
        assert labelled(batch, "val_mask").any() == (shard is without)
        batch.train_mask = batch.train_mask & False  # a subset of the user's own
        assert not labelled(batch, "train_mask").any()
        batch.train_mask = batch.train_mask | (batch.y == 2)
        assert torch.equal(labelled(batch, "train_mask"), batch.y == 2) and (batch.y == 2).any()
    assert int(labelled(graph, "train_mask").sum()) == int(graph.train_mask.sum()) - 1  # on one device
    with pytest.raises(ValueError, match="one of train_mask, val_mask, test_mask"):
        labelled(graph, "edge_train_mask")
    assert labelled(Data(x=torch.ones(2, FEATURES), train_mask=torch.tensor([True, False])), "train_mask").sum() == 1


def test_helpers_work_on_the_graph_of_the_run_that_is_going_on(context):
    """Also when an earlier one, which has failed, is collected meanwhile; and after another has been tried out in this thread."""
    failed = graph_in_use(None)
    failed.__enter__()
    with graph_in_use(context):
        del failed
        gc.collect()
        with graph_in_use(None, this_thread_only=True):
            assert expand(torch.ones(7, 1)).shape == (7, 1)
        with pytest.raises(UnsupportedModelError, match="expand"):
            expand(torch.ones(7, 1))
    assert expand(torch.ones(7, 1)).shape == (7, 1)
