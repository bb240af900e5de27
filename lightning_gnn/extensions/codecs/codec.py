"""Codecs: rows of floating numbers as fewer bytes, approximately, and back.

Source: CDFGNN section 5, the linear quantisation of eq. 22 and 23. As printed the largest entry of a row would become 2^B, which
B bits do not hold; ours has 2^B - 1 steps, and an error of at most (max - min) / (2 (2^B - 1)) in place of
(max - min) / 2^(B + 1).

Rows are quantised by compiled loops where their device has them, see :mod:`lightning_gnn.kernels.run`, which compute in float64
and keep none of it; elsewhere by torch's own kernels, which round alike but for ties, over float64 copies. No autograd.

n or R rows, F columns, B bytes of a packed row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.arguments import is_one_of, shown
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


_BITS = {"int8": 8, "int4": 4, "int2": 2, "bfp8": 8, "bfp4": 4, "bf16": 16}
_MIDDLE, _STRANGE = 127, 255
"""A block's exponent as a byte: what is added to it, and the byte of rows that have none."""


class Codec(ABC):
    """Turns rows into bytes that ranks send, and those into rows; each row for itself, the same on CPU and CUDA.

    What was decoded is encoded without further loss, so that rows which go over several ranks arrive alike everywhere.

    Args:
        name: of the codec.
        stochastic: round up or down at random, so that the mean of many roundings is the number itself; else to the nearest.
        seed: of the rounding.
    """

    def __init__(self, name: str, stochastic: bool, seed: int) -> None:
        self.name, self.stochastic, self._bits = name, stochastic, _BITS[name]
        self._generator = torch.Generator().manual_seed(seed)
        self._squares: Tensor | None = None

    @abstractmethod
    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Returns how many bytes a row of `width` numbers of `dtype` is encoded to."""

    @abstractmethod
    def encode(self, rows: Tensor, out: Tensor) -> None:
        """Overwrites `out` with the rows as bytes.

        Args:
            rows: floating, ``[n, F]``.
            out: uint8 ``[n, row_bytes(F, rows.dtype)]``, contiguous, at an even address.
        """

    @abstractmethod
    def decode(self, data: Tensor, out: Tensor) -> None:
        """Overwrites `out` with the rows that were encoded to `data`.

        Args:
            data: uint8 ``[n, row_bytes(F, out.dtype)]``, contiguous, at an even address.
            out: ``[n, F]``, contiguous, of the dtype of the rows that were encoded.
        """

    def take_squares(self) -> tuple[float, float]:
        """Returns the sums of squares of the errors and of the numbers encoded since the last call."""
        squares, self._squares = self._squares, None
        return (0.0, 0.0) if squares is None else tuple(squares.tolist())

    def random_state(self) -> Tensor | None:
        """Returns the state of what rows are rounded by at random, uint8; None if they are rounded to the nearest."""
        return self._generator.get_state() if self.stochastic else None

    def set_random_state(self, state: Tensor | None) -> None:
        """Sets what :meth:`random_state` returns; the state of a codec that rounds to the nearest changes nothing."""
        if state is not None:
            self._generator.set_state(state.clone())

    def _count(self, squares: Tensor) -> None:
        self._squares = squares if self._squares is None else self._squares + squares

    def _noise(self) -> int | None:
        """Returns what the next rows are rounded by at random; None: to the nearest."""
        return int(torch.randint(2**62, (), generator=self._generator)) if self.stochastic else None


class Quantiser(Codec):
    """Whole numbers of 8, 4 or 2 bits between a row's least and largest entry, which go with it in the rows' own dtype.

    Both come back exactly, and so do rows that are constant. A row with an entry that is not finite comes back as NaN.
    """

    @override
    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return 2 * dtype.itemsize + packed_bytes(width, self._bits)

    @override
    def encode(self, rows: Tensor, out: Tensor) -> None:
        if rows.numel() == 0:
            out.zero_()
            return
        ends, packed, squares = quantise(rows, self._bits, self._noise())
        first = 2 * rows.dtype.itemsize
        out[:, :first] = ends.view(torch.uint8)
        out[:, first:] = packed
        self._count(squares)

    @override
    def decode(self, data: Tensor, out: Tensor) -> None:
        if out.numel():
            first = 2 * out.dtype.itemsize
            ends = data[:, :first].clone().view(-1).view(out.dtype).view(-1, 2)  # aligned, wherever data lies
            dequantise(ends, data[:, first:], self._bits, out)


class BlockFloats(Codec):
    """Block floating point: a row as whole numbers of 8 or 4 bits, with sign, times a power of two that takes one byte.

    For narrow rows, beside whose few bits two ends would weigh most, and for differences, which lie around 0. An entry is off by
    at most 2/255 (8 bits) or 2/15 (4) of the row's largest: where that one rounds up to a power of two, as in [0.9375, 0.125]
    of 4 bits; by half as much at most where it nearly does. Rows with an entry that is not finite, or of 2^120 and more, come
    back as NaN; less than 2^-120 as 0.
    """

    @property
    def _most(self) -> int:
        return 2 ** (self._bits - 1) - 1

    @override
    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return 1 + packed_bytes(width, self._bits)

    @override
    def encode(self, rows: Tensor, out: Tensor) -> None:
        if rows.numel() == 0:
            out.zero_()
            return
        values = rows.detach().to(torch.promote_types(rows.dtype, torch.float32))
        largest = values.abs().amax(1, keepdim=True)
        fraction, exponent = torch.frexp(largest)
        # So that the largest is rounded to no more than fits.
        exponent = exponent - (self._bits - 1) + (fraction * (self._most + 1) >= self._most + 0.5).int()
        strange = ~(largest < 2.0**120)
        exponent = exponent.masked_fill(strange, _STRANGE - _MIDDLE).clamp(min=1 - _MIDDLE)
        places = torch.ldexp(values.masked_fill(strange, 0), -exponent.clamp(max=119))
        noise = self._noise()
        if noise is not None:
            generator = torch.Generator(places.device).manual_seed(noise)
            draws = torch.rand(places.shape, generator=generator, dtype=places.dtype, device=places.device)
            codes = (places + draws).floor()
        else:
            codes = places.round()
        codes.clamp_(-self._most, self._most)
        # Squares are summed in steps, which do not overflow, and each row's sum is brought to its size in float64.
        squares = torch.stack([(codes - places).square().sum(1), places.square().sum(1)]).double()
        squares = torch.ldexp(squares, 2 * exponent.clamp(max=119).view(-1))
        self._count(squares.masked_fill(strange.view(-1), float("nan")).sum(1))
        out[:, :1] = exponent + _MIDDLE
        per_byte, num_bytes = 8 // self._bits, out.size(1) - 1
        padded = torch.zeros(len(rows), num_bytes * per_byte, dtype=torch.uint8, device=rows.device)
        padded[:, : rows.size(1)] = codes + self._most
        parts = padded.view(len(rows), per_byte, num_bytes)
        out[:, 1:] = parts[:, 0] if per_byte == 1 else parts[:, 0] | parts[:, 1] << 4

    @override
    def decode(self, data: Tensor, out: Tensor) -> None:
        if out.numel() == 0:
            return
        exponent, packed = data[:, :1].int() - _MIDDLE, data[:, 1:]
        codes = packed if self._bits == 8 else torch.cat([packed & 15, packed >> 4], 1)
        wide = (codes[:, : out.size(1)].int() - self._most).to(torch.promote_types(out.dtype, torch.float32))
        wide = torch.ldexp(wide, exponent.clamp(max=119))
        out.copy_(wide.masked_fill_(data[:, :1] == _STRANGE, float("nan")))


class ShortFloats(Codec):
    """bfloat16: eight bits of digits and float32's range; what is not finite, or beyond that range, stays infinite or NaN."""

    @override
    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return 2 * width

    @override
    def encode(self, rows: Tensor, out: Tensor) -> None:
        if rows.numel():
            self._count(shorten(rows, out.view(torch.bfloat16), self._noise()))

    @override
    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.bfloat16))


def make_codec(name: str | None, stochastic: bool = False, seed: int = 0) -> Codec | None:
    """Returns the codec of that name; None for None, which is exact.

    Args:
        name: ``"int8"``, ``"int4"`` and ``"int2"`` quantise between a row's least and largest entry, ``"bfp8"`` and ``"bfp4"``
            around 0, ``"bf16"`` shortens numbers.
        stochastic: see :class:`Codec`.
        seed: of the rounding; ranks should have different ones.

    Raises:
        ValueError: an unknown name, or stochastic rounding of nothing.
    """
    if name is None:
        if stochastic:
            raise ValueError('stochastic_rounding=True rounds what a codec sends, and there is none: add codec="int8".')
        return None
    if not is_one_of(name, tuple(_BITS)):
        raise ValueError(f"codec must be one of {', '.join(map(repr, _BITS))} or None (got {shown(name)}).")
    kind = Quantiser if name.startswith("int") else BlockFloats if name.startswith("bfp") else ShortFloats
    return kind(name, stochastic, seed)
