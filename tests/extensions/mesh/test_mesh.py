"""Samples on one graph over data ranks and graph ranks equal one device with the same global batches (gloo ranks)."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from common import campaign, quiet_trainer
from conftest import RankFailed
from sample_runs import CONCATENATED, IN_ORDER, LEARNED, MODELS, NODES, SampleModule, Samples, graph_of_samples, train_samples
from torch_geometric.data import Data

from lightning_gnn import (
    CachedVertexCutStrategy,
    CoverStrategy,
    DGCLStrategy,
    GossipStrategy,
    GraphDataModule,
    SamplingStrategy,
    SpMM1DStrategy,
    SpMM2DStrategy,
    VertexCutStrategy,
    gather_nodes,
)
from lightning_gnn.extensions.mesh.rows import MeshStreams


@cache
def on_one_device(name: str, global_batch_size: int, options: str) -> dict[str, Any]:
    run = dict(each.split("=") for each in options.split()) if options else {}
    numbers = {key: int(value) for key, value in run.items()}
    return train_samples(0, 1, [name], strategy="auto", global_batch_size=global_batch_size, **numbers)[name]


def assert_equal(found: dict[str, Any], global_batch_size: int = 4, options: str = "") -> None:
    for name, ours in found.items():
        expected = on_one_device(name, global_batch_size, options)
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("world_size", "graph_ranks", "size"), [*campaign((2, 1, 4), (2, 2, 4), (3, 1, 6)), (4, 2, 4)]
)
def test_models(ranks, world_size, graph_ranks, size):
    """Losses, logged values, weights and predictions; the last batch of 9 samples leaves data ranks without a sample."""
    for found in ranks.run(world_size, train_samples, [*MODELS], graph_ranks, global_batch_size=size, timeout=280):
        assert_equal(found, size)


@pytest.mark.parametrize(
    ("world_size", "graph_ranks", "size"), [*campaign((2, 1, 4), (2, 2, 4), (3, 1, 6), (3, 3, 4), (4, 2, 4)), (4, 2, 8)]
)
def test_concatenated_samples(ranks, world_size, graph_ranks, size):
    """Copies of the graph, for layers that need ``[N, F]``; layers switch to the copies of a smaller batch and back."""
    for found in ranks.run(world_size, train_samples, [*CONCATENATED], graph_ranks, global_batch_size=size, timeout=280):
        assert_equal(found, size)


def test_one_graph_rank_keeps_the_order_of_nodes_and_edges(ranks):
    for found in ranks.run(2, train_samples, [*IN_ORDER], 1):
        assert_equal(found)


@pytest.mark.parametrize(("world_size", "graph_ranks"), [*campaign((2, 1), (2, 2), (4, 1)), (4, 2)])
def test_rows_that_nodes_learn(ranks, world_size, graph_ranks):
    first, *others = ranks.run(world_size, train_samples, [*LEARNED], graph_ranks, timeout=280)
    assert_equal(first)
    for found in others:  # after training, the first rank has all rows
        for name, each in found.items():
            each["weights"] |= {key: value for key, value in first[name]["weights"].items() if "conv" not in key}
        assert_equal(found)


class GatherNodes(SampleModule):
    """Reads nodes by original ids, which have a row in each copy."""

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        return gather_nodes(self.model(batch), torch.arange(3)).sum()


def read_nodes(rank: int, world_size: int, graph_ranks: int) -> None:
    data = GraphDataModule(graph_of_samples(), samples=Samples(), global_batch_size=4, concatenate=True)
    trainer = quiet_trainer(DGCLStrategy(graph_ranks=graph_ranks, timeout=60), world_size, max_epochs=1)
    trainer.fit(GatherNodes(CONCATENATED["concatenated_gcn"]()).double(), datamodule=data)


@pytest.mark.parametrize("graph_ranks", [1, 2])
def test_nodes_of_copies_are_not_gathered_by_id(ranks, graph_ranks):
    with pytest.raises(RankFailed, match="gather_nodes.* do not support concatenate=True on ranks"):
        ranks.run(2, read_nodes, graph_ranks)


@pytest.mark.parametrize("strategy", [CoverStrategy, *campaign(SpMM1DStrategy, VertexCutStrategy)])
def test_strategies_with_concatenated_samples(ranks, strategy):
    for found in ranks.run(2, train_samples, ["gat", "concatenated_gcn", "concatenated_sage"], 2, strategy, timeout=280):
        assert_equal(found)


@pytest.mark.parametrize("strategy", [*campaign(SpMM1DStrategy, VertexCutStrategy), CoverStrategy])
def test_strategies(ranks, strategy):
    for found in ranks.run(4, train_samples, ["gcn", "sage_max", "mesh_graph_net"], 2, strategy, timeout=280):
        assert_equal(found)


WITHOUT_NODES = ["gcn", "graph_conv", "sage", "sage_max", "gat"]


@pytest.mark.parametrize(
    ("size", "names", "strategy"),
    [
        (2, WITHOUT_NODES, DGCLStrategy),
        *campaign(
            *((2, WITHOUT_NODES, strategy) for strategy in (CoverStrategy, SpMM1DStrategy)),
            (2, [*MODELS, *CONCATENATED], DGCLStrategy),
            (4, [*MODELS, *CONCATENATED], DGCLStrategy),
        ),
    ],
)
def test_a_rank_without_nodes(ranks, size, names, strategy):
    for found in ranks.run(size, train_samples, names, 2, strategy, partition=[0] * NODES, timeout=280):
        assert_equal(found)


@pytest.mark.campaign
def test_blocks(ranks):
    """A scheme with a grid of ranks, which all have the same samples."""
    for found in ranks.run(4, train_samples, ["gcn", "graph_conv"], 4, SpMM2DStrategy, timeout=280):
        assert_equal(found)


OF_NODES = [name for name in MODELS if name != "mesh_graph_net"]  # the edges that its checkpointed convs return have no placement


@pytest.mark.parametrize(("world_size", "graph_ranks", "names"), [(2, 1, ["gcn"]), *campaign((2, 2, OF_NODES), (4, 2, OF_NODES))])
def test_checkpointed_convs(ranks, world_size, graph_ranks, names):
    """Convs are recomputed in the backward pass, where graph ranks exchange halo nodes again."""
    options = {"checkpoint_convs": True}
    for found in ranks.run(world_size, train_samples, names, graph_ranks, options=options, timeout=280):
        assert_equal(found)


@pytest.mark.parametrize(("world_size", "graph_ranks"), [(2, 2), *campaign((4, 2))])
def test_codec(ranks, world_size, graph_ranks):
    """Messages of graph ranks are encoded in the first epoch, and all ranks have one loss."""
    expected = on_one_device("gcn", 4, "")
    found = ranks.run(world_size, train_samples, ["gcn"], graph_ranks, options={"codec": "int4"})
    steps = len(expected["losses"]) // 2
    for each in found:
        assert each["gcn"]["losses"] == pytest.approx(found[0]["gcn"]["losses"], abs=1e-12)
        torch.testing.assert_close(each["gcn"]["losses"], expected["losses"], rtol=0.02, atol=0)
        differences = [abs(x - y) for x, y in zip(each["gcn"]["losses"][:steps], expected["losses"])]
        assert max(differences) > 1e-6
        first, last = each["gcn"]["codec_errors"]
        assert 0.001 < first < 0.2 and last == 0 and [first, last] == found[0]["gcn"]["codec_errors"]


def test_accumulation(ranks):
    """Gradients of two batches are summed over ranks once."""
    options = "accumulate_grad_batches=2"
    for found in ranks.run(2, train_samples, ["gcn"], 1, accumulate_grad_batches=2):
        assert_equal(found, options=options)


# Random numbers ###############################################################


class Drawing(SampleModule):
    """Stores the draws of a step: per sample, per node of a sample, common ones, Python's, and for all samples."""

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        import random

        noise = torch.rand(batch.x.size(0), 1, 1)
        per_node, for_all = torch.rand_like(batch.x[..., 0]), torch.rand(3)
        kept = torch.nn.functional.dropout(batch.x)
        of_global_batch = torch.rand(len(batch.x), 1, 1)  # len returns an int
        used = (of_global_batch + 0 * batch.x)[:, 0, 0]
        self.drawn = [noise.detach(), per_node.detach(), for_all, torch.tensor(random.random()), kept.detach()]
        self.drawn += [of_global_batch.detach(), used.detach()]
        self.drawn = [each.as_subclass(torch.Tensor).clone() for each in self.drawn]
        return self.loss(batch) + 0 * noise.mean()


def draw(rank: int, world_size: int) -> list[list[float]]:
    L.seed_everything(0, verbose=False)
    module = Drawing(MODELS["gcn"]()).double()
    data = GraphDataModule(graph_of_samples(), samples=Samples(size=4), global_batch_size=4)
    strategy = DGCLStrategy(graph_ranks=2, timeout=60)
    quiet_trainer(strategy, world_size, max_epochs=1).fit(module, datamodule=data)
    with torch.no_grad():
        return [torch.Tensor.numpy(each).ravel().tolist() for each in module.drawn]


def test_random_numbers(ranks):
    """Ranks 0 and 1 have parts of the same samples; ranks 2 and 3 have other samples."""
    noise, per_node, for_all, python, kept, of_global_batch, used = zip(*ranks.run(4, draw))
    assert noise[0] == noise[1] and noise[2] == noise[3] and noise[0] != noise[2]
    assert len({tuple(each) for each in per_node}) == 4
    assert len({tuple(each) for each in for_all}) == len({tuple(each) for each in python}) == 1
    assert len({tuple(value != 0 for value in each) for each in kept}) == 4
    assert len({tuple(each) for each in of_global_batch}) == 1 and len(of_global_batch[0]) == 4
    assert used[0] == used[1] == of_global_batch[0][::2] and used[2] == used[3] == of_global_batch[0][1::2]


def test_streams_of_samples_continue_on_the_same_devices_and_mesh():
    """A rank on a GPU stores two states for each stream."""
    cpu, gpu, of_samples, on_gpu = torch.get_rng_state(), *(torch.full([4], each, dtype=torch.uint8) for each in range(3))
    for stored, own, restored in (
        ([cpu, of_samples, torch.tensor([2])], [cpu], True),
        ([cpu, of_samples, torch.tensor([4])], [cpu], False),
        ([cpu, gpu, of_samples, on_gpu, torch.tensor([2])], [cpu, gpu], False),
        ([cpu], [cpu], False),
    ):
        streams = MeshStreams.__new__(MeshStreams)
        streams._device, streams._inactive_states, streams._sample_states = torch.device("cpu"), [], [on_gpu]
        streams._graph_ranks = torch.tensor([2])
        streams.load([cpu], stored)
        assert all(each is given for each, given in zip(streams._inactive_states, own, strict=True))
        assert (streams._sample_states[0] is of_samples) == restored


# The mesh and its errors ######################################################


class Looking(SampleModule):
    def on_train_start(self) -> None:
        mesh = self.device_mesh
        self.mesh = mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_local_rank("data"), mesh.get_local_rank("graph")
        sums = [torch.full((1,), 1.0 + self.trainer.global_rank) for _ in mesh.mesh_dim_names]
        for each, axis in zip(sums, mesh.mesh_dim_names):
            dist.all_reduce(each, group=mesh.get_group(axis))
        self.sums = torch.cat(sums).tolist()
        self.shares_group = mesh.get_group("graph") is self.trainer.strategy.world.graph_group


def look(rank: int, world_size: int, options: dict[str, Any], data: dict[str, Any]) -> Any:
    module = Looking(MODELS["gcn"]()).double()
    given = {"samples": Samples(size=4), "global_batch_size": 4, **data}
    given = {name: value for name, value in given.items() if value is not None}
    graph = graph_of_samples()
    if "samples" not in given:
        graph.x, graph.y, graph.train_mask = torch.ones(NODES, 1), torch.zeros(NODES), torch.ones(NODES) > 0
    datamodule = GraphDataModule(graph, **given)
    quiet_trainer(DGCLStrategy(timeout=60, **options), world_size, max_epochs=1).fit(module, datamodule=datamodule)
    return module.mesh, module.sums, module.shares_group


def test_device_mesh(ranks):
    found = ranks.run(4, look, {"graph_ranks": 2}, {})
    sums = [[4.0, 3.0], [6.0, 3.0], [4.0, 7.0], [6.0, 7.0]]
    assert found == [((("data", "graph"), [[0, 1], [2, 3]], rank // 2, rank % 2), sums[rank], False) for rank in range(4)]


def test_device_mesh_of_one_data_rank(ranks):
    """Its graph ranks have the group of all ranks: over NCCL, another group would take memory of each device."""
    found = ranks.run(2, look, {}, {})
    assert found == [((("data", "graph"), [[0, 1]], 0, rank), [1.0 + rank, 3.0], True) for rank in range(2)]


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"graph_ranks": 2}, {}, "must be a multiple of graph_ranks, got 3 ranks and graph_ranks=2. Set devices to 2"),
        ({"graph_ranks": 6}, {}, "must be a multiple of graph_ranks, got 3 ranks and graph_ranks=6. Set devices to 6"),
        ({"graph_ranks": 1, "plan": "swap"}, {"global_batch_size": 3}, "plan='swap' does not support several data ranks"),
        ({"graph_ranks": 1}, {"samples": None, "global_batch_size": None}, "3 data ranks, which need samples, but"),
        ({"graph_ranks": 1}, {}, "global_batch_size must be divisible by the number of data ranks, got 4 and 3"),
    ],
)
def test_errors(ranks, options, data, message):
    with pytest.raises(RankFailed) as failed:
        ranks.run(3, look, options, data)
    assert all(message in line for line in failed.value.errors.values()), failed.value.errors


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (DGCLStrategy(elastic=True), "elastic=True continues full-graph runs only"),
        (SamplingStrategy(), "it trains on sampled neighborhoods of one graph"),
        (GossipStrategy(), "its workers train on clusters of one graph"),
        (CachedVertexCutStrategy(), "its cache keeps rows of the last step"),
        (VertexCutStrategy(cache=0.1), "its cache keeps rows of the last step"),
    ],
)
def test_unsupported_strategies(strategy, reason):
    data = GraphDataModule(graph_of_samples(), samples=Samples(), batch_size=2)
    with pytest.raises(ValueError, match=f"samples is not supported with {type(strategy).__name__}: {reason}"):
        data.sample_data.check_strategy(strategy)


def test_argument():
    for value in (0, -1, True, "two"):
        with pytest.raises(ValueError, match="graph_ranks must be an integer of at least 1"):
            DGCLStrategy(graph_ranks=value)


def test_sizes(ranks):
    """A step reads the sizes of the global batch and of the whole graph on each rank."""

    for shapes in ranks.run(4, read_sizes):
        assert shapes == [(4, NODES, 5), (4, NODES), 4, 4 * NODES * 5, [0.0, 1.0, 2.0, 3.0], NODES]


class Reading(SampleModule):
    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        from lightning_gnn import gather_global

        x = batch.x
        shapes = [tuple(map(int, x.shape)), tuple(map(int, x[..., 0].shape)), len(x), int(x.numel())]
        self.shapes = [*shapes, gather_global(batch.hour).tolist(), int(batch.num_nodes)]
        return self.loss(batch)


def read_sizes(rank: int, world_size: int) -> Any:
    module = Reading(MODELS["gcn"]()).double()
    data = GraphDataModule(graph_of_samples(), samples=Samples(size=4), global_batch_size=4, shuffle=False)
    strategy = DGCLStrategy(graph_ranks=2, timeout=60)
    quiet_trainer(strategy, world_size, max_epochs=1).fit(module, datamodule=data)
    return module.shapes


# Datasets that differ #########################################################


class Odd(Samples):
    """Samples of which one has other values on rank 1, or cannot be read there, or which are fewer there.

    The samples with index 1 are not compared when a stage begins.
    """

    def __init__(self, rank: int, kind: str) -> None:
        super().__init__(size=3 if kind == "size" and rank == 1 else 4)
        self.is_unreadable = kind == "unreadable" and rank == 1
        if kind in ("values", "first values") and rank == 1:
            self.x[1 if kind == "values" else 2, -1, 0] += 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.is_unreadable and index == 2:
            raise OSError("disk error")
        return super().__getitem__(index)


class Augmented(Samples):
    """Samples with noise, which is equal on graph ranks."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"noise": torch.rand(NODES)}


def train_odd(rank: int, world_size: int, kind: str, graph_ranks: int = 2, stage: str = "fit") -> None:
    samples = Augmented(size=4) if kind == "noise" else Odd(rank, kind)
    name = {"fit": "samples", "validate": "val_samples", "predict": "predict_samples"}[stage]
    data = GraphDataModule(graph_of_samples(), **{name: samples}, global_batch_size=4)
    trainer = quiet_trainer(DGCLStrategy(graph_ranks=graph_ranks, timeout=60), world_size, max_epochs=2)
    getattr(trainer, stage)(SampleModule(MODELS["gcn"]()).double(), datamodule=data)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("size", "same numbers of samples on all ranks, got {'samples': 3} on rank 1 and {'samples': 4} on rank 0"),
        ("values", "Sample 1 must be equal on all graph ranks, but differs between ranks 0 and 1 in epoch 0"),
    ],
)
def test_different_datasets(ranks, kind, message):
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, train_odd, kind)
    assert all(message in line for line in failed.value.errors.values()), failed.value.errors


@pytest.mark.parametrize(
    ("stage", "name"), [("fit", "samples"), *campaign(("validate", "val_samples"), ("predict", "predict_samples"))]
)
@pytest.mark.parametrize("graph_ranks", [1, *campaign(2)])
def test_different_datasets_of_data_ranks(ranks, graph_ranks, stage, name):
    """Ranks compare some samples of each dataset of a stage when it begins; all ranks raise."""
    for kind, message in (
        ("first values", rf"{name}[2] must be equal on all ranks, but differs between ranks 0 and 1 at the start"),
        ("unreadable", "OSError: disk error"),
    ):
        with pytest.raises(RankFailed) as failed:
            ranks.run(2, train_odd, kind, graph_ranks, stage)
        assert len(failed.value.errors) == 2
        assert all(message in line for line in failed.value.errors.values()), failed.value.errors


def test_random_samples(ranks):
    ranks.run(4, train_odd, "noise")


class LogsLocalSizes(SampleModule):
    """Passes the number of samples of its data rank as `batch_size`; the last batch has samples of one data rank only."""

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.sample_info.indices))
        return loss


def log_local_sizes(rank: int, world_size: int) -> None:
    module, data = LogsLocalSizes(MODELS["gcn"]()).double(), GraphDataModule(graph_of_samples(), samples=Samples(), batch_size=2)
    quiet_trainer(DGCLStrategy(graph_ranks=1, timeout=60, self_check=False), world_size).fit(module, datamodule=data)


def test_sizes_in_logs_that_differ_between_ranks(ranks):
    """Ranks would log different means of an epoch."""
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, log_local_sizes)
    message = "self.log('loss', ..., batch_size=...) must be given one size on all ranks, got [1.0, 0.0]. Pass the number"
    assert all(message in line for line in failed.value.errors.values()), failed.value.errors
