"""Atomic checkpoints: written next to the old file and renamed, and verified before they are loaded."""

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
    """Raised if a checkpoint is incomplete or modified."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Checkpoint IO like Lightning's, with ``torch.save`` files, that never leaves an incomplete file.

    Lightning writes to the system's temporary folder and moves the file. Between file systems, a move is a copy, which may be
    interrupted. Here the new file is written in its final folder, and flushed to disk before it replaces the old file. Its mode
    is the mode of any new file. Files are verified by the checksums of ``torch.save``, which ``torch.load`` does not check. Paths
    on other than local file systems (``s3://``) are handled by Lightning.

    Raises:
        DamagedCheckpointError: on loading, if a file is truncated or modified.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_parts(target)
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
        if os.name == "posix":  # flush the directory entry to disk
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        file = local_path(path)
        if file is not None and file.exists():
            damage = damage_of(file)
            if damage:
                other = newest_whole(file)
                hint = f"The newest whole one there is {other}." if other else "No other one there is whole."
                raise DamagedCheckpointError(f"The checkpoint {file} is damaged: {damage}. {hint}")
        return super().load_checkpoint(path, *args, **kwargs)


def remove_stale_parts(target: Path) -> None:
    """Remove temporary files of this machine's processes that were killed while they wrote the file."""
    begin = f".{target.name}.{platform.node()}."
    # Without glob, which caches a regular expression of every pattern.
    for name in os.listdir(target.parent):
        if not (name.startswith(begin) and name.endswith(".part")):
            continue
        part, writer = target.with_name(name), name.split(".")[-3]
        if os.name == "posix" and writer.isdigit():
            try:
                os.kill(int(writer), 0)
                state = Path(f"/proc/{writer}/stat")
                ended = state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"
            except (ProcessLookupError, FileNotFoundError):
                ended = True
            except PermissionError:  # a process of another user: it runs
                ended = False
            if ended:
                part.unlink(missing_ok=True)


def damage_of(file: Path) -> str:
    """Returns a description of the damage of a checkpoint; empty if its bytes are as ``torch.save`` wrote them."""
    with open(file, "rb") as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                # With another size the checksum is not checked, and entries marked as folders are not read.
                changed = next((each.filename for each in archive.infolist() if not _is_stored(each)), None)
                changed = changed or archive.testzip()
            torch.PyTorchFileReader(str(file))  # stricter about headers than zipfile, less strict otherwise
        except Exception as error:  # invalid bytes raise errors of many types
            return f"it is cut off, or no checkpoint ({type(error).__name__}: {error})"
    return f"its entry {changed!r} has changed" if changed else ""


def _is_stored(entry: zipfile.ZipInfo) -> bool:
    """Returns whether an entry is as ``torch.save`` makes it: a file, not compressed."""
    return entry.file_size == entry.compress_size and not entry.external_attr & 0x10  # MS-DOS flag of folders


def newest_whole(file: Path) -> Path | None:
    """Returns the newest valid checkpoint in the folder, other than `file`."""
    others = [each for each in file.parent.glob(f"*{file.suffix}") if each.is_file() and not each.samefile(file)]
    others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((each for each in others if not damage_of(each)), None)


def with_whole_last(trainer: pl.Trainer | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a Trainer's call, with the newest valid checkpoint if ``"last"`` is damaged.

    Only in a call is it known that ``ckpt_path`` is ``"last"``, so launchers call this function.

    Raises:
        DamagedCheckpointError: the folder has no valid checkpoint.
    """
    places = [index for index, each in enumerate(args) if isinstance(each, str) and each == "last"]
    if trainer is None or not places:
        return args
    assert trainer.state.fn is not None
    found = checkpoint_parser(trainer)(trainer.state.fn, "last", True, True)
    file = None if found is None else local_path(found)
    damage = "" if file is None else damage_of(file)
    if file is None or not damage:
        return args
    other = newest_whole(file)
    if other is None:
        raise DamagedCheckpointError(f'ckpt_path="last" is {file}, which is damaged: {damage}. No other one there is whole.')
    rank_zero_warn(f'ckpt_path="last" is {file}, which is damaged: {damage}. Taken instead, the newest whole one: {other}')
    return tuple(str(other) if index in places else each for index, each in enumerate(args))


def local_path(path: Any) -> Path | None:
    """Returns the path of a local file; None for other file systems."""
    system, name = url_to_fs(str(path))
    return Path(name) if isinstance(system, LocalFileSystem) else None


@contextmanager
def _checksums() -> Iterator[None]:
    """Context manager in which ``torch.save`` writes checksums, even if they are disabled."""
    options: Any = torch.serialization
    if not hasattr(options, "get_crc32_options"):  # torch before 2.6 always writes them
        yield
        return
    before = options.get_crc32_options()
    options.set_crc32_options(True)
    try:
        yield
    finally:
        options.set_crc32_options(before)
