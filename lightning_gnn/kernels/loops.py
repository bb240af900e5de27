"""Loops over edges and rows, compiled by numba at first use and cached on disk; :mod:`lightning_gnn.kernels.run` calls them.

Each loop processes rows `low` to `high`, usually of a CSR matrix, and writes only these rows of its result. Threads therefore
share no output.

R rows, K columns of the matrix, E slots, F columns of the dense operand; H heads of C channels each.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg"

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from lightning_gnn.registry import feature

AHEAD = 64
"""Prefetch distance in slots: the fastest of 8, 16, 32 and 64 at 16 and 128 columns."""

LOOPS: list[Any] = []
"""All loops, compiled or not."""


if not os.access(Path(__file__).parent, os.W_OK):
    feature("ensure_kernel_cache")()


@cache
def _helpers(module: str) -> bytes:
    """Returns a digest of the files of a module's compiled helper functions, and of their helpers."""
    numbas = (value for value in vars(sys.modules[module]).values() if type(value).__module__.startswith("numba."))
    homes = {getattr(value, "__module__", "") for value in numbas} - {module}
    own = sorted(home for home in homes if home.partition(".")[0] == __name__.partition(".")[0])
    files = (Path(str(sys.modules[home].__file__)).read_bytes() + _helpers(home) for home in own)
    return blake2b(b"".join(files)).digest()


def compile_loop(function: Callable[..., Any], **options: Any) -> Any:
    """Returns a function that numba compiles at the first call and caches on disk until its file or a helper's file changes."""
    made = numba.njit(cache=True, nogil=True, **options)(function)
    if hasattr(made, "_cache"):  # not with NUMBA_DISABLE_JIT; private API of numba 0.59 to 0.68
        kept = made._cache._cache_file
        kept._source_stamp = kept._source_stamp, _helpers(function.__module__)  # numba's own stamp covers the loop's file only
    return made


def loop(function: Callable[..., Any]) -> Any:
    # Sums may be reassociated for vectorization. The order is fixed at compile time, so results do not vary.
    LOOPS.append(compile_loop(function, fastmath={"contract", "nsz", "reassoc"}))
    return LOOPS[-1]


def exact_loop(function: Callable[..., Any]) -> Any:
    # Each operation is rounded as written, so that other devices compute the same bits.
    LOOPS.append(compile_loop(function, error_model="numpy"))
    return LOOPS[-1]


# Parts of loops ###############################################################


@intrinsic
def prefetch(typing_context: Any, array: Any, row: Any) -> Any:
    """Prefetch the cache lines of ``array[row]``, which is contiguous."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, row_type = signature.args
        made = context.make_array(kind)(context, builder, arguments[0])
        zero = context.get_constant(types.intp, 0)
        place = [context.cast(builder, arguments[1], row_type, types.intp), *[zero] * (kind.ndim - 1)]
        byte, number = ir.IntType(8), ir.IntType(32)
        start = builder.bitcast(
            cgutils.get_item_pointer(context, builder, kind, made, place, wraparound=False), byte.as_pointer()
        )
        form = ir.FunctionType(ir.VoidType(), [start.type, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0i8")
        length = builder.extract_value(made.strides, 0)
        line = context.get_constant(types.intp, 64)
        with cgutils.for_range_slice(builder, zero, length, line) as (offset, _):
            # Options: read access, nearest cache, data cache.
            options = [ir.Constant(number, value) for value in (0, 3, 1)]
            builder.call(ask, [builder.gep(start, [offset]), *options])
        return context.get_dummy_value()

    return types.void(array, row), generate


@intrinsic
def _as_float32(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _as_bits(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _wide(value):
    """Returns a bfloat16, stored as uint16, as float32; other numbers unchanged."""


@overload(_wide, inline="always")
def _wide_compiled(value):
    if value == types.uint16:
        return lambda value: _as_float32(np.uint32(value) << np.uint32(16))
    return lambda value: value


# Sums over the edges of each row ##############################################


@loop
def spmm(indptr, indices, weight, x, scale, out, weighted, scaled, accumulate, low, high):
    """``out[r] (+)= sum of weight[s] * x[col]``, then times ``scale[r]``.

    weight ``[E]``, scale ``[R]``, or empty; x ``[K, F]``, also bfloat16 as uint16; out ``[R, F]``.
    """
    columns, last = x.shape[1], len(indices) - 1
    for row in range(low, high):
        if not accumulate:
            for f in range(columns):
                out[row, f] = 0
        slot, end = indptr[row], indptr[row + 1]
        # Four neighbors per pass: the output row is read and written a quarter as often.
        while slot + 4 <= end:
            for ahead in range(slot + AHEAD, slot + AHEAD + 4):
                prefetch(x, indices[min(ahead, last)])
            a, b, c, d = indices[slot], indices[slot + 1], indices[slot + 2], indices[slot + 3]
            if weighted:
                u, v, w, z = weight[slot], weight[slot + 1], weight[slot + 2], weight[slot + 3]
                for f in range(columns):
                    out[row, f] += (u * _wide(x[a, f]) + v * _wide(x[b, f])) + (w * _wide(x[c, f]) + z * _wide(x[d, f]))
            else:
                for f in range(columns):
                    out[row, f] += (_wide(x[a, f]) + _wide(x[b, f])) + (_wide(x[c, f]) + _wide(x[d, f]))
            slot += 4
        while slot < end:
            prefetch(x, indices[min(slot + AHEAD, last)])
            a = indices[slot]
            if weighted:
                u = weight[slot]
                for f in range(columns):
                    out[row, f] += u * _wide(x[a, f])
            else:
                for f in range(columns):
                    out[row, f] += _wide(x[a, f])
            slot += 1
        if scaled:
            for f in range(columns):
                out[row, f] *= scale[row]


@loop
def spmm_heads(indptr, indices, place, weight, x, out, placed, low, high):
    """``out[r, h] = sum of weight[s, h] * x[col, h]``; with `placed`, the weight of slot s is at ``place[s]``.

    place ``[E]`` or empty; weight ``[E, H]``; x ``[K, H, C]``; out ``[R, H, C]``.
    """
    heads, columns, last = x.shape[1], x.shape[2], len(indices) - 1
    for row in range(low, high):
        out[row] = 0
        slot, end = indptr[row], indptr[row + 1]
        while slot < end:
            several = min(end - slot, 4)
            for ahead in range(slot + AHEAD, slot + AHEAD + several):
                prefetch(x, indices[min(ahead, last)])
                if placed:
                    prefetch(weight, place[min(ahead, last)])
            if several == 4:
                a, b, c, d = indices[slot], indices[slot + 1], indices[slot + 2], indices[slot + 3]
                p, q, r, s = slot, slot + 1, slot + 2, slot + 3
                if placed:
                    p, q, r, s = place[slot], place[slot + 1], place[slot + 2], place[slot + 3]
                for h in range(heads):
                    u, v, w, z = weight[p, h], weight[q, h], weight[r, h], weight[s, h]
                    for f in range(columns):
                        out[row, h, f] += (u * x[a, h, f] + v * x[b, h, f]) + (w * x[c, h, f] + z * x[d, h, f])
            else:
                for rest in range(slot, slot + several):
                    a, p = indices[rest], place[rest] if placed else rest
                    for h in range(heads):
                        u = weight[p, h]
                        for f in range(columns):
                            out[row, h, f] += u * x[a, h, f]
            slot += several


@loop
def statistics(indptr, indices, x, total, square, top, tops, bottom, bottoms, accumulate, low, high):
    """Compute sums, sums of squares, maxima and minima over each row's edges, and the number of edges that attain each extremum.

    x ``[K, F]``; the others ``[R, F]``, or ``[0, F]`` for statistics that are not requested; tops and bottoms int32. Rows without
    edges get infinite extrema. A NaN among the values makes an extremum NaN.
    """
    columns, last, one = x.shape[1], len(indices) - 1, np.int32(1)
    summed, squared, maximal, minimal = len(total) > 0, len(square) > 0, len(top) > 0, len(bottom) > 0
    for row in range(low, high):
        if not accumulate:
            if summed:
                total[row] = 0
            if squared:
                square[row] = 0
            if maximal:
                top[row], tops[row] = -np.inf, 0
            if minimal:
                bottom[row], bottoms[row] = np.inf, 0
        for slot in range(indptr[row], indptr[row + 1]):
            prefetch(x, indices[min(slot + AHEAD, last)])
            a = indices[slot]
            if summed:
                for f in range(columns):
                    total[row, f] += x[a, f]
            if squared:
                for f in range(columns):
                    square[row, f] += x[a, f] * x[a, f]
            if maximal:
                for f in range(columns):
                    value, best, count = x[a, f], top[row, f], tops[row, f]
                    beats = not (value <= best) and best == best
                    tops[row, f] = one if beats else count + np.int32(value == best)
                    top[row, f] = value if beats else best
            if minimal:
                for f in range(columns):
                    value, best, count = x[a, f], bottom[row, f], bottoms[row, f]
                    beats = not (value >= best) and best == best
                    bottoms[row, f] = one if beats else count + np.int32(value == best)
                    bottom[row, f] = value if beats else best


@loop
def statistics_grad(indptr, indices, x, total, square, top, top_grad, bottom, bottom_grad, out, low, high):
    """Compute the gradient of `statistics` over a transposed matrix: rows are sources, columns targets.

    - x, out ``[R, F]``.
    - total, square: gradients of the sums, ``[K, F]`` or ``[0, F]``.
    - top, bottom: extrema.
    - top_grad, bottom_grad: gradients of extrema, divided by the number of edges that attain them, or ``[0, F]``.
    """
    columns, last = x.shape[1], len(indices) - 1
    # A literal 0 or 2 would be an integer, and with float32 give float64.
    zero, two = x.dtype.type(0), x.dtype.type(2)
    summed, squared, maximal, minimal = len(total) > 0, len(square) > 0, len(top_grad) > 0, len(bottom_grad) > 0
    for row in range(low, high):
        out[row] = 0
        for slot in range(indptr[row], indptr[row + 1]):
            ahead = indices[min(slot + AHEAD, last)]
            a = indices[slot]
            if summed:
                prefetch(total, ahead)
                for f in range(columns):
                    out[row, f] += total[a, f]
            if squared:
                prefetch(square, ahead)
                for f in range(columns):
                    out[row, f] += two * x[row, f] * square[a, f]
            if maximal:
                prefetch(top, ahead)
                prefetch(top_grad, ahead)
                for f in range(columns):
                    share = top_grad[a, f]
                    out[row, f] += share if x[row, f] == top[a, f] else zero
            if minimal:
                prefetch(bottom, ahead)
                prefetch(bottom_grad, ahead)
                for f in range(columns):
                    share = bottom_grad[a, f]
                    out[row, f] += share if x[row, f] == bottom[a, f] else zero


# Numbers on edges #############################################################


@loop
def pair_sums(indptr, indices, source, target, out, low, high):
    """``out[s, h] = source[col, h] + target[r, h]``; source ``[K, H]``, target ``[R, H]``, out ``[E, H]``."""
    last = len(indices) - 1
    for row in range(low, high):
        for slot in range(indptr[row], indptr[row + 1]):
            prefetch(source, indices[min(slot + AHEAD, last)])
            for h in range(source.shape[1]):
                out[slot, h] = source[indices[slot], h] + target[row, h]


@loop
def pair_products(indptr, indices, source, target, out, low, high):
    """``out[s, h] = <source[col, h], target[r, h]>``: SDDMM. source ``[K, H, C]``, target ``[R, H, C]``, out ``[E, H]``."""
    heads, columns, last = source.shape[1], source.shape[2], len(indices) - 1
    for row in range(low, high):
        for slot in range(indptr[row], indptr[row + 1]):
            prefetch(source, indices[min(slot + AHEAD, last)])
            a = indices[slot]
            for h in range(heads):
                total = source.dtype.type(0)
                for c in range(columns):
                    total += source[a, h, c] * target[row, h, c]
                out[slot, h] = total


@loop
def additive_scores(indptr, indices, source, target, attention, slope, out, low, high):
    """``out[s, h] = <attention[h], leaky_relu(source[col, h] + target[r, h])>``: GATv2.

    source ``[K, H, C]``, target ``[R, H, C]``, attention ``[H, C]``, out ``[E, H]``.
    """
    slope = source.dtype.type(slope)
    heads, columns, last = source.shape[1], source.shape[2], len(indices) - 1
    for row in range(low, high):
        for slot in range(indptr[row], indptr[row + 1]):
            prefetch(source, indices[min(slot + AHEAD, last)])
            a = indices[slot]
            for h in range(heads):
                total = source.dtype.type(0)
                for c in range(columns):
                    z = source[a, h, c] + target[row, h, c]
                    total += attention[h, c] * (z if z > 0 else slope * z)
                out[slot, h] = total


@loop
def additive_scores_grad(indptr, indices, place, grad, row_values, col_values, slope, out, placed, low, high):
    """``out[r, h] = sum of grad[s, h] * leaky_relu'(col_values[col, h] + row_values[r, h])``: part of both sides' gradients.

    place ``[E]`` or empty, as in `spmm_heads`; grad ``[E, H]``; row_values, out ``[R, H, C]``; col_values ``[K, H, C]``.
    """
    slope = col_values.dtype.type(slope)
    heads, columns, last = col_values.shape[1], col_values.shape[2], len(indices) - 1
    for row in range(low, high):
        out[row] = 0
        for slot in range(indptr[row], indptr[row + 1]):
            prefetch(col_values, indices[min(slot + AHEAD, last)])
            a, p = indices[slot], slot
            if placed:
                prefetch(grad, place[min(slot + AHEAD, last)])
                p = place[slot]
            for h in range(heads):
                steep = grad[p, h]
                flat = slope * steep
                for c in range(columns):
                    out[row, h, c] += steep if col_values[a, h, c] + row_values[row, h, c] > 0 else flat


@loop
def slot_sums(indptr, place, values, out, placed, low, high):
    """``out[r, h] = sum of values[s, h]`` over the slots of a row; with `placed`, of ``values[place[s], h]``."""
    last = len(values) - 1
    for row in range(low, high):
        out[row] = 0
        for slot in range(indptr[row], indptr[row + 1]):
            p = slot
            if placed:
                prefetch(values, place[min(slot + AHEAD, last)])
                p = place[slot]
            for h in range(values.shape[1]):
                out[row, h] += values[p, h]


@loop
def below_maxima(indptr, values, largest, out, complete, low, high):
    """``out[s, h] = values[s, h] - largest[r, h]``, the maximum; computed unless `complete`, minus infinity for empty rows."""
    for row in range(low, high):
        start, end = indptr[row], indptr[row + 1]
        if not complete:
            for h in range(values.shape[1]):
                largest[row, h] = values[start, h] if end > start else -np.inf
            for slot in range(start + 1, end):
                for h in range(values.shape[1]):
                    value, best = values[slot, h], largest[row, h]
                    largest[row, h] = value if not (value <= best) and best == best else best
        for slot in range(start, end):
            for h in range(values.shape[1]):
                out[slot, h] = values[slot, h] - largest[row, h]


@loop
def shares(indptr, values, total, complete, low, high):
    """``values[s, h] /= total[r, h] + 1e-16``, the sum of values; computed unless `complete`."""
    one, tiny = values.dtype.type(1), values.dtype.type(1e-16)
    for row in range(low, high):
        start, end = indptr[row], indptr[row + 1]
        if not complete:
            total[row] = 0
            for slot in range(start, end):
                for h in range(values.shape[1]):
                    total[row, h] += values[slot, h]
        for h in range(values.shape[1]):
            total[row, h] = one / (total[row, h] + tiny)
        for slot in range(start, end):
            for h in range(values.shape[1]):
                values[slot, h] *= total[row, h]


@loop
def shares_grad(indptr, values, grad, total, out, complete, low, high):
    """``out[s, h] = values[s, h] * (grad[s, h] - total[r, h])``, the sum of ``values * grad``; computed unless `complete`."""
    for row in range(low, high):
        start, end = indptr[row], indptr[row + 1]
        if not complete:
            total[row] = 0
            for slot in range(start, end):
                for h in range(values.shape[1]):
                    total[row, h] += values[slot, h] * grad[slot, h]
        for slot in range(start, end):
            for h in range(values.shape[1]):
                out[slot, h] = values[slot, h] * grad[slot, h] - values[slot, h] * total[row, h]


# Quantized rows ###############################################################


@numba.njit(fastmath={"nnan", "nsz", "reassoc"})
def _extremes(x, row):
    """Returns the smallest and the largest entry of a row without NaN."""
    low = high = x[row, 0]
    for f in range(1, x.shape[1]):
        value = x[row, f]
        low = value if value < low else low
        high = value if value > high else high
    return low, high


@numba.njit(fastmath={"contract", "nsz", "reassoc"})
def _squares(x, row, codes, low, step):
    """Returns the sums of squares of the quantization errors of a row, and of the row."""
    wrong = total = 0.0
    for f in range(x.shape[1]):
        value = np.float64(x[row, f])
        off = low + step * codes[f] - value
        wrong += off * off
        total += value * value
    return wrong, total


@numba.njit
def _lift(low, high):
    """Returns a power of two that scales a row's range without overflow or loss of digits."""
    extent = high - low
    if extent > 1e300:
        return 2.0**-2
    return 2.0**128 if 0 < extent < 1e-250 else 1.0


@numba.njit
def _uniform(key, place):
    """Returns a number in [0, 1) that depends only on its arguments, uint64: splitmix64."""
    z = key + place * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@exact_loop
def quantise(x, ends, packed, squares, bits, rounding, key, stochastic, low, high):
    """Compute each row's minimum and maximum, and its entries as packed numbers of steps above the minimum.

    Entry f is in byte ``f % B``, at bit ``bits * (f // B)``. Entries of one byte are B apart, so that packing vectorizes.

    - x ``[R, F]``; packed uint8 ``[R, B]``; key uint64.
    - ends ``[R, 2]``: minimum and maximum, NaN for rows that are not finite.
    - squares ``[R, 2]``: sums of squares of errors and of entries.
    - rounding: relative error bound for entries that were quantized before.
    """
    columns, num_bytes, per_byte = x.shape[1], packed.shape[1], 8 // bits
    levels = 2**bits - 1
    codes = np.zeros(num_bytes * per_byte, np.uint8)
    for row in range(low, high):
        strange = 0
        for f in range(columns):
            strange |= not (abs(x[row, f]) < np.inf)
        if strange:
            ends[row] = squares[row] = np.nan
            packed[row] = 0
            continue
        bottom, top = _extremes(x, row)
        ends[row, 0], ends[row, 1] = bottom, top
        least, most = np.float64(bottom), np.float64(top)
        lift = _lift(least, most)
        first = least * lift
        extent = most * lift - first
        scale = levels / extent if extent > 0 else 0.0
        step = extent / levels * (1 / lift)
        if stochastic:
            for f in range(columns):
                value = np.float64(x[row, f])
                place = (value * lift - first) * scale
                code = np.floor(place + 0.5)
                # Entries that were quantized before keep their code.
                if abs(least + step * code - value) > rounding * abs(value):
                    code = min(np.floor(place + _uniform(key, np.uint64(row * columns + f))), np.float64(levels))
                codes[f] = np.int32(code)
        else:
            for f in range(columns):
                codes[f] = np.int32((np.float64(x[row, f]) * lift - first) * scale + 0.5)
        squares[row, 0], squares[row, 1] = _squares(x, row, codes, least, step)
        for b in range(num_bytes):
            packed[row, b] = codes[b]
        for part in range(1, per_byte):
            for b in range(num_bytes):
                packed[row, b] |= codes[part * num_bytes + b] << (part * bits)


@exact_loop
def dequantise(packed, ends, out, bits, low, high):
    """Decode rows of `quantise`; out ``[R, F]``."""
    columns, num_bytes, per_byte = out.shape[1], packed.shape[1], 8 // bits
    levels = 2**bits - 1
    codes = np.empty(num_bytes * per_byte, np.uint8)
    for row in range(low, high):
        for part in range(per_byte):
            for b in range(num_bytes):
                codes[part * num_bytes + b] = (packed[row, b] >> (part * bits)) & levels
        bottom, top = ends[row, 0], ends[row, 1]
        least, most = np.float64(bottom), np.float64(top)
        lift = _lift(least, most)
        step = (most * lift - least * lift) / levels * (1 / lift)
        for f in range(columns):
            value = least + step * codes[f]
            out[row, f] = top if codes[f] == levels else value


@loop
def shorten(x, short, squares, key, stochastic, low, high):
    """Convert float32 to bfloat16, rounded to nearest even or stochastically.

    x float32, short uint16, ``[R, F]``; squares, key: as in `quantise`.
    """
    columns, cut, half = x.shape[1], np.uint32(16), np.uint32(0x7FFF)
    for row in range(low, high):
        for f in range(columns):
            bits = np.uint32(_as_bits(x[row, f]))
            if stochastic:
                draw = np.uint32(_uniform(key, np.uint64(row * columns + f)) * 65536.0)
            else:
                draw = half + ((bits >> cut) & np.uint32(1))
            strange = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
            # Truncation could turn a NaN into infinity.
            kept = np.uint32((bits & np.uint32(0x7FFFFF)) != 0) << np.uint32(6)
            short[row, f] = ((bits >> cut) | kept) if strange else np.uint32(bits + draw) >> cut
        wrong = total = 0.0
        for f in range(columns):
            value = np.float64(x[row, f])
            off = np.float64(_wide(short[row, f])) - value
            wrong += off * off
            total += value * value
        squares[row, 0], squares[row, 1] = wrong, total


# Zero rows ####################################################################


@numba.njit
def _bits(bytes_):
    found = np.uint8(0)
    for byte in range(len(bytes_)):
        found |= bytes_[byte]
    return found


@numba.njit
def _is_zero(row):
    return not (_bits(row[:16]) or _bits(row[16:]))  # the first bytes suffice for most nonzero rows


@numba.njit
def copy(source, target):
    for byte in range(len(target)):
        target[byte] = source[byte]


@loop
def count_nonzero(rows, counts, num_nonzero):
    """Count the rows of each part that have a nonzero byte; rows uint8 ``[R, B]``, counts: rows of each part."""
    first = 0
    for part in range(len(counts)):
        num_nonzero[part] = 0
        for row in range(first, first + counts[part]):
            if not _is_zero(rows[row]):
                num_nonzero[part] += 1
        first += counts[part]


@loop
def pack_nonzero(rows, counts, packed, places, out, num_nonzero):
    """See :func:`count_nonzero`; also write the parts to their places in uint8 `out`.

    A part with `packed` consists of one bit per row, 1 for a row with a nonzero byte, and then these rows; other parts have all
    rows.
    """
    first, width = 0, rows.shape[1]
    for part in range(len(counts)):
        num_nonzero[part] = 0
        start = places[part]
        place = start
        if packed[part]:
            place += (counts[part] + 7) // 8
            out[start:place] = 0
        for row in range(counts[part]):
            found = not _is_zero(rows[first + row])
            if found:
                num_nonzero[part] += 1
            if found and packed[part]:
                out[start + (row >> 3)] |= np.uint8(1 << (row & 7))
            if found or not packed[part]:
                copy(rows[first + row], out[place : place + width])
                place += width
        first += counts[part]


@loop
def unpack_nonzero(data, out):
    """Write the rows of a part from :func:`pack_nonzero`; returns the number of nonzero rows."""
    width, place, num_nonzero = out.shape[1], (len(out) + 7) // 8, 0
    for row in range(len(out)):
        if data[row >> 3] >> (row & 7) & 1:
            copy(data[place : place + width], out[row])
            place += width
            num_nonzero += 1
        else:
            out[row] = 0
    return num_nonzero


# Building #####################################################################


@loop
def counting_sort(keys, num_rows):
    """Returns indptr int64 ``[num_rows + 1]`` and the stable order of `keys`, ``[E]``; `keys` are int32 or int64."""
    indptr = np.zeros(num_rows + 1, np.int64)
    for key in keys:
        indptr[key + 1] += 1
    for row in range(num_rows):
        indptr[row + 1] += indptr[row]
    place = indptr[:-1].copy()
    order = np.empty(len(keys), np.int64)
    for edge in range(len(keys)):
        key = keys[edge]
        order[place[key]] = edge
        place[key] += 1
    return indptr, order


@loop
def count_halves(source, target, num_owned, loops, owned, halo):
    """Count each row's edges from local and from halo nodes, ``[R + 1]`` from 1 on; for `loops` see :func:`fill_halves`."""
    for edge in range(len(source)):
        if source[edge] >= num_owned:
            halo[target[edge] + 1] += 1
        elif not (loops and source[edge] == target[edge]):
            owned[target[edge] + 1] += 1
    if loops:
        for row in range(1, len(owned)):
            owned[row] += 1


@loop
def fill_halves(source, target, num_owned, loops, listed, owned, owned_col, owned_edge, halo, halo_col, halo_edge):
    """Write edges, in list order, into the rows of two matrices; `owned` and `halo` are the next free slots of rows, ``[R]``.

    loops: whether to omit self-loops and append one to each row. listed: whether to store positions in the list.
    """
    for edge in range(len(source)):
        row, col = target[edge], source[edge]
        if col >= num_owned:
            place = halo[row]
            halo[row] = place + 1
            halo_col[place] = col - num_owned
            if listed:
                halo_edge[place] = edge
        elif not (loops and col == row):
            place = owned[row]
            owned[row] = place + 1
            owned_col[place] = col
            if listed:
                owned_edge[place] = edge
    if loops:
        for row in range(len(owned)):
            owned_col[owned[row]] = row


@loop
def transpose(indptr, indices, listed, free, rows, slots):
    """Write a matrix's transpose, in the order of its slots: their `rows` and, if `listed`, their `slots`.

    `free` has the next free slot of each column.
    """
    last = len(indices) - 1
    for row in range(len(indptr) - 1):
        for slot in range(indptr[row], indptr[row + 1]):
            prefetch(free, indices[min(slot + AHEAD, last)])
            place = free[indices[slot]]
            free[indices[slot]] = place + 1
            rows[place] = row
            if listed:
                slots[place] = slot
