"""Predictions of samples in ``.npy`` files of all samples and nodes, to which each rank writes its block.

S samples, B samples of a data rank in a batch, N nodes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.rows.placement import RowPlacement, RowSet
from lightning_gnn.steps.predictions import PredictedRows, RowFile, as_array, file_name


class SampleFiles:
    """Files of the predictions of a call of ``trainer.predict``.

    Args:
        trainer: Trainer of the call, which has loaded its data.
        world: all ranks.
        folder: folder of the files.

    Attributes:
        info: samples of the current batch; batches have the order of the dataset.
    """

    def __init__(self, trainer: Any, world: Any, folder: Path) -> None:
        order, self._batches = trainer.predict_dataloaders.order, int(sum(trainer.num_predict_batches))
        self._samples = min(order.num_samples, self._batches * order.batch_size * order.data_ranks)
        self._world, self._folder = world, folder
        data = trainer.datamodule
        held = [data.shard.counts, data.shard.edge_counts] if data.sample_data.concatenates else []
        self._rows_of_copies = {int(sum(counts)) for counts in held}
        self._files = dict[str, tuple[RowFile, Tensor]]()
        self.info: Any = None
        self._first = 0

    def begin_batch(self, info: Any) -> None:
        """Begin the next batch."""
        self._first += 0 if self.info is None else self.info.total
        self.info = info

    def has_copies(self, rows: RowSet) -> bool:
        """Returns whether rows are the nodes or edges of concatenated samples."""
        return rows.known_total is not None and rows.known_total in {self.info.total * count for count in self._rows_of_copies}

    def write(self, path: str, x: Tensor, nodes: RowPlacement) -> Tensor:
        """Write this rank's block of a tensor; returns the samples of the batch on all ranks, memory-mapped. Collective.

        Args:
            path: position of the tensor in the output of a step.
            x: ``[B, ..., nodes of the rank, ...]``; or of concatenated samples, ``[B · nodes of the rank, ...]``.
            nodes: placement of the nodes.
        """
        dim, rows, name = nodes.dim, nodes.rows, file_name(path)
        array = as_array(x.detach().narrow(dim, 0, rows.owned))
        per_sample = 1 if dim else rows.total // self.info.total  # entries of the first dimension
        shape = (self._samples * per_sample, *array.shape[1:])
        if dim:
            shape = (*shape[:dim], rows.total, *shape[dim + 1 :])
        if name not in self._files:
            file = RowFile(self._world, self._folder / f"{name}.npy")
            file.on_all(partial(file.create, array.dtype, shape))
            self._files[name] = file, torch.from_numpy(np.load(file.part, "c"))
        file, every = self._files[name]
        if (every.shape, every.numpy().dtype) != (shape, array.dtype):
            raise ValueError(
                f"predict_step must return one shape and dtype for all batches, got {[*shape]} of {array.dtype} in place of "
                f'{[*every.shape]} of {every.dtype} for {name}. Use predictions="all".'
            )
        places = rows.positions[: rows.owned].cpu().numpy()

        def write() -> None:
            target = np.lib.format.open_memmap(file.part, "r+")
            if not dim:
                target[self._first * per_sample + places] = array
            for position, block in zip(self.info.positions.tolist() if dim else (), array):
                np.moveaxis(target[self._first + position], dim - 1, 0)[places] = np.moveaxis(block, dim - 1, 0)
            target.flush()

        file.on_all(write)
        last = self._first + self.info.total
        if last == self._samples:
            file.on_all(file.appear)
        return every[self._first * per_sample : last * per_sample]

    def remove_parts(self) -> None:
        """Remove incomplete files."""
        for file, _ in self._files.values():
            file.part.unlink(missing_ok=True)

    def join(self, *arguments: Any) -> PredictedRows:
        """Returns an object that combines the predictions of a batch, given the arguments of its class."""
        return _RowsInFiles(self, *arguments)


class _RowsInFiles(PredictedRows):
    """Combines predictions: files for tensors with rows of samples and nodes, and values on all ranks for others."""

    def __init__(self, files: SampleFiles, world: Any, rows: Any, *_: Any) -> None:
        super().__init__(world, rows, "all")
        self._files = files

    @override
    def _join(self, path: str, leaf: Any) -> Any:
        x = leaf if isinstance(leaf, Tensor) else self._exports.get(id(leaf), (None, None))[1]
        nodes, *samples = self._rows.placements_of(x, compares=True) if isinstance(x, Tensor) else [None]
        if not isinstance(x, Tensor) or not isinstance(nodes, RowPlacement) or isinstance(leaf, list):
            return super()._join(path, leaf)
        info = self._files.info
        of_mesh = [isinstance(each, RowPlacement) and (each.dim, each.rows.known_total) == (0, info.total) for each in samples]
        is_stacked = nodes.dim > 0 and all(of_mesh) and len(x) == len(info.indices)
        if not is_stacked and (nodes.dim or not self._files.has_copies(nodes.rows)):
            return super()._join(path, leaf)
        found = self._files.write(path, x, nodes)
        return found.numpy() if isinstance(leaf, np.ndarray) else found
