"""A partitioned graph on disk: plain arrays that all ranks of a machine map into memory, and a manifest.

::

    <root>/<name>/manifest.json     format, name, parts, offsets, attributes, report and locality, files, its checksum
    <root>/<name>/node.<name>.npy   node attributes, rows in relabelled order: each part one range, neighbours near
    <root>/<name>/edge.<name>.npy   edge attributes, edges in the order of their targets' rows
    <root>/<name>/part<p>.*.npy     local edge_index, halo
    <root>/<name>/holders.npy       of a vertex cut: the rank that computes each edge, in the order of edge attributes
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
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.datamodules.shards import Cut, kind_of, mask_counts
from lightning_gnn.datamodules.sources import num_classes
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.locality import Locality, local_relabelling, recent_reads
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts

FORMAT = 7


class StoreError(RuntimeError):
    """The store on disk cannot be used: says which file and why."""


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


def write_store(
    folder: Path,
    data: Data,
    part: np.ndarray,
    layout: LayoutSpec,
    report: Mapping[str, Any],
    holders: np.ndarray | None = None,
) -> None:
    """Writes the cut of `data` under `part` to `folder`; the folder appears complete or not at all.

    What interrupted writers of the same folder left behind is removed, so only one may write at a time.

    Args:
        folder: must not exist; its parent is created.
        data: as :func:`~lightning_gnn.datamodules.sources.prepare_graph` returns it.
        part: owner of each node, ``[N]``, values 0 to ``layout.parts`` - 1.
        layout: what it holds.
        report: of its quality, plain values.
        holders: of a vertex cut, the rank that computes each edge, ``[E]``.

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
            _write(scratch, folder.name, data, part, layout, report, holders)
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


def _write(
    folder: Path,
    entry: str,
    data: Data,
    part: np.ndarray,
    layout: LayoutSpec,
    report: Mapping[str, Any],
    holders: np.ndarray | None,
) -> None:
    num_parts = layout.parts
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
    digest = hashlib.blake2b(np.ascontiguousarray(part, dtype=np.int32).data, digest_size=16)
    if holders is not None:
        in_order = holders.astype(np.int16)[edge_order]
        save("holders", in_order)
        digest.update(in_order.data)
    for name, value in data.to_dict().items():
        if name == "edge_index":
            continue
        if not isinstance(value, Tensor):
            scalars[name] = value
            continue
        kind = kind_of(data, name)
        array = value.detach().cpu().numpy()
        order = {"node": relabelling.n_id, "edge": edge_order}.get(kind)
        save(f"{kind}.{name}", array if order is None else array[order])
        attributes[kind].append(name)

    manifest = {
        "format": FORMAT,
        "name": entry,
        "layout": layout.as_dict(),
        "offsets": relabelling.offsets.tolist(),
        "edge_offsets": np.concatenate([[0], np.cumsum(edge_counts)]).tolist(),
        "mask_counts": mask_counts(data, relabelling, edge_orders),
        "num_classes": num_classes(data.get("y")),
        "digest": digest.hexdigest(),
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
    found = LayoutSpec.from_dict(manifest["layout"])
    if layout is not None and found != layout.stored:
        raise StoreError(
            f"{folder} holds {found.kind} in {found.parts} parts (groups: {found.groups}), but {layout.kind} in "
            f"{layout.parts} (groups: {layout.groups}) is needed. {advice}"
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


def read_cut(folder: Path, layout: LayoutSpec | None = None) -> Cut:
    """Returns the cut in `folder`, memory-mapped (copy on write: changes stay in this process).

    Raises:
        StoreError: see :func:`read_manifest`.
    """
    manifest = read_manifest(folder, layout)

    def load(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)

    def tensor(name: str) -> Tensor:
        array = load(name)
        return torch.from_numpy(array if array.ndim else np.array(array))

    return Cut(
        offsets=np.asarray(manifest["offsets"]),
        edge_offsets=np.asarray(manifest["edge_offsets"]),
        edge_index_of=lambda rank: load(f"part{rank}.edge_index"),
        halos=tuple(load(f"part{part}.halo") for part in range(manifest["layout"]["parts"])),
        n_id=tensor("n_id"),
        e_id=tensor("e_id"),
        attributes={
            kind: {name: tensor(f"{kind}.{name}") for name in names} for kind, names in manifest["attributes"].items()
        },
        scalars=manifest["scalars"],
        mask_counts={name: tuple(counts) for name, counts in manifest["mask_counts"].items()},
        num_classes=manifest["num_classes"],
        digest=manifest["digest"],
        report=manifest["report"],
        holders=tensor("holders") if "holders.npy" in manifest["files"] else None,
    )
