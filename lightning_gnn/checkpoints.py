"""Checkpoints are whole or not there: written beside the old file and renamed, looked through before they are read."""

from __future__ import annotations

import os
import platform
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import lightning.pytorch as pl
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_gnn.private_lightning import checkpoint_parser


class DamagedCheckpointError(RuntimeError):
    """A checkpoint is not whole, or not as it was written."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes and reads checkpoints as Lightning does, ``torch.save`` files, but never half of one.

    Lightning's own writes to the system's temporary folder and moves the file; from one file system to another, a move is a
    copy, which may end half-way. Here the new file is written in the folder where it shall be, is on the disk before it takes
    the old one's name, and has the mode of any new file. Files are checked against the checksums that ``torch.save`` writes;
    ``torch.load`` does not. What is not on a local file system (``s3://``) goes Lightning's way.

    Raises:
        DamagedCheckpointError: by loading, for a file that is cut off, or has other bytes than were written.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_parts_of_the_dead(target)
        part = target.with_name(f".{target.name}.{platform.node()}.{os.getpid()}.{uuid4().hex}.part")
        try:
            with open(part, "xb") as file, _checksums():
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        if os.name == "posix":  # the name, too, is on the disk
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        file = _local(path)
        if file is not None and file.exists():
            damage = damage_of(file)
            if damage:
                other = newest_whole(file)
                hint = f"The newest whole one there is {other}." if other else "No other one there is whole."
                raise DamagedCheckpointError(f"The checkpoint {file} is damaged: {damage}. {hint}")
        return super().load_checkpoint(path, *args, **kwargs)


def _remove_parts_of_the_dead(target: Path) -> None:
    """Removes what processes of this machine have left of a file when they were killed while they wrote it."""
    begin = f".{target.name}.{platform.node()}."
    # No glob, which caches a regular expression of every pattern.
    for name in os.listdir(target.parent):
        if not (name.startswith(begin) and name.endswith(".part")):
            continue
        part, writer = target.with_name(name), name.split(".")[-3]
        if os.name == "posix" and writer.isdigit():
            try:
                os.kill(int(writer), 0)
            except ProcessLookupError:
                part.unlink(missing_ok=True)
            except PermissionError:  # another user's: it runs
                pass


def damage_of(file: Path) -> str:
    """Returns what is wrong with the bytes of a checkpoint; empty if they are as ``torch.save`` wrote them."""
    with open(file, "rb") as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                # With another size a checksum would be left out, and what passes for a folder is not read.
                changed = next((each.filename for each in archive.infolist() if not _stored(each)), None)
                changed = changed or archive.testzip()
            torch.PyTorchFileReader(str(file))  # is stricter about heads, looser about the rest
        except Exception as error:  # of many types, on bytes that make no sense
            return f"it is cut off, or no checkpoint ({type(error).__name__}: {error})"
    return f"its entry {changed!r} has changed" if changed else ""


def _stored(entry: zipfile.ZipInfo) -> bool:
    """Returns whether an entry is what ``torch.save`` makes: a file, not compressed."""
    return entry.file_size == entry.compress_size and not entry.external_attr & 0x10  # the flag of folders in MS-DOS


def newest_whole(file: Path) -> Path | None:
    """Returns the whole checkpoint, other than `file`, that was written last in its folder."""
    others = [each for each in file.parent.glob(f"*{file.suffix}") if each.is_file() and not each.samefile(file)]
    others.sort(key=lambda each: each.stat().st_mtime_ns, reverse=True)
    return next((each for each in others if not damage_of(each)), None)


def with_whole_last(trainer: pl.Trainer | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a Trainer's call, with the newest whole checkpoint where ``"last"`` would be a damaged one.

    Only in a call is it known that ``ckpt_path`` is ``"last"``; so launchers ask, who carry it out.

    Raises:
        DamagedCheckpointError: none in its folder is whole.
    """
    places = [index for index, each in enumerate(args) if isinstance(each, str) and each == "last"]
    if trainer is None or not places:
        return args
    assert trainer.state.fn is not None
    found = checkpoint_parser(trainer)(trainer.state.fn, "last", True, True)
    file = None if found is None else _local(found)
    damage = "" if file is None else damage_of(file)
    if file is None or not damage:
        return args
    other = newest_whole(file)
    if other is None:
        raise DamagedCheckpointError(f'ckpt_path="last" is {file}, which is damaged: {damage}. No other one there is whole.')
    rank_zero_warn(f'ckpt_path="last" is {file}, which is damaged: {damage}. Taken instead, the newest whole one: {other}')
    return tuple(str(other) if index in places else each for index, each in enumerate(args))


def _local(path: Any) -> Path | None:
    """Returns the path of a local file; None for one elsewhere."""
    system, name = url_to_fs(str(path))
    return Path(name) if isinstance(system, LocalFileSystem) else None


@contextmanager
def _checksums() -> Iterator[None]:
    """While open, ``torch.save`` writes checksums, also where somebody has switched them off."""
    options: Any = torch.serialization
    if not hasattr(options, "get_crc32_options"):  # torch before 2.6 always does
        yield
        return
    before = options.get_crc32_options()
    options.set_crc32_options(True)
    try:
        yield
    finally:
        options.set_crc32_options(before)
