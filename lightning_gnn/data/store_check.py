"""Whether an entry of the store is one that :func:`~lightning_gnn.data.store.write_store` can have written.

Checksums find damage, not malice: whoever alters a file can work its checksum out again. So before an entry is used its manifest,
the headers of its arrays and what is in them are looked at, too. Nothing is unpickled, nothing is allocated because a header asks
for it, nothing outside the folder is read, and nothing serves as an index before it is known to be in range.

N nodes, E edges, P parts, H halo rows.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.arguments import shown
from lightning_gnn.data.attributes import is_name
from lightning_gnn.data.shards import mask_counts
from lightning_gnn.data.sources import EDGE_MASKS, MASKS, edge_values, features, labels, num_classes
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.shard import Ids, id_dtype
from lightning_gnn.partition.types import Types

_KEYS = {"kind", "parts", "groups", "method", "host_weight", "takes_types"}
_MOST = 2**48
"""No list of nodes or edges is longer: products of sizes then fit into 64 bits."""

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    r"\{'descr': '([<>|][biufc]\d{1,2})', 'fortran_order': (True|False), 'shape': \(((?:\d{1,18}, )*(?:\d{1,18},?)?)\), \} *\n"
)


class Summed:
    """A file that works out the checksum of what is written to it, so that nothing is read again."""

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
    """Returns the size of a file in bytes; None if there is none."""
    try:
        found = os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{file} is no plain file")
    return found.st_size


def array_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any], Literal["C", "F"], int]:
    """Returns shape, dtype, order and the offset in bytes of the values that the header of a ``.npy`` file gives."""
    with file.open("rb") as opened:
        start = opened.read(len(_MAGIC) + 2)
        length = int.from_bytes(start[len(_MAGIC) :], "little")
        text = opened.read(length).decode("latin1")  # 64 KB at most
        begin = opened.tell()
    found = _HEADER.fullmatch(text)
    if not start.startswith(_MAGIC) or found is None or len(text) < length:
        raise ValueError(f"{file} has no header of a .npy file of numbers")
    try:
        dtype = np.dtype(found[1])
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: there are no tensors of dtype {found[1]!r}") from error
    shape = tuple(int(size) for size in found[3].split(",") if size.strip())
    if math.prod(max(size, 1) for size in shape) >= _MOST:  # numpy multiplies sizes beside a 0, too
        raise ValueError(f"{file}: by its header it is {list(shape)}, which is larger than any array")
    num_bytes = dtype.itemsize * math.prod(shape)
    if begin + num_bytes != file.stat().st_size:
        raise ValueError(
            f"{file}: by its header, {list(shape)} of {dtype}, it has {begin + num_bytes} bytes, not {file.stat().st_size}"
        )
    return shape, dtype, "F" if found[2] == "True" else "C", begin


def read_array(file: Path, by_rows: bool = False) -> np.ndarray:
    """Returns a ``.npy`` file, memory-mapped (copy on write); raises as :func:`array_header` does.

    If it is read `by_rows`, here and there, the system reads no more than these: by default it reads megabytes ahead.

    ``np.load`` would parse the header once more, by ``ast``, which in Python 3.11 may fail where two threads use it at once.
    """
    shape, dtype, order, begin = array_header(file)
    array = np.memmap(file, dtype, "c", begin, shape, order)
    if by_rows and array.nbytes and hasattr(mmap, "MADV_RANDOM"):
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return array


def layout_of(manifest: Mapping[str, Any]) -> LayoutSpec:
    """Returns the layout that a manifest names, or raises a ValueError that names the field that is wrong."""
    values = _get(manifest, "layout", dict)
    _require(values.keys() == _KEYS, f"layout must have {', '.join(sorted(_KEYS))} (got {shown(sorted(values))})")
    _get(values, "kind", str), _get(values, "method", str)
    _require(1 <= _get(values, "parts", int) <= 2**15, f"parts must be 1 to {2**15} (got {shown(values['parts'])})")
    groups = list(_flat(values["groups"])) if values["groups"] is not None else []
    _require(sorted(groups) in ([], list(range(values["parts"]))), "groups must name each part once")
    _require(isinstance(values["host_weight"], (int, float)), f"host_weight is {shown(values['host_weight'])}")
    return LayoutSpec.from_dict(values)


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Checks what a manifest says by itself; a ValueError names the field that is wrong."""
    layout = layout_of(manifest)
    _require(
        layout.kind in ("edge_cut", "vertex_cut"), f"kind must be edge_cut or vertex_cut (got {shown(layout.kind)})"
    )
    for name in ("offsets", "edge_offsets"):
        found = _counts(manifest, name, layout.parts + 1)
        _require(found[0] == 0 and found == sorted(found), f"{name} must start at 0 and ascend")
    types = types_of(manifest)
    attributes = _get(manifest, "attributes", dict)
    keys = [types.key(kind) for kind in (*types.nodes, *types.edges)] + ([] if types.is_hetero else ["graph"])
    _require(sorted(attributes) == sorted(keys), f"attributes must be of {keys} (got {shown(sorted(attributes))})")
    for kind in attributes:
        names = _get(attributes, kind, list)
        ok = all(is_name(name) and name != "edge_index" for name in names) and len(set(names)) == len(names)
        _require(ok, f"the {kind} attributes have names that no file can have, or twice (got {shown(names)})")
    needed = {*MASKS} if types.is_hetero else {"x", *MASKS}
    missing = needed - set(attributes[types.key(types.input_type)])
    _require(not missing, f"attributes of nodes lack {sorted(missing)}")
    for name, value in _get(manifest, "scalars", dict).items():
        ok = name != "edge_index" and not any(name in names for names in attributes.values())
        _require(ok and isinstance(value, (int, float, str)), f"scalars has {shown(name)} = {shown(value)}")
    for name in _get(manifest, "mask_counts", dict):
        _counts(manifest["mask_counts"], name, layout.parts)
    _require(
        manifest.get("locality", "") is None or _get(manifest, "locality", dict) is not None, "locality is missing"
    )
    for name, kind in (("num_classes", int), ("digest", str), ("report", dict)):
        _get(manifest, name, kind)
    for what in ("graph", "left_out"):
        for name, text in _get(manifest, what, dict).items():
            _require(isinstance(text, str), f"{what} has {shown(name)} = {shown(text)}")
    files = _get(manifest, "files", dict)
    expected = _files(manifest, layout)
    _require(files.keys() == expected, f"files are not those of this graph: {sorted(files.keys() ^ expected)[:3]}")
    for name in files:
        _counts(files, name, 2)


def types_of(manifest: Mapping[str, Any]) -> Types:
    """Returns the types of a manifest whose layout and offsets have been looked at; a ValueError names what is wrong."""
    counts, edge_counts = np.diff(manifest["offsets"]), np.diff(manifest["edge_offsets"])
    if manifest.get("types") is None:
        return Types.none(counts, edge_counts)
    values = _get(manifest, "types", dict)
    for what, parts in (("nodes", counts), ("edges", edge_counts)):
        each = _get(values, what, list)
        ok = bool(each) and all(isinstance(pair, list) and len(pair) == 2 for pair in each)
        _require(ok, f"types: {what} must be pairs of a name and counts")
        total = sum(np.array(_counts({what: of}, what, len(parts)), np.int64) for _, of in each)
        _require(np.array_equal(total, parts), f"types: {what} do not add up to the parts")
    names = [name for name, _ in values["nodes"]]
    _require(all(isinstance(name, str) for name in names) and len({*names}) == len(names), "types: names of nodes")
    kinds = [kind for kind, _ in values["edges"]]
    ok = all(
        isinstance(kind, list) and len(kind) == 3 and all(isinstance(word, str) for word in kind) for kind in kinds
    )
    _require(ok and len({*map(tuple, kinds)}) == len(kinds), "types: edges need three names each, and differ")
    _require(all({kind[0], kind[2]} <= {*names} for kind in kinds), "types: edges lead to unknown types of nodes")
    _require(_get(values, "input_type", str) in names, f"types: input_type is none of {shown(names)}")
    return Types.from_dict(values)


def check_arrays(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Reads all files of an entry, whose manifest is in order, and checks what is in them; a ValueError names the file."""
    types, layout = types_of(manifest), layout_of(manifest)
    offsets, edge_offsets = np.asarray(manifest["offsets"]), np.asarray(manifest["edge_offsets"])
    num_nodes, num_edges = int(offsets[-1]), int(edge_offsets[-1])

    def array(name: str, dtype: str | None, *shape: int | None) -> np.ndarray:
        """Returns a file's array, whose dtype and whose sizes are as given, where they are."""
        file = folder / f"{name}.npy"
        found = read_array(file)
        fits = len(found.shape) >= len(shape) and all(a in (b, None) for a, b in zip(shape, found.shape))
        if dtype is not None:
            fits = fits and found.dtype == dtype and found.ndim == len(shape)
        wanted = f"{list(shape)}{'' if dtype is None else f' of {dtype}'}"
        _require(fits, f"{file} must be {wanted} (got {list(found.shape)} of {found.dtype})")
        return found

    n_id, e_id = array("n_id", "int64", num_nodes), array("e_id", str(id_dtype(num_edges)), num_edges)
    for name, ids, kinds in (("n_id", n_id, types.nodes), ("e_id", e_id, types.edges)):
        for kind in kinds:
            fits = _is_permutation(ids[types.place(kind)])
            _require(fits, f"{folder / name}.npy must number each {shown(kind)} once, from 0 on")
    for part, (low, high) in enumerate(pairwise(offsets.tolist())):
        halo = array(f"part{part}.halo", "int64", None)
        inside = len(halo) == 0 or (halo[0] >= 0 and halo[-1] < num_nodes and (np.diff(halo) > 0).all())
        remote = inside and np.searchsorted(halo, low) == np.searchsorted(halo, high)
        _require(remote, f"{folder}/part{part}.halo.npy must hold ascending rows of other parts")
        count = int(edge_offsets[part + 1] - edge_offsets[part])
        source, target = array(f"part{part}.edge_index", str(id_dtype(high - low + len(halo))), 2, count)
        ok = _within(source, high - low + len(halo)) and _within(target, high - low)
        _require(ok, f"{folder}/part{part}.edge_index.npy holds rows that this part does not have")
        if types.is_hetero:
            ids = np.concatenate([np.arange(low, high), halo])
            kinds_fit = _ends_fit(types, part, ids[source], ids[target])
            _require(kinds_fit, f"{folder}/part{part}.edge_index.npy: an edge joins nodes of other types than its own")
    if layout.kind == "vertex_cut":
        holders = array("holders", "int16", num_edges)
        _require(_within(holders, layout.parts), f"{folder}/holders.npy names parts that there are not")
    of: dict[NodeType | EdgeType, dict[str, Any]] = {}
    for kind in (*types.nodes, *types.edges):
        key = types.key(kind)
        of[kind] = {name: array(f"{key}.{name}", None, types.total(kind)) for name in manifest["attributes"][key]}
        _check_values(folder, key, kind, of[kind], types)
    for name in manifest["attributes"].get("graph", ()):
        array(f"graph.{name}", None)
    _check_counts(folder, manifest, types, of)


def _check_values(folder: Path, key: str, kind: NodeType | EdgeType, values: Mapping[str, Any], types: Types) -> None:
    """Checks the attributes of the nodes, or edges, of a type as those of a graph that is loaded."""
    size = types.total(kind)
    masks = EDGE_MASKS if not isinstance(kind, str) else MASKS if kind == types.input_type else ()
    for name in masks:
        if name in values:
            ok = values[name].dtype == np.bool_ and values[name].ndim == 1
            _require(ok, f"{folder}/{key}.{name}.npy must be [{size}] of bool")
    try:
        if isinstance(kind, str) and "x" in values:
            features(torch.from_numpy(values["x"]))
        if isinstance(kind, str) and "y" in values:
            y = torch.from_numpy(values["y"])
            kept = labels(y, size)
            _require(kept.dtype == y.dtype and kept.shape == y.shape, f"y is {y.dtype} {list(y.shape)}")
        for name in ("edge_weight", "edge_attr"):
            if not isinstance(kind, str) and name in values:
                edge_values(name, torch.from_numpy(values[name]), size, torch.float32)
    except ValueError as error:
        raise ValueError(f"{folder}/{key}.*.npy: {error}") from error


def _check_counts(
    folder: Path, manifest: Mapping[str, Any], types: Types, of: Mapping[NodeType | EdgeType, Mapping[str, Any]]
) -> None:
    """Checks what a manifest says of labels and masks, by which losses are weighted."""
    found: Any = HeteroData() if types.is_hetero else Data()
    for kind, values in of.items():
        into = found[kind] if types.is_hetero else found
        for name in ("y", *MASKS) if isinstance(kind, str) else EDGE_MASKS:
            if name in values:
                into[name] = torch.from_numpy(values[name])
    orders = {kind: np.arange(types.total(kind)) for kind in of}
    counts = mask_counts(found, types, orders)
    nodes = found[types.input_type] if types.is_hetero else found
    _require(counts == manifest["mask_counts"], f"{folder}/manifest.json: mask_counts are not those of the masks")
    _require(
        num_classes(nodes.get("y")) == manifest["num_classes"], f"{folder}/manifest.json: num_classes is not that of y"
    )


def _files(manifest: Mapping[str, Any], layout: LayoutSpec) -> set[str]:
    names = ["n_id", "e_id", *(["holders"] if layout.kind == "vertex_cut" else [])]
    names += [f"part{part}.{what}" for part in range(layout.parts) for what in ("edge_index", "halo")]
    names += [f"{kind}.{name}" for kind, each in manifest["attributes"].items() for name in each]
    return {f"{name}.npy" for name in names}


def _ends_fit(types: Types, part: int, source: Ids, target: Ids) -> bool:
    """Returns whether the edges of a part, type after type, join nodes of the types that theirs name; ids are relabelled."""
    per_part = np.stack(list(types.nodes.values()), 1)  # [P, types]
    numbers = np.tile(np.arange(len(types.nodes)), len(per_part))
    kind_of_row, order = np.repeat(numbers, per_part.ravel()), list(types.nodes)
    counts = [of[part] for of in types.edges.values()]
    wanted = (np.repeat([order.index(kind[end]) for kind in types.edges], counts) for end in (0, 2))
    return all((kind_of_row[ids] == kinds).all() for ids, kinds in zip((source, target), wanted))


def _is_permutation(ids: np.ndarray) -> bool:
    seen = np.zeros(len(ids), np.bool_)
    if _within(ids, len(ids)):
        seen[ids] = True
    return bool(seen.all())


def _within(ids: np.ndarray, size: int) -> bool:
    return len(ids) == 0 or bool(ids.min() >= 0 and ids.max() < size)


def _flat(groups: Any) -> Iterator[int]:
    if not isinstance(groups, list):
        _require(type(groups) is int, f"groups must be nested lists of parts (got {shown(groups)})")
        yield groups
        return
    for each in groups:
        yield from _flat(each)


def _counts(values: Mapping[str, Any], name: str, length: int) -> list[int]:
    found = _get(values, name, list)
    ok = len(found) == length and all(type(each) is int and 0 <= each < _MOST for each in found)
    _require(ok, f"{name} must be {length} numbers of at least 0 (got {shown(found)})")
    return found


def _get(values: Mapping[str, Any], name: str, kind: type) -> Any:
    found = values.get(name)
    _require(type(found) is kind, f"{name} must be {kind.__name__} (got {shown(found)})")
    return found


def _require(ok: bool | np.bool_, problem: str) -> None:
    if not ok:
        raise ValueError(problem)
