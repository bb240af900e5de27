"""What the cut of ``sampling`` sends between two machines of two ranks, and how even its parts are: by machine first, and flat.

Of gowalla's check-ins, users and places are node types. Elsewhere 40 % of the first quarter of nodes are training nodes and 5 %
of the rest, a tenth of the others validation nodes. Of "links", training edges are those between the first 80 % of nodes, as if
ids were times. *others*: each mask, or each type.

    python benchmarks/machine_cut.py [--graphs cnr-2000 ego-twitter Computers gowalla-bipartite ego-twitter-links] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import numpy as np
from common import report
from cover import edges_of

from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.metrics import balance

MACHINES = ((0, 1), (2, 3))


def balanced(name: str, edge_index: np.ndarray, nodes: int) -> dict[str, Any]:
    """Returns what a graph's parts get their share of, as :func:`assign_nodes` takes it."""
    ids, rng = np.arange(nodes), np.random.default_rng(0)
    if name == "gowalla-bipartite":
        return {"node_type": (ids >= 29_858).astype(np.int16)}
    if name.endswith("-links"):
        return {"edge_masks": {"edge_train_mask": edge_index.max(0) < 0.8 * nodes}}
    train = rng.random(nodes) < np.where(ids < nodes // 4, 0.4, 0.05)
    val = ~train & (rng.random(nodes) < 0.1)
    return {"masks": {"train_mask": train, "val_mask": val, "test_mask": ~train & ~val}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    graphs = ["cnr-2000", "ego-twitter", "Computers", "gowalla-bipartite", "ego-twitter-links"]
    parser.add_argument("--graphs", nargs="+", default=graphs)
    parser.add_argument("--json")
    options, rows = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as root:
        for name in options.graphs:
            edge_index, nodes = edges_of(name.removesuffix("-links"), root)
            shares = balanced(name, edge_index, nodes)
            for cut, groups in (("flat", None), ("by machine", MACHINES)):
                began = time.process_time()
                found = assign_nodes(edge_index, nodes, 4, "metis_masks", groups=groups, **shares)
                seconds = time.process_time() - began
                source, target = found.part[edge_index]
                between = source // 2 != target // 2
                row: dict[str, Any] = {"graph": name, "cut": cut, "CPU s": seconds, "cut edges": found.report.cut_edges}
                row |= {"between": int(between.sum())}
                row |= {"rows": len(np.unique(edge_index[0, between] * 4 + target[between]))}
                row |= {"nodes": found.report.node_balance, "edges": found.report.edge_balance}
                counts = list(found.report.masks.values())
                if "node_type" in shares:
                    counts = [np.bincount(found.part[shares["node_type"] == kind]) for kind in (0, 1)]
                rows.append(row | {"others": " ".join(f"{balance(each):.3f}" for each in counts)})
    report("Two machines of two ranks, metis_masks", rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
