"""Folders of files as the source of a datamodule: the graph is mapped, sorted and partitioned in memory that grows with nodes.

Supported folders, identified by their contents:

- ``graph.json``, or only ``.npy`` files named after attributes: the format of this project, see :func:`read_folder`;
- ``metadata.json``: DGL's chunked graph (DistDGL's input);
- ``metadata.yaml``: the on-disk dataset of DGL's GraphBolt;
- ``raw/data.npz``: OGB's node property datasets as downloaded, including papers100M.

Arrays are mapped if a file stores the raw numbers; otherwise they are written once as ``.npy`` files. Mapped data is read from
disk on access and can be dropped from memory again.
"""

from __future__ import annotations

import errno
import glob
import gzip
import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch_geometric.data import Data
from typing_extensions import override

from lightning_gnn.arguments import quote
from lightning_gnn.console import progress_bar
from lightning_gnn.data.loading import Assign, Assigned, GraphSource
from lightning_gnn.data.shards import Graph
from lightning_gnn.data.sources import SPLITS, tell_kinds
from lightning_gnn.data.store import appearing, writing
from lightning_gnn.devices import available_bytes
from lightning_gnn.extensions.graph_files.in_edges import InEdges, write_parts
from lightning_gnn.extensions.graph_files.partitioner import Streaming
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.registry import cutter_of

ROWS = 1 << 20
"""Number of rows of a table or of a copied array in memory at once."""

NEEDS_PYARROW = "Reading {} needs pyarrow, which is not installed. Run pip install lightning-gnn[files]."


def map_file(file: Path) -> np.ndarray:
    """Returns a ``.npy`` file, or a tensor in a ``.pt`` file, memory-mapped (copy on write)."""
    try:
        if file.suffix == ".pt":
            return torch.load(file, mmap=True, weights_only=True).numpy()
        return np.load(file, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read as a {file.suffix} file of numbers: {error}.") from error


def map_member(file: Path, name: str) -> np.ndarray | None:
    """Returns an array of a ``.npz`` file, memory-mapped; None if it is compressed or does not exist."""
    with zipfile.ZipFile(file) as archive:
        try:
            member = archive.getinfo(f"{name}.npy")
        except KeyError:
            return None
    if member.compress_type != zipfile.ZIP_STORED:
        return None
    with file.open("rb") as opened:
        opened.seek(member.header_offset + 26)  # lengths of the name and the extra field, in the local header only
        lengths = opened.read(4)
        skipped = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        opened.seek(member.header_offset + 30 + skipped)
        version = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(opened)
        begin = opened.tell()
    return np.memmap(file, dtype, "c", begin, shape, "F" if fortran else "C")


def member(file: Path, name: str, scratch: Path) -> np.ndarray | None:
    """Returns an array of a ``.npz`` file, memory-mapped, or None; a compressed array is unpacked to `scratch`."""
    found = map_member(file, name)
    if found is not None:
        return found
    with zipfile.ZipFile(file) as archive:
        if f"{name}.npy" not in archive.namelist():
            return None
        target = scratch / f"{file.stem}.{name}.npy"
        if not target.exists():
            scratch.mkdir(parents=True, exist_ok=True)
            with appearing(target) as new, archive.open(f"{name}.npy") as packed, new.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 24)
    return map_file(target)


class Table:
    """Numeric table in one or several concatenated files: CSV, Parquet or ``.npy``; read in pieces.

    Args:
        files: files with suffix ``.npy`` (``[n]`` or ``[n, columns]``) or ``.parquet``; other files are CSV, optionally ``.gz``.
        columns: names of the columns to read; default: all.
        delimiter: delimiter of CSV files.
        header: whether the first line of CSV files has column names.
    """

    def __init__(
        self, files: Sequence[Path], columns: Sequence[str] | None = None, delimiter: str = ",", header: bool | None = None
    ) -> None:
        self._files, self._columns, self._delimiter, self._header = files, columns, delimiter, header

    def pieces(self) -> Iterator[tuple[Path, int, np.ndarray]]:
        """Yields the file, its first row, and the values of each piece, ``[n, columns]`` or ``[n]``."""
        for file in self._files:
            row = 0
            for piece in self._of(file):
                yield file, row, piece
                row += len(piece)

    def _of(self, file: Path) -> Iterator[np.ndarray]:
        if file.suffix == ".npy":
            array = map_file(file)
            for begin in range(0, len(array), ROWS):
                yield array[begin : begin + ROWS]
            return
        try:
            for batch in self._batches(file):
                yield self._numbers(file, batch)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error}.") from error

    def _batches(self, file: Path) -> Iterator[Any]:
        try:
            import pyarrow
            import pyarrow.csv
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(NEEDS_PYARROW.format(file)) from error
        try:
            if file.suffix in (".parquet", ".pq"):
                yield from pyarrow.parquet.ParquetFile(file).iter_batches(ROWS, columns=self._columns)
                return
            named = _names_columns(file) if self._header is None else self._header
            read = pyarrow.csv.ReadOptions(block_size=1 << 24, autogenerate_column_names=not named)
            parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter)
            convert = pyarrow.csv.ConvertOptions(include_columns=self._columns)
            yield from pyarrow.csv.open_csv(str(file), read, parse, convert)
        except (pyarrow.ArrowInvalid, KeyError) as error:
            raise ValueError(f"{file} cannot be read as a table of numbers: {error}.") from error

    def _numbers(self, file: Path, batch: Any) -> np.ndarray:
        arrays = []
        for name, column in zip(batch.schema.names, batch.columns):
            if column.null_count:
                raise ValueError(f"{file} has no value in {column.null_count} rows of column {name!r}. Fill them in.")
            width = getattr(column.type, "list_size", None)
            values = (column.flatten() if width else column).to_numpy(zero_copy_only=False)
            if values.dtype.kind not in "biuf":
                raise ValueError(f"{file}: column {name!r} must have numbers, got {column.type}.")
            arrays.append(values.reshape(-1, width) if width else values)
        return arrays[0] if len(arrays) == 1 else np.column_stack(arrays)


def _names_columns(file: Path) -> bool:
    """Returns whether the first line of a CSV file has column names, that is, letters."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as opened:
        return any(character.isalpha() for character in opened.readline())


def write_rows(file: Path, table: Table) -> np.ndarray:
    """Returns the rows of a table, ``[n]`` or ``[n, columns]``, written to a ``.npy`` file once and memory-mapped."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with appearing(file) as new, new.open("wb") as out:
            out.write(bytes(_HEADER))
            rows, first = 0, None
            for source, row, piece in table.pieces():
                if first is None:
                    first = piece[:0]
                if piece.shape[1:] != first.shape[1:] or piece.dtype.kind != first.dtype.kind:
                    raise ValueError(
                        f"{source}, row {row}: rows must be {first.dtype} {list(first.shape[1:])}, as in the files before, got "
                        f"{piece.dtype} {list(piece.shape[1:])}."
                    )
                piece.astype(first.dtype).tofile(out)
                rows += len(piece)
            shape = (rows, *(() if first is None else first.shape[1:]))
            _end(out, shape, np.dtype(np.float32) if first is None else first.dtype)
    return map_file(file)


def write_edges(file: Path, table: Table, num_nodes: int | None) -> np.ndarray:
    """Returns the edges in a table's first two columns, ``[2, E]``, written to a ``.npy`` file once and mapped.

    The dtype is int32 if `num_nodes` is known and fits.

    Raises:
        ValueError: for an id that is not a node; names the file and row.
    """
    dtype = np.dtype(np.int64 if num_nodes is None or num_nodes > 2**31 else np.int32)
    if not file.exists():
        targets = file.with_name(f".{file.name}.targets")
        file.parent.mkdir(parents=True, exist_ok=True)
        with appearing(file) as new, new.open("wb") as out, targets.open("wb") as later:
            out.write(bytes(_HEADER))
            rows = 0
            for source, row, piece in table.pieces():
                if piece.ndim != 2 or piece.shape[1] < 2 or piece.dtype.kind not in "iu":
                    raise ValueError(
                        f"{source} must hold two columns of whole numbers, source and target (got {piece.dtype} "
                        f"{list(piece.shape)} from row {row} on)."
                    )
                check_ids(source, row, piece[:, :2], num_nodes)
                piece[:, 0].astype(dtype).tofile(out)
                piece[:, 1].astype(dtype).tofile(later)
                rows += len(piece)
            later.flush()
            with targets.open("rb") as opened:
                shutil.copyfileobj(opened, out, 1 << 24)
            _end(out, (2, rows), dtype)
        targets.unlink()
    return map_file(file)


def check_ids(file: Path, row: int, ids: np.ndarray, num_nodes: int | None) -> None:
    """Raises a ValueError with the file and the row if an id in `ids`, ``[n, ...]``, is not a node."""
    if not len(ids) or (ids.min() >= 0 and (num_nodes is None or ids.max() < num_nodes)):
        return
    wrong = ids < 0 if num_nodes is None else (ids < 0) | (ids >= num_nodes)
    first = int(np.flatnonzero(wrong.reshape(len(ids), -1).any(1))[0])
    there = "" if num_nodes is None else f" from 0 to {num_nodes - 1}, for {num_nodes} nodes"
    raise ValueError(f"{file}, row {row + first}: edges must be pairs of node ids{there}, got {ids[first].tolist()}.")


def _end(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Write the header of a ``.npy`` file into the reserved space."""
    descr = np.lib.format.dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin1")
    head = np.lib.format.magic(1, 0) + (_HEADER - 10).to_bytes(2, "little")
    out.seek(0)
    out.write(head + text.ljust(_HEADER - len(head) - 1) + b"\n")


_HEADER = 256
"""Reserved bytes for the header of a file whose number of rows is not known yet."""

Split = Mapping[str, Any]


def read_folder(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """Returns the graph in a folder, and its index split if it has one.

    The project's format is one file per attribute, named after the attribute of ``Data``: ``edge_index.npy`` ``[2, E]``,
    ``x.npy`` ``[N, F]``, ``y.npy``, ``train_mask.npy``, ``edge_weight.npy``, ``train_idx.npy`` and so on.

    Other files or names need a ``graph.json``. For each attribute it has a file name, with wildcards for several concatenated
    files, or an object. The object has ``files``, ``columns`` (of a table), ``delimiter`` and ``header`` (of CSV). ``num_nodes``
    is optional. Tables are CSV or Parquet files; tables of ``edge_index`` have a column of sources and a column of targets. ::

        {"edge_index": "edges/*.parquet", "x": "features.npy", "y": {"files": "nodes.csv", "columns": ["label"]}}

    Args:
        folder: folder with the files.
        scratch: folder in which files that cannot be mapped are converted, once. It may not exist yet.

    Raises:
        ValueError: for an unknown format, a missing or unsuitable file (with its name), or an invalid id (with its row).
        ModuleNotFoundError: for tables without pyarrow.
    """
    if not folder.is_dir():
        raise ValueError(
            f"Folder {folder} does not exist. Use a folder with the files of a graph (docs/large-graphs.md), or an import path."
        )
    forms: dict[str, Callable[[Path, Path], tuple[Data, Split | None]]] = {
        "graph.json": _read_native,
        "metadata.json": _read_chunked,
        "metadata.yaml": _read_graphbolt,
        "raw/data.npz": _read_ogb,
        "edge_index.npy": _read_native,
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
    raise ValueError(f"{folder} must have one of {', '.join(forms)}, which describe a graph. See docs/large-graphs.md.")


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(map(Path, glob.glob(str(folder / pattern))))
    if not found:
        raise ValueError(f"{folder} has no file {pattern}, which its description lists. Add it, or correct the description.")
    return found


class _Transposed(Table):
    """Edges in a ``.npy`` file ``[2, E]``, as rows."""

    def pieces(self) -> Iterator[tuple[Path, int, np.ndarray]]:
        array = map_file(self._files[0])
        for begin in range(0, array.shape[1], ROWS):
            yield self._files[0], begin, array[:, begin : begin + ROWS].T


def _edges(files: Sequence[Path], scratch: Path, num_nodes: int | None, **options: Any) -> torch.Tensor:
    """Returns edges ``[2, E]``: mapped if one ``.npy`` file has this layout with contiguous rows, else rewritten."""
    table = Table(files, **options)
    if len(files) == 1 and files[0].suffix == ".npy":
        array = map_file(files[0])
        if array.ndim != 2 or 2 not in array.shape:
            raise ValueError(f"{files[0]} must hold edges, [2, E] (got {list(array.shape)}).")
        if array.shape[0] == 2 and array.flags.c_contiguous and array.dtype in (np.int32, np.int64):
            return torch.from_numpy(array)
        table = _Transposed(files) if array.shape[0] == 2 else table
    return torch.from_numpy(write_edges(scratch / "edge_index.npy", table, num_nodes))


def _rows(files: Sequence[Path], scratch: Path, name: str, **options: Any) -> torch.Tensor:
    """Returns the rows of an attribute: mapped if they are in one ``.npy`` file, else rewritten."""
    of_one = len(files) == 1 and files[0].suffix == ".npy"
    return torch.from_numpy(map_file(files[0]) if of_one else write_rows(scratch / f"{name}.npy", Table(files, **options)))


# The project's format #########################################################


def _read_native(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    described: dict[str, Any] = {file.stem: file.name for file in sorted(folder.glob("*.npy"))}
    if (folder / "graph.json").is_file():
        try:
            described = json.loads((folder / "graph.json").read_text())
        except ValueError as error:
            raise ValueError(f"{folder / 'graph.json'} is not valid JSON: {error}.") from error
        if not isinstance(described, dict) or "edge_index" not in described:
            raise ValueError(f"{folder / 'graph.json'} must list the files of attributes, including edge_index.")
    num_nodes = described.pop("num_nodes", None)
    values = Data()
    for name, of in described.items():
        if name != "edge_index":
            files, options = _attribute_files(folder, name, of)
            values[name] = _rows(files, scratch, name, **options)
    if num_nodes is None and "x" in values:
        num_nodes = values.x.size(0)
    files, options = _attribute_files(folder, "edge_index", described["edge_index"])
    values.edge_index = _edges(files, scratch, num_nodes, **options)
    if num_nodes is not None:
        values.num_nodes = num_nodes
    return values, None


def _attribute_files(folder: Path, name: str, of: Any) -> tuple[list[Path], dict[str, Any]]:
    """Returns the files of an attribute, and the options to read them as a table."""
    options = {"files": of} if isinstance(of, str) else of
    allowed = {"files", "columns", "delimiter", "header"}
    if not isinstance(options, dict) or not options.keys() <= allowed or not isinstance(options.get("files"), str):
        raise ValueError(
            f"{folder / 'graph.json'}: {name} must be the name of a file, or an object of {', '.join(sorted(allowed))} (got "
            f"{quote(of)})."
        )
    return _files(folder, options["files"]), {key: value for key, value in options.items() if key != "files"}


# Other formats ################################################################


def _check_one(kind: str, names: Sequence[Any], file: Path) -> None:
    if len(names) > 1:
        raise ValueError(
            f"{file} must have one type of {kind}, got {len(names)}: {', '.join(map(str, names[:5]))}. Load a graph with types "
            "with a function that returns a HeteroData: GraphDataModule(function)."
        )


def _attribute_name(name: str) -> str:
    """Returns PyG's name for features and labels of DGL's datasets."""
    return {"feat": "x", "label": "y", "labels": "y"}.get(name, name)


def _read_chunked(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """Returns DGL's chunked graph: ``metadata.json`` with ``edges`` and ``node_data`` by type, each with a format and files."""
    file = folder / "metadata.json"
    meta = json.loads(file.read_text())
    node_types, edge_types = meta.get("node_type", ["node"]), list(meta["edges"])
    for kind, names in (("nodes", node_types), ("edges", edge_types)):
        _check_one(kind, names, file)
    [counts] = meta["num_nodes_per_chunk"]
    num_nodes, edges = sum(counts), meta["edges"][edge_types[0]]
    values = Data()
    table = Table([folder / each for each in edges["data"]], **_table_options(edges["format"]))
    values.edge_index = torch.from_numpy(write_edges(scratch / "edge_index.npy", table, num_nodes))
    of_nodes = meta.get("node_data", {}).get(node_types[0], {})
    of_edges = meta.get("edge_data", {}).get(edge_types[0], {})
    for given, prefix in ((of_nodes, ""), (of_edges, "edge_")):
        for name, of in given.items():
            called = _attribute_name(name) if not prefix else f"{prefix}{name.removeprefix('edge_')}"
            paths = [folder / each for each in of["data"]]
            values[called] = _rows(paths, scratch, called, **_table_options(of["format"]))
            if not prefix:
                tell_kinds(values, "node", [called])
    values.num_nodes = num_nodes
    return values, None


def _table_options(of: Mapping[str, Any]) -> dict[str, Any]:
    return {"delimiter": of.get("delimiter", " "), "header": False} if of.get("name") == "csv" else {}


def _read_graphbolt(folder: Path, scratch: Path) -> tuple[Data, Split | None]:
    """Returns GraphBolt's on-disk dataset: ``metadata.yaml`` with ``graph``, ``feature_data`` and ``tasks``."""
    import yaml

    file = folder / "metadata.yaml"
    meta = yaml.safe_load(file.read_text())
    nodes, edges = meta["graph"]["nodes"], meta["graph"]["edges"]
    for kind, names in (("nodes", nodes), ("edges", edges)):
        _check_one(kind, [each.get("type") for each in names], file)
    num_nodes, values = int(nodes[0]["num"]), Data()
    values.edge_index = _edges([folder / edges[0]["path"]], scratch, num_nodes, header=False)
    for of in meta.get("feature_data") or ():
        name = _attribute_name(of["name"]) if of["domain"] == "node" else f"edge_{of['name'].removeprefix('edge_')}"
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
        source: path of the folder.
        memory: bytes that sorting edges may use in addition to memory that grows with nodes; None: a third of the available
            memory.
    """

    short_ids = True

    def __init__(self, source: str, memory: int | None = None) -> None:
        super().__init__(source)
        self._folder, self._memory = source, memory or (available_bytes() or 3 << 30) // 3

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
        return [self._folder]

    def _conversion_folder(self, store: Path) -> Path:
        """Returns the folder of converted files, for sources that cannot be memory-mapped."""
        return store / f"{self.key()}.files"

    @contextmanager
    @override
    def cut(self, folder: Path, data: Graph, layout: LayoutSpec, assign: Assign) -> Iterator[tuple[Assigned, Any]]:
        """Partition the graph, as for graphs in memory; completed steps of an interrupted run are not repeated."""
        store, work = folder.parent, folder.parent / f"{folder.name}.work"
        edge_index, owners, ranks = data.edge_index.numpy(), work / "part.npy", work / "holders.npy"
        with writing(store), progress_bar("Sorting edges", 2 * data.num_edges) as advance:
            work.mkdir(parents=True, exist_ok=True)
            in_edges = InEdges.sorted_in(work, edge_index, data.num_nodes, self._memory, advance)
        if not owners.exists():
            began, holders = time.perf_counter(), None
            if layout.kind == "vertex_cut":
                with writing(store, data.num_edges), ranks.open("wb+") as file:
                    dtype = cutter_of(layout.kind).part_dtype(layout.parts)
                    holders = open_memmap(ranks, "w+", dtype, (data.num_edges,))
                    os.posix_fallocate(file.fileno(), 0, ranks.stat().st_size)  # a failing write would kill the process
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
            yield (np.load(owners), holders, report), partial(write_parts, in_edges, advance)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(self._conversion_folder(store), ignore_errors=True)
