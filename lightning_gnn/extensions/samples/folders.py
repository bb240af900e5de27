"""Samples in folders of arrays, and their conversion to the order of a partition.

S samples, N nodes, N_p nodes of a part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import Dataset, Subset

from lightning_gnn.data.store import StoreError, appearing_folder, check_space, read_array, sync, write_header, writing
from lightning_gnn.extensions.samples.formats import SampleFormat

_PIECE = 1 << 25
"""Bytes of a tensor that are reordered at once."""

_VERSION = 1


def _zarr_arrays(folder: Path) -> dict[str, Any]:
    """Returns the arrays of a zarr group by name, or the zarr arrays in a folder, such as ``x.zarr``.

    Raises:
        ValueError: zarr is not installed.
    """
    is_group = any((folder / name).exists() for name in (".zgroup", "zarr.json"))
    files = [] if is_group else sorted(folder.glob("*.zarr"))
    if not is_group and not files:
        return {}
    try:
        import zarr
    except ImportError as error:
        raise ValueError(f"{folder} has zarr arrays, which need the package zarr. Install it: pip install zarr") from error
    if is_group:
        return dict(zarr.open_group(folder, mode="r").arrays())
    return {file.stem: zarr.open_array(file, mode="r") for file in files}


class FolderSamples(Dataset[Any]):
    """Samples in ``.npy`` files ``[S, ...]``, memory-mapped, or in zarr arrays. File names are names of tensors: grid.x.

    Args:
        folder: folder of the files, or a zarr group.

    Raises:
        ValueError: the folder has no arrays, a file is unreadable, arrays have different numbers of samples, or zarr is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        sizes = {name: array.shape[:1] for name, array in self.arrays.items()}
        if not sizes:
            raise ValueError(
                f"{self.folder} must be a folder of .npy files or zarr arrays with samples, such as x.npy of shape [S, N, F]."
            )
        if len(set(sizes.values())) != 1 or not all(sizes.values()):
            raise ValueError(
                f"The arrays in {self.folder} must have the same number of samples in dimension 0, got "
                f"{', '.join(f'{name} {list(array.shape)}' for name, array in self.arrays.items())}."
            )

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Memory-mapped arrays and zarr arrays by name."""
        return {file.stem: read_array(file) for file in sorted(self.folder.glob("*.npy"))} | _zarr_arrays(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}  # pickled arrays would be copies of the files

    def __len__(self) -> int:
        return int(next(iter(self.arrays.values())).shape[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: array[index] for name, array in self.arrays.items()}

    def key(self) -> str:
        """Returns a text that changes with the files."""
        has_zarr = not all(isinstance(array, np.ndarray) for array in self.arrays.values())
        files = self.folder.rglob("*") if has_zarr else self.folder.glob("*.npy")
        stats = [(str(file.relative_to(self.folder)), file.stat()) for file in sorted(files)]
        return repr([str(self.folder.resolve()), *((name, found.st_size, found.st_mtime_ns) for name, found in stats)])


def samples_of(source: Any) -> Any:
    """Returns the map-style dataset of an argument: a dataset, a folder, or a pair of a folder and a slice."""
    if isinstance(source, (str, os.PathLike)):
        return FolderSamples(source)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], slice):
        samples = samples_of(source[0])
        return Subset(samples, range(len(samples))[source[1]])
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise ValueError(
            f"samples must be a dataset with __len__ and __getitem__, or a folder of arrays, got {type(source).__name__}."
        )
    return source


def folder_of(samples: Any) -> FolderSamples | None:
    """Returns the folder of a dataset or of a ``Subset``; None for other datasets."""
    while isinstance(samples, Subset):
        samples = samples.dataset
    return samples if isinstance(samples, FolderSamples) else None


class PartSamples(Dataset[Any]):
    """Samples of a folder with the node rows of one part, from converted files.

    Reads exactly the bytes of the part's rows: a memory map would read pages and read ahead.

    Args:
        samples: samples of the whole graph.
        folder: converted files, see :func:`convert_folder`.
        part: number of the part.
        form: format of the part's samples.

    Raises:
        StoreError: a converted file is missing or has another shape.
    """

    def __init__(self, samples: FolderSamples, folder: Path, part: int, form: SampleFormat) -> None:
        self.samples, self._form, self._files = samples, form, dict[str, tuple[Path, int]]()
        for name, tensor in form.tensors.items():
            if tensor.node_dim is None:
                continue
            file = folder / f"part{part}.{name}.npy"
            try:
                array = read_array(file)
            except (OSError, ValueError) as error:
                raise StoreError(f"Converted samples cannot be read ({error}). Remove {folder} and run again.") from error
            if array.shape != (len(samples), *tensor.shape) or array.dtype != samples.arrays[name].dtype:
                raise StoreError(f"{file} has shape {list(array.shape)}, not {[len(samples), *tensor.shape]}. Remove {folder}.")
            self._files[name] = file, file.stat().st_size - array.nbytes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: self._read(name, index) for name in self._form.tensors}

    def _read(self, name: str, index: int) -> Any:
        source = self.samples.arrays[name]
        if name not in self._files:
            return source[index]
        file, begin = self._files[name]
        values = np.empty(self._form.tensors[name].shape, source.dtype)
        with file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
            opened.seek(begin + index * values.nbytes)
            left = values.reshape(-1).view(np.uint8).data
            while left and (count := opened.readinto(left)):
                left = left[count:]
        if left:
            raise StoreError(f"{file} ended in sample {index}. Remove {file.parent} and run again.")
        return values


def convert_folder(
    samples: FolderSamples,
    form: SampleFormat,
    rows: Mapping[str, Sequence[np.ndarray]],
    partition: Path,
    lock: Callable[[str], Any],
) -> Path:
    """Write a folder's samples in the order of a partition, one file ``[S, ..., N_p, ...]`` per part and tensor.

    Returns the folder of these files in the partition directory. The folder appears complete or not at all, and is reused.

    Args:
        samples: samples of the whole graph.
        form: format of the samples.
        rows: original ids of each part's nodes, in order, by node type.
        partition: folder of the partitioned graph.
        lock: function that returns a context manager for one writer, given the name of the folder.
    """
    text = repr([_VERSION, partition.name, samples.key(), sorted(form.node_dims.items())])
    folder = partition.with_name(f"samples-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}")
    names = [name for name, tensor in form.tensors.items() if tensor.node_dim is not None]
    num_bytes = sum(samples.arrays[name].nbytes for name in names)
    if folder.exists():
        return folder
    locked: AbstractContextManager[Any] = lock(folder.name)
    with locked:
        if folder.exists():  # another process wrote it
            return folder
        check_space(folder.parent, num_bytes)
        rank_zero_info(f"Converting the samples in {samples.folder} to the order of the partition: {num_bytes / 1e9:.2f} GB")
        with writing(folder.parent, num_bytes), appearing_folder(folder) as scratch:
            for name in names:
                ids = rows[form.tensors[name].node_type]
                files = [scratch / f"part{part}.{name}.npy" for part in range(len(ids))]
                _write_parts(samples.arrays[name], form.node_dims[name], ids, files)
    return folder


def _write_parts(array: Any, dim: int | None, rows: Sequence[np.ndarray], files: Sequence[Path]) -> None:
    """Write the rows of each part to its file, and read `array` once."""
    assert dim is not None
    step = max(1, _PIECE * array.shape[0] // max(1, array.nbytes))
    if not isinstance(array, np.ndarray):  # each chunk is decompressed once
        chunk = (getattr(array, "shards", None) or array.chunks)[0]
        step = -(-step // chunk) * chunk
    with ExitStack() as stack:
        opened = [stack.enter_context(file.open("wb")) for file in files]
        for file, nodes in zip(opened, rows):
            write_header(file, (*array.shape[:dim], len(nodes), *array.shape[dim + 1 :]), array.dtype)
        for begin in range(0, array.shape[0], step):
            piece = array[begin : begin + step]
            for file, nodes in zip(opened, rows):
                file.write(np.ascontiguousarray(piece.take(nodes, dim)).reshape(-1).view(np.uint8).data)
    for path in files:
        sync(path)
