"""Folders of files as the source of a datamodule: the graph is mapped, sorted and partitioned in memory that grows with nodes.

Supported folders, identified by their contents:

- ``graph.json``, or only ``.npy`` files named after attributes: the format of this project, see :func:`read_folder`; or, with
  ``nodes`` and ``edges``, a graph with types (:mod:`~lightning_gnn.extensions.graph_files.typed_tables`);
- ``metadata.json``: DGL's chunked graph (DistDGL's input);
- ``metadata.yaml``: the on-disk dataset of DGL's GraphBolt;
- ``raw/data.npz``: OGB's node property datasets as downloaded, including papers100M.

Arrays are mapped if a file stores the raw numbers; otherwise they are written once as ``.npy`` files. Mapped data is read from
disk on access and can be dropped from memory again.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from typing_extensions import override

from lightning_gnn.console import progress_bar
from lightning_gnn.data.loading import Assign, Assigned, GraphSource
from lightning_gnn.data.shards import Graph, JoinedGraph, input_type_of
from lightning_gnn.data.sources import SPLITS, tell_kinds
from lightning_gnn.data.store import writing
from lightning_gnn.devices import available_bytes
from lightning_gnn.extensions.graph_files.in_edges import InEdges, join_edges, new_array, write_parts, write_typed_parts
from lightning_gnn.extensions.graph_files.partitioner import Streaming
from lightning_gnn.extensions.graph_files.tables import Table, map_file, member, read_edges, read_rows, write_edges, write_rows
from lightning_gnn.extensions.graph_files.typed_tables import (
    attribute_files,
    attribute_name,
    chunked_types,
    files_named,
    num_nodes_of,
    read_types,
    storm_types,
    table_options,
    types_by_name,
)
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.registry import cutter_of

Split = Mapping[str, Any]


def read_folder(folder: Path, scratch: Path) -> tuple[Graph, Split | None]:
    """Returns the graph in a folder, and its index split if it has one.

    The project's format is one file per attribute, named after the attribute of ``Data``: ``edge_index.npy`` ``[2, E]``,
    ``x.npy`` ``[N, F]``, ``y.npy``, ``train_mask.npy``, ``edge_weight.npy``, ``train_idx.npy`` and so on.

    Other files or names need a ``graph.json``. For each attribute it has a file name, with wildcards for several concatenated
    files, or an object. The object has ``files``, ``columns`` (of a table), ``delimiter`` and ``header`` (of CSV). ``num_nodes``
    is optional. Tables are CSV or Parquet files; tables of ``edge_index`` have a column of sources and a column of targets. ::

        {"edge_index": "edges/*.parquet", "x": "features.npy", "y": {"files": "nodes.csv", "columns": ["label"]}}

    Args:
        folder: folder with the files, or the path of a file such as ``graph.json`` with another name.
        scratch: folder in which files that cannot be mapped are converted, once. It may not exist yet.

    Raises:
        ValueError: for an unknown format, a missing or unsuitable file (with its name), or an invalid id (with its row).
        ModuleNotFoundError: for tables without pyarrow.
    """
    arrays = sorted(folder.glob("*.npy"))
    forms: dict[str, Callable[[Path, Path], tuple[Graph, Split | None]]] = {
        "graph.json": lambda folder, scratch: _read_described(folder / "graph.json", scratch),
        "metadata.json": _read_chunked,
        "metadata.yaml": _read_graphbolt,
        "raw/data.npz": _read_ogb,
        "edge_index.npy": lambda folder, scratch: _read_native(folder, {each.stem: each.name for each in arrays}, scratch),
    }
    if folder.is_file():
        file, folder = folder, folder.parent
        forms = {file.name: lambda folder, scratch: _read_described(file, scratch)}
    if not folder.is_dir():
        raise ValueError(
            f"Folder {folder} does not exist. Use a folder with the files of a graph (docs/large-graphs.md), or an import path."
        )
    for name, read in forms.items():
        if (folder / name).is_file():
            try:
                return read(folder, scratch)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise ValueError(f"{folder} cannot be read: {error}.") from error
            except KeyError as error:
                raise ValueError(f"{folder / name} has no {error}, which a graph needs.") from error
    raise ValueError(f"{folder} must have one of {', '.join(forms)}, which describe a graph. See docs/large-graphs.md.")


# The project's format #########################################################


def _read_described(file: Path, scratch: Path) -> tuple[Graph, Split | None]:
    """Returns the graph that a JSON file describes: without types, with types, or in the form of GraphStorm."""
    try:
        described = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if isinstance(described, dict) and {"nodes", "edges"} <= described.keys():
        read = storm_types if isinstance(described["nodes"], list) else types_by_name
        return read_types(file, *read(file, described), scratch), None
    if not isinstance(described, dict) or "edge_index" not in described:
        raise ValueError(f"{file} must list the files of attributes, including edge_index, or have nodes and edges by type.")
    return _read_native(file.parent, described, scratch)


def _read_native(folder: Path, described: dict[str, Any], scratch: Path) -> tuple[Data, Split | None]:
    num_nodes = described.pop("num_nodes", None)
    values = Data()
    for name, of in described.items():
        if name != "edge_index":
            files, options = attribute_files(folder, name, of)
            values[name] = read_rows(files, scratch, name, **options)
    if num_nodes is None and "x" in values:
        num_nodes = values.x.size(0)
    files, options = attribute_files(folder, "edge_index", described["edge_index"])
    values.edge_index = read_edges(files, scratch, num_nodes, **options)
    if num_nodes is not None:
        values.num_nodes = num_nodes
    return values, None


# Other formats ################################################################


def _check_one(kind: str, names: Sequence[Any], file: Path) -> None:
    if len(names) > 1:
        raise ValueError(
            f"{file} must have one type of {kind}, got {len(names)}: {', '.join(map(str, names[:5]))}. Load a graph with types "
            "with a function that returns a HeteroData: GraphDataModule(function)."
        )


def _read_chunked(folder: Path, scratch: Path) -> tuple[Graph, Split | None]:
    """Returns DGL's chunked graph: ``metadata.json`` with ``edges`` and ``node_data`` by type, each with a format and files."""
    file = folder / "metadata.json"
    meta = json.loads(file.read_text())
    node_types, edge_types = meta.get("node_type", ["node"]), list(meta["edges"])
    if len(node_types) > 1 or len(edge_types) > 1:
        return read_types(file, *chunked_types(file, meta), scratch), None
    [num_nodes], edges = num_nodes_of(meta), meta["edges"][edge_types[0]]
    values = Data()
    table = Table([folder / each for each in edges["data"]], **table_options(edges["format"]))
    values.edge_index = torch.from_numpy(write_edges(scratch / "edge_index.npy", table, num_nodes))
    of_nodes = meta.get("node_data", {}).get(node_types[0], {})
    of_edges = meta.get("edge_data", {}).get(edge_types[0], {})
    for given, prefix in ((of_nodes, ""), (of_edges, "edge_")):
        for name, of in given.items():
            called = attribute_name(name) if not prefix else f"{prefix}{name.removeprefix('edge_')}"
            paths = [folder / each for each in of["data"]]
            values[called] = read_rows(paths, scratch, called, **table_options(of["format"]))
            if not prefix:
                tell_kinds(values, "node", [called])
    values.num_nodes = num_nodes
    return values, None


def _read_graphbolt(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """Returns GraphBolt's on-disk dataset: ``metadata.yaml`` with ``graph``, ``feature_data`` and ``tasks``."""
    import yaml

    file = folder / "metadata.yaml"
    meta = yaml.safe_load(file.read_text())
    nodes, edges = meta["graph"]["nodes"], meta["graph"]["edges"]
    for kind, names in (("nodes", nodes), ("edges", edges)):
        _check_one(kind, [each.get("type") for each in names], file)
    num_nodes, values = int(nodes[0]["num"]), Data()
    values.edge_index = read_edges([folder / edges[0]["path"]], scratch, num_nodes, header=False)
    for of in meta.get("feature_data") or ():
        name = attribute_name(of["name"]) if of["domain"] == "node" else f"edge_{of['name'].removeprefix('edge_')}"
        values[name] = torch.from_numpy(map_file(folder / of["path"]))
        if of["domain"] == "node":
            tell_kinds(values, "node", [name])
    split: dict[str, torch.Tensor] = {}
    for task in meta.get("tasks") or ():
        for key, part in (("train_set", "train"), ("validation_set", "valid"), ("test_set", "test")):
            for of_set in task.get(key) or ():
                named = {each["name"]: torch.from_numpy(map_file(folder / each["path"])) for each in of_set["data"]}
                seeds = named.get("seeds", named.get("seed_nodes"))
                if seeds is None or seeds.dim() != 1 or part in split:
                    continue
                split[part] = seeds.long()
                if "labels" in named:
                    y = values.get("y")
                    if y is None:
                        y = values.y = torch.full((num_nodes,), -1, dtype=torch.long)
                    y[split[part]] = named["labels"].long().view(-1)
    values.num_nodes = num_nodes
    return values, split or None


def _read_ogb(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """Returns an OGB node property dataset: ``raw/data.npz``, ``raw/node-label.npz`` and ``split/*/*.csv.gz``."""
    file, values = folder / "raw" / "data.npz", Data()
    edges = member(file, "edge_index", scratch)
    if edges is None:
        raise KeyError("edge_index")
    values.edge_index = torch.from_numpy(edges)
    for name, called in (("node_feat", "x"), ("node_year", "node_year"), ("edge_feat", "edge_attr")):
        found = member(file, name, scratch)
        if found is not None and found.dtype != object:
            values[called] = torch.from_numpy(found)
    labels = folder / "raw" / "node-label.npz"
    if labels.is_file():
        y = member(labels, "node_label", scratch)
        if y is not None:
            values.y = torch.from_numpy(y)
    split = {}
    for part in folder.glob("split/*/*.csv*"):
        name = part.name.partition(".")[0]
        if name in SPLITS:
            ids = write_rows(scratch / f"split.{name}.npy", Table([part], header=False))
            split[name] = torch.from_numpy(ids).long()
    return values, split or None


class FolderSource(GraphSource):
    """Path of a folder as a graph source; see :func:`~lightning_gnn.extensions.graph_files.folders.read_folder`.

    Args:
        source: path of the folder, or of a JSON file that describes the graph.
        memory: bytes that sorting edges may use in addition to memory that grows with nodes; None: a third of the available
            memory.
        input_type: requested node type whose nodes are predicted, for a graph with types.
    """

    short_ids = True

    def __init__(self, source: str, memory: int | None = None, input_type: str | None = None) -> None:
        super().__init__(source)
        self._folder, self._memory, self._input_type = source, memory or (available_bytes() or 3 << 30) // 3, input_type

    @override
    def load(self, args: Mapping[str, Any] | None, store: Path) -> tuple[Graph, Split | None]:
        if args:
            raise ValueError(
                f"source_kwargs={dict(args)} needs a callable or an import path as source (got the folder {self._folder})."
            )
        scratch = self._conversion_folder(store)
        with writing(store):
            try:
                return read_folder(Path(self._folder), scratch)
            except ValueError:  # the converted files would be stale once the source files are fixed
                shutil.rmtree(scratch, ignore_errors=True)
                raise

    @override
    def method(self, layout: LayoutSpec) -> str:
        return "auto" if layout.kind == "edge_cut" else layout.method or "auto"

    @override
    def partitioners(self, work: Path) -> Mapping[str, Streaming]:
        return {"streaming": Streaming(work, self._memory)}

    @override
    def _defined_by(self) -> list[str]:
        return [self._folder, *files_named(Path(self._folder))]

    def _conversion_folder(self, store: Path) -> Path:
        """Returns the folder of converted files, for sources that cannot be memory-mapped."""
        return store / f"{self.key()}.files"

    @contextmanager
    @override
    def cut(self, folder: Path, data: Graph, layout: LayoutSpec, assign: Assign) -> Iterator[tuple[Assigned, Any]]:
        """Partition the graph, as for graphs in memory; completed steps of an interrupted run are not repeated."""
        store, work = folder.parent, folder.parent / f"{folder.name}.work"
        owners, ranks = work / "part.npy", work / "holders.npy"
        with writing(store), progress_bar("Sorting edges", 2 * data.num_edges) as advance:
            work.mkdir(parents=True, exist_ok=True)
            if isinstance(data, HeteroData):
                data.__dict__["_joined"] = join_edges(data, work)  # for `assign`, too
            joined = JoinedGraph.of(data)
            in_edges = InEdges.sorted_in(work, joined.edge_index, joined.num_nodes, self._memory, advance)
        if not owners.exists():
            began, holders = time.perf_counter(), None
            if layout.kind == "vertex_cut":
                with writing(store, data.num_edges):
                    holders = new_array(ranks, cutter_of(layout.kind).part_dtype(layout.parts), data.num_edges)
            part, _, report = assign(self.partitioners(work), holders)
            report["seconds"] = time.perf_counter() - began
            with writing(store):
                if holders is not None:
                    holders.flush()
                (work / "report.json").write_text(json.dumps(report))
                np.save(work / ".part.npy", part)
                (work / ".part.npy").replace(owners)
        report = json.loads((work / "report.json").read_text())
        holders = np.load(ranks, mmap_mode="r") if layout.kind == "vertex_cut" else None
        with progress_bar("Writing parts", data.num_edges) as advance:
            write = partial(write_parts, in_edges, advance)
            if isinstance(data, HeteroData):
                write = partial(write_typed_parts, in_edges, advance, joined, input_type_of(data, self._input_type), work)
            yield (np.load(owners), holders, report), write
        data.__dict__.pop("_joined", None)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(self._conversion_folder(store), ignore_errors=True)
