"""Each scheme and option that elastic training does not support is rejected before ranks start, with one message."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, SpMM15DStrategy, planted_partition
from lightning_gnn.extensions.elastic.support import SCHEMES
from lightning_gnn.nn import DistributedEmbedding
from lightning_gnn.registry import STRATEGIES, class_of_strategies


def trainer_of(strategy: object, **options: object) -> L.Trainer:
    given = {"devices": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **options}
    return L.Trainer(strategy=strategy, accelerator="cpu", **given)


class Other(Logger):
    name, version = "other", 0

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, *_, **__): ...


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "auto_gnn"])
def test_every_scheme_is_supported_or_rejected(name):
    strategy = class_of_strategies(STRATEGIES[name][1])(elastic=True)
    if SCHEMES[name]:
        with pytest.raises(ValueError, match=f"does not support strategy '{name}': {SCHEMES[name]}"):
            trainer_of(strategy)
    else:
        trainer_of(strategy)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (lambda: DGCLStrategy(elastic=True, start_method="spawn"), {}, "a start_method other than 'popen': only ranks"),
        (lambda: DGCLStrategy(elastic=True, start_method="fork"), {}, "a start_method other than 'popen': only ranks"),
        (lambda: DGCLStrategy(elastic=True), {"num_nodes": 2}, "several machines without torchrun"),
        (lambda: DGCLStrategy(elastic=True), {"devices": 1}, "devices=1: without another rank"),
        (lambda: DGCLStrategy(elastic=True, memory_limit="4GB"), {}, "memory_limit: ranks compute in turns"),
        (lambda: DGCLStrategy(elastic=True, graph_ranks=2), {}, "graph_ranks: the ranks that remain"),
        (lambda: SpMM15DStrategy(elastic=True, replication_factor=2), {}, "replication_factor: it may not divide"),
        (lambda: DGCLStrategy(elastic=True, min_ranks=3), {}, "min_ranks=3 is above the number of ranks, 2"),
        (lambda: DGCLStrategy(elastic=True, min_ranks=0), {}, "min_ranks must be at least 1"),
        (lambda: DGCLStrategy(elastic=True, min_ranks=1.5), {}, "min_ranks must be an integer"),
    ],
)
def test_options_of_strategies_are_rejected_when_a_trainer_is_made(strategy, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(strategy(), **options)


class Embedded(NodeClassifier):
    def __init__(self) -> None:
        super().__init__(GCN(32, 8, 2, 8))
        self.embedding = DistributedEmbedding(200, 32)


@pytest.mark.parametrize(
    ("options", "module", "message"),
    [
        ({"logger": Other()}, None, "does not support Other: if rank 0 is lost, .* Use CSVLogger or TensorBoardLogger"),
        ({"logger": CSVLogger("memory://logs")}, None, "needs a local folder for CSVLogger"),
        ({"callbacks": [LearningRateFinder()]}, None, "LearningRateFinder: it trains before the first epoch"),
        ({"callbacks": [BatchSizeFinder()]}, None, "BatchSizeFinder: it trains before the first epoch"),
        (
            {"callbacks": [OnExceptionCheckpoint(".")], "enable_checkpointing": True},
            None,
            "OnExceptionCheckpoint: a loss is not an exception",
        ),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, None, "StochasticWeightAveraging: it adds an epoch"),
        ({"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}, None, "ModelPruning: its set-up"),
        ({"plugins": [AsyncCheckpointIO()]}, None, "AsyncCheckpointIO: rank 0 may be lost before"),
        ({}, Embedded, "DistributedEmbedding: each rank has rows"),
    ],
)
def test_parts_of_a_run_are_rejected_before_ranks_start(options, module, message):
    trainer = trainer_of(DGCLStrategy(elastic=True), **options)
    model = module() if module else NodeClassifier(GCN(32, 8, 2, 8))
    trainer.state.fn = "fit"
    with pytest.raises(ValueError, match=message):
        trainer.strategy.before_ranks_start(trainer, (model, GraphDataModule(planted_partition(200))))


def test_gpus_are_rejected():
    strategy = DGCLStrategy(elastic=True, parallel_devices=[torch.device("cuda", index) for index in range(2)])
    with pytest.raises(ValueError, match="GPUs: leaving NCCL operations"):
        strategy._configure_launcher()
