"""Partitioned graph on disk: plain arrays that all ranks of a machine map into memory, and a manifest.

::

    <root>/<name>/manifest.json     format, name, parts, offsets, types, attributes, report and locality, files, its checksum
    <root>/<name>/node.<name>.npy   node attributes, rows in relabeled order: one range per rank, neighbors close together
    <root>/<name>/edge.<name>.npy   edge attributes, in the order of target rows
    <root>/<name>/node2.<name>.npy  in a heterogeneous graph, attributes of node type 2, and similarly edges; one range per rank
    <root>/<name>/part<p>.*.npy     local edge_index, halo
    <root>/<name>/holders.npy       in a vertex cut: the rank that computes each edge, in the order of edge attributes
    <root>/<name>/verified.json     files that have been read and verified

Entries are written under a temporary name, synchronized to disk and renamed. A folder with a manifest is therefore complete, also
after a power loss. No file is a pickle.

The manifest and file sizes are checked whenever an entry is opened. File contents and checksums are checked if a file differs
from its record in ``verified.json``: size, and the change time that only the operating system sets. An archive cannot preserve
this time, so an entry from elsewhere is always read before use.

Checksums detect damage, not manipulation: a user who can write an entry can recompute them, and store another graph. But nothing
is unpickled, no file outside the folder is read, and no id exceeds its array.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import platform
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.arguments import quote
from lightning_gnn.data.loading import graph_digests
from lightning_gnn.data.shards import Cut, Graph, JoinedGraph, Orders, Predicted, attributes_of, cut_of, mask_counts
from lightning_gnn.data.sources import kinds_of, left_out_of, num_classes
from lightning_gnn.devices import available_bytes
from lightning_gnn.partition.layout import LayoutSpec, types_of
from lightning_gnn.partition.shard import Locality, Relabelling, recent_reads

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    r"\{'descr': '(\|b1|\|[iu]1|<[iu][248]|<f[248]|<c8|<c16)', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,18}, )*(?:\d{1,18},?)?)\), \} *\n"
)


class Summed:
    """File wrapper that computes the checksum of written data, so that nothing is read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.checksum = file, 0, 0

    def write(self, chunk: bytes | memoryview) -> int:
        self.size += len(chunk)
        self.checksum = zlib.crc32(chunk, self.checksum)
        return self._file.write(chunk)


def checksum_of(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def plain_size(file: Path) -> int | None:
    """Returns the size of a regular file in bytes; None if it does not exist."""
    try:
        found = os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{file} is not a regular file")
    return found.st_size


def read_array(file: Path, by_rows: bool = False) -> np.ndarray:
    """Returns a memory-mapped ``.npy`` file (copy on write); raises ValueError for other files and wrong headers.

    With `by_rows`, for random access, the system reads only the accessed rows; by default it reads megabytes ahead.

    ``np.load`` would parse the header by ``ast``, which in Python 3.11 may fail if two threads use it at once.
    """
    with file.open("rb") as opened:
        start = opened.read(len(_MAGIC) + 2)
        text = opened.read(int.from_bytes(start[len(_MAGIC) :], "little")).decode("latin1")  # 64 KB at most
        begin = opened.tell()
    found = _HEADER.fullmatch(text)
    if not start.startswith(_MAGIC) or found is None:
        raise ValueError(f"{file} has no header of a .npy file of numbers")
    dtype, shape = np.dtype(found[1]), tuple(int(size) for size in found[3].split(",") if size.strip())
    size = begin + dtype.itemsize * math.prod(shape)
    # Numpy also multiplies the other sizes of an empty shape.
    if size != file.stat().st_size or math.prod(max(each, 1) for each in shape) >= 2**48:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, but by its header, {list(shape)} of {dtype}, {size}")
    array = np.memmap(file, dtype, "c", begin, shape, "F" if found[2] == "True" else "C")
    if by_rows and array.nbytes and hasattr(mmap, "MADV_RANDOM"):
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return array


def check_names(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError unless the files of a manifest match its graph and are in its folder."""
    parts, files = range(manifest["layout"]["parts"]), manifest["files"]
    expected = ["n_id", "e_id", *(["holders"] if manifest["layout"]["kind"] == "vertex_cut" else [])]
    expected += [f"part{part}.{what}" for part in parts for what in ("edge_index", "halo")]
    expected += [f"{kind}.{name}" for kind, names in manifest["attributes"].items() for name in names]
    wrong = [*({f"{name}.npy" for name in expected} ^ files.keys()), *(n for n in files if Path(n).name != n)]
    if wrong:
        raise ValueError(f"files has missing or unexpected names, such as {quote(sorted(wrong)[:2])}")


def check_arrays(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Read the arrays of a verified entry; raises ValueError for wrong numbers of rows and ids out of range."""
    types, parts = types_of(manifest), range(manifest["layout"]["parts"])
    own, counts = np.diff(manifest["offsets"]).tolist(), np.diff(manifest["edge_offsets"]).tolist()

    def arrays() -> Iterator[tuple[str, np.ndarray, int, int | None]]:
        """Yields arrays: name, values, required length, and upper bound of ids."""
        for name, kinds in (("n_id", [*types.nodes]), ("e_id", [*types.edges])):
            totals = [types.total(kind) for kind in kinds]  # type: ignore[attr-defined]
            for piece, total in zip(np.split(read(name), np.cumsum(totals)[:-1]), totals):
                yield name, piece, total, total
        for part in parts:
            halo, (source, target) = read(f"part{part}.halo"), read(f"part{part}.edge_index")
            yield f"part{part}.halo", halo, halo.size, sum(own)
            yield f"part{part}.edge_index", source, counts[part], own[part] + halo.size
            yield f"part{part}.edge_index", target, counts[part], own[part]
        if "holders.npy" in manifest["files"]:
            yield "holders", read("holders"), sum(counts), len(parts)
        for kind in (*types.nodes, *types.edges):
            key = types.key(kind)
            yield from ((f"{key}.{n}", read(f"{key}.{n}"), types.total(kind), None) for n in manifest["attributes"][key])

    def read(name: str) -> np.ndarray:
        return read_array(folder / f"{name}.npy")

    for name, array, length, end in arrays():
        if array.shape[:1] != (length,):
            raise ValueError(f"{folder / name}.npy must have {length} rows (its shape is {list(array.shape)})")
        if end is not None and array.size and not (array.min() >= 0 and array.max() < end):
            raise ValueError(f"{folder / name}.npy holds ids from {array.min()} to {array.max()}, not from 0 to {end - 1}")


FORMAT = 13

_PIECE = 1 << 25
"""Bytes of an attribute that are reordered at once."""

LARGEST_MANIFEST = 1 << 28
"""Maximum size in bytes; manifests of thousands of parts have some millions."""


# Verified entries of this process whose record could not be written.
_read_here: dict[Path, dict[str, list[int]]] = {}


class StoreError(RuntimeError):
    """Unusable partition directory: names the file and the reason."""


def default_root() -> Path:
    """Returns the local partition directory: ``$LIGHTNING_GNN_STORE`` unless it is a URL, else ``~/.cache/lightning_gnn``."""
    given = os.environ.get("LIGHTNING_GNN_STORE")
    if given and "://" not in given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        why = "The partition directory must be a given folder, since this user has no home folder"
        raise StoreError(f"{why}. Use GraphDataModule(partition_dir=...) or $LIGHTNING_GNN_STORE.")
    return Path(cache) / "lightning_gnn"


class LocalStore:
    """Partition directory in a local folder.

    Args:
        location: path of the folder.

    Attributes:
        folder: local folder in which entries are read and written.
    """

    def __init__(self, location: str) -> None:
        self.location, self.folder = location, Path(location)

    def fetch(self, name: str) -> None:
        """Make an entry or note available in `folder`, if another location has it."""

    def publish(self, name: str) -> None:
        """Copy a new entry or note of `folder` to the other location."""


@contextmanager
def writing(root: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Context manager that converts an ``OSError`` to a `StoreError` with a fix; `num_bytes` are to be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(root, num_bytes) from error
        raise StoreError(
            f"The partition directory {root} cannot be written ({error}). Use a folder with write permission: "
            "GraphDataModule(partition_dir=...) or $LIGHTNING_GNN_STORE."
        ) from error


def check_space(root: Path, num_bytes: int) -> None:
    """Raises `StoreError` if the disk of `root`, an existing folder, has less than `num_bytes` free."""
    with writing(root):
        free = shutil.disk_usage(root).free
    if free < num_bytes:
        raise _disk_full(root, num_bytes)


def stored_bytes(data: Graph) -> int:
    """Returns a lower bound of a partitioned graph's bytes: its tensors and the ids of nodes and edges, without halos."""
    tensors = sum(value.nbytes for store in data.stores for value in store.values() if isinstance(value, Tensor))
    return tensors + 8 * (data.num_nodes + data.num_edges)


def _disk_full(root: Path, num_bytes: int | None) -> StoreError:
    needed = "" if num_bytes is None else f"The partitioned graph needs at least {num_bytes:,} bytes, "
    with suppress(OSError):
        needed += f"{shutil.disk_usage(root).free:,} bytes are free. "
    return StoreError(
        f"The disk of the partition directory {root} is full. {needed}Free disk space, remove old partitions from it, or "
        "use a folder on another disk: GraphDataModule(partition_dir=...) or $LIGHTNING_GNN_STORE."
    )


def write_store(
    folder: Path,
    data: Graph,
    part: np.ndarray,
    layout: LayoutSpec,
    report: Mapping[str, Any],
    holders: np.ndarray | None = None,
    predicted: Predicted | None = None,
    digests: Mapping[str, str] | None = None,
    write_edges: Callable[[np.ndarray, int, ArrayWriter], EdgeFiles] | None = None,
    measure_locality: bool = True,
) -> None:
    """Write the partition `part` of `data` to `folder`; the folder appears complete or not at all.

    Files of interrupted writers of the same folder are removed, so only one process may write at a time.

    Args:
        folder: target folder, which must not exist; its parent is created.
        data: result of :func:`~lightning_gnn.data.sources.prepare_graph` or
            :func:`~lightning_gnn.extensions.node_types.graph.prepare_hetero`.
        part: owner of each node, ``[N]``, values 0 to ``layout.parts`` - 1; in a heterogeneous graph, type after type.
        layout: layout of the shards.
        report: partition quality, for logs.
        holders: in a vertex cut, the rank that computes each edge, ``[E]``.
        predicted: masks and labels of `data`; by default derived from it.
        digests: available result of :func:`~lightning_gnn.data.loading.graph_digests`.
        write_edges: function that writes edges, halos and ids of all parts, given `part`, P and a writer; by default from memory.
        measure_locality: whether the manifest reports the locality of rows, which takes a quarter of the time.

    Raises:
        StoreError: the disk is full, or the folder cannot be written.
    """
    with writing(folder.parent, stored_bytes(data)), appearing_folder(folder) as scratch:
        out, predicted = ArrayWriter(scratch), predicted or Predicted.of(data)
        written = (write_edges or partial(_write_edges, data, predicted, measure_locality))(part, layout.parts, out)
        attributes: dict[str, list[str]] = {}
        for kind, order in written.orders.by_type.items():
            key = written.orders.types.key(kind)
            rows_of_kind = attributes_of(data, kind)
            attributes[key] = list(rows_of_kind)
            for name, value in rows_of_kind.items():
                values = value.detach().cpu().numpy()
                out.save_pieces(f"{key}.{name}", values.shape, values.dtype, _in_order(values, order))
        scalars = {}
        if isinstance(data, Data):
            scalars = {name: value for name, value in data.to_dict().items() if not isinstance(value, Tensor)}
            attributes["graph"] = [name for name, kind in kinds_of(data).items() if kind == "graph"]
            for name in attributes["graph"]:
                out.save(f"graph.{name}", data[name].detach().cpu().numpy())
        digest = hashlib.blake2b(np.ascontiguousarray(part, dtype=np.int32).data, digest_size=16)
        if holders is not None:
            of_edges: np.ndarray = holders

            def in_order() -> Iterator[np.ndarray]:
                for piece in chain.from_iterable(_in_order(of_edges, order) for order in written.edge_orders):
                    ranks = piece.astype(np.int16)
                    digest.update(ranks.data)
                    yield ranks

            out.save_pieces("holders", holders.shape, np.dtype(np.int16), in_order())

        edge_orders = written.edge_orders
        manifest = {
            "format": FORMAT,
            "name": folder.name,
            "layout": layout.as_dict(),
            "offsets": written.offsets.tolist(),
            "edge_offsets": np.cumsum([0, *map(len, edge_orders)]).tolist(),
            "types": written.orders.types.as_dict(),
            "mask_counts": mask_counts(predicted, written.orders),
            "num_classes": num_classes(predicted.nodes.get("y")),
            "digest": digest.hexdigest(),
            "graph": dict(digests or graph_digests(data)),
            "attributes": attributes,
            "scalars": scalars,
            "left_out": left_out_of(data) if isinstance(data, Data) else {},
            "report": report,
            "locality": None if written.locality is None else asdict(written.locality),
            "files": out.files,
        }
        _complete(scratch, {**manifest, "checksum": _manifest_checksum(manifest)})


class ArrayWriter:
    """Writer of arrays to a folder, with the size and checksum of each file.

    Attributes:
        files: size and checksum by file name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.files = folder, dict[str, list[int]]()

    def save(self, name: str, array: np.ndarray) -> None:
        self.save_pieces(name, array.shape, array.dtype, [array])

    def save_pieces(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Iterable[np.ndarray]) -> Path:
        """Write an array in pieces; returns its file."""
        with _open_summed(self._folder / f"{name}.npy") as file:
            write_header(file, shape, dtype)
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        self.files[f"{name}.npy"] = [file.size, file.checksum]
        return self._folder / f"{name}.npy"


def write_copy(folder: Path, text: bytes, source: str, bytes_of: Callable[[str, int], Iterable[bytes | memoryview]]) -> None:
    """Write an entry of another machine to `folder`, see :func:`write_store`, file by file as its bytes arrive.

    Args:
        folder: target folder; its parent exists.
        text: manifest.
        source: name of the machine.
        bytes_of: function that returns the bytes of a file in pieces, given its name and size; called in the order of the
            manifest.

    Raises:
        StoreError: the disk is full, or the folder cannot be written; the manifest or a file differs from the original.
    """
    advice = (
        f"arrived from {source} with different bytes than were written there, and nothing was stored. Run again. If it recurs, "
        f"check the network between the machines, and remove {folder.name} from the partition directory of {source}"
    )
    try:
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or manifest.get("checksum") != _manifest_checksum(manifest):
            raise ValueError("its checksum differs")
    except (ValueError, RecursionError) as error:
        raise StoreError(f"manifest.json of {folder.name} {advice} ({error}).") from error
    _check_form(folder, manifest, None, f"Use one version of lightning_gnn on {source} and here.")
    num_bytes = sum(size for size, _ in manifest["files"].values())
    check_space(folder.parent, num_bytes)
    with writing(folder.parent, num_bytes), appearing_folder(folder) as scratch:
        for name, (size, checksum) in manifest["files"].items():
            with _open_summed(scratch / name) as file:
                for piece in bytes_of(name, size):
                    file.write(piece)
            if file.checksum != checksum:
                raise StoreError(f"{name} of {folder.name} {advice} (its checksum differs).")
        _complete(scratch, manifest)


def write_header(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Write the header of a ``.npy`` file."""
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


@contextmanager
def _open_summed(path: Path) -> Iterator[Summed]:
    """Context manager of a new file to write to; it is synchronized to disk at the end."""
    with path.open("wb") as file:
        yield Summed(file)
    sync(path)


def _complete(scratch: Path, manifest: Mapping[str, Any]) -> None:
    """Add the manifest to files that were just written, and mark them as verified."""
    (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1))
    sync(scratch / "manifest.json")
    _remember(scratch, _file_records(scratch, manifest))


@dataclass(frozen=True)
class EdgeFiles:
    """Description of written edges.

    Attributes:
        offsets: first node of each part and the end, ``[P + 1]``.
        orders: order of nodes and edges.
        edge_orders: original edge ids of each part.
        locality: locality of its rows; None if it was not measured.
    """

    offsets: np.ndarray
    orders: Orders
    edge_orders: Sequence[np.ndarray]
    locality: Locality | None


def _write_edges(
    data: Graph, predicted: Predicted, measure_locality: bool, part: np.ndarray, num_parts: int, out: ArrayWriter
) -> EdgeFiles:
    """Write edges, halos and ids of all parts of a graph in memory; rows of a part are renumbered for locality."""
    joined = JoinedGraph.of(data)
    edge_index = joined.edge_index
    began = time.perf_counter()
    relabelling = joined.relabelling(part, num_parts)
    seconds = time.perf_counter() - began
    locality = None
    if measure_locality:
        before = recent_reads(edge_index, Relabelling.from_assignment(part, num_parts))
        locality = Locality(before, recent_reads(edge_index, relabelling), seconds)
    edge_orders = []
    for number, piece in enumerate(joined.parts(relabelling)):
        out.save(f"part{number}.edge_index", piece.edge_index)
        out.save(f"part{number}.halo", piece.halo)
        edge_orders.append(piece.edge_ids)
    orders = joined.orders(relabelling, edge_orders, part, predicted)
    out.save("n_id", orders.n_id())
    out.save("e_id", orders.e_id())
    return EdgeFiles(relabelling.offsets, orders, edge_orders, locality)


def _in_order(values: np.ndarray, order: np.ndarray) -> Iterator[np.ndarray]:
    """Yields rows in an order, in pieces of some MB."""
    rows = max(1, _PIECE * len(values) // max(1, values.nbytes))
    for begin in range(0, len(order), rows):
        yield values[order[begin : begin + rows]]


@contextmanager
def appearing_folder(folder: Path) -> Iterator[Path]:
    """Context manager of a folder that is renamed to `folder` at the end, complete and on disk, or removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob(f".{folder.name}.*"):
        if stale.is_dir():
            shutil.rmtree(stale)
        else:  # from `appearing`
            stale.unlink()
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield scratch
        sync(scratch)
        scratch.replace(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({**manifest, "checksum": None}, sort_keys=True).encode())


def read_manifest(folder: Path, layout: LayoutSpec | None = None) -> dict[str, Any]:
    """Returns the manifest of a complete, unchanged entry; with `layout` None, of any layout.

    Raises:
        StoreError: the manifest is missing, unreadable or changed. The format, layout or number of parts differs, or the folder
            was renamed. A file is missing, of another size, changed, or has ids out of range.
    """
    advice = f"Remove the folder {folder} and run again: the graph is then partitioned again."
    try:
        manifest = _parse(folder / "manifest.json")
        checksum = _manifest_checksum(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"The partitioned graph in {folder} has no readable manifest ({error}). {advice}") from error
    if manifest.get("format") == FORMAT and manifest.get("checksum") != checksum:
        raise StoreError(f"{folder / 'manifest.json'} has been altered: its checksum differs. {advice}")
    _check_form(folder, manifest, layout, advice)
    try:
        _check_files(folder, manifest)
    except ValueError as error:
        raise StoreError(f"{error}. {advice}") from error
    except OSError as error:
        raise StoreError(f"{folder} cannot be read ({error}). {advice}") from error
    return manifest


def _check_form(folder: Path, manifest: Mapping[str, Any], layout: LayoutSpec | None, advice: str) -> None:
    """Raises `StoreError` unless a manifest belongs to `folder` and has the format of this version."""
    if manifest.get("format") != FORMAT:
        raise StoreError(f"{folder} has format {manifest.get('format')}, this version reads format {FORMAT}. {advice}")
    if manifest.get("name") != folder.name:
        raise StoreError(f"{folder} was written as {manifest.get('name')}: it may hold another graph or partition. {advice}")
    try:
        found = LayoutSpec.from_dict(manifest["layout"])
        if layout is not None and found != layout.storage_layout:
            raise ValueError(
                f"it holds {found.kind} in {found.parts} parts (groups: {found.groups}), but {layout.kind} in "
                f"{layout.parts} (groups: {layout.groups}) is needed"
            )
        check_names(manifest)
    except ValueError as error:
        raise StoreError(f"{folder / 'manifest.json'}: {error}. {advice}") from error


def _parse(file: Path) -> dict[str, Any]:
    size = plain_size(file)
    if size is None:
        raise ValueError("No such file")
    if size > LARGEST_MANIFEST:
        raise ValueError(f"it has {size:,} bytes")
    found = json.loads(file.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found


def _check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises ValueError unless the files are unchanged; reads all files if one has changed since the last verification."""
    files = manifest["files"]
    for name, (size, _) in files.items():
        found = plain_size(folder / name)
        if found is None:
            raise ValueError(f"{folder / name} is missing")
        if found != size:
            raise ValueError(f"{folder / name} has {found} bytes instead of {size}")
    records = _file_records(folder, manifest)
    try:
        known = _parse(folder / "verified.json")
    except (OSError, ValueError, RecursionError):
        known = {}
    if records in (known, _read_here.get(folder)):
        return
    for name, (_, checksum) in files.items():
        if known.get(name) != records[name] and checksum_of(folder / name) != checksum:
            raise ValueError(f"{folder / name} has been altered or damaged: its checksum differs")
    check_arrays(folder, manifest)
    try:
        _remember(folder, records)
    except OSError:  # no write permission, or a full disk: the next process reads again
        _read_here[folder] = records


def _file_records(folder: Path, manifest: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns records that identify verified files; only the system sets the change time of a file."""
    found = {}
    for name, (_, checksum) in {**manifest["files"], "manifest.json": (0, manifest["checksum"])}.items():
        stat = (folder / name).stat()
        found[name] = [stat.st_ctime_ns, stat.st_size, checksum]
    return found


def _remember(folder: Path, records: Mapping[str, list[int]]) -> None:
    write_atomically(folder / "verified.json", json.dumps(records))


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Context manager with a temporary path. At the end, the file is flushed and renamed to `path`, or removed on errors."""
    scratch = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    try:
        yield scratch
        sync(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file atomically: readers get its old or new content, also after a power loss."""
    with appearing(path) as scratch:
        scratch.write_text(text)


def read_cut(folder: Path, layout: LayoutSpec | None = None, by_rows: bool = False) -> Cut:
    """Returns the partitioned graph in `folder`, memory-mapped (copy on write: changes stay in this process).

    With `by_rows`, for random access, only the accessed rows of arrays are read from disk, if the arrays are too large for
    memory.
    """
    manifest = read_manifest(folder, layout)
    size, free = sum(size for size, _ in manifest["files"].values()), available_bytes()
    by_rows = by_rows and free is not None and size > free / 2

    def load(name: str) -> np.ndarray:
        try:
            return read_array(folder / f"{name}.npy", by_rows)
        except (OSError, ValueError) as error:
            raise StoreError(f"{folder} has changed while it was read ({error}).") from error

    def tensor(name: str) -> Tensor:
        array = load(name)
        return torch.from_numpy(array if array.ndim else np.array(array))

    return cut_of(
        types_of(manifest),
        offsets=np.asarray(manifest["offsets"]),
        edge_offsets=np.asarray(manifest["edge_offsets"]),
        edge_index_of=lambda rank: load(f"part{rank}.edge_index"),
        halos=tuple(load(f"part{part}.halo") for part in range(manifest["layout"]["parts"])),
        n_id=tensor("n_id"),
        e_id=tensor("e_id"),
        attributes={kind: {name: tensor(f"{kind}.{name}") for name in names} for kind, names in manifest["attributes"].items()},
        scalars=manifest["scalars"],
        left_out=manifest["left_out"],
        mask_counts={name: tuple(counts) for name, counts in manifest["mask_counts"].items()},
        num_classes=manifest["num_classes"],
        digest=manifest["digest"],
        report=manifest["report"],
        holders=tensor("holders") if "holders.npy" in manifest["files"] else None,
    )
