"""A graph in a folder of files, as a PyG graph whose tensors are mapped from them: no memory for edges and features.

Folders that are known, by what is in them:

- ``graph.json``, or only ``.npy`` files that are called after attributes: the project's own, see :func:`read_folder`;
- ``metadata.json``: DGL's chunked graph (DistDGL's input);
- ``metadata.yaml``: the on-disk dataset of DGL's GraphBolt;
- ``raw/data.npz``: OGB's node property datasets as they are downloaded, papers100M among them.
"""

from __future__ import annotations

import errno
import glob
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from lightning_gnn.arguments import shown
from lightning_gnn.data.attributes import SPLITS, tell_kinds
from lightning_gnn.extensions.graph_files.array_files import Table, mapped, member, write_edges, write_rows

Split = Mapping[str, Any]


def read_folder(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """Returns the graph in a folder, and its index split, if it has one.

    The project's own form is one file per attribute, called after it as in a ``Data``: ``edge_index.npy`` ``[2, E]``, ``x.npy``
    ``[N, F]``, ``y.npy``, ``train_mask.npy``, ``edge_weight.npy``, ``train_idx.npy`` and so on. Other files, and other names,
    need a ``graph.json``: by attribute the name of a file, with wildcards for several, one after the other, or an object of
    ``files``, ``columns`` (of a table), ``delimiter`` and ``header`` (of CSV); and ``num_nodes``. Tables are CSV or Parquet
    files; those of ``edge_index`` have columns of sources and of targets. ::

        {"edge_index": "edges/*.parquet", "x": "features.npy", "y": {"files": "nodes.csv", "columns": ["label"]}}

    Args:
        folder: with the files.
        scratch: where files that cannot be mapped are written as such that can, once. It may be missing.

    Raises:
        ValueError: a folder of no known form, a file that is missing or does not fit, with its name; a bad id, with its row.
        ModuleNotFoundError: tables without pyarrow.
    """
    if not folder.is_dir():
        raise ValueError(
            f"There is no folder {folder}. Give a folder with a graph's files (docs/large-graphs.md), or an import path."
        )
    forms: dict[str, Callable[[Path, Path], tuple[Data, Split | None]]] = {
        "graph.json": _own,
        "metadata.json": _chunked,
        "metadata.yaml": _graphbolt,
        "raw/data.npz": _ogb,
        "edge_index.npy": _own,
    }
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
    raise ValueError(
        f"{folder} holds none of {', '.join(forms)}: no form of a graph that is known. docs/large-graphs.md describes them."
    )


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(map(Path, glob.glob(str(folder / pattern))))
    if not found:
        raise ValueError(f"{folder} has no file {pattern}, which its description names.")
    return found


def _edges(file: Path, array: np.ndarray) -> np.ndarray | None:
    """Returns an array of edges as it is where it is ``[2, E]``, rows in one piece; None where it must be written anew."""
    if array.ndim == 2 and array.shape[0] == 2 and array.shape[1] != 2:
        return array if array.flags.c_contiguous and array.dtype in (np.int32, np.int64) else None
    if array.ndim != 2 or 2 not in array.shape:
        raise ValueError(f"{file} must hold edges, [2, E] (got {list(array.shape)}).")
    return array if array.shape[0] == 2 and array.flags.c_contiguous else None


# The project's own ############################################################


def _own(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    described: dict[str, Any] = {file.stem: file.name for file in sorted(folder.glob("*.npy"))}
    if (folder / "graph.json").is_file():
        try:
            described = json.loads((folder / "graph.json").read_text())
        except ValueError as error:
            raise ValueError(f"{folder / 'graph.json'} is no JSON: {error}.") from error
        if not isinstance(described, dict) or "edge_index" not in described:
            raise ValueError(f"{folder / 'graph.json'} must name the files of attributes, edge_index among them.")
    num_nodes = described.pop("num_nodes", None)
    values = Data()
    for name, of in described.items():
        if name == "edge_index":
            continue
        table, file = _own_table(folder, name, of)
        rows = write_rows(scratch / f"{name}.npy", table) if file is None else mapped(file)
        values[name] = torch.from_numpy(rows)
    if num_nodes is None and "x" in values:
        num_nodes = values.x.size(0)
    table, file = _own_table(folder, "edge_index", described["edge_index"])
    found = _edges(file, mapped(file)) if file is not None else None
    edges = write_edges(scratch / "edge_index.npy", table, num_nodes) if found is None else found
    values.edge_index = torch.from_numpy(edges)
    if num_nodes is not None:
        values.num_nodes = num_nodes
    return values, None


def _own_table(folder: Path, name: str, of: Any) -> tuple[Table, Path | None]:
    """Returns the files of an attribute as a table; and the file, if it is one ``.npy`` file that can be mapped."""
    options = {"files": of} if isinstance(of, str) else of
    allowed = {"files", "columns", "delimiter", "header"}
    if not isinstance(options, dict) or not options.keys() <= allowed or not isinstance(options.get("files"), str):
        raise ValueError(
            f"{folder / 'graph.json'}: {name} must be the name of a file, or an object of {', '.join(sorted(allowed))} (got "
            f"{shown(of)})."
        )
    files = _files(folder, options["files"])
    rest = {key: value for key, value in options.items() if key != "files"}
    return Table(files, **rest), files[0] if len(files) == 1 and files[0].suffix == ".npy" else None


# Others' ######################################################################


def _check_one(what: str, names: Sequence[Any], file: Path) -> None:
    if len(names) > 1:
        raise ValueError(
            f"{file} has {len(names)} types of {what}, {', '.join(map(str, names[:5]))}. A graph in files has one; load "
            "those with types as a HeteroData, GraphDataModule(function)."
        )


def _joined(files: Sequence[Path], scratch: Path, name: str, **options: Any) -> np.ndarray:
    if len(files) == 1 and files[0].suffix == ".npy":
        return mapped(files[0])
    return write_rows(scratch / f"{name}.npy", Table(files, **options))


def _named(name: str) -> str:
    """Returns the name that PyG gives to what DGL's datasets call features and labels."""
    return {"feat": "x", "label": "y", "labels": "y"}.get(name, name)


def _chunked(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """DGL's chunked graph: ``metadata.json`` with ``edges`` and ``node_data`` by type, each a format and a list of files."""
    file = folder / "metadata.json"
    meta = json.loads(file.read_text())
    node_types, edge_types = meta.get("node_type", ["node"]), list(meta["edges"])
    for what, names in (("nodes", node_types), ("edges", edge_types)):
        _check_one(what, names, file)
    [counts] = meta["num_nodes_per_chunk"]
    num_nodes, edges = sum(counts), meta["edges"][edge_types[0]]
    values = Data()
    table = Table([folder / each for each in edges["data"]], **_of_format(edges["format"]))
    values.edge_index = torch.from_numpy(write_edges(scratch / "edge_index.npy", table, num_nodes))
    of_nodes = meta.get("node_data", {}).get(node_types[0], {})
    of_edges = meta.get("edge_data", {}).get(edge_types[0], {})
    for given, prefix in ((of_nodes, ""), (of_edges, "edge_")):
        for name, of in given.items():
            called = _named(name) if not prefix else f"{prefix}{name.removeprefix('edge_')}"
            paths = [folder / each for each in of["data"]]
            values[called] = torch.from_numpy(_joined(paths, scratch, called, **_of_format(of["format"])))
            if not prefix:
                tell_kinds(values, "node", [called])
    values.num_nodes = num_nodes
    return values, None


def _of_format(of: Mapping[str, Any]) -> dict[str, Any]:
    return {"delimiter": of.get("delimiter", " "), "header": False} if of.get("name") == "csv" else {}


def _graphbolt(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """GraphBolt's on-disk dataset: ``metadata.yaml`` with ``graph``, ``feature_data`` and ``tasks``."""
    import yaml

    file = folder / "metadata.yaml"
    meta = yaml.safe_load(file.read_text())
    nodes, edges = meta["graph"]["nodes"], meta["graph"]["edges"]
    for what, names in (("nodes", nodes), ("edges", edges)):
        _check_one(what, [each.get("type") for each in names], file)
    num_nodes, values = int(nodes[0]["num"]), Data()
    path = folder / edges[0]["path"]
    found = _edges(path, mapped(path)) if path.suffix == ".npy" else None
    if found is None:
        kind = _Transposed if path.suffix == ".npy" and mapped(path).shape[0] == 2 else Table
        found = write_edges(scratch / "edge_index.npy", kind([path], header=False), num_nodes)
    values.edge_index = torch.from_numpy(found)
    for of in meta.get("feature_data") or ():
        name = _named(of["name"]) if of["domain"] == "node" else f"edge_{of['name'].removeprefix('edge_')}"
        values[name] = torch.from_numpy(mapped(folder / of["path"]))
        if of["domain"] == "node":
            tell_kinds(values, "node", [name])
    split: dict[str, torch.Tensor] = {}
    for task in meta.get("tasks") or ():
        for key, part in (("train_set", "train"), ("validation_set", "valid"), ("test_set", "test")):
            for of_set in task.get(key) or ():
                named = {each["name"]: torch.from_numpy(mapped(folder / each["path"])) for each in of_set["data"]}
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


class _Transposed(Table):
    """Edges in a ``.npy`` file ``[2, E]`` whose rows are not in one piece, or of another dtype."""

    def pieces(self) -> Any:
        array = mapped(self._files[0])
        for begin in range(0, array.shape[1], 1 << 20):
            yield self._files[0], begin, array[:, begin : begin + (1 << 20)].T


def _ogb(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """OGB's node property datasets as downloaded: ``raw/data.npz``, ``raw/node-label.npz`` and ``split/*/*.csv.gz``."""
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
