"""Whether an entry of the store is what :func:`~lightning_gnn.data.store.write_store` wrote: sizes, checksums, headers and ids.

Checksums find damage, not malice: whoever can write an entry can work them out again, and put another graph there. But nothing is
unpickled, no file outside the folder is read, and no id reaches beyond the rows that it is for.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lightning_gnn.arguments import shown
from lightning_gnn.partition.types import types_of

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    r"\{'descr': '(\|b1|\|[iu]1|<[iu][248]|<f[248]|<c8|<c16)', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,18}, )*(?:\d{1,18},?)?)\), \} *\n"
)


class Summed:
    """A file that works out the checksum of what is written to it, so that nothing is read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.checksum = file, 0, 0

    def write(self, chunk: bytes | memoryview) -> int:
        self.size += len(chunk)
        self.checksum = zlib.crc32(chunk, self.checksum)
        return self._file.write(chunk)


def checksum_of(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def plain_size(file: Path) -> int | None:
    """Returns the size of a file in bytes; None if there is none."""
    try:
        found = os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{file} is no plain file")
    return found.st_size


def read_array(file: Path, by_rows: bool = False) -> np.ndarray:
    """Returns a ``.npy`` file, memory-mapped (copy on write); raises ValueError for another file, and for a header that lies.

    If it is read `by_rows`, here and there, the system reads no more than these: by default it reads megabytes ahead.

    ``np.load`` would parse the header by ``ast``, which in Python 3.11 may fail where two threads use it at once.
    """
    with file.open("rb") as opened:
        start = opened.read(len(_MAGIC) + 2)
        text = opened.read(int.from_bytes(start[len(_MAGIC) :], "little")).decode("latin1")  # 64 KB at most
        begin = opened.tell()
    found = _HEADER.fullmatch(text)
    if not start.startswith(_MAGIC) or found is None:
        raise ValueError(f"{file} has no header of a .npy file of numbers")
    dtype, shape = np.dtype(found[1]), tuple(int(size) for size in found[3].split(",") if size.strip())
    size = begin + dtype.itemsize * math.prod(shape)
    # Numpy multiplies the sizes beside a 0, too.
    if size != file.stat().st_size or math.prod(max(each, 1) for each in shape) >= 2**48:
        raise ValueError(f"{file}: by its header, {list(shape)} of {dtype}, it has {size} bytes, not {file.stat().st_size}")
    array = np.memmap(file, dtype, "c", begin, shape, "F" if found[2] == "True" else "C")
    if by_rows and array.nbytes and hasattr(mmap, "MADV_RANDOM"):
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return array


def check_names(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError unless the files of a manifest are those of its graph, and lie in its folder."""
    parts, files = range(manifest["layout"]["parts"]), manifest["files"]
    expected = ["n_id", "e_id", *(["holders"] if manifest["layout"]["kind"] == "vertex_cut" else [])]
    expected += [f"part{part}.{what}" for part in parts for what in ("edge_index", "halo")]
    expected += [f"{kind}.{name}" for kind, names in manifest["attributes"].items() for name in names]
    wrong = [*({f"{name}.npy" for name in expected} ^ files.keys()), *(n for n in files if Path(n).name != n)]
    if wrong:
        raise ValueError(f"files is not what this graph has in its folder: look at {shown(sorted(wrong)[:2])}")


def check_arrays(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Reads the arrays of an entry whose files are in order; raises ValueError for one that has rows too many or too few, or ids
    that are out of range."""
    types, parts = types_of(manifest), range(manifest["layout"]["parts"])
    own, counts = np.diff(manifest["offsets"]).tolist(), np.diff(manifest["edge_offsets"]).tolist()

    def arrays() -> Iterator[tuple[str, np.ndarray, int, int | None]]:
        """Yields arrays: whose, what is in them, how many there must be, and what ids stay below."""
        for name, kinds in (("n_id", [*types.nodes]), ("e_id", [*types.edges])):
            totals = [types.total(kind) for kind in kinds]  # type: ignore[attr-defined]
            for piece, total in zip(np.split(read(name), np.cumsum(totals)[:-1]), totals):
                yield name, piece, total, total
        for part in parts:
            halo, (source, target) = read(f"part{part}.halo"), read(f"part{part}.edge_index")
            yield f"part{part}.halo", halo, halo.size, sum(own)
            yield f"part{part}.edge_index", source, counts[part], own[part] + halo.size
            yield f"part{part}.edge_index", target, counts[part], own[part]
        if "holders.npy" in manifest["files"]:
            yield "holders", read("holders"), sum(counts), len(parts)
        for kind in (*types.nodes, *types.edges):
            key = types.key(kind)
            yield from ((f"{key}.{n}", read(f"{key}.{n}"), types.total(kind), None) for n in manifest["attributes"][key])

    def read(name: str) -> np.ndarray:
        return read_array(folder / f"{name}.npy")

    for name, array, length, end in arrays():
        if array.shape[:1] != (length,):
            raise ValueError(f"{folder / name}.npy must have {length} rows (its shape is {list(array.shape)})")
        if end is not None and array.size and not (array.min() >= 0 and array.max() < end):
            raise ValueError(f"{folder / name}.npy holds ids from {array.min()} to {array.max()}, not from 0 to {end - 1}")
