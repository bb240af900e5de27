"""Real steps are checked, too: rows of the loss in the first one, all stages before training, again in later epochs. On ranks."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, UserModule, awkward_graph, build, checked_later, quiet_trainer
from conftest import RankFailed
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from lightning_gnn import DGCLStrategy, GraphDataModule

NUM_NODES = 300


def graph() -> Data:
    made = awkward_graph(NUM_NODES, seed=3, dtype=torch.float32)
    made.train_mask[-40:] = True
    made.y[-40:] = torch.arange(40) % CLASSES
    return made


def partition() -> torch.Tensor:
    """The last 60 nodes are rank 1's."""
    return (torch.arange(NUM_NODES) >= NUM_NODES - 60).long()


def fit(
    rank: int,
    world_size: int,
    kind: Any,
    *args: Any,
    stage: str = "fit",
    strategy: dict[str, Any] | None = None,
    callbacks: Any = (),
    **options: Any,
) -> dict[str, Any]:
    """Returns what a run logs and says; module and callbacks are made on the rank."""
    torch.manual_seed(0)
    module = kind(*args)
    trainer = quiet_trainer(
        DGCLStrategy(timeout=60, **(strategy or {})),
        world_size,
        self_check=True,
        callbacks=[make() for make in callbacks],
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part = partition() if world_size == 2 else "metis"
        with checked_later():
            getattr(trainer, stage)(module, datamodule=GraphDataModule(graph(), partition=part))
    return {
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "said": [str(each.message) for each in caught],
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "module": getattr(module, "kept", None),
    }


def refusals(ranks: Any, *args: Any, **options: Any) -> list[str]:
    """Returns the errors of all ranks."""
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, fit, *args, **options)
    assert len(failed.value.errors) == 2
    return list(failed.value.errors.values())


# Rows of the loss #############################################################


class WithoutTheLast(UserModule):
    """Leaves out nodes that are all on rank 1, of which rank 0, which tries the step out, knows nothing."""

    weight = ""

    def __init__(self) -> None:
        super().__init__(build("gcn"))

    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)
        rows = batch.train_mask & (batch.y >= 0) & (batch.n_id < NUM_NODES - 20)
        loss = F.cross_entropy(out[rows], batch.y[rows])
        weights = {"right": rows.sum(), "wrong": (batch.train_mask & (batch.y >= 0)).sum()}
        return {"loss": loss, "loss_weight": weights[self.weight]} if self.weight else loss


class WithoutTheLastSaid(WithoutTheLast):
    weight = "right"


class WithoutTheLastSaidWrong(WithoutTheLast):
    weight = "wrong"


class NotOnSmallGraphs(WithoutTheLast):
    def training_step(self, batch, batch_idx):
        assert len(batch.x) >= 60 and len(batch.x) != 181 and len(batch.x) not in (113, 97)
        return super().training_step(batch, batch_idx)


def labelled_nodes() -> list[int]:
    made, part = graph(), partition()
    return [int((made.train_mask & (made.y >= 0) & (part == rank)).sum()) for rank in (0, 1)]


def test_a_loss_over_other_rows_is_refused_in_the_first_step(ranks):
    counts = labelled_nodes()
    made = graph()
    left = int((made.train_mask & (made.y >= 0))[-20:].sum())
    for line in refusals(ranks, WithoutTheLast):
        assert line.startswith("UnsupportedModelError: WithoutTheLast.training_step takes its loss over ")
        assert f"over {sum(counts) - left} rows of the output ({counts[0]}, {counts[1] - left} on the ranks)" in line
        assert f"train_mask, by which the ranks' losses are weighted, has {sum(counts)} labelled nodes" in line
        assert line.rstrip().endswith("before you add them.") and "'loss_weight': how many rows" in line
    for line in refusals(ranks, WithoutTheLastSaidWrong):
        assert "while its loss_weight gives the ranks' losses shares of" in line
    ranks.run(2, fit, WithoutTheLastSaid)
    ranks.run(2, fit, WithoutTheLast, strategy={"self_check": False})


def test_where_a_step_cannot_be_tried_out_other_rows_are_a_warning(ranks):
    found, _ = ranks.run(2, fit, NotOnSmallGraphs)
    assert any("NotOnSmallGraphs.training_step takes its loss over" in text for text in found["said"])


class Satisfied(UserModule):
    """A hinge on a score of which most nodes on rank 1 are beyond already: their rows have no gradient, and yet count."""

    kept: Any

    def __init__(self) -> None:
        super().__init__(build("gcn"))
        self.kept = []
        self.register_buffer("steps", torch.zeros(()))
        self.norm = torch.nn.BatchNorm1d(FEATURES)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        out = self.model(self.norm(batch.x), batch.edge_index)[:, 0]
        rows = batch.train_mask & (batch.y >= 0)
        margin = torch.where((batch.n_id >= NUM_NODES - 20)[rows], -50.0, 50.0)
        loss = F.relu(margin - out[rows]).mean()
        self.kept.append(float(loss))
        self.log("hinge", loss)
        return loss


def test_rows_that_a_loss_is_content_with_count_and_looking_leaves_nothing_behind(ranks):
    looked, _ = ranks.run(2, fit, Satisfied, max_epochs=2)
    plain, _ = ranks.run(2, fit, Satisfied, max_epochs=2, strategy={"self_check": False})
    assert looked["module"] == plain["module"] and len(looked["module"]) == 2
    assert looked["logged"]["hinge"] == plain["logged"]["hinge"]
    torch.testing.assert_close(looked["weights"], plain["weights"], rtol=0, atol=0)


# Masks that are changed #######################################################


class Grows(L.Callback):
    """Adds nodes to the mask in place, as curricula do."""

    def on_train_epoch_start(self, trainer, pl_module):
        batch = trainer.train_dataloader.batch
        batch.train_mask[batch.n_id % 7 == trainer.current_epoch] = True


class Weighted(UserModule):
    def __init__(self) -> None:
        super().__init__(build("gcn"))


def test_masks_that_are_changed_in_place_are_counted_again(ranks):
    found = ranks.run(2, fit, Weighted, callbacks=[Grows])
    [alone] = ranks.run(1, fit, Weighted, callbacks=[Grows])
    for each in found:
        assert each["logged"]["train_loss"] == pytest.approx(alone["logged"]["train_loss"], rel=1e-5)
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=1e-4, atol=1e-5)


# Stages and epochs ############################################################


class Mixes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(FEATURES, 8), GCNConv(8, CLASSES)
        self.mixing = False

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        return self.second(x - x.mean(0) if self.mixing else x, edge_index)


class MixesIn(UserModule):
    """Looks across nodes in one stage only."""

    def __init__(self, stage: str) -> None:
        super().__init__(Mixes())
        self.stage = stage

    def _mix(self, stage: str) -> None:
        self.model.mixing = stage == self.stage

    def training_step(self, batch, batch_idx):
        self._mix("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._mix("validation")
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self._mix("test")
        return super().test_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self._mix("predict")
        return super().predict_step(batch, batch_idx)


def test_all_steps_are_tried_out_before_fit(ranks):
    for stage in ("training", "validation"):
        for line in refusals(ranks, MixesIn, stage):
            assert re.search(
                rf"MixesIn.{stage}_step does not give .* gives to 'model.second' \(GCNConv\) differs", line
            )
            assert line.splitlines()[-1].startswith("A rank's rows are those of one device but for a constant")
    for stage in ("test", "predict"):
        found, _ = ranks.run(2, fit, MixesIn, stage)
        warned = [text for text in found["said"] if f"trainer.{stage} will refuse this module" in text]
        assert len(warned) == 1 and f"MixesIn.{stage}_step does not give" in warned[0]
        for line in refusals(ranks, MixesIn, stage, stage=stage):
            assert f"MixesIn.{stage}_step does not give the numbers of one device" in line


class MixesLater(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.current_epoch == 0:
            pl_module.model.mixing = True


class Mixed(UserModule):
    def __init__(self) -> None:
        super().__init__(Mixes())


class ByEpoch(Mixed):
    def training_step(self, batch, batch_idx):
        self.model.mixing = self.current_epoch >= 3
        return super().training_step(batch, batch_idx)


def test_steps_are_checked_again_as_the_module_is_then(ranks):
    found, _ = ranks.run(2, fit, Mixed, max_epochs=6)
    assert 0 < found["logged"]["check/seconds"] < 60
    for line in refusals(ranks, Mixed, callbacks=[MixesLater], max_epochs=6):
        assert "In epoch 1, Mixed.training_step does not give the numbers of one device" in line
    for line in refusals(ranks, ByEpoch, max_epochs=6):
        assert "in epoch 4, what 'model' (Mixes) gives to 'model.second' (GCNConv) differs" in line
    ranks.run(2, fit, ByEpoch, max_epochs=3)
