"""Every way to start ranks gives the numbers of one device, on real processes, and leaves none behind."""

from __future__ import annotations

import csv
import json
import re
import socket
from pathlib import Path

import pytest
import torch
from launched import EPOCHS, GRAPH, MORE_EPOCHS, results
from processes import REPOSITORY, TORCHRUN, Finished, run

SCRIPT = REPOSITORY / "tests" / "launched.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def launch(folder: Path, command: tuple[str, ...], strategy: str) -> Finished:
    return run(*command, SCRIPT, strategy, 2, folder, cwd=folder)


@pytest.mark.program(runs=launch)
@pytest.mark.parametrize(
    ("command", "strategy"),
    [
        pytest.param((), "dgcl", id="script"),
        pytest.param((), "dgcl_spawn", id="spawn"),
        pytest.param((), "spmm_15d_spawn", id="products, spawn"),
        pytest.param((), "dgcl_notebook", id="notebook"),
        pytest.param(TORCHRUN, "dgcl", id="torchrun"),
    ],
)
def test_equals_one_device(one_device, ran, command, strategy):
    folder, finished = ran
    assert finished.succeeded().output.count("finished") == 1
    found = results(folder)
    # One line per epoch: no second rank wrote, and the second fit went on where the first had stopped.
    assert [line["epoch"] for line in found["losses"]] == list(range(EPOCHS + MORE_EPOCHS))
    expected = one_device if found["tested"] is not None else {**one_device, "tested": None}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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


def after_threads(folder: Path) -> Finished:
    (folder / "cells.py").write_text(AFTER_THREADS)
    return run(folder / "cells.py", cwd=folder, variables={"OMP_NUM_THREADS": "2"}, warm=False)


@pytest.mark.campaign
@pytest.mark.program(runs=after_threads)
def test_notebook_after_threads_were_used(ran):
    _, finished = ran
    assert "predicted 20000 8" in finished.succeeded().output


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


def several(folder: Path, suffix: str, ddp: str) -> Finished:
    (folder / "several.py").write_text(SEVERAL)
    return run(folder / "several.py", suffix, ddp, cwd=folder)


@pytest.mark.campaign
@pytest.mark.program(runs=several)
@pytest.mark.parametrize(("suffix", "ddp"), [("", "ddp"), ("_notebook", "ddp_notebook")])
def test_several_strategies_in_one_script(ran, suffix, ddp):
    _, finished = ran
    finished.files = []  # DDP leaves some
    output = finished.succeeded().output
    said = "three ranks" if suffix else "This script runs on 2 ranks since its first Trainer, and this one needs 3"
    assert output.count(f"SAID {said}") == 1


COMES_BACK = """
import sys, warnings, lightning as L, torch, torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelPruning
from torch.nn.utils.parametrizations import weight_norm
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy
from lightning_gnn import GraphDataModule, planted_partition


class Keep(L.Callback):
    def __init__(self):
        self.seen, self.file = [], None

    def on_train_start(self, trainer, module):
        weight_norm(module.last)
        self.file = open(__file__)

    def on_train_epoch_end(self, trainer, module):
        self.seen.append(float(trainer.callback_metrics["train_loss"]))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.conv, self.last = torch.nn.Linear(32, 16), SAGEConv(16, 16), torch.nn.Linear(16, 8)
        self.metric, self.losses = MulticlassAccuracy(8), []
        self.register_buffer("epochs", torch.zeros(()), persistent=False)

    def forward(self, x, edge_index):
        return self.last(self.conv(self.first(x), edge_index))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch.x.double(), batch.edge_index)[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        out, mask = self(batch.x.double(), batch.edge_index), batch.val_mask
        self.log("val_loss", F.cross_entropy(out[mask], batch.y[mask]))
        self.metric.update(out[mask], batch.y[mask])

    def on_train_epoch_end(self):
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))
        self.epochs += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    module, data, keep, stop = Net().double(), GraphDataModule(planted_partition(400)), Keep(), EarlyStopping("val_loss", 9.0, 1)
    prune = ModelPruning("l1_unstructured", [(module.first, "weight")], amount=0.2, make_pruning_permanent=False)
    losses, seen = module.losses, keep.seen
    options = dict(accelerator="cpu", max_epochs=5, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    devices = 1 if sys.argv[1] == "auto" else 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        L.Trainer(strategy=sys.argv[1], devices=devices, callbacks=[keep, stop, prune], **options).fit(module, datamodule=data)
    found = {"losses": losses, "seen": seen, "stopped": stop.stopped_epoch, "epochs": module.epochs}
    found["weights"] = module.state_dict()
    graph = planted_partition(400)
    found |= {"out": module(graph.x.double(), graph.edge_index).detach(), "has_file": keep.file is not None}
    found["told"] = [str(each.message) for each in caught if "could not be sent" in str(each.message)]
    torch.save(found, sys.argv[2])
"""


def comes_back(folder: Path, strategy: str) -> Finished:
    (folder / "comes_back.py").write_text(COMES_BACK)
    run(folder / "comes_back.py", "auto", folder / "auto", cwd=folder).succeeded()
    return run(folder / "comes_back.py", strategy, folder / strategy, cwd=folder)


@pytest.mark.program(runs=comes_back)
@pytest.mark.parametrize("strategy", ["dgcl_notebook", "dgcl_spawn"])
def test_what_callbacks_and_the_module_keep_comes_back(ran, strategy):
    """Lists, stopped_epoch, buffers, and the weights of layers that callbacks have pruned or normed; a file is named."""
    folder, finished = ran
    finished.succeeded()
    expected, found = (torch.load(folder / name) for name in ("auto", strategy))
    assert expected["stopped"] == 1 and len(expected["seen"]) == 2 and "first.weight_orig" in expected["weights"]
    assert expected.pop("has_file") and not found.pop("has_file")
    [told], _ = found.pop("told"), expected.pop("told")
    assert "The ranks changed Keep.file (cannot pickle" in told
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


CONSTANTS = """
import sys, lightning as L, torch, torch.nn.functional as F
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, planted_partition

WEIGHTS = torch.linspace(0.5, 2, 8)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = GCN(32, 16, 2, 8)

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.model(batch.x, batch.edge_index)[batch.train_mask], batch.y[batch.train_mask], WEIGHTS)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    options = dict(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = L.Trainer(strategy=sys.argv[1], devices=1 if sys.argv[1] == "auto" else 2, **options)
    trainer.fit(Module(), datamodule=GraphDataModule(planted_partition(200)))
    print("loss", float(trainer.callback_metrics["loss"]))
"""


def trained_with_constants(folder: Path, strategy: str) -> list[float]:
    (folder / "constants.py").write_text(CONSTANTS)
    outputs = [run(folder / "constants.py", each, cwd=folder).succeeded().output for each in ("auto", strategy)]
    return [float(re.search("loss (.*)", each)[1]) for each in outputs]


@pytest.mark.program(runs=trained_with_constants)
@pytest.mark.parametrize("strategy", ["dgcl_spawn", "dgcl_notebook"])
def test_started_ranks_know_tensors_from_before_the_run(ran, strategy):
    """Started processes exclude objects from garbage collection, which hid class weights that a script makes."""
    expected, found = ran[1]
    assert found == pytest.approx(expected, rel=1e-5)


THIEF = """
import socket, sys, lightning as L
from lightning.fabric.plugins.environments import LightningEnvironment
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

main_port, taken = LightningEnvironment.main_port.fget, []


def take(environment):
    port, thief = main_port(environment), socket.socket()
    try:
        thief.bind(("127.0.0.1", port))
        thief.listen()
        taken.append(thief)
    except OSError:
        print("is held", flush=True)
    return port


if __name__ == "__main__":
    LightningEnvironment.main_port = property(take)
    data, model = GraphDataModule(planted_partition(200)), NodeClassifier(GCN(32, 16, 2, 8))
    options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = L.Trainer(strategy=sys.argv[1], devices=2, **options)
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data, verbose=False)  # of spawned ranks, at another port
    if trainer.is_global_zero:
        print("met", not taken)
"""


def robbed(folder: Path, strategy: str) -> Finished:
    (folder / "thief.py").write_text(THIEF)
    return run(folder / "thief.py", strategy, cwd=folder)


@pytest.mark.program(runs=robbed)
@pytest.mark.parametrize("strategy", ["dgcl_notebook", "dgcl", "dgcl_spawn"])
def test_no_other_process_can_take_the_port_where_ranks_meet(ran, strategy):
    """It is taken as soon as it is known, unless somebody listens there."""
    output = ran[1].succeeded().output
    assert output.count("met True") == 1 and "is held" in output


FIT = """
import sys, lightning as L
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

if __name__ == "__main__":
    options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = L.Trainer(strategy=sys.argv[1], devices=2, **options)
    trainer.fit(NodeClassifier(GCN(32, 16, 2, 8)), datamodule=GraphDataModule(planted_partition(200)))
"""


def fit_at_a_port_in_use(folder: Path, strategy: str) -> Finished:
    (folder / "fit.py").write_text(FIT)
    with socket.create_server(("127.0.0.1", 0)) as other:
        return run(
            folder / "fit.py", strategy, cwd=folder, variables={"MASTER_PORT": str(other.getsockname()[1])}, timeout=100
        )


@pytest.mark.program(runs=fit_at_a_port_in_use)
@pytest.mark.parametrize("strategy", ["dgcl_notebook", "dgcl", "dgcl_spawn"])
def test_a_given_port_that_is_in_use_is_named_at_once(ran, strategy):
    finished = ran[1]
    assert finished.code == 1 and not finished.left_over
    said = r"Rank 0 cannot listen at 127.0.0.1:\d+, where ranks meet: another process does \(address in use\)"
    assert re.search(said, finished.output), finished.output[-3000:]
    assert "1800 s" not in finished.output


def command_line(folder: Path, config: str, options: tuple[str, ...]) -> Finished:
    """Fits on the small graph by the command line, with one of the configs of this repository."""
    return run(
        "-m",
        "lightning_gnn.tools.cli",
        "fit",
        f"--config={REPOSITORY / 'configs' / config}",
        "--data.init_args.source=lightning_gnn.planted_partition",
        f"--data.init_args.source_kwargs={json.dumps(GRAPH)}",
        f"--model.init_args.model.init_args.in_channels={GRAPH['num_features']}",
        "--model.init_args.model.init_args.hidden_channels=16",
        f"--model.init_args.model.init_args.out_channels={GRAPH['num_classes']}",
        "--model.init_args.model.init_args.dropout=0",
        f"--trainer.max_epochs={EPOCHS}",
        *options,
        cwd=folder,
    )


def logged(folder: Path, *names: str) -> list[list[float]]:
    """Returns the named columns of the run's metrics; there must be one run, with one configuration."""
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("config.yaml")) == [
        "lightning_logs/version_0/config.yaml"
    ]
    assert len(list(folder.rglob("*.ckpt"))) == 1
    [path] = folder.rglob("metrics.csv")
    rows = list(csv.DictReader(path.open()))
    return [[float(row[name]) for row in rows if row[name]] for name in names]


@pytest.mark.campaign
@pytest.mark.program(runs=command_line)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param("dgcl.yaml", ("--trainer.strategy=DGCL",), id="upper case"),
        pytest.param("dgcl.yaml", ("--trainer.strategy=dgcl_spawn",), id="spawn"),
    ],
)
def test_yaml_by_name(one_device, ran, config, options):
    folder, finished = ran
    finished.succeeded()
    train, val, sent = logged(folder, "train_loss", "val_loss", "comm/bytes_sent")
    expected = one_device["losses"][:EPOCHS]
    torch.testing.assert_close(train, [line["train_loss"] for line in expected], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(val, [line["val_loss"] for line in expected], rtol=1e-5, atol=1e-5)
    assert len(sent) == EPOCHS and min(sent) > 0


def one_and_two_devices(folder: Path) -> list[Finished]:
    finished = []
    for name, options in (("one", ("--trainer.strategy=auto", "--trainer.devices=1")), ("two", ())):
        (folder / name).mkdir()
        finished.append(command_line(folder / name, "dgcl_options.yaml", options))
    return finished


@pytest.mark.campaign
@pytest.mark.program(runs=one_and_two_devices)
def test_yaml_by_class_path(ran):
    folder, both = ran
    for finished in both:
        finished.succeeded()
    names = ("train_loss", "val_loss", "val_acc")
    torch.testing.assert_close(logged(folder / "two", *names), logged(folder / "one", *names), rtol=1e-5, atol=1e-5)
