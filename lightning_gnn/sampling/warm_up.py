"""Compiles the loops of sampling before training, so that no batch waits for it."""

from __future__ import annotations

import torch

from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.run import timed_compilation
from lightning_gnn.sampling.sampler import NeighborSampler


def warm_up(csr: CSR) -> float:
    """Loads loops of uniform sampling from disk, and compiles those that are not there, for matrices with the dtypes of `csr`.

    Returns the seconds of that, 0 if all were there.
    """
    # Two in-edges of node 0, of which one is drawn.
    small = CSR(
        torch.tensor([0, 2, 2]),
        torch.tensor([0, 1], dtype=csr.indices.dtype),
        None if csr.edge is None else torch.tensor([1, 0], dtype=csr.edge.dtype),
        2,
    )
    return timed_compilation(lambda: NeighborSampler(small, [1]).sample(torch.tensor([0])))
