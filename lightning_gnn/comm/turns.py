"""Ranks of a machine that compute in turns: what one has in memory while it computes, it gives up before another goes on."""

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
    """A rank's turns: it has one while :meth:`taken` is open, but not while it waits for others.

    Locks of a file, which the system takes away from a process that ends. All ranks make it.

    Args:
        world: the ranks.
        near: those of this machine, this one among them.
        at_once: how many of them compute at the same time.
        folder: where the file is, which has no name once all have opened it.

    Attributes:
        ahead: called when this rank is the next, while others still compute; for what it reads from the disk.
        behind: called before another rank goes on.
    """

    def __init__(self, world: World, near: Sequence[int], at_once: int, folder: Path) -> None:
        self.ahead: Callable[[], None] = _nothing
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
        self._at_once, self._turn = at_once, -1

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for this rank's turn, which ends with the context; part of one that is open already."""
        if self._has:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            if self._has:
                self._end()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """While open, others have their turns."""
        if not self._has:
            yield
            return
        self._end()
        yield
        self._begin()  # not after an error: others may never end their turns

    @property
    def _has(self) -> bool:
        return self._turn >= 0

    def _begin(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._at_once)  # then it is the next
        self.ahead()
        while not self._has:
            for turn in range(self._at_once):
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, turn)
                except OSError:  # another rank's
                    continue
                self._turn = turn
                break
            else:
                time.sleep(_LOOK_S)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._at_once)

    def _end(self) -> None:
        self.behind()
        turn, self._turn = self._turn, -1
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, turn)

    def close(self) -> None:
        """Ends it; what this rank still does, it does beside others."""
        self.ahead = self.behind = _nothing
        if self._has:
            self._end()
        os.close(self._file)
