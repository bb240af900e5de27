"""Timed exchange of rows between two processes as ranks: ``python -m lightning_gnn.tools.commands.exchange``."""

from __future__ import annotations

import json
import os
import statistics
import time
from datetime import timedelta

import numpy as np
import torch

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.partition.shard import HaloPlan
from lightning_gnn.tools.local_ranks import run_ranks

ROWS, COLUMNS, REPEATS = 65_536, 64, 7


def time_exchange(deadline: float) -> dict[str, float | None]:
    """Starts both processes and returns bytes per second in each direction, ``{"shared_memory", "sockets"}``.

    ``shared_memory`` is None if the processes cannot share memory. Both processes are killed after `deadline` seconds.

    Raises:
        RuntimeError: if a process fails or the deadline passes; with their last output.
    """
    return json.loads(run_ranks(["-m", __name__], 2, deadline).splitlines()[-1])


def _bytes_per_second(rank: int, shared_memory: bool) -> float | None:
    world = World(rank, 2, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        if shared_memory and not world.transport.all_local:
            return None
        none, every = np.empty(0, np.int64), np.arange(ROWS)
        plan = HaloPlan(ROWS, (0, ROWS) if rank == 0 else (ROWS, 0), (none, every) if rank == 0 else (every, none))
        exchange = HaloExchange(plan, world, Meter())
        own, halo = torch.full((ROWS, COLUMNS), float(rank)), torch.empty(ROWS, COLUMNS)
        seconds = []
        for _ in range(REPEATS):
            world.barrier()
            began = time.perf_counter()
            exchange.start_expand(own, halo, Call("doctor"))()
            seconds.append(time.perf_counter() - began)
        if not bool((halo == 1 - rank).all()):
            raise RuntimeError(f"the received rows differ from the sent rows ({'memory' if shared_memory else 'sockets'})")
        world.barrier()
        return own.nbytes / statistics.median(seconds)
    finally:
        world.close()


def main() -> None:
    rank = int(os.environ["RANK"])
    print(json.dumps({name: _bytes_per_second(rank, name == "shared_memory") for name in ("shared_memory", "sockets")}))


if __name__ == "__main__":
    main()
