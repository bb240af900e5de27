"""What a run's numbers are, scheme by scheme: metrics of unlike parts, the same bits for the same seed (gloo ranks)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from common import CLASSES, FEATURES, UserModule, awkward_graph, build, quiet_trainer
from torch_geometric.nn.models import GCN

from lightning_gnn import (
    CachedVertexCutStrategy,
    ClusterAllReduceStrategy,
    CoverStrategy,
    DGCLStrategy,
    GossipStrategy,
    GraphDataModule,
    NodeClassifier,
    SamplingStrategy,
    SpMM1DStrategy,
    SpMM2DStrategy,
    SpMM15DStrategy,
    VertexCutStrategy,
)

EXACT: dict[str, Any] = {
    "dgcl": DGCLStrategy,
    "spmm_1d": SpMM1DStrategy,
    "spmm_15d": SpMM15DStrategy,
    "spmm_2d": SpMM2DStrategy,
    "vertex_cut": VertexCutStrategy,
    "cover": CoverStrategy,
}
OTHERS: dict[str, Any] = {
    "vertex_cut_cached": lambda **options: CachedVertexCutStrategy(cache=0.1, cache_within_hosts=True, **options),
    "sampling": lambda **options: SamplingStrategy([2, 2], 3, **options),  # the last batches of ranks are uneven
    "cluster_allreduce": lambda **options: ClusterAllReduceStrategy(num_clusters=6, **options),
    "gossip": lambda **options: GossipStrategy(num_clusters=6, average_every_n_batches=2, heartbeat_timeout=60, **options),
}


def strategy_of(name: str) -> Any:
    return {**EXACT, **OTHERS}[name](timeout=300, self_check=False) if name != "auto" else name


def graph_and_parts() -> tuple[Any, torch.Tensor]:
    """A graph, and parts: ranks 0 and 1 have nodes of one class only, rank 2 a single node, rank 3 the rest."""
    graph = awkward_graph(seed=3)
    graph.y[graph.y < 0] = 0
    parts = graph.y.clamp(max=3)
    parts[parts == 2] = 3
    parts[50] = 2
    return graph, parts


def evaluate(module: L.LightningModule, trainer: L.Trainer, data: GraphDataModule) -> dict[str, Any]:
    """Returns what all ranks say of these weights."""
    [tested] = trainer.test(module, datamodule=data, verbose=False)
    [validated] = trainer.validate(module, datamodule=data, verbose=False)
    [predicted] = trainer.predict(module, datamodule=data)
    return {**tested, **validated, "predicted": predicted}


def evaluated(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """Trains two epochs under each strategy; returns losses, metrics and predictions, and the weights they are of."""
    graph, parts = graph_and_parts()
    found = {}
    for name in names:
        if name in ("gossip", "cluster_allreduce"):
            partition = None  # they have clusters of their own
        else:
            partition = parts[graph.edge_index[1]] if name.startswith("vertex_cut") else parts
        data = GraphDataModule(graph, partition=partition)
        module = UserModule(build("gin_batch_norm")).double()
        trainer = quiet_trainer(strategy_of(name), world_size, max_epochs=2)
        trainer.fit(module, datamodule=data)
        loss = float(trainer.callback_metrics.get("train_loss", "nan"))  # a gossip worker may come to nothing
        weights = {key: value.clone() for key, value in module.state_dict().items()}
        found[name] = {"loss": loss, "weights": weights, "values": evaluate(module, trainer, data)}
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*EXACT, *OTHERS], id="all", marks=pytest.mark.campaign),
        pytest.param(["spmm_2d", "vertex_cut", "cover", "gossip"], id="some"),
    ],
)
def test_metrics_of_parts_with_one_class_or_one_node_are_those_of_the_whole(ranks, names):
    """Accuracy, F1 (macro) and AUROC of every scheme, with BatchNorm: those of its weights on one device."""
    [alone] = evaluated(0, 1, ["auto"]).values()
    found = ranks.run(4, evaluated, names)
    graph = graph_and_parts()[0]
    for name in found[0]:
        module = UserModule(build("gin_batch_norm")).double()
        module.load_state_dict(found[0][name]["weights"])
        expected = evaluate(module, quiet_trainer("auto", 1), GraphDataModule(graph))
        assert {"test_acc", "test_f1", "test_auroc", "val_auroc", "val_loss"} <= expected.keys()
        for each in (result[name] for result in found):
            # torchmetrics computes F1 and AUROC in float32
            torch.testing.assert_close(
                each["values"], expected, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )
            if name in EXACT:
                assert each["loss"] == pytest.approx(alone["loss"], rel=1e-9)


class Checks(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert torch.are_deterministic_algorithms_enabled()


def twice(rank: int, world_size: int, names: list[str]) -> dict[str, list[list[torch.Tensor]]]:
    """Trains two times under each strategy, in float32, with dropout and BatchNorm; returns weights and predictions."""
    found: dict[str, list[list[torch.Tensor]]] = {}
    for name in names:
        for _ in range(2):
            L.seed_everything(7, verbose=False)
            model = GCN(FEATURES, 16, num_layers=2, out_channels=CLASSES, dropout=0.5, norm="batch_norm")
            module = NodeClassifier(model, num_classes=CLASSES)
            data = GraphDataModule(awkward_graph(dtype=torch.float32))
            trainer = quiet_trainer(strategy_of(name), world_size, deterministic=True, callbacks=[Checks()])
            try:
                trainer.fit(module, datamodule=data)
                predicted = trainer.predict(module, datamodule=data)
            finally:
                torch.use_deterministic_algorithms(False)
            found.setdefault(name, []).append([*module.state_dict().values(), *predicted])
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["dgcl", "vertex_cut"],
        pytest.param(["spmm_1d", "vertex_cut_cached", "sampling", "cluster_allreduce"], marks=pytest.mark.campaign),
    ],
)
def test_the_same_seed_gives_the_same_bits(ranks, names):
    """With Trainer(deterministic=True); all ranks end with one result. Grids: test_spmm.py."""
    results = ranks.run(4, twice, names)
    for name in names:
        first = results[0][name][0]
        assert all(value.isfinite().all() for value in first)
        for found in (run for result in results for run in result[name]):
            assert all(map(torch.equal, found, first)), name
