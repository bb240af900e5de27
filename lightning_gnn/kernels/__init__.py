"""Loops over edges, in one place: sparse times dense, statistics, attention.

On CPU compiled by numba at first use and kept on disk; on other devices torch's own kernels.
"""

from lightning_gnn.extensions.zero_rows.kernels import bits_bytes, nonzero_rows, pack_rows, unpack_rows
from lightning_gnn.kernels.csr import CSR
from lightning_gnn.kernels.run import cache_folder
from lightning_gnn.kernels.sums import add_rows, spmm, take_rows

__all__ = [
    "CSR",
    "add_rows",
    "bits_bytes",
    "cache_folder",
    "nonzero_rows",
    "pack_rows",
    "spmm",
    "take_rows",
    "unpack_rows",
]
