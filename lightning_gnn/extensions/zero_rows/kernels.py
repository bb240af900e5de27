"""Rows without those that are zero, in all their bits, and a bit for each row in front. On the CPU; any dtype.

R rows, of B bytes each, in P parts of consecutive ones; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.kernels import loops


def bits_bytes(num_rows: int) -> int:
    """Returns the bytes that a bit for each of so many rows takes."""
    return -(-num_rows // 8)


def nonzero_rows(rows: Tensor, counts: Sequence[int]) -> list[int]:
    """Returns how many rows of each part are not zero.

    Args:
        rows: contiguous ``[R, ...]``.
        counts: rows of each part, ``[P]``.
    """
    kept = np.empty(len(counts), np.int64)
    loops.count_nonzero(_as_bytes(rows).numpy(), np.array(counts), kept)
    return kept.tolist()


def pack_rows(rows: Tensor, counts: Sequence[int], packed: Sequence[bool], places: Sequence[int], out: Tensor) -> list[int]:
    """Writes each part to its place in memory; returns how many rows of each are not zero.

    Args:
        rows: contiguous ``[R, ...]``.
        counts: rows of each part, ``[P]``.
        packed: which parts are written without the rows that are zero, behind :func:`bits_bytes` that tell which these are; the
            others as they are.
        places: where each part begins, in bytes.
        out: uint8, contiguous.
    """
    kept = np.empty(len(counts), np.int64)
    arrays = (np.array(each) for each in (counts, packed, places))
    loops.pack_nonzero(_as_bytes(rows).numpy(), *arrays, out.numpy(), kept)
    return kept.tolist()


def unpack_rows(data: Tensor, out: Tensor) -> int:
    """Overwrites `out`, contiguous ``[R, ...]``, with a part that was packed; returns how many of its rows are not zero.

    Args:
        data: what :func:`pack_rows` wrote, and anything behind that.
    """
    return loops.unpack_nonzero(data.numpy(), _as_bytes(out).numpy())


def _as_bytes(rows: Tensor) -> Tensor:
    """Returns rows as uint8 ``[R, B]``."""
    return rows.detach().view(len(rows), -1).view(torch.uint8)
