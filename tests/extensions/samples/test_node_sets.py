"""Samples on graphs with two node sets equal one device with the same global batches (gloo ranks)."""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from common import campaign, quiet_trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from node_set_runs import (
    FEATURES,
    NODES,
    SITES,
    TARGETS,
    TYPED_MODELS,
    UP,
    TypedModule,
    TypedSamples,
    graph_of_node_sets,
    train_typed_samples,
)

from lightning_gnn import DGCLStrategy, GraphDataModule, SpMM1DStrategy, VertexCutStrategy, advise, check_parity
from lightning_gnn.checks.footprint import Sizes, _steps
from lightning_gnn.checks.small_graph import Form
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.samples.small_graph import first_samples, sample_shards, select_nodes
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategy.graph_kinds import make_small_graph
from lightning_gnn.strategy.memory_checks import predicted_steps, sample_bytes
from lightning_gnn.strategy.scheme import bind_module


@cache
def on_one_device(name: str) -> dict[str, Any]:
    return train_typed_samples(0, 1, [name], strategy="auto")[name]


def assert_equal(found: dict[str, Any]) -> None:
    for name, ours in found.items():
        torch.testing.assert_close(ours, on_one_device(name), rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("meshes", [*campaign([(4, 2)]), [(2, 1), (2, 2)]])
def test_models(ranks, meshes):
    """Losses, logged values, weights and predictions; the last batch of 9 samples leaves data ranks without a sample."""
    for world_size, graph_ranks in meshes:
        for found in ranks.run(world_size, train_typed_samples, [*TYPED_MODELS], graph_ranks, timeout=280):
            assert_equal(found)


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", [VertexCutStrategy, SpMM1DStrategy])
def test_strategies(ranks, strategy):
    for found in ranks.run(2, train_typed_samples, ["sage", "interaction"], 2, strategy, timeout=280):
        assert_equal(found)


# Formats and batches ##########################################################


def module_of(samples: Any, tmp_path: Path, graph: Any = None, **options: Any) -> GraphDataModule:
    options = {"batch_size": 2, "shuffle": False, "partition": "random", "partition_dir": tmp_path / "store", **options}
    return GraphDataModule(graph_of_node_sets() if graph is None else graph, samples=samples, **options)


def batches_of(data: GraphDataModule, part: int = 0, parts: int = 0) -> list[Any]:
    """Returns the batches of a part of the stored partition, or of the whole graph if `parts` is 0."""
    mesh = SimpleNamespace(data_rank=0, data_ranks=1, graph_rank=0)
    trainer = SimpleNamespace(current_epoch=0, optimizers=[], lightning_module=None, callbacks=[])
    trainer.strategy = SimpleNamespace(mesh_shape=mesh)
    data.trainer = trainer
    if not parts:
        data.setup("fit")
    else:
        data.prepare_for(LayoutSpec("edge_cut", parts, method="metis", takes_types=True))
        data._shard = data.stored_cut().shard(part)
        data.sample_data.setup(data.seed, data._shard, "fit", data.partition_dir / data._folder, data._lock)
    return [*data.train_dataloader()]


def test_batches_of_the_whole_graph(tmp_path):
    graph, samples = graph_of_node_sets(), TypedSamples()
    batches = batches_of(module_of(samples, tmp_path, graph))
    assert len(batches) == 5 and batches[-1].sample_info.indices == [8]
    batch = batches[1]
    assert torch.equal(batch["site"].x, samples.x[2:4]) and torch.equal(batch.x_dict["mesh"], samples.z[2:4])
    assert torch.equal(batch["site"].y, samples.y[2:4]) and torch.equal(batch["site"].seen, samples.seen[2:4])
    assert batch.hour.tolist() == [2.0, 3.0]
    assert batch["site"].num_nodes == SITES and batch["mesh"].num_nodes == NODES and "train_mask" not in batch["site"]
    assert torch.equal(batch["site"].place, graph["site"].place)
    for kind in graph.edge_types:
        assert torch.equal(batch.edge_index_dict[kind], graph[kind].edge_index)
        assert torch.equal(batch[kind].edge_attr, graph[kind].edge_attr)
    dims = {"site.x": 1, "site.y": 2, "site.seen": 1, "mesh.x": 1, "hour": None}
    assert batch.sample_info.node_dims == dims
    assert [extract_batch_size(each) for each in batches] == [2, 2, 2, 2, 1]


def write_folder(folder: Path, samples: TypedSamples) -> Path:
    folder.mkdir()
    items = [samples[index] for index in range(len(samples))]
    for kind, name in (("site", "x"), ("site", "y"), ("site", "seen"), ("mesh", "x")):
        np.save(folder / f"{kind}.{name}.npy", np.stack([item[kind][name].numpy() for item in items]))
    np.save(folder / "hour.npy", np.stack([item["hour"].numpy() for item in items]))
    return folder


@pytest.mark.parametrize("form", ["dict", "hetero", "folder"])
def test_batches_of_parts(form, tmp_path):
    """A rank has the rows of its own nodes of each type."""
    samples = TypedSamples()
    given = write_folder(tmp_path / "samples", samples) if form == "folder" else TypedSamples(as_hetero=form == "hetero")
    seen = {"site": [], "mesh": []}
    for part in range(2):
        for number, batch in enumerate(batches_of(module_of(given, tmp_path), part, 2)):
            of = slice(2 * number, 2 * number + 2)
            ids = {name: batch[name].n_id for name in seen}
            assert torch.equal(batch["site"].x, samples.x[of][:, ids["site"]])
            assert torch.equal(batch["site"].y, samples.y[of][:, :, ids["site"]])
            assert torch.equal(batch["site"].seen, samples.seen[of][:, ids["site"]])
            assert torch.equal(batch["mesh"].x, samples.z[of][:, ids["mesh"]])
            assert batch.hour.tolist() == [*range(9)][of]
        for name, found in ids.items():
            seen[name] += found.tolist()
            assert batch[name].num_nodes == len(found) < {"site": SITES, "mesh": NODES}[name]
    assert sorted(seen["site"]) == [*range(SITES)] and sorted(seen["mesh"]) == [*range(NODES)]


# Memory, check and advise ######################################################


@pytest.mark.parametrize("name", ["interaction", *campaign("graph_conv", "sage", "hetero")])
def test_memory_of_small_graphs_predicts_larger_graphs(name, tmp_path):
    """Predictions are made from steps with as many samples as the batch of a data rank."""
    module, strategy = TypedModule(TYPED_MODELS[name]()).double(), DGCLStrategy(graph_ranks=2)
    trainer, data = quiet_trainer(strategy, 4), module_of(TypedSamples(), tmp_path, batch_size=3)
    trainer.state.fn = TrainerFn.FITTING
    data.prepare_for(strategy.layout())
    shard, run = data.stored_cut().shard(0), strategy._run_for_checks(module, trainer, data)
    steps = predicted_steps(run, shard)
    small = make_small_graph(shard, run.samples, whole_batch=True)(shard.batch, [], Form((700, 1200), (4000, 7000), (10, 10)))
    bind = partial(bind_module, DGCLStrategy(topology=None).scheme, meter=Meter())
    ran = _steps([module, copy.deepcopy(module)], small, bind, LayoutSpec("edge_cut", 2))
    for of_rank, found in ran:
        expected = steps.footprint(Sizes.of(of_rank, 0))
        for phase in ("setup", "forward", "backward", "evaluation"):
            assert getattr(expected.peak(), phase) == pytest.approx(getattr(found.peak(), phase), rel=0.02)


def test_sample_bytes_by_type(tmp_path):
    strategy, data = DGCLStrategy(graph_ranks=2), module_of(TypedSamples(), tmp_path, batch_size=3)
    trainer = quiet_trainer(strategy, 4)
    trainer.state.fn = TrainerFn.FITTING
    data.prepare_for(strategy.layout())
    run = strategy._run_for_checks(TypedModule(TYPED_MODELS["sage"]()), trainer, data)
    found = dict(zip(data.stored_cut().types.nodes, sample_bytes(run, data.stored_cut()).tolist()))
    assert found == {"site": 3 * (8 * FEATURES + 2 * 8 * TARGETS + 1), "mesh": 3 * 8 * FEATURES}


@pytest.mark.parametrize("nodes", [None, 40])
def test_check(nodes, tmp_path):
    data = module_of(TypedSamples(), tmp_path, val_samples=TypedSamples(), predict_samples=TypedSamples())
    module = TypedModule(TYPED_MODELS["interaction"]()).double()
    report = check_parity(module, data, ["dgcl", "vertex_cut", "spmm_1d", "sampling"], nodes=nodes)
    assert report.ok and [each.verdict for each in report.schemes] == [*["same"] * 3, "not compared"]
    assert (report.nodes, report.of_nodes) == (nodes or SITES + NODES, SITES + NODES)
    assert all(each.steps == ["training_step", "validation_step", "predict_step"] for each in report.schemes[:3])


def test_checked_nodes_keep_their_values():
    graph, samples = graph_of_node_sets(), TypedSamples()
    chosen = {"site": torch.tensor([3, 30, 7]), "mesh": torch.tensor([16, 2])}
    for name, ids in chosen.items():
        graph[name].n_id = ids
    given = first_samples(GraphDataModule(graph_of_node_sets(), samples=samples, batch_size=2), graph_of_node_sets())["fit"]
    tensors, form = select_nodes(*given, graph)
    assert torch.equal(tensors["site.y"], samples.y[:3][:, :, chosen["site"]])
    assert torch.equal(tensors["mesh.x"], samples.z[:3][:, chosen["mesh"]]) and tensors["hour"].tolist() == [0, 1, 2]
    assert form.tensors["mesh.x"].shape == (2, FEATURES)


class Centered(TypedModule):
    """Subtracts the mean of a rank's own rows, in the backward of a function that row semantics do not see."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return CenteredGradients.apply(self.model(batch)).square().mean()


class CenteredGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean()


def test_check_finds_wrong_steps(tmp_path):
    [found] = check_parity(Centered(TYPED_MODELS["sage"]()).double(), module_of(TypedSamples(), tmp_path), ["dgcl"]).schemes
    assert found.verdict == "differs" and found.finding is not None and found.finding.step == "training_step"


def test_advice(tmp_path):
    """Ranks of the rehearsal have the rows of their nodes; messages of data ranks are sums of gradients only."""
    data, module = module_of(TypedSamples(), tmp_path, batch_size=2), TypedModule(TYPED_MODELS["sage"]()).double()
    found = {str(each.candidate): each for each in advise(module, data, devices=2)}
    alone, divided = found["dgcl graph_ranks=1 plan=p2p"], found["dgcl graph_ranks=2 plan=p2p"]
    assert alone.applies and divided.applies and found["vertex_cut graph_ranks=2"].applies
    gradients = sum(each.nbytes for each in module.parameters())
    assert alone.steps == 3 and alone.bytes_sent == 3 * 2 * gradients  # 9 samples in batches of 4
    assert divided.bytes_sent > alone.bytes_sent * divided.steps / alone.steps and 1 < divided.replication <= 2
    assert not any("cover" in name and each.applies for name, each in found.items())
    data.prepare_for(DGCLStrategy(graph_ranks=2).layout())
    shards = [data.stored_cut().shard(rank) for rank in range(2)]
    for shard in sample_shards(data, shards, 1):
        batch, samples = shard.step_batch(), TypedSamples()
        assert torch.equal(batch["site"].y, samples.y[:2][:, :, batch["site"].n_id])
        assert torch.equal(batch["mesh"].x, samples.z[:2][:, batch["mesh"].n_id])


# Node dimensions ##############################################################


def test_node_dims_of_a_type(tmp_path):
    """The mesh has as many values over time as nodes: the user selects the dimension."""
    x = torch.arange(float(NODES * NODES)).view(NODES, NODES)
    item = {"mesh": {"x": x}, "site": {"x": torch.zeros(SITES, NODES), "z": torch.zeros(SITES)}}
    options = {"node_dims": {("mesh", "x"): 1, ("site", "z"): None}}
    [batch] = batches_of(module_of([item], tmp_path, **options), 0, 2)
    assert torch.equal(batch["mesh"].x[0], x[:, batch["mesh"].n_id]) and batch["site"].z.shape == (1, SITES)
    assert batch.sample_info.node_dims == {"mesh.x": 2, "site.x": 1, "site.z": None}


WHOLE = {"x": torch.zeros(SITES, 1)}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"site": {"place": torch.zeros(SITES)}}, r"site.place of samples\[0\] must have another name.*del data\['site'\].place"),
        ({"site": {**WHOLE, "n_id": torch.zeros(SITES)}}, r"site.n_id of samples\[0\] must have another name"),
        ({"site": WHOLE, "mesh": torch.zeros(3)}, r"mesh of samples\[0\] must have another name"),
        ({"site": WHOLE, "sea": {"x": torch.zeros(3)}}, r"must have tensors of node types \['mesh', 'site'\], got sea.x"),
        ({"site": WHOLE, UP: {"w": torch.zeros(90)}}, r"must have tensors of node types .*, got site__to__mesh.w"),
        ({"site": {"x": torch.zeros(SITES - 1, 2)}}, rf"no tensor of sample 0 has N={SITES} .*site.x \[{SITES - 1}, 2\]"),
        ({"site": {"x": torch.zeros(3)}, "mesh": {"x": torch.zeros(NODES)}}, rf"no tensor of .* N={SITES} .*site.x"),
        ({"site": WHOLE, "mesh": {"x": torch.zeros(SITES)}}, rf"no tensor of sample 0 has N={NODES} .*mesh.x \[{SITES}\]"),
        ({"site": {"x": torch.zeros(2, 3, SITES)}}, rf"has N={SITES} .*or pass node_dims={{\('site', 'x'\): 2}}"),
        ({"hour": 1.0}, "no tensor of sample 0 has N="),
    ],
)
def test_invalid_samples(item, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        batches_of(module_of([item], tmp_path))


def test_later_samples_have_the_format_of_the_first(tmp_path):
    items = [{"site": {"x": torch.zeros(SITES)}}, {"site": {"x": torch.zeros(SITES + 1)}}]
    with pytest.raises(ValueError, match=r"site.x of samples\[1\] is \[32\] float32, but site.x of samples\[0\] is \[31\]"):
        batches_of(module_of(items, tmp_path))


def test_concatenated_samples_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="concatenate=True does not support a HeteroData"):
        batches_of(module_of(TypedSamples(), tmp_path, concatenate=True))
