"""Every way to start ranks gives the numbers of one device, on real processes, and leaves none behind."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import EPOCHS, GRAPH, MORE_EPOCHS
from processes import REPOSITORY, Finished, run

SCRIPT = REPOSITORY / "tests" / "launched.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def results(folder: Path) -> dict[str, Any]:
    epochs = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    losses = [{name: line[name] for name in ("epoch", "train_loss", "val_loss", "val_acc")} for line in epochs]
    return {"losses": losses, **torch.load(folder / "results.pt", weights_only=True)}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reference: the same script under Lightning's own strategy, on one device."""
    folder = tmp_path_factory.mktemp("one_device")
    run(SCRIPT, "auto", 1, folder, cwd=folder).succeeded()
    return results(folder)


@pytest.mark.parametrize(
    ("command", "strategy"),
    [
        pytest.param([SCRIPT], "dgcl", id="script"),
        pytest.param(["-m", "launched"], "DGCL", id="python -m, upper case"),
        pytest.param([SCRIPT], "dgcl_spawn", id="spawn"),
        pytest.param([SCRIPT], "dgcl_notebook", id="notebook"),
        pytest.param([*TORCHRUN, SCRIPT], "dgcl", id="torchrun"),
    ],
)
def test_equals_one_device(one_device, tmp_path, command, strategy):
    finished = run(*command, strategy, 2, tmp_path, cwd=tmp_path).succeeded()
    assert finished.output.count("finished") == 1
    found = results(tmp_path)
    # One line per epoch: no second rank wrote, and the second fit went on where the first had stopped.
    assert [line["epoch"] for line in found["losses"]] == list(range(EPOCHS + MORE_EPOCHS))
    torch.testing.assert_close(found, one_device, rtol=1e-5, atol=1e-5)


def test_spawn_under_torchrun_is_refused(tmp_path):
    finished = run(*TORCHRUN, SCRIPT, "dgcl_spawn", 2, tmp_path, cwd=tmp_path)
    assert finished.code != 0
    assert "The ranks have been started already (TorchElasticEnvironment)" in finished.output
    assert not finished.left_over


AFTER_THREADS = """
import torch, lightning as L
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

torch.set_num_threads(2)
torch.randn(1500, 1500) @ torch.randn(1500, 1500)  # starts threads that a fork does not take along
data, model = GraphDataModule(planted_partition(20_000)), NodeClassifier(GCN(32, 64, 2, 8))
options = dict(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
L.Trainer(strategy="dgcl", devices=1, **options).fit(model, datamodule=data)
trainer = L.Trainer(strategy="dgcl_notebook", devices=2, **options)
trainer.fit(model, datamodule=data)
print("predicted", *trainer.predict(model, datamodule=data)[0].shape)
"""


def test_notebook_after_threads_were_used(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (tmp_path / "cells.py").write_text(AFTER_THREADS)
    assert "predicted 20000 8" in run(tmp_path / "cells.py", cwd=tmp_path).succeeded().output


SEVERAL = """
import sys, lightning as L, torch
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(strategy, devices=2):
    options = dict(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return L.Trainer(strategy=strategy, devices=devices, **options)


if __name__ == "__main__":
    suffix, ddp = sys.argv[1:]
    data, model = GraphDataModule(planted_partition(1000)), NodeClassifier(GCN(32, 16, 2, 8))
    first = trainer("dgcl" + suffix)
    first.fit(model, datamodule=data)
    if first.is_global_zero:  # DDP's group would be in its way afterwards
        trainer("auto", 1).test(model, datamodule=data, verbose=False)
    trainer(ddp).fit(Plain(), torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2))
    last = trainer("dgcl" + suffix)
    last.fit(model, datamodule=data)
    try:
        trainer("dgcl" + suffix, 3).fit(model, datamodule=data)
        said = "three ranks"
    except RuntimeError as error:
        said = str(error)
    if last.is_global_zero:
        print("SAID", said)
"""


@pytest.mark.parametrize(("suffix", "ddp"), [("", "ddp"), ("_notebook", "ddp_notebook")])
def test_several_strategies_in_one_script(tmp_path, suffix, ddp):
    (tmp_path / "several.py").write_text(SEVERAL)
    finished = run(tmp_path / "several.py", suffix, ddp, cwd=tmp_path)
    finished.files = []  # DDP leaves some
    output = finished.succeeded().output
    said = "three ranks" if suffix else "This script runs on 2 ranks since its first Trainer, and this one asks for 3"
    assert output.count(f"SAID {said}") == 1


ENDLESS = """
import os, lightning as L
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition


class KillParent(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 3 and trainer.is_global_zero:
            os.kill(os.getppid(), 9)


if __name__ == "__main__":
    data, model = GraphDataModule(planted_partition(2000)), NodeClassifier(GCN(32, 16, 2, 8))
    options = dict(accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    L.Trainer(strategy="dgcl_notebook", devices=2, callbacks=[KillParent()], **options).fit(model, datamodule=data)
"""


def test_ranks_end_with_their_parent(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    finished = run(tmp_path / "endless.py", cwd=tmp_path)
    assert finished.code == -9
    assert not finished.left_over


ONE_DIES = """
import os, lightning as L
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition


class Die(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), 9)


if __name__ == "__main__":
    data, model = GraphDataModule(planted_partition(2000)), NodeClassifier(GCN(32, 16, 2, 8))
    options = dict(accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    L.Trainer(strategy="dgcl", devices=2, callbacks=[Die()], **options).fit(model, datamodule=data)
"""


def test_a_rank_that_dies_is_named_and_ends_the_run(tmp_path):
    (tmp_path / "dies.py").write_text(ONE_DIES)
    finished = run(tmp_path / "dies.py", cwd=tmp_path, timeout=60)
    assert finished.code not in (0, None)
    assert "Rank 1 failed." in finished.output and "on rank 0: rank 1 has ended" in finished.output
    assert not finished.left_over


def command_line(folder: Path, config: str, *options: str) -> Finished:
    """Fits on the small graph by the command line, with one of the configs of this repository."""
    return run(
        "-m",
        "lightning_gnn.cli",
        "fit",
        f"--config={REPOSITORY / 'configs' / config}",
        "--data.init_args.source=lightning_gnn.planted_partition",
        f"--data.init_args.source_args={json.dumps(GRAPH)}",
        f"--model.init_args.model.init_args.in_channels={GRAPH['num_features']}",
        "--model.init_args.model.init_args.hidden_channels=16",
        f"--model.init_args.model.init_args.out_channels={GRAPH['num_classes']}",
        "--model.init_args.model.init_args.dropout=0",
        f"--trainer.max_epochs={EPOCHS}",
        *options,
        cwd=folder,
    ).succeeded()


def logged(folder: Path, *names: str) -> list[list[float]]:
    """Returns the named columns of the run's metrics; there must be one run, with one configuration."""
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("config.yaml")) == [
        "lightning_logs/version_0/config.yaml"
    ]
    assert len(list(folder.rglob("*.ckpt"))) == 1
    [path] = folder.rglob("metrics.csv")
    rows = list(csv.DictReader(path.open()))
    return [[float(row[name]) for row in rows if row[name]] for name in names]


@pytest.mark.parametrize("strategy", ["dgcl", "dgcl_spawn"])
def test_yaml_by_name(one_device, tmp_path, strategy):
    command_line(tmp_path, "dgcl.yaml", f"--trainer.strategy={strategy}")
    train, val, sent = logged(tmp_path, "train_loss", "val_loss", "comm/bytes_sent")
    expected = one_device["losses"][:EPOCHS]
    torch.testing.assert_close(train, [line["train_loss"] for line in expected], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(val, [line["val_loss"] for line in expected], rtol=1e-5, atol=1e-5)
    assert len(sent) == EPOCHS and min(sent) > 0


def test_yaml_by_class_path(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    command_line(tmp_path / "one", "dgcl_options.yaml", "--trainer.strategy=auto", "--trainer.devices=1")
    command_line(tmp_path / "two", "dgcl_options.yaml")
    names = ("train_loss", "val_loss", "val_acc")
    torch.testing.assert_close(logged(tmp_path / "two", *names), logged(tmp_path / "one", *names), rtol=1e-5, atol=1e-5)
