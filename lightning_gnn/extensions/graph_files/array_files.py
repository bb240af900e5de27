"""Arrays in files: mapped where a file holds the numbers as they are, and else written once as a ``.npy`` file that is.

What is mapped is read from the disk when it is looked at and can be dropped from memory again: a graph of such arrays takes no
memory for its edges.
"""

from __future__ import annotations

import gzip
import os
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS = 1 << 20
"""Rows of a table, or of an array that is copied, that are in memory at once."""

NEEDS_PYARROW = "{} is read with pyarrow, which is not installed: pip install lightning-gnn[files]."


def mapped(file: Path) -> np.ndarray:
    """Returns a ``.npy`` file, or a tensor in a ``.pt`` file, memory-mapped (copy on write)."""
    try:
        if file.suffix == ".pt":
            return torch.load(file, mmap=True, weights_only=True).numpy()
        return np.load(file, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read as a {file.suffix} file of numbers: {error}.") from error


def mapped_member(file: Path, name: str) -> np.ndarray | None:
    """Returns an array of a ``.npz`` file, memory-mapped; None where it is compressed, or there is none of that name."""
    with zipfile.ZipFile(file) as archive:
        try:
            member = archive.getinfo(f"{name}.npy")
        except KeyError:
            return None
    if member.compress_type != zipfile.ZIP_STORED:
        return None
    with file.open("rb") as opened:
        opened.seek(member.header_offset + 26)  # the lengths of the name and of what follows it, of this header alone
        lengths = opened.read(4)
        skipped = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        opened.seek(member.header_offset + 30 + skipped)
        version = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(opened)
        begin = opened.tell()
    return np.memmap(file, dtype, "c", begin, shape, "F" if fortran else "C")


def member(file: Path, name: str, scratch: Path) -> np.ndarray | None:
    """Returns an array of a ``.npz`` file, memory-mapped: unpacked to `scratch` where it is compressed; None without it."""
    found = mapped_member(file, name)
    if found is not None:
        return found
    with zipfile.ZipFile(file) as archive:
        if f"{name}.npy" not in archive.namelist():
            return None
        target = scratch / f"{file.stem}.{name}.npy"
        if not target.exists():
            with _appearing(target) as new, archive.open(f"{name}.npy") as packed, new.open("wb") as out:
                while chunk := packed.read(1 << 24):
                    out.write(chunk)
    return mapped(target)


@contextmanager
def _appearing(file: Path) -> Iterator[Path]:
    """Yields the path of a file that has its name only when it is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield new
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


class Table:
    """Rows of numbers in files, one after the other: CSV, Parquet or ``.npy``; read a piece at a time.

    Args:
        files: by their names' ends: ``.npy`` (``[n]`` or ``[n, columns]``), ``.parquet``, and else CSV, also ``.gz``.
        columns: of which columns of a table with names; by default all.
        delimiter: of CSV files.
        header: whether their first line names the columns.
    """

    def __init__(
        self,
        files: Sequence[Path],
        columns: Sequence[str] | None = None,
        delimiter: str = ",",
        header: bool | None = None,
    ) -> None:
        self._files, self._columns, self._delimiter, self._header = files, columns, delimiter, header

    def pieces(self) -> Iterator[tuple[Path, int, np.ndarray]]:
        """Yields pieces ``[n, columns]`` or ``[n]``, and of which file, from which of its rows on."""
        for file in self._files:
            row = 0
            for piece in self._of(file):
                yield file, row, piece
                row += len(piece)

    def _of(self, file: Path) -> Iterator[np.ndarray]:
        if file.suffix == ".npy":
            array = mapped(file)
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
        for name, column in zip(batch.schema.names, batch.columns):
            if column.null_count:
                raise ValueError(f"{file} has no value in {column.null_count} rows of column {name!r}. Fill them in.")
            width = getattr(column.type, "list_size", None)
            values = (column.flatten() if width else column).to_numpy(zero_copy_only=False)
            if values.dtype.kind not in "biuf":
                raise ValueError(f"{file}: column {name!r} holds {column.type}, and numbers are needed.")
            arrays.append(values.reshape(-1, width) if width else values)
        return arrays[0] if len(arrays) == 1 else np.column_stack(arrays)


def _names_columns(file: Path) -> bool:
    """Returns whether the first line of a CSV file names its columns: numbers do not."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as opened:
        return any(character.isalpha() for character in opened.readline())


def write_rows(file: Path, table: Table) -> np.ndarray:
    """Returns the rows of a table, ``[n]`` or ``[n, columns]``, written to a ``.npy`` file once and memory-mapped."""
    if not file.exists():
        with _appearing(file) as new, new.open("wb") as out:
            out.write(bytes(_HEADER))
            rows, first = 0, None
            for source, row, piece in table.pieces():
                if first is None:
                    first = piece[:0]
                if piece.shape[1:] != first.shape[1:] or piece.dtype.kind != first.dtype.kind:
                    raise ValueError(
                        f"{source}, row {row}: {piece.dtype} {list(piece.shape[1:])} per row, where the files before have "
                        f"{first.dtype} {list(first.shape[1:])}."
                    )
                piece.astype(first.dtype).tofile(out)
                rows += len(piece)
            shape = (rows, *(() if first is None else first.shape[1:]))
            _end(out, shape, np.dtype(np.float32) if first is None else first.dtype)
    return mapped(file)


def write_edges(file: Path, table: Table, num_nodes: int | None) -> np.ndarray:
    """Returns the pairs of ids in a table's first two columns, ``[2, E]``, written to a ``.npy`` file once and mapped.

    They are int32 where that holds `num_nodes`, if these are known.

    Raises:
        ValueError: an id that is no node's, with its file and row.
    """
    dtype = np.dtype(np.int64 if num_nodes is None or num_nodes > 2**31 else np.int32)
    if not file.exists():
        targets = file.with_name(f".{file.name}.targets")
        with _appearing(file) as new, new.open("wb") as out, targets.open("wb") as later:
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
                while chunk := opened.read(1 << 24):
                    out.write(chunk)
            _end(out, (2, rows), dtype)
        targets.unlink()
    return mapped(file)


def check_ids(file: Path, row: int, ids: np.ndarray, num_nodes: int | None) -> None:
    """Raises a ValueError that names the file and the row for ids ``[n, ...]`` that are no node's."""
    if not len(ids) or (ids.min() >= 0 and (num_nodes is None or ids.max() < num_nodes)):
        return
    wrong = ids < 0 if num_nodes is None else (ids < 0) | (ids >= num_nodes)
    first = int(np.flatnonzero(wrong.reshape(len(ids), -1).any(1))[0])
    there = "" if num_nodes is None else f"; there are {num_nodes} nodes, 0 to {num_nodes - 1}"
    raise ValueError(f"{file}, row {row + first}: {ids[first].tolist()} is no pair of ids of nodes{there}.")


def _end(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Writes the header of a ``.npy`` file in the room that was left for it, and brings the file to the disk."""
    descr = np.lib.format.dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin1")
    head = np.lib.format.magic(1, 0) + (_HEADER - 10).to_bytes(2, "little")
    out.seek(0)
    out.write(head + text.ljust(_HEADER - len(head) - 1) + b"\n")
    out.flush()
    os.fsync(out.fileno())


_HEADER = 256
