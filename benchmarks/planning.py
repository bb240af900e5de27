"""The planner against the paper's algorithm, the direct exchange and a lower bound, on real graphs and a generated one.

python benchmarks/planning.py [--graphs cnr-2000,ego-twitter,power-law] [--topologies dgx1,pcie8,dgx1x2] [--json FILE]

Seconds are CPU seconds of one core, without compiling. Costs are predicted times of one allgather; the 1 pass is the paper's
algorithm over classes, rerouted: as by default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np
from bound import lower_bound
from common import SHARED, report
from spst_reference import reference_cost

from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.extensions.plans.plan import p2p
from lightning_gnn.extensions.plans.plan_cost import plan_cost
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.metis import part_graph
from lightning_gnn.partition.shard import Relabelling

DEVICES = {"dgx1": 8, "pcie8": 8, "dgx1x2": 16}
COLUMNS = [
    "graph", "topology", "classes", "reference (s)", "in Python (s)", "1 pass (s)", "ratio", "cost / ref.",
    "rerouted (s)", "rerouted: cost / ref.", "p2p / cost", "cost / bound",
]  # fmt: skip
T = TypeVar("T")


@cache
def relation(graph: str, num_devices: int) -> Relation:
    """Returns the relation of a graph cut by METIS."""
    if graph == "power-law":
        num_nodes = 1_000_000
        edge_index = planted_partition(num_nodes, 5.0, 8, 1).edge_index.numpy()
    else:
        arrays = np.load(SHARED / "data" / "edges" / f"{graph}.npz")
        edge_index = np.stack([arrays["src"], arrays["dst"]]).astype(np.int64)
        num_nodes = int(edge_index.max()) + 1
    part = part_graph(Adjacency.of(edge_index, num_nodes), num_devices, seed=0)
    order = Relabelling.from_assignment(part, num_devices)
    return Relation.from_edges(order.new_ids()[edge_index], order.offsets)


def timed(function: Callable[[], T], repeats: int = 1) -> tuple[float, T]:
    """Returns the least CPU seconds of several calls, and the last result."""
    best = np.inf
    for _ in range(repeats):
        began = time.process_time()
        result = function()
        best = min(best, time.process_time() - began)
    return best, result


def row(graph: str, name: str, with_reference: bool, with_python: bool) -> dict[str, Any]:
    """Returns one line of the table."""
    topology = find_topology(name, DEVICES[name])
    rows = relation(graph, topology.num_devices)
    once_s, once = timed(lambda: spst(rows, topology, passes=1), 3)
    planned_s, planned = timed(lambda: spst(rows, topology), 3)
    tables_s, _ = timed(lambda: rank_plan(planned, 0))
    once_cost, cost = (plan_cost(plan, topology) for plan in (once, planned))
    busiest = np.argsort(-cost.hop_seconds.sum(0))[:2]
    found: dict[str, Any] = {
        "graph": graph,
        "topology": name,
        "rows": int(rows.pair_rows.sum()),
        "classes": len(rows.owner),
        "1 pass (s)": once_s,
        "rerouted (s)": planned_s,
        "p2p / cost": plan_cost(p2p(rows, topology), topology).seconds_per_byte / cost.seconds_per_byte,
        "cost / bound": cost.seconds_per_byte / lower_bound(rows, topology, busiest),
        "1 pass cost / bound": once_cost.seconds_per_byte / lower_bound(rows, topology, busiest),
        "share of time by kind": {
            kind: seconds / cost.seconds_per_byte for kind, seconds in cost.kind_seconds().items()
        },
        "tables (s)": tables_s,
        "stages": planned.num_stages,
    }
    if with_reference:
        reference_s, reference = timed(lambda: reference_cost(rows, topology))
        found |= {
            "reference (s)": reference_s,
            "ratio": reference_s / once_s,
            "cost / ref.": once_cost.seconds_per_byte / reference,
            "rerouted: cost / ref.": cost.seconds_per_byte / reference,
        }
    if with_python:
        found["in Python (s)"], _ = timed(lambda: reference_cost(rows, topology, compiled=False))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="cnr-2000,ego-twitter,power-law")
    parser.add_argument("--topologies", default=",".join(DEVICES))
    parser.add_argument(
        "--no-reference", action="store_true", help="it takes a minute for a million nodes and 16 devices"
    )
    parser.add_argument("--python", action="store_true", help="run the reference uncompiled too: minutes, or hours")
    parser.add_argument("--json")
    options = parser.parse_args()
    small = Relation.from_masks(np.array([0, 5], np.uint64), np.array([0, 1, 2, 2]))  # compiles
    line = find_topology("uniform", 3)
    spst(small, line)
    lower_bound(small, line)
    reference_cost(small, line)
    rows = [
        row(graph, topology, not options.no_reference, options.python)
        for graph in options.graphs.split(",")
        for topology in options.topologies.split(",")
    ]
    report("Planning one allgather", rows, COLUMNS, options.json)


if __name__ == "__main__":
    main()
