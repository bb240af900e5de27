"""Graphs with node and edge types in tables: one or several files for each type, described by a JSON file.

A graph is read as a table of each node type and a table of each edge type. Three descriptions are converted to these:

- :func:`types_by_name`: the project's format, objects ``nodes`` and ``edges`` by type;
- :func:`chunked_types`: DGL's chunked graph, ``metadata.json``;
- :func:`storm_types`: the configuration of GraphStorm's ``gconstruct``, lists ``nodes`` and ``edges``.

Ids of nodes are positions in their table, or a column of whole numbers or strings. The ids of a column are mapped to positions by
sorted 64-bit keys, in memory that grows with nodes; the key of a string is its hash.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType
from typing_extensions import override

from lightning_gnn.arguments import quote
from lightning_gnn.data.sources import masks_of
from lightning_gnn.extensions.graph_files.tables import Table, check_ids, files_of, map_file, read_edges, read_rows, write_edges
from lightning_gnn.kernels.loops import compile_loop
from lightning_gnn.partition.adjacency import mix
from lightning_gnn.partition.shard import id_dtype

Files = tuple[list[Path], dict[str, Any]]
"""Files of a table, and the options to read them as :class:`~lightning_gnn.extensions.graph_files.tables.Table`."""


class TypeFiles(NamedTuple):
    """Files of one node or edge type.

    Attributes:
        attributes: files by attribute; of an edge type, including ``edge_index``.
        ids: files with the ids of the nodes; None if ids are positions.
        num_nodes: number of nodes, if it is known.
        seeds: files with ids of nodes, by attribute, such as ``train_idx``.
        split: fractions of a random split of the labeled nodes.
        by_rows: whether ``.npy`` files of edges always are ``[E, 2]``. Otherwise, a file whose first size is 2 is ``[2, E]``.
    """

    attributes: Mapping[str, Files]
    ids: Files | None = None
    num_nodes: int | None = None
    seeds: Mapping[str, Files] = {}
    split: Sequence[float] | None = None
    by_rows: bool = False


class KeyTable(Table):
    """Table of ids: whole numbers, and for strings 64-bit hashes.

    Args:
        files, options: see :class:`~lightning_gnn.extensions.graph_files.tables.Table`.
        strings: for each column to read, whether its ids are strings; None: one column, whose type determines it.
    """

    def __init__(self, files: Sequence[Path], strings: Sequence[bool] | None = None, **options: Any) -> None:
        super().__init__(files, **options)
        self.strings = strings

    @override
    def _numbers(self, file: Path, batch: Any) -> np.ndarray:
        import pyarrow.types as types

        keys = []
        for number, (name, column) in enumerate(self._checked_columns(file, batch)):
            kind = getattr(column.type, "value_type", column.type)  # of categories
            is_string = types.is_string(kind) or types.is_large_string(kind)
            self.strings = self.strings or [is_string]
            if number == len(self.strings):
                break
            if not types.is_integer(kind) and not (is_string and self.strings[number]):
                wanted = "strings" if self.strings[number] else "whole numbers, as the ids of its node type"
                raise ValueError(f"{file}: column {name!r} must have {wanted}, got {kind}. Convert the column.")
            keys.append(_hashes(column) if self.strings[number] else column.to_numpy(zero_copy_only=False).astype(np.int64))
        return np.column_stack(keys)


def _hashes(column: Any) -> np.ndarray:
    """Returns a hash of each string, int64 ``[n]``."""
    import pyarrow

    text = column.cast(pyarrow.large_string())
    _, ends, letters = text.buffers()
    offsets = np.frombuffer(ends, np.int64, len(text) + 1, 8 * text.offset)
    out = np.empty(len(text), np.uint64)
    _hash(offsets, np.frombuffer(letters or b"", np.uint8), out)
    return out.view(np.int64)


@compile_loop
def _hash(offsets, letters, out):  # type: ignore[no-untyped-def]
    """Write the FNV-1a hash of each string to `out`, mixed."""
    for row in range(len(out)):
        found = np.uint64(0xCBF29CE484222325)
        for place in range(offsets[row], offsets[row + 1]):
            found = (found ^ np.uint64(letters[place])) * np.uint64(0x100000001B3)
        out[row] = mix(found)


class NodeIds:
    """Ids of a node type, which are mapped to positions.

    Args:
        name: node type.
        num_nodes: number of nodes, if ids are positions.
        files: files with the ids.
    """

    def __init__(self, name: str, num_nodes: int, files: Files | None = None) -> None:
        self._name, self.num_nodes, self.has_strings, self._keys = name, num_nodes, False, None
        if files is None:
            return
        table = KeyTable(files[0], **files[1])
        keys = np.concatenate([np.empty(0, np.int64), *(piece[:, 0] for _, _, piece in table.pieces())])
        self.num_nodes, self.has_strings = len(keys), bool(table.strings and table.strings[0])
        order = np.argsort(keys, kind="stable")
        self._keys, self._order = keys[order], order.astype(id_dtype(len(order)))
        again = np.flatnonzero(self._keys[1:] == self._keys[:-1])
        if len(again):
            rows = self._order[again[0] : again[0] + 2].tolist()
            raise ValueError(f"{files[0][0]}: rows {rows} of node type {name!r} have the same id. Remove one of the rows.")

    def positions(self, file: Path, row: int, keys: np.ndarray) -> np.ndarray:
        """Returns the positions of nodes; raises ValueError with the file and row for an id that is not a node.

        Args:
            file, row: location of the first id.
            keys: ids, int64 ``[n]``, see :class:`KeyTable`.
        """
        if self._keys is None:
            check_ids(file, row, keys, self.num_nodes)
            return keys
        found = np.minimum(np.searchsorted(self._keys, keys), self.num_nodes - 1)
        missing = np.flatnonzero(self._keys[found] != keys) if self.num_nodes else range(len(keys))
        if len(missing):
            raise ValueError(
                f"{file}, row {row + missing[0]}: ids must be ids of node type {self._name!r}, got another id. Add the node, or "
                "remove the row."
            )
        return self._order[found]


class PositionTable(KeyTable):
    """Table whose ids are mapped to positions, as the edges of a type.

    Args:
        files: see :class:`KeyTable`.
        ids: ids of the node type of each column.
        **options: see :class:`KeyTable`.
    """

    def __init__(self, files: Files, *ids: NodeIds) -> None:
        super().__init__(files[0], [each.has_strings for each in ids], **files[1])
        self._ids = ids

    @override
    def pieces(self) -> Iterator[tuple[Path, int, np.ndarray]]:
        for file, row, piece in super().pieces():
            columns = piece.reshape(len(piece), -1).T
            if len(columns) < len(self._ids) or piece.dtype.kind not in "iu":
                raise ValueError(f"{file} must have {len(self._ids)} columns of ids, got {piece.dtype} {list(piece.shape)}.")
            yield file, row, np.column_stack([of.positions(file, row, each) for of, each in zip(self._ids, columns)])


def read_types(file: Path, nodes: Mapping[str, TypeFiles], edges: Mapping[EdgeType, TypeFiles], scratch: Path) -> HeteroData:
    """Returns a graph with types; files that cannot be mapped are converted in `scratch`, once.

    Args:
        file: description of the graph, for messages.
        nodes, edges: files of each type.
    """
    data, ids = HeteroData(), dict[str, NodeIds]()
    for number, (name, of) in enumerate(nodes.items()):
        store, folder = data[name], scratch / f"node{number}"
        for attribute, (files, options) in of.attributes.items():
            store[attribute] = read_rows(files, folder, attribute, **options)
        counted = next((len(store[each]) for each in ("x", "y", "train_mask") if each in store), 0)
        ids[name] = NodeIds(name, of.num_nodes or counted, of.ids)
        store.num_nodes = ids[name].num_nodes
        if not store.num_nodes:
            raise ValueError(f"{file}: node type {name!r} must have ids, num_nodes, x or y, which count its nodes. Add one.")
        for attribute, seeds in of.seeds.items():
            rows = [piece[:, 0] for _, _, piece in PositionTable(seeds, ids[name]).pieces()]
            store[attribute] = torch.from_numpy(np.concatenate(rows).astype(np.int64))
        if of.split is not None:
            store.update(masks_of(Data(), store.get("y"), store.num_nodes, None, of.split, 0, 0, True))
    for number, (kind, of) in enumerate(edges.items()):
        store, folder = data[kind], scratch / f"edge{number}"
        unknown = {kind[0], kind[2]} - ids.keys()
        if unknown:
            raise ValueError(f"{file}: edge type {kind} must have node types of {[*ids]}, got {sorted(unknown)}. Add the type.")
        ends, most = (ids[kind[0]], ids[kind[2]]), max(ids[kind[0]].num_nodes, ids[kind[2]].num_nodes)
        for attribute, (files, options) in of.attributes.items():
            if attribute != "edge_index":
                store[attribute] = read_rows(files, folder, attribute, **options)
            elif len(files) == 1 and files[0].suffix == ".npy" and not of.by_rows and map_file(files[0]).shape[0] == 2:
                if nodes[kind[0]].ids or nodes[kind[2]].ids:
                    raise ValueError(f"{files[0]} must have shape [E, 2], because node ids of {kind} are in files. Transpose it.")
                store.edge_index = read_edges(files, folder, most)
            else:
                table = PositionTable((files, options), *ends)
                store.edge_index = torch.from_numpy(write_edges(folder / "edge_index.npy", table, most))
    return data


Types = tuple[dict[str, TypeFiles], dict[EdgeType, TypeFiles]]


def edge_type_of(file: Path, name: str) -> EdgeType:
    """Returns the edge type of its name ``"source:relation:target"``."""
    source, relation, target = name.split(":") if name.count(":") == 2 else ("", "", "")
    if not (source and relation and target):
        raise ValueError(f"{file}: an edge type must be 'source:relation:target', got {quote(name)}.")
    return source, relation, target


# The project's format #########################################################


def attribute_files(folder: Path, name: str, of: Any) -> Files:
    """Returns the files of an attribute, and the options to read them as a table."""
    options = {"files": of} if isinstance(of, str) else of
    allowed = {"files", "columns", "delimiter", "header"}
    if not isinstance(options, dict) or not options.keys() <= allowed or not isinstance(options.get("files"), str):
        raise ValueError(
            f"{folder / 'graph.json'}: {name} must be the name of a file, or an object of {', '.join(sorted(allowed))} (got "
            f"{quote(of)})."
        )
    return files_of(folder, options["files"]), {key: value for key, value in options.items() if key != "files"}


def types_by_name(file: Path, described: Mapping[str, Any]) -> Types:
    """Returns the files of each type of a graph in the project's format.

    A type has attributes like a graph without types, see :func:`~lightning_gnn.extensions.graph_files.folders.read_folder`. If a
    type has ``files``, ``columns`` has the names of columns by attribute. The attribute ``id`` has the ids of the nodes. ::

        {"nodes": {"author": {"files": "authors.parquet", "columns": {"id": "name", "x": ["age", "papers"]}}, "paper": {...}},
         "edges": {"author:writes:paper": {"edge_index": {"files": "writes/*.csv", "columns": ["author", "paper"]}}}}
    """

    def attributes(name: str, of: Any) -> dict[str, Files]:
        if not isinstance(of, dict) or not isinstance(of.get("columns", {}), dict):
            raise ValueError(f"{file}: {name} must be an object of attributes, got {quote(of)}. See docs/large-graphs.md.")
        table = {key: of[key] for key in ("files", "delimiter", "header") if key in of}
        named = {
            each: {**table, "columns": [names] if isinstance(names, str) else names}
            for each, names in of.get("columns", {}).items()
        }
        own = {each: value for each, value in of.items() if each not in ("columns", "num_nodes", *table)}
        return {each: attribute_files(file.parent, f"{each} of {name}", value) for each, value in (named | own).items()}

    nodes, edges = {}, {}
    for name, of in described["nodes"].items():
        found = attributes(name, of)
        nodes[name] = TypeFiles(found, found.pop("id", None), of.get("num_nodes"))
    for name, of in described["edges"].items():
        edges[edge_type_of(file, name)] = TypeFiles(attributes(name, of))
    return nodes, edges


# DGL's chunked graph ##########################################################


def attribute_name(name: str) -> str:
    """Returns PyG's name for features and labels of DGL's datasets."""
    return {"feat": "x", "label": "y", "labels": "y"}.get(name, name)


def table_options(of: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options to read files in a format of DGL."""
    return {"delimiter": of.get("delimiter", " "), "header": False} if of.get("name") == "csv" else {}


def num_nodes_of(meta: Mapping[str, Any]) -> list[int]:
    """Returns the number of nodes of each type."""
    return meta["num_nodes_per_type"] if "num_nodes_per_type" in meta else [*map(sum, meta["num_nodes_per_chunk"])]


def chunked_types(file: Path, meta: Mapping[str, Any]) -> Types:
    """Returns the files of each type of DGL's chunked graph."""

    def files(of: Mapping[str, Any]) -> Files:
        return [file.parent / each for each in of["data"]], table_options(of["format"])

    nodes, edges = {}, {}
    for name, count in zip(meta["node_type"], num_nodes_of(meta)):
        of_type = meta.get("node_data", {}).get(name, {})
        nodes[name] = TypeFiles({attribute_name(key): files(of) for key, of in of_type.items()}, num_nodes=count)
    for name, of in meta["edges"].items():
        of_type = meta.get("edge_data", {}).get(name, {})
        attributes = {f"edge_{key.removeprefix('edge_')}": files(each) for key, each in of_type.items()}
        edges[edge_type_of(file, name)] = TypeFiles({"edge_index": files(of)} | attributes, by_rows=True)
    return nodes, edges


# GraphStorm's configuration ###################################################


def storm_types(file: Path, described: Mapping[str, Any]) -> Types:
    """Returns the files of each type of GraphStorm's configuration of ``gconstruct``.

    Files are relative to the folder of the configuration. The features of a type are the columns of ``x``, or of ``edge_attr``.
    """
    nodes, edges = dict[str, TypeFiles](), dict[EdgeType, TypeFiles]()

    def find_files(names: Any) -> list[Path]:
        return [*chain.from_iterable(files_of(file.parent, each) for each in ([names] if isinstance(names, str) else names))]

    def table(name: str, of: Mapping[str, Any], columns: Any, files: Any = None) -> Files:
        form = of.get("format", {}).get("name")
        if form not in ("parquet", "csv"):
            raise ValueError(f"{file}: the format of {name} must be 'parquet' or 'csv', got {form!r}. Convert its files.")
        options = {"delimiter": of["format"].get("separator", ","), "header": True} if form == "csv" else {}
        return find_files(files or of["files"]), {**options, "columns": [columns] if isinstance(columns, str) else [*columns]}

    def features(name: str, of: Mapping[str, Any]) -> list[str]:
        columns = list[str]()
        for each in of.get("features", ()):
            transform = each.get("transform", {}).get("name", "no-op")
            if transform != "no-op":
                raise ValueError(
                    f"{file}: a feature of {name} does not support the transform {transform!r}. Store the transformed column, "
                    "and remove the transform."
                )
            columns += [each["feature_col"]] if isinstance(each["feature_col"], str) else each["feature_col"]
        return columns

    for of in described["nodes"]:
        name = of["node_type"]
        columns, attributes, seeds, split = features(name, of), dict[str, Files](), dict[str, Files](), None
        if columns:
            attributes["x"] = table(name, of, columns)
        for label in of.get("labels", ()):
            if "y" in attributes or label.get("task_type") not in ("classification", "regression"):
                raise ValueError(
                    f"{file}: {name} must have at most one label, of classification or regression, got "
                    f"{quote(of['labels'])}. Remove the others."
                )
            attributes["y"], split = table(name, of, label["label_col"]), label.get("split_pct")
            given = dict(label.get("custom_split_filenames") or {})
            column = given.pop("column", of.get("node_id_col"))
            seeds = {f"{part}_idx": table(name, of, column, files) for part, files in given.items()}
        ids = of.get("node_id_col")
        nodes[name] = TypeFiles(attributes, ids and table(name, of, ids), None, seeds, None if seeds else split)
    for of in described["edges"]:
        source, relation, target = of["relation"]
        name = f"{source}:{relation}:{target}"
        if of.get("labels"):
            raise ValueError(f"{file}: labels of {name} are not supported. Remove them; to predict links, use split_edges(data).")
        columns = features(name, of)
        attributes = {"edge_index": table(name, of, (of["source_id_col"], of["dest_id_col"]))}
        edges[source, relation, target] = TypeFiles(attributes | ({"edge_attr": table(name, of, columns)} if columns else {}))
    return nodes, edges


def files_named(file: Path) -> list[str]:
    """Returns the files that a description names, if `file` is a JSON file."""

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from strings(each)

    if not file.is_file():
        return []
    return [path for pattern in strings(json.loads(file.read_text())) for path in glob.glob(str(file.parent / pattern)) if path]
