"""Samples on graphs with two node sets equal one device with the same global batches (gloo ranks)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from common import campaign
from node_set_runs import NODES, SITES, TYPED_MODELS, UP, TypedSamples, graph_of_node_sets, train_typed_samples

from lightning_gnn import GraphDataModule, SpMM1DStrategy, VertexCutStrategy
from lightning_gnn.partition.layout import LayoutSpec


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
        ({"site": {"x": torch.zeros(SITES - 1, 2)}}, rf"no tensor of sample 0 has N={SITES} .*\('site', 'x'\): 1"),
        ({"site": {"x": torch.zeros(3)}, "mesh": {"x": torch.zeros(NODES)}}, rf"no tensor of .* N={SITES} .*site.x"),
        ({"site": WHOLE, "mesh": {"x": torch.zeros(SITES)}}, rf"no tensor of sample 0 has N={NODES} .*mesh.x \[{SITES}\]"),
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
