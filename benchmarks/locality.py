"""What the order of rows within parts is worth: SpMM in the original order and renumbered, and the time of renumbering.

python benchmarks/locality.py [--parts 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from common import SHARED, load_planted, planted_file, report
from scipy.sparse import csr_matrix

from lightning_gnn.kernels import CSR, spmm
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts, local_relabelling, recent_reads

Graph = tuple[np.ndarray, int]
COLUMNS = (16, 128)


def planted() -> Graph:
    data = load_planted(str(planted_file()))
    return data.edge_index.numpy(), data.num_nodes


def physics() -> Graph:
    arrays = np.load(SHARED / "data/coauthor/Physics/raw/ms_academic_phy.npz")
    matrix = csr_matrix(tuple(arrays[f"adj_{name}"] for name in ("data", "indices", "indptr")))
    edges = (matrix + matrix.T).tocoo()
    return np.stack([edges.row, edges.col]).astype(np.int64), matrix.shape[0]


def github() -> Graph:
    edge_index = np.load(SHARED / "data/github_social/raw/github.npz")["edges"].T.astype(np.int64)
    return edge_index, int(edge_index.max()) + 1


def edge_list(name: str) -> Graph:
    arrays = np.load(SHARED / f"data/edges/{name}.npz")
    return np.stack([arrays["src"], arrays["dst"]]).astype(np.int64), int(arrays["num_nodes"])


def shuffled(graph: Graph) -> Graph:
    edge_index, num_nodes = graph
    return np.random.default_rng(0).permutation(num_nodes)[edge_index], num_nodes


GRAPHS = {
    "planted": planted,
    "Physics": physics,
    "GitHub": github,
    "ego-twitter": lambda: edge_list("ego-twitter"),
    "cnr-2000": lambda: edge_list("cnr-2000"),
    "cnr-2000, ids shuffled": lambda: shuffled(edge_list("cnr-2000")),
}


def timed(function: Any, *arguments: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - began


def matrices(edge_index: np.ndarray, relabelling: Relabelling) -> list[CSR]:
    """Returns A of every part, columns are owned and halo rows."""
    return [
        CSR.from_coo(*torch.from_numpy(piece.edge_index).flip(0), num_rows=owned, num_cols=owned + len(piece.halo))
        for owned, piece in zip(np.diff(relabelling.offsets).tolist(), edge_cut_parts(edge_index, relabelling))
    ]


def spmm_seconds(orders: list[list[CSR]], columns: int, rounds: int = 12) -> list[float]:
    """Returns for each order the seconds of all its parts, the least of rounds in which the orders take turns."""
    best = [[float("inf")] * len(parts) for parts in orders]
    for number in range(len(orders[0])):
        x = torch.randn(orders[0][number].num_cols, columns)
        out = torch.empty(orders[0][number].num_rows, columns)
        for _ in range(rounds):
            for times, parts in zip(best, orders):
                times[number] = min(times[number], *(timed(spmm, parts[number], x, None, out)[1] for _ in range(2)))
    return [sum(times) for times in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    local_relabelling(np.zeros((2, 1), np.int64), np.zeros(1, np.int32), 1)  # loads the compiled loops
    rows: list[dict[str, Any]] = []
    for name, load in GRAPHS.items():
        edge_index, num_nodes = load()
        assignment, partitioning = timed(assign_nodes, edge_index, num_nodes, options.parts)
        original = Relabelling.from_assignment(assignment.part, options.parts)
        renumbered, renumbering = timed(local_relabelling, edge_index, assignment.part, options.parts)
        orders = [matrices(edge_index, order) for order in (original, renumbered)]
        row: dict[str, Any] = {
            "graph": name,
            "edges": edge_index.shape[1],
            "recent reads": recent_reads(edge_index, original),
            "renumbered": recent_reads(edge_index, renumbered),
        }
        for columns in COLUMNS:
            before, after = spmm_seconds(orders, columns)
            row |= {f"SpMM {columns}, ms": 1e3 * before, f"over it, {columns}": after / before}
        row |= {"renumbering, s": renumbering, "over the partitioner": renumbering / partitioning}
        rows.append(row)
    report(f"Order of rows within {options.parts} parts, one thread", rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
