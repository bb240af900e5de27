"""World and arguments of out-of-core training, ``memory_limit=``."""

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
    """Memory in an unlinked file; the system writes and drops its pages when it needs memory."""

    _reserved = 0

    @classmethod
    def create_in(cls, folder: Path, size: int) -> FileSegment:
        fd = unnamed_file(folder)
        os.ftruncate(fd, size)
        return cls(fd, size, owned=True)

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes on the disk, as a write to unavailable disk space would kill the process."""
        if self._reserved < num_bytes:
            try:
                os.posix_fallocate(self.fd, 0, num_bytes)
            except OSError as error:
                raise full_disk(error) from error
            self._reserved = num_bytes

    def give_up(self) -> None:
        """Free the disk space; pages not written yet are discarded. No rank reads the contents any more."""
        begin, end = ctypes.c_long(0), ctypes.c_long(self.size)
        if self._reserved and ctypes.CDLL(None).fallocate(self.fd, _PUNCH_HOLE, begin, end) == 0:
            self._reserved = 0


class WatchdogOfTurns(Watchdog):
    """Watchdog of a rank that computes in turns; while it waits, the rank gives up its turn."""

    release_turn: Callable[[], AbstractContextManager[None]] = nullcontext

    @contextmanager
    @override
    def waiting(self, peer: int | None = None) -> Iterator[None]:
        with super().waiting(peer), self.release_turn():
            yield


class FileMemory(SharedMemory):
    """Mailboxes whose messages are in files.

    Args:
        folder: folder of the files.
        memory_args: see :class:`~lightning_gnn.comm.shared_memory.SharedMemory`.
    """

    _watch: WatchdogOfTurns
    _leaves = False  # messages stay in their mailboxes while this rank waits

    def __init__(self, folder: Path, *memory_args: Any) -> None:
        super().__init__(*memory_args)
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
        """Wait until all messages are available and this rank has its turn again.

        Messages stay in the mailboxes until then, as their copies stay in memory until they are used.
        """
        with self._watch.release_turn():
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
        """Returns whether a message is in its mailbox or was accepted; accepts earlier messages."""
        while self._num_received[peer] < number and self._has_posted(peer):
            if self._num_received[peer] == number - 1:
                return True
            self._accept(peer)
        return self._num_received[peer] >= number


class _FreedBuffers(Buffers):
    """Buffer pool that frees receive buffers between two calls of an exchange."""

    @override
    def give_back(self, buffer: Tensor) -> None:
        pass


class OutOfCoreWorld(World):
    """Ranks of one machine that compute in turns, within `most_bytes` of memory in total.

    Args:
        folder: folder for spilled tensors and messages.
        most_bytes: see :func:`~lightning_gnn.extensions.out_of_core.paging.in_turns`.
        world_args: see :class:`~lightning_gnn.comm.group.World`.

    Attributes:
        turns: turns of this rank.
    """

    _watchdog, buffers = WatchdogOfTurns, _FreedBuffers
    watch: WatchdogOfTurns

    def __init__(self, folder: Path, most_bytes: int, *world_args: Any) -> None:
        self._folder, self._in_turns = folder, ExitStack()
        super().__init__(*world_args)
        try:
            self.turns = self._in_turns.enter_context(in_turns(self, folder, most_bytes)).turns
        except BaseException:
            self.close()
            raise
        self.watch.release_turn = self.turns.release_turn

    @override
    def _make_memory(self) -> SharedMemory:
        return FileMemory(self._folder, self.rank, self.all_gather_object, self.watch)

    @contextmanager
    @override
    def shared_failures(self, message: str) -> Iterator[None]:
        with super().shared_failures(message), self.turns.take_turn():
            yield

    @override
    def close(self) -> None:
        self._in_turns.close()
        super().close()


class OutOfCore:
    """Memory limit shared by the ranks of a strategy on one machine.

    Args:
        memory_limit: bytes of all ranks together, or a string such as ``"8GB"``.
        folder: folder for spilled data; None for the Trainer's ``default_root_dir``.
        shared_memory: whether ranks exchange through shared memory.

    Attributes:
        most_bytes: memory limit of all ranks together, in bytes.

    Raises:
        ValueError: if the arguments are incompatible.
    """

    def __init__(self, memory_limit: int | str | None, folder: str | Path | None, shared_memory: bool) -> None:
        if memory_limit is None:
            raise ValueError("spill_dir is not supported without memory_limit. Set memory_limit, or remove spill_dir.")
        self.most_bytes, self._folder = checked_bytes("memory_limit", memory_limit), folder
        if not shared_memory:
            raise ValueError("memory_limit is not supported with shared_memory=False. Remove shared_memory=False.")
        self._world: OutOfCoreWorld | None = None

    def check(self, devices: Sequence[torch.device], machines: int) -> None:
        """Raises ValueError unless the ranks are several CPU ranks of one machine.

        Args:
            devices: devices of each machine.
            machines: number of machines.
        """
        kinds = sorted({device.type for device in devices})
        if kinds != ["cpu"] or machines > 1 or len(devices) == 1:
            raise ValueError(
                f"memory_limit needs several CPU ranks on one machine, which compute in turn, got num_nodes={machines}, "
                f"devices={len(devices)} on {', '.join(kinds)}. Set "
                'Trainer(accelerator="cpu", devices=8), for example.'
            )

    def make_world(self, default_folder: str, *world_args: Any) -> OutOfCoreWorld:
        """Returns the ranks of a run, see :class:`~lightning_gnn.comm.group.World`. Collective: all ranks must call it."""
        folder = Path(self._folder or default_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._world = OutOfCoreWorld(folder, self.most_bytes, *world_args)
        return self._world

    def turn(self) -> AbstractContextManager[None]:
        """Context manager that takes this rank's turn to compute; other ranks that share its memory wait."""
        assert self._world is not None
        return self._world.turns.take_turn()
