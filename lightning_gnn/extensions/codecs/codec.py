"""Codecs: rows of floating numbers as fewer bytes, approximately, and back.

Source: CDFGNN section 5, the linear quantisation of eq. 22 and 23. As printed the largest entry of a row would become 2^B, which
B bits do not hold; ours has 2^B - 1 steps, and an error of at most (max - min) / (2 (2^B - 1)) in place of
(max - min) / 2^(B + 1).

n rows, F columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.arguments import is_one_of, shown
from lightning_gnn.extensions.codecs.kernels import dequantise, packed_bytes, quantise, shorten

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
