"""Samples on one graph: their order, formats, batches of a rank's rows, folders and splits. No ranks."""

from __future__ import annotations

import pickle
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from common import examples, quiet_trainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv

from lightning_gnn import DGCLStrategy, GraphDataModule, split_by_time
from lightning_gnn.data import store
from lightning_gnn.data.shards import split_graph
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.extensions.samples import folders
from lightning_gnn.extensions.samples.copies import Copies
from lightning_gnn.extensions.samples.folders import FolderSamples
from lightning_gnn.extensions.samples.formats import SampleFormat, digest_of
from lightning_gnn.extensions.samples.loader import SampleBatch
from lightning_gnn.extensions.samples.order import GlobalOrder, positions_of
from lightning_gnn.partition.layout import LayoutSpec, Replicas

N, S, T, F = 30, 7, 4, 3
DRAW = torch.Generator().manual_seed(0)
EDGES = torch.randint(0, N, (2, 100), generator=DRAW)
X, Y, TIME = torch.randn(S, T, N, F), torch.randn(S, N), torch.arange(3.0 * S).view(S, 3)


def make_graph(**attributes: Any) -> Data:
    """A graph with neither features nor masks."""
    return Data(edge_index=EDGES, num_nodes=N, edge_weight=torch.linspace(0, 1, EDGES.size(1)), **attributes)


class Items:
    """Samples of two node tensors, one tensor of values per sample, numbers, and an array; `change` replaces some by index."""

    def __init__(self, change: dict[int, dict[str, Any]] | None = None) -> None:
        self.change, self.read = change or {}, list[int]()

    def __len__(self) -> int:
        return S

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        item = {"x": X[index], "y": Y[index], "time": TIME[index].numpy(), "hour": index}
        return {**item, **self.change.get(index, {})}


class Draws(Items):
    """Samples with random numbers of each generator."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = {"x": X[index] + torch.rand(T, N, F), "numpy": np.random.rand(N), "python": random.random()}  # noqa: NPY002
        return {**item, "index": index}


def module_of(samples: Any, tmp_path: Path, graph: Any = None, **options: Any) -> GraphDataModule:
    options = {"batch_size": 2, "shuffle": False, "partition_dir": tmp_path / "store", **options}
    return GraphDataModule(make_graph() if graph is None else graph, samples=samples, **options)


def set_ranks(data: GraphDataModule, data_rank: int = 0, data_ranks: int = 1, epoch: int = 0) -> None:
    strategy = SimpleNamespace(mesh_shape=SimpleNamespace(data_rank=data_rank, data_ranks=data_ranks, graph_rank=0))
    data.trainer = SimpleNamespace(strategy=strategy, current_epoch=epoch, optimizers=[], lightning_module=None, callbacks=[])


def loader_of(data: GraphDataModule, part: int = 0, parts: int = 0, kind: Any = "edge_cut", data_rank: int = 0, data_ranks=1):
    """Returns the training loader of a part of the stored partition, or of the whole graph if `parts` is 0."""
    set_ranks(data, data_rank, data_ranks)
    if not parts:
        data.setup("fit")
    else:
        layout = LayoutSpec(kind, parts, method="metis" if kind == "edge_cut" else "dbh")
        data.prepare_for(layout)
        data._shard = data.stored_cut().shard(part)
        data._shard_of = data._folder, layout
        data.sample_data.check_strategy(data.trainer.strategy)
        data.sample_data.setup(data.seed, data._shard, "fit", data.partition_dir / data._folder, data._lock)
    return data.train_dataloader()


def same(found: list[Any], expected: list[Any]) -> bool:
    names = ("x", "numpy", "python", "index")
    infos = [batch.sample_info.indices for batch in found] == [batch.sample_info.indices for batch in expected]
    return infos and all(torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in names)


# Order ########################################################################


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 9), st.integers(0, 3))
@examples(200)
def test_each_sample_is_in_one_batch_of_one_data_rank(num_samples, batch_size, data_ranks, shuffle, seed, epoch):
    order = GlobalOrder(num_samples, batch_size, data_ranks, shuffle, seed)
    whole = [*GlobalOrder(num_samples, batch_size * data_ranks, 1, shuffle, seed).batches(epoch, 0)]
    ranks = [[*order.batches(epoch, rank)] for rank in range(data_ranks)]
    assert {len(batches) for batches in ranks} == {len(order)} == {-(-num_samples // (batch_size * data_ranks))}
    entries = []
    for number, batch in enumerate(whole):
        assert batch.total == len(batch.indices) and batch.positions.tolist() == [*range(batch.total)]
        assert batch.total == batch_size * data_ranks or number == len(whole) - 1
        for rank, batches in enumerate(ranks):
            assert batches[number].total == batch.total
            assert batches[number].positions.tolist() == [*range(rank, batch.total, data_ranks)]
            assert batches[number].indices == batch.indices[rank::data_ranks]
        entries += batch.indices
    assert sorted(entries) == [*range(num_samples)]
    if shuffle:
        assert entries == torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    else:
        assert entries == sorted(entries)
    assert [batch.indices for batch in order.batches(epoch, 0, 1)] == [batch.indices for batch in ranks[0][1:]]


def test_the_order_draws_no_global_random_numbers(tmp_path):
    loader = loader_of(module_of(Draws(), tmp_path, shuffle=True))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    assert len([*loader]) == 4
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == random.getstate()
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


# Arguments ####################################################################


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": None}, "with samples requires batch_size .* or global_batch_size .* Set one"),
        ({"global_batch_size": 4}, "with samples requires batch_size .* or global_batch_size .* Set one"),
        ({"batch_size": None, "global_batch_size": 0}, "global_batch_size must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"persistent_workers": True}, "require num_workers"),
        ({"shuffle": 1}, "shuffle must be True or False"),
        ({"node_dims": {"x": True}}, "node_dims must map names"),
        ({"val_samples": []}, "val_samples must have at least one sample, got an empty list"),
        ({"val_samples": 3}, "must be a dataset with __len__ and __getitem__, or a folder"),
    ],
)
def test_invalid_arguments(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        module_of(Items(), tmp_path, **options)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"node_dims": {"x": 0}}, {"global_batch_size": 2}, {"shuffle": False}])
def test_options_of_samples_need_samples(options):
    with pytest.raises(ValueError, match=r"require GraphDataModule\(samples=...\)"):
        GraphDataModule(make_graph(), **options)


def test_global_batch_size_is_divided_by_the_data_ranks(tmp_path):
    data = module_of(Items(), tmp_path, batch_size=None, global_batch_size=4)
    assert loader_of(data, data_ranks=2).order == GlobalOrder(S, 2, 2, False, 0)
    with pytest.raises(ValueError, match=r"divisible by the number of data ranks, got 4 and 3 .* global_batch_size=3\."):
        loader_of(data, data_ranks=3)


def test_strategies_without_samples_are_rejected_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(DGCLStrategy, "samples_unsupported_reason", "no reason", raising=False)
    trainer = quiet_trainer(DGCLStrategy(), 1)
    with pytest.raises(ValueError, match="samples is not supported with DGCLStrategy: no reason"):
        trainer.fit(Net(), datamodule=module_of(Items(), tmp_path))


def test_graphs_that_samples_do_not_support(tmp_path):
    data = module_of(Items(), tmp_path)
    data.prepare_for(LayoutSpec("edge_cut", 2))
    setup, partition = data.sample_data.setup, data.partition_dir / data._folder
    replicated = data.stored_cut().shard(0, Replicas(1, ((0,), (1,))))
    with pytest.raises(ValueError, match="does not support replicas"):
        setup(0, replicated, "fit", partition, data._lock)


# Formats ######################################################################


@pytest.mark.parametrize(
    ("shape", "given_dims", "dim"),
    [
        ((N,), {}, 0),
        ((N, F), {}, 0),
        ((T, N, F), {}, 1),
        ((2, T, N, F), {}, 2),
        ((N, N), {}, 0),
        ((N, N), {"x": 1}, 1),
        ((T, N), {"x": -1}, 1),
        ((N, F), {"x": None}, None),
        ((F,), {}, None),
        ((), {}, None),
        ((F, F), {}, None),
    ],
)
def test_node_dimensions(shape, given_dims, dim):
    form = SampleFormat.of("samples", {"x": torch.zeros(shape), "other": torch.zeros(N)}, N, 100, given_dims)
    assert form.node_dims == {"x": None if dim is None else dim + 1, "other": 1}


@pytest.mark.parametrize(
    ("item", "dims", "message"),
    [
        ({"x": torch.zeros(T, N + 1, F)}, {}, rf"no tensor of sample 0 has N={N} entries .*x \[4, 31, 3\].*number of nodes\.$"),
        ({"x": torch.zeros(T, F, N)}, {}, rf"has N={N} entries .*x \[4, 3, 30\].* or pass node_dims={{'x': 2}}\."),
        ({"x": torch.zeros(N)}, {"x": 1}, rf"node_dims\['x'\] must be a dimension of size N={N}, got 1: .*\[30\]"),
        ({"x": torch.zeros(T, N, F)}, {"x": 0}, r"must be a dimension of size N=30, got 0"),
        ({"x": torch.zeros(N), "w": torch.zeros(100)}, {}, r"w of samples\[0\] .* 100 edges.*node_dims={'w': None}"),
        ([torch.zeros(N)], {}, r"samples\[0\] must be a dict of tensors or a Data, got list"),
        ({"x": torch.zeros(N), "s": "a"}, {}, r"samples\[0\] must have tensors, .* got s='a'"),
        ({"x": np.zeros(N, object)}, {}, r"samples\[0\] must have tensors, .* got x=array"),
    ],
)
def test_invalid_first_samples(item, dims, message):
    with pytest.raises(ValueError, match=message):
        SampleFormat.of("samples", item, N, 100, dims)


def test_nodes_in_another_dimension_are_a_warning():
    with pytest.warns(UserWarning, match=r"y of samples\[0\] has shape \[4, 30\]: one value per sample.*node_dims={'y': 1}"):
        SampleFormat.of("samples", {"x": torch.zeros(N), "y": torch.zeros(T, N)}, N, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0, :3]}, r"x of samples\[5\] is \[3, 30, 3\] float32, but x of samples\[0\] is \[4, 30, 3\] float32"),
        ({"y": Y[0].double()}, r"y of samples\[5\] is \[30\] float64, but y of samples\[0\] is \[30\] float32"),
        ({"more": 1}, r"samples\[5\] has \['hour', 'more', 'time', 'x', 'y'\], but samples\[0\] has \['hour', 'time'"),
        ({"time": "late"}, r"samples\[5\] must have tensors, .* got time='late' "),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_later_samples_have_the_format_of_the_first(change, message, num_workers, tmp_path):
    loader = loader_of(module_of(Items({5: change}), tmp_path, num_workers=num_workers))
    batches = iter(loader)
    assert next(batches).sample_info.indices == [0, 1]
    with pytest.raises(ValueError, match=message):
        list(batches)


@pytest.mark.parametrize(
    ("graph", "change", "message"),
    [
        ({"y": torch.zeros(N)}, {}, r"y of samples\[0\] must have another name"),
        ({"x": torch.zeros(N, 2)}, {}, r"x of samples\[0\] must have another name"),
        ({}, {"edge_weight": torch.zeros(2)}, "edge_weight of samples"),
        ({}, {"n_id": torch.zeros(2)}, "n_id of samples"),
        ({}, {"sample_info": 1}, "sample_info of samples"),
    ],
)
def test_names_of_both_graph_and_samples_are_errors(graph, change, message, tmp_path):
    data = module_of(Items(dict.fromkeys(range(S), change)), tmp_path, make_graph(**graph))
    with pytest.raises(ValueError, match=message):
        loader_of(data)


def test_unknown_names_of_node_dims_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"node_dims has \['z'\], but samples\[0\] has"):
        loader_of(module_of(Items(), tmp_path, node_dims={"z": 1}))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_unknown_names_of_node_dims_are_errors_in_each_stage(stage, tmp_path):
    """A dataset may lack a name that another dataset has, such as targets in prediction."""
    name = {"validate": "val", "test": "test", "predict": "predict"}[stage] + "_samples"
    with pytest.raises(ValueError, match=rf"node_dims has \['z'\], but {name}\[0\] has"):
        data = module_of(None, tmp_path, **{name: Items()}, node_dims={"z": 1})
        set_ranks(data)
        data.setup(stage)
    other = Items({index: {"z": torch.zeros(N, 1)} for index in range(S)})
    data = module_of(other, tmp_path, **{name: Items()}, node_dims={"z": 0})
    set_ranks(data)
    data.setup(stage)


# Batches ######################################################################


def test_batches_of_the_whole_graph(tmp_path):
    graph = make_graph(pos=torch.arange(2.0 * N).view(N, 2))
    loader = loader_of(module_of(Items(), tmp_path, graph, batch_size=3))
    batches = [*loader]
    assert len(batches) == len(loader) == 3
    for batch, low in zip(batches, (0, 3, 6)):
        rows = slice(low, low + 3)
        assert torch.equal(batch.x, X[rows]) and torch.equal(batch.y, Y[rows]) and torch.equal(batch.time, TIME[rows])
        assert torch.equal(batch.hour, torch.arange(S)[rows])
        assert torch.equal(batch.edge_index, EDGES) and torch.equal(batch.edge_weight, graph.edge_weight)
        assert torch.equal(batch.pos, graph.pos) and batch.num_nodes == N and "train_mask" not in batch
        assert batch.sample_info.node_dims == {"x": 2, "y": 1, "time": None, "hour": None}
        assert batch.sample_info.indices == [*range(S)][rows] and batch.sample_info.total == len(range(S)[rows])
    moved = batches[0].clone().to("meta")
    assert moved.x.device.type == "meta" and moved.num_nodes == N and moved.sample_info == batches[0].sample_info
    batches[0].x = None  # batches are copies
    batches[0].note = 1
    again = next(iter(loader))
    assert torch.equal(again.x, X[:3]) and "note" not in again


@pytest.mark.parametrize(
    ("concatenate", "change", "sizes"),
    [(False, {}, [4, 3]), (True, {}, [4 * N, 3 * N]), (False, {"a": 1.0}, [4, 3]), (True, {"a": 1.0}, [4 * N, 3 * N])],
)
def test_lightning_infers_a_batch_size_that_is_proportional_to_the_samples(concatenate, change, sizes, tmp_path):
    """Its size is the weight of a step in the mean of an epoch. Items have ``x [T, N, F]``, and may begin with a number."""

    class Begins(Items):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**change, **super().__getitem__(index)}

    batches = loader_of(module_of(Begins(), tmp_path, batch_size=4, concatenate=concatenate))
    assert [extract_batch_size(batch) for batch in batches] == sizes


def test_the_number_of_nodes_is_not_the_number_of_samples():
    batch = SampleBatch()
    batch.x, batch.n_id = X, torch.arange(N)
    assert batch.num_nodes == N


def test_masks_of_the_graph_stay_in_batches(tmp_path):
    mask = torch.arange(N) < 5
    batch = next(iter(loader_of(module_of(Items(), tmp_path, make_graph(train_mask=mask)))))
    assert torch.equal(batch.train_mask, mask) and "val_mask" not in batch and batch.num_nodes == N


class Arrays(Items):
    """Items as ``Data``, or as arrays that cannot be written to."""

    def __init__(self, of_pyg: bool) -> None:
        super().__init__()
        self.of_pyg = of_pyg

    def __getitem__(self, index: int) -> Any:
        if self.of_pyg:
            return Data(x=X[index], y=Y[index], num_nodes=N)
        arrays = {"x": X[index].numpy().copy(), "y": Y[index].numpy().copy()}
        for array in arrays.values():
            array.flags.writeable = False
        return arrays


@pytest.mark.parametrize("of_pyg", [True, False])
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.filterwarnings("error")
def test_items_as_data_and_as_arrays(of_pyg, parts, tmp_path):
    loader = loader_of(module_of(Arrays(of_pyg), tmp_path), 0, parts)
    batch = next(iter(loader))
    own = batch.n_id[: batch.num_owned]
    assert torch.equal(batch.x, X[:2][:, :, own]) and torch.equal(batch.y, Y[:2][:, own])


class DataItems(Items):
    """Items as ``Data`` with a number, an array, and other attributes."""

    def __init__(self, **others: Any) -> None:
        super().__init__()
        self.others = others

    def __getitem__(self, index: int) -> Data:
        return Data(x=X[index], hour=float(index), time=TIME[index].numpy(), **self.others)


def test_attributes_of_data_items(tmp_path):
    batch = next(iter(loader_of(module_of(DataItems(), tmp_path))))
    assert batch.hour.tolist() == [0.0, 1.0] and torch.equal(batch.time, TIME[:2])
    with pytest.raises(ValueError, match=r"samples\[0\] must have tensors, arrays and numbers, got note='text'"):
        loader_of(module_of(DataItems(note="text"), tmp_path))


def test_checksums_of_any_tensors():
    """Of dtypes that NumPy does not have, of parameters, and of tensors that are not contiguous."""
    x = X[0, 0]
    for make in (torch.Tensor.bfloat16, torch.Tensor.requires_grad_, torch.Tensor.t, torch.Tensor.bool, torch.Tensor.sum):
        value = make(x.clone())
        assert digest_of({"x": value}) == digest_of({"x": value.detach().clone()}) != digest_of({"x": make(-x.flip(0) * (x > 0))})
    assert digest_of({"x": x}) == digest_of({"x": x.numpy()}) and digest_of({"x": torch.zeros(0, 2)})


@pytest.mark.parametrize("kind", ["edge_cut", "vertex_cut"])
@pytest.mark.parametrize(("parts", "data_ranks"), [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_batches_of_parts_are_those_of_the_whole_graph(kind, parts, data_ranks, tmp_path):
    data = module_of(Items(), tmp_path, shuffle=True, seed=3)
    entries = torch.randperm(S, generator=torch.Generator().manual_seed(3)).split(2 * data_ranks)
    seen = []
    for data_rank in range(data_ranks):
        ranks = [[*loader_of(data, part, parts, kind, data_rank, data_ranks)] for part in range(parts)]
        for number, batches in enumerate(zip(*ranks, strict=True)):
            expected = entries[number][data_rank::data_ranks]
            n_id = torch.cat([batch.n_id[: batch.num_owned] for batch in batches])
            assert sorted(n_id.tolist()) == [*range(N)]
            for batch in batches:
                assert batch.sample_info.indices == expected.tolist() and batch.sample_info.total == len(entries[number])
                assert torch.equal(batch.time, TIME[expected]) and batch.num_nodes == batch.num_owned
            x, y = (torch.cat([batch[name] for batch in batches], dim) for name, dim in (("x", 2), ("y", 1)))
            assert torch.equal(x, X[expected][:, :, n_id]) and torch.equal(y, Y[expected][:, n_id])
            seen += expected.tolist()
            if not len(expected):
                assert batches[0].x.shape == (0, T, batches[0].num_owned, F) and batches[0].hour.dtype == torch.long
    assert sorted(seen) == [*range(S)] and len(entries) == len(ranks[0])


@pytest.mark.parametrize(("num_workers", "persistent"), [(2, False), (2, True)])
def test_random_numbers_of_items_depend_on_seed_epoch_and_index(num_workers, persistent, tmp_path):
    options = {"shuffle": True, "batch_size": 3}
    reference = loader_of(module_of(Draws(), tmp_path, **options))
    loader = loader_of(module_of(Draws(), tmp_path, num_workers=num_workers, persistent_workers=persistent, **options))
    torch.manual_seed(7)
    epochs = []
    for epoch in (0, 1, 0):
        reference.set_epoch(epoch)
        loader.set_epoch(epoch)
        expected = [*reference]
        assert same([*loader], expected)
        by_index = {int(index): batch.x[row] for batch in expected for row, index in enumerate(batch.index)}
        epochs.append(torch.stack([by_index[index] for index in range(S)]))
    assert torch.equal(epochs[0], epochs[2]) and not torch.isclose(epochs[0], epochs[1]).any(0).all()
    noise = (epochs[0] - X).flatten(1)
    assert all(not torch.allclose(noise[0], noise[index]) for index in range(1, S))
    seeds = [[*loader_of(module_of(Draws(), tmp_path, seed=seed))] for seed in (0, 1)]  # in the order of the dataset
    for one, other in zip(*seeds, strict=True):
        assert one.sample_info.indices == other.sample_info.indices
        assert all((one[name] != other[name]).any() for name in ("x", "numpy", "python"))


def test_random_numbers_are_equal_on_ranks_of_a_graph(tmp_path):
    data = module_of(Draws(), tmp_path, shuffle=True)
    whole, parts = [*loader_of(data)], [[*loader_of(data, part, 2)] for part in range(2)]
    for batch, first, second in zip(whole, *parts, strict=True):
        n_id = torch.cat([each.n_id[: each.num_owned] for each in (first, second)])
        assert torch.equal(torch.cat([first.x, second.x], 2), batch.x[:, :, n_id])
        assert torch.equal(torch.cat([first.numpy, second.numpy], 1), batch.numpy[:, n_id])
        assert torch.equal(first.python, batch.python) and torch.equal(second.python, batch.python)


def test_concatenated_samples_are_batches_of_pyg(tmp_path):
    graph = make_graph(pos=torch.arange(2.0 * N).view(N, 2), scale=torch.ones(5))
    batch = next(iter(loader_of(module_of(Items(), tmp_path, graph, concatenate=True, batch_size=3))))
    expected = Batch.from_data_list([Data(edge_index=EDGES, num_nodes=N, y=Y[i], pos=graph.pos) for i in range(3)])
    for name in ("edge_index", "y", "pos", "batch"):
        assert torch.equal(batch[name], expected[name]), name
    assert torch.equal(batch.x, torch.cat([*X[:3]], 1)) and torch.equal(batch.time, TIME[:3])
    assert batch.sample_info.node_dims == {"x": 1, "y": 0, "time": None, "hour": None}
    assert batch.num_nodes == batch.num_owned == 3 * N and batch.scale.shape == (5,)
    assert batch.edge_weight.shape == batch.e_id.shape == (300,)
    conv = GCNConv(F, 2)
    stacked = next(iter(loader_of(module_of(Items(), tmp_path, graph, batch_size=3))))
    one, other = conv(batch.x[0], batch.edge_index), conv(stacked.x[:, 0], stacked.edge_index)
    torch.testing.assert_close(one, other.flatten(0, 1))


@pytest.mark.parametrize(("data_ranks", "total"), [(1, 3), (2, 5), (3, 2)])
def test_copies_of_parts_are_the_parts_of_copies(data_ranks, total):
    """Each edge of each copy is at its place; ranks send halo rows in the order in which their peers expect them."""
    num_parts, graph = 3, prepare_graph(make_graph(), masks_needed=False, features_needed=False)
    part = np.random.default_rng(0).integers(0, num_parts, N)
    shards = split_graph(graph, part, LayoutSpec("edge_cut", num_parts))
    for data_rank in range(data_ranks):
        found = [Copies(shard, data_ranks, data_rank)[total] for shard in shards]
        positions = positions_of(data_rank, data_ranks, total)
        ids = np.concatenate([shard.node_rows.ids.numpy() for shard in found])  # by relabeled id
        assert sorted(ids) == sorted((positions[:, None] * N + torch.arange(N)).view(-1).tolist())
        expected = {(int(at) * EDGES.size(1) + e): EDGES[:, e] + at * N for at in positions for e in range(EDGES.size(1))}
        seen = {}
        for rank, shard in enumerate(found):
            ends = ids[shard.node_ids(rank)][shard.batch.edge_index.numpy()]
            seen.update(zip(shard.edge_rows.ids.tolist(), ends.T.tolist()))
            assert (shard.batch.batch == torch.from_numpy(ids[shard.node_ids(rank)][: shard.batch.num_owned] // N)).all()
            for peer, other in enumerate(found):
                first = sum(other.plan.recv_counts[:rank])
                halo = other.halos[peer][first : first + other.plan.recv_counts[rank]]
                assert (shard.plan.send_rows[peer] + shard.offsets[rank] == halo).all()
        assert seen == {key: ends.tolist() for key, ends in expected.items()}


# Trainer ######################################################################


class Net(L.LightningModule):
    """Records the samples of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen = GCNConv(F, 1), list[tuple[str, int, list[int]]]()

    def loss(self, batch: Any, stage: str) -> torch.Tensor:
        self.seen.append((stage, self.trainer.current_epoch, batch.sample_info.indices))
        return (self.conv(batch.x, batch.edge_index).mean(1).squeeze(-1) - batch.y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        return batch.sample_info.indices

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_stages_have_their_own_samples_in_order(tmp_path):
    train, val, test = split_by_time(Items(), (0.6, 0.2, 0.2))
    data = module_of(train, tmp_path, shuffle=True, val_samples=val, test_samples=test, predict_samples=Items(), seed=2)
    net, trainer = Net(), quiet_trainer("auto", 1, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(net, datamodule=data)
    orders = [GlobalOrder(4, 2, 1, True, 2).batches(epoch, 0) for epoch in range(2)]
    expected = [
        (stage, epoch, indices)
        for epoch, order in enumerate(orders)
        for stage, batches in (("train", [batch.indices for batch in order]), ("val", [[0, 1]]))
        for indices in batches
    ]
    assert net.seen == expected
    trainer.test(net, datamodule=data, verbose=False)
    assert net.seen[-1] == ("test", 2, [0]) and [*trainer.predict(net, datamodule=data)] == [[0, 1], [2, 3], [4, 5], [6]]


def test_overfitting_trains_on_the_same_samples(tmp_path):
    """Lightning turns off the shuffling of its own loaders, too."""
    net, data = Net(), module_of(Items(), tmp_path, shuffle=True)
    quiet_trainer("auto", 1, max_epochs=3, overfit_batches=1).fit(net, datamodule=data)
    assert [indices for _, _, indices in net.seen] == [[0, 1]] * 3


def test_the_full_batch_is_that_of_the_stage(tmp_path):
    data = module_of(Items(), tmp_path, val_samples=Subset(Items(), [0]))
    set_ranks(data)
    sizes = []
    for stage in ("validate", "fit", "validate"):
        data.setup(stage)
        sizes.append(data.sample_data.full_batch(data.batch_size))
    assert sizes == [1, 2, 1]


def test_the_batch_size_finder_scales_samples_per_batch(tmp_path):
    data, net = module_of(Items(), tmp_path), Net()
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1)
    quiet_trainer("auto", 1, callbacks=[finder], max_epochs=1, default_root_dir=tmp_path).fit(net, datamodule=data)
    assert data.batch_size == 4 and [indices for _, _, indices in net.seen[-2:]] == [[0, 1, 2, 3], [4, 5, 6]]


def test_a_stage_without_samples_has_no_batches(tmp_path):
    data = module_of(None, tmp_path, test_samples=Items())
    set_ranks(data)
    for stage in ("fit", "test", "predict"):
        data.setup(stage)
    assert data.train_dataloader() == data.val_dataloader() == data.predict_dataloader() == []
    assert len(data.test_dataloader()) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_resumes_without_reading_batches_again(num_workers, tmp_path):
    data = module_of(Items(), tmp_path, shuffle=True, num_workers=num_workers)
    loader, resumed = loader_of(data), loader_of(data)
    loader.set_epoch(5)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    assert state == {"epoch": 5, "batches": 2, "samples": 2}
    resumed.set_epoch(5)
    resumed.load_state_dict(state)
    data.sample_data._local["samples"][0].read.clear()
    rest = [*resumed]
    assert [each.sample_info.indices for each in rest] == [each.sample_info.indices for each in batches]
    if not num_workers:
        assert len(data.sample_data._local["samples"][0].read) == 2 * (S - 4)  # of both loaders
    assert len([*resumed]) == 4  # only once
    resumed.load_state_dict({**state, "epoch": 4})  # another epoch
    assert len([*resumed]) == 4
    resumed.load_state_dict({**state, "batches": 4})  # all batches
    assert len([*resumed]) == 4


@pytest.mark.parametrize("limit", [1.0, 3])
@pytest.mark.parametrize("stop", [2, 3, 4, 5, 6, 7])
def test_a_fit_resumes_with_the_same_following_batches(stop, limit, tmp_path):
    options = {"max_epochs": 3, "limit_val_batches": 0, "limit_train_batches": limit}

    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == stop:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

        def on_train_epoch_end(self, trainer, *_):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "end.ckpt")

    def fit(ckpt_path: Any = None) -> list[Any]:
        torch.manual_seed(0)
        net = Net()
        trainer = quiet_trainer("auto", 1, callbacks=[] if ckpt_path else [Save()], **options)
        trainer.fit(net, datamodule=module_of(Items(), tmp_path, shuffle=True), ckpt_path=ckpt_path)
        return net.seen

    whole = fit()
    assert len(whole) == (12 if limit == 1.0 else 9)
    assert fit(tmp_path / "mid.ckpt") == whole[stop:]
    assert fit(tmp_path / "end.ckpt") == whole[len(whole) // 3 :]


# Folders ######################################################################


def write_folder(folder: Path, **arrays: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in (arrays or {"x": X, "y": Y, "time": TIME}).items():
        np.save(folder / f"{name}.npy", np.asarray(array))
    return folder


def read_bytes() -> int:
    """Returns the bytes that this process has read by calls."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_folder(parts, subset, num_workers, tmp_path):
    folder = write_folder(tmp_path / "arrays")
    samples = split_by_time(folder, (0.8, 0, 0.2))[0] if subset else folder
    data = module_of(samples, tmp_path, num_workers=num_workers)
    ranks = [[*loader_of(data, part, parts)] for part in range(max(1, parts))]
    places = torch.arange(6 if subset else S).split(2)
    for rows, batches in zip(places, zip(*ranks, strict=True), strict=True):
        n_id = torch.cat([batch.n_id[: batch.num_owned] for batch in batches])
        assert torch.equal(torch.cat([batch.x for batch in batches], 2), X[rows][:, :, n_id])
        assert torch.equal(torch.cat([batch.y for batch in batches], 1), Y[rows][:, n_id])
        assert all(torch.equal(batch.time, TIME[rows]) for batch in batches)
    assert len([*data.partition_dir.glob("samples-*[0-9a-f]")]) == (parts > 1)


def test_a_rank_reads_only_its_rows(tmp_path):
    num_samples, width = 40, 500
    x = np.random.default_rng(0).random((num_samples, N, width), np.float32)
    data = module_of(write_folder(tmp_path / "arrays", x=x), tmp_path, shuffle=True)
    for part in range(3):
        loader = loader_of(data, part, 3)
        list(loader)
        before = read_bytes()
        batches = [*loader]
        count, own = read_bytes() - before, num_samples * batches[0].num_owned * width * 4
        assert own <= count < 1.1 * own
        [folder] = data.partition_dir.glob("samples-*[0-9a-f]")
        assert own < (folder / f"part{part}.x.npy").stat().st_size < own + 200
        indices = [index for batch in batches for index in batch.sample_info.indices]
        nodes = batches[0].n_id[: batches[0].num_owned]
        assert np.array_equal(torch.cat([batch.x for batch in batches]).numpy(), x[indices][:, nodes])


@pytest.mark.parametrize("kind", ["group", "folder", "with files"])
def test_zarr_arrays(kind, tmp_path, monkeypatch):
    """Chunks of all dimensions, which cross parts, are read once, and converted to files of each part."""
    zarr = pytest.importorskip("zarr")
    folder, arrays = tmp_path / "arrays.zarr", {"x": X.numpy(), "y": Y.numpy(), "time": TIME.numpy()}
    if kind == "group":
        root = zarr.open_group(folder, mode="w")
        for name, array in arrays.items():
            chunks = tuple(2 + size % 2 for size in array.shape)
            made = root.create_array(name, shape=array.shape, chunks=chunks, dtype=array.dtype)
            made[:] = array
    else:
        write_folder(folder, **({"time": TIME} if kind == "with files" else {"hour": torch.arange(S)}))
        for name in ("x", "y") if kind == "with files" else arrays:
            zarr.save_array(folder / f"{name}.zarr", arrays[name])
    monkeypatch.setattr(folders, "_PIECE", X[0].nbytes)
    data = module_of((folder, slice(1, None)), tmp_path, num_workers=2)
    [whole], ranks = [next(iter(loader_of(data, 0, 0)))], [next(iter(loader_of(data, part, 2))) for part in range(2)]
    n_id = torch.cat([batch.n_id[: batch.num_owned] for batch in ranks])
    assert torch.equal(whole.x, X[1:3]) and torch.equal(whole.time, TIME[1:3])
    assert torch.equal(torch.cat([batch.x for batch in ranks], 2), X[1:3][:, :, n_id])
    assert torch.equal(torch.cat([batch.y for batch in ranks], 1), Y[1:3][:, n_id])
    assert all(torch.equal(batch.time, TIME[1:3]) for batch in ranks)
    array = zarr.open_group(folder, mode="r+")["x"] if kind == "group" else zarr.open_array(folder / "x.zarr", mode="r+")
    array[:] = X.numpy() + 1
    data = module_of(folder, tmp_path)
    assert torch.equal(next(iter(loader_of(data, 1, 2))).x, X[:2][:, :, data.shard.batch.n_id] + 1)


def test_zarr_arrays_without_the_package(tmp_path, monkeypatch):
    (tmp_path / "arrays" / "x.zarr").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ValueError, match=r"has zarr arrays, which need the package zarr. Install it: pip install zarr"):
        module_of(tmp_path / "arrays", tmp_path)


def test_a_folder_is_converted_once_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_PIECE", 3 * X[0].nbytes)
    folder, calls = write_folder(tmp_path / "arrays", x=X), []
    write = folders._write_parts
    monkeypatch.setattr(folders, "_write_parts", lambda *args: (calls.append(args), write(*args)))
    for _ in range(2):
        data = module_of(folder, tmp_path, val_samples=(folder, slice(5, None)))
        assert torch.equal(next(iter(loader_of(data, 1, 2))).x, X[:2][:, :, data.shard.batch.n_id])
        assert len(calls) == 1
        data.sample_data.setup(0, data.shard, "validate", data.partition_dir / data._folder, data._lock)
        assert [batch.sample_info.indices for batch in data.val_dataloader()] == [[0, 1]]
        assert torch.equal(next(iter(data.val_dataloader())).x, X[5:][:, :, data.shard.batch.n_id])
    loader_of(data, 0, 3)
    assert len(calls) == 2
    np.save(folder / "x.npy", (X + 1).numpy())
    data = module_of(folder, tmp_path)
    assert torch.equal(next(iter(loader_of(data, 1, 2))).x, X[:2][:, :, data.shard.batch.n_id] + 1) and len(calls) == 3
    assert not [*data.partition_dir.glob("samples-*.owner")]


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    data = module_of(write_folder(tmp_path / "arrays"), tmp_path)
    monkeypatch.setattr(folders, "sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(store.StoreError, match="is full"):
        loader_of(data, 0, 2)
    assert not [path for path in data.partition_dir.rglob("*samples-*") if path.suffix != ".lock"]
    monkeypatch.undo()
    assert len([*loader_of(data, 0, 2)]) == 4


def test_damaged_conversions_are_errors(tmp_path):
    data = module_of(write_folder(tmp_path / "arrays"), tmp_path)
    loader_of(data, 0, 2)
    [folder] = data.partition_dir.glob("samples-*[0-9a-f]")
    np.save(folder / "part0.x.npy", np.zeros((S, T, 1, F), np.float32))
    with pytest.raises(store.StoreError, match="has shape"):
        loader_of(data, 0, 2)
    (folder / "part0.x.npy").write_bytes(b"")
    with pytest.raises(store.StoreError, match="cannot be read"):
        loader_of(data, 0, 2)


def test_folders_are_not_pickled(tmp_path):
    samples = FolderSamples(write_folder(tmp_path / "arrays"))
    text = pickle.dumps(samples)
    assert len(text) < 1000 and torch.equal(torch.from_numpy(pickle.loads(text)[3]["x"]), X[3])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "must be a folder of .npy files"),
        ({"x": X, "y": Y[:-1]}, r"same number of samples in dimension 0, got x \[7, 4, 30, 3\], y \[6, 30\]"),
        ({"x": X, "n": np.float32(1)}, r"same number of samples in dimension 0"),
    ],
)
def test_invalid_folders(arrays, message, tmp_path):
    folder = tmp_path / "arrays"
    if arrays is not None:
        write_folder(folder, **arrays)
    with pytest.raises(ValueError, match=message):
        module_of(str(folder), tmp_path)


# Splits and sources ###########################################################


@given(st.integers(0, 60), st.integers(0, 9), st.sampled_from([(0.7, 0.1, 0.2), (0.5, 0, 0.5), (1, 0, 0), (0.2, 0.2, 0.2)]))
@examples(200)
def test_splits_by_time_have_gaps(num_samples, gap, fractions):
    samples = [*range(num_samples)]
    usable = num_samples - 2 * gap
    try:
        parts = split_by_time(samples, fractions, gap)
    except ValueError as error:
        assert "needs a sample in each split" in str(error)
        assert any(share and share * usable < 1.5 for share in fractions)
        return
    assert all(isinstance(part, Subset) and part.dataset is samples for part in parts)
    assert abs(sum(map(len, parts)) - sum(fractions) * usable) <= 1
    assert all(abs(len(part) - share * usable) <= 1 for part, share in zip(parts, fractions))
    firsts, lasts = ([part[place] for part in parts if len(part)] for place in (0, -1))
    assert all(first - last > gap for first, last in zip(firsts[1:], lasts))
    assert all([*part] == [*range(part[0], part[0] + len(part))] for part in parts if len(part))


def test_invalid_splits():
    with pytest.raises(ValueError, match="split needs three fractions"):
        split_by_time([1, 2, 3], (0.5, 0.5))
    with pytest.raises(ValueError, match="gap must be at least 0"):
        split_by_time([1, 2, 3], gap=-1)


def test_a_source_by_its_path_needs_no_features(tmp_path):
    data = module_of(Items(), tmp_path, "test_samples.make_graph", batch_size=S)
    ranks = [next(iter(loader_of(data, part, 2))) for part in range(2)]
    n_id = torch.cat([batch.n_id for batch in ranks])
    assert torch.equal(torch.cat([batch.x for batch in ranks], 2), X[:, :, n_id]) and data.num_features == 0
    assert torch.equal(data.load().edge_index, EDGES)  # read back from the store
    with pytest.raises(ValueError, match="has no node features x"):
        GraphDataModule(make_graph()).load()
