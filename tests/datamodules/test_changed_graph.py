"""A graph that changes between calls of Trainers: each call has it as it is then, on ranks as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from changing import SEQUENCES, Classifier, graph, values
from common import quiet_trainer
from conftest import RankFailed
from processes import REPOSITORY, TORCHRUN, Finished, run
from torch_geometric.data import Data

from lightning_gnn import GraphDataModule
from lightning_gnn.partition.layout import LayoutSpec

EXACT = (
    "spmm_1d",
    "cover",
    "vertex_cut",
    "auto_gnn",
    "sampling",
    "sampling in batches",
    "dgcl + sampling",
    "dgcl",
)
CASES = [("cluster_allreduce", "everything"), *((name, sequence) for name in EXACT for sequence in SEQUENCES)]


@pytest.mark.parametrize("one_trainer", [True, False])
@pytest.mark.parametrize(("strategies", "sequence"), CASES)
def test_every_call_has_the_graph_as_it_is(ranks, strategies, sequence, one_trainer):
    expected = values(0, 1, ["auto"], sequence, one_trainer)
    for found in ranks.run(2, values, strategies.split(" + "), sequence, one_trainer):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def launch(folder: Path, command: tuple[str, ...], strategy: str) -> Finished:
    return run(*command, REPOSITORY / "tests" / "changing.py", strategy, 2, folder, cwd=folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.program(runs=launch)
@pytest.mark.parametrize(
    ("command", "strategy"), [((), "dgcl"), ((), "dgcl_spawn"), ((), "dgcl_notebook"), (TORCHRUN, "dgcl")]
)
def test_every_call_of_a_script_has_the_graph_as_it_is(ran, command, strategy):
    folder, finished = ran
    finished.succeeded()
    expected, files = values(0, 1, ["auto"], "folds"), sorted(folder.glob("*.pt"))
    assert len(files) == (2 if strategy == "dgcl" else 1)
    for file in files:
        torch.testing.assert_close(torch.load(file, weights_only=True), expected, rtol=1e-9, atol=1e-12)


class Relabels(Classifier):
    """Changes the graph as each epoch ends."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.data = data

    def on_train_epoch_end(self) -> None:
        self.data.train_mask[self.current_epoch] = True


def fit_and_change(rank: int, world_size: int, epochs: int) -> int:
    """Returns how many training nodes the next call has."""
    data = graph()
    datamodule = GraphDataModule(data)
    quiet_trainer("dgcl", world_size, max_epochs=epochs).fit(Relabels(data), datamodule=datamodule)
    quiet_trainer("dgcl", world_size).test(Classifier(), datamodule=datamodule)
    return sum(datamodule.shard.mask_counts["train_mask"])


def test_a_change_during_fit_is_refused_unless_training_has_ended(ranks):
    data = graph()
    data.train_mask[0] = True
    assert ranks.run(2, fit_and_change, 1) == [int(data.train_mask.sum())] * 2
    with pytest.raises(RankFailed) as raised:
        ranks.run(2, fit_and_change, 2)
    assert len(raised.value.errors) == 2
    for error in raised.value.errors.values():
        assert error.startswith(
            "ValueError: train_mask of the graph that was given to GraphDataModule changed in place"
        )


def test_a_dataset_that_changes_is_refused(tmp_path):
    dataset = [graph()]
    data, layout = GraphDataModule(dataset, partition_dir=tmp_path), LayoutSpec("edge_cut", 2)
    data.prepare_for(layout)
    data.prepare_for(layout)
    dataset[0].train_mask[0] ^= True
    words = r"train_mask of the graph that list returned changed in place after it was partitioned.*GraphDataModule\(data\)"
    with pytest.raises(ValueError, match=words):
        data.prepare_for(layout)
    with pytest.raises(ValueError, match=words):
        data.load()


def test_what_was_prepared_before_ranks_started_is_of_one_call(tmp_path, monkeypatch):
    data, layout = GraphDataModule(graph(), partition_dir=tmp_path), LayoutSpec("edge_cut", 2)
    monkeypatch.setattr(data, "_asked_for", lambda: layout)
    looked: list[str] = []
    monkeypatch.setattr(data, "load", lambda: looked.append("") or GraphDataModule.load(data))
    data.prepare_ahead(layout)
    data.prepare_data()
    assert len(looked) == 1
    data.prepare_data()
    assert len(looked) == 2
    data.prepare_ahead(layout)
    data.on_exception(ValueError("before its prepare_data"))
    data.prepare_data()
    assert len(looked) == 4
