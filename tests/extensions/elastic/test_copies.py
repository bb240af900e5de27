"""State in memory, positions of logs, and files of epochs that may be repeated, without ranks."""

from __future__ import annotations

import csv
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.loggers import CSVLogger
from torch_geometric.nn.models import GCN
from torchmetrics import MeanMetric

from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition
from lightning_gnn.extensions.elastic.files import CheckpointFiles
from lightning_gnn.extensions.elastic.loggers import _Events, _Rows
from lightning_gnn.extensions.elastic.snapshots import Copy, _NumpyStream
from lightning_gnn.private_lightning import Checkpoints
from lightning_gnn.steps.metrics import set_states, states_across_epochs


def test_copies_are_independent_and_reuse_memory():
    norm = torch.nn.BatchNorm1d(2)
    state = {"module": norm.state_dict(), "list": [1, torch.ones(2)], "other": {"set": {1}}}
    first = Copy(state)
    with torch.no_grad():
        norm.weight.add_(1)
    state["other"]["set"].add(2)
    loaded = first.load()
    assert isinstance(loaded["module"], OrderedDict) and loaded["module"]._metadata == state["module"]._metadata
    assert torch.equal(loaded["module"]["weight"], torch.ones(2)) and loaded["other"]["set"] == {1}
    second = Copy({"module": norm.state_dict(), "list": [1, torch.ones(3)]}, first)
    assert [new is old for new, old in zip(second._tensors, first._tensors)] == [True] * 5 + [False]
    assert torch.equal(second.load()["module"]["weight"], 2 * torch.ones(2)) and second.load()["list"][1].shape == (3,)
    assert torch.equal(loaded["module"]["weight"], torch.ones(2))


def test_states_that_cannot_be_pickled_are_named():
    with pytest.raises(ValueError, match=r"cannot be pickled, see the error above. Look at hyper-parameters"):
        Copy({"hparams": {"act": lambda x: x}})


@pytest.mark.parametrize("between", [list, *(partial(np.random.normal, size=size) for size in (1, 2, 3))])
def test_the_state_of_the_random_stream_of_numpy_is_current(between):
    stream = _NumpyStream()
    np.random.seed(0)  # noqa: NPY002
    for _ in range(4):
        state, known = stream.state(), np.random.get_state()  # noqa: NPY002
        assert np.array_equal(state[1], known[1]) and state[2:] == known[2:]
        between()


def test_checkpoints_are_those_of_lightning():
    found = []

    class Compares(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            known, checkpoints = trainer._checkpoint_connector.dump_checkpoint(False), Checkpoints(trainer)
            ours = checkpoints.dump()
            found.append(known["loops"] == checkpoints.complete(ours["loops"]) and known.keys() == ours.keys())

        def on_train_start(self, trainer, module):
            self.checkpoints = Checkpoints(trainer)

        def on_train_epoch_end(self, trainer, module):
            known = trainer._checkpoint_connector.dump_checkpoint(False)
            found.append(known["loops"] == self.checkpoints.complete(self.checkpoints.dump()["loops"]))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", devices=1, callbacks=[Compares()], **quiet)
    trainer.fit(NodeClassifier(GCN(32, 8, 2, 8)), datamodule=GraphDataModule(planted_partition(100)))
    assert found == [True] * 6


def test_a_metric_with_a_state_per_rank_is_rejected_after_an_epoch():
    metric = MeanMetric()
    assert states_across_epochs([metric]) == [None]
    metric.update(3.0)
    with pytest.raises(ValueError, match=r"MeanMetric was not reset after the last epoch, .* Call its reset\(\)"):
        states_across_epochs([metric])
    vars(metric)["_whole"] = True  # its updates were in steps of the whole graph
    states = Copy(states_across_epochs([metric])).load()
    metric.update(5.0)
    set_states([metric], states)
    assert metric.compute() == 3
    metric.reset()
    assert states_across_epochs([metric]) == [None]


def rows_of(logger: CSVLogger) -> list[str]:
    with open(Path(logger.log_dir) / "metrics.csv") as opened:
        return [row["a"] for row in csv.DictReader(opened)]


@pytest.mark.parametrize("new", [True, False], ids=["another rank", "this rank"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_after_a_position_are_cut(new, rows, tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=3)
    logger.log_hyperparams({"width": 8})
    part = _Rows(logger)
    for number in range(rows):
        logger.log_metrics({"a": number}, number)
    position = part.position()
    logger.log_metrics({"a": 7, "later": 1}, 8)  # flushed, with another column
    logger.log_metrics({"a": 8}, 9)
    if new:
        logger = CSVLogger(tmp_path, version=logger.version)
        part = _Rows(logger)
    part.continue_at(position)
    logger.log_metrics({"a": 9, "third": 1}, 10)
    assert part.position() == rows + 1 and logger.experiment.hparams == {"width": 8}
    logger.log_metrics({"a": 10}, 11)
    logger.finalize("success")
    assert rows_of(logger) == [*map(str, range(rows)), "9", "10"] and part.position() == rows + 2
    assert sorted(file.name for file in Path(logger.log_dir).iterdir() if "hparams" not in file.name) == ["metrics.csv"]


def test_event_files_are_cut(tmp_path):
    """With a stand-in, since neither tensorboard nor tensorboardX need be installed."""
    old, new = tmp_path / "events.out.tfevents.1", tmp_path / "events.out.tfevents.2"
    saved = []
    writer = SimpleNamespace(close=lambda: saved.append("closed"))
    logger = SimpleNamespace(log_dir=str(tmp_path), _experiment=writer, save=lambda: saved.append("saved"), hparams={})
    old.write_bytes(b"12345")
    part = _Events(logger)
    position = part.position()
    old.write_bytes(b"1234567")
    new.write_bytes(b"8")
    (tmp_path / "hparams.yaml").write_text("width: 8\n")
    part.continue_at(position)
    assert saved == ["saved", "closed"] and logger._experiment is None and logger.hparams == {"width": 8}
    assert old.read_bytes() == b"12345" and not new.exists()


def test_files_of_a_repeated_epoch_are_removed_and_others_are_kept(tmp_path):
    io, files = TorchCheckpointIO(), CheckpointFiles()
    names = [str(tmp_path / name) for name in ("0.ckpt", "1.ckpt", "last.ckpt")]

    def save(epoch: int, *paths: str) -> None:
        for path in paths:
            files.save(epoch, path)
            Path(path).touch()

    save(0, names[0], names[2])
    files.settle(1, io)
    save(1, names[1], names[2])
    files.remove(1, names[0])
    files.settle(1, io)
    assert all(Path(name).exists() for name in names)
    files.repeat(1, io)
    assert [Path(name).exists() for name in names] == [True, False, True]
    save(1, names[1], names[2])
    files.remove(1, names[0])
    files.settle(2, io)
    assert [Path(name).exists() for name in names] == [False, True, True]
