"""Graphs in folders of files: each form, what is wrong in them, and parts that are written without edges in memory."""

from __future__ import annotations

import gzip
import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from common import quiet_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from lightning_gnn import GraphDataModule, NodeClassifier, SamplingStrategy, VertexCutStrategy, planted_partition
from lightning_gnn.data.loading import graph_digests, load_source
from lightning_gnn.data.sources import MASKS, kinds_of, prepare_graph
from lightning_gnn.data.store import StoreError, read_cut
from lightning_gnn.datamodules import graph as datamodule
from lightning_gnn.extensions.graph_files import in_edges, tables
from lightning_gnn.extensions.graph_files.folders import read_folder
from lightning_gnn.extensions.graph_files.in_edges import InEdges, PartEdges
from lightning_gnn.partition import adjacency, edge_cut
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts
from lightning_gnn.strategies.vertex_cut import cutters

GRAPH = planted_partition(90, num_classes=3, num_features=4, seed=1)
EDGES, N = GRAPH.edge_index.numpy(), GRAPH.num_nodes
THREE = LayoutSpec("edge_cut", 3)


def own(folder: Path, graph: Data = GRAPH) -> Path:
    folder.mkdir(parents=True)
    for name in ("edge_index", "x", "y", *MASKS):
        np.save(folder / f"{name}.npy", graph[name].numpy())
    return folder


def described(folder: Path) -> Path:
    """Edges as CSV with names, two files; features as Parquet; int32 labels in a column of many."""
    import pyarrow
    import pyarrow.parquet

    own(folder)
    for name in ("edge_index", "x", "y"):
        (folder / f"{name}.npy").unlink()
    half = EDGES.shape[1] // 2
    for number, piece in enumerate((EDGES[:, :half], EDGES[:, half:])):
        lines = ["weight,from,to", *(f"0.5,{a},{b}" for a, b in piece.T)]
        (folder / f"edges{number}.csv").write_text("\n".join(lines))
    x = GRAPH.x.numpy()
    pyarrow.parquet.write_table(pyarrow.table({f"f{i}": x[:, i] for i in range(4)}), folder / "x.parquet")
    with gzip.open(folder / "nodes.csv.gz", "wt") as file:
        file.write("name;label\n" + "\n".join(f"{i};{label}" for i, label in enumerate(GRAPH.y.tolist())))
    files = {
        "edge_index": {"files": "edges*.csv", "columns": ["from", "to"]},
        "x": "x.parquet",
        "y": {"files": "nodes.csv.gz", "columns": ["label"], "delimiter": ";"},
        **{name: f"{name}.npy" for name in MASKS},
    }
    (folder / "graph.json").write_text(json.dumps(files))
    return folder


def chunked(folder: Path) -> Path:
    """As DGL's tools write it: edges by relation in chunks, data of nodes by type."""
    folder.mkdir()
    halves = np.array_split(np.arange(EDGES.shape[1]), 2)
    for number, ids in enumerate(halves):
        (folder / f"edges{number}.txt").write_text("".join(f"{a} {b}\n" for a, b in EDGES.T[ids]))
    nodes = np.array_split(np.arange(N), 3)
    data = {"feat": GRAPH.x, "label": GRAPH.y, **{name: GRAPH[name] for name in MASKS}}
    for name, values in data.items():
        for number, ids in enumerate(nodes):
            np.save(folder / f"{name}{number}.npy", values.numpy()[ids])
    of_nodes = {
        name: {"format": {"name": "numpy"}, "data": [f"{name}{number}.npy" for number in range(3)]} for name in data
    }
    meta = {
        "graph_name": "planted",
        "node_type": ["node"],
        "num_nodes_per_chunk": [[len(ids) for ids in nodes]],
        "edge_type": ["node:to:node"],
        "num_edges_per_chunk": [[len(ids) for ids in halves]],
        "edges": {"node:to:node": {"format": {"name": "csv", "delimiter": " "}, "data": ["edges0.txt", "edges1.txt"]}},
        "node_data": {"node": of_nodes},
        "edge_data": {},
    }
    (folder / "metadata.json").write_text(json.dumps(meta))
    return folder


def graphbolt(folder: Path) -> Path:
    folder.mkdir()
    np.savetxt(folder / "edges.csv", EDGES.T, "%d", ",")
    torch.save(GRAPH.x, folder / "feat.pt")
    tasks: dict[str, Any] = {"name": "node_classification", "num_classes": 3}
    for key, mask in (("train_set", "train_mask"), ("validation_set", "val_mask"), ("test_set", "test_mask")):
        ids = GRAPH[mask].nonzero().view(-1)
        np.save(folder / f"{key}.npy", ids.numpy())
        np.save(folder / f"{key}-y.npy", GRAPH.y[ids].numpy())
        seeds, of = {"name": "seeds", "path": f"{key}.npy"}, {"name": "labels", "path": f"{key}-y.npy"}
        tasks[key] = [{"data": [{"format": "numpy", **each} for each in (seeds, of)]}]
    feature = {"domain": "node", "name": "feat", "format": "torch", "path": "feat.pt"}
    meta = {
        "dataset_name": "planted",
        "graph": {"nodes": [{"num": N}], "edges": [{"format": "csv", "path": "edges.csv"}]},
        "feature_data": [feature],
        "tasks": [tasks],
    }
    (folder / "metadata.yaml").write_text(json.dumps(meta))  # JSON is YAML
    return folder


def ogb(folder: Path, save: Any = np.savez) -> Path:
    (folder / "raw").mkdir(parents=True)
    (folder / "split" / "time").mkdir(parents=True)
    save(folder / "raw" / "data.npz", edge_index=EDGES, node_feat=GRAPH.x.numpy(), num_nodes_list=[N])
    save(folder / "raw" / "node-label.npz", node_label=GRAPH.y.numpy().astype(np.float32).reshape(-1, 1))
    for name, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        with gzip.open(folder / "split" / "time" / f"{name}.csv.gz", "wt") as file:
            file.write("\n".join(map(str, GRAPH[mask].nonzero().view(-1).tolist())))
    return folder


FORMS = {
    "own": own,
    "described": described,
    "chunked": chunked,
    "graphbolt": graphbolt,
    "ogb": ogb,
    "ogb compressed": lambda folder: ogb(folder, np.savez_compressed),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_cut_as_the_graph_in_memory(form, tmp_path):
    folder = FORMS[form](tmp_path / "graph")
    data = GraphDataModule(str(folder), partition_dir=tmp_path / "store", partition="contiguous", partition_memory_limit=2000)
    entry = tmp_path / "store" / data.build(THREE)
    found = read_cut(entry).graph()
    assert torch.equal(found.edge_index, GRAPH.edge_index) and torch.equal(found.x, GRAPH.x)
    y = found.y.view(-1)
    labelled = y >= 0  # others' formats have labels of nodes in the split only
    assert torch.equal(y[labelled], GRAPH.y[labelled])
    for name in MASKS:
        assert torch.equal(found[name], GRAPH[name]) and labelled[found[name]].all()
    left = {path.name for path in (tmp_path / "store").iterdir() if path.is_dir()}
    assert left == {entry.name}, "nothing of the way there is left behind"
    size = sum((entry / f"{name}.npy").stat().st_size for name in ["e_id", *(f"part{p}.edge_index" for p in range(3))])
    assert size <= 12 * EDGES.shape[1] + 4 * 128


@pytest.mark.parametrize(
    "stored", [EDGES, np.asfortranarray(EDGES), EDGES.astype(np.int16), EDGES.T.copy(), EDGES.T], ids="CFsTt"
)
@pytest.mark.parametrize("form", ["own", "graphbolt"])
def test_edges_are_the_same_however_an_array_has_them(form, stored, tmp_path):
    folder = FORMS[form](tmp_path / "graph")
    np.save(folder / "edge_index.npy", stored)
    if form == "graphbolt":
        meta = json.loads((folder / "metadata.yaml").read_text())
        meta["graph"]["edges"] = [{"format": "numpy", "path": "edge_index.npy"}]
        (folder / "metadata.yaml").write_text(json.dumps(meta))
    found, _ = read_folder(folder, tmp_path / "scratch")
    assert torch.equal(found.edge_index.long(), GRAPH.edge_index)


def test_the_same_parts_and_batches_as_in_memory(tmp_path):
    in_files = GraphDataModule(str(own(tmp_path / "graph")), partition_dir=tmp_path / "a", partition="contiguous")
    in_memory = GraphDataModule(GRAPH, partition_dir=tmp_path / "b", partition="contiguous")
    cuts = [read_cut(data.partition_for(THREE)) for data in (in_files, in_memory)]
    for rank in range(3):
        one, other = (cut.shard(rank).batch for cut in cuts)
        assert sorted(one.n_id.tolist()) == sorted(other.n_id.tolist())
        assert sorted(one.e_id.tolist()) == sorted(other.e_id.tolist())
        assert torch.equal(one.x, GRAPH.x[one.n_id])
    assert cuts[0].mask_counts == cuts[1].mask_counts


# Sorting ######################################################################

edges_of_graphs = st.integers(1, 40).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=120))
)


@settings(deadline=None, max_examples=40)
@given(
    edges_of_graphs, st.integers(1, 300), st.integers(1, 4), st.sampled_from([np.int32, np.int64]), st.integers(1, 30)
)
def test_edges_are_sorted_within_any_memory(tmp_path_factory, graph, memory, parts, dtype, piece):
    num_nodes, pairs = graph
    edge_index = np.array(pairs, dtype).reshape(-1, 2).T.copy()
    folder, told = tmp_path_factory.mktemp("sorted"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_edges, "PIECE", piece)
        found = InEdges.sorted_in(folder, edge_index, num_nodes, memory, told.append)
        order = np.argsort(edge_index[1], kind="stable")
        assert np.array_equal(found.edge_ids, order) and np.array_equal(found.source, edge_index[0][order])
        assert np.array_equal(np.diff(found.indptr), np.bincount(edge_index[1], minlength=num_nodes))
        assert found.source.dtype == found.edge_ids.dtype == np.int32 and sum(told) >= 2 * len(pairs)
        assert not list(folder.glob("range*"))
        part = np.random.default_rng(0).integers(0, parts, num_nodes)
        new = Relabelling.from_assignment(part, parts)
        room = np.empty(num_nodes, np.int32)
        for number, wanted in enumerate(edge_cut_parts(edge_index, new)):
            low, high = new.offsets[number : number + 2]
            of_part = PartEdges.of(found, new.n_id[low:high], int(low), new.new_ids(), room)
            assert of_part.num_edges == len(wanted.edge_ids) and np.array_equal(of_part.halo, wanted.halo)
            for pieces, whole in zip(
                (of_part.sources, of_part.targets, of_part.edge_ids), (*wanted.edge_index, wanted.edge_ids)
            ):
                assert np.array_equal(np.concatenate([*pieces(), np.empty(0, np.int32)]), whole)
    shutil.rmtree(folder)


def test_memory_does_not_grow_with_edges(tmp_path, monkeypatch):
    monkeypatch.setattr(in_edges, "PIECE", 1000)
    peaks = []
    for num_edges in (20_000, 320_000):
        edge_index = np.random.default_rng(0).integers(0, 500, (2, num_edges))
        folder = tmp_path / str(num_edges)
        folder.mkdir()
        tracemalloc.start()
        InEdges.sorted_in(folder, edge_index, 500, 100_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] < 600_000, peaks  # 16 times the edges; a file is open for each range


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    folder, calls = own(tmp_path / "graph"), []
    sort, assign, write = in_edges._sort, edge_cut.assign_nodes, datamodule.write_store
    monkeypatch.setattr(in_edges, "_sort", lambda *args: (calls.append("sort"), sort(*args)))
    monkeypatch.setattr(edge_cut, "assign_nodes", lambda *a, **b: (calls.append("assign"), assign(*a, **b))[1])

    def interrupted(*args: Any, **options: Any) -> None:
        calls.append("write")
        if calls.count("write") == 1:
            raise KeyboardInterrupt
        write(*args, **options)

    monkeypatch.setattr(datamodule, "write_store", interrupted)
    data = GraphDataModule(str(folder), partition_dir=tmp_path / "store", partition="random")
    with pytest.raises(KeyboardInterrupt):
        data.build(THREE)
    again = GraphDataModule(str(folder), partition_dir=tmp_path / "store", partition="random")
    entry = tmp_path / "store" / again.build(THREE)
    assert calls == ["sort", "assign", "write", "write"]
    assert torch.equal(read_cut(entry).graph().edge_index, GRAPH.edge_index)


# What is wrong ################################################################


@pytest.mark.parametrize(
    "form, change, words",
    [
        (
            "described",
            lambda f: (f / "edges1.csv").write_text("weight,from,to\n1,3,4\n1,5,90\n"),
            r"edges1.csv, row 1: edges must be pairs of node ids.*90 nodes, got \[5, 90\]",
        ),
        (
            "described",
            lambda f: (f / "edges1.csv").write_text("weight,from,to\n1,3,x\n"),
            "edges1.csv: column 'to' must have numbers, got string",
        ),
        ("described", lambda f: (f / "edges1.csv").write_text("weight,from\n1,3\n"), "edges1.csv cannot be read"),
        ("described", lambda f: (f / "nodes.csv.gz").unlink(), "no file nodes.csv.gz"),
        ("described", lambda f: (f / "graph.json").write_text("{"), "graph.json is not valid JSON"),
        ("described", lambda f: (f / "graph.json").write_text('{"x": "x.parquet"}'), "including edge_index"),
        (
            "described",
            lambda f: (f / "graph.json").write_text('{"edge_index": {"file": 1}}'),
            "edge_index must be the name of a file",
        ),
        ("chunked", lambda f: (f / "edges1.txt").write_text("1 2\n-1 3\n"), r"edges1.txt, row 1: edges must be .*got \[-1, 3\]"),
        ("chunked", lambda f: (f / "feat1.npy").unlink(), "feat1.npy cannot be read"),
        (
            "chunked",
            lambda f: np.save(f / "feat1.npy", np.zeros((30, 5), np.float32)),
            "feat1.npy, row 0: rows must be .*got float32 .5.",
        ),
        ("chunked", lambda f: (f / "metadata.json").write_text('{"edges": {"a": 1, "b": 2}}'), "json has no .node_type."),
        (
            "graphbolt",
            lambda f: (f / "metadata.yaml").write_text("graph: {nodes: [{num: 3}]}"),
            "metadata.yaml has no 'edges'",
        ),
        ("ogb", lambda f: np.savez(f / "raw" / "data.npz", node_feat=GRAPH.x.numpy()), "data.npz has no 'edge_index'"),
        ("own", lambda f: np.save(f / "edge_index.npy", EDGES.T[:, :1]), r"edge_index.npy must hold edges, \[2, E\]"),
        ("own", lambda f: np.save(f / "edge_index.npy", EDGES + 1), "edge_index holds ids from 1 to 90"),
        ("own", lambda f: (f / "edge_index.npy").unlink(), "must have one of graph.json, metadata.json"),
        ("own", lambda f: (f / "x.npy").write_bytes(b"no"), "x.npy cannot be read as a .npy file"),
    ],
)
def test_what_is_wrong_is_told_by_file_and_row(form, change, words, tmp_path):
    folder = FORMS[form](tmp_path / "graph")
    change(folder)
    data = GraphDataModule(str(folder), partition_dir=tmp_path / "store")
    with pytest.raises(ValueError, match=words):
        data.build(THREE)
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").glob("**/*.npy"))


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="Folder .*nowhere does not exist. Use a folder with the files of a graph"):
        GraphDataModule(str(tmp_path / "nowhere"), partition_dir=tmp_path / "store").build(THREE)
    with pytest.raises(ValueError, match="source_kwargs=.* needs a callable or an import path"):
        GraphDataModule(str(own(tmp_path / "g")), {"a": 1}, partition_dir=tmp_path / "store").build(THREE)


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    """While files are converted, and while edges are sorted."""
    folder = str(described(tmp_path / "graph"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((tables, "_end"), (in_edges, "write_header")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(StoreError, match="The disk of the partition directory .*s is full"):
                GraphDataModule(folder, partition_dir=tmp_path / "s").build(THREE)
    assert (
        read_cut(tmp_path / "s" / GraphDataModule(folder, partition_dir=tmp_path / "s").build(THREE)).types.total("node") == N
    )


@pytest.mark.parametrize("memory", [0, -1, True, "4XB", "much", 1.5])
def test_bytes_that_are_none(memory):
    with pytest.raises(ValueError, match="partition_memory_limit must be a number of bytes"):
        GraphDataModule(GRAPH, partition_memory_limit=memory)


def test_bytes_and_dtypes_by_name():
    data = GraphDataModule(GRAPH, partition_memory_limit="1.5 GB", feature_dtype="float64")
    assert data.partition_memory_limit == 1_500_000_000 and data.feature_dtype == torch.float64
    with pytest.raises(ValueError, match="feature_dtype must be a floating-point dtype"):
        GraphDataModule(GRAPH, feature_dtype="int64")


def test_half_precision_stays_on_disk_and_is_cast_in_batches(tmp_path):
    graph = GRAPH.clone()
    graph.x = graph.x.half()
    data = GraphDataModule(str(own(tmp_path / "g", graph)), partition_dir=tmp_path / "s", feature_dtype="float32")
    entry = data.partition_for(THREE)
    assert np.load(entry / "node.x.npy").dtype == np.float16
    batch = data.stored_cut().shard(1).batch
    assert batch.x.dtype == torch.float32 and torch.equal(batch.x, graph.x[batch.n_id].float())


def test_arrays_are_mapped_and_not_read(tmp_path):
    folder = own(tmp_path / "g")
    data, split = read_folder(folder, tmp_path / "scratch")
    assert split is None and not (tmp_path / "scratch").exists()
    np.load(folder / "x.npy", mmap_mode="r+")[3] = 7  # in the file
    assert (data.x[3] == 7).all()
    digests = graph_digests(data)
    assert digests.keys() == {"edge_index", "x", "y", "num_nodes", *MASKS}


# Training #####################################################################


def trained(rank: int, world_size: int, source: Any, store: str, strategy: Any, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module = NodeClassifier(GraphSAGE(4, 8, num_layers=2, out_channels=3))
    data = GraphDataModule(source, partition_dir=store, **options)
    trainer = quiet_trainer(strategy, world_size, max_epochs=2)
    trainer.fit(module, datamodule=data)
    out = trainer.predict(module, datamodule=data)
    return {
        "out": torch.cat(out) if isinstance(out, list) else out,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")},
    }


@pytest.mark.parametrize("strategy", ["auto", "dgcl", "vertex_cut", "spmm_1d"])
def test_a_folder_trains_as_the_graph_in_memory(ranks, strategy, tmp_path):
    """Edges of int32, which one device and a vertex cut read as int64."""
    folder = own(tmp_path / "graph")
    np.save(folder / "edge_index.npy", EDGES.astype(np.int32))
    wanted = trained(0, 1, GRAPH, str(tmp_path / "s"), "auto")
    run = [trained(0, 1, str(folder), str(tmp_path / "s"), "auto")]
    if strategy != "auto":
        run = ranks.run(2, trained, str(folder), str(tmp_path / "s"), strategy)
    for found in run:
        assert torch.allclose(found["out"], wanted["out"], atol=1e-5)
        assert found["logged"] == pytest.approx(wanted["logged"], abs=1e-5)


# Partitioners #################################################################


@pytest.mark.parametrize("both_ways", [True, False])
def test_edges_are_streamed_from_files(both_ways, tmp_path, monkeypatch):
    """No list of edges is made symmetric in memory; of a graph with one direction only, out-edges are sorted, too."""
    monkeypatch.setattr(edge_cut.Adjacency, "of", None)
    graph = planted_partition(400, num_classes=4, num_features=4, homophily=0.95, seed=2)
    if not both_ways:
        graph.edge_index = graph.edge_index[:, graph.edge_index[0] < graph.edge_index[1]]
    sorted_in = []
    sort = in_edges._sort
    monkeypatch.setattr(in_edges, "_sort", lambda *args: (sorted_in.append(args[1].name), sort(*args)))
    data = GraphDataModule(str(own(tmp_path / "graph", graph)), partition_dir=tmp_path / "store", partition="streaming")
    cut = read_cut(tmp_path / "store" / data.build(LayoutSpec("edge_cut", 4)))
    assert len(sorted_in) == (1 if both_ways else 2)
    halo, report = sum(map(len, cut.halos)), cut.report
    assert report["method"] == "streaming" and report["node_balance"] <= 1.1 and report["edge_balance"] <= 1.31
    drawn = GraphDataModule(str(tmp_path / "graph"), partition_dir=tmp_path / "store", partition="random")
    random = read_cut(tmp_path / "store" / drawn.build(LayoutSpec("edge_cut", 4)))
    assert halo < 0.7 * sum(map(len, random.halos))
    assert torch.equal(cut.graph().edge_index, graph.edge_index)


def test_edges_are_sorted_by_source_only_where_they_are_read_so(tmp_path, monkeypatch):
    graph, sorted_in, sort = GRAPH.clone(), [], in_edges._sort
    graph.edge_index = graph.edge_index[:, graph.edge_index[0] < graph.edge_index[1]]
    monkeypatch.setattr(in_edges, "_sort", lambda *args: (sorted_in.append(args[1].name), sort(*args)))
    data = GraphDataModule(str(own(tmp_path / "graph", graph)), partition_dir=tmp_path / "store")
    entry = data.build(THREE)
    assert read_cut(tmp_path / "store" / entry).report["method"] == "metis" and sorted_in == [f"{entry}.work"]


def test_a_vertex_cut_is_streamed_from_files(tmp_path, monkeypatch):
    """Edges are read in pieces as they lie on the disk, and have the ranks that they have from memory."""
    monkeypatch.setattr(adjacency, "COPIED", 100)
    folder, layout = own(tmp_path / "graph"), LayoutSpec("vertex_cut", 3)
    np.save(folder / "edge_index.npy", EDGES.astype(np.int32))
    seen = []
    assign = cutters.assign_edges
    monkeypatch.setattr(cutters, "assign_edges", lambda *a, **b: (seen.append((a[0], b["part"])), assign(*a, **b))[1])
    cuts = [
        read_cut(
            tmp_path / "store" / GraphDataModule(source, partition_dir=tmp_path / "store", partition="streaming").build(layout)
        )
        for source in (str(folder), GRAPH)
    ]
    (edges, holders), (_, nothing) = seen
    assert edges.dtype == np.int32 and isinstance(holders, np.memmap) and nothing is None
    ranks = []
    for cut in cuts:
        assert cut.report["method"] == "streaming" and torch.equal(cut.graph().edge_index, GRAPH.edge_index)
        ranks.append(torch.empty_like(cut.holders))
        ranks[-1][cut.e_id.long()] = cut.holders
    assert torch.equal(*ranks) and cuts[0].digest != cuts[1].digest  # rows of a part are in another order


def test_a_folder_takes_the_best_partitioner_that_fits(tmp_path, monkeypatch):
    folder = str(own(tmp_path / "graph"))
    monkeypatch.setattr(
        "lightning_gnn.extensions.graph_files.partitioner.ENTRIES", 1000
    )  # blocks are more than all of METIS's
    for free, method in ((10**9, "metis"), (40_000, "streaming")):
        monkeypatch.setattr(edge_cut, "available_bytes", lambda free=free: free)
        monkeypatch.setattr("lightning_gnn.extensions.graph_files.partitioner.LEAST_PAIRS", 100)
        data = GraphDataModule(folder, partition_dir=tmp_path / method)
        assert read_cut(tmp_path / method / data.build(THREE)).report["method"] == method
    monkeypatch.setattr(edge_cut, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="No partitioner fits: 'streaming' needs the least"):
        GraphDataModule(folder, partition_dir=tmp_path / "none").build(THREE)


def test_a_vertex_cut_of_a_folder_is_the_best_that_fits_unless_one_is_named(tmp_path, monkeypatch):
    folder, little, much = str(own(tmp_path / "graph")), 10**6, 10**9
    for method in ("ne", "ebv"):
        monkeypatch.setitem(cutters.VERTEX_CUTS, method, replace(cutters.VERTEX_CUTS[method], node=10**5))
    for number, (free, source, named, method) in enumerate((
        (much, folder, {}, "ne"),
        (little, folder, {}, "streaming"),
        (little, GRAPH, {}, "ne"),
        (little, folder, {"partition": "ne"}, "ne"),
    )):  # fmt: skip
        monkeypatch.setattr(cutters, "available_bytes", lambda free=free: free)
        layout, store = VertexCutStrategy(**named).scheme.layout(3), tmp_path / str(number)
        assert read_cut(store / GraphDataModule(source, partition_dir=store).build(layout)).report["method"] == method


@settings(deadline=None, max_examples=40)
@given(edges_of_graphs, st.sampled_from([np.int32, np.int64]))
def test_symmetry_is_seen(graph, dtype):
    edge_index = np.array(graph[1], dtype).reshape(-1, 2).T
    pairs, opposite = (sorted(map(tuple, each)) for each in (edge_index.T.tolist(), edge_index[::-1].T.tolist()))
    assert in_edges.is_symmetric(edge_index) == (pairs == opposite)
    assert in_edges.is_symmetric(np.concatenate([edge_index, edge_index[::-1]], 1))


# PyG's stores #################################################################


def stores(graph: Data, layout: str) -> tuple[MyFeatureStore, MyGraphStore]:
    features, edges = MyFeatureStore(), MyGraphStore()
    for name in ("x", "y", *MASKS):
        features.put_tensor(graph[name], group_name=None, attr_name=name, index=None)
    source, target = graph.edge_index
    if layout == "csc":
        counts = torch.bincount(target, minlength=N)
        source, target = source[target.argsort(stable=True)], torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    edges.put_edge_index((source, target), edge_type=None, layout=layout, size=(N, N))
    return features, edges


@pytest.mark.parametrize("layout", ["coo", "csc"])
def test_a_pair_of_stores(layout, tmp_path):
    data = GraphDataModule(stores(GRAPH, layout), partition_dir=tmp_path)
    found = data.load()
    assert torch.equal(found.x, GRAPH.x) and torch.equal(found.train_mask, GRAPH.train_mask)
    order = GRAPH.edge_index[1].argsort(stable=True)
    assert torch.equal(found.edge_index, GRAPH.edge_index if layout == "coo" else GRAPH.edge_index[:, order])
    assert read_cut(tmp_path / data.build(THREE)).report["cut_edges"] > 0


def test_what_others_files_and_stores_say_is_of_nodes_or_edges_is_known(tmp_path):
    """Also where there are as many of both, and the names do not tell."""
    features, edges = MyFeatureStore(), MyGraphStore()
    kind = ("node", "to", "node")
    features.put_tensor(torch.rand(N, 3), group_name="node", attr_name="x", index=None)
    features.put_tensor(torch.rand(N), group_name="node", attr_name="tone", index=None)
    features.put_tensor(torch.rand(N), group_name=kind, attr_name="dist", index=None)
    edges.put_edge_index((torch.arange(N), torch.arange(N).roll(1)), edge_type=kind, layout="coo", size=(N, N))
    ring, _ = load_source((features, edges))
    assert {"tone": "node", "dist": "edge"}.items() <= kinds_of(prepare_graph(ring, masks_needed=False)).items()
    for form in (chunked, graphbolt):
        found, _ = read_folder(form(tmp_path / form.__name__), tmp_path / "scratch" / form.__name__)
        assert found.__dict__["_kinds"]["x"] == "node"


def test_a_pair_of_stores_with_types_and_without_edges():
    features, edges = MyFeatureStore(), MyGraphStore()
    with pytest.raises(ValueError, match="MyGraphStore has no edges"):
        load_source((features, edges))
    for name, size in (("author", 4), ("paper", 5)):
        features.put_tensor(torch.rand(size, 3), group_name=name, attr_name="x", index=None)
    ends = torch.tensor([0, 3]), torch.tensor([4, 0])
    kind = ("author", "writes", "paper")
    edges.put_edge_index(ends, edge_type=kind, layout="coo", size=(4, 5))
    found, _ = load_source((features, edges))
    assert isinstance(found, HeteroData) and torch.equal(found[kind].edge_index, torch.stack(ends))
    assert found["paper"].x.shape == (5, 3)
    with pytest.raises(ValueError, match="tuple returned a MyGraphStore"):
        load_source((edges, features))


def test_arrays_that_do_not_fit_are_read_by_rows(tmp_path, monkeypatch):
    """Without reading ahead, which is megabytes for each row; what fits is read ahead."""
    advised = []
    monkeypatch.setattr("lightning_gnn.data.store.mmap.MADV_RANDOM", 1, raising=False)
    memmap = np.memmap

    def watched(*args: Any) -> Any:
        array = memmap(*args)
        array._mmap = SimpleNamespace(madvise=lambda advice, name=args[0].name: advised.append(name))
        return array

    entry = tmp_path / "s" / GraphDataModule(str(own(tmp_path / "g")), partition_dir=tmp_path / "s").build(THREE)
    monkeypatch.setattr("lightning_gnn.data.store.np.memmap", watched)
    for by_rows, free in ((True, 10**9), (False, 1000)):
        monkeypatch.setattr("lightning_gnn.data.store.available_bytes", lambda free=free: free)
        read_cut(entry, by_rows=by_rows).edge_index_of(0)
        assert not advised
    read_cut(entry, by_rows=True).edge_index_of(0)
    assert {"node.x.npy", "part0.edge_index.npy", "e_id.npy"} <= {*advised}


def evaluated(rank: int, world_size: int, folder: str, store: str, evaluation: str) -> dict[str, Any]:
    strategy = SamplingStrategy([-1, -1], 16, evaluation=evaluation)
    torch.manual_seed(0)
    module = NodeClassifier(GraphSAGE(4, 8, num_layers=2, out_channels=3))
    data = GraphDataModule(folder, partition_dir=store, feature_dtype="float32")
    trainer = quiet_trainer(strategy, world_size, max_epochs=1)
    trainer.fit(module, datamodule=data)
    out = trainer.predict(module, datamodule=data)
    batch = data.shard.batch
    return {
        "out": torch.cat(out) if isinstance(out, list) else out,
        "val": float(trainer.callback_metrics.get("val_loss", trainer.logged_metrics.get("val_loss", 0))),
        "has_edges": "edge_index" in batch or "e_id" in batch,
        "x": batch.x.dtype,
    }


def test_ranks_of_batches_hold_no_edges(ranks, tmp_path):
    """Of a graph without types, evaluated in batches of all neighbours, with the numbers of layers."""
    graph = GRAPH.clone()
    graph.x = graph.x.half()
    folder = str(own(tmp_path / "g", graph))
    found = {each: ranks.run(2, evaluated, folder, str(tmp_path / "s"), each) for each in ("layerwise", "minibatch")}
    for layers, batches in zip(*found.values()):
        assert layers["has_edges"] and not batches["has_edges"]
        assert (layers["x"], batches["x"]) == (
            torch.float32,
            torch.float16,
        )  # as it lies in the store: nothing is copied
        assert torch.allclose(layers["out"], batches["out"], atol=1e-5) and len(batches["out"]) == N
        assert batches["val"] == pytest.approx(layers["val"], abs=1e-5)
