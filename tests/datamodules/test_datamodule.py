"""Sources, checks, the store and the datamodule. No ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import awkward_graph
from torch_geometric.data import Data

from lightning_gnn import GraphDataModule, planted_partition
from lightning_gnn.data import store
from lightning_gnn.data.loading import graph_digests, load_source
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.data.store import StoreError, read_cut, read_manifest, write_store
from lightning_gnn.datamodules import graph as datamodule
from lightning_gnn.partition import edge_cut
from lightning_gnn.partition.layout import LayoutSpec


def small(**changes: Any) -> Data:
    graph = Data(
        x=torch.arange(12.0).view(6, 2),
        edge_index=torch.tensor([[0, 1, 2, 3, 5], [1, 2, 0, 4, 5]]),
        y=torch.tensor([0, 1, 2, 0, 1, -1]),
        train_mask=torch.tensor([1, 1, 0, 0, 0, 0]).bool(),
        val_mask=torch.tensor([0, 0, 1, 1, 0, 0]).bool(),
        test_mask=torch.tensor([0, 0, 0, 0, 1, 1]).bool(),
    )
    for name, value in changes.items():
        graph[name] = value
    return graph


def make_small(scale: float = 1.0, file: str | None = None) -> Data:
    """A source by its import path."""
    return small(x=scale * small().x + (len(Path(file).read_text()) if file else 0))


class OGBLike:
    """One graph, an index split, labels of shape [N, 1]."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Data:
        graph = small(y=small().y.view(-1, 1))
        for name in ("train_mask", "val_mask", "test_mask"):
            del graph[name]
        return graph

    def get_idx_split(self) -> dict[str, torch.Tensor]:
        return {"train": torch.tensor([0, 5]), "valid": torch.tensor([1]), "test": torch.tensor([2, 3])}


# Sources ######################################################################


@pytest.mark.parametrize("source", [small(), make_small, "test_datamodule.make_small", [small()]])
def test_sources(source):
    data = GraphDataModule(source).load()
    assert torch.equal(data.x, small().x) and torch.equal(data.train_mask, small().train_mask)


def test_source_arguments():
    assert torch.equal(GraphDataModule("test_datamodule.make_small", {"scale": 2.0}).load().x, 2 * small().x)


def test_index_split_and_column_labels():
    data = GraphDataModule(OGBLike()).load()
    assert data.train_mask.nonzero().view(-1).tolist() == [0, 5]
    assert data.val_mask.nonzero().view(-1).tolist() == [1]
    assert data.y.tolist() == small().y.view(-1, 1).tolist()


def test_mask_columns():
    masks = torch.zeros(6, 10, dtype=torch.bool)
    masks[2, 7] = True
    data = prepare_graph(small(train_mask=masks), split_index=7)
    assert data.train_mask.nonzero().view(-1).tolist() == [2]


def test_random_split_of_labelled_nodes():
    graph = planted_partition(1000)
    graph.y[::2] = -1
    data = prepare_graph(graph, fractions=(0.6, 0.2, 0.1), seed=3)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(1).tolist() == [300, 100, 50]
    assert int(masks.sum(0).max()) == 1 and not masks[:, ::2].any()
    assert torch.equal(data.train_mask, prepare_graph(graph, fractions=(0.6, 0.2, 0.1), seed=3).train_mask)
    assert not torch.equal(data.train_mask, prepare_graph(graph, fractions=(0.6, 0.2, 0.1), seed=4).train_mask)


def test_whole_numbers_become_floats_and_int32_edges_int64():
    data = prepare_graph(small(x=torch.ones(6, 2, dtype=torch.uint8), edge_index=small().edge_index.int()))
    assert data.x.dtype == torch.float32 and data.edge_index.dtype == torch.int64


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"edge_index": None}, {}, "no edge_index"),
        ({"x": None}, {}, "no node features x. Add them"),
        ({"x": torch.empty(0, 2)}, {}, "no nodes"),
        ({"edge_index": torch.zeros(3, 4).long()}, {}, r"shape \[2, E\] \(got \[3, 4\]\)"),
        ({"edge_index": torch.tensor([[0], [6]])}, {}, "ids from 0 to 6, but there are 6 nodes"),
        ({"edge_index": torch.tensor([[-1], [0]])}, {}, "ids from -1 to 0"),
        ({"y": torch.zeros(5)}, {}, "y has 5 rows, but x has 6"),
        ({"train_mask": None}, {}, r"no train_mask. Use a random split, GraphDataModule\(..., split="),
        ({"train_mask": torch.ones(4).bool()}, {}, "train_mask has 4 entries"),
        ({"train_mask": torch.ones(6, 2).bool()}, {"split_index": 2}, "split_index=2, but train_mask has 2 columns"),
        ({}, {"fractions": (0.5, 0.6, 0.1)}, "three fractions that sum to at most 1"),
        ({}, {"split": {"training": torch.tensor([0])}}, r"keys in .*, got \['training'\]"),
    ],
)
def test_bad_graphs_are_refused(changes, options, words):
    with pytest.raises(ValueError, match=words):
        prepare_graph(small(**changes), **options)


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ("no.such.module", None, "cannot be imported"),
        ("test_datamodule.nothing", None, "cannot be imported"),
        ("Planetoid", None, "Use the import path"),
        (small(), {"root": "x"}, "needs a callable or an import path"),
        ([small(), small()], None, "holds 2 graphs"),
        ([1], None, "returned a int; GraphDataModule requires"),
    ],
)
def test_bad_sources_are_refused(source, args, words):
    with pytest.raises(ValueError, match=words):
        load_source(source, args)


def test_digests_tell_which_tensor_has_changed():
    known = graph_digests(small())
    for name in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
        changed = small()[name].clone()
        changed.view(-1)[0] = 1 - changed.view(-1)[0].long()
        found = graph_digests(small(**{name: changed}))
        assert {each for each in known if found[each] != known[each]} == {name}
    assert graph_digests(small(edge_weight=torch.ones(5))).keys() - known.keys() == {"edge_weight"}


# Store ########################################################################


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_round_trip(tmp_path, parts):
    graph = prepare_graph(awkward_graph())
    graph.edge_number = torch.arange(graph.edge_index.size(1))
    graph.node_number = torch.arange(60)
    graph.temperature = torch.tensor(36.6)
    part = np.random.default_rng(1).integers(0, parts, 60)
    if parts == 5:
        part[part == 3] = 4  # an empty part
    write_store(tmp_path / "s", graph, part, LayoutSpec("edge_cut", parts), {"method": "test"})
    seen_edges = []
    for rank in range(parts):
        shard = read_cut(tmp_path / "s").shard(rank)
        batch = shard.batch
        assert batch.num_owned == batch.num_nodes == int((part == rank).sum())
        assert torch.equal(batch.n_id.sort().values, torch.from_numpy(np.flatnonzero(part == rank)))
        assert (batch.edge_index[1].diff() >= 0).all()
        assert torch.equal(batch.x, graph.x[batch.n_id]) and torch.equal(batch.node_number, batch.n_id)
        rows = torch.cat([batch.n_id, halo_ids(tmp_path / "s", rank)])
        assert torch.equal(rows[batch.edge_index], graph.edge_index[:, batch.edge_number])
        assert torch.equal(batch.edge_weight, graph.edge_weight[batch.edge_number])
        assert torch.equal(batch.edge_attr, graph.edge_attr[batch.edge_number])
        assert float(batch.temperature) == pytest.approx(36.6)
        seen_edges += batch.edge_number.tolist()
        for name in ("train_mask", "val_mask", "test_mask"):
            labelled = graph[name] & (graph.y >= 0)
            assert shard.mask_counts[name][rank] == int(labelled[batch.n_id].sum())
        assert shard.num_classes == 5 and shard.report == {"method": "test"}
        batch.x.zero_()  # copy on write: the next reader sees the file
    assert sorted(seen_edges) == list(range(graph.edge_index.size(1)))
    again = read_cut(tmp_path / "s").shard(0).batch
    assert torch.equal(again.x, graph.x[again.n_id])


def halo_ids(folder: Path, rank: int) -> torch.Tensor:
    n_id, halo = np.load(folder / "n_id.npy"), np.load(folder / f"part{rank}.halo.npy")
    return torch.from_numpy(n_id[halo])


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    calls = []

    def full(*header: Any) -> None:
        calls.append(header)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        original(*header)

    original = store.write_header
    monkeypatch.setattr(store, "write_header", full)
    with pytest.raises(StoreError, match="The disk of the partition directory .* is full"):
        write_store(tmp_path / "s", prepare_graph(small()), np.zeros(6, np.int64), LayoutSpec("edge_cut", 1), {})
    assert list(tmp_path.iterdir()) == []


def test_damaged_stores_are_refused(tmp_path):
    folder = tmp_path / "s"
    with pytest.raises(StoreError, match="no readable manifest"):
        read_manifest(folder)
    write_store(folder, prepare_graph(small()), np.zeros(6, np.int64), LayoutSpec("edge_cut", 1), {})
    manifest = json.loads((folder / "manifest.json").read_text())
    whole = (folder / "node.x.npy").read_bytes()
    (folder / "node.x.npy").write_bytes(whole[:-8])
    with pytest.raises(StoreError, match=r"node.x.npy has \d+ bytes instead of \d+. Remove the folder"):
        read_cut(folder).shard(0)
    (folder / "node.x.npy").unlink()
    with pytest.raises(StoreError, match=r"node.x.npy is missing"):
        read_cut(folder).shard(0)
    (folder / "node.x.npy").write_bytes(whole)
    read_cut(folder).shard(0)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(StoreError, match="has format 99, this version reads format"):
        read_manifest(folder)


# Building once ################################################################


def refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError("partitioned again")


def test_second_build_does_not_partition(tmp_path, monkeypatch):
    first = GraphDataModule(small(), partition_dir=tmp_path).build(LayoutSpec("edge_cut", 2))
    monkeypatch.setattr(edge_cut, "assign_nodes", refuse)
    assert GraphDataModule(small(), partition_dir=tmp_path).build(LayoutSpec("edge_cut", 2)) == first
    for other in (
        {"source": small(x=small().x + 1)},
        {"source": small(), "seed": 1},
        {"source": small(), "partition": [0, 0, 0, 1, 1, 1]},
        {"source": small(), "split": (0.5, 0.2, 0.2)},
    ):
        with pytest.raises(AssertionError, match="partitioned again"):
            GraphDataModule(**other, partition_dir=tmp_path).build(LayoutSpec("edge_cut", 2))
    with pytest.raises(AssertionError, match="partitioned again"):
        GraphDataModule(small(), partition_dir=tmp_path).build(LayoutSpec("edge_cut", 3))


@pytest.mark.parametrize("name", ["x", "edge_weight", "edge_attr"])
def test_the_last_digits_of_float64_make_another_graph(tmp_path, name):
    """In float32 the two would be one."""
    graph, changed = awkward_graph(), awkward_graph()
    changed[name].view(-1)[7] += 1e-12
    assert torch.equal(graph[name].float(), changed[name].float()) and not torch.equal(graph[name], changed[name])
    known, found = graph_digests(graph), graph_digests(changed)
    assert {each for each in known if found[each] != known[each]} == {name}
    layout = LayoutSpec("edge_cut", 2)
    first, second = (GraphDataModule(each, partition_dir=tmp_path).build(layout) for each in (graph, changed))
    assert first != second
    for folder, expected in ((first, graph), (second, changed)):
        assert torch.equal(read_cut(tmp_path / folder).graph()[name], expected[name])


def test_dotted_path_is_not_even_loaded_again(tmp_path, monkeypatch):
    file = tmp_path / "input.txt"
    file.write_text("ab")

    def module() -> GraphDataModule:
        return GraphDataModule("test_datamodule.make_small", {"file": str(file)}, partition_dir=tmp_path / "store")

    layout = LayoutSpec("edge_cut", 2)
    with monkeypatch.context() as patched:
        patched.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
        first = module()._ensure_stored(layout)
    assert float(read_cut(tmp_path / "store" / first).shard(0).batch.x.min()) >= 2.0
    with monkeypatch.context() as patched:
        patched.setattr(GraphDataModule, "_build_in_subprocess", refuse)
        assert module()._ensure_stored(layout) == first
        file.write_text("abc")  # what the arguments name has changed
        with pytest.raises(AssertionError, match="partitioned again"):
            module()._ensure_stored(layout)
        patched.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
        assert module()._ensure_stored(layout) != first


def test_a_path_that_cannot_be_imported_says_so(tmp_path):
    with pytest.raises(ValueError, match="cannot be imported"):
        GraphDataModule("no.such.module", partition_dir=tmp_path)._ensure_stored(LayoutSpec("edge_cut", 2))


def _build(rank: int, world_size: int, folder: Path) -> tuple[str, bool]:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datamodule, "rank_zero_info", told.append)
        graph = planted_partition(3000)
        (folder / f"ready{rank}").touch()
        while len(list(folder.glob("ready*"))) < world_size:
            time.sleep(0.01)
        name = GraphDataModule(graph, partition_dir=folder / "store").build(LayoutSpec("edge_cut", 3))
    return name, any(message.startswith("Partitioned") for message in told)


def test_two_processes_partition_once(ranks, tmp_path):
    (first, partitioned), (second, also) = ranks.run(2, _build, tmp_path)
    assert first == second
    assert partitioned != also


def test_properties_need_setup():
    with pytest.raises(RuntimeError, match="no data before setup"):
        _ = GraphDataModule(small()).num_classes
