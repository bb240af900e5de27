"""Part `bandwidth` of gpu_acceptance.py: kernels as shares of the bandwidth of a copy, by columns, dtype and graph.

Two byte counts are divided by the time. *gathered* counts one row per edge; *once* counts each row once, as with an unlimited
cache. Both include indices, weights and results. The bytes that the DRAM transfers lie between both, and need counters (ncu).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn.devices import synchronize
from lightning_gnn.kernels import CSR, attention, spmm
from lightning_gnn.kernels.sums import STATISTICS, RowStatistics

COLUMNS = (16, 64, 128, 256)
HEADS = 4
COPIED_BYTES = 1 << 30


def graphs(edges: int) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Yields name, sources, targets and number of nodes of a graph with hubs, and of a graph of near nodes."""
    nodes = max(64, edges // 20)
    yield "power law", torch.randint(nodes, (edges,)), (torch.rand(edges) ** 2 * nodes).long(), nodes
    target = torch.arange(edges) % nodes
    yield "local", (target + torch.randint(-32, 33, (edges,))) % nodes, target, nodes


def best(run: Callable[[], Any], device: torch.device, clock: Callable[[], float], repeats: int = 5) -> float:
    """Returns the shortest of some runs in seconds, after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = clock()
        run()
        synchronize(device)
        times.append(clock() - began)
    return min(times)


def cases(csr: CSR, x: Tensor, weight: Tensor) -> dict[str, tuple[Callable[[], Any], int, int]]:
    """Returns kernels by name, each with the number of rows that it gathers per edge, and of other numbers per edge."""
    scores = [torch.randn(len(x), HEADS, device=x.device) for _ in range(2)]
    leaf = x.detach().float().view(len(x), HEADS, -1).requires_grad_()

    def statistics() -> None:
        RowStatistics.empty(csr, x, STATISTICS).add(csr, x, accumulate=False)

    def attend() -> Tensor:
        shares = attention.edge_softmax(csr, F.leaky_relu(attention.pair_sums(csr, *scores), 0.2))
        return attention.weighted_sums(csr, leaf, shares)

    def attend_backward() -> None:
        attend().sum().backward()

    found: dict[str, tuple[Callable[[], Any], int, int]] = {"sums": (lambda: spmm(csr, x, weight), 1, 1)}
    if x.dtype == torch.float32:
        found |= {"statistics": (statistics, 1, 0), "attention": (attend, 1, HEADS)}
        found["attention, forward and backward"] = attend_backward, 3, 3 * HEADS
    return found


def bandwidth(options: argparse.Namespace, row: Callable[..., Any], clock: Callable[[], float]) -> list[Any]:
    """Returns the rows of the part; `row` is called with each, and `clock` returns seconds."""
    device, rows = torch.device(options.device), []
    is_gpu = device.type == "cuda"
    torch.manual_seed(0)
    size = COPIED_BYTES // 4 if is_gpu else 1 << 12
    given, into = torch.ones(size, device=device), torch.empty(size, device=device)
    copied = 8 * size / best(lambda: into.copy_(given), device, clock)
    for name, source, target, nodes in graphs(options.edges):
        csr = CSR.from_coo(target.to(device), source.to(device), nodes, nodes).to_slot_order()
        weight = torch.rand(csr.num_edges, device=device)
        matrix = torch.sparse_csr_tensor(csr.indptr, csr.indices.long(), weight, (nodes, nodes), device=device)
        for columns in COLUMNS:
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(nodes, columns, device=device).to(dtype)
                theirs = best(partial(torch.matmul, matrix, x), device, clock) if dtype == torch.float32 else None
                for kernel, (run, gathers, numbers) in cases(csr, x, weight.to(dtype)).items():
                    seconds = best(run, device, clock)
                    per_edge = csr.num_edges * (csr.indices.element_size() + 4 * numbers)
                    once = nodes * columns * (x.element_size() + 4) * gathers + per_edge
                    gathered = csr.num_edges * columns * x.element_size() * gathers + nodes * columns * 4 + per_edge
                    ratio = None if theirs is None or kernel != "sums" else theirs / seconds
                    rows.append(
                        row(
                            f"{kernel}, {name}, {columns} columns, {str(dtype).removeprefix('torch.')}",
                            gathered / seconds / copied,
                            "measured" if ratio is None else "cuSPARSE's seconds >= 1.3",
                            ratio is None or not is_gpu or ratio >= 1.3,
                            seconds=seconds,
                            once=once / seconds / copied,
                            **({} if ratio is None else {"cuSPARSE's seconds": ratio}),
                        )
                    )
    return rows
