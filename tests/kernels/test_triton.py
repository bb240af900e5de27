"""The loops in Triton against numba's: on a GPU where there is one, else in Triton's interpreter; compiled for GPUs. No ranks.

Nothing here says how fast they are.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from common import campaign
from conftest import RankPool
from torch import Tensor
from warm import cold

from lightning_gnn.extensions.codecs import codec as codes
from lightning_gnn.kernels import CSR, attention, loops, spmm, sums
from lightning_gnn.kernels import run as runner

ON_GPU = torch.cuda.is_available()

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

SHORT = (torch.bfloat16, torch.float16)
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-6, 5e-6),
    torch.bfloat16: (2**-7, 1e-5),
    torch.float16: (2**-10, 1e-5),
}
"""Relative and absolute; that of short floats is a unit in the last place, as both sums are rounded once."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls functions of this file in a process in which Triton's kernels are interpreted."""

    class Interpreter(RankPool):
        start_method = "spawn"

        def _start(self, size: int) -> None:
            # Triton decides while it is imported, which torch does where it is installed.
            before = os.environ.get("TRITON_INTERPRET")
            os.environ["TRITON_INTERPRET"] = "1"
            with cold():
                super()._start(size)
            os.environ.pop("TRITON_INTERPRET")
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before

    pool = RankPool() if ON_GPU else Interpreter()
    yield lambda function, *arguments: pool.run(1, _alone, function, *arguments)[0]
    pool.close()


def _alone(rank: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _through_gpu(name: str, arguments: tuple[Any, ...]) -> None:
    """Runs a loop on copies of its arguments on the GPU, and copies back what it has written, unseen by autograd."""
    moved = [_on_the_gpu(each) for each in arguments]
    runner._on_gpu(name, tuple(moved))
    for here, there in zip(arguments, moved):
        if isinstance(here, Tensor):
            here.data.copy_(there)


def _on_the_gpu(argument: Any) -> Any:
    if isinstance(argument, CSR):
        edge = None if argument.edge is None else argument.edge.cuda()
        return CSR(argument.indptr.cuda(), argument.indices.cuda(), edge, argument.num_cols)
    return argument.cuda() if isinstance(argument, Tensor) else argument


@contextmanager
def in_triton(split: int) -> Iterator[None]:
    """While open, loops on the CPU are Triton's, and rows with more edges than `split` are hubs."""
    from lightning_gnn.kernels import triton_loops

    before, triton_loops.SPLIT = triton_loops.SPLIT, split
    runner.BACKENDS["cpu"] = _through_gpu if ON_GPU else runner._on_gpu
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
        row, rows, cols = torch.tensor([5] * 40 + [1, 8, 5, 2, 2, 5, 1, 8, 8] + [6] * 9), 9, 7
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
    if loop == "below_maxima":
        largest = draw(rows, width) if one else blank(rows, width)
        return {"values": few(edges, width), "LARGEST": largest, "OUT": blank(edges, width), "complete": one}
    if loop in ("shares", "shares_grad"):  # of float32 or float64; positive, so that no sum is close to 0
        dtype = torch.float32 if dtype in SHORT else dtype
        total, values = draw(rows, width).abs() + 1 if one else blank(rows, width), draw(edges, width).abs() + 1
        if loop == "shares":
            return {"VALUES": values, "TOTAL": total, "complete": one}
        return {"values": values, "grad": draw(edges, width), "TOTAL": total, "OUT": blank(edges, width), "complete": one}
    if loop == "pair_sums":
        return {
            "indices": csr.indices,
            "source": draw(cols, width),
            "target": draw(rows, width),
            "OUT": blank(edges, width),
        }
    near, far = draw(rows, heads, columns), draw(cols, heads, columns)
    if loop == "pair_products":
        return {"indices": csr.indices, "source": far, "target": near, "OUT": blank(edges, heads)}
    if loop == "additive_scores":
        return {"indices": csr.indices, "source": far, "target": near, "attention": draw(heads, columns), "slope": 0.2,
                "OUT": blank(edges, heads)}  # fmt: skip
    return {"indices": csr.indices, "place": place, "grad": draw(edges, heads), "near": near, "far": far, "slope": 0.2,
            "OUT": torch.full_like(near, float("nan")), "placed": one}  # fmt: skip


LOOPS = ["spmm", "spmm_heads", "slot_sums", "statistics", "below_maxima", "statistics_grad", "additive_scores_grad",
         "pair_sums", "shares", "shares_grad", "pair_products", "additive_scores"]  # fmt: skip
# Graph, dtype, heads, columns, edges above which a row is split, three options. Rows of more than 32 edges take several
# rounds in one column, of more than 8 in 65 and more; 130 columns take two programs, or rounds. One row has 9 edges.
FEW = [
    ("awkward", torch.float32, 1, 1, 8, (True, True, True)),
    ("awkward", torch.bfloat16, 2, 8, 8, (True, False, True)),
    ("awkward", torch.float32, 1, 130, 9, (False, True, True)),
    ("no edges", torch.float32, 2, 3, 8, (True, True, True)),
]
MORE = [
    ("awkward", torch.float64, 3, 5, 40, (False, False, False)),
    ("awkward", torch.float16, 1, 33, 1024, (False, True, False)),
    ("awkward", torch.float32, 5, 27, 8, (False, True, True)),
    ("awkward", torch.float32, 1, 130, 9, (True, False, True)),
    ("awkward", torch.float64, 1, 6, 8, (True, True, False)),
    ("one row", torch.float64, 1, 7, 8, (True, False, False)),
    ("no rows", torch.float32, 2, 2, 8, (True, True, False)),
    ("awkward", torch.float32, 3, 0, 8, (True, False, False)),
]
ALL = [
    (name, dtype, *sizes, split, flags)
    for name in ("awkward", "no edges", "one row", "no rows")
    for dtype in TOLERANCE
    for sizes in ((1, 1), (3, 45), (1, 130))
    for split in (9, 40)
    for flags in itertools.product((False, True), repeat=3)
]


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
        runner.run_over_rows(getattr(loops, loop), csr, *theirs.values(), work=0)
        with in_triton(split):
            runner.run_over_rows(getattr(loops, loop), csr, *ours.values(), work=0)
        for key in filter(str.isupper, given):
            exact = key in ("TOP", "TOPS", "BOTTOM", "BOTTOMS", "LARGEST")
            rtol, atol = (0.0, 0.0) if exact else TOLERANCE[dtype]
            atol *= max(1.0, float(theirs[key].nan_to_num(0, 0, 0).abs().amax()) / 8) if theirs[key].numel() else 1
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
@pytest.mark.parametrize(
    "cases", [pytest.param(FEW, id="few"), pytest.param(MORE, id="more", marks=pytest.mark.campaign)]
)
def test_same_as_numba(interpreted, loop, cases):
    interpreted(compare, loop, cases)


@needs_triton
@pytest.mark.campaign
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("part", range(8))
def test_same_as_numba_in_all_cases(interpreted, loop, part):
    interpreted(compare, loop, ALL[part::8])


def compare_autograd(name: str, dtype: torch.dtype, split: int, kinds: list[str]) -> None:
    """GAT, GATv2, dot products and a softmax that others take part in, forward and back, against numba."""
    torch.manual_seed(0)
    csr, heads, columns = graph(name), 3, 5
    rows, cols = csr.num_rows, csr.num_cols
    shapes = [(cols, heads, columns), (rows, heads, columns), (heads, columns), (cols, heads), (rows, heads)]
    drawn = [torch.randn(shape).to(dtype) for shape in shapes]
    others = torch.randn(rows, heads), torch.rand(rows, heads)
    upstream = torch.randn(rows, heads, columns)

    def across(partial: Tensor, operation: str) -> Tensor:
        assert partial.dtype not in SHORT
        largest, total = (each.to(partial.dtype) for each in others)
        return torch.maximum(partial, largest) if operation == "max" else partial + total

    def run(kind: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [each.detach().to(dtype).requires_grad_() for each in drawn]
        source, target, weights, left, right = inputs
        if kind == "additive":
            scores = attention.additive_scores(csr, source, target, weights, 0.2)
        elif kind == "dot":
            scores = attention.pair_products(csr, source, target)
        else:
            scores = torch.nn.functional.leaky_relu(attention.pair_sums(csr, left, right), 0.2)
        shares = attention.edge_softmax(csr, scores, across if kind == "across" else None)
        out = attention.weighted_sums(csr, source, shares)
        grads = torch.autograd.grad(out, inputs, upstream.to(dtype), allow_unused=True)
        results = [out, shares, *(grad for grad in grads if grad is not None)]
        assert all(each.dtype == dtype for each in results)
        return results

    rtol, atol = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-5, 1e-5)}.get(dtype, (0.05, 0.05))
    for kind in kinds:
        right = run(kind, torch.float32 if dtype in SHORT else dtype)
        with in_triton(split):
            found = run(kind, dtype)
        assert len(found) == len(right) > 3
        for ours, theirs in zip(found, right):
            torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=rtol, atol=atol)


KINDS = ["gat", "additive", "dot", "across"]


@needs_triton
@pytest.mark.parametrize(
    "name, dtype, split, kinds",
    [
        ("awkward", torch.float64, 40, KINDS),
        ("awkward", torch.bfloat16, 40, ["across"]),
        *campaign(
            ("awkward", torch.bfloat16, 8, KINDS),
            ("awkward", torch.float32, 1024, KINDS),
            ("one row", torch.float16, 8, KINDS),
            ("no edges", torch.float64, 8, KINDS),
        ),
    ],
)
def test_attention_and_its_gradients(interpreted, name, dtype, split, kinds):
    interpreted(compare_autograd, name, dtype, split, kinds)


def compare_sums(dtype: torch.dtype) -> None:
    """Statistics over two matrices with ties, their gradients, and sums that are added to others, as callers use them."""
    torch.manual_seed(0)
    first, second = graph("awkward"), graph("awkward")
    x, weight = torch.randint(-2, 3, (first.num_cols, 3)).to(dtype), torch.randn(first.num_edges)
    start, scale = torch.randn(first.num_rows, 3).to(dtype), torch.rand(first.num_rows)
    grads = torch.randn(4, first.num_rows, 3)

    def run(x: Tensor) -> list[Tensor]:
        found = sums.RowStatistics.empty(first, x, sums.STATISTICS)
        found.add(first, x, False)
        found.add(second, x, True)
        parts = {name: grad.to(x.dtype) for name, grad in zip(sums.STATISTICS, grads)}
        shared = {name: parts[name] / found.ties(name) for name in ("max", "min")}
        given = sums.RowStatistics(**parts | shared, num_max=found.num_max, num_min=found.num_min)
        gradient = [sums.row_statistics_grad(csr, x, given, found) for csr in (first, second)]
        added = spmm(first, x, weight.to(x.dtype), start.to(x.dtype), True, scale.to(x.dtype))
        return [*vars(found).values(), *gradient, added]

    wide = torch.float32 if dtype in SHORT else dtype
    right = run(x.to(wide))
    with in_triton(40):
        again = run(x)
    rtol, atol = (0.05, 0.05) if dtype in SHORT else TOLERANCE[dtype]
    for ours, theirs in zip(again, right):
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=rtol, atol=atol)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, *campaign(torch.float32, torch.float16)])
def test_sums_as_they_are_used(interpreted, dtype):
    interpreted(compare_sums, dtype)


def same_bits() -> None:
    csr, x = graph("awkward"), torch.randn(7, 40)
    if ON_GPU:
        csr, x = _on_the_gpu(csr), x.cuda()
    with in_triton(8):
        assert torch.equal(spmm(csr, x), spmm(csr, x))
    assert set(csr._segments) == {8}


@needs_triton
def test_bits_repeat_and_segments_are_kept(interpreted):
    interpreted(same_bits)


def softmax_of_a_hub() -> None:
    count = 70_000  # more than float16 has
    csr = CSR(torch.tensor([0, count]), torch.zeros(count, dtype=torch.int32), None, 1)
    with in_triton(4096):
        shares = attention.edge_softmax(csr, torch.zeros(count, 1, dtype=torch.float16))
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / count))


@needs_triton
@pytest.mark.campaign
def test_a_sum_beyond_float16(interpreted):
    interpreted(softmax_of_a_hub)


def compare_codes(cases: list[Any]) -> None:
    """Codes, what is decoded of them and their errors, next to numba's: the same bits, but for the order of sums of squares."""
    for rows, columns, dtype, bits, noise in cases:
        torch.manual_seed(columns)
        x = torch.randn(rows, columns).to(dtype) * 10.0 ** torch.randint(-30, 30, (rows, 1))
        x[3::7] = x[3::7, :1]  # rows of one number
        for row, strange in enumerate((float("nan"), float("inf"), -float("inf"))):
            x[row, row % columns] = strange
        if dtype == torch.float64:
            x[-2], x[-1] = 1.7e308 * torch.rand(columns).sub(0.5), 1e-300 * torch.rand(columns)

        def run(x: Tensor = x, dtype: torch.dtype = dtype, bits: int = bits, noise: int | None = noise) -> list[Tensor]:
            if bits == 16:
                x = x.float()
                x.view(torch.int32)[0, 0] = 0x7F800001  # a NaN whose digits are all cut off
                short = torch.empty(x.shape, dtype=torch.bfloat16)
                squares = codes.shorten(x, short, noise)
                return [short.view(torch.int16), squares]
            ends, packed, squares = codes.quantise(x, bits, noise)
            back = torch.empty_like(x)
            codes.dequantise(ends, packed, bits, back)
            again = codes.quantise(back, bits, noise)
            assert torch.equal(again[1], packed) or noise is not None
            assert dtype == torch.float64 or torch.equal(again[1][3:], packed[3:])
            finite = codes.quantise(x[3:], bits, noise)[-1]
            return [ends, packed, back, finite]

        expected = run()
        with in_triton(1024):
            found = run()
        for ours, theirs in zip(found[:-1], expected[:-1]):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), (columns, dtype, bits, noise)
        torch.testing.assert_close(found[-1], expected[-1], rtol=1e-12, atol=0, equal_nan=True)


CODES = [
    (40, columns, dtype, bits, noise)
    for columns, dtype in (
        (1, torch.float32), (7, torch.float64), (70, torch.bfloat16), (150, torch.float32), (130, torch.float16),
    )
    for bits in (2, 4, 8, 16)
    for noise in (None, 2**61 + 12345)
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize("part", [1, *campaign(0, 2, 3, 4, 5, 6)])
def test_codes_are_numbas(interpreted, part):
    interpreted(compare_codes, CODES[part::7])


# Compiling ahead ##############################################################

NAMES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.uint16: "u16", torch.uint8: "u8",
}  # fmt: skip


# One of each kernel every day, across dtypes and GPUs; in the campaign all.
OFTEN = [
    ("spmm_heads", torch.bfloat16, 90),
    ("statistics", torch.float32, 80),
    ("statistics_grad", torch.float64, 100),
    ("additive_scores_grad", torch.float16, 90),
    ("shares", torch.bfloat16, 100),
    ("additive_scores", torch.float64, 80),
    ("codes", torch.float32, 90),
]
FLOATS = tuple(TOLERANCE)


@needs_triton
@pytest.mark.parametrize(
    "loop, dtype, capability",
    [
        *OFTEN,
        *campaign(*(each for each in itertools.product([*LOOPS, "codes"], FLOATS, (80, 90, 100)) if each not in OFTEN)),
    ],
)
def test_compiles_for_gpus(loop, dtype, capability, monkeypatch, tmp_path):
    """What a loop launches, with hubs and without, on tensors of such a dtype is compiled to the machine code of a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_gnn.kernels import triton_loops

    binaries = {}

    def type_of(name: str, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"*{NAMES[value.dtype]}"
        return "fp32" if isinstance(value, float) else "i64" if name == "key" else "i32"

    def compile_it(
        kernel: Any, grid: Any, *arguments: Any, num_warps: int = 1, fused: bool = True, **constants: Any
    ) -> None:  # fmt: skip
        assert all(0 < size < 2**31 for size in grid)
        place = {name: index for index, name in enumerate(kernel.arg_names)}
        names = [name for name in place if name not in constants]
        types = {name: type_of(name, value) for name, value in zip(names, arguments)}
        assert len(names) == len(arguments)
        aligned = {(place[name],): [["tt.divisibility", 16]] for name in names if types[name][0] == "*"}
        signature = {name: types.get(name, "constexpr") for name in place}
        source = ASTSource(kernel, signature, {(place[name],): value for name, value in constants.items()}, aligned)
        options = {"num_warps": num_warps, "enable_fp_fusion": fused}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        binaries[source.hash()] = made.asm["cubin"]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_loops, "_launch", compile_it)
    monkeypatch.setitem(runner.BACKENDS, "cpu", runner._on_gpu)
    torch.manual_seed(0)
    if loop == "codes":
        rows = torch.ones(5, 48, dtype=dtype)
        ends, packed, _ = codes.quantise(rows, 4, 1)
        codes.dequantise(ends, packed, 4, rows)
        codes.shorten(rows, torch.empty(5, 48, dtype=torch.bfloat16), 1)
        assert len(binaries) == 3 and all(binaries.values())
        return
    csr = graph("awkward")
    for split in (8, 1024):
        monkeypatch.setattr(triton_loops, "SPLIT", split)
        in_two = loop in ("below_maxima", "shares", "shares_grad")  # over rows, then over slots
        given = arguments_of(loop, csr, dtype, 2, 48, (not in_two, True, True))
        runner.run_over_rows(getattr(loops, loop), csr, *given.values(), work=0)
    over_rows = loop not in ("pair_sums", "pair_products", "additive_scores")
    assert len(binaries) == (3 if over_rows else 1) + in_two and all(binaries.values())


# Which loops are run ##########################################################


def test_other_devices_have_a_registry(monkeypatch):
    """What is registered for a type of device is called with the name of a loop, the matrix and the rest."""
    calls = []
    kind, floats = torch.device("cpu"), [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    assert [runner.has_loops(kind, dtype) for dtype in floats] == [True, True, False, False]
    assert not runner.has_loops(kind, torch.int64) and not runner.has_loops(torch.device("meta"), torch.float32)
    assert runner.has_loops(torch.device("cuda"), torch.float16) == (find_spec("triton") is not None)
    csr = graph("awkward")
    monkeypatch.setitem(runner.BACKENDS, "cpu", lambda *call: calls.append(call))
    assert all(runner.has_loops(kind, dtype) for dtype in floats)
    x = torch.zeros(csr.num_cols, 2, dtype=torch.float16)
    out = spmm(csr, x)
    [(name, (matrix, *arguments))] = calls
    assert name == "spmm" and matrix is csr and arguments[0] is csr.indices and arguments[-3:] == [False, False, False]
    assert arguments[2].dtype == torch.float16 and arguments[4].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_without_loops_are_torchs(dtype, monkeypatch):
    """As on a GPU without Triton; autocast, in which a hub's sum would lose digits, changes nothing."""
    torch.manual_seed(0)
    csr = graph("awkward")
    x, weight, scale = torch.randn(csr.num_cols, 3).to(dtype), torch.randn(csr.num_edges), torch.rand(csr.num_rows)
    start = torch.randn(csr.num_rows, 3).to(dtype)

    def both() -> list[Tensor]:
        return [spmm(csr, x), spmm(csr, x, weight, start.clone(), True, scale)]

    expected = both()
    monkeypatch.setattr(sums, "has_loops", lambda device, dtype: False)
    with torch.autocast("cpu", torch.bfloat16):
        for found, right in zip(both(), expected):
            torch.testing.assert_close(found, right)
    assert csr.torch_parts is csr.torch_parts


def test_an_extreme_may_have_no_gradient():
    """Extremes that are known where only other aggregates have gradients are not read further."""
    csr = CSR.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2, 2)
    x, none = torch.tensor([[1.0], [2.0]]), torch.empty(0, 1)
    found = sums.RowStatistics.empty(csr, x, sums.STATISTICS)
    found.add(csr, x, False)
    counts = torch.empty(0, 1, dtype=torch.int32)
    grads = sums.RowStatistics(torch.tensor([[10.0], [1.0]]), none, none, none, counts, counts)
    assert sums.row_statistics_grad(csr, x, grads, found).tolist() == [[10.0], [11.0]]
