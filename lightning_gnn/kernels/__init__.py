"""Loops over edges, in one place: sparse times dense, statistics, attention.

On CPU compiled by numba at first use and kept on disk; on other devices torch's own kernels.
"""

from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.run import cache_folder
from lightning_gnn.kernels.sums import add_rows, spmm, take_rows

__all__ = ["CSR", "add_rows", "cache_folder", "spmm", "take_rows"]
