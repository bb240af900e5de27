"""Kernels against plain torch. No ranks."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn import kernels
from lightning_gnn.kernels import CSR, add_rows, spmm, take_rows


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


@settings(max_examples=60, deadline=None)
@given(edges(), st.sampled_from([(), (1,), (3,), (8,), (2, 3)]), st.booleans())
def test_spmm_and_its_transpose(graph, shape, weighted):
    row, col, rows, cols, generator = graph
    csr = CSR.from_coo(row, col, rows, cols)
    x = torch.randn(cols, *shape, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(row), generator=generator, dtype=torch.float64) if weighted else None
    slots = None if weight is None else csr.permute(weight)
    flipped = None if weight is None else csr.transpose().permute(weight)
    out = spmm(csr, x, slots)
    torch.testing.assert_close(out, reference(row, col, x, rows, weight), rtol=1e-12, atol=1e-12)
    back = spmm(csr.transpose(), y, flipped)
    torch.testing.assert_close((out * y).sum(), (x * back).sum(), rtol=1e-10, atol=1e-10)
    added = spmm(csr, x, slots, out=y.clone(), accumulate=True)
    torch.testing.assert_close(added, y + out, rtol=1e-12, atol=1e-12)
    if x.dim() == 2:
        torch.testing.assert_close(kernels._torch_spmm(csr, x, slots), out, rtol=1e-12, atol=1e-12)


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


def test_slots_keep_the_order_of_the_list():
    csr = CSR.from_coo(torch.tensor([1, 0, 1, 1]), torch.tensor([3, 2, 0, 3]), 3, 4)
    assert csr.indptr.tolist() == [0, 1, 4, 4]
    assert csr.indices.tolist() == [2, 3, 0, 3]
    assert csr.edge.tolist() == [1, 0, 2, 3]
    assert csr.transpose().edge.tolist() == [2, 1, 0, 3]
    assert csr.transpose() is csr.transpose()


def test_errors_say_what_does_not_fit():
    with pytest.raises(ValueError, match="Ids from 0 to 5 are outside a matrix of 5 columns"):
        CSR.from_coo(torch.tensor([0, 1]), torch.tensor([0, 5]), 2, 5)
    csr = CSR.from_coo(torch.tensor([0]), torch.tensor([0]), 1, 2)
    with pytest.raises(ValueError, match="x has 3 rows, but the matrix has 2 columns"):
        spmm(csr, torch.ones(3, 1))
    with pytest.raises(ValueError, match="weight has 2 entries"):
        spmm(csr, torch.ones(2, 1), torch.ones(2))


def test_rows():
    x = torch.randn(6, 3)
    out = torch.empty(2, 3)
    take_rows(x.requires_grad_(), torch.tensor([4, 1]), out)
    assert torch.equal(out, x[[4, 1]])
    total = torch.zeros(6, 3)
    add_rows(total, torch.tensor([4, 1]), out)
    assert torch.equal(total[4], x[4]) and float(total[0].sum()) == 0


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
