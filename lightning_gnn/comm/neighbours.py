"""Processes of the other ranks on this machine: which of them have ended, and how.

A lost connection does not say so: gloo names a port. Nor does torchrun always: it tells of one rank that has failed, and where
others have failed of that before it looks, of any.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

_EXIT_STATUS = 49  # its place in /proc/PID/stat, from the state on
_STEP_S = 0.02

# They stay known when ranks part after set-up, as workers of gossip do: one of them keeps what all need.
_pids: dict[int, int] = {}


def meet(store: dist.Store, rank: int, size: int, machine: str | None) -> None:
    """Learns the processes of the ranks on this machine, before any two are connected; waits until all have called it.

    Args:
        store: of these ranks only.
        rank, size: of this process.
        machine: equal for processes that see each other; None where they cannot.
    """
    store.set(f"process/{rank}", f"{os.getpid()} {machine}")
    found = [value.decode().partition(" ") for value in store.multi_get([f"process/{r}" for r in range(size)])]
    _pids.clear()
    if machine is not None:
        _pids.update({r: int(pid) for r, (pid, _, where) in enumerate(found) if where == machine and r != rank})


def ended(wait_s: float = 0.0) -> dict[int, int]:
    """Returns the ranks of this machine whose processes have ended, each with :func:`exit_status`.

    Args:
        wait_s: for the first of them: its connections are closed a moment before it has ended.
    """
    deadline = time.monotonic() + wait_s
    while True:
        statuses = {rank: exit_status(pid) for rank, pid in _pids.items()}
        found = {rank: status for rank, status in statuses.items() if status is not None}
        if found or not _pids or time.monotonic() >= deadline:
            return found
        time.sleep(_STEP_S)


def exit_status(pid: int) -> int | None:
    """Returns None while a process runs; then its exit status, negative for a signal, 0 if nobody can tell any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # whoever started it has asked for its status
        return 0
    return os.waitstatus_to_exitcode(int(fields[_EXIT_STATUS])) if fields[0] in "ZX" else None
