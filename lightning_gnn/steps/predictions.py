"""What ``predict_step`` returns on each rank, put together to what one device returns."""

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
from lightning_gnn.rows.mode import NotExactError, RowsMode, place, placement_of, unknown_origin
from lightning_gnn.rows.placement import FROM_ROWS, RowPlacement

Predictions = Literal["all", "rank0", "shards", "file"]


class PredictedRows:
    """Puts together what ranks predict in one step; where `mode` is ``"file"``, in files of a folder.

    Args:
        world: all ranks.
        rows: under which the step has run.
        mode: which rows a rank gets, see :class:`~lightning_gnn.strategy.base.GNNStrategy`.
    """

    def __init__(self, world: World, rows: RowsMode, mode: Predictions, folder: Path = Path()) -> None:
        self._world, self._rows, self._mode, self._folder = world, rows, mode, folder

    def __call__(self, output: Any) -> Any:
        """Returns what one device would: rows of nodes and edges, or of a selection of these, in the order of the graph, on
        every rank or as the mode says. Arrays of numpy and lists of numbers are as the tensors that they were made of. All ranks
        call it.

        Raises:
            NotExactError: it is not known which rows something has.
            ValueError: on all ranks: ranks returned other things.
        """
        found, spec = tree_flatten_with_path(output, is_leaf=lambda each: id(each) in self._rows.left)
        own = [f"{keystr(path) or 'it'} {type(leaf).__name__}" for path, leaf in found]
        by_rank = self._world.all_gather_object(own)
        if any(each != by_rank[0] for each in by_rank):
            shown = "; ".join(", ".join(each) or "nothing" for each in by_rank)
            raise ValueError(f"predict_step returned other things on each rank ({shown}). Return the same tensors on all ranks.")
        joined = [self._join(keystr(path), leaf) for path, leaf in found]
        return None if self._mode == "rank0" and self._world.rank else tree_unflatten(joined, spec)

    def _join(self, path: str, leaf: Any) -> Any:
        x = leaf if isinstance(leaf, Tensor) else self._rows.left.get(id(leaf), (None, None))[1]
        if not isinstance(x, Tensor):
            return leaf
        placement = placement_of(x) or self._rows.placement_of_constant(x)
        if placement is None:
            raise NotExactError(f"predict_step returned{f' at {path}' if path else ''} {unknown_origin(x)}")
        if not isinstance(placement, RowPlacement):
            return leaf
        rows = placement.rows
        if self._mode == "file" and placement.dim == 0:
            places = rows.positions[: rows.owned].cpu()
            x = write_rows(self._world, self._folder / f"{_file_name(path)}.npy", x.detach()[: rows.owned], places, rows.total)
        elif self._mode == "shards":
            x = self._rows.own(x.detach(), placement)
        else:
            x = place(self._rows.gathered(x.detach(), placement, "predictions"), FROM_ROWS)
        if isinstance(leaf, np.ndarray):
            return x.cpu().numpy()
        return x.tolist() if isinstance(leaf, list) else x


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
                raise OSError(f"Rank {rank} cannot write predictions to {file}: {found}. All ranks must see its folder.")

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


def tensors_in(output: Any) -> list[Tensor]:
    """Returns the tensors in what a step returned, and arrays and lists of numbers as tensors."""
    leaves = [leaf for _, leaf in tree_flatten_with_path(output)[0]]
    return [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray, int, float, bool))]
