"""A partitioned graph on disk: plain arrays that all ranks of a machine map into memory, and a manifest.

::

    <root>/<key>/manifest.json     format, parts, offsets, attributes, sizes of all files, the partition's report
    <root>/<key>/node.<name>.npy   node attributes, rows in relabelled order, so that each part is one range
    <root>/<key>/edge.<name>.npy   edge attributes, edges in the order of their owners
    <root>/<key>/part<p>.*.npy     local edge_index, halo

Written under a temporary name and renamed: a folder with a manifest is complete. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.datamodules.sources import MASKS, num_classes, num_labelled
from lightning_gnn.partition.shard import HaloPlan, Relabelling, edge_cut_parts, halo_plan

FORMAT = 2


class StoreError(RuntimeError):
    """The store on disk cannot be used: says which file and why."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds.

    Attributes:
        batch: owned rows; ``edge_index`` in local ids, halo rows behind the owned ones; ``n_id`` and ``e_id``, the
            original ids of its nodes and edges; ``num_owned``; boolean masks over owned rows.
        plan: the rows to exchange.
        n_id, e_id: original ids of all ranks' nodes and edges in rank order, int64 ``[N]`` and ``[E]``, memory-mapped.
        counts, edge_counts: owned rows and edges of each rank.
        mask_counts: by mask, the labelled rows of each rank in it: the weights of a mean loss.
        num_classes: of the whole graph's labels.
        digest: of the node assignment; equal on all ranks that hold parts of the same cut.
        report: partition quality, for logs.
    """

    batch: Data
    plan: HaloPlan
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


def write_store(folder: Path, data: Data, part: np.ndarray, num_parts: int, report: Mapping[str, Any]) -> None:
    """Writes the edge cut of `data` under `part` to `folder`; the folder appears complete or not at all.

    Args:
        folder: must not exist; its parent is created.
        data: as :func:`~lightning_gnn.datamodules.sources.prepare_graph` returns it.
        part: owner of each node, ``[N]``, values 0 to `num_parts` - 1.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(scratch, data, part, num_parts, report)
        scratch.replace(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write(folder: Path, data: Data, part: np.ndarray, num_parts: int, report: Mapping[str, Any]) -> None:
    relabelling = Relabelling.from_assignment(part, num_parts)
    files: dict[str, int] = {}

    def save(name: str, array: np.ndarray) -> None:
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
        files[f"{name}.npy"] = (folder / f"{name}.npy").stat().st_size

    edge_index = data.edge_index.numpy()
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
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _kind(data: Data, name: str) -> str:
    """Returns whether an attribute has one row per ``"node"``, per ``"edge"``, or belongs to the ``"graph"``."""
    return "node" if data.is_node_attr(name) else "edge" if data.is_edge_attr(name) else "graph"


def _mask_counts(data: Data, relabelling: Relabelling) -> dict[str, list[int]]:
    """Returns by mask how many labelled nodes of it each part owns."""
    y = data.get("y")
    parts = torch.from_numpy(relabelling.n_id).split(np.diff(relabelling.offsets).tolist())
    return {name: [num_labelled(None if y is None else y[rows], data[name][rows]) for rows in parts] for name in MASKS}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a complete store.

    Raises:
        StoreError: no or an unreadable manifest, another format, a file missing or of another size.
    """
    advice = f"Remove the folder {folder} and run again: the graph is then partitioned anew."
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"The partitioned graph in {folder} has no readable manifest ({error}). {advice}") from error
    if manifest.get("format") != FORMAT:
        raise StoreError(f"{folder} has format {manifest.get('format')}, this version reads format {FORMAT}. {advice}")
    for name, size in manifest["files"].items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise StoreError(f"{folder / name} {state}. {advice}")
    return manifest


def read_shard(folder: Path, rank: int) -> Shard:
    """Returns what `rank` holds, memory-mapped (copy on write: changes stay in this process).

    Raises:
        StoreError: see :func:`read_manifest`.
    """
    manifest = read_manifest(folder)
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
    halos = [load(f"part{part}.halo") for part in range(manifest["parts"])]
    mask_counts = {name: tuple(counts) for name, counts in manifest["mask_counts"].items()}
    _add_stand_ins(batch, rank, mask_counts)
    return Shard(
        batch=batch,
        plan=halo_plan(rank, offsets, halos),
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
    relabelling = Relabelling.from_assignment(part, num_parts)
    offsets, n_id = relabelling.offsets, torch.from_numpy(relabelling.n_id)
    pieces = list(edge_cut_parts(data.edge_index.numpy(), relabelling))
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
                plan=halo_plan(rank, offsets, [other.halo for other in pieces]),
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
        n_id=batch.n_id,
        e_id=batch.e_id,
        counts=(num_nodes,),
        edge_counts=(len(batch.e_id),),
        mask_counts={name: (num_labelled(batch.get("y"), batch[name]),) for name in MASKS},
        num_classes=num_classes(batch.get("y")),
        digest="",
        report={},
    )
