"""Kernels against plain torch. No ranks."""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from common import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch_geometric import nn
from torch_geometric.nn import aggr
from torch_geometric.utils import add_remaining_self_loops, softmax
from warm import cold

from lightning_gnn.kernels import CSR, attention, spmm, sums, take_rows
from lightning_gnn.nn.convs import kernel_groups


def reference(row: torch.Tensor, col: torch.Tensor, x: torch.Tensor, rows: int, weight: Any = None) -> torch.Tensor:
    messages = x[col]
    if weight is not None:
        messages = messages * weight.view(-1, *[1] * (x.dim() - 1))
    return x.new_zeros((rows, *x.shape[1:])).index_add_(0, row, messages)


@st.composite
def edges(draw: Any) -> tuple[torch.Tensor, torch.Tensor, int, int, torch.Generator]:
    rows, cols = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    count = draw(st.integers(0, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    row = torch.randint(0, rows, (count,), generator=generator)
    col = torch.randint(0, cols, (count,), generator=generator)
    return row, col, rows, cols, generator


@examples(60)
@given(edges(), st.sampled_from([(), (1,), (3,), (8,), (2, 3)]), st.booleans())
def test_spmm_and_its_transpose(graph, shape, weighted):
    row, col, rows, cols, generator = graph
    csr = CSR.from_coo(row, col, rows, cols)
    x = torch.randn(cols, *shape, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(row), generator=generator, dtype=torch.float64) if weighted else None
    slots = None if weight is None else csr.permute(weight)
    flipped = None if slots is None else csr.transpose().permute(slots)
    out = spmm(csr, x, slots)
    torch.testing.assert_close(out, reference(row, col, x, rows, weight), rtol=1e-12, atol=1e-12)
    back = spmm(csr.transpose(), y, flipped)
    torch.testing.assert_close((out * y).sum(), (x * back).sum(), rtol=1e-10, atol=1e-10)
    added = spmm(csr, x, slots, out=y.clone(), accumulate=True)
    torch.testing.assert_close(added, y + out, rtol=1e-12, atol=1e-12)
    if x.dim() == 2:
        torch.testing.assert_close(sums._torch_spmm(csr, x, slots), out, rtol=1e-12, atol=1e-12)
    scale = torch.randn(rows, generator=generator, dtype=torch.float64)
    scaled = spmm(csr, x, slots, out=y.clone(), accumulate=True, scale=scale)
    torch.testing.assert_close(scaled, (y + out) * scale.view(-1, *[1] * len(shape)), rtol=1e-12, atol=1e-12)


def random_graph(count: int = 50_000, nodes: int = 2_000) -> tuple[torch.Tensor, torch.Tensor, CSR]:
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, nodes, (count,), generator=generator)
    col = torch.randint(0, nodes, (count,), generator=generator)
    row[: count // 10] = 7  # a hub
    return row, col, CSR.from_coo(row, col, nodes, nodes)


def test_same_bits_for_any_number_of_threads():
    _, _, csr = random_graph()
    x = torch.randn(2_000, 33)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 2, 1):
            torch.set_num_threads(threads)
            results.append(spmm(csr, x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_summed_in_float32(dtype):
    row, col, csr = random_graph()
    x = torch.rand(2_000, 4).to(dtype)
    expected = reference(row, col, x.float(), 2_000)
    torch.testing.assert_close(spmm(csr, x), expected.to(dtype))
    start = torch.rand(2_000, 4).to(dtype)
    torch.testing.assert_close(spmm(csr, x, out=start.clone(), accumulate=True), (start + expected.to(dtype)))


@examples(60)
@given(edges(), st.booleans(), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_halves_are_the_columns_before_and_behind(graph, in_list, sort, dtype):
    """By torch, as on devices, and by loops; and a matrix of both."""
    row, col, rows, cols, _ = graph
    if sort:
        row = row.sort().values
    first = cols // 3
    whole = torch.zeros(rows, cols, dtype=torch.long).index_put_((row, col), torch.ones_like(row), accumulate=True)
    sizes = rows, first, cols - first
    found = CSR.halves(row.to(dtype), col.to(dtype), *sizes, in_list)
    by_torch = CSR._halves_by_torch(row.to(dtype), col.to(dtype), *sizes, in_list, self_loops=False)
    for half, other, columns in zip(found, by_torch, whole.split([first, cols - first], 1)):
        assert half.num_cols == columns.size(1) and half.indices.dtype == torch.int32
        assert torch.equal(half.indptr, other.indptr) and torch.equal(half.indices, other.indices)
        assert (half.edge is not None) == in_list and (not in_list or torch.equal(half.edge_ids(), other.edge_ids()))
        dense = torch.zeros_like(columns)
        dense.index_put_(
            (half.row_of_slot().long(), half.indices.long()), torch.ones(half.num_edges).long(), accumulate=True
        )
        assert torch.equal(dense, columns)
        flipped, sorted_anew = half.transpose(), CSR.from_coo(half.indices, half.row_of_slot(), half.num_cols, rows)
        assert torch.equal(flipped.indptr, sorted_anew.indptr) and torch.equal(flipped.indices, sorted_anew.indices)
        assert torch.equal(flipped.edge_ids(), sorted_anew.edge_ids())


@examples(60)
@given(edges(), st.integers(0, 5))
def test_halves_with_self_loops_have_those_of_pyg(graph, halo):
    row, col, _, nodes, _ = graph
    row, nodes = row % nodes, max(1, nodes - halo)
    kept = row < nodes
    row, col, halo = row[kept], col[kept], int(col.max()) + 1 if len(col) else 0
    looped = add_remaining_self_loops(torch.stack([col, row]), num_nodes=nodes)[0]
    sizes = nodes, nodes, max(0, halo - nodes)
    expected = CSR.halves(looped[1], looped[0], *sizes, in_list=False)
    for found in (
        CSR.halves(row, col, *sizes, in_list=False, self_loops=True),
        CSR._halves_by_torch(row, col, *sizes, in_list=False, self_loops=True),
    ):
        for half, other in zip(found, expected):
            assert torch.equal(half.indptr, other.indptr) and torch.equal(half.indices, other.indices)


def test_halves_of_ids_outside_are_an_error():
    with pytest.raises(ValueError, match="Ids from 0 to 5 are outside a matrix of 5 columns"):
        CSR.halves(torch.tensor([0, 1]), torch.tensor([0, 5]), 2, 3, 2)
    with pytest.raises(ValueError, match="Ids from 0 to 2 are outside a matrix of 2 rows"):
        CSR.halves(torch.tensor([0, 2]), torch.tensor([0, 4]), 2, 3, 2)


def test_slots_keep_the_order_of_the_list():
    csr = CSR.from_coo(torch.tensor([1, 0, 1, 1]), torch.tensor([3, 2, 0, 3]), 3, 4)
    assert csr.indptr.tolist() == [0, 1, 4, 4]
    assert csr.indices.tolist() == [2, 3, 0, 3]
    assert csr.edge.tolist() == [1, 0, 2, 3]
    assert csr.transpose().edge.tolist() == [2, 0, 1, 3]
    assert csr.transpose() is csr.transpose() is csr.transpose(in_list=False)
    alone = CSR(csr.indptr, csr.indices, csr.edge, csr.num_cols).transpose(in_list=False)
    assert alone.edge is None
    assert torch.equal(alone.indices, csr.transpose().indices) and torch.equal(alone.indptr, csr.transpose().indptr)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert csr.permute(values).tolist() == [2, 1, 3, 4]
    assert torch.equal(csr.unpermute(csr.permute(values)), values)
    assert csr.in_list(torch.tensor([9, 7, 5, 3])).edge.tolist() == [7, 9, 5, 3]
    assert csr.row_of_slot().tolist() == [0, 1, 1, 1]
    assert CSR.from_coo(torch.tensor([0, 1, 1]), torch.tensor([3, 2, 0]), 3, 4).edge is None


def test_errors_say_what_does_not_fit():
    with pytest.raises(ValueError, match="Ids from 0 to 5 are outside a matrix of 5 columns"):
        CSR.from_coo(torch.tensor([0, 1]), torch.tensor([0, 5]), 2, 5)
    csr = CSR.from_coo(torch.tensor([0]), torch.tensor([0]), 1, 2)
    with pytest.raises(ValueError, match="x must have one row for each of the matrix's 2 columns, got 3 rows"):
        spmm(csr, torch.ones(3, 1))
    with pytest.raises(ValueError, match="weight has 2 entries"):
        spmm(csr, torch.ones(2, 1), torch.ones(2))


@examples(60)
@given(edges(), st.integers(1, 3), st.integers(1, 5))
def test_attention_against_gather_and_scatter(graph, heads, columns):
    """Values against PyG's way, gradients of the whole chain against those that torch finds for it."""
    row, col, rows, cols, generator = graph
    csr = CSR.from_coo(row, col, rows, cols)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    source, target, weights = draw(cols, heads, columns), draw(rows, heads, columns), draw(heads, columns)
    left, right = draw(cols, heads), draw(rows, heads)

    def plain() -> torch.Tensor:
        added = torch.nn.functional.leaky_relu(source[col] + target[row], 0.2)
        scores = (source[col] * target[row]).sum(-1) + (added * weights).sum(-1) + left[col] + right[row]
        shares = softmax(scores, row, num_nodes=rows)
        return source.new_zeros(target.shape).index_add_(0, row, shares.unsqueeze(-1) * source[col])

    def ours() -> torch.Tensor:
        scores = attention.pair_products(csr, source, target) + attention.pair_sums(csr, left, right)
        scores = scores + attention.additive_scores(csr, source, target, weights, 0.2)
        return attention.weighted_sums(csr, source, attention.edge_softmax(csr, scores))

    inputs = (source, target, weights, left, right)
    expected, found = plain(), ours()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    wanted = torch.autograd.grad(expected.square().sum(), inputs, allow_unused=True)
    for given_, right_ in zip(torch.autograd.grad(found.square().sum(), inputs), wanted):
        torch.testing.assert_close(given_, right_, rtol=1e-8, atol=1e-10)


def test_gradients_of_each_attention_kernel():
    csr = CSR.from_coo(torch.tensor([2, 0, 0, 2, 1, 2]), torch.tensor([0, 1, 1, 3, 2, 2]), 4, 5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    torch.manual_seed(0)
    assert gradcheck(lambda s, t: attention.pair_sums(csr, s, t), (draw(5, 2), draw(4, 2)))
    assert gradcheck(lambda s, t: attention.pair_products(csr, s, t), (draw(5, 2, 3), draw(4, 2, 3)))
    assert gradcheck(
        lambda s, t, a: attention.additive_scores(csr, s, t, a, 0.3), (draw(5, 2, 3), draw(4, 2, 3), draw(2, 3))
    )
    assert gradcheck(lambda s: attention.edge_softmax(csr, s), draw(6, 2))
    assert gradcheck(lambda x, w: attention.weighted_sums(csr, x, w), (draw(5, 2, 3), draw(6, 2)))


def test_softmax_over_edges_that_several_ranks_hold():
    """The maximum and the sum of a row's edges are completed by R, forward and back."""
    torch.manual_seed(0)
    row = torch.tensor([0, 0, 0, 1, 1, 3])
    scores = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(6, 2, dtype=torch.float64)
    whole = attention.edge_softmax(CSR.from_coo(row, row, 4, 4), scores)
    [wanted] = torch.autograd.grad((whole * upstream).sum(), scores)
    halves = [torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4])]
    partials: list[Any] = [None, None]
    both = threading.Barrier(2, timeout=30)

    def half(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        def across(partial: torch.Tensor, operation: str) -> torch.Tensor:
            partials[index] = partial
            both.wait()
            complete = torch.maximum(*partials) if operation == "max" else partials[0] + partials[1]
            both.wait()
            return complete

        rows = row[halves[index]]
        part = scores.detach()[halves[index]].requires_grad_()
        out = attention.edge_softmax(CSR.from_coo(rows, rows, 4, 4), part, across)
        return out, torch.autograd.grad((out * upstream[halves[index]]).sum(), part)[0]

    with ThreadPoolExecutor(2) as pool:
        for held, (out, grad) in zip(halves, pool.map(half, (0, 1))):
            torch.testing.assert_close(out, whole[held])
            torch.testing.assert_close(grad, wanted[held])


REDUCTIONS = {"sum": aggr.SumAggregation, "max": aggr.MaxAggregation, "min": aggr.MinAggregation}


@examples(60)
@given(edges(), st.sets(st.sampled_from(sums.STATISTICS), min_size=1), st.booleans())
def test_statistics_in_one_pass(graph, wanted, few_values):
    """Against PyG's aggregations and torch's gradients, with ties and edges in two matrices."""
    row, col, rows, cols, generator = graph
    x = torch.randn(cols, 5, generator=generator, dtype=torch.float64)
    x = (x.round() if few_values else x).requires_grad_()
    first = torch.arange(len(row)) % 3 > 0
    matrices = [CSR.from_coo(row[half], col[half], rows, cols) for half in (first, ~first)]
    found = sums.RowStatistics.empty(matrices[0], x, wanted)
    for accumulate, csr in enumerate(matrices):
        found.add(csr, x, bool(accumulate))
    empty = torch.bincount(row, minlength=rows) == 0
    grads = {name: torch.zeros(0, 5, dtype=torch.float64) for name in sums.STATISTICS}
    total = torch.zeros((), dtype=torch.float64)
    for name in wanted:
        messages = x[col].square() if name == "squares" else x[col]
        expected = REDUCTIONS.get(name, aggr.SumAggregation)()(messages, row, dim_size=rows)
        ours = getattr(found, name).masked_fill(empty.view(-1, 1), 0.0)
        torch.testing.assert_close(ours, expected.detach())
        grads[name] = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        total = total + (expected * grads[name]).sum()
        if name in ("max", "min"):
            count = getattr(found, f"num_{name}")
            same = (x[col] == getattr(found, name)[row]).int()
            assert torch.equal(count, torch.zeros_like(count).index_add_(0, row, same))
            grads[name] = grads[name] / found.ties(name)
    none = torch.empty(0, 5, dtype=torch.int32)
    given_ = sums.RowStatistics(grads["sum"], grads["squares"], grads["max"], grads["min"], none, none)
    gradient = sum(sums.row_statistics_grad(csr, x, given_, found) for csr in matrices)
    [right] = torch.autograd.grad(total, x)
    torch.testing.assert_close(gradient, right)


def test_an_extreme_of_no_number_is_no_number():
    csr = CSR.from_coo(torch.zeros(3, dtype=torch.long), torch.arange(3), 1, 3)
    for values in ([1.0, float("nan"), 2.0], [float("nan"), 1.0, 2.0], [1.0, 2.0, float("nan")]):
        found = sums.RowStatistics.empty(csr, torch.tensor(values).view(-1, 1), ("max", "min"))
        found.add(csr, torch.tensor(values).view(-1, 1), False)
        assert found.max.isnan().all() and found.min.isnan().all()


def test_rows():
    x = torch.randn(6, 3)
    out = torch.empty(2, 3)
    take_rows(x.requires_grad_(), torch.tensor([4, 1]), out)
    assert torch.equal(out, x[[4, 1]])


def _forked(queue: Any) -> None:
    torch.set_num_threads(1)  # as the launcher does
    _, _, csr = random_graph()
    queue.put(float(spmm(csr, torch.ones(2_000, 8)).sum()))


def test_works_in_a_forked_process():
    """Notebooks start ranks by fork, after the notebook itself may have used the kernels."""
    _, _, csr = random_graph()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    spmm(csr, torch.ones(2_000, 8))
    torch.set_num_threads(before)
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_forked, args=(queue,))
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        pytest.fail("the forked process hangs in a kernel")
    assert process.exitcode == 0 and queue.get() == 50_000 * 8


@pytest.mark.campaign
def test_what_was_compiled_is_kept_on_disk(tmp_path):
    # Two processes that have compiled nothing, for one import.
    code = """
import os, torch
from torch_geometric.utils import add_remaining_self_loops

from lightning_gnn.kernels import cache_folder
from lightning_gnn.kernels.warm_up import warm_up

for _ in range(2):
    if not (child := os.fork()):
        print(warm_up(["sums"], [torch.float32]), cache_folder(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    with cold():
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    (first, folder), again = (line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert float(first) > 0 and folder.startswith(str(tmp_path))
    assert again == ["0.0", folder]


def test_a_loop_is_compiled_anew_when_the_file_of_its_helper_has_changed(tmp_path):
    (tmp_path / "loop_of_test.py").write_text("""
from lightning_gnn.partition.adjacency import compile_loop
from lightning_gnn.partition.between_of_test import between

@compile_loop
def run(x):
    return between(x)
""")
    (tmp_path / "between_of_test.py").write_text("""
import numba
from lightning_gnn.partition.helper_of_test import added

@numba.njit
def between(x):
    return added(x)
""")
    code = """
import os, sys, lightning_gnn.partition.adjacency
from pathlib import Path

folder = Path(sys.argv[1])
lightning_gnn.partition.__path__.append(str(folder))
for number in (1, 1, 5):
    text = f"import numba{chr(10)}@numba.njit{chr(10)}def added(x): return x + {number}"
    (folder / "helper_of_test.py").write_text(text)
    if not (child := os.fork()):
        from lightning_gnn.partition.loop_of_test import run
        print(run(10), sum(run.stats.cache_hits.values()), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONDONTWRITEBYTECODE": "1"}
    with cold():
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.stdout.splitlines() == ["11 0", "11 1", "15 0"], done.stderr


def test_loops_to_compile_are_those_of_the_model():
    assert kernel_groups(nn.models.GCN(2, 2, 2)) == {"sums"}
    assert kernel_groups(nn.models.GAT(2, 2, 2)) == {"attention"}
    both = torch.nn.ModuleList([nn.TransformerConv(2, 2), nn.SAGEConv(2, 2, aggr="max")])
    assert kernel_groups(both) == {"sums", "statistics", "attention"}
    assert kernel_groups(torch.nn.Linear(2, 2)) == set()
