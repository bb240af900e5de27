"""Processes of the ranks on this machine: where each is in its training, which have ended, and how.

A lost connection does not tell: gloo names a port. Nor does torchrun always: it names one rank that has failed, and where others
have failed because of that before it looks, any of them.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch.distributed as dist

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
_EXIT_STATUS = 49  # its place in /proc/PID/stat, from the state on
_STEP_S = 0.02


class Progress:
    """The epoch and the phase that a rank is in, in memory that other processes can read after this one has ended.

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
        """Returns the progress of another process; None where it cannot be read."""
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
# Kept when ranks separate after set-up, as workers of gossip do.
_pids: dict[int, int] = {}
_progress: dict[int, Progress | None] = {}


def here() -> Progress:
    """Returns this process's own; a fork has another one than its parent."""
    global _here
    if _here is None or _here[0] != os.getpid():
        _here = os.getpid(), Progress()
    return _here[1]


def meet(store: dist.Store, rank: int, size: int, machine: str | None) -> None:
    """Learns the processes of the ranks on this machine, before any two are connected; waits until all have called it.

    Args:
        store: of these ranks only.
        rank, size: of this process.
        machine: equal for processes that see each other; None where they cannot.
    """
    store.set(f"process/{rank}", json.dumps([os.getpid(), machine, here().address]))
    found = [json.loads(value) for value in store.multi_get([f"process/{r}" for r in range(size)])]
    _pids.clear()
    _progress.clear()
    for peer, (pid, where, address) in enumerate(found):
        if machine is not None and where == machine and peer != rank:
            _pids[peer], _progress[peer] = pid, Progress.of(address)


def place_of(rank: int) -> str:
    """Returns where a rank of this machine is in its training, or was when it ended; empty where that is not known."""
    return str(_progress.get(rank) or "")


def ended(wait_s: float = 0.0) -> dict[int, int]:
    """Returns the ranks of this machine whose processes have ended, each with :func:`exit_status`.

    Args:
        wait_s: seconds to wait for the first of them: its connections are closed a moment before it has ended.
    """
    deadline = time.monotonic() + wait_s
    while True:
        statuses = {rank: exit_status(pid) for rank, pid in _pids.items()}
        found = {rank: status for rank, status in statuses.items() if status is not None}
        if found or not _pids or time.monotonic() >= deadline:
            return found
        time.sleep(_STEP_S)


def exit_status(pid: int) -> int | None:
    """Returns None while a process runs; then its exit status, negative for a signal, 0 if it is no longer known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # whoever started it has asked for its status
        return 0
    return os.waitstatus_to_exitcode(int(fields[_EXIT_STATUS])) if fields[0] in "ZX" else None


def end_with_parent(parent: int, unless: Callable[[], bool] = lambda: False) -> None:
    """Ends this process, from a thread, soon after its parent is gone; but not as long as `unless` says so."""

    def watch() -> None:
        while os.getppid() == parent or unless():
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ends with its parent").start()


def end_after(seconds: float, code: int) -> None:
    """Ends this process after some time, from a thread, if it has not ended by then."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, daemon=True, name="ends after a while").start()
