"""What ``host_memory=`` has the ranks of a strategy do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.arguments import checked_bytes
from lightning_gnn.comm.buffers import Buffers
from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import SharedMemory
from lightning_gnn.extensions.out_of_core.files import FileMemory, WatchdogOfTurns
from lightning_gnn.extensions.out_of_core.paging import in_turns


class _FreedBuffers(Buffers):
    """What rows are received into is freed between two calls of an exchange."""

    @override
    def give_back(self, buffer: Tensor) -> None:
        pass


class OutOfCoreWorld(World):
    """Ranks of one machine that compute in turns, and have so many bytes in memory, all together.

    Args:
        rank, size, device, timeout: see :class:`~lightning_gnn.comm.group.World`.
        folder: where ranks have what there is no memory for, and their messages.
        most_bytes: see :func:`~lightning_gnn.extensions.out_of_core.paging.in_turns`.

    Attributes:
        turns: of this rank.
    """

    _watchdog = WatchdogOfTurns
    watch: WatchdogOfTurns

    def __init__(
        self, rank: int, size: int, device: torch.device, timeout: timedelta, folder: Path, most_bytes: int
    ) -> None:
        self._folder, self._in_turns = folder, ExitStack()
        super().__init__(rank, size, device, timeout)
        try:
            self.turns = self._in_turns.enter_context(in_turns(self, folder, most_bytes)).turns
        except BaseException:
            self.close()
            raise
        self._in_turns.enter_context(self.watch.giving_up(self.turns.given_up))

    @override
    def _make_memory(self) -> SharedMemory:
        return FileMemory(self.rank, self.all_gather_object, self.watch, self._folder)

    @override
    def buffers(self) -> Buffers:
        return _FreedBuffers(self.device)

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
        host_memory: bytes of all ranks together, or a text such as ``"8GB"``.
        folder: where they have what there is no room for; None for the Trainer's ``default_root_dir``.
        shared_memory: whether ranks exchange through shared memory.

    Attributes:
        most_bytes: of all ranks together.

    Raises:
        ValueError: of these arguments one does not go with another.
    """

    def __init__(self, host_memory: int | str | None, folder: str | Path | None, shared_memory: bool) -> None:
        if host_memory is None:
            raise ValueError("host_memory_dir is where ranks have what host_memory has no room for: set that, too.")
        self.most_bytes, self._folder = checked_bytes("host_memory", host_memory), folder
        if not shared_memory:
            raise ValueError(
                "host_memory needs ranks that exchange through shared memory. Leave shared_memory=False out."
            )
        self._world: OutOfCoreWorld | None = None

    def check(self, devices: Sequence[torch.device], machines: int) -> None:
        """Raises ValueError for ranks that cannot compute one after the other: of these devices of each of so many machines."""
        kinds = sorted({device.type for device in devices})
        if kinds != ["cpu"] or machines > 1 or len(devices) == 1:
            raise ValueError(
                "host_memory is for several CPU ranks of one machine: each has a part of the graph, and they compute one after "
                f"the other (got num_nodes={machines}, devices={len(devices)} on {', '.join(kinds)}). Set "
                'Trainer(accelerator="cpu", devices=8), say.'
            )

    def make_world(
        self, rank: int, size: int, device: torch.device, timeout: timedelta, default_folder: str
    ) -> OutOfCoreWorld:
        """Returns the ranks of a run; all ranks call it."""
        folder = Path(self._folder or default_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._world = OutOfCoreWorld(rank, size, device, timeout, folder, self.most_bytes)
        return self._world

    def turn(self) -> AbstractContextManager[None]:
        """While open, this rank computes, and others that share memory with it wait."""
        assert self._world is not None
        return self._world.turns.taken()
