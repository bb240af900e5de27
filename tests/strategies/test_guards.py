"""What cannot work is refused before ranks start, with what to type instead. No ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from common import awkward_graph, build, quiet_trainer

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, UnsupportedModelError
from lightning_gnn.launching import ScriptLauncher

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


def test_pytorch_lightning_does_not_know_the_names():
    """A registry of its own: docs/errors.md has its message."""
    pl = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match="You selected an invalid strategy name: `strategy='dgcl'`"):
        pl.Trainer(strategy="dgcl", devices=2, accelerator="cpu")


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
        r"num_nodes=1 x devices=2 = 2 ranks, but SLURMEnvironment says that there are 1.*#SBATCH --ntasks-per-node=2"
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
        return self.model(x - x.mean(0), edge_index)


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
            "does not know its input columns",
            lambda: (torch.nn.LazyLinear(5), {"datamodule": graph()}),
        ),
        (
            UnsupportedModelError,
            "'model.model' .GCN. differs by|self-check",
            lambda: (Centred(), {"datamodule": graph()}),
        ),
    ],
)
def test_found_out_before_ranks_are_let_in(error, words, make):
    model, data = make()
    with pytest.raises(error, match=words):
        fit(NodeClassifier(model, num_classes=5), data)


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr("lightning_gnn.strategies.memory.available_bytes", lambda: 10_000)
    with pytest.raises(
        ValueError, match=r"The 2 ranks on this machine need at least 1\.\d+e-05 GB .* Use more machines"
    ):
        fit(NodeClassifier(build("gcn")), {"datamodule": graph()})


def test_memory_that_is_enough_lets_ranks_in(monkeypatch):
    monkeypatch.setattr("lightning_gnn.strategies.memory.available_bytes", lambda: 10**9)
    with pytest.raises(AssertionError, match="ranks were let in"):
        fit(NodeClassifier(build("gcn")), {"datamodule": graph()})
