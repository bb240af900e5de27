"""Rows without those that are zero, in all their bits, and a bit for each row in front. On the CPU; any dtype.

R rows, of B bytes each; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn.kernels import loops


def bits_bytes(num_rows: int) -> int:
    """Returns the bytes that a bit for each of so many rows takes."""
    return -(-num_rows // 8)


def nonzero_rows(rows: Tensor) -> int:
    """Returns how many of some rows, contiguous ``[R, ...]``, are not zero."""
    return loops.count_nonzero(_as_bytes(rows).numpy())


def pack_rows(rows: Tensor, out: Tensor) -> tuple[int, Tensor]:
    """Writes the rows that are not zero, with the bits that tell which in front.

    Args:
        rows: contiguous ``[R, ...]``.
        out: uint8, as many bytes as rows and bits have together, or more.

    Returns:
        How many, and the part of `out` that was written.
    """
    data = _as_bytes(rows)
    kept = loops.pack_nonzero(data.numpy(), out.numpy())
    return kept, out[: bits_bytes(len(rows)) + kept * data.size(1)]


def unpack_rows(data: Tensor, out: Tensor) -> int:
    """Overwrites `out`, contiguous ``[R, ...]``, with the rows that :func:`pack_rows` was given; returns how many are not zero.

    Args:
        data: what it wrote, and anything behind that.
    """
    return loops.unpack_nonzero(data.numpy(), _as_bytes(out).numpy())


def _as_bytes(rows: Tensor) -> Tensor:
    """Returns rows as uint8 ``[R, B]``."""
    return rows.detach().view(len(rows), -1).view(torch.uint8)
