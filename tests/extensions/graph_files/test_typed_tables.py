"""Graphs with types in files: each layout equals the HeteroData in memory, in its parts and in training; and errors.

Test tiers: without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from common import Recorder, assert_same, outcome, quiet_trainer
from test_hetero_sampling import AWARDS, BY, CITES, SIZES, TAGS, WRITES, Convs, Typed, typed_graph
from torch_geometric.data import HeteroData

from lightning_gnn import DGCLStrategy, GraphDataModule, VertexCutStrategy
from lightning_gnn.data.sources import MASKS
from lightning_gnn.data.store import read_cut
from lightning_gnn.extensions.graph_files import in_edges
from lightning_gnn.extensions.graph_files.folders import read_folder
from lightning_gnn.extensions.graph_files.tables import read_rows
from lightning_gnn.extensions.graph_files.typed_tables import KeyTable
from lightning_gnn.partition.layout import LayoutSpec

KINDS = (WRITES, CITES, TAGS, BY, AWARDS)
THREE = LayoutSpec.edge_cut(3)


def save(file: Path, **columns: Any) -> Path:
    """Writes a table as Parquet or CSV; matrices are lists of fixed size."""
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, values in columns.items():
        values = values.numpy() if isinstance(values, torch.Tensor) else values
        wide = isinstance(values, np.ndarray) and values.ndim == 2
        arrays[name] = pyarrow.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1]) if wide else pyarrow.array(values)
    write = pyarrow.csv.write_csv if file.suffix == ".csv" else pyarrow.parquet.write_table
    write(pyarrow.table(arrays), file)
    return file


def names_of(kind: str) -> list[str]:
    """Ids that are not sorted like the positions, of several lengths."""
    return [f"{kind}-é{(number * 37) % 101}" for number in range(SIZES[kind])]


def arrays(folder: Path) -> Path:
    """The project's format of .npy files; edges of one type as rows."""
    graph, described = typed_graph(), {"nodes": {"author": {}, "paper": {}, "topic": {"num_nodes": SIZES["topic"]}}, "edges": {}}
    folder.mkdir(parents=True)
    for name in ("author", "paper"):
        for attribute, value in graph[name].items():
            np.save(folder / f"{name}.{attribute}.npy", value.numpy())
            described["nodes"][name][attribute] = f"{name}.{attribute}.npy"
    for number, kind in enumerate(KINDS):
        edges = graph[kind].edge_index.numpy().astype(np.int32)
        np.save(folder / f"edges{number}.npy", edges.T if kind == CITES else edges)
        described["edges"][":".join(kind)] = {"edge_index": f"edges{number}.npy"}
    np.save(folder / "edge_attr.npy", graph[WRITES].edge_attr.numpy())
    described["edges"][":".join(WRITES)]["edge_attr"] = "edge_attr.npy"
    (folder / "graph.json").write_text(json.dumps(described))
    return folder


def tables(folder: Path) -> Path:
    """One table for each type: names as ids of authors and papers, positions of topics."""
    graph = typed_graph()
    author, paper = graph["author"], graph["paper"]
    save(folder / "author.parquet", name=names_of("author"), age=author.x[:, 0], rest=author.x[:, 1:])
    halves = slice(0, 15), slice(15, None)
    for number, rows in enumerate(halves):
        values = {name: paper[name][rows] for name in ("x", "y", *MASKS)}
        save(folder / "papers" / f"{number}.parquet", key=names_of("paper")[rows], **values)
    columns = {"id": "key", **{name: name for name in ("x", "y", *MASKS)}}
    described: dict[str, Any] = {
        "nodes": {
            "author": {"files": "author.parquet", "columns": {"id": "name", "x": ["age", "rest"]}},
            "paper": {"files": "papers/*.parquet", "columns": columns},
            "topic": {"num_nodes": SIZES["topic"]},
        },
        "edges": {},
    }
    for number, kind in enumerate(KINDS):
        ends = [ids_of(kind[row], graph[kind].edge_index[row // 2], ("author", "paper")) for row in (0, 2)]
        more = {"w": graph[kind].edge_attr} if "edge_attr" in graph[kind] else {}
        # columns in another order than in the file
        file = save(folder / f"edges{number}.parquet", to=ends[1], **more, origin=ends[0])
        attributes = {"edge_attr": "w"} if more else {}
        described["edges"][":".join(kind)] = {"files": file.name, "columns": {"edge_index": ["origin", "to"], **attributes}}
    (folder / "graph.json").write_text(json.dumps(described))
    return folder


def ids_of(kind: str, positions: torch.Tensor, named: tuple[str, ...]) -> Any:
    if kind not in named:
        return positions
    return pyarrow.array([names_of(kind)[position] for position in positions.tolist()], pyarrow.string())


def chunked(folder: Path) -> Path:
    """DGL's chunked graph: edges as csv, numpy and parquet, in chunks."""
    graph, meta = typed_graph(), {"node_type": [*SIZES], "num_nodes_per_chunk": [], "edge_type": [":".join(k) for k in KINDS]}
    folder.mkdir(parents=True)
    edges, node_data, edge_data = {}, {}, {}

    def store(name: str, values: torch.Tensor, form: str, chunks: int) -> dict[str, Any]:
        files = []
        for number, piece in enumerate(np.array_split(values.numpy(), chunks)):
            suffix = {"csv": "txt", "numpy": "npy", "parquet": "parquet"}[form]
            files.append(f"{name}{number}.{suffix}")
            if form == "csv":
                np.savetxt(folder / files[-1], piece, "%d")
            elif form == "numpy":
                np.save(folder / files[-1], piece)
            else:
                save(
                    folder / files[-1],
                    **({"a": piece} if piece.ndim == 1 else {f"c{i}": piece[:, i] for i in range(piece.shape[1])}),
                )
        return {"format": {"name": form, **({"delimiter": " "} if form == "csv" else {})}, "data": files}

    for name, size in SIZES.items():
        meta["num_nodes_per_chunk"].append([size - 2, 2])
        values = {
            {"x": "feat", "y": "label"}.get(each, each): value for each, value in graph[name].items() if each != "num_nodes"
        }
        node_data[name] = {
            each: store(f"{name}-{each}", value, "parquet" if name == "author" else "numpy", 2) for each, value in values.items()
        }
    for number, kind in enumerate(KINDS):
        form = ("csv", "numpy", "parquet", "csv", "parquet")[number]
        edges[":".join(kind)] = store(f"edges{number}", graph[kind].edge_index.T, form, 1 if form == "numpy" else 3)
    edge_data[":".join(WRITES)] = {"attr": store("attr", graph[WRITES].edge_attr, "numpy", 2)}
    meta.update(edges=edges, node_data=node_data, edge_data=edge_data)
    (folder / "metadata.json").write_text(json.dumps(meta))
    return folder


def storm(folder: Path, strings: bool = True) -> Path:
    """GraphStorm's configuration, as a file of its own; ids are strings, or whole numbers with gaps."""
    graph, config = typed_graph(), {"version": "gconstruct-v0.1", "nodes": [], "edges": []}
    numbers = {name: [7 * ((number * 37) % 101) for number in range(size)] for name, size in SIZES.items()}
    ids = {name: names_of(name) if strings else numbers[name] for name in SIZES}
    for name in SIZES:
        file = folder / "nodes" / f"{name}.{'csv' if name == 'topic' else 'parquet'}"
        form = {"name": "csv", "separator": ","} if name == "topic" else {"name": "parquet"}
        x = {"feat": graph[name].x} if "x" in graph[name] else {}
        y = {"label": graph[name].y} if "y" in graph[name] else {}
        save(file, node_id=ids[name], **x, **y)
        of = {"node_type": name, "node_id_col": "node_id", "format": form, "files": [f"nodes/{file.name}"]}
        if x:
            of["features"] = [{"feature_col": "feat", "feature_name": "feat"}]
        if y:
            splits = {}
            for part, mask in zip(("train", "valid", "test"), MASKS):
                chosen = graph[name][mask].nonzero().view(-1).tolist()
                save(folder / f"{part}.parquet", node_id=[ids[name][each] for each in chosen])
                splits[part] = f"{part}.parquet"
            of["labels"] = [{"label_col": "label", "task_type": "classification", "custom_split_filenames": splits}]
        config["nodes"].append(of)
    for number, kind in enumerate(KINDS):
        ends = [[ids[kind[row]][each] for each in graph[kind].edge_index[row // 2].tolist()] for row in (0, 2)]
        dtype = pyarrow.string() if strings else pyarrow.int64()
        source, target = (pyarrow.array(each, dtype) for each in ends)
        features = {"f": graph[kind].edge_attr} if kind == WRITES else {}
        save(folder / "edges" / f"{number}.parquet", target=target, **features, source=source)
        config["edges"].append({
            "relation": [*kind], "source_id_col": "source", "dest_id_col": "target",
            "format": {"name": "parquet"}, "files": f"edges/{number}.parquet",
            **({"features": [{"feature_col": "f"}]} if features else {}),
        })  # fmt: skip
    (folder / "storm.json").write_text(json.dumps(config))
    return folder / "storm.json"


FORMS: dict[str, Any] = {
    "arrays": arrays,
    "tables": tables,
    "chunked": chunked,
    "storm": storm,
    "storm of numbers": lambda folder: storm(folder, strings=False),
}


def assert_equal(found: HeteroData, wanted: HeteroData) -> None:
    assert found.node_types == wanted.node_types and found.edge_types == wanted.edge_types
    for store in wanted.stores:
        for name, value in store.items():
            assert torch.equal(torch.as_tensor(found[store._key][name]), torch.as_tensor(value)), (store._key, name)


@pytest.mark.parametrize("form", FORMS)
def test_parts_equal_the_graph_in_memory(form, tmp_path, monkeypatch):
    monkeypatch.setattr(in_edges, "PIECE", 17)
    source = FORMS[form](tmp_path / "graph")
    data = GraphDataModule(str(source), partition_dir=tmp_path / "s", partition="contiguous", partition_memory_limit=300)
    entry = tmp_path / "s" / data.build(THREE)
    assert_equal(read_cut(entry).graph(), typed_graph())
    memory = GraphDataModule(typed_graph(), partition_dir=tmp_path / "m", partition="contiguous")
    one, other = read_cut(entry), read_cut(tmp_path / "m" / memory.build(THREE))
    assert one.mask_counts == other.mask_counts and one.types.as_dict() == other.types.as_dict()
    assert one.report["types"] == other.report["types"]
    for rank in range(3):
        of_files, of_memory = (cut.shard(rank).batch for cut in (one, other))
        for kind in KINDS:
            edges = [
                sorted(zip(batch[kind].e_id.tolist(), ends_of(cut, rank, kind)))
                for cut, batch in ((one, of_files), (other, of_memory))
            ]
            assert edges[0] == edges[1]
    assert {path.name for path in (tmp_path / "s").iterdir() if path.is_dir()} == {entry.name}, "temporary files are removed"


def ends_of(cut: Any, rank: int, kind: Any) -> list[Any]:
    """Original ids of the ends of a rank's edges of a type."""
    low, high = cut.types.offsets(kind)[rank : rank + 2]
    ends = cut.ends(torch.arange(low, high), kind)
    return [*zip(*(cut.ids_of(end)[of].tolist() for end, of in zip((kind[0], kind[2]), ends)))]


@pytest.mark.parametrize("method", ["streaming", "metis"])
def test_partitioners(method, tmp_path, monkeypatch):
    folder = str(tables(tmp_path / "graph"))
    entry = tmp_path / "s" / GraphDataModule(folder, partition_dir=tmp_path / "s", partition=method).build(THREE)
    assert read_cut(entry).report["method"] == method
    assert_equal(read_cut(entry).graph(), typed_graph())


def test_a_vertex_cut_assigns_each_edge_as_in_memory(tmp_path):
    layout, ranks = VertexCutStrategy().scheme.layout(3), []
    for number, source in enumerate((str(tables(tmp_path / "graph")), typed_graph())):
        data = GraphDataModule(source, partition_dir=tmp_path / str(number), partition="streaming")
        cut = read_cut(data.partition_dir / data.build(layout))
        assert_equal(cut.graph(), typed_graph())
        held = {}
        for kind in cut.types.edges:
            for rank, (low, high) in enumerate(pairwise(cut.types.offsets(kind).tolist())):
                begin = int(cut.edge_offsets[rank] + cut.types.begins(kind)[rank])
                holders = cut.holders[begin : begin + high - low].tolist()
                held.update({(kind, each): holder for each, holder in zip(cut.ids_of(kind)[low:high].tolist(), holders)})
        ranks.append(held)
    assert ranks[0] == ranks[1] and len({*ranks[0].values()}) == 3


class Trained(Typed):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trained(rank: int, world_size: int, source: Any, store: str, strategy: Any = None) -> dict[str, Any]:
    torch.manual_seed(1)
    module, recorder = Trained(Convs()).double(), Recorder()
    data = GraphDataModule(source, partition_dir=store)
    chosen = "auto" if strategy is None else {"dgcl": DGCLStrategy, "vertex_cut": VertexCutStrategy}[strategy](timeout=60)
    return outcome(quiet_trainer(chosen, world_size, callbacks=[recorder]), module, data, recorder)


@pytest.mark.parametrize(
    "form, strategy", [*((form, "dgcl") for form in FORMS if form != "tables"), ("tables", "vertex_cut"), ("tables", "dgcl")]
)
def test_training_equals_the_graph_in_memory(ranks, form, strategy, tmp_path):
    source = str(FORMS[form](tmp_path / "graph"))
    wanted = trained(0, 1, typed_graph(), str(tmp_path / "m"))
    assert_same(trained(0, 1, source, str(tmp_path / "s")), wanted, rtol=1e-8, atol=1e-10)
    for found in ranks.run(2, trained, source, str(tmp_path / "s"), strategy):
        assert_same(found, wanted, rtol=1e-8, atol=1e-10)


# Ids and memory ###############################################################


def test_edges_are_converted_to_int32_and_mapped(tmp_path):
    found, split = read_folder(tables(tmp_path / "graph"), tmp_path / "scratch")
    assert split is None
    for kind in KINDS:
        assert found[kind].edge_index.dtype == torch.int32
    prepared = GraphDataModule(str(tmp_path / "graph"), partition_dir=tmp_path / "s").load()
    assert {prepared[kind].edge_index.dtype for kind in KINDS} == {torch.int32}
    sizes = [(tmp_path / "scratch" / f"edge{number}" / "edge_index.npy").stat().st_size for number in range(5)]
    assert sizes == [256 + 8 * typed_graph()[kind].edge_index.size(1) for kind in KINDS]


def test_counts_of_dgl_by_type(tmp_path):
    """Newer versions of DGL write num_nodes_per_type."""
    folder = chunked(tmp_path / "graph")
    meta = json.loads((folder / "metadata.json").read_text())
    meta["num_nodes_per_type"] = [sum(chunks) for chunks in meta.pop("num_nodes_per_chunk")]
    (folder / "metadata.json").write_text(json.dumps(meta))
    found, _ = read_folder(folder, tmp_path / "scratch")
    assert found.num_nodes_dict == SIZES


def test_ids_of_categories_and_long_columns(tmp_path):
    """Dictionaries of strings, int32 ids, and pieces that are slices of a larger array."""
    words = pyarrow.array(["b", "a", None, "b", "c"]).dictionary_encode()
    column = pyarrow.RecordBatch.from_arrays([words.slice(3, 2)], ["a"])
    table = KeyTable([], None)
    plain = KeyTable([], None)._numbers(Path("f"), pyarrow.RecordBatch.from_arrays([pyarrow.array(["b", "c"])], ["a"]))
    assert np.array_equal(table._numbers(Path("f"), column), plain) and table.strings == [True]
    numbers = pyarrow.RecordBatch.from_arrays([pyarrow.array([3, -1], pyarrow.int32())], ["a"])
    assert KeyTable([], None)._numbers(Path("f"), numbers).tolist() == [[3], [-1]]
    ints_of_strings = KeyTable([], [True])._numbers(Path("f"), numbers)
    assert ints_of_strings[0, 0] == KeyTable([], None)._numbers(
        Path("f"), pyarrow.RecordBatch.from_arrays([pyarrow.array(["3"])], ["a"])
    )


def test_the_configuration_and_its_files_are_in_the_key(tmp_path):
    """A stored partition is found again, unless a file of the description changes; the names need not be in one folder."""
    config = storm(tmp_path / "graph")
    data = GraphDataModule(str(config), partition_dir=tmp_path / "s")
    before = data.origin.key()
    (tmp_path / "graph" / "note.txt").write_text("of no type")
    assert GraphDataModule(str(config), partition_dir=tmp_path / "s").origin.key() == before
    save(tmp_path / "graph" / "nodes" / "paper.parquet", node_id=names_of("paper"))
    assert GraphDataModule(str(config), partition_dir=tmp_path / "s").origin.key() != before


def change_json(name: str, *path: Any, value: Any) -> Any:
    def change(folder: Path) -> None:
        described = json.loads((folder / name).read_text())
        of = described
        for key in path[:-1]:
            of = of[key]
        of[path[-1]] = value
        (folder / name).write_text(json.dumps(described))

    return change


WRONG: dict[str, Any] = {
    "id": (
        "tables",
        lambda f: save(f / "edges0.parquet", origin=["author-é0", "nobody"], to=["paper-é0"] * 2, w=[1.0, 2.0]),
        r"edges0.parquet, row 1: ids must be ids of node type 'author', got another id. Add the node",
    ),
    "twice": (
        "tables",
        lambda f: save(f / "author.parquet", name=["a", "b", "a"], age=[1.0] * 3, rest=np.zeros((3, 4))),
        r"author.parquet: rows \[0, 2\] of node type 'author' have the same id",
    ),
    "numbers": (
        "storm of numbers",
        lambda f: save(f / "edges" / "0.parquet", source=["a"], target=[0], f=np.zeros((1, 2))),
        r"0.parquet: column 'source' must have whole numbers, as the ids of its node type, got string",
    ),
    "floats": (
        "tables",
        lambda f: save(f / "edges2.parquet", origin=[0.5], to=["paper-é0"]),
        "column 'origin' must have whole num",
    ),
    "range": (
        "tables",
        lambda f: save(f / "edges2.parquet", origin=[0, 6], to=["paper-é0"] * 2),
        r"edges2.parquet, row 1: edges must be pairs of node ids from 0 to 5, for 6 nodes, got 6",
    ),
    "column": (
        "tables",
        lambda f: save(f / "edges2.parquet", a=[0], to=["paper-é0"]),
        "edges2.parquet has no column 'origin'; it has",
    ),
    "null": (
        "tables",
        lambda f: save(f / "author.parquet", name=["a", None], age=[1.0] * 2, rest=np.zeros((2, 4))),
        "no value in 1 rows",
    ),
    "type": (
        "tables",
        change_json("graph.json", "edges", "a:b:paper", value={"edge_index": "edges0.parquet"}),
        r"edge type \('a', 'b', 'paper'\) must have node types of \['author', 'paper', 'topic'\], got \['a'\]",
    ),
    "name": ("tables", change_json("graph.json", "edges", "writes", value={}), "must be 'source:relation:target', got 'writes'"),
    "form": ("tables", change_json("graph.json", "nodes", "paper", value=3), "paper must be an object of attributes, got 3"),
    "count": (
        "tables",
        change_json("graph.json", "nodes", "topic", value={}),
        "node type 'topic' must have ids, num_nodes, x or y",
    ),
    "transform": (
        "storm",
        change_json("storm.json", "nodes", 0, "features", 0, "transform", value={"name": "rank_gauss"}),
        "a feature of author does not support the transform 'rank_gauss'. Store the transformed column",
    ),
    "format": (
        "storm",
        change_json("storm.json", "nodes", 0, "format", value={"name": "hdf5"}),
        "must be 'parquet' or 'csv', got 'hdf5'",
    ),
    "labels": (
        "storm",
        change_json("storm.json", "edges", 0, "labels", value=[{"task_type": "link_prediction"}]),
        "labels of author:writes:paper are not supported. Remove them; to predict links",
    ),
    "two labels": (
        "storm",
        change_json("storm.json", "nodes", 1, "labels", value=[{"task_type": "ranking"}]),
        "at most one label",
    ),
    "no key": ("storm", change_json("storm.json", "edges", 0, value={}), "storm.json has no 'relation', which a graph needs"),
    "transposed": ("arrays", change_json("graph.json", "nodes", "author", "id", value="author.x.npy"), "must have shape .E, 2."),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_file_and_the_row_or_type(case, tmp_path):
    form, change, words = WRONG[case]
    source = FORMS[form](tmp_path / "graph")
    change(tmp_path / "graph")
    with pytest.raises(ValueError, match=words):
        GraphDataModule(str(source), partition_dir=tmp_path / "s").build(THREE)
    assert not list((tmp_path / "s").glob("**/*.npy"))


def test_a_random_split_of_the_configuration(tmp_path):
    config = storm(tmp_path / "graph")
    change_json("storm.json", "nodes", 1, "labels", value=[
        {"label_col": "label", "task_type": "classification", "split_pct": [0.5, 0.25, 0.25]}
    ])(config.parent)  # fmt: skip
    found, _ = read_folder(config, tmp_path / "scratch")
    counts = [int(found["paper"][name].sum()) for name in MASKS]
    assert sum(counts) == SIZES["paper"] - 1 and abs(counts[0] - 20) <= 1, "without the node that has no label"


def test_a_single_column_of_features_is_a_matrix(tmp_path):
    (tmp_path / "nodes.csv").write_text("age,year\n1.5,3\n2.5,4\n0.5,5\n")
    x, y = (read_rows([tmp_path / "nodes.csv"], tmp_path, name, columns=[of]) for name, of in (("x", "age"), ("y", "year")))
    assert x.shape == (3, 1) and y.shape == (3,)
