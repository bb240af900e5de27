"""A PyG model on two workers of Ray Train; with `--tune`, Ray Tune compares strategies, numbers of ranks and learning rates."""

import argparse
from pathlib import Path

import lightning as L
import ray
from ray import tune
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier
from lightning_gnn.ray import RayReportCallback, last_checkpoint, prepare_trainer

RUNS = str(Path("ray_runs").absolute())  # of all machines, on a shared file system


def train_model(config: dict) -> float:
    """Runs in each worker, which is one rank."""
    L.seed_everything(0)
    data = GraphDataModule(
        "lightning_gnn.planted_partition", {"num_nodes": 20_000, "num_features": 64, "num_classes": 8, "seed": 0}
    )
    model = NodeClassifier(GCN(in_channels=64, hidden_channels=64, num_layers=2, out_channels=8), lr=config["lr"])
    trainer = L.Trainer(
        strategy=config["strategy"],
        plugins=[RayLightningEnvironment()],
        callbacks=[RayReportCallback(every_n_epochs=5)],
        max_epochs=30,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer)
    with last_checkpoint() as path:  # None, unless Ray has started the workers again
        trainer.fit(model, datamodule=data, ckpt_path=path)
    [result] = trainer.test(model, datamodule=data)
    return result["test_acc"]


def start_ranks(config: dict, **options) -> ray.train.Result:
    trainer = TorchTrainer(
        train_model,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=config["ranks"], resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            storage_path=RUNS,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            **options,
        ),
    )
    return trainer.fit()


def run_trial(config: dict) -> None:
    """Runs in the process of one trial of Tune, which starts a group of ranks."""
    start_ranks(config, name=tune.get_context().get_trial_id(), callbacks=[TuneReportCallback()])


def search() -> None:
    space = {
        "strategy": tune.grid_search(["dgcl", "vertex_cut"]),
        "ranks": tune.grid_search([1, 2]),
        "lr": tune.choice([0.01, 0.02]),
    }
    options = tune.TuneConfig(metric="val_acc", mode="max", max_concurrent_trials=1)
    found = tune.Tuner(run_trial, param_space=space, tune_config=options, run_config=tune.RunConfig(storage_path=RUNS)).fit()
    for each in found:
        print(f"{each.config}: validation accuracy {each.metrics['val_acc']:.3f}")
    print("Best:", found.get_best_result().config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--address", help="of a cluster, such as auto; without it, this machine")
    arguments = parser.parse_args()
    local = {} if arguments.address else {"num_cpus": 2, "object_store_memory": 200e6, "include_dashboard": False}
    ray.init(address=arguments.address, **local)
    try:
        if arguments.tune:
            search()
        else:
            result = start_ranks({"strategy": "dgcl", "ranks": arguments.ranks, "lr": 0.01})
            last = Path(result.checkpoint.path).name
            print(f"Test accuracy {result.return_value:.3f} on {arguments.ranks} ranks; last report: {last}")
    finally:
        ray.shutdown()
