"""Predictions of all ranks, combined into the predictions of one device."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.data.store import read_array, write_header
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
        dims = set[int]()  # whose rows are joined; a mode joins the rows of modes that torch calls after it, too
        for mode, placement in reversed([*zip(self._rows.modes, placements)]):
            if isinstance(placement, RowPlacement) and placement.dim not in dims:
                dims.add(placement.dim)
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
            return write_rows(self._world, self._folder / f"{file_name(path)}.npy", x.detach()[: rows.owned], places, rows.total)
        return place(mode.gather_rows(x, placement, "predictions").detach(), FROM_ROWS)


def file_name(path: str) -> str:
    """Returns a file name for a path in the output: ``['out'][0]`` is ``out_0``."""
    return re.sub(r"\W+", "_", path).strip("_") or "predictions"


class RowFile:
    """``.npy`` file that all ranks write; it appears when it is complete, and replaces an existing file. Collective.

    Args:
        world: all ranks, which must see the same file system.
        file: path of the file.

    Attributes:
        part: path of the incomplete file.
    """

    def __init__(self, world: World, file: Path) -> None:
        self._world, self._file = world, file
        self.part = Path(world.broadcast_object(str(file.with_suffix(f".{uuid.uuid4().hex}.part"))))

    def on_all(self, does: Callable[[], None]) -> None:
        """Call a function on all ranks.

        Raises:
            OSError: on all ranks: the file cannot be written, the disk is full, or another machine does not see the file.
        """
        problem = None
        try:
            does()
        except OSError as error:
            problem = f"{error}"
        for rank, found in enumerate(self._world.all_gather_object(problem)):
            if found is not None:
                self.part.unlink(missing_ok=True)
                raise OSError(
                    f"Rank {rank} cannot write predictions to {self._file}: {found}. All ranks need access to its folder."
                )

    def create(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Create the incomplete file on rank 0."""
        if self._world.rank == 0:
            self.part.parent.mkdir(parents=True, exist_ok=True)
            with self.part.open("wb") as opened:
                write_header(opened, shape, dtype)
                # Without space, a write to a map of the file would end the process.
                os.posix_fallocate(opened.fileno(), 0, opened.tell() + math.prod(shape) * dtype.itemsize)

    def appear(self) -> None:
        """Name the complete file on rank 0."""
        if self._world.rank == 0:
            self.part.replace(self._file)


def write_rows(world: World, path: Path, rows: Tensor, places: Tensor, total: int) -> Tensor:
    """Write the rows of all ranks to one ``.npy`` file; returns all rows, memory-mapped, on every rank.

    Each rank writes its rows, see :class:`RowFile`. Collective.

    Args:
        world: all ranks.
        path: path of the file.
        rows: rows of this rank, ``[n, ...]``.
        places: positions of these rows in the file, ``[n]``.
        total: number of rows of all ranks.
    """
    array, file = as_array(rows), RowFile(world, path)

    def write() -> None:
        if total:
            target = np.lib.format.open_memmap(file.part, "r+")
            target[places.numpy()] = array
            target.flush()

    for step in (partial(file.create, array.dtype, (total, *array.shape[1:])), write, file.appear):
        file.on_all(step)
    return torch.from_numpy(read_array(path))


def as_array(rows: Tensor) -> np.ndarray:
    """Returns rows for a file; rows of bfloat16 as float32, since numpy lacks bfloat16."""
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).cpu().numpy()


def tensors_in(output: Any) -> list[Tensor]:
    """Returns the tensors in a step's output, and arrays and numbers as tensors."""
    leaves = [leaf for _, leaf in tree_flatten_with_path(output)[0]]
    return [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray, int, float, bool))]
