"""Predictions of all ranks, combined into the predictions of one device."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.data.store import read_array
from lightning_gnn.private_torch import keystr, tree_flatten_with_path, tree_unflatten
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.mode import NotExactError, RowsMode, place, unknown_origin
from lightning_gnn.rows.placement import FROM_ROWS, RowPlacement

Predictions = Literal["all", "rank0", "shards", "file"]


class PredictedRows:
    """Combines the predictions of the ranks in one step; with `mode` ``"file"``, in files of a folder.

    Args:
        world: all ranks.
        rows: rows under whose semantics the step ran.
        mode: rows that a rank gets, see :class:`~lightning_gnn.strategy.base.GNNStrategy`.
        folder: folder of the files.
    """

    def __init__(self, world: World, rows: GraphRows, mode: Predictions, folder: Path = Path()) -> None:
        self._world, self._rows, self._mode, self._folder = world, rows, mode, folder

    def __call__(self, output: Any) -> Any:
        """Returns the predictions of one device: rows of nodes and edges, or of a selection, in the order of the graph.

        The mode selects the ranks that get them. NumPy arrays and lists of numbers are treated as the tensors that they were made
        from. Collective.

        Raises:
            NotExactError: the placement of a tensor is unknown.
            ValueError: on all ranks: ranks returned different structures.
        """
        exports = self._exports = {key: each for mode in self._rows.modes for key, each in mode.exports.items()}
        found, spec = tree_flatten_with_path(output, is_leaf=lambda leaf: id(leaf) in exports)
        structure = [f"{keystr(path) or 'it'} {type(leaf).__name__}" for path, leaf in found]
        by_rank = self._world.all_gather_object(structure)
        if any(each != by_rank[0] for each in by_rank):
            shown = "; ".join(", ".join(each) or "nothing" for each in by_rank)
            raise ValueError(f"predict_step returned different structures ({shown}). Return the same tensors on all ranks.")
        joined = [self._join(keystr(path), leaf) for path, leaf in found]
        return None if self._mode == "rank0" and self._world.rank else tree_unflatten(joined, spec)

    def _join(self, path: str, leaf: Any) -> Any:
        given = leaf if isinstance(leaf, Tensor) else self._exports.get(id(leaf), (None, None))[1]
        if not isinstance(given, Tensor):
            return leaf
        placements, x = self._rows.placements_of(given, compares=True), given
        if None in placements:
            raise NotExactError(f"predict_step returned{f' at {path}' if path else ''} {unknown_origin(given)}")
        for mode, placement in reversed([*zip(self._rows.modes, placements)]):
            if isinstance(placement, RowPlacement):
                with mode.reading():
                    x = self._join_rows(path, x, placement, mode)
        if x is given:
            return leaf
        if isinstance(leaf, np.ndarray):
            return x.cpu().numpy()
        return x.tolist() if isinstance(leaf, list) else x

    def _join_rows(self, path: str, x: Tensor, placement: RowPlacement, mode: RowsMode) -> Tensor:
        """Returns the rows of all ranks of an axis, or the rows of this rank, as the mode of predictions requires."""
        rows = placement.rows
        if self._mode == "shards":
            return mode.drop_replicas(place(x.detach(), placement), placement)
        if self._mode == "file" and placement.dim == 0 and self._rows.modes == [mode]:
            places = rows.positions[: rows.owned].cpu()
            return write_rows(self._world, self._folder / f"{_file_name(path)}.npy", x.detach()[: rows.owned], places, rows.total)
        return place(mode.gather_rows(x, placement, "predictions").detach(), FROM_ROWS)


def _file_name(path: str) -> str:
    """Returns a file name for a path in the output: ``['out'][0]`` is ``out_0``."""
    return re.sub(r"\W+", "_", path).strip("_") or "predictions"


def in_files(world: World, folder: Path, output: Any, places: Tensor, total: int) -> Any:
    """Returns a step's output with all ranks' rows of each tensor, in files of a folder as in :func:`write_rows`."""
    found, spec = tree_flatten_with_path(output)
    files = [folder / f"{_file_name(keystr(path))}.npy" for path, _ in found]
    return tree_unflatten([write_rows(world, file, leaf, places, total) for file, (_, leaf) in zip(files, found)], spec)


def write_rows(world: World, file: Path, rows: Tensor, places: Tensor, total: int) -> Tensor:
    """Write the rows of all ranks to one ``.npy`` file; returns all rows, memory-mapped, on every rank.

    Each rank writes its rows. The file is renamed when it is complete, and replaces an existing file. Rows of bfloat16 are
    written as float32, since numpy lacks bfloat16. Collective; all ranks must see the same file system.

    Args:
        world: all ranks.
        file: path of the file.
        rows: rows of this rank, ``[n, ...]``.
        places: positions of these rows in the file, ``[n]``.
        total: number of rows of all ranks.

    Raises:
        OSError: on all ranks: the file cannot be written, the disk is full, or another machine does not see the file.
    """
    array = (rows.float() if rows.dtype == torch.bfloat16 else rows).cpu().numpy()
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
                raise OSError(f"Rank {rank} cannot write predictions to {file}: {found}. All ranks need access to its folder.")

    def create() -> None:
        if world.rank:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        if total:
            np.lib.format.open_memmap(part, "w+", array.dtype, (total, *array.shape[1:]))
        else:
            with part.open("wb") as opened:
                np.save(opened, array)
        with part.open("r+b") as opened:  # without space, a write to the map would end the process
            os.posix_fallocate(opened.fileno(), 0, part.stat().st_size)

    def write() -> None:
        if total:
            target = np.lib.format.open_memmap(part, "r+")
            target[places.numpy()] = array
            target.flush()

    def name() -> None:
        if world.rank == 0:
            part.replace(file)

    for step in (create, write, name):
        all_of(step)
    return torch.from_numpy(read_array(file))


def tensors_in(output: Any) -> list[Tensor]:
    """Returns the tensors in a step's output, and arrays and numbers as tensors."""
    leaves = [leaf for _, leaf in tree_flatten_with_path(output)[0]]
    return [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray, int, float, bool))]
