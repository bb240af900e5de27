"""Tables and arrays of graphs in files: mapped, or converted once to ``.npy`` files in pieces."""

from __future__ import annotations

import glob
import gzip
import pickle
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_gnn.data.store import appearing

ROWS = 1 << 20
"""Number of rows of a table or of a copied array in memory at once."""

NEEDS_PYARROW = "Reading {} needs pyarrow, which is not installed. Run pip install lightning-gnn[files]."


def map_file(file: Path) -> np.ndarray:
    """Returns a ``.npy`` file, or a tensor in a ``.pt`` file, memory-mapped (copy on write)."""
    try:
        if file.suffix == ".pt":
            return torch.load(file, mmap=True, weights_only=True).numpy()
        return np.load(file, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read as a {file.suffix} file of numbers: {error}.") from error


def map_member(file: Path, name: str) -> np.ndarray | None:
    """Returns an array of a ``.npz`` file, memory-mapped; None if it is compressed or does not exist."""
    with zipfile.ZipFile(file) as archive:
        try:
            member = archive.getinfo(f"{name}.npy")
        except KeyError:
            return None
    if member.compress_type != zipfile.ZIP_STORED:
        return None
    with file.open("rb") as opened:
        opened.seek(member.header_offset + 26)  # lengths of the name and the extra field, in the local header only
        lengths = opened.read(4)
        skipped = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        opened.seek(member.header_offset + 30 + skipped)
        version = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(opened)
        begin = opened.tell()
    return np.memmap(file, dtype, "c", begin, shape, "F" if fortran else "C")


def member(file: Path, name: str, scratch: Path) -> np.ndarray | None:
    """Returns an array of a ``.npz`` file, memory-mapped, or None; a compressed array is unpacked to `scratch`."""
    found = map_member(file, name)
    if found is not None:
        return found
    with zipfile.ZipFile(file) as archive:
        if f"{name}.npy" not in archive.namelist():
            return None
        target = scratch / f"{file.stem}.{name}.npy"
        if not target.exists():
            scratch.mkdir(parents=True, exist_ok=True)
            with appearing(target) as new, archive.open(f"{name}.npy") as packed, new.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 24)
    return map_file(target)


class Table:
    """Numeric table in one or several concatenated files: CSV, Parquet or ``.npy``; read in pieces.

    Args:
        files: files with suffix ``.npy`` (``[n]`` or ``[n, columns]``) or ``.parquet``; other files are CSV, optionally ``.gz``.
        columns: names of the columns to read; default: all.
        delimiter: delimiter of CSV files.
        header: whether the first line of CSV files has column names.
    """

    def __init__(
        self, files: Sequence[Path], columns: Sequence[str] | None = None, delimiter: str = ",", header: bool | None = None
    ) -> None:
        self._files, self._columns, self._delimiter, self._header = files, columns, delimiter, header

    def pieces(self) -> Iterator[tuple[Path, int, np.ndarray]]:
        """Yields the file, its first row, and the values of each piece, ``[n, columns]`` or ``[n]``."""
        for file in self._files:
            row = 0
            for piece in self._of(file):
                yield file, row, piece
                row += len(piece)

    def _of(self, file: Path) -> Iterator[np.ndarray]:
        if file.suffix == ".npy":
            array = map_file(file)
            for begin in range(0, len(array), ROWS):
                yield array[begin : begin + ROWS]
            return
        try:
            for batch in self._batches(file):
                yield self._numbers(file, batch)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error}.") from error

    def _batches(self, file: Path) -> Iterator[Any]:
        try:
            import pyarrow
            import pyarrow.csv
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(NEEDS_PYARROW.format(file)) from error
        try:
            if file.suffix in (".parquet", ".pq"):
                yield from pyarrow.parquet.ParquetFile(file).iter_batches(ROWS, columns=self._columns)
                return
            named = _names_columns(file) if self._header is None else self._header
            read = pyarrow.csv.ReadOptions(block_size=1 << 24, autogenerate_column_names=not named)
            parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter)
            convert = pyarrow.csv.ConvertOptions(include_columns=self._columns)
            yield from pyarrow.csv.open_csv(str(file), read, parse, convert)
        except (pyarrow.ArrowInvalid, KeyError) as error:
            raise ValueError(f"{file} cannot be read as a table of numbers: {error}.") from error

    def _numbers(self, file: Path, batch: Any) -> np.ndarray:
        arrays = []
        for name, column in self._checked_columns(file, batch):
            width = getattr(column.type, "list_size", None)
            values = (column.flatten() if width else column).to_numpy(zero_copy_only=False)
            if values.dtype.kind not in "biuf":
                raise ValueError(f"{file}: column {name!r} must have numbers, got {column.type}.")
            arrays.append(values.reshape(-1, width) if width else values)
        return arrays[0] if len(arrays) == 1 else np.column_stack(arrays)

    def _checked_columns(self, file: Path, batch: Any) -> Iterator[tuple[str, Any]]:
        """Yields the name and values of each column; Parquet readers ignore unknown names."""
        missing = {*(self._columns or ())} - {*batch.schema.names}
        if missing:
            raise ValueError(f"{file} has no column {sorted(missing)[0]!r}; it has {', '.join(batch.schema.names[:9])}.")
        for name, column in zip(batch.schema.names, batch.columns):
            if column.null_count:
                raise ValueError(f"{file} has no value in {column.null_count} rows of column {name!r}. Fill them in.")
            yield name, column


def _names_columns(file: Path) -> bool:
    """Returns whether the first line of a CSV file has column names, that is, letters."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as opened:
        return any(character.isalpha() for character in opened.readline())


def write_rows(file: Path, table: Table) -> np.ndarray:
    """Returns the rows of a table, ``[n]`` or ``[n, columns]``, written to a ``.npy`` file once and memory-mapped."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with appearing(file) as new, new.open("wb") as out:
            out.write(bytes(_HEADER))
            rows, first = 0, None
            for source, row, piece in table.pieces():
                if first is None:
                    first = piece[:0]
                if piece.shape[1:] != first.shape[1:] or piece.dtype.kind != first.dtype.kind:
                    raise ValueError(
                        f"{source}, row {row}: rows must be {first.dtype} {list(first.shape[1:])}, as in the files before, got "
                        f"{piece.dtype} {list(piece.shape[1:])}."
                    )
                piece.astype(first.dtype).tofile(out)
                rows += len(piece)
            shape = (rows, *(() if first is None else first.shape[1:]))
            _end(out, shape, np.dtype(np.float32) if first is None else first.dtype)
    return map_file(file)


def write_edges(file: Path, table: Table, num_nodes: int | None) -> np.ndarray:
    """Returns the edges in a table's first two columns, ``[2, E]``, written to a ``.npy`` file once and mapped.

    The dtype is int32 if `num_nodes` is known and fits.

    Raises:
        ValueError: for an id that is not a node; names the file and row.
    """
    dtype = np.dtype(np.int64 if num_nodes is None or num_nodes > 2**31 else np.int32)
    if not file.exists():
        targets = file.with_name(f".{file.name}.targets")
        file.parent.mkdir(parents=True, exist_ok=True)
        with appearing(file) as new, new.open("wb") as out, targets.open("wb") as later:
            out.write(bytes(_HEADER))
            rows = 0
            for source, row, piece in table.pieces():
                if piece.ndim != 2 or piece.shape[1] < 2 or piece.dtype.kind not in "iu":
                    raise ValueError(
                        f"{source} must hold two columns of whole numbers, source and target (got {piece.dtype} "
                        f"{list(piece.shape)} from row {row} on)."
                    )
                check_ids(source, row, piece[:, :2], num_nodes)
                piece[:, 0].astype(dtype).tofile(out)
                piece[:, 1].astype(dtype).tofile(later)
                rows += len(piece)
            later.flush()
            with targets.open("rb") as opened:
                shutil.copyfileobj(opened, out, 1 << 24)
            _end(out, (2, rows), dtype)
        targets.unlink()
    return map_file(file)


def check_ids(file: Path, row: int, ids: np.ndarray, num_nodes: int | None) -> None:
    """Raises a ValueError with the file and the row if an id in `ids`, ``[n, ...]``, is not a node."""
    if not len(ids) or (ids.min() >= 0 and (num_nodes is None or ids.max() < num_nodes)):
        return
    wrong = ids < 0 if num_nodes is None else (ids < 0) | (ids >= num_nodes)
    first = int(np.flatnonzero(wrong.reshape(len(ids), -1).any(1))[0])
    there = "" if num_nodes is None else f" from 0 to {num_nodes - 1}, for {num_nodes} nodes"
    raise ValueError(f"{file}, row {row + first}: edges must be pairs of node ids{there}, got {ids[first].tolist()}.")


def _end(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Write the header of a ``.npy`` file into the reserved space."""
    descr = np.lib.format.dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin1")
    head = np.lib.format.magic(1, 0) + (_HEADER - 10).to_bytes(2, "little")
    out.seek(0)
    out.write(head + text.ljust(_HEADER - len(head) - 1) + b"\n")


_HEADER = 256
"""Reserved bytes for the header of a file whose number of rows is not known yet."""


def files_of(folder: Path, pattern: str) -> list[Path]:
    found = sorted(map(Path, glob.glob(str(folder / pattern))))
    if not found:
        raise ValueError(f"{folder} has no file {pattern}, which its description lists. Add it, or correct the description.")
    return found


class TransposedTable(Table):
    """Edges in a ``.npy`` file ``[2, E]``, as rows."""

    def pieces(self) -> Iterator[tuple[Path, int, np.ndarray]]:
        array = map_file(self._files[0])
        for begin in range(0, array.shape[1], ROWS):
            yield self._files[0], begin, array[:, begin : begin + ROWS].T


def read_edges(files: Sequence[Path], scratch: Path, num_nodes: int | None, **options: Any) -> torch.Tensor:
    """Returns edges ``[2, E]``: mapped if one ``.npy`` file has this layout with contiguous rows, else rewritten."""
    table = Table(files, **options)
    if len(files) == 1 and files[0].suffix == ".npy":
        array = map_file(files[0])
        if array.ndim != 2 or 2 not in array.shape:
            raise ValueError(f"{files[0]} must hold edges, [2, E] (got {list(array.shape)}).")
        if array.shape[0] == 2 and array.flags.c_contiguous and array.dtype in (np.int32, np.int64):
            return torch.from_numpy(array)
        table = TransposedTable(files) if array.shape[0] == 2 else table
    return torch.from_numpy(write_edges(scratch / "edge_index.npy", table, num_nodes))


def read_rows(files: Sequence[Path], scratch: Path, name: str, **options: Any) -> torch.Tensor:
    """Returns the rows of an attribute: mapped if they are in one ``.npy`` file, else written to a file in `scratch`.

    A single column of ``x`` is a matrix.
    """
    of_one = len(files) == 1 and files[0].suffix == ".npy"
    rows = torch.from_numpy(map_file(files[0]) if of_one else write_rows(scratch / f"{name}.npy", Table(files, **options)))
    return rows.view(-1, 1) if name == "x" and rows.dim() == 1 else rows
