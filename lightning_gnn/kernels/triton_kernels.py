"""GPU kernels in Triton's language; :mod:`lightning_gnn.kernels.triton_loops` launches and explains them.

All tensors are contiguous. Addresses are computed in int64: rows times columns may exceed int32. Floats are computed in WIDE:
float32 for 16-bit floats. Absent tensors (weights, places, segments) are replaced by some other tensor and not read.

R rows, K columns of the matrix, E slots; a row has `width` numbers, which for H heads of C channels are H * C.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# Parts of kernels #############################################################


@triton.jit
def _bounds(indptr, rows, starts, num_segments, SPLIT: tl.constexpr, HUBS: tl.constexpr, SECOND: tl.constexpr):
    """Returns the row of a program, its first and last + 1 slot, and whether these are all slots of the row.

    Segments come before rows: the longest work starts first. Split rows have no slots of their own. In the second launch, rows
    are hubs and slots are segments.
    """
    unit = tl.program_id(0).to(tl.int64)
    if SECOND:
        row = tl.load(rows + unit)
        start, end = tl.load(indptr + unit), tl.load(indptr + unit + 1)
        whole = unit >= 0
    elif HUBS:
        of_hub = unit < num_segments
        row = tl.where(of_hub, tl.load(rows + unit, mask=of_hub, other=0), unit - num_segments)
        start, end = tl.load(indptr + row), tl.load(indptr + row + 1)
        whole = (end - start <= SPLIT) & (unit >= num_segments)
        start = tl.where(of_hub, tl.load(starts + unit, mask=of_hub, other=0), start)
        end = tl.where(of_hub, tl.minimum(start + SPLIT, end), tl.where(whole, end, start))
    else:
        row = unit
        start, end = tl.load(indptr + row), tl.load(indptr + row + 1)
        whole = unit >= 0
    return row, start, end, whole


@triton.jit
def _columns(width, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return column, column < width


@triton.jit
def _put(result, out, part, row, width, column, mask, num_segments, HUBS: tl.constexpr):
    """Store the result of a whole row, or of a segment."""
    # A scalar boolean is not broadcast in masks: the interpreter would convert it to int32 and raise an error.
    tl.store(out + row * width + column, result, mask=mask)
    if HUBS:
        unit = tl.program_id(0).to(tl.int64)
        tl.store(part + unit * width + column, result, mask=column < tl.where(unit < num_segments, width, 0))


@triton.jit
def _larger(value, number, best, count, strange):
    """Returns the larger of two numbers, the number of edges that attain it, and whether a NaN has occurred."""
    more = value > best
    count = tl.where(more, number, count + tl.where(value == best, number, 0))
    return tl.where(more, value, best), count, strange | (value != value)


@triton.jit
def _put_extreme(
    best, count, strange, out, counts, part, part_counts, row, width, column, mask, num_segments,
    SIGN: tl.constexpr, ACCUMULATE: tl.constexpr, COUNTED: tl.constexpr, HUBS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store the largest of several edges' maxima; a minimum is the maximum of negated numbers."""
    top = tl.max(best, 0)
    count = tl.sum(tl.where(best == top[None, :], count, 0), 0)
    odd = tl.max(strange.to(tl.int32), 0) > 0
    if ACCUMULATE:
        place = row * width + column
        old = tl.where(mask, SIGN * tl.load(out + place, mask=mask, other=0.0).to(WIDE), float("-inf"))
        top, count, odd = _larger(old, tl.load(counts + place, mask=mask, other=0), top, count, odd)
    top = tl.where(odd, float("nan"), SIGN * top)
    _put(top, out, part, row, width, column, mask, num_segments, HUBS)
    if COUNTED:
        _put(tl.where(odd, 1, count), counts, part_counts, row, width, column, mask, num_segments, HUBS)


# Kernels over rows ############################################################


@triton.jit(do_not_specialize=["num_segments"])
def row_sums(
    indptr, rows, starts, indices, place, weight, x, scale, out, part, num_segments, heads, columns, width,
    INDEXED: tl.constexpr, WEIGHTED: tl.constexpr, PLACED: tl.constexpr, SCALED: tl.constexpr, ACCUMULATE: tl.constexpr,
    HUBS: tl.constexpr, SECOND: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute sums of ``x[col, f]``, or ``x[slot, f]``, times ``weight[p, f // columns]``."""
    row, start, end, whole = _bounds(indptr, rows, starts, num_segments, SPLIT, HUBS, SECOND)
    column, inside = _columns(width, BLOCK)
    # One sum for each of several edges, combined after the loop: loads do not wait for additions.
    total = tl.zeros((EDGES, BLOCK), WIDE)
    for first in range(start, end, EDGES):
        slot = first + tl.arange(0, EDGES)
        here = slot < end
        both = here[:, None] & inside[None, :]
        col = slot
        if INDEXED:
            col = tl.load(indices + slot, mask=here, other=0).to(tl.int64)
        value = tl.load(x + col[:, None] * width + column[None, :], mask=both, other=0.0).to(WIDE)
        if WEIGHTED:
            p = slot
            if PLACED:
                p = tl.load(place + slot, mask=here, other=0).to(tl.int64)
            factor = weight + p[:, None] * heads + (column // columns)[None, :]
            value *= tl.load(factor, mask=both, other=0.0).to(WIDE)
        total += value
    result = tl.sum(total, 0)
    mask = column < tl.where(whole, width, 0)
    if ACCUMULATE:
        result += tl.load(out + row * width + column, mask=mask, other=0.0).to(WIDE)
    if SCALED:
        result *= tl.where(whole, tl.load(scale + row).to(WIDE), 1.0)
    _put(result, out, part, row, width, column, mask, num_segments, HUBS)


@triton.jit(do_not_specialize=["num_segments"])
def statistics(
    indptr, rows, starts, indices, x, total, square, top, tops, bottom, bottoms,
    part_total, part_square, part_top, part_tops, part_bottom, part_bottoms, num_segments, width,
    SUM: tl.constexpr, SQUARES: tl.constexpr, MAX: tl.constexpr, MIN: tl.constexpr,
    INDEXED: tl.constexpr, COUNTED: tl.constexpr, ACCUMULATE: tl.constexpr,
    HUBS: tl.constexpr, SECOND: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute sums, sums of squares and extrema with counts; in the second launch, over the results of segments."""
    row, start, end, whole = _bounds(indptr, rows, starts, num_segments, SPLIT, HUBS, SECOND)
    column, inside = _columns(width, BLOCK)
    zero, lowest = tl.zeros((EDGES, BLOCK), WIDE), tl.full((EDGES, BLOCK), float("-inf"), WIDE)
    none = tl.zeros((EDGES, BLOCK), tl.int32)
    sums, squares, largest, smallest, most, least = zero, zero, lowest, lowest, none, none
    strange_top, strange_bottom = none > 0, none > 0
    for first in range(start, end, EDGES):
        slot = first + tl.arange(0, EDGES)
        here = slot < end
        both = here[:, None] & inside[None, :]
        at = slot[:, None] * width + column[None, :]
        one = both.to(tl.int32)
        if SECOND:
            if SUM:
                sums += tl.load(part_total + at, mask=both, other=0.0)
            if SQUARES:
                squares += tl.load(part_square + at, mask=both, other=0.0)
        else:
            if INDEXED:
                at = tl.load(indices + slot, mask=here, other=0).to(tl.int64)[:, None] * width + column[None, :]
            value = tl.load(x + at, mask=both, other=0.0).to(WIDE)
            sums += value
            squares += value * value
        if MAX:
            if SECOND:
                value = tl.load(part_top + at, mask=both, other=0.0)
                if COUNTED:
                    one = tl.load(part_tops + at, mask=both, other=0)
            high = tl.where(both, value, float("-inf"))
            largest, most, strange_top = _larger(high, one, largest, most, strange_top)
        if MIN:
            if SECOND:
                value = tl.load(part_bottom + at, mask=both, other=0.0)
                if COUNTED:
                    one = tl.load(part_bottoms + at, mask=both, other=0)
            low = tl.where(both, -value, float("-inf"))
            smallest, least, strange_bottom = _larger(low, one, smallest, least, strange_bottom)
    mask = column < tl.where(whole, width, 0)
    if SUM:
        result = tl.sum(sums, 0)
        if ACCUMULATE:
            result += tl.load(total + row * width + column, mask=mask, other=0.0).to(WIDE)
        _put(result, total, part_total, row, width, column, mask, num_segments, HUBS)
    if SQUARES:
        result = tl.sum(squares, 0)
        if ACCUMULATE:
            result += tl.load(square + row * width + column, mask=mask, other=0.0).to(WIDE)
        _put(result, square, part_square, row, width, column, mask, num_segments, HUBS)
    if MAX:
        _put_extreme(
            largest, most, strange_top, top, tops, part_top, part_tops, row, width, column, mask, num_segments,
            1, ACCUMULATE, COUNTED, HUBS, WIDE,
        )  # fmt: skip
    if MIN:
        _put_extreme(
            smallest, least, strange_bottom, bottom, bottoms, part_bottom, part_bottoms, row, width, column, mask,
            num_segments, -1, ACCUMULATE, COUNTED, HUBS, WIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_segments"])
def statistics_grad(
    indptr, rows, starts, indices, x, total, square, top, top_grad, bottom, bottom_grad, out, part, num_segments, width,
    SUM: tl.constexpr, SQUARES: tl.constexpr, MAX: tl.constexpr, MIN: tl.constexpr,
    HUBS: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start, end, whole = _bounds(indptr, rows, starts, num_segments, SPLIT, HUBS, False)
    column, inside = _columns(width, BLOCK)
    own = tl.load(x + row * width + column, mask=inside, other=0.0).to(WIDE)[None, :]
    result = tl.zeros((EDGES, BLOCK), WIDE)
    for first in range(start, end, EDGES):
        slot = first + tl.arange(0, EDGES)
        here = slot < end
        both = here[:, None] & inside[None, :]
        at = tl.load(indices + slot, mask=here, other=0).to(tl.int64)[:, None] * width + column[None, :]
        if SUM:
            result += tl.load(total + at, mask=both, other=0.0).to(WIDE)
        if SQUARES:
            share = tl.load(square + at, mask=both, other=0.0).to(WIDE)
            result += tl.where(both, 2 * own * share, 0.0)  # an infinity of the row times 0 would be NaN
        if MAX:
            share = tl.load(top_grad + at, mask=both, other=0.0).to(WIDE)
            result += tl.where(own == tl.load(top + at, mask=both, other=0.0).to(WIDE), share, 0.0)
        if MIN:
            share = tl.load(bottom_grad + at, mask=both, other=0.0).to(WIDE)
            result += tl.where(own == tl.load(bottom + at, mask=both, other=0.0).to(WIDE), share, 0.0)
    mask = column < tl.where(whole, width, 0)
    _put(tl.sum(result, 0), out, part, row, width, column, mask, num_segments, HUBS)


@triton.jit(do_not_specialize=["num_segments"])
def additive_scores_grad(
    indptr, rows, starts, indices, place, grad, row_values, col_values, out, part, num_segments, heads, columns, width,
    SLOPE: tl.constexpr, PLACED: tl.constexpr,
    HUBS: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start, end, whole = _bounds(indptr, rows, starts, num_segments, SPLIT, HUBS, False)
    column, inside = _columns(width, BLOCK)
    own = tl.load(row_values + row * width + column, mask=inside, other=0.0).to(WIDE)[None, :]
    result = tl.zeros((EDGES, BLOCK), WIDE)
    for first in range(start, end, EDGES):
        slot = first + tl.arange(0, EDGES)
        here = slot < end
        both = here[:, None] & inside[None, :]
        col = tl.load(indices + slot, mask=here, other=0).to(tl.int64)
        p = slot
        if PLACED:
            p = tl.load(place + slot, mask=here, other=0).to(tl.int64)
        z = tl.load(col_values + col[:, None] * width + column[None, :], mask=both, other=0.0).to(WIDE) + own
        steep = tl.load(grad + p[:, None] * heads + (column // columns)[None, :], mask=both, other=0.0).to(WIDE)
        result += tl.where(z > 0, steep, SLOPE * steep)
    mask = column < tl.where(whole, width, 0)
    _put(tl.sum(result, 0), out, part, row, width, column, mask, num_segments, HUBS)


# Kernels over slots: one per edge, so hubs need no segments #######################


@triton.jit(do_not_specialize=["num_edges"])
def on_slots(
    rows, indices, values, row_values, out, num_edges, width,
    INDEXED: tl.constexpr, OPERATION: tl.constexpr, WIDE: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    here = slot < num_edges
    column, inside = _columns(width, BLOCK)
    both = here[:, None] & inside[None, :]
    row = tl.load(rows + slot, mask=here, other=0).to(tl.int64)
    col = slot
    if INDEXED:
        col = tl.load(indices + slot, mask=here, other=0).to(tl.int64)
    value = tl.load(values + col[:, None] * width + column[None, :], mask=both, other=0.0).to(WIDE)
    other = tl.load(row_values + row[:, None] * width + column[None, :], mask=both, other=0.0).to(WIDE)
    if OPERATION == "plus":
        value += other
    elif OPERATION == "minus":
        value -= other
    else:
        value *= other
    tl.store(out + slot[:, None] * width + column[None, :], value, mask=both)


@triton.jit(do_not_specialize=["num_edges"])
def pairs(
    rows, indices, source, target, attention, out, num_edges, heads, columns,
    SLOPE: tl.constexpr, ADDITIVE: tl.constexpr, WIDE: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a number per edge for one head; heads of the same edges are in adjacent programs, for cache reuse."""
    unit = tl.program_id(0)
    head = unit % heads
    slot = (unit // heads).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    here = slot < num_edges
    row = tl.load(rows + slot, mask=here, other=0).to(tl.int64)
    col = tl.load(indices + slot, mask=here, other=0).to(tl.int64)
    at_row, at_col = ((row * heads + head) * columns)[:, None], ((col * heads + head) * columns)[:, None]
    total = tl.zeros((EDGES, BLOCK), WIDE)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        both = here[:, None] & inside[None, :]
        left = tl.load(source + at_col + column[None, :], mask=both, other=0.0).to(WIDE)
        right = tl.load(target + at_row + column[None, :], mask=both, other=0.0).to(WIDE)
        if ADDITIVE:
            z = left + right
            factor = tl.load(attention + head * columns + column, mask=inside, other=0.0).to(WIDE)
            total += tl.where(z > 0, z, SLOPE * z) * factor[None, :]
        else:
            total += left * right
    tl.store(out + slot * heads + head, tl.sum(total, 1), mask=here)


# Kernels over quantized rows: ROWS rows per program, BLOCK bytes or numbers at a time; computed in float64 ###


@triton.jit
def _uniform(key, place):
    """Returns a number in [0, 1) that depends only on its arguments, uint64: splitmix64, as in numba's loops."""
    z = key + place.to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 11).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _rows(num_rows, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < num_rows


@triton.jit
def _scaling(low, high):
    """Returns a power of two that scales a row's range without overflow or loss of digits, and the scaled range."""
    extent = high - low
    lift = tl.where(extent > 1e300, 0.25, tl.where((extent > 0) & (extent < 1e-250), 2.0**128, 1.0))
    return lift, high * lift - low * lift


@triton.jit(do_not_specialize=["num_rows", "key"])
def quantise(
    x, ends, packed, squares, num_rows, columns, num_bytes, key, rounding,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, here = _rows(num_rows, ROWS)
    at_row = (row * columns)[:, None]
    lowest = tl.full((ROWS, BLOCK), float("inf"), tl.float64)
    highest, strange = -lowest, lowest < 0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        both = here[:, None] & (column < columns)[None, :]
        value = tl.load(x + at_row + column[None, :], mask=both, other=0.0).to(tl.float64)
        strange = strange | (both & ~(tl.abs(value) < float("inf")))
        lowest = tl.where(both & (value < lowest), value, lowest)
        highest = tl.where(both & (value > highest), value, highest)
    odd = tl.max(strange.to(tl.int32), 1) > 0
    low = tl.where(odd | ~here, 0.0, tl.min(lowest, 1))
    high = tl.where(odd | ~here, 0.0, tl.max(highest, 1))
    lift, extent = _scaling(low, high)
    levels = (1 << BITS) - 1
    scale = tl.where(extent > 0, levels / tl.where(extent > 0, extent, 1.0), 0.0)
    step = extent / levels * (1 / lift)
    wrong = tl.zeros((ROWS, BLOCK), tl.float64)
    total = wrong
    for first in range(0, num_bytes, BLOCK):
        byte = first + tl.arange(0, BLOCK)
        codes = tl.zeros((ROWS, BLOCK), tl.int32)
        for part in tl.static_range(0, 8 // BITS):
            column = part * num_bytes + byte
            both = here[:, None] & ((byte < num_bytes) & (column < columns))[None, :] & ~odd[:, None]
            place_in_x = at_row + column[None, :]
            value = tl.load(x + place_in_x, mask=both, other=0.0).to(tl.float64)
            place = (value * lift[:, None] - (low * lift)[:, None]) * scale[:, None]
            code = tl.floor(place + 0.5)
            if STOCHASTIC:
                # Entries that were quantized before keep their code.
                off = tl.abs(low[:, None] + step[:, None] * code - value) > rounding * tl.abs(value)
                drawn = tl.floor(place + _uniform(key.to(tl.uint64), place_in_x))
                code = tl.where(off, tl.where(drawn > levels, levels * 1.0, drawn), code)
            error = low[:, None] + step[:, None] * code - value
            wrong += tl.where(both, error * error, 0.0)
            total += tl.where(both, value * value, 0.0)
            codes = codes | (tl.where(both, code, 0.0).to(tl.int32) << (part * BITS))
        tl.store(packed + (row * num_bytes)[:, None] + byte[None, :], codes, mask=here[:, None] & (byte < num_bytes)[None, :])
    tl.store(ends + 2 * row, tl.where(odd, float("nan"), low), mask=here)
    tl.store(ends + 2 * row + 1, tl.where(odd, float("nan"), high), mask=here)
    tl.store(squares + 2 * row, tl.where(odd, float("nan"), tl.sum(wrong, 1)), mask=here)
    tl.store(squares + 2 * row + 1, tl.where(odd, float("nan"), tl.sum(total, 1)), mask=here)


@triton.jit(do_not_specialize=["num_rows"])
def dequantise(
    packed, ends, out, num_rows, columns, num_bytes, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, here = _rows(num_rows, ROWS)
    bottom, top = tl.load(ends + 2 * row, mask=here, other=0.0), tl.load(ends + 2 * row + 1, mask=here, other=0.0)
    low = bottom.to(tl.float64)
    lift, extent = _scaling(low, top.to(tl.float64))
    levels = (1 << BITS) - 1
    step = extent / levels * (1 / lift)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        both = here[:, None] & (column < columns)[None, :]
        at = (row * num_bytes)[:, None] + (column % num_bytes)[None, :]
        byte = tl.load(packed + at, mask=both, other=0).to(tl.int32)
        code = (byte >> (column // num_bytes * BITS)[None, :]) & levels
        value = (low[:, None] + step[:, None] * code.to(tl.float64)).to(top.dtype)
        value = tl.where(code == levels, top[:, None], value)
        tl.store(out + (row * columns)[:, None] + column[None, :], value, mask=both)


@triton.jit(do_not_specialize=["num_rows", "key"])
def shorten(
    x, short, squares, num_rows, columns, key, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, here = _rows(num_rows, ROWS)
    wrong = tl.zeros((ROWS, BLOCK), tl.float64)
    total = wrong
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        both = here[:, None] & (column < columns)[None, :]
        at = (row * columns)[:, None] + column[None, :]
        value = tl.load(x + at, mask=both, other=0.0)
        bits = value.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            draw = (_uniform(key.to(tl.uint64), at) * 65536.0).to(tl.uint32)
        else:
            draw = ((bits >> 16) & 1) + 0x7FFF
        strange = (bits & 0x7F800000) == 0x7F800000
        # Truncation could turn a NaN into infinity.
        mask = tl.where((bits & 0x7FFFFF) != 0, 64, 0).to(tl.uint32)
        result = tl.where(strange, (bits >> 16) | mask, (bits + draw) >> 16)
        tl.store(short + at, result.to(tl.uint16), mask=both)
        error = (result << 16).to(tl.float32, bitcast=True).to(tl.float64) - value.to(tl.float64)
        wrong += tl.where(both, error * error, 0.0)
        total += tl.where(both, value.to(tl.float64) * value.to(tl.float64), 0.0)
    tl.store(squares + 2 * row, tl.sum(wrong, 1), mask=here)
    tl.store(squares + 2 * row + 1, tl.sum(total, 1), mask=here)
