"""Whether products on one graph should go over different process grids: bytes by width and dtype of rows, forward and backward.

    python benchmarks/spmm_ways.py [--graphs NAME ...] [--parts 4 8] [--columns 8 64 256] [--json FILE]

Nothing is sent: bytes are those of the rank that sends or receives most, as ``spmm`` counts them, of one product forward and one
backward of each width. "one way": in the single way that is the least for all of them together, "factor": with the best c of
``spmm_15d``, "each": where each product takes its own way, as in ``spmm``.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
import torch
from common import report
from cover import edges_of

from lightning_gnn.extensions.plans.exchanges import edge_traffic
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.shard import Relabelling
from lightning_gnn.strategies.spmm.grid import ProcessGrid
from lightning_gnn.strategies.spmm.traffic import busiest, product_words, products

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compared(name: str, parts: int, method: str, columns: list[int], root: str) -> list[dict[str, Any]]:
    edge_index, nodes = edges_of(name, root)
    if method == "random":
        part = np.random.default_rng(0).permutation(nodes) * parts // nodes
    else:
        part = assign_nodes(edge_index, nodes, parts).part.astype(np.int64)
    order = Relabelling.from_assignment(part, parts)
    edge_index, offsets = order.new_ids()[edge_index], order.offsets
    ways, found = products(parts), []
    rows = [edge_traffic(way.holders(offsets, edge_index[1], edge_index[0]), offsets, edge_index) for way in ways]
    plain = [isinstance(way.grid, ProcessGrid) and not way.mirrored for way in ways]
    for label, dtype in DTYPES.items():
        sizes = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
        # [widths, directions, ways]
        costs = np.array(
            [
                [
                    [busiest(product_words(*each, width, back), *sizes)[0] for each in zip(ways, [offsets] * 9, rows)]
                    for back in (False, True)
                ]
                for width in columns
            ]
        )
        taken = [" / ".join(str(ways[way]) for way in each) for each in costs.argmin(2)]
        of_one, of_each = costs.sum((0, 1)), costs.min(2).sum()
        assert of_each <= of_one.min()
        found.append(
            {
                "graph": name,
                "ranks": parts,
                "cut": method,
                "rows": label,
                "forward / backward": "; ".join(dict.fromkeys(taken)),
                "one way": str(ways[of_one.argmin()]),
                "MB, factor": of_one[plain].min() / 1e6,
                "MB, one way": of_one.min() / 1e6,
                "MB, each": of_each / 1e6,
                "each of one way": of_each / of_one.min(),
                "each of factor": of_each / of_one[plain].min(),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["Computers", "ego-twitter", "cnr-2000"])
    parser.add_argument("--parts", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--columns", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        cases = [
            (name, parts, cut) for name in options.graphs for parts in options.parts for cut in ("metis", "random")
        ]
        rows = [each for case in cases for each in compared(*case, options.columns, root)]
    report(f"Products of {options.columns} columns", rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
