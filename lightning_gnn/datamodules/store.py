"""A partitioned graph on disk: plain arrays that all ranks of a machine map into memory, and a manifest.

::

    <root>/<name>/manifest.json     format, name, parts, offsets, attributes, report and locality, files, its checksum
    <root>/<name>/node.<name>.npy   node attributes, rows in relabelled order: each part one range, neighbours near
    <root>/<name>/edge.<name>.npy   edge attributes, edges in the order of their targets' rows
    <root>/<name>/part<p>.*.npy     local edge_index, halo
    <root>/<name>/verified.json     which files have been read and had the manifest's checksums

Written under a temporary name and renamed: a folder with a manifest is complete. No pickle anywhere.

The manifest and the sizes of files are looked at whenever an entry is opened. The files' checksums are worked out while they
are written, and again when a file is not the one that ``verified.json`` knows, by its time of change and size.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.datamodules.sources import MASKS, num_classes, num_labelled
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.locality import Locality, local_relabelling, recent_reads
from lightning_gnn.partition.shard import HaloPlan, Relabelling, edge_cut_parts, halo_plan

FORMAT = 4


class StoreError(RuntimeError):
    """The store on disk cannot be used: says which file and why."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds.

    Attributes:
        batch: owned rows; ``edge_index`` in local ids, halo rows behind the owned ones; ``n_id`` and ``e_id``, the
            original ids of its nodes and edges; ``num_owned``; boolean masks over owned rows.
        plan: the rows to exchange.
        halos: relabelled ids of the halo rows of each rank, ascending, int64 ``[H]`` each, memory-mapped: what a planner needs.
        n_id, e_id: original ids of all ranks' nodes and edges in rank order, int64 ``[N]`` and ``[E]``, memory-mapped.
        counts, edge_counts: owned rows and edges of each rank.
        mask_counts: by mask, the labelled rows of each rank in it: the weights of a mean loss.
        num_classes: of the whole graph's labels.
        digest: of the node assignment; equal on all ranks that hold parts of the same cut.
        report: partition quality, for logs.
    """

    batch: Data
    plan: HaloPlan
    halos: tuple[np.ndarray, ...]
    n_id: Tensor
    e_id: Tensor
    counts: tuple[int, ...]
    edge_counts: tuple[int, ...]
    mask_counts: Mapping[str, tuple[int, ...]]
    num_classes: int
    digest: str
    report: Mapping[str, Any]


def default_root() -> Path:
    """Returns where partitioned graphs are kept: ``$LIGHTNING_GNN_STORE``, else ``~/.cache/lightning_gnn``."""
    given = os.environ.get("LIGHTNING_GNN_STORE")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "lightning_gnn"


@contextmanager
def writing(root: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Says what to do when files of the store cannot be written.

    Args:
        root: the store.
        num_bytes: what is being written, for the message of a full disk.

    Raises:
        StoreError: in place of an ``OSError`` of the body.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(root, num_bytes) from error
        raise StoreError(
            f"The store {root} cannot be written ({error}). Name a folder that you may write to: "
            "GraphDataModule(store=...) or $LIGHTNING_GNN_STORE."
        ) from error


def check_space(root: Path, data: Data) -> None:
    """Raises a `StoreError` where the disk of `root`, an existing folder, has no room for the partitioned graph `data`."""
    with writing(root):
        free = shutil.disk_usage(root).free
    if free < stored_bytes(data):
        raise _disk_full(root, stored_bytes(data))


def stored_bytes(data: Data) -> int:
    """Returns how many bytes a partitioned graph takes at least: its tensors and the ids of nodes and edges, no halos."""
    tensors = sum(value.nbytes for value in data.to_dict().values() if isinstance(value, Tensor))
    return tensors + 8 * (data.x.size(0) + data.edge_index.size(1))


def _disk_full(root: Path, num_bytes: int | None) -> StoreError:
    needed = "" if num_bytes is None else f"The partitioned graph needs at least {num_bytes:,} bytes, "
    with suppress(OSError):
        needed += f"{shutil.disk_usage(root).free:,} bytes are free. "
    return StoreError(
        f"The disk of the store {root} is full. {needed}Free some, delete entries of the store that you no longer need, or "
        "name a folder on another disk: GraphDataModule(store=...) or $LIGHTNING_GNN_STORE."
    )


def write_store(folder: Path, data: Data, part: np.ndarray, num_parts: int, report: Mapping[str, Any]) -> None:
    """Writes the edge cut of `data` under `part` to `folder`; the folder appears complete or not at all.

    What interrupted writers of the same folder left behind is removed, so only one may write at a time.

    Args:
        folder: must not exist; its parent is created.
        data: as :func:`~lightning_gnn.datamodules.sources.prepare_graph` returns it.
        part: owner of each node, ``[N]``, values 0 to `num_parts` - 1.

    Raises:
        StoreError: the disk is full, or the folder cannot be written.
    """
    with writing(folder.parent, stored_bytes(data)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for stale in folder.parent.glob(f".{folder.name}.*"):
            if stale.is_dir():
                shutil.rmtree(stale)
            else:  # of `write_atomically`
                stale.unlink()
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write(scratch, folder.name, data, part, num_parts, report)
            scratch.replace(folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


class _Summed:
    """A file that works out the checksum of what is written to it, so that nothing is read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.checksum = file, 0, 0

    def write(self, chunk: bytes) -> int:
        self.size += len(chunk)
        self.checksum = zlib.crc32(chunk, self.checksum)
        return self._file.write(chunk)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _write(folder: Path, entry: str, data: Data, part: np.ndarray, num_parts: int, report: Mapping[str, Any]) -> None:
    edge_index = data.edge_index.numpy()
    began = time.perf_counter()
    relabelling = local_relabelling(edge_index, part, num_parts)
    seconds = time.perf_counter() - began
    before = recent_reads(edge_index, Relabelling.from_assignment(part, num_parts))
    locality = Locality(before, recent_reads(edge_index, relabelling), seconds)
    files: dict[str, list[int]] = {}

    def save(name: str, array: np.ndarray) -> None:
        with (folder / f"{name}.npy").open("wb") as file:
            summed = _Summed(file)
            np.save(summed, array, allow_pickle=False)  # type: ignore[call-overload]
        files[f"{name}.npy"] = [summed.size, summed.checksum]

    edge_orders, edge_counts = [], []
    for number, piece in enumerate(edge_cut_parts(edge_index, relabelling)):
        save(f"part{number}.edge_index", piece.edge_index)
        save(f"part{number}.halo", piece.halo)
        edge_orders.append(piece.edge_ids)
        edge_counts.append(len(piece.edge_ids))
    save("n_id", relabelling.n_id)

    attributes: dict[str, list[str]] = {"node": [], "edge": [], "graph": []}
    scalars = {}
    edge_order = np.concatenate(edge_orders)
    save("e_id", edge_order)
    for name, value in data.to_dict().items():
        if name == "edge_index":
            continue
        if not isinstance(value, Tensor):
            scalars[name] = value
            continue
        kind = _kind(data, name)
        array = value.detach().cpu().numpy()
        order = {"node": relabelling.n_id, "edge": edge_order}.get(kind)
        save(f"{kind}.{name}", array if order is None else array[order])
        attributes[kind].append(name)

    manifest = {
        "format": FORMAT,
        "name": entry,
        "layout": "edge_cut",
        "parts": num_parts,
        "offsets": relabelling.offsets.tolist(),
        "edge_offsets": np.concatenate([[0], np.cumsum(edge_counts)]).tolist(),
        "mask_counts": _mask_counts(data, relabelling),
        "num_classes": num_classes(data.get("y")),
        "digest": hashlib.blake2b(np.ascontiguousarray(part, dtype=np.int32).data, digest_size=16).hexdigest(),
        "attributes": attributes,
        "scalars": scalars,
        "report": report,
        "locality": locality.as_dict(),
        "files": files,
    }
    manifest = {**manifest, "checksum": _manifest_checksum(manifest)}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    _remember(folder, {name: _seen(folder / name, checksum) for name, (_, checksum) in files.items()})


def _manifest_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({**manifest, "checksum": None}, sort_keys=True).encode())


def _kind(data: Data, name: str) -> str:
    """Returns whether an attribute has one row per ``"node"``, per ``"edge"``, or belongs to the ``"graph"``."""
    return "node" if data.is_node_attr(name) else "edge" if data.is_edge_attr(name) else "graph"


def _mask_counts(data: Data, relabelling: Relabelling) -> dict[str, list[int]]:
    """Returns by mask how many labelled nodes of it each part owns."""
    y = data.get("y")
    parts = torch.from_numpy(relabelling.n_id).split(np.diff(relabelling.offsets).tolist())
    return {name: [num_labelled(None if y is None else y[rows], data[name][rows]) for rows in parts] for name in MASKS}


def read_manifest(folder: Path, layout: LayoutSpec | None = None) -> dict[str, Any]:
    """Returns the manifest of a complete store whose files are those that were written.

    Args:
        folder: the entry.
        layout: what it must hold; None takes any.

    Raises:
        StoreError: no, an unreadable or an altered manifest; another format, layout or number of parts; a renamed folder; a
            file that is missing, of another size, or altered.
    """
    advice = f"Remove the folder {folder} and run again: the graph is then partitioned anew."
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        found_format = manifest.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(f"The partitioned graph in {folder} has no readable manifest ({error}). {advice}") from error
    if found_format != FORMAT:
        raise StoreError(f"{folder} has format {found_format}, this version reads format {FORMAT}. {advice}")
    if manifest.get("checksum") != _manifest_checksum(manifest):
        raise StoreError(f"{folder / 'manifest.json'} has been altered: its checksum is another. {advice}")
    if manifest["name"] != folder.name:
        raise StoreError(
            f"{folder} was written as {manifest['name']}: it may hold another graph or partition. {advice}"
        )
    found = LayoutSpec(manifest["layout"], manifest["parts"])
    if layout is not None and found != layout:
        raise StoreError(
            f"{folder} holds {found.kind} in {found.parts} parts, but {layout.kind} in {layout.parts} is needed. {advice}"
        )
    try:
        problem = _damage(folder, manifest["files"])
    except OSError as error:
        problem = f"{folder} cannot be read ({error})"
    if problem is not None:
        raise StoreError(f"{problem}. {advice}")
    return manifest


def _damage(folder: Path, files: Mapping[str, tuple[int, int]]) -> str | None:
    """Returns in words which file is not what was written; None if all are. Reads those changed since they were last read."""
    for name, (size, _) in files.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != size:
            return f"{folder / name} " + ("is missing" if found is None else f"has {found} bytes instead of {size}")
    try:
        known = dict(json.loads((folder / "verified.json").read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    changed = [name for name, (_, checksum) in files.items() if known.get(name) != _seen(folder / name, checksum)]
    for name in changed:
        seen = _seen(folder / name, files[name][1])
        if _checksum(folder / name) != files[name][1]:
            return f"{folder / name} has been altered or damaged: its checksum is another"
        known[name] = seen
    if changed:
        with suppress(OSError):  # not ours to write, or a full disk: the next run compares again
            _remember(folder, known)
    return None


def _seen(file: Path, checksum: int) -> list[int]:
    """Returns what a file is known by once it has had `checksum`."""
    stat = file.stat()
    return [stat.st_mtime_ns, stat.st_size, checksum]


def _remember(folder: Path, known: Mapping[str, list[int]]) -> None:
    write_atomically(folder / "verified.json", json.dumps(known))


def write_atomically(path: Path, text: str) -> None:
    """Writes a small file that readers see in its old or its new form."""
    scratch = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


def read_shard(folder: Path, rank: int, layout: LayoutSpec | None = None) -> Shard:
    """Returns what `rank` holds, memory-mapped (copy on write: changes stay in this process).

    Raises:
        StoreError: see :func:`read_manifest`.
    """
    manifest = read_manifest(folder, layout)
    offsets = np.asarray(manifest["offsets"])
    rows = slice(offsets[rank], offsets[rank + 1])
    edges = slice(*manifest["edge_offsets"][rank : rank + 2])
    ranges = {"node": rows, "edge": edges, "graph": slice(None)}

    def load(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)

    n_id, e_id = (torch.from_numpy(load(name)) for name in ("n_id", "e_id"))
    batch = Data(edge_index=torch.from_numpy(load(f"part{rank}.edge_index")))
    for kind, names in manifest["attributes"].items():
        for name in names:
            array = load(f"{kind}.{name}")
            batch[name] = torch.from_numpy(array[ranges[kind]] if array.ndim else np.array(array))
    for name, value in manifest["scalars"].items():
        batch[name] = value
    batch.n_id, batch.e_id = n_id[rows], e_id[edges]
    batch.num_owned = len(batch.n_id)
    halos = tuple(load(f"part{part}.halo") for part in range(manifest["parts"]))
    mask_counts = {name: tuple(counts) for name, counts in manifest["mask_counts"].items()}
    _add_stand_ins(batch, rank, mask_counts)
    return Shard(
        batch=batch,
        plan=halo_plan(rank, offsets, halos),
        halos=halos,
        n_id=n_id,
        e_id=e_id,
        counts=tuple(np.diff(offsets).tolist()),
        edge_counts=tuple(np.diff(manifest["edge_offsets"]).tolist()),
        mask_counts=mask_counts,
        num_classes=manifest["num_classes"],
        digest=manifest["digest"],
        report=manifest["report"],
    )


def split_graph(data: Data, part: np.ndarray, num_parts: int) -> list[Shard]:
    """Returns the shards of all ranks in memory, as :func:`write_store` and :func:`read_shard` make them by way of files.

    Args:
        data: as :func:`~lightning_gnn.datamodules.sources.prepare_graph` returns it.
        part: owner of each node, ``[N]``, values 0 to `num_parts` - 1.
    """
    edge_index = data.edge_index.numpy()
    relabelling = local_relabelling(edge_index, part, num_parts)
    offsets, n_id = relabelling.offsets, torch.from_numpy(relabelling.n_id)
    pieces = list(edge_cut_parts(edge_index, relabelling))
    halos = tuple(piece.halo for piece in pieces)
    e_ids = [torch.from_numpy(piece.edge_ids) for piece in pieces]
    mask_counts = {name: tuple(counts) for name, counts in _mask_counts(data, relabelling).items()}
    shards = []
    for rank, piece in enumerate(pieces):
        rows = {"node": n_id[offsets[rank] : offsets[rank + 1]], "edge": e_ids[rank]}
        batch = Data(edge_index=torch.from_numpy(piece.edge_index))
        for name, value in data.to_dict().items():
            if name != "edge_index":
                chosen = rows.get(_kind(data, name)) if isinstance(value, Tensor) else None
                batch[name] = value if chosen is None else value[chosen]
        batch.n_id, batch.e_id, batch.num_owned = rows["node"], rows["edge"], len(rows["node"])
        _add_stand_ins(batch, rank, mask_counts)
        shards.append(
            Shard(
                batch=batch,
                plan=halo_plan(rank, offsets, halos),
                halos=halos,
                n_id=n_id,
                e_id=torch.cat(e_ids),
                counts=tuple(np.diff(offsets).tolist()),
                edge_counts=tuple(map(len, e_ids)),
                mask_counts=mask_counts,
                num_classes=num_classes(data.get("y")),
                digest="",
                report={},
            )
        )
    return shards


def _add_stand_ins(batch: Data, rank: int, mask_counts: Mapping[str, tuple[int, ...]]) -> None:
    """Puts a row into each mask that others have labelled nodes in, but this rank has none."""
    for name, per_rank in mask_counts.items():
        if sum(per_rank) > 0 and per_rank[rank] == 0 and batch.num_owned:
            _add_stand_in(batch, name)


def _add_stand_in(batch: Data, mask: str) -> None:
    """Puts one row into a mask that this rank has no labelled node of: a mean over nothing would be nan.

    The rank's count stays 0, so the row weighs nothing in losses, gradients and logged values.
    """
    y = batch.get("y")
    row = 0
    if y is not None and y.dim() == 1 and not y.is_floating_point():
        labelled = (y >= 0).nonzero()
        if len(labelled):
            row = int(labelled[0])
        else:
            batch.y = y.clone()
            batch.y[row] = 0
    batch[mask] = batch[mask].clone()
    batch[mask][row] = True


def whole_graph(data: Data) -> Shard:
    """Returns the whole graph as the only rank's shard: the reference that every scheme is compared with."""
    batch = Data(**data.to_dict())
    num_nodes = data.x.size(0)
    batch.n_id, batch.e_id = torch.arange(num_nodes), torch.arange(data.edge_index.size(1))
    batch.num_owned = num_nodes
    return Shard(
        batch=batch,
        plan=HaloPlan(num_nodes, (0,), (np.empty(0, np.int64),)),
        halos=(np.empty(0, np.int64),),
        n_id=batch.n_id,
        e_id=batch.e_id,
        counts=(num_nodes,),
        edge_counts=(len(batch.e_id),),
        mask_counts={name: (num_labelled(batch.get("y"), batch[name]),) for name in MASKS},
        num_classes=num_classes(batch.get("y")),
        digest="",
        report={},
    )
