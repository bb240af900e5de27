"""Checkpoint files of a fit whose epochs may be repeated."""

from __future__ import annotations

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_gnn.checkpoints import local_path, remove_stale_parts


class CheckpointFiles:
    """Record of the files that epochs saved and removed, equal on all ranks.

    A file is removed when the next epoch has a step: until then, the epoch that removed it may be repeated. Files that a repeated
    epoch has saved are removed before.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[int, str]] = []
        self._removed: list[tuple[int, str]] = []

    def save(self, epoch: int, path: str) -> None:
        """Record a file before it is written."""
        self._removed = [each for each in self._removed if each[1] != path]
        if not get_filesystem(path).exists(path):
            self._saved.append((epoch, path))

    def remove(self, epoch: int, path: str) -> None:
        """Record a file that is to be removed."""
        self._removed.append((epoch, path))

    def settle(self, epoch: float, io: CheckpointIO | None) -> None:
        """Remove the files that earlier epochs removed; `io` is None on other ranks than rank 0."""
        if not self._removed and not self._saved:
            return
        if io is not None:
            for path in {path for earlier, path in self._removed if earlier < epoch}:
                io.remove_checkpoint(path)
        self._removed = [each for each in self._removed if each[0] >= epoch]
        self._saved = [each for each in self._saved if each[0] >= epoch]

    def repeat(self, epoch: int, io: CheckpointIO | None) -> None:
        """Remove files that an interrupted epoch has saved, also partly, and keep files that it has removed."""
        for saved_in, path in self._saved:
            file = local_path(path)
            if io is not None and saved_in >= epoch:
                io.remove_checkpoint(path)
                if file is not None and file.parent.is_dir():
                    remove_stale_parts(file)
        self._removed = [each for each in self._removed if each[0] < epoch]
        self._saved = [each for each in self._saved if each[0] < epoch]
