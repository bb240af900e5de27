"""State of fits in the memory of the machine, outside of the ranks, for torchrun, which restarts all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_MEMORY = Path("/dev/shm")

_REMOVE = """
import os, shutil, sys, time
process, folder = sys.argv[1:]
while os.path.exists(f"/proc/{process}"):
    time.sleep(0.5)
shutil.rmtree(folder, ignore_errors=True)
"""


class KeptStates:
    """States of the fits of a script, each in a file; a process removes them when torchrun's agent ends.

    Files are pickled, and only this user can read and write them.

    Args:
        agent: process id of the agent, the parent of all ranks of this machine.
        writes: whether this rank writes the states; one rank of each machine.
    """

    def __init__(self, agent: int, writes: bool) -> None:
        self._folder, self._writes = _MEMORY / f"lightning_gnn-{os.getuid()}-{agent}", writes
        if self._folder.exists() and self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} belongs to another user, and its files are not used. Remove the folder.")
        if not writes or self._folder.exists():
            return
        self._folder.mkdir(0o700)
        command = [sys.executable, "-S", "-E", "-c", _REMOVE, str(agent), str(self._folder)]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)

    def save(self, call: int, state: dict[str, Any]) -> None:
        """Store the state of a call of the Trainer, if this rank writes."""
        if self._writes:
            file = self._folder / f"{call}.pt"
            part = file.with_suffix(".part")
            torch.save(state, part)
            part.replace(file)

    def load(self, call: int) -> dict[str, Any]:
        """Returns the stored state of a call; empty without one."""
        file = self._folder / f"{call}.pt"
        if not file.exists():
            return {}
        found: dict[str, Any] = torch.load(file, weights_only=False)
        return found
