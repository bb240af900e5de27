"""Ranks of a machine that compute in turns: what one has in memory in its turn, it gives up before another has that room.

More ranks have a turn than there are cores for: while one waits for the disk, another computes.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_gnn.comm.group import World

_LOOK_S = 1e-3  # between looks whether there is a turn; only the next rank looks


def _nothing() -> None:
    pass


class Turns:
    """A rank's turns: it has one while :meth:`taken` is open, but not while it waits for others. In its turn it has room in
    memory, and a core, but not while it waits for the disk.

    Locks of a file, which the system takes away from a process that ends. All ranks make it.

    Args:
        world: the ranks.
        near: those of this machine, this one among them.
        rooms: how many of them have their turns at the same time.
        cores: how many of those compute at the same time.
        folder: where the file is, which has no name once all have opened it.

    Attributes:
        behind: called before another rank has this one's room, and while another may have its core.
    """

    def __init__(self, world: World, near: Sequence[int], rooms: int, cores: int, folder: Path) -> None:
        self.behind: Callable[[], None] = _nothing
        first, own = min(near), ""
        if world.rank == first:
            descriptor, own = tempfile.mkstemp(prefix=".turns.", dir=folder)
            os.close(descriptor)
        name = world.all_gather_object(own)[first]
        self._file = os.open(name, os.O_RDWR)
        world.all_gather_object("")  # all have opened it
        if own:
            os.unlink(own)
        self._room, self._core = _Lock(self._file, 0, rooms), _Lock(self._file, rooms + 1, cores)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for this rank's turn, which ends with the context; part of one that is open already."""
        if self._room.held:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            if self._room.held:
                self._end()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """While open, others have their turns."""
        if not self._room.held:
            yield
            return
        self._end()
        yield
        self._begin()  # not after an error: others may never end their turns

    @contextmanager
    def at_the_disk(self) -> Iterator[None]:
        """While open, another rank may have this one's core; its room it keeps."""
        if not self._core.held:
            yield
            return
        self._core.give()
        yield
        self._core.take()

    def _begin(self) -> None:
        self._room.take()
        self._core.take()

    def _end(self) -> None:
        self._core.give()
        self.behind()
        self._room.give()

    def close(self) -> None:
        """Ends it; what this rank still does, it does beside others."""
        self.behind = _nothing
        if self._room.held:
            self._end()
        os.close(self._file)


class _Lock:
    """Places of which each may be held by one process, as bytes of a file; the byte behind them is who takes the next.

    Attributes:
        held: whether this process holds one.
    """

    def __init__(self, file: int, begin: int, places: int) -> None:
        self._file, self._begin, self._places, self._place = file, begin, places, -1

    @property
    def held(self) -> bool:
        return self._place >= 0

    def take(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._begin + self._places)  # then it is the next
        while not self.held:
            for place in range(self._begin, self._begin + self._places):
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                except OSError:  # another's
                    continue
                self._place = place
                break
            else:
                time.sleep(_LOOK_S)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._begin + self._places)

    def give(self) -> None:
        if self.held:  # as it is not after an error at the disk
            place, self._place = self._place, -1
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
