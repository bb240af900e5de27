"""Loops over edges: sparse times dense products, statistics and attention.

On the CPU, numba compiles them at first use and caches them on disk; other devices use a backend's kernels or torch's own.
"""

from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.run import cache_folder
from lightning_gnn.kernels.sums import spmm, take_rows

__all__ = ["CSR", "cache_folder", "spmm", "take_rows"]
