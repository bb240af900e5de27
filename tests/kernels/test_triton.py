"""The loops in Triton against numba's, in Triton's interpreter; and compiled for GPUs that are not here. No ranks.

Nothing here says how fast they are, nor what a GPU makes of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from common import campaign
from conftest import RankPool
from torch import Tensor
from warm import cold

from lightning_gnn.kernels import CSR, attention, loops, spmm, sums
from lightning_gnn.kernels import run as runner

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

SHORT = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 5e-6), torch.bfloat16: (2**-7, 1e-5), torch.float16: (2**-10, 1e-5)}
"""Relative and absolute; that of short floats is a unit in the last place, as both sums are rounded once."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls functions of this file in a process in which Triton's kernels are interpreted."""

    class Interpreter(RankPool):
        def _start(self, size: int) -> None:
            # Triton decides while it is imported, which torch does where it is installed.
            before = os.environ.get("TRITON_INTERPRET")
            os.environ["TRITON_INTERPRET"] = "1"
            with cold():
                super()._start(size)
            os.environ.pop("TRITON_INTERPRET")
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before

    pool = Interpreter()
    yield lambda function, *arguments: pool.run(1, _alone, function, *arguments)[0]
    pool.close()


def _alone(rank: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@contextmanager
def in_triton(split: int) -> Iterator[None]:
    """While open, loops on the CPU are Triton's, and rows with more edges than `split` are hubs."""
    from lightning_gnn.kernels import triton_loops

    before, triton_loops.SPLIT = triton_loops.SPLIT, split
    runner.BACKENDS["cpu"] = runner._on_gpu
    try:
        yield
    finally:
        del runner.BACKENDS["cpu"]
        triton_loops.SPLIT = before


def graph(name: str) -> CSR:
    """Rows without edges, duplicates, and a hub; or one of the extremes."""
    if name == "no edges":
        row, rows, cols = torch.zeros(0, dtype=torch.long), 4, 3
    elif name == "no rows":
        row, rows, cols = torch.zeros(0, dtype=torch.long), 0, 5
    elif name == "one row":
        row, rows, cols = torch.zeros(20, dtype=torch.long), 1, 6
    else:
        row, rows, cols = torch.tensor([5] * 75 + [1, 8, 5, 2, 2, 5, 1, 8, 8] + [6] * 9), 9, 7
    order = torch.randperm(len(row))
    col = torch.randint(0, cols, (len(row),))
    csr = CSR.from_coo(row[order], col, rows, cols)
    edge = csr.edge_ids().to(torch.int64 if name == "one row" else torch.int32)
    return CSR(csr.indptr, csr.indices, edge, cols)


def arguments_of(loop: str, csr: CSR, dtype: torch.dtype, heads: int, columns: int, flags: Any) -> dict[str, Any]:
    """What a loop takes; its results, by names in capitals, hold what must be overwritten or added to."""
    one, two, three = flags
    width, (rows, cols, edges) = heads * columns, (csr.num_rows, csr.num_cols, csr.num_edges)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    def few(*shape: int) -> Tensor:  # ties, NaN, both infinities
        return torch.tensor([0, -1, 2, 1, 1, float("inf"), -float("inf"), float("nan")])[
            torch.randint(0, 8 if three else 5, shape)
        ].to(dtype)

    def blank(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    place = csr.edge if one else torch.empty(0, dtype=torch.int32)
    if loop == "spmm":
        out = draw(rows, width) if three else blank(rows, width)
        real = torch.float64 if dtype == torch.float64 else torch.float32
        weight, scale = draw(edges if one else 0).to(real), draw(rows if two else 0).to(real)
        return {"indices": csr.indices, "weight": weight, "x": draw(cols, width), "scale": scale, "OUT": out,
                "weighted": one, "scaled": two, "accumulate": three}  # fmt: skip
    if loop == "spmm_heads":
        return {"indices": csr.indices, "place": place, "weight": draw(edges, heads), "x": draw(cols, heads, columns),
                "OUT": blank(rows, heads, columns), "placed": one}  # fmt: skip
    if loop in ("statistics", "statistics_grad"):
        wanted = (True,) * 4 if one and two else (one, two, three or not two, not one)
        if loop == "statistics_grad":
            # Extremes may be there for the sake of others than the gradient.
            grads = [draw(cols if each else 0, width) for each in wanted]
            return {"indices": csr.indices, "x": few(rows, width), "total": grads[0], "square": grads[1],
                    "top": few(cols, width), "top_grad": grads[2], "bottom": few(cols, width), "bottom_grad": grads[3],
                    "OUT": blank(rows, width)}  # fmt: skip
        made = [few(rows if each else 0, width) if two else blank(rows if each else 0, width) for each in wanted]
        counts = [torch.where(each.isnan(), 1, torch.randint(1, 4, each.shape)).int() for each in made]
        return {"indices": csr.indices, "x": few(cols, width), "TOTAL": made[0], "SQUARE": made[1], "TOP": made[2],
                "TOPS": counts[2], "BOTTOM": made[3], "BOTTOMS": counts[3], "accumulate": two}  # fmt: skip
    if loop == "slot_sums":
        return {"place": place, "values": draw(edges, width), "OUT": blank(rows, width), "placed": one}
    if loop == "slot_maxima":
        return {"values": few(edges, width), "OUT": blank(rows, width)}
    if loop in ("minus_rows", "times_rows"):
        return {"values": draw(edges, width), "rows": draw(rows, width), "OUT": blank(edges, width)}
    if loop == "pair_sums":
        return {"indices": csr.indices, "source": draw(cols, width), "target": draw(rows, width), "OUT": blank(edges, width)}
    near, far = draw(rows, heads, columns), draw(cols, heads, columns)
    if loop == "pair_products":
        return {"indices": csr.indices, "source": far, "target": near, "OUT": blank(edges, heads)}
    if loop == "additive_scores":
        return {"indices": csr.indices, "source": far, "target": near, "attention": draw(heads, columns), "slope": 0.2,
                "OUT": blank(edges, heads)}  # fmt: skip
    return {"indices": csr.indices, "place": place, "grad": draw(edges, heads), "near": near, "far": far, "slope": 0.2,
            "OUT": torch.full_like(near, float("nan")), "placed": one}  # fmt: skip


LOOPS = ["spmm", "spmm_heads", "slot_sums", "statistics", "slot_maxima", "statistics_grad", "additive_scores_grad",
         "pair_sums", "minus_rows", "times_rows", "pair_products", "additive_scores"]  # fmt: skip
# Graph, dtype, heads, columns, edges above which a row is split, three options. Rows of more than 32 edges take several
# rounds in one column, of more than 8 in 65 and more; 135 columns take two programs.
FEW = [
    ("awkward", torch.float32, 1, 1, 8, (True, True, True)),
    ("awkward", torch.float64, 3, 5, 40, (False, False, False)),
    ("awkward", torch.bfloat16, 2, 8, 8, (True, False, True)),
    ("awkward", torch.float16, 1, 33, 1024, (False, True, False)),
    ("awkward", torch.float32, 5, 27, 8, (False, True, True)),
    ("awkward", torch.float64, 1, 6, 8, (True, True, False)),
    ("no edges", torch.float32, 2, 3, 8, (True, True, True)),
    ("one row", torch.float64, 1, 7, 8, (True, False, False)),
    ("no rows", torch.float32, 2, 2, 8, (True, True, False)),
    ("awkward", torch.float32, 3, 0, 8, (True, False, False)),
]
ALL = list(
    itertools.product(
        ["awkward", "no edges", "one row", "no rows"],
        TOLERANCE,
        [1, 3],
        [1, 45],
        [8, 40, 1024],
        [*itertools.product((False, True), repeat=3)],
    )
)


def compare(loop: str, cases: list[Any]) -> None:
    """Holds Triton's results next to numba's, which have float32 where Triton has shorter floats."""
    for seed, (name, dtype, heads, columns, split, flags) in enumerate(cases):
        torch.manual_seed(seed)
        csr = graph(name)
        given = arguments_of(loop, csr, dtype, heads, columns, flags)
        ours = {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}
        theirs = {
            key: value.to(torch.float32 if value.dtype in SHORT else value.dtype, copy=True)
            if isinstance(value, Tensor)
            else value
            for key, value in given.items()
        }
        runner.over_rows(getattr(loops, loop), csr, *theirs.values(), work=0)
        with in_triton(split):
            runner.over_rows(getattr(loops, loop), csr, *ours.values(), work=0)
        for key in filter(str.isupper, given):
            exact = key in ("TOP", "TOPS", "BOTTOM", "BOTTOMS") or loop == "slot_maxima"
            rtol, atol = (0.0, 0.0) if exact else TOLERANCE[dtype]
            torch.testing.assert_close(
                ours[key],
                theirs[key].to(ours[key].dtype),
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, about=(key, name, dtype, heads, columns, split, flags): f"{about}: {text}",
            )


@needs_triton
@pytest.mark.parametrize("loop", LOOPS)
def test_same_as_numba(interpreted, loop):
    interpreted(compare, loop, FEW)


@needs_triton
@pytest.mark.campaign
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("part", range(8))
def test_same_as_numba_in_all_cases(interpreted, loop, part):
    interpreted(compare, loop, ALL[part::8])
