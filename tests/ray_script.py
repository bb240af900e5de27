"""Runs of Ray, by name, in a program of their own: `ray_script.py RUN FOLDER` writes FOLDER/found.json."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import ray.train
import torch
import torch.distributed as dist
from ray import tune
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import barrier
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
PLUGINS = {"plugins": [RayLightningEnvironment()]}


def made() -> tuple[GraphDataModule, NodeClassifier]:
    L.seed_everything(0)
    graph = planted_partition(300, num_classes=4, num_features=16, seed=0)
    graph.x = graph.x.double()
    return GraphDataModule(graph), NodeClassifier(GCN(16, 8, 2, 4, norm="batch_norm", bias=False), lr=0.05).double()


def trainer_of(strategy: Any, **options: Any) -> L.Trainer:
    return L.Trainer(strategy=strategy, **{"precision": "64-true", "max_epochs": 4, **QUIET, **options})


class ExitsInEpochTwo(L.Callback):
    """Of the first attempt, which finds no checkpoint."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 2 and trainer.global_rank == 1 and ray.train.get_checkpoint() is None:
            os._exit(1)


def fit(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of a training on a rank, which resumes from the last report."""
    from lightning_gnn.ray import RayReportCallback, last_checkpoint, prepare_trainer

    data, model = made()
    callbacks = [RayReportCallback(), *([ExitsInEpochTwo()] if config.get("loses_one") else [])]
    trainer = prepare_trainer(trainer_of(config["strategy"], callbacks=callbacks, **PLUGINS))
    with last_checkpoint() as path:
        trainer.fit(model, datamodule=data, ckpt_path=path)
    return {"buffers": [each.tolist() for each in model.buffers()], "resumed": path is not None}


def count_calls(counts: Counter[str], owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counting)


class OneLayer(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def raised(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def many(folder: str) -> None:
    """Several Trainers in one worker: DDP's first, as a control of the counts; then errors, then this package's strategies."""
    from ray.train.lightning import prepare_trainer as prepare_ray

    from lightning_gnn.ray import prepare_trainer

    rank, counts = ray.train.get_context().get_world_rank(), Counter[str]()
    count_calls(counts, torch.nn.parallel.DistributedDataParallel, "__init__")
    count_calls(counts, dist, "_broadcast_coalesced")
    ddp = trainer_of(RayDDPStrategy(), accelerator="cpu", max_epochs=1, precision="32-true", **PLUGINS)
    prepare_ray(ddp).fit(OneLayer(), torch.utils.data.DataLoader(torch.rand(8, 4), 4))
    found: dict[str, Any] = {"ddp": dict(counts)}
    counts.clear()
    found["errors"] = {
        "Ray's": raised(lambda: prepare_ray(trainer_of("dgcl", **PLUGINS))),
        "ddp": raised(lambda: prepare_trainer(trainer_of(RayDDPStrategy(), **PLUGINS))),
        "plugins": raised(lambda: prepare_trainer(trainer_of("dgcl"))),
        "unprepared": raised(lambda: trainer_of("dgcl", **PLUGINS).fit(made()[1], datamodule=made()[0])),
        "spawn": raised(lambda: trainer_of("dgcl_spawn", **PLUGINS)),
    }
    found["fit"] = fit({"strategy": "dgcl"})
    found["counts"] = dict(counts)
    data, model = made()
    gossip = prepare_trainer(trainer_of("gossip", max_epochs=1, **PLUGINS))
    gossip.fit(model, datamodule=data)
    found["gossip"] = float(gossip.callback_metrics["train_loss"])
    saved = Path(folder, "saved.ckpt")
    barrier()
    time.sleep(0.5 * (rank == 0))
    gossip.save_checkpoint(saved)  # the ranks wait for each other, also after a fit
    found["saved"] = saved.exists()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))


def train(folder: str, loop: Any, config: Any, ranks: int = 2, **options: Any) -> Any:
    # half a CPU each: Tune's function takes one
    scaling = ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 0.5})
    return TorchTrainer(
        loop, train_loop_config=config, scaling_config=scaling, run_config=RunConfig(storage_path=folder, **options)
    ).fit()


def losses(result: Any) -> dict[str, Any]:
    frame = result.metrics_dataframe
    return {"epochs": frame["epoch"].tolist(), "losses": frame["train_loss"].tolist(), **(result.return_value or {})}


def run_many(folder: str) -> Any:
    return losses(train(folder, many, folder))


def run_lost(folder: str) -> Any:
    config = {"strategy": "dgcl", "loses_one": True}
    return losses(train(folder, fit, config, failure_config=FailureConfig(max_failures=1)))


def trial(config: dict[str, Any], folder: str) -> None:
    options = {"callbacks": [TuneReportCallback()], "name": tune.get_context().get_trial_id()}
    train(folder, fit, config, config["ranks"], **options)


def without_ray_train(config: dict[str, Any]) -> None:
    data, model = made()
    trainer_of(config["strategy"], accelerator="cpu", devices=2).fit(model, datamodule=data)


def run_tune(folder: str) -> Any:
    config, space = (
        tune.RunConfig(storage_path=folder),
        {"strategy": tune.grid_search(["cover"]), "ranks": tune.grid_search([1, 2])},
    )
    options = {"tune_config": tune.TuneConfig(max_concurrent_trials=1), "run_config": config}
    results = tune.Tuner(partial(trial, folder=folder), param_space=space, **options).fit()
    [direct] = tune.Tuner(without_ray_train, param_space={"strategy": "dgcl"}, run_config=config).fit()
    trials = [[each.config["ranks"], each.metrics["train_loss"], each.metrics["epoch"]] for each in results]
    return {"trials": trials, "direct": str(direct.error)}


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200e6)
    try:
        Path(folder, "found.json").write_text(json.dumps(globals()[f"run_{name}"](folder)))
    finally:
        ray.shutdown()
