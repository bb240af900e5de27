"""Kernels on the common benchmark graph: ours against torch's and against gather and scatter.

python benchmarks/kernels.py [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import load_planted, planted_file, report
from torch import Tensor
from torch_geometric.utils import scatter, softmax

from lightning_gnn.heap import keeping_freed_memory
from lightning_gnn.kernels import CSR, attention, spmm
from lightning_gnn.kernels.sums import STATISTICS, RowStatistics, row_statistics_grad


def best(function: Callable[[], Any], repeats: int = 9) -> float:
    """Returns the shortest of some runs in seconds, after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def attention_rows(csr: CSR, source: Tensor, target: Tensor, heads: int = 4, columns: int = 32) -> list[dict[str, Any]]:
    """GAT's scores, softmax and weighted sums, forward and backward; gathering and scattering as PyG does, once."""
    csr = csr.to_slot_order()
    x = torch.randn(csr.num_rows, heads, columns, requires_grad=True)
    left, right = (torch.randn(csr.num_rows, heads, requires_grad=True) for _ in range(2))

    def ours() -> None:
        shares = attention.edge_softmax(csr, F.leaky_relu(attention.pair_sums(csr, left, right), 0.2))
        attention.weighted_sums(csr, x, shares).sum().backward()

    def plain() -> None:
        shares = softmax(F.leaky_relu(left[source] + right[target], 0.2), target, num_nodes=csr.num_rows)
        scatter(shares.unsqueeze(-1) * x[source], target, 0, csr.num_rows, "sum").sum().backward()

    return compared("attention, 4 heads, forward and backward", heads * columns, ours, plain)


def statistics_rows(csr: CSR, source: Tensor, target: Tensor, columns: int = 64) -> list[dict[str, Any]]:
    """Sum, squares, maximum and minimum, forward and backward."""
    x = torch.randn(csr.num_rows, columns, requires_grad=True)
    grads = RowStatistics(*(torch.randn(csr.num_rows, columns) for _ in STATISTICS), torch.empty(0), torch.empty(0))

    def ours() -> None:
        found = RowStatistics.empty(csr, x, STATISTICS)
        found.add(csr, x, accumulate=False)
        row_statistics_grad(csr, x, grads, found)

    def plain() -> None:
        messages = x[source]
        parts = [(messages, "sum"), (messages * messages, "sum"), (messages, "max"), (messages, "min")]
        total = [scatter(part, target, 0, csr.num_rows, how) for part, how in parts]
        torch.autograd.backward(total, [grads.sum, grads.squares, grads.max, grads.min])

    return compared("sum, squares, max and min, forward and backward", columns, ours, plain)


def compared(name: str, columns: int, ours: Callable[[], Any], plain: Callable[[], Any]) -> list[dict[str, Any]]:
    """Returns a row for each; plain is gathering and scattering here."""
    slow = best(plain, repeats=1)
    rows: list[dict[str, Any]] = [{"kernel": f"{name}: gather, scatter", "columns": columns, "seconds": slow}]
    return [
        {"kernel": f"{name}: ours", "columns": columns, "seconds": best(ours), "of plain": best(ours) / slow},
        *rows,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with keeping_freed_memory():  # so that no kernel waits for new pages
        measure(options)


def measure(options: argparse.Namespace) -> None:
    data = load_planted(str(planted_file()))
    source, target = data.edge_index
    nodes, edges = data.num_nodes, data.num_edges
    csr = CSR.from_coo(target, source, nodes, nodes)
    weight = torch.rand(edges)
    matrix = torch.sparse_csr_tensor(csr.indptr, csr.indices.long(), weight, (nodes, nodes))
    rows: list[dict[str, Any]] = []
    for columns in (16, 128):
        x = torch.randn(nodes, columns)
        short = x.bfloat16()
        kernels: dict[str, Callable[[], Any]] = {
            "ours": lambda x=x: spmm(csr, x),
            "ours, weighted": lambda x=x: spmm(csr, x, weight),
            "ours, bfloat16": lambda x=short: spmm(csr, x),
            "torch, csr @ x": lambda x=x: matrix @ x,
            'torch.sparse.mm(csr, x, "sum")': lambda x=x: torch.sparse.mm(matrix, x, "sum"),
            "gather, scatter": lambda x=x: torch.zeros_like(x).index_add_(0, target, x[source]),
        }
        found = {name: best(kernel) for name, kernel in kernels.items()}
        for name, seconds in found.items():
            row = {
                "kernel": name,
                "columns": columns,
                "seconds": seconds,
                "of plain": seconds / found["torch, csr @ x"],
            }
            size = 2 if "bfloat16" in name else 4
            rows.append({**row, "GB/s gathered": edges * columns * size / seconds / 1e9})
    rows += attention_rows(csr, source, target) + statistics_rows(csr, source, target)
    copied, onto = torch.randn(nodes, 128), torch.randn(nodes, 128)
    seconds = best(lambda: onto.copy_(copied))
    rows.append(
        {
            "kernel": "a copy of x",
            "columns": 128,
            "seconds": seconds,
            "GB/s gathered": 2 * copied.nbytes / seconds / 1e9,
        }
    )
    title = (
        f"Plain: csr @ x, or gather and scatter. {nodes:,} nodes, {edges:,} edges, float32, {options.threads} thread(s)"
    )
    report(title, rows, ["kernel", "columns", "seconds", "of plain", "GB/s gathered"], options.json)


if __name__ == "__main__":
    main()
