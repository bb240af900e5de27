"""SpMM kernels on the common benchmark graph: ours against torch's and against gather-scatter.

python benchmarks/kernels.py [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from common import load_planted, planted_file, report

from lightning_gnn.kernels import CSR, spmm


def best(function: Callable[[], Any], repeats: int = 5) -> float:
    """Returns the shortest of some runs in seconds, after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = load_planted(str(planted_file()))
    source, target = data.edge_index
    nodes, edges = data.num_nodes, data.num_edges
    csr = CSR.from_coo(target, source, nodes, nodes)
    weight = torch.rand(edges)
    matrix = torch.sparse_csr_tensor(csr.indptr, csr.indices.long(), weight, (nodes, nodes))
    rows: list[dict[str, Any]] = []
    for columns in (16, 128):
        x = torch.randn(nodes, columns)
        kernels: dict[str, Callable[[], Any]] = {
            "ours": lambda x=x: spmm(csr, x),
            "ours, weighted": lambda x=x: spmm(csr, x, weight),
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
                "/ csr @ x": seconds / found["torch, csr @ x"],
            }
            rows.append({**row, "GB/s gathered": edges * columns * 4 / seconds / 1e9})
    copied = torch.randn(nodes, 128)
    seconds = best(lambda: copied.clone())
    rows.append(
        {
            "kernel": "a copy of x",
            "columns": 128,
            "seconds": seconds,
            "GB/s gathered": 2 * copied.nbytes / seconds / 1e9,
        }
    )
    title = f"SpMM, {nodes:,} nodes, {edges:,} edges, float32, {options.threads} thread(s)"
    report(title, rows, ["kernel", "columns", "seconds", "/ csr @ x", "GB/s gathered"], options.json)


if __name__ == "__main__":
    main()
