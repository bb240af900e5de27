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


def training_bytes(shard: Shard, num_layers: int, columns: int, relayed: int = 0) -> int:
    """Returns a low estimate of a rank's peak in training: :func:`least_bytes` without weights, and activations.

    These are each layer's output and its gradient, and one buffer of halo and relayed rows and its gradient, which layers share.

    Args:
        shard: the rank's.
        num_layers: K.
        columns: width of all layers.
        relayed: rows that the rank only passes on.
    """
    halo = sum(shard.plan.recv_counts)
    rows = num_layers * shard.plan.num_owned + halo + relayed
    return least_bytes(shard, torch.nn.Module()) + 2 * rows * columns * shard.batch.x.element_size()


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
