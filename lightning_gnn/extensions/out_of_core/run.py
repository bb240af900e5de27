"""What ``memory_limit=`` has the ranks of a strategy do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.arguments import checked_bytes
from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import Segment, SharedMemory
from lightning_gnn.comm.transport import Buffers
from lightning_gnn.comm.watchdog import Watchdog
from lightning_gnn.extensions.out_of_core.paging import full_disk, in_turns, unnamed_file

_PUNCH_HOLE = 3  # with FALLOC_FL_KEEP_SIZE, see `man fallocate`


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
    @override
    def waiting(self, peer: int | None = None) -> Iterator[None]:
        with super().waiting(peer), self.given_up():
            yield


class FileMemory(SharedMemory):
    """Mailboxes whose messages are in files.

    Args:
        folder: where the files are.
        of_world: see :class:`~lightning_gnn.comm.shared_memory.SharedMemory`.
    """

    _watch: WatchdogOfTurns
    _leaves = False  # messages lie where they are while this rank waits

    def __init__(self, folder: Path, *of_world: Any) -> None:
        super().__init__(*of_world)
        self._folder = folder

    @override
    def _new_segment(self, size: int) -> FileSegment:
        return FileSegment.create_in(self._folder, size)

    @override
    def scratch(self, num_bytes: int, operation: str = "") -> Tensor:
        found = super().scratch(num_bytes, operation)
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
                self._wait(peer, number, self._is_there)
            self._leaves = False
        super().receive_all(expected)

    @override
    def _take_in(self) -> None:
        if not self._leaves:
            super()._take_in()

    def _is_there(self, peer: int, number: int) -> bool:
        """Returns whether a message is in its mailbox, or was accepted; accepts those before it."""
        while self._received[peer] < number and self._has_posted(peer):
            if self._received[peer] == number - 1:
                return True
            self._accept(peer)
        return self._received[peer] >= number


class _FreedBuffers(Buffers):
    """What rows are received into is freed between two calls of an exchange."""

    @override
    def give_back(self, buffer: Tensor) -> None:
        pass


class OutOfCoreWorld(World):
    """Ranks of one machine that compute in turns, and have so many bytes in memory, all together.

    Args:
        folder: where ranks have what there is no memory for, and their messages.
        most_bytes: see :func:`~lightning_gnn.extensions.out_of_core.paging.in_turns`.
        of_run: see :class:`~lightning_gnn.comm.group.World`.

    Attributes:
        turns: of this rank.
    """

    _watchdog, buffers = WatchdogOfTurns, _FreedBuffers
    watch: WatchdogOfTurns

    def __init__(self, folder: Path, most_bytes: int, *of_run: Any) -> None:
        self._folder, self._in_turns = folder, ExitStack()
        super().__init__(*of_run)
        try:
            self.turns = self._in_turns.enter_context(in_turns(self, folder, most_bytes)).turns
        except BaseException:
            self.close()
            raise
        self.watch.given_up = self.turns.given_up

    @override
    def _make_memory(self) -> SharedMemory:
        return FileMemory(self._folder, self.rank, self.all_gather_object, self.watch)

    @contextmanager
    @override
    def together(self, what: str) -> Iterator[None]:
        with super().together(what), self.turns.taken():
            yield

    @override
    def close(self) -> None:
        self._in_turns.close()
        super().close()


class OutOfCore:
    """Has the ranks of a strategy share the memory of a machine.

    Args:
        memory_limit: bytes of all ranks together, or a text such as ``"8GB"``.
        folder: where they have what there is no room for; None for the Trainer's ``default_root_dir``.
        shared_memory: whether ranks exchange through shared memory.

    Attributes:
        most_bytes: of all ranks together.

    Raises:
        ValueError: of these arguments one does not go with another.
    """

    def __init__(self, memory_limit: int | str | None, folder: str | Path | None, shared_memory: bool) -> None:
        if memory_limit is None:
            raise ValueError("spill_dir is where ranks have what memory_limit has no room for: set that, too.")
        self.most_bytes, self._folder = checked_bytes("memory_limit", memory_limit), folder
        if not shared_memory:
            raise ValueError("memory_limit needs ranks that exchange through shared memory. Leave shared_memory=False out.")
        self._world: OutOfCoreWorld | None = None

    def check(self, devices: Sequence[torch.device], machines: int) -> None:
        """Raises ValueError for ranks that cannot compute one after the other: of these devices of each of so many machines."""
        kinds = sorted({device.type for device in devices})
        if kinds != ["cpu"] or machines > 1 or len(devices) == 1:
            raise ValueError(
                "memory_limit is for several CPU ranks of one machine: each has a part of the graph, and they compute one after "
                f"the other (got num_nodes={machines}, devices={len(devices)} on {', '.join(kinds)}). Set "
                'Trainer(accelerator="cpu", devices=8), say.'
            )

    def make_world(self, default_folder: str, *of_run: Any) -> OutOfCoreWorld:
        """Returns the ranks of a run, see :class:`~lightning_gnn.comm.group.World`; all ranks call it."""
        folder = Path(self._folder or default_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._world = OutOfCoreWorld(folder, self.most_bytes, *of_run)
        return self._world

    def turn(self) -> AbstractContextManager[None]:
        """While open, this rank computes, and others that share memory with it wait."""
        assert self._world is not None
        return self._world.turns.taken()
