"""Rows of floating numbers as short whole numbers between each row's ends, and back; and as bfloat16. No autograd.

By compiled loops where the rows' device has them, see :mod:`lightning_gnn.kernels.run`, which compute in float64 and keep none
of it; elsewhere by torch's own kernels, which round alike but for ties, over float64 copies of the rows.

R rows, F columns, B bytes of a packed row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.kernels import loops
from lightning_gnn.kernels.run import has_loops, over_range


def packed_bytes(width: int, bits: int) -> int:
    """Returns B: how many bytes `width` numbers of so many bits take."""
    return -(-width * bits // 8)


def quantise(rows: Tensor, bits: int, noise: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the two ends of each row, its entries in steps between them, packed, and sums of squares.

    Args:
        rows: floating, ``[R, F]``, F above 0.
        bits: of a number: 2, 4 or 8.
        noise: below 2^62; numbers are rounded up or down at random by it. None: to the nearest.

    Returns:
        ends ``[R, 2]`` of rows' dtype, NaN for rows with an entry that is not finite; packed uint8 ``[R, B]``; and the sums of
        squares of errors and of entries, float64 ``[2]``.
    """
    rows = rows.detach().contiguous()
    rounding = 0.51 * torch.finfo(rows.dtype).eps  # a little more than half, as bfloat16 is rounded twice, over float32
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if has_loops(wide.device, wide.dtype):
        ends, squares = wide.new_empty((len(rows), 2)), wide.new_empty((len(rows), 2), dtype=torch.float64)
        packed = wide.new_empty((len(rows), packed_bytes(rows.size(1), bits)), dtype=torch.uint8)
        key, stochastic = np.uint64(noise or 0), noise is not None
        work = rows.numel()
        over_range(loops.quantise, len(rows), wide, ends, packed, squares, bits, rounding, key, stochastic, work=work)
    else:
        ends, packed, squares = _quantise(wide, bits, rounding, noise)
    return ends.to(rows.dtype), packed, squares.sum(0)


def dequantise(ends: Tensor, packed: Tensor, bits: int, out: Tensor) -> None:
    """Overwrites `out`, contiguous ``[R, F]``, with the rows that were made into these; see :func:`quantise`."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    wide = out.detach() if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
    ends = ends.to(dtype)
    if has_loops(out.device, dtype):
        over_range(loops.dequantise, len(out), packed.contiguous(), ends, wide, bits, work=out.numel())
    else:
        wide.copy_(_dequantise(ends, packed, bits, out.size(1)))
    if wide.dtype != out.dtype:
        out.copy_(wide)


def shorten(rows: Tensor, short: Tensor, noise: int | None = None) -> Tensor:
    """Overwrites `short`, bfloat16 ``[R, F]``, contiguous, with `rows`; what is infinite or NaN stays so.

    Returns:
        the sums of squares of errors and of entries, float64 ``[2]``.
    """
    rows = rows.detach().contiguous().float()
    if has_loops(rows.device, rows.dtype):
        squares = rows.new_empty((len(rows), 2), dtype=torch.float64)
        key, stochastic = np.uint64(noise or 0), noise is not None
        over_range(loops.shorten, len(rows), rows, short.view(torch.uint16), squares, key, stochastic, work=rows.numel())
        return squares.sum(0)
    short.copy_(rows)
    if noise is not None:
        # Adding to the bits that go, before they are cut off, rounds up in proportion to what they stand for.
        draws = torch.randint(2**16, rows.shape, generator=_draws(noise, rows), dtype=torch.int32, device=rows.device)
        rounded = ((rows.view(torch.int32) + draws) & -(2**16)).view(torch.float32)
        short.copy_(torch.where(rows.isfinite(), rounded, rows))
    off = rows.double() - short
    return torch.stack([off.square().sum(), rows.double().square().sum()])


def _draws(noise: int, like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(noise)


def _steps(ends: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns by what rows are multiplied first, the extent of the product, and a step, float64 ``[R, 1]`` each."""
    low, high = ends.double().split(1, dim=1)
    extent = high - low
    one = torch.ones_like(extent)
    lift = torch.where(extent > 1e300, 2.0**-2 * one, torch.where((extent > 0) & (extent < 1e-250), 2.0**128 * one, one))
    extent = high * lift - low * lift
    return lift, extent, extent / (2**bits - 1) * (1 / lift)


def _quantise(rows: Tensor, bits: int, rounding: float, noise: int | None) -> tuple[Tensor, Tensor, Tensor]:
    levels, num_bytes = 2**bits - 1, packed_bytes(rows.size(1), bits)
    strange = ~rows.isfinite().all(1, keepdim=True)
    ends = torch.cat([rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)], 1)
    ends = ends.masked_fill(strange, float("nan"))
    lift, extent, step = _steps(ends, bits)
    low, values = ends[:, :1].double(), rows.double()
    scale = torch.where(extent > 0, levels / extent, torch.zeros_like(extent))
    place = (values * lift - low * lift) * scale
    codes = (place + 0.5).floor()
    if noise is not None:
        off = (low + step * codes - values).abs() > rounding * values.abs()
        draws = torch.rand(place.shape, generator=_draws(noise, rows), dtype=torch.float64, device=rows.device)
        codes = torch.where(off, (place + draws).floor().clamp(max=levels), codes)
    squares = torch.cat([(low + step * codes - values).square().sum(1, True), values.square().sum(1, True)], 1)
    padded = torch.zeros(len(rows), num_bytes * (8 // bits), dtype=torch.int32, device=rows.device)
    padded[:, : rows.size(1)] = codes.masked_fill(strange, 0)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=rows.device).view(1, -1, 1)
    packed = (padded.view(len(rows), -1, num_bytes) << shifts).sum(1)
    return ends, packed.to(torch.uint8), squares


def _dequantise(ends: Tensor, packed: Tensor, bits: int, width: int) -> Tensor:
    levels = 2**bits - 1
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=packed.device).view(1, -1, 1)
    codes = ((packed.to(torch.int32).unsqueeze(1) >> shifts) & levels).flatten(1)[:, :width]
    _, _, step = _steps(ends, bits)
    low, high = ends.double().split(1, dim=1)
    return torch.where(codes == levels, high, low + step * codes)
