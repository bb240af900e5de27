"""Two processes that exchange rows as two ranks do, and time it: ``python -m lightning_gnn.commands.exchange RANK``."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import numpy as np
import torch

from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.partition.shard import HaloPlan

ROWS, COLUMNS, REPEATS = 65_536, 64, 7
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""What launchers set for a rank."""


def time_exchange(deadline: float) -> dict[str, float | None]:
    """Starts both processes and returns bytes per second from each to the other, ``{"shared_memory", "sockets"}``.

    Without shared memory between the processes, its entry is None.

    Args:
        deadline: seconds after which both are ended.

    Raises:
        RuntimeError: one has failed, or the deadline has passed; with what they wrote last.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    end = time.monotonic() + deadline
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        ranks = [
            subprocess.Popen([sys.executable, "-m", __name__, str(rank)], env=env, stdout=stream, stderr=errors)
            for rank, stream in enumerate((output, errors))
        ]
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                if time.monotonic() > end:
                    raise RuntimeError(f"two processes did not exchange anything within {deadline:.0f} s")
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        errors.seek(0)
        if any(rank.returncode for rank in ranks):
            lines = [line for line in errors.read().splitlines() if "Error" in line]
            raise RuntimeError(lines[-1] if lines else f"they ended with status {[rank.returncode for rank in ranks]}")
        output.seek(0)
        return json.loads(output.read().splitlines()[-1])


def _bytes_per_second(rank: int, shared_memory: bool) -> float | None:
    world = World(rank, 2, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        if shared_memory and not world.wire.all_local:
            return None
        none, every = np.empty(0, np.int64), np.arange(ROWS)
        plan = HaloPlan(ROWS, (0, ROWS) if rank == 0 else (ROWS, 0), (none, every) if rank == 0 else (every, none))
        exchange = HaloExchange(plan, world, Meter())
        own, halo = torch.full((ROWS, COLUMNS), float(rank)), torch.empty(ROWS, COLUMNS)
        seconds = []
        for _ in range(REPEATS):
            world.barrier()
            began = time.perf_counter()
            exchange.start_fetch(own, halo, "doctor")()
            seconds.append(time.perf_counter() - began)
        if not bool((halo == 1 - rank).all()):
            raise RuntimeError(f"other rows arrived than were sent ({'memory' if shared_memory else 'sockets'})")
        world.barrier()
        return own.nbytes / statistics.median(seconds)
    finally:
        world.close()


def main() -> None:
    """Runs in each of the two processes; rank 0 prints."""
    rank = int(sys.argv[1])
    print(json.dumps({name: _bytes_per_second(rank, name == "shared_memory") for name in ("shared_memory", "sockets")}))


if __name__ == "__main__":
    main()
