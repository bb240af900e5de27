"""Ranks as processes of this machine, for commands that need ranks and were not started by a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from lightning_gnn.comm.listening import LISTENER_VARIABLE

LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""Environment variables that launchers set for a rank."""


def run_ranks(arguments: Sequence[str], num_ranks: int, deadline: float | None = None, show_errors: bool = False) -> str:
    """Run ``python *arguments`` once per rank with a launcher's environment variables; return the output of rank 0.

    Args:
        arguments: arguments such as ``["-m", "package.module"]``.
        deadline: seconds after which all ranks are killed; None waits without limit.
        show_errors: whether rank 0 writes to this process's standard error, for progress.

    Raises:
        RuntimeError: if a rank fails or the deadline passes; with the last error line of the ranks.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_ranks)  # for rank 0: no other process can take the port
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]), WORLD_SIZE=str(num_ranks), NODE_RANK="0")
    env.update(LOCAL_WORLD_SIZE=str(num_ranks), PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
    end = float("inf") if deadline is None else time.monotonic() + deadline
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            with listener:
                for rank in range(num_ranks):
                    listens = {LISTENER_VARIABLE: str(listener.fileno())} if rank == 0 else {}
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, *arguments],
                            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), **listens},
                            stdout=output if rank == 0 else errors,
                            stderr=None if rank == 0 and show_errors else errors,
                            pass_fds=[listener.fileno()] if rank == 0 else [],
                        )
                    )
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                if time.monotonic() > end:
                    count = "two" if num_ranks == 2 else num_ranks
                    raise RuntimeError(f"{count} processes did not finish within {deadline:.0f} s")
                time.sleep(0.05)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        errors.seek(0)
        codes = [process.returncode for process in ranks]
        if any(codes):
            lines = [line for line in errors.read().splitlines() if "error" in line.lower()]
            raise RuntimeError(lines[-1].removeprefix("error: ") if lines else f"they ended with status {codes}")
        output.seek(0)
        return output.read()
