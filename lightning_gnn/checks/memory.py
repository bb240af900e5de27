"""Memory that a rank needs at the very least, to say so before it is started."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_gnn.datamodules.store import Shard


def least_bytes(shard: Shard, module: torch.nn.Module) -> int:
    """Returns what a rank holds whatever its model: rows, halo rows, edges in CSR both ways, weights and their gradients.

    Activations come on top.
    """
    batch = shard.batch
    halo = sum(shard.plan.recv_counts) * batch.x[:1].nbytes
    edges = batch.edge_index.size(1) * (4 + 4 + 8)  # columns, and slots of edge weights, for A and its transpose
    parameters = sum(2 * parameter.nbytes for parameter in module.parameters())
    return batch.x.nbytes + halo + edges + parameters


def available_bytes() -> int | None:
    """Returns how much memory this machine, or this container, can still give; None where that cannot be known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - used, 0))
