"""Processes of the other ranks on this machine: which of them have ended, and how.

A lost connection does not say so: gloo names a port. Nor does torchrun always: it tells of one rank that has failed, and where
others have failed of that before it looks, of any.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch.distributed as dist

from lightning_gnn.comm.progress import Progress, here

_EXIT_STATUS = 49  # its place in /proc/PID/stat, from the state on
_STEP_S = 0.02

# They stay known when ranks part after set-up, as workers of gossip do: one of them keeps what all need.
_pids: dict[int, int] = {}
_progress: dict[int, Progress] = {}


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
            _pids[peer] = pid
            if (progress := Progress.of(address)) is not None:
                _progress[peer] = progress


def place_of(rank: int) -> str:
    """Returns where a rank of this machine is in its training, or was when it ended; empty where that is not known."""
    return str(_progress.get(rank, ""))


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
