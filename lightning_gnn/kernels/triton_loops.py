"""GPU versions of loops in :mod:`lightning_gnn.kernels.loops`; :mod:`lightning_gnn.kernels.run` calls them.

Each function takes the CSR matrix in place of `indptr`, and otherwise the arguments of the loop with its name, except `low` and
`high`. Tensors are contiguous, on the matrix's device. Floats may have any of four dtypes: bfloat16, float16 and float32 are
summed in float32, float64 in float64. Results are rounded once, to the dtype of `out`. They have been compared with numba's loops
in Triton's interpreter and on an H200.

A GPU program writes its own elements, without atomics. The order of its additions depends only on the matrix and the number of
columns, so results are bitwise reproducible. Rows with more than :data:`SPLIT` edges are split into segments of this length. A
second launch combines their partial results in order, so that the GPU does not wait for one program with a hub. Nothing is tuned
at run time, because another tile size changes the order of additions.

R rows, K columns of the matrix, E slots, F columns of the dense operand; H heads of C channels each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.kernels import triton_kernels as kernels
from lightning_gnn.kernels.csr import CSR, Segments

SPLIT = 1024
"""Edges of a segment: 32 to 128 iterations of a program; partial results are a thousandth of the data read for them."""


# Loops ########################################################################


def spmm(
    csr: CSR, indices: Tensor, weight: Tensor, x: Tensor, scale: Tensor, out: Tensor,
    weighted: bool, scaled: bool, accumulate: bool,
) -> None:  # fmt: skip
    _sum_rows(csr, indices, None, weight if weighted else None, x, scale if scaled else None, out, 1, accumulate)


def spmm_heads(
    csr: CSR, indices: Tensor, place: Tensor, weight: Tensor, x: Tensor, out: Tensor, placed: bool
) -> None:  # fmt: skip
    _sum_rows(csr, indices, place if placed else None, weight, x, None, out, x.size(1), False)


def slot_sums(csr: CSR, place: Tensor, values: Tensor, out: Tensor, placed: bool) -> None:
    _sum_rows(csr, place if placed else None, None, None, values, None, out, 1, False)


def statistics(
    csr: CSR, indices: Tensor, x: Tensor, total: Tensor, square: Tensor, top: Tensor, tops: Tensor,
    bottom: Tensor, bottoms: Tensor, accumulate: bool,
) -> None:  # fmt: skip
    _statistics_of_rows(csr, indices, x, (total, square, top, tops, bottom, bottoms), accumulate, counted=True)


def statistics_grad(
    csr: CSR, indices: Tensor, x: Tensor, total: Tensor, square: Tensor, top: Tensor, top_grad: Tensor,
    bottom: Tensor, bottom_grad: Tensor, out: Tensor,
) -> None:  # fmt: skip
    _in_segments(
        kernels.statistics_grad, csr, (indices, x, total, square, top, top_grad, bottom, bottom_grad), out, (),
        SUM=len(total) > 0, SQUARES=len(square) > 0, MAX=len(top_grad) > 0, MIN=len(bottom_grad) > 0,
    )  # fmt: skip


def additive_scores_grad(
    csr: CSR, indices: Tensor, place: Tensor, grad: Tensor, row_values: Tensor, col_values: Tensor, slope: float, out: Tensor,
    placed: bool,
) -> None:  # fmt: skip
    heads, columns = col_values.shape[1:]
    _in_segments(
        kernels.additive_scores_grad, csr, (indices, place, grad, row_values, col_values), out, (heads, columns),
        SLOPE=slope, PLACED=placed,
    )  # fmt: skip


def pair_sums(csr: CSR, indices: Tensor, source: Tensor, target: Tensor, out: Tensor) -> None:
    _launch_over_slots(csr, indices, source, target, out, "plus")


def below_maxima(csr: CSR, values: Tensor, largest: Tensor, out: Tensor, complete: bool) -> None:
    if not complete:
        _statistics_of_rows(csr, None, values, (largest[:0],) * 2 + (largest,) + (largest[:0],) * 3, False, counted=False)
    _launch_over_slots(csr, None, values, largest, out, "minus")


def shares(csr: CSR, values: Tensor, total: Tensor, complete: bool) -> None:
    if not complete:
        _sum_rows(csr, None, None, None, values, None, total, 1, False)
    # Sums are rounded before the product, which is exact enough because softmax passes no shorter floats than float32.
    _launch_over_slots(csr, None, values, total.add_(1e-16).reciprocal_(), values, "times")


def shares_grad(csr: CSR, values: Tensor, grad: Tensor, total: Tensor, out: Tensor, complete: bool) -> None:
    scaled = values * grad
    if not complete:
        _sum_rows(csr, None, None, None, scaled, None, total, 1, False)
    _launch_over_slots(csr, None, values, total, out, "times")
    out.neg_().add_(scaled)


def pair_products(csr: CSR, indices: Tensor, source: Tensor, target: Tensor, out: Tensor) -> None:
    _launch_over_pairs(csr, indices, source, target, source, 0.0, out, additive=False)


def additive_scores(
    csr: CSR, indices: Tensor, source: Tensor, target: Tensor, attention: Tensor, slope: float, out: Tensor
) -> None:
    _launch_over_pairs(csr, indices, source, target, attention, slope, out, additive=True)


# Quantization: over rows, without a matrix ###################################


def quantise(
    x: Tensor, ends: Tensor, packed: Tensor, squares: Tensor, bits: int, rounding: float, key: Any, stochastic: bool
) -> None:  # fmt: skip
    _launch_over_rows(
        kernels.quantise, x, (x, ends, packed, squares), (packed.size(1), int(key), rounding),
        BITS=bits, STOCHASTIC=stochastic,
    )  # fmt: skip


def dequantise(packed: Tensor, ends: Tensor, out: Tensor, bits: int) -> None:
    _launch_over_rows(kernels.dequantise, out, (packed, ends, out), (packed.size(1),), BITS=bits)


def shorten(x: Tensor, short: Tensor, squares: Tensor, key: Any, stochastic: bool) -> None:
    _launch_over_rows(kernels.shorten, x, (x, short, squares), (int(key),), STOCHASTIC=stochastic)


# Launches #####################################################################


def _launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 1, fused: bool = True, **constants: Any
) -> None:  # fmt: skip
    # Fused multiply-add is on or off as in numba's loops, independent of the default of a Triton version.
    kernel[grid](*arguments, num_warps=num_warps, enable_fp_fusion=fused, **constants)


def _launch_over_rows(kernel: Any, rows: Tensor, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], **constants: Any) -> None:
    """Launch a quantization kernel over ``rows [n, F]``."""
    num_rows, columns = rows.shape
    if rows.numel() == 0:
        return
    block = min(128, triton.next_power_of_2(columns))
    count = 512 // block
    _launch(
        kernel, (-(-num_rows // count),), *tensors, num_rows, columns, *numbers, fused=False, ROWS=count, BLOCK=block, **constants
    )


def _wide(out: Tensor) -> Any:
    """Returns the dtype in which results like `out` are computed."""
    return tl.float64 if out.dtype == torch.float64 else tl.float32


def _tile(width: int, tiles: int = 1) -> tuple[dict[str, Any], int]:
    """Returns the number of edges and columns of a program with `tiles` tiles, and its number of warps.

    About 512 numbers, 16 per thread, so that enough loads are in progress where a warp has one row. The widest tiles use two
    warps, because sums and loaded numbers together must fit into registers.
    """
    block = min(128, triton.next_power_of_2(max(1, width)))
    edges = min(32, max(8, 512 // block)) // tiles
    return {"EDGES": edges, "BLOCK": block}, 2 if block == 128 else 1


def _grid(units: int, width: int, block: int) -> tuple[int, int]:
    # Programs of a block of columns are adjacent, so that gathered rows are more often in the cache.
    return units, -(-width // block)


def _segments(csr: CSR) -> tuple[Segments | None, int, tuple[Tensor, Tensor, Tensor, int]]:
    """Returns the segments, if any, the number of programs, and the bounds of rows and segments."""
    segments = csr.segments(SPLIT)
    if segments is None:
        return None, csr.num_rows, (csr.indptr, csr.indptr, csr.indptr, 0)
    count = len(segments.start)
    return segments, count + csr.num_rows, (csr.indptr, segments.row, segments.start, count)


def _in_segments(
    kernel: Any, csr: CSR, tensors: tuple[Tensor, ...], out: Tensor, sizes: tuple[int, ...],
    scale: Tensor | None = None, accumulate: bool = False, **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel that sums over rows and, for hubs, a second kernel that sums the results of segments."""
    if out.numel() == 0:
        return
    segments, programs, bounds = _segments(csr)
    width = out[0].numel()
    tile, num_warps = _tile(width)
    wide = _wide(out)
    part = out.new_empty((bounds[-1], width), dtype=torch.float64 if wide == tl.float64 else torch.float32)
    constants |= {"WIDE": wide, "SPLIT": SPLIT, "HUBS": segments is not None, **tile}
    grid = _grid(programs, width, tile["BLOCK"])
    _launch(kernel, grid, *bounds[:3], *tensors, out, part, bounds[3], *sizes, width, num_warps=num_warps, **constants)
    if segments is not None:
        none, factor = csr.indices, part if scale is None else scale
        _launch(
            kernels.row_sums, _grid(len(segments.hubs), width, tile["BLOCK"]),
            segments.first, segments.hubs, segments.start, none, none, part, part, factor, out, part, 0, 1, width, width,
            INDEXED=False, WEIGHTED=False, PLACED=False, SCALED=scale is not None, ACCUMULATE=accumulate,
            HUBS=False, SECOND=True, SPLIT=SPLIT, WIDE=wide, num_warps=num_warps, **tile,
        )  # fmt: skip


def _sum_rows(
    csr: CSR, indices: Tensor | None, place: Tensor | None, weight: Tensor | None, x: Tensor, scale: Tensor | None,
    out: Tensor, heads: int, accumulate: bool,
) -> None:  # fmt: skip
    optional = (indices, place, weight)
    tensors = (*(x if each is None else each for each in optional), x, x if scale is None else scale)
    columns = out[:1].numel() // heads if heads else 0
    _in_segments(
        kernels.row_sums, csr, tensors, out, (heads, columns), scale, accumulate,
        INDEXED=indices is not None, WEIGHTED=weight is not None, PLACED=place is not None, SCALED=scale is not None,
        ACCUMULATE=accumulate, SECOND=False,
    )  # fmt: skip


def _statistics_of_rows(
    csr: CSR, indices: Tensor | None, x: Tensor, results: tuple[Tensor, ...], accumulate: bool, counted: bool
) -> None:
    width = x.size(1)
    if csr.num_rows == 0 or width == 0:
        return
    segments, programs, bounds = _segments(csr)
    tile, num_warps = _tile(width, 2)  # sums and extrema are up to six tiles
    wide = _wide(x)

    def part(result: Tensor) -> Tensor:
        exact = result.dtype if result.dtype in (torch.int32, torch.float64) else torch.float32
        return result.new_empty((bounds[3] if len(result) else 0, width), dtype=exact)

    parts = [part(result) for result in results]
    wanted = {name: len(results[index]) > 0 for name, index in (("SUM", 0), ("SQUARES", 1), ("MAX", 2), ("MIN", 4))}
    constants = wanted | {"INDEXED": indices is not None, "COUNTED": counted, "SPLIT": SPLIT, "WIDE": wide} | tile
    tensors = (x if indices is None else indices, x, *results, *parts)
    grid = _grid(programs, width, tile["BLOCK"])
    common: dict[str, Any] = {"ACCUMULATE": accumulate, "num_warps": num_warps, **constants}
    hubs = segments is not None
    _launch(kernels.statistics, grid, *bounds[:3], *tensors, bounds[3], width, HUBS=hubs, SECOND=False, **common)
    if segments is not None:
        grid = _grid(len(segments.hubs), width, tile["BLOCK"])
        starts = (segments.first, segments.hubs, segments.start)
        _launch(kernels.statistics, grid, *starts, *tensors, 0, width, HUBS=False, SECOND=True, **common)


def _launch_over_slots(csr: CSR, indices: Tensor | None, values: Tensor, rows: Tensor, out: Tensor, operation: str) -> None:
    if out.numel() == 0:
        return
    width = out.size(1)
    tile, num_warps = _tile(width)
    col = csr.kept_rows if indices is None else indices
    _launch(
        kernels.on_slots, _grid(-(-csr.num_edges // tile["EDGES"]), width, tile["BLOCK"]),
        csr.kept_rows, col, values, rows, out, csr.num_edges, width,
        INDEXED=indices is not None, OPERATION=operation, WIDE=_wide(out), num_warps=num_warps, **tile,
    )  # fmt: skip


def _launch_over_pairs(
    csr: CSR, indices: Tensor, source: Tensor, target: Tensor, attention: Tensor, slope: float, out: Tensor, additive: bool
) -> None:
    if out.numel() == 0:
        return
    heads, columns = source.shape[1:]
    tile, num_warps = _tile(columns)
    _launch(
        kernels.pairs, (-(-csr.num_edges // tile["EDGES"]) * heads,),
        csr.kept_rows, indices, source, target, attention, out, csr.num_edges, heads, columns,
        SLOPE=slope, ADDITIVE=additive, WIDE=_wide(out), num_warps=num_warps, **tile,
    )  # fmt: skip
