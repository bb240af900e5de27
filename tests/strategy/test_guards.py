"""What cannot work is refused before ranks start, with what to type instead. No ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from common import awkward_graph, build, quiet_trainer
from lightning.fabric import Fabric
from torch_geometric.data import HeteroData

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, UnsupportedModelError
from lightning_gnn.launching.script import ScriptLauncher

CONNECTOR = "lightning.pytorch.trainer.connectors.accelerator_connector"


@pytest.mark.parametrize("name", ["dgcl", "dgcl_spawn"])
def test_interactive_sessions_are_told_of_the_notebook_strategy(monkeypatch, name):
    monkeypatch.setattr(f"{CONNECTOR}._IS_INTERACTIVE", True)
    with pytest.raises(RuntimeError, match=r"In a notebook use Trainer\(strategy='dgcl_notebook'\)"):
        quiet_trainer(name, 2)
    quiet_trainer("dgcl_notebook", 2)


def test_mps():
    strategy = DGCLStrategy()
    strategy.parallel_devices = [torch.device("mps", 0)]
    with pytest.raises(ValueError, match=r'Ranks on mps devices cannot exchange tensors.*Trainer\(accelerator="cpu"\)'):
        strategy._configure_launcher()


def test_callbacks_of_the_other_package():
    pl = pytest.importorskip("pytorch_lightning")
    trainer = quiet_trainer("dgcl", 2, callbacks=[pl.callbacks.EarlyStopping("val_loss")])
    with pytest.raises(TypeError, match="EarlyStopping must come from the package of the Trainer, lightning.pytorch, got"):
        trainer.fit(NodeClassifier(build("gcn")), datamodule=graph())


@pytest.mark.parametrize("name", ["dgcl", "spmm_2d_spawn", "auto_gnn_notebook"])
def test_fabric(name):
    with pytest.raises(ValueError, match=rf"Use Trainer\(strategy='{name}'\) .* lightning_gnn.functional"):
        Fabric(strategy=name, devices=2, accelerator="cpu")


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mpi_is_told_of_torchrun(monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(RuntimeError, match=rf"{variable}=2.*torchrun --nproc-per-node 3 script.py"):
        quiet_trainer("dgcl", 3)
    quiet_trainer("dgcl", 1)  # on its own
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    quiet_trainer("dgcl", 2)  # of torchrun, whoever has started that


def typed() -> HeteroData:
    data = HeteroData()
    data["a"].update({"x": torch.randn(9, 12), "y": torch.arange(9) % 3})
    data["a"].update({mask: torch.ones(9, dtype=torch.bool) for mask in ("train_mask", "val_mask")})
    data["a", "to", "a"].edge_index = torch.randint(0, 9, (2, 30))
    return data


class Plain(L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch.x, batch.edge_index).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Dicts(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch.x_dict["a"], batch.edge_index).mean()


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        (Plain, typed, r"Plain.training_step reads batch.x, .* batch\['paper'\].x, batch.x_dict"),
        (
            Dicts,
            lambda: awkward_graph(dtype=torch.float32),
            "Dicts.training_step reads batch.x_dict of a HeteroData, .* Read batch.x.",
        ),
    ],
)
def test_steps_for_graphs_with_types_and_without(module, data, words):
    with pytest.raises(AttributeError, match=words) as caught:
        quiet_trainer("dgcl", 1).fit(module(build("gcn")), datamodule=GraphDataModule(data()))
    assert isinstance(caught.value.__cause__, AttributeError)  # which has the line


def test_spawned_ranks_on_several_machines():
    with pytest.raises(ValueError, match=r"on this machine only \(num_nodes=2\). Use strategy='dgcl' in a script"):
        quiet_trainer("dgcl_spawn", 2, num_nodes=2)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "environment"),
    [({"LOCAL_RANK": "0"}, "LightningEnvironment"), (TORCHRUN, "TorchElasticEnvironment")],
)
def test_ranks_that_are_there_already_are_not_spawned_again(monkeypatch, variables, environment):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = rf"started already \({environment}\), .* would start each of them again. Use strategy='dgcl'"
    with pytest.raises(ValueError, match=words):
        quiet_trainer("dgcl_spawn", 2)


def test_one_task_of_slurm_for_two_ranks(monkeypatch):
    for name in ("NTASKS", "NODEID", "PROCID", "LOCALID", "JOB_ID", "JOB_NAME", "NODELIST"):
        monkeypatch.setenv(
            f"SLURM_{name}", {"NTASKS": "1", "JOB_NAME": "train", "NODELIST": "localhost"}.get(name, "0")
        )
    words = (
        r"num_nodes=1 x devices=2 = 2 ranks, but SLURMEnvironment reports 1.*#SBATCH --ntasks-per-node=2"
    )
    with pytest.raises(RuntimeError, match=words):
        quiet_trainer("dgcl", 2).fit(NodeClassifier(build("gcn")), datamodule=graph())


class Refuses(ScriptLauncher):
    """Would let ranks in, which must not happen here."""

    def _start(self, check: Callable[[], None]) -> None:
        check()
        raise AssertionError("ranks were let in")


def fit(model: Any, data: Any, **options: Any) -> None:
    trainer = quiet_trainer(DGCLStrategy(), 2, self_check=True, **options)
    trainer.strategy._launcher = Refuses(trainer.strategy)
    trainer.fit(model, **data)


class Centred(torch.nn.Module):
    out_channels = 5

    def __init__(self) -> None:
        super().__init__()
        self.model = build("gcn")

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.model(x - torch.from_numpy(x.numpy().mean(0)), edge_index)


def graph(**changes: Any) -> GraphDataModule:
    found = awkward_graph(dtype=torch.float32)
    for name, value in changes.items():
        found[name] = value
    return GraphDataModule(found)


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        (ValueError, "needs a graph that it can split .got no datamodule.", lambda: (build("gcn"), {})),
        (
            ValueError,
            "needs a graph that it can split .got no datamodule.",
            lambda: (build("gcn"), {"train_dataloaders": [awkward_graph()]}),
        ),
        (
            ValueError,
            "needs a graph that it can split .got LightningDataModule.",
            lambda: (build("gcn"), {"datamodule": L.LightningDataModule()}),
        ),
        (ValueError, "no train_mask", lambda: (build("gcn"), {"datamodule": graph(train_mask=None)})),
        (
            UnsupportedModelError,
            "has an unknown number of input columns",
            lambda: (torch.nn.LazyLinear(5), {"datamodule": graph()}),
        ),
        (
            UnsupportedModelError,
            r"test_guards.py:\d+: x.numpy\(\) would see this rank's rows only",
            lambda: (Centred(), {"datamodule": graph()}),
        ),
    ],
)
def test_found_out_before_ranks_are_let_in(error, words, make):
    model, data = make()
    with pytest.raises(error, match=words):
        fit(NodeClassifier(model, num_classes=5), data)


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr("lightning_gnn.devices.available_bytes", lambda: 10_000)
    with pytest.raises(
        ValueError, match=r"The 2 ranks on this machine need at least 1\.\d+e-05 GB .* Use more machines"
    ):
        fit(NodeClassifier(build("gcn")), {"datamodule": graph()})


def test_memory_that_is_enough_lets_ranks_in(monkeypatch):
    monkeypatch.setattr("lightning_gnn.devices.available_bytes", lambda: 10**9)
    with pytest.raises(AssertionError, match="ranks were let in"):
        fit(NodeClassifier(build("gcn")), {"datamodule": graph()})
