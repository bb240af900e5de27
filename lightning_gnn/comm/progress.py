"""Where a rank is in its training, kept where others can still read it when its process has ended without a word."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final

PHASES: Final = (
    "",  # nothing is known
    "set-up",
    "the sanity check",
    "the epoch's start",
    "forward",
    "backward",
    "the optimizer's step",
    "validation",
    "the epoch's end",
    "test",
    "prediction",
)

_FORM = struct.Struct("qq")  # the epoch, or -1, and the phase


class Progress:
    """The epoch and the phase that a rank is in; to write them costs no more than to store two numbers.

    Attributes:
        address: where other processes of this machine find it; empty if they cannot.
    """

    def __init__(self) -> None:
        self.address = ""
        self._memory: mmap.mmap | bytearray = bytearray(_FORM.size)
        if hasattr(os, "memfd_create"):  # Linux
            descriptor = os.memfd_create("lightning_gnn")  # open as long as this process lives
            os.truncate(descriptor, _FORM.size)
            self._memory = mmap.mmap(descriptor, _FORM.size)
            self.address = f"{os.getpid()} {descriptor}"
        self.at("")

    @classmethod
    def of(cls, address: str) -> Progress | None:
        """Returns what another process writes, to be read after its end, too; None where that cannot be."""
        found = cls.__new__(cls)
        found.address = address
        try:
            pid, descriptor = map(int, address.split())
            with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
                found._memory = mmap.mmap(file.fileno(), _FORM.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # another user's, say, or it has ended
            return None
        return found

    def at(self, phase: str, epoch: int | None = None) -> None:
        """Notes a phase, one of :data:`PHASES`, and the epoch of a fit."""
        _FORM.pack_into(self._memory, 0, -1 if epoch is None else epoch, PHASES.index(phase))

    def __str__(self) -> str:
        epoch, phase = _FORM.unpack_from(self._memory)
        return ", ".join(filter(None, [f"epoch {epoch}" if epoch >= 0 else "", PHASES[phase]]))


_here: tuple[int, Progress] | None = None


def here() -> Progress:
    """Returns this process's own; a fork has another one than its parent."""
    global _here
    if _here is None or _here[0] != os.getpid():
        _here = os.getpid(), Progress()
    return _here[1]
