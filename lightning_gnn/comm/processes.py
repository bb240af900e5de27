"""Processes of the ranks on this machine: position, end and exit status.

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
from functools import partial
from pathlib import Path

import torch.distributed as dist

RUNS, REACTS, CLOSED, REPORTED, GIVEN_UP = range(5)
"""End of a rank: handles an error; has left the other ranks by an error; has printed its last line; ended by its helper."""

_PLACE = struct.Struct("112s")
_OPERATION = struct.Struct("d200s")  # start in monotonic seconds, 0 after the end; name
_ENDING = struct.Struct("q")
_LOSS = struct.Struct("304s")  # written by the helper process: lost rank, a space, and how it was lost
_OPERATION_AT, _ENDING_AT, _LOSS_AT, _SIZE = 112, 320, 328, 632
_EXIT_STATUS = 49  # index in /proc/PID/stat, counted from the state
_STEP_S = 0.02


class Progress:
    """Position of a rank, in memory that other processes can use until the rank's process has ended.

    Attributes:
        address: address for other processes of this machine; empty if they cannot read it.
        note: function that records the start time and the name of the current operation.
        is_supervised: whether the process that started this rank prints its failures.
        outlives_others: whether this rank continues without lost ranks; the process that started it decides.
    """

    is_supervised = outlives_others = False

    def __init__(self) -> None:
        self.address = ""
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        if hasattr(os, "memfd_create"):  # Linux
            descriptor = os.memfd_create("lightning_gnn")  # open while this process lives
            os.truncate(descriptor, _SIZE)
            self._memory = mmap.mmap(descriptor, _SIZE)
            self.address = f"{os.getpid()} {descriptor}"
        self.note: Callable[[float, bytes], None] = partial(_OPERATION.pack_into, self._memory, _OPERATION_AT)

    @classmethod
    def of(cls, address: str) -> Progress | None:
        """Returns the progress of another process; None if it cannot be read."""
        found = cls.__new__(cls)
        found.address = address
        try:
            pid, descriptor = map(int, address.split())
            with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
                found._memory = mmap.mmap(file.fileno(), _SIZE)
        except (OSError, ValueError):  # another user's process, or it has ended
            return None
        return found

    def at(self, phase: str, epoch: int | None = None) -> None:
        """Record a phase, such as ``"forward"``, and the epoch of a fit."""
        place = phase if epoch is None else f"epoch {epoch}, {phase}"
        _PLACE.pack_into(self._memory, 0, place.encode())

    def __str__(self) -> str:
        since, operation = _OPERATION.unpack_from(self._memory, _OPERATION_AT)
        place = _text(*_PLACE.unpack_from(self._memory))
        return ", ".join(filter(None, [place, _text(operation) if since else ""]))

    @property
    def operation(self) -> str:
        """Current operation, or the operation that raised the last error."""
        return _text(_OPERATION.unpack_from(self._memory, _OPERATION_AT)[1])

    @property
    def ending(self) -> int:
        """How far the rank is from its end, from :data:`RUNS` to :data:`GIVEN_UP`."""
        return int(*_ENDING.unpack_from(self._memory, _ENDING_AT))

    @ending.setter
    def ending(self, value: int) -> None:
        _ENDING.pack_into(self._memory, _ENDING_AT, value)

    @property
    def loss(self) -> tuple[int, str] | None:
        """Rank that the helper process, or the supervisor, has found to be lost, and how it was lost; None without one."""
        rank, _, how = _text(*_LOSS.unpack_from(self._memory, _LOSS_AT)).partition(" ")
        return (int(rank), f"rank {rank} {how}") if rank else None

    @loss.setter
    def loss(self, value: tuple[int, str]) -> None:
        _LOSS.pack_into(self._memory, _LOSS_AT, f"{value[0]} {value[1]}".encode())

    def begin(self) -> None:
        """Record the begin of a run of several ranks."""
        self.ending = RUNS
        self.note(0.0, b"")
        _LOSS.pack_into(self._memory, _LOSS_AT, b"")


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


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


def progress_of(rank: int) -> Progress | None:
    """Returns the progress of a rank of this machine, also after it has ended; None if unknown."""
    return _progress.get(rank)


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


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, for example by SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


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
