"""Ray Train and Tune start, restart and end the ranks. Real processes; machines, devices and errors are tested without Ray."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from processes import REPOSITORY, run

import lightning_gnn.ray as of_package
from lightning_gnn import DGCLStrategy
from lightning_gnn.launching import program
from lightning_gnn.strategy import ranks as ranks_module

real = [pytest.mark.campaign, pytest.mark.slow, pytest.mark.timeout(300)]


def of_ray(name: str, folder: Path) -> dict[str, Any]:
    pytest.importorskip("ray", reason="needs Ray: pip install lightning-gnn[ray]")
    temporary = tempfile.mkdtemp(prefix="ray")  # a short path: of sockets
    variables = {"RAY_TMPDIR": temporary, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    try:
        script = REPOSITORY / "tests" / "ray_script.py"
        finished = run(script, name, folder, cwd=folder, variables=variables, warm=False, timeout=280)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    found: dict[str, Any] = json.loads((finished.succeeded() and folder / "found.json").read_text())
    return found


class Losses(L.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found.append(float(trainer.callback_metrics["train_loss"]))


@pytest.fixture(scope="module")
def one_device_here() -> tuple[list[float], list[Any]]:
    """Losses of an undisturbed training on one device, and the buffers after it."""
    pytest.importorskip("ray", reason="needs Ray: pip install lightning-gnn[ray]")
    from ray_script import QUIET, made

    (data, model), losses = made(), Losses()
    trainer = L.Trainer(accelerator="cpu", devices=1, precision="64-true", max_epochs=4, callbacks=[losses], **QUIET)
    trainer.fit(model, datamodule=data)
    return losses.found, [each.tolist() for each in model.buffers()]


def check_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=1e-10)


class TestRealRay:
    pytestmark = real

    def test_strategies_in_workers(self, one_device_here, tmp_path):
        """No DDP, which broadcasts buffers, and the results of one device; errors name the fix."""
        found, (losses, buffers) = of_ray("many", tmp_path), one_device_here
        assert found["epochs"] == [0, 1, 2, 3]
        check_same(found["losses"], losses)
        for rank in range(2):
            of_rank = json.loads((tmp_path / f"rank{rank}.json").read_text())
            assert of_rank["ddp"]["__init__"] == 1 and of_rank["ddp"]["_broadcast_coalesced"] > 1
            assert of_rank["counts"] == {}
            for mine, expected in zip(of_rank["fit"]["buffers"], buffers, strict=True):
                check_same(mine, expected)
            assert of_rank["saved"] and of_rank["gossip"] > 0
            errors = of_rank["errors"]
            assert "the strategy object should be one of ['RayDDPStrategy'" in errors["Ray's"]
            assert errors["ddp"].startswith("ValueError: strategy must be a strategy of lightning_gnn, got RayDDPStrategy.")
            assert "got LightningEnvironment. Use Trainer(plugins=[ray.train.lightning.Ray" in errors["plugins"]
            assert errors["unprepared"].endswith("In Ray, call lightning_gnn.ray.prepare_trainer.")
            assert "The ranks have been started already (RayLightningEnvironment)" in errors["spawn"]

    def test_a_lost_worker(self, one_device_here, tmp_path):
        """Ray starts the group again, which resumes from the last report: epochs are not repeated, and losses are unchanged."""
        found = of_ray("lost", tmp_path)
        assert found["epochs"] == [0, 1, 2, 3] and found["resumed"]
        check_same(found["losses"], one_device_here[0])
        for mine, expected in zip(found["buffers"], one_device_here[1], strict=True):
            check_same(mine, expected)

    def test_tune(self, one_device_here, tmp_path):
        """A trial is one group of ranks; a Tune function without TorchTrainer cannot start ranks by a script."""
        found = of_ray("tune", tmp_path)
        for each, ranks in zip(found["trials"], (1, 2), strict=True):
            assert each[::2] == [ranks, 3]
            check_same(each[1], one_device_here[0][-1])
        assert (
            "Ray started it without a script (with lightning_gnn.ray, each worker of TorchTrainer is a rank)" in found["direct"]
        )
        assert "Trainer(strategy='dgcl_notebook')" in found["direct"]


class Environment(LightningEnvironment):
    """As Ray's, of a worker that a test describes."""


def with_ray(monkeypatch: pytest.MonkeyPatch, device: str, **context: int) -> Any:
    """Returns lightning_gnn.ray in a worker with these ranks, without Ray."""
    values = {f"get_{name}": lambda value=value: value for name, value in context.items()}
    train = SimpleNamespace(
        get_context=lambda: SimpleNamespace(**values),
        get_checkpoint=lambda: None,
        lightning=SimpleNamespace(RayLightningEnvironment=Environment),
        torch=SimpleNamespace(get_device=lambda: torch.device(device)),
    )
    monkeypatch.setattr(of_package, "import_ray", lambda: SimpleNamespace(train=train))
    monkeypatch.setenv("LOCAL_RANK", str(context.get("local_rank", 0)))
    return of_package


def trainer_on(*devices: str) -> Any:
    strategy = DGCLStrategy(cluster_environment=Environment(), parallel_devices=[torch.device(each) for each in devices])
    return SimpleNamespace(strategy=strategy, accelerator=None)


def test_devices_and_machines(monkeypatch):
    """Rank 3 of four on two machines, two to a machine, on the GPU that Ray has given to it; Lightning sees three."""
    ranks = {"world_size": 4, "world_rank": 3, "local_rank": 1, "local_world_size": 2, "node_rank": 1}
    trainer = trainer_on("cuda:0", "cuda:1", "cuda:2")
    strategy = with_ray(monkeypatch, "cuda:2", **ranks).prepare_trainer(trainer).strategy
    assert strategy.root_device == torch.device("cuda:2")
    assert (strategy.num_nodes, strategy.num_processes) == (2, 2)


def test_uneven_machines(monkeypatch):
    """Three ranks on the first machine and one on the second, where Lightning would have rank 1 twice."""
    ranks = {"world_size": 4, "world_rank": 3, "local_rank": 0, "local_world_size": 1, "node_rank": 1}
    with pytest.raises(ValueError, match="the same number of Ray workers, got 1 on machine 1, which has rank 3"):
        with_ray(monkeypatch, "cpu", **ranks).prepare_trainer(trainer_on("cpu"))


def test_another_accelerator(monkeypatch):
    ranks = {"world_size": 1, "world_rank": 0, "local_rank": 0, "local_world_size": 1, "node_rank": 0}
    with pytest.raises(ValueError, match=r"accelerator must be for the cpu device .* Use Trainer\(accelerator='cpu'\)"):
        with_ray(monkeypatch, "cpu", **ranks).prepare_trainer(trainer_on("cuda:0"))


def test_the_first_attempt_and_epochs(monkeypatch):
    module = with_ray(monkeypatch, "cpu")
    with module.last_checkpoint() as path:
        assert path is None
    with pytest.raises(ValueError, match="every_n_epochs must be at least 1"):
        module.RayReportCallback(every_n_epochs=0)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = pytest.raises(ImportError, match=r"not installed\. Run pip install lightning-gnn\[ray\]")
    with missing, of_package.last_checkpoint():
        pass


def test_a_worker_has_no_script(monkeypatch):
    worker = "/site-packages/ray/_private/workers/default_worker.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", worker, raising=False)
    with pytest.raises(RuntimeError, match="Ray started it without a script"):
        program.command()


def test_unprepared_trainer():
    assert "call lightning_gnn.ray.prepare_trainer" in ranks_module._how_to_start(LightningEnvironment(), 1, 1)
