"""Files without a name, and messages between ranks in them, for ranks that have no memory to keep."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.shared_memory import Segment, SharedMemory
from lightning_gnn.comm.watchdog import Watchdog

_PUNCH_HOLE = 3  # with FALLOC_FL_KEEP_SIZE, see `man fallocate`


def unnamed_file(folder: Path, flags: int = 0) -> int:
    """Returns a descriptor of a new file in a folder, to read and write, which is gone when nothing has it open or mapped."""
    descriptor, name = tempfile.mkstemp(prefix=".lightning_gnn.", dir=folder)
    try:
        return os.open(name, os.O_RDWR | flags)
    finally:
        os.close(descriptor)
        os.unlink(name)


def full_disk(error: OSError) -> Exception:
    """Returns what to raise where a file of host_memory could not be written."""
    if error.errno != errno.ENOSPC:
        return error
    return RuntimeError(
        "The disk of host_memory_dir is full. Name a folder on a larger one, or give ranks more host_memory."
    )


class FileSegment(Segment):
    """Memory in a file without a name, which the system writes and drops as it needs memory."""

    _reserved = 0

    @classmethod
    def create_in(cls, folder: Path, size: int) -> FileSegment:
        fd = unnamed_file(folder)
        os.ftruncate(fd, size)
        return cls(fd, size, owned=True)

    def reserve(self, num_bytes: int) -> None:
        """Takes the place of so many bytes on the disk: to write where there is none would end the process."""
        if self._reserved < num_bytes:
            try:
                os.posix_fallocate(self.fd, 0, num_bytes)
            except OSError as error:
                raise full_disk(error) from error
            self._reserved = num_bytes

    def give_up(self) -> None:
        """Gives what is there back to the disk, unwritten where it has not been written yet; nobody reads it any more."""
        begin, end = ctypes.c_long(0), ctypes.c_long(self.size)
        if self._reserved and ctypes.CDLL(None).fallocate(self.fd, _PUNCH_HOLE, begin, end) == 0:
            self._reserved = 0


class WatchdogOfTurns(Watchdog):
    """A watchdog of a rank that computes in turns: while it waits, others may compute that would not beside it."""

    given_up: Callable[[], AbstractContextManager[None]] = nullcontext

    @contextmanager
    def giving_up(self, turn: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """While open, waits open `turn`."""
        self.given_up = turn
        try:
            yield
        finally:
            self.given_up = nullcontext

    @contextmanager
    @override
    def waiting(self, peer: int | None = None) -> Iterator[None]:
        with super().waiting(peer), self.given_up():
            yield


class FileMemory(SharedMemory):
    """Mailboxes whose messages are in files.

    Args:
        rank, exchange_objects, watch: see :class:`~lightning_gnn.comm.shared_memory.SharedMemory`.
        folder: where the files are.
    """

    _watch: WatchdogOfTurns
    _leaves = False  # messages lie where they are while this rank waits

    def __init__(
        self, rank: int, exchange_objects: Callable[[Any], list[Any]], watch: WatchdogOfTurns, folder: Path
    ) -> None:
        super().__init__(rank, exchange_objects, watch)
        self._folder = folder

    @override
    def _new_segment(self, size: int) -> FileSegment:
        return FileSegment.create_in(self._folder, size)

    @override
    def scratch(self, num_bytes: int) -> Tensor:
        found = super().scratch(num_bytes)
        own, other = self._outboxes[self._current].segment, self._outboxes[1 - self._current]
        if isinstance(other.segment, FileSegment) and all(self._has_taken(*each) for each in other.waits_for.items()):
            other.segment.give_up()
        assert isinstance(own, FileSegment)
        own.reserve(num_bytes)
        return found

    @override
    def receive_all(self, expected: Sequence[tuple[int, int]]) -> None:
        """Waits until all have come, and it is this rank's turn again. They lie where they are until then: what they are copied
        to stays in memory for what uses it."""
        with self._watch.given_up():
            self._leaves = True
            for peer, number in expected:
                self._wait(peer, lambda peer=peer, number=number: self._has_come(peer, number))  # type: ignore[misc]
            self._leaves = False
        super().receive_all(expected)

    @override
    def _take_in(self) -> None:
        if not self._leaves:
            super()._take_in()

    def _has_come(self, peer: int, number: int) -> bool:
        """Returns whether a message is in its mailbox, or was accepted; accepts those before it."""
        while self._received[peer] < number and self._has_posted(peer):
            if self._received[peer] == number - 1:
                return True
            self._accept(peer)
        return self._received[peer] >= number
