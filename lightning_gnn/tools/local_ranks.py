"""Ranks as processes of this machine, for commands that need ranks and were not started by a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_gnn.comm.listening import LISTENER_VARIABLE, listen_for_ranks

LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""Environment variables that launchers set for a rank."""


@contextmanager
def as_single_rank() -> Iterator[None]:
    """Context in which a Trainer with a single device runs in this process, which may be one of several ranks."""
    before, rank = dict(os.environ), getattr(rank_zero_only, "rank", 0)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
        rank_zero_only.rank = rank  # type: ignore[attr-defined]


class Machine(NamedTuple):
    """This machine among the machines of a run.

    Attributes:
        address: address of the first machine.
        port: port of the first machine; 0 for any free port, on a single machine.
        node_rank: number of this machine.
        num_nodes: number of machines, each with as many ranks.
    """

    address: str = "127.0.0.1"
    port: int = 0
    node_rank: int = 0
    num_nodes: int = 1


_ALONE = Machine()


def run_ranks(
    arguments: Sequence[str], num_ranks: int, deadline: float | None = None, show_errors: bool = False, machine: Machine = _ALONE
) -> str:
    """Run ``python *arguments`` once per rank with a launcher's environment variables; return the output of this machine's first.

    Args:
        arguments: arguments such as ``["-m", "package.module"]``.
        num_ranks: number of ranks on this machine.
        deadline: seconds after which all ranks are killed; None waits without limit.
        show_errors: whether the first rank writes to this process's standard error, for progress.
        machine: this machine; default: the only machine.

    Raises:
        RuntimeError: if a rank fails or the deadline passes; with the last error line of the ranks.
    """
    address, port, node_rank, num_nodes = machine
    size, first = num_ranks * num_nodes, num_ranks * node_rank
    listener = None if node_rank else listen_for_ranks(address, port, size)  # for rank 0: no other process can take the port
    port = port if listener is None else listener.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_VARIABLES, "SLURM_NTASKS")}
    env.update(MASTER_ADDR=address, MASTER_PORT=str(port), WORLD_SIZE=str(size), NODE_RANK=str(node_rank))
    env.update(LOCAL_WORLD_SIZE=str(num_ranks), PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
    end = float("inf") if deadline is None else time.monotonic() + deadline
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            with listener or nullcontext():
                for rank in range(num_ranks):
                    passed = [] if listener is None or rank else [listener.fileno()]
                    listens = {LISTENER_VARIABLE: str(passed[0])} if passed else {}
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, *arguments],
                            env={**env, "RANK": str(first + rank), "LOCAL_RANK": str(rank), **listens},
                            stdout=output if rank == 0 else errors,
                            stderr=None if rank == 0 and show_errors else errors,
                            pass_fds=passed,
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
