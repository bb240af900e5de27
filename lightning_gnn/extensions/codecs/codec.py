"""Codecs: encode floating-point rows in fewer bytes, approximately, and decode them.

Source: CDFGNN section 5, linear quantization of eq. 22 and 23. As printed, the largest entry of a row would become 2^B, which
does not fit into B bits. This implementation has 2^B - 1 steps. The error is at most (max - min) / (2 (2^B - 1)) instead of (max
- min) / 2^(B + 1).

Compiled loops quantize rows if the device has them, see :mod:`lightning_gnn.kernels.run`; they compute in float64 without storing
it. Other devices use torch kernels over float64 copies, with the same rounding except for ties. No autograd.

n or R rows, F columns, B bytes of a packed row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.arguments import is_one_of, quote
from lightning_gnn.kernels import loops
from lightning_gnn.kernels.run import has_loops, run_over_range


def packed_bytes(width: int, bits: int) -> int:
    """Returns B: the number of bytes for `width` numbers of `bits` bits."""
    return -(-width * bits // 8)


def quantise(rows: Tensor, bits: int, noise: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the minimum and maximum of each row, packed quantized entries, and sums of squares of errors and entries.

    Args:
        rows: floating-point, ``[R, F]``, F above 0.
        bits: bits per number: 2, 4 or 8.
        noise: seed of stochastic rounding, below 2^62. None: round to nearest.

    Returns:
        ends ``[R, 2]`` with the dtype of rows, NaN for rows with a non-finite entry; packed, uint8 ``[R, B]``; sums of squares of
        errors and entries, float64 ``[2]``.
    """
    rows = rows.detach().contiguous()
    rounding = 0.51 * torch.finfo(rows.dtype).eps  # slightly above half: bfloat16 is rounded twice, via float32
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if has_loops(wide.device, wide.dtype):
        ends, squares = wide.new_empty((len(rows), 2)), wide.new_empty((len(rows), 2), dtype=torch.float64)
        packed = wide.new_empty((len(rows), packed_bytes(rows.size(1), bits)), dtype=torch.uint8)
        key, stochastic = np.uint64(noise or 0), noise is not None
        work = rows.numel()
        run_over_range(loops.quantise, len(rows), wide, ends, packed, squares, bits, rounding, key, stochastic, work=work)
    else:
        ends, packed, squares = _quantise(wide, bits, rounding, noise)
    return ends.to(rows.dtype), packed, squares.sum(0)


def dequantise(ends: Tensor, packed: Tensor, bits: int, out: Tensor) -> None:
    """Overwrite `out`, contiguous ``[R, F]``, with the decoded rows; see :func:`quantise`."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    wide = out.detach() if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
    ends = ends.to(dtype)
    if has_loops(out.device, dtype):
        run_over_range(loops.dequantise, len(out), packed.contiguous(), ends, wide, bits, work=out.numel())
    else:
        wide.copy_(_dequantise(ends, packed, bits, out.size(1)))
    if wide.dtype != out.dtype:
        out.copy_(wide)


def shorten(rows: Tensor, short: Tensor, noise: int | None = None) -> Tensor:
    """Overwrite `short`, contiguous bfloat16 ``[R, F]``, with `rows`; infinity and NaN are preserved.

    Returns:
        the sums of squares of errors and of entries, float64 ``[2]``.
    """
    rows = rows.detach().contiguous().float()
    if has_loops(rows.device, rows.dtype):
        squares = rows.new_empty((len(rows), 2), dtype=torch.float64)
        key, stochastic = np.uint64(noise or 0), noise is not None
        run_over_range(loops.shorten, len(rows), rows, short.view(torch.uint16), squares, key, stochastic, work=rows.numel())
        return squares.sum(0)
    short.copy_(rows)
    if noise is not None:
        # Adding random bits before truncation rounds up with a probability proportional to the truncated part.
        draws = torch.randint(2**16, rows.shape, generator=_draws(noise, rows), dtype=torch.int32, device=rows.device)
        rounded = ((rows.view(torch.int32) + draws) & -(2**16)).view(torch.float32)
        short.copy_(torch.where(rows.isfinite(), rounded, rows))
    off = rows.double() - short
    return torch.stack([off.square().sum(), rows.double().square().sum()])


def _draws(noise: int, like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(noise)


def _steps(ends: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the factor that rows are multiplied by first, the extent of the product, and the step, float64 ``[R, 1]`` each."""
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
"""Offset of a block's exponent as a byte, and the byte of rows without an exponent."""


class Codec(ABC):
    """Codec that encodes each row of a message as bytes and decodes it, with equal results on CPU and CUDA.

    Decoded rows are encoded again without further loss, so that relayed rows are equal on all ranks.

    Args:
        name: name of the codec.
        stochastic: whether to round up or down at random, so that the mean of many roundings is the number itself; else to
            nearest.
        seed: seed of the rounding.
    """

    def __init__(self, name: str, stochastic: bool, seed: int) -> None:
        self.name, self.stochastic, self._bits = name, stochastic, _BITS[name]
        self._generator = torch.Generator().manual_seed(seed)
        self._squares: Tensor | None = None

    @abstractmethod
    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Returns the number of bytes of an encoded row of `width` numbers of `dtype`."""

    @abstractmethod
    def encode(self, rows: Tensor, out: Tensor) -> None:
        """Overwrite `out` with the encoded rows.

        Args:
            rows: floating-point, ``[n, F]``.
            out: uint8 ``[n, row_bytes(F, rows.dtype)]``, contiguous, at an even address.
        """

    @abstractmethod
    def decode(self, data: Tensor, out: Tensor) -> None:
        """Overwrite `out` with the rows decoded from `data`.

        Args:
            data: uint8 ``[n, row_bytes(F, out.dtype)]``, contiguous, at an even address.
            out: ``[n, F]``, contiguous, with the dtype of the rows that were encoded.
        """

    def take_squares(self) -> tuple[float, float]:
        """Returns the sums of squares of the errors and of the numbers encoded since the last call."""
        squares, self._squares = self._squares, None
        return (0.0, 0.0) if squares is None else tuple(squares.tolist())

    def random_state(self) -> Tensor | None:
        """Returns the random state of stochastic rounding, uint8; None for rounding to nearest."""
        return self._generator.get_state() if self.stochastic else None

    def set_random_state(self, state: Tensor | None) -> None:
        """Restore the result of :meth:`random_state`; None changes nothing."""
        if state is not None:
            self._generator.set_state(state.clone())

    def _count(self, squares: Tensor) -> None:
        self._squares = squares if self._squares is None else self._squares + squares

    def _noise(self) -> int | None:
        """Returns the rounding seed for the next rows; None for rounding to nearest."""
        return int(torch.randint(2**62, (), generator=self._generator)) if self.stochastic else None


class Quantiser(Codec):
    """Integers of 8, 4 or 2 bits between a row's minimum and maximum, which are sent in the dtype of the row.

    The minimum and maximum are decoded exactly, and so are constant rows. A row with a non-finite entry is decoded as NaN.
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
            ends = data[:, :first].clone().view(-1).view(out.dtype).view(-1, 2)  # aligned for any alignment of data
            dequantise(ends, data[:, first:], self._bits, out)


class BlockFloats(Codec):
    """Block floating point: a row as signed integers of 8 or 4 bits, times a power of two that takes one byte.

    It suits narrow rows, for which a minimum and maximum would take most bytes, and differences, which are around 0. The error of
    an entry is at most 2/255 (8 bits) or 2/15 (4 bits) of the row's largest entry. The maximum occurs if the largest entry rounds
    up to a power of two, as in [0.9375, 0.125] with 4 bits. If it is nearly rounded up, the error is at most half as large. Rows
    with a non-finite entry, or an entry of at least 2^120, are decoded as NaN; entries below 2^-120 as 0.
    """

    @property
    def _max_code(self) -> int:
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
        # Ensures that the largest entry does not round beyond the range.
        exponent = exponent - (self._bits - 1) + (fraction * (self._max_code + 1) >= self._max_code + 0.5).int()
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
        codes.clamp_(-self._max_code, self._max_code)
        # Squares are summed in units of steps, which do not overflow; the sum of each row is scaled in float64.
        squares = torch.stack([(codes - places).square().sum(1), places.square().sum(1)]).double()
        squares = torch.ldexp(squares, 2 * exponent.clamp(max=119).view(-1))
        self._count(squares.masked_fill(strange.view(-1), float("nan")).sum(1))
        out[:, :1] = exponent + _MIDDLE
        per_byte, num_bytes = 8 // self._bits, out.size(1) - 1
        padded = torch.zeros(len(rows), num_bytes * per_byte, dtype=torch.uint8, device=rows.device)
        padded[:, : rows.size(1)] = codes + self._max_code
        parts = padded.view(len(rows), per_byte, num_bytes)
        out[:, 1:] = parts[:, 0] if per_byte == 1 else parts[:, 0] | parts[:, 1] << 4

    @override
    def decode(self, data: Tensor, out: Tensor) -> None:
        if out.numel() == 0:
            return
        exponent, packed = data[:, :1].int() - _MIDDLE, data[:, 1:]
        codes = packed if self._bits == 8 else torch.cat([packed & 15, packed >> 4], 1)
        wide = (codes[:, : out.size(1)].int() - self._max_code).to(torch.promote_types(out.dtype, torch.float32))
        wide = torch.ldexp(wide, exponent.clamp(max=119))
        out.copy_(wide.masked_fill_(data[:, :1] == _STRANGE, float("nan")))


class ShortFloats(Codec):
    """bfloat16: eight significant bits and the range of float32; non-finite or larger numbers become infinite or NaN."""

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
    """Returns the codec with this name; None for None, which is exact.

    Args:
        name: ``"int8"``, ``"int4"`` and ``"int2"`` quantize between a row's minimum and maximum, ``"bfp8"`` and ``"bfp4"`` around
            0, ``"bf16"`` shortens numbers.
        stochastic: see :class:`Codec`.
        seed: seed of the rounding; ranks should have different seeds.

    Raises:
        ValueError: for an unknown name, or stochastic rounding without a codec.
    """
    if name is None:
        if stochastic:
            raise ValueError('stochastic_rounding=True is not supported without a codec. Add codec="int8".')
        return None
    if not is_one_of(name, tuple(_BITS)):
        raise ValueError(f"codec must be one of {', '.join(map(repr, _BITS))} or None (got {quote(name)}).")
    kind = Quantiser if name.startswith("int") else BlockFloats if name.startswith("bfp") else ShortFloats
    return kind(name, stochastic, seed)
