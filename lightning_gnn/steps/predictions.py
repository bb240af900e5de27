"""What ``predict_step`` returns on each rank, put together to what one device returns."""

from __future__ import annotations

import os
import re
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten
from torch_geometric.data import Data, HeteroData

from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.data.store_check import read_array

Predictions = Literal["all", "rank0", "shards", "file"]

_LOOKED_AT = 1 << 20
"""Bytes of a tensor that are compared where all ranks may have the same."""


@dataclass(frozen=True)
class _Leaf:
    """What other ranks get to know of a tensor, or of a value, that a rank returns.

    Attributes:
        path: where it is in what was returned.
        kind: its dtype, or the class of a value.
        shape: of a tensor; None for a value.
        digest: of what it holds; equal where ranks have the same.
        varied: of a tensor, whether its rows differ.
        inside: if its entries are ids of this rank's nodes or edges, the masks that all of them are in; None if not.
        named: whether it stands under the key ``"n_id"`` or ``"e_id"``.
    """

    path: str
    kind: torch.dtype | str
    shape: tuple[int, ...] | None
    digest: int
    varied: bool = False
    inside: frozenset[str] | None = None
    named: bool = False

    @property
    def length(self) -> int:
        return self.shape[0] if self.shape else -1

    def __str__(self) -> str:
        return f"{self.kind}" if self.shape is None else f"{list(self.shape)}"


@dataclass(frozen=True)
class _Rows:
    """Rows of the batch.

    Attributes:
        ids: of the nodes or edges, ``[n]``.
        kept: which are this rank's own, and in the mask on one device, too, ``[n]``.
        total: nodes or edges of the graph, if the rows are of all of them.
    """

    ids: Tensor
    kept: Tensor
    total: int = -1


class UnknownRowsError(ValueError):
    """What is returned has rows of which nothing says what nodes or edges they are of."""


class AmbiguousRowsError(UnknownRowsError):
    """They may be of several."""


class PredictedRows:
    """Puts together what ranks predict in one step on a batch; where `mode` is ``"file"``, in files of a folder."""

    def __init__(
        self, world: World, shard: Shard, batch: Data | HeteroData, mode: Predictions, folder: Path = Path()
    ) -> None:
        self._world, self._mode, self._folder, types = world, mode, folder, shard.types
        if isinstance(batch, HeteroData):
            ids = {f"nodes of {name!r}": batch[name].n_id.cpu() for name in types.nodes}
            ids |= {f"edges of {kind}": batch[kind].e_id.cpu() for kind in types.edges}
            own = {name: len(of) for name, of in ids.items()}
            totals = dict(zip(ids, map(types.total, (*types.nodes, *types.edges))))
        else:
            own = {"nodes": shard.counts[world.rank], "edges": shard.edge_counts[world.rank]}
            ids = {"nodes": shard.batch.n_id.cpu(), "edges": shard.batch.e_id.cpu()}
            totals = {"nodes": sum(shard.counts), "edges": sum(shard.edge_counts)}
        self._whole = tuple(ids)
        self._rows = {of: _Rows(ids[of], torch.arange(len(ids[of])) < own[of], totals[of]) for of in ids}
        nodes = f"nodes of {types.input_type!r}" if types.is_hetero else "nodes"
        for name, mask in shard.predicted(batch).to_dict().items():
            if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 1:
                rows = self._rows["edges" if isinstance(batch, Data) and batch.is_edge_attr(name) else nodes]
                if len(mask) == len(rows.ids):
                    chosen, kept = mask.cpu().nonzero().view(-1), rows.kept.clone()
                    self._rows[name] = _Rows(rows.ids[chosen], kept[chosen])

    def __call__(self, output: Any) -> Any:
        """Returns what one device would: rows of nodes and edges in the order of their ids, on every rank or as the mode says.

        A tensor has a row for each node or edge of the batch, or for each in one of its masks; or there are the ids of its rows
        (``batch.n_id[rows]`` or ``batch.e_id[rows]``) elsewhere in what is returned, as many. Arrays of numpy and lists of
        numbers are as tensors. What all ranks have alike stays. All ranks call it.

        Raises:
            UnknownRowsError: on all ranks: something is none of these, or may be several.
            ValueError: on all ranks: ranks returned other things.
        """
        found, spec = tree_flatten_with_path(output, is_leaf=_is_list)
        leaves = [leaf for _, leaf in found]
        own = [self._described(keystr(path), leaf) for path, leaf in found]
        counts = {name: len(rows.ids) for name, rows in self._rows.items()}
        by_rank = self._world.all_gather_object((own, counts))
        of_ranks = [described for described, _ in by_rank]
        if len({tuple(leaf.path for leaf in described) for described in of_ranks}) > 1:
            each_of = [", ".join(f"{leaf.path} {leaf}" for leaf in described) or "nothing" for described in of_ranks]
            shown = "; ".join(each_of)
            raise ValueError(
                f"predict_step returned other things on each rank ({shown}). Return the same tensors on all, with a row for each "
                "node or edge."
            )
        by_leaf = list(zip(*of_ranks))
        joined = []
        for leaf, described in zip(leaves, by_leaf):
            rows = self._rows_of(described, by_leaf, leaves, [counts for _, counts in by_rank])
            joined.append(leaf if rows is None else self._join(leaf, rows, described))
        return None if self._mode == "rank0" and self._world.rank else tree_unflatten(joined, spec)

    def _described(self, path: str, leaf: Any) -> _Leaf:
        rows = _as_tensor(leaf)
        if rows is None:
            return _Leaf(path, type(leaf).__name__, None, zlib.crc32(repr(leaf).encode()))
        rows = rows.detach().cpu()
        some = rows[: _LOOKED_AT // max(1, rows[:1].nbytes)] if rows.dim() else rows
        digest = zlib.crc32(some.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        varied = bool(rows.dim()) and bool((some != some[:1]).any())
        inside = None
        if rows.dtype == torch.int64 and rows.dim() == 1 and len(rows.unique()) == len(rows):
            masks = frozenset(name for name, of in self._rows.items() if bool(torch.isin(rows, of.ids).all()))
            inside = masks if masks & {*self._whole} else None
        named = any(path.endswith((f"[{name!r}]", f".{name}")) for name in ("n_id", "e_id"))
        return _Leaf(path, rows.dtype, tuple(rows.shape), digest, varied, inside, named)

    def _rows_of(
        self,
        of_ranks: Sequence[_Leaf],
        by_leaf: Sequence[Sequence[_Leaf]],
        leaves: Sequence[Any],
        counts: Sequence[Mapping[str, int]],
    ) -> _Rows | None:
        """Returns which rows a tensor has; None for what stays. All ranks decide alike."""
        lengths = [leaf.length for leaf in of_ranks]
        alone = len(of_ranks) == 1  # its rows are in the order of the store, too
        alike = not alone and len({(leaf.shape, leaf.digest) for leaf in of_ranks}) == 1
        if alike and (of_ranks[0].varied or lengths[0] <= 0):
            return None
        fitting = [name for name in self._rows if [of.get(name) for of in counts] == lengths]
        whole = [name for name in fitting if name in self._whole]
        # Of types, the key says which, as in what models return: out["paper"].
        said = [name for name in whole if f"[{name.removeprefix('nodes of ')}]" in of_ranks[0].path]
        if len(said or whole) == 1:
            return self._rows[(said or whole)[0]]
        beside = [  # what may be the ids of these rows
            place
            for place, each in enumerate(by_leaf)
            if [leaf.length for leaf in each] == lengths and all(leaf.inside is not None for leaf in each)
        ]
        named = [place for place in beside if by_leaf[place][0].named]
        if named or (beside and len(fitting) != 1):
            return self._by_id((named or beside)[0], by_leaf, leaves)
        if len(fitting) > 1:
            own = [zlib.crc32(self._rows[name].ids.numpy().tobytes()) for name in fitting]
            if all(len(set(digests)) == 1 for digests in self._world.all_gather_object(own)):
                fitting = fitting[:1]
        ids = [leaf.inside or () for place in beside for leaf in by_leaf[place]]
        if len(fitting) == 1 and all(fitting[0] in masks for masks in ids):
            return self._rows[fitting[0]]
        if alike or alone:
            return None
        fitting += [f"the ids at {by_leaf[place][0].path}" for place in beside]
        first, problem = of_ranks[0], "has not the same value on all ranks"
        if first.length >= 0:
            problem = f"may be of the rows of {' or '.join(fitting)}" if fitting else "has rows of unknown nodes"
        shapes = ", ".join(f"{leaf} on rank {rank}" for rank, leaf in enumerate(of_ranks))
        raise (AmbiguousRowsError if fitting else UnknownRowsError)(
            f"What predict_step returned{f' at {first.path}' if first.path else ''} {problem} ({shapes}). Return a row for each "
            "node or edge of the batch, or for each in one of its masks, or the ids of the rows with them: "
            '{"n_id": batch.n_id[rows], "out": out[rows]}, or "e_id"; of several types, a dict by type. What is of the whole '
            "graph must be the same on all ranks."
        )

    def _by_id(self, place: int, by_leaf: Sequence[Sequence[_Leaf]], leaves: Sequence[Any]) -> _Rows:
        ids = _as_tensor(leaves[place])
        assert ids is not None
        ids = ids.cpu()
        masks = frozenset.intersection(*(leaf.inside or frozenset() for leaf in by_leaf[place]))
        kept = torch.ones(len(ids), dtype=torch.bool)
        for rows in (self._rows[mask] for mask in masks):  # what stands in for a mask was chosen by the mask
            kept &= ~torch.isin(ids, rows.ids[~rows.kept])
        return _Rows(ids, kept)

    def _join(self, leaf: Any, rows: _Rows, of_ranks: Sequence[_Leaf]) -> Any:
        found = _as_tensor(leaf)
        assert found is not None
        # Ranks without rows may have them of another form.
        some = [each for each in of_ranks if each.length] or of_ranks
        forms = {each.shape[1:] for each in some if each.shape is not None}
        if len(forms) > 1:
            shapes = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(of_ranks))
            raise ValueError(
                f"Rows that predict_step returned at {of_ranks[0].path} are of different shapes ({shapes})."
            )
        dtype = reduce(torch.promote_types, (each.kind for each in some if isinstance(each.kind, torch.dtype)))
        own = found.detach()[rows.kept.to(found.device)].to(dtype).view(-1, *forms.pop())
        if self._mode == "file":
            return self._in_file(leaf, own, rows, of_ranks[0].path)
        if self._mode != "shards":
            world = self._world
            ids, counts = self._ids_of_all(rows)
            own = world.all_gather_rows(own.to(world.device).contiguous(), counts)
            own = own[ids.argsort(stable=True)].to(found.device)
        if isinstance(leaf, np.ndarray):
            return own.cpu().numpy()
        return own.tolist() if isinstance(leaf, list) else own

    def _ids_of_all(self, rows: _Rows) -> tuple[Tensor, list[int]]:
        """Returns the ids of the rows of all ranks, one rank's after the other's, and how many each has."""
        world, own = self._world, rows.ids[rows.kept]
        counts = world.all_gather(torch.tensor([len(own)], device=world.device)).view(-1).tolist()
        return world.all_gather_rows(own.to(world.device), counts), counts

    def _in_file(self, leaf: Any, own: Tensor, rows: _Rows, path: str) -> Any:
        places, total = rows.ids[rows.kept], rows.total
        if total < 0:  # where they are among those of all ranks
            ids, counts = self._ids_of_all(rows)
            order = ids.argsort(stable=True).cpu()
            place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
            places, total = place.split(counts)[self._world.rank], len(order)
        found = write_rows(self._world, self._folder / f"{_file_name(path)}.npy", own, places, total)
        return found.numpy() if isinstance(leaf, np.ndarray) else found


def _file_name(path: str) -> str:
    """Returns the name of a place in what was returned: ``['out'][0]`` is ``out_0``."""
    return re.sub(r"\W+", "_", path).strip("_") or "predictions"


def in_files(world: World, folder: Path, output: Any, places: Tensor, total: int) -> Any:
    """Returns what a step returned with all ranks' rows of each tensor, as :func:`write_rows` does, in files of a folder."""
    found, spec = tree_flatten_with_path(output)
    files = [folder / f"{_file_name(keystr(path))}.npy" for path, _ in found]
    return tree_unflatten([write_rows(world, file, leaf, places, total) for file, (_, leaf) in zip(files, found)], spec)


def write_rows(world: World, file: Path, own: Tensor, places: Tensor, total: int) -> Tensor:
    """Writes rows of all ranks to one ``.npy`` file, each rank its own; returns all of them, memory-mapped, on every rank.

    The file has its name once it is whole, and takes the place of one of that name. Rows of bfloat16, which numpy has not, are
    written as float32. All ranks call it, and see one file system.

    Args:
        own: rows of this rank, ``[n, ...]``.
        places: where each belongs, ``[n]``.
        total: rows of all ranks.

    Raises:
        OSError: on all ranks: the file cannot be written, as there is no room, or another machine does not see it.
    """
    array = (own.float() if own.dtype == torch.bfloat16 else own).cpu().numpy()
    part = Path(world.broadcast_object(str(file.with_suffix(f".{uuid.uuid4().hex}.part"))))

    def all_of(does: Callable[[], None]) -> None:
        problem = None
        try:
            does()
        except OSError as error:
            problem = f"{error}"
        for rank, found in enumerate(world.all_gather_object(problem)):
            if found is not None:
                part.unlink(missing_ok=True)
                raise OSError(
                    f"Rank {rank} cannot write predictions to {file}: {found}. All ranks must see its folder."
                )

    def create() -> None:
        if world.rank:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        if total:
            np.lib.format.open_memmap(part, "w+", array.dtype, (total, *array.shape[1:]))
        else:
            with part.open("wb") as opened:
                np.save(opened, array)
        with part.open("r+b") as opened:  # a write to a map for which there is no room would end the process
            os.posix_fallocate(opened.fileno(), 0, part.stat().st_size)

    def write() -> None:
        if total:
            rows = np.lib.format.open_memmap(part, "r+")
            rows[places.numpy()] = array
            rows.flush()

    def name() -> None:
        if world.rank == 0:
            part.replace(file)

    for step in (create, write, name):
        all_of(step)
    return torch.from_numpy(read_array(file))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, (bool, int, float)) for each in value)


def tensors_in(output: Any) -> list[Tensor]:
    """Returns the tensors in what a step returns, arrays of numpy and lists of numbers among them."""
    found = [_as_tensor(leaf) for _, leaf in tree_flatten_with_path(output, is_leaf=_is_list)[0]]
    return [each.detach() for each in found if each is not None]


def _as_tensor(leaf: Any) -> Tensor | None:
    """Returns rows as a tensor; None for a value."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return torch.from_numpy(leaf)
    if _is_list(leaf):
        return torch.tensor(leaf, dtype=torch.float64 if any(isinstance(each, float) for each in leaf) else None)
    return leaf if isinstance(leaf, Tensor) else None
