"""Processes of the ranks on this machine: training progress, end and exit status.

A lost connection does not identify the failed rank: gloo names a port. Torchrun names one failed rank, possibly a rank that
failed because of another failure.
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
    "",  # unknown
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

_FORM = struct.Struct("qq")  # epoch or -1, phase
_EXIT_STATUS = 49  # index in /proc/PID/stat, counted from the state
_STEP_S = 0.02


class Progress:
    """Epoch and phase of a rank, in memory that other processes can read until the rank's process has ended.

    Attributes:
        address: address for other processes of this machine; empty if they cannot read it.
    """

    def __init__(self) -> None:
        self.address = ""
        self._memory: mmap.mmap | bytearray = bytearray(_FORM.size)
        if hasattr(os, "memfd_create"):  # Linux
            descriptor = os.memfd_create("lightning_gnn")  # open while this process lives
            os.truncate(descriptor, _FORM.size)
            self._memory = mmap.mmap(descriptor, _FORM.size)
            self.address = f"{os.getpid()} {descriptor}"
        self.at("")

    @classmethod
    def of(cls, address: str) -> Progress | None:
        """Returns the progress of another process; None if it cannot be read."""
        found = cls.__new__(cls)
        found.address = address
        try:
            pid, descriptor = map(int, address.split())
            with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
                found._memory = mmap.mmap(file.fileno(), _FORM.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # another user's process, or it has ended
            return None
        return found

    def at(self, phase: str, epoch: int | None = None) -> None:
        """Record a phase, one of :data:`PHASES`, and the epoch of a fit."""
        _FORM.pack_into(self._memory, 0, -1 if epoch is None else epoch, PHASES.index(phase))

    def __str__(self) -> str:
        epoch, phase = _FORM.unpack_from(self._memory)
        return ", ".join(filter(None, [f"epoch {epoch}" if epoch >= 0 else "", PHASES[phase]]))


_current: tuple[int, Progress] | None = None
# Kept after set-up for ranks that then train separately, such as workers of gossip.
_pids: dict[int, int] = {}
_progress: dict[int, Progress | None] = {}


def current_progress() -> Progress:
    """Returns the progress of this process; a fork has its own."""
    global _current
    if _current is None or _current[0] != os.getpid():
        _current = os.getpid(), Progress()
    return _current[1]


def meet(store: dist.Store, rank: int, size: int, machine: str | None) -> None:
    """Wait for all ranks and record the processes of the ranks on this machine, before any connection is made.

    Args:
        store: store of these ranks only.
        rank, size: rank of this process and number of ranks.
        machine: key that is equal for processes that see each other; None if they cannot.
    """
    store.set(f"process/{rank}", json.dumps([os.getpid(), machine, current_progress().address]))
    found = [json.loads(value) for value in store.multi_get([f"process/{r}" for r in range(size)])]
    _pids.clear()
    _progress.clear()
    for peer, (pid, where, address) in enumerate(found):
        if machine is not None and where == machine and peer != rank:
            _pids[peer], _progress[peer] = pid, Progress.of(address)


def place_of(rank: int) -> str:
    """Returns the training progress of a rank of this machine, also after it has ended; empty if unknown."""
    return str(_progress.get(rank) or "")


def exit_statuses(wait_s: float = 0.0) -> dict[int, int]:
    """Returns the exit status of each ended rank of this machine, see :func:`exit_status`.

    Args:
        wait_s: seconds to wait for the first rank to end. Its connections close shortly before its process ends.
    """
    deadline = time.monotonic() + wait_s
    while True:
        statuses = {rank: exit_status(pid) for rank, pid in _pids.items()}
        ended = {rank: status for rank, status in statuses.items() if status is not None}
        if ended or not _pids or time.monotonic() >= deadline:
            return ended
        time.sleep(_STEP_S)


def exit_status(pid: int) -> int | None:
    """Returns None while a process runs, then its exit status: negative for a signal, 0 if unavailable."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # its parent has collected the status
        return 0
    return os.waitstatus_to_exitcode(int(fields[_EXIT_STATUS])) if fields[0] in "ZX" else None


def end_with_parent(parent: int, unless: Callable[[], bool] = lambda: False) -> None:
    """Start a thread that ends this process soon after its parent has ended, except while `unless` returns True."""

    def watch() -> None:
        while os.getppid() == parent or unless():
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ends with its parent").start()


def end_after(seconds: float, code: int) -> None:
    """Start a thread that ends this process after `seconds` with exit status `code`."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, daemon=True, name="ends after a while").start()
