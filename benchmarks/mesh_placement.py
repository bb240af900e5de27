"""Graph ranks of a mesh within hosts, as ranks are numbered, beside graph ranks on several hosts, over emulated links.

    python benchmarks/mesh_placement.py --netlab NETLAB.py [--nodes 10000] [--sizes 4 16] [--json FILE]

Two hosts with two ranks each, links of 270 Mbit/s within hosts and 100 Mbit/s between hosts (root only). The mesh has 2 data
ranks and 2 graph ranks. Samples and model are those of ``samples.py``, and its graph is in four dimensions, where many nodes have
neighbors on other ranks. Ranks are numbered host by host, so that graph
ranks share a host; *across hosts* numbers them in turns. All messages use sockets. Times are medians of epochs after the first.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
from common import QUIET, report, run_on_hosts
from samples import Measure, Model, Samples, graph_of

from lightning_gnn import DGCLStrategy, GraphDataModule

COLUMNS = ["graph ranks", "samples per batch", "ms/step", "of within hosts", "MB sent/step", "load"]
WITHIN, ACROSS = "within hosts", "across hosts"
_FEATURES, _STEPS, _EPOCHS = 16, 4, 4


def train(options: argparse.Namespace) -> None:
    """Trains as one rank of netlab; rank 0 writes the row."""
    if options.place == ACROSS:
        os.environ["RANK"] = str([0, 2, 1, 3][int(os.environ["RANK"])])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    [size] = options.sizes
    measure, module = Measure(), Model(_FEATURES)
    strategy = DGCLStrategy(graph_ranks=2, timeout=600, shared_memory=False)
    trainer = L.Trainer(
        strategy=strategy, devices=1, num_nodes=4, **{**QUIET, "max_epochs": _EPOCHS, "callbacks": [measure]}
    )
    samples = Samples(_STEPS * size, options.nodes, _FEATURES)
    folder = Path(options.row).parent / "partitions"
    data = GraphDataModule(
        graph_of(options.nodes, 4), samples=samples, global_batch_size=size, shuffle=False, partition_dir=folder
    )
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        row: dict[str, Any] = {"graph ranks": options.place, "samples per batch": size}
        row |= {"ms/step": 1e3 * median(module.seconds[1:]) / _STEPS, "losses": module.losses}
        row |= {"MB sent/step": measure.found["bytes"] / 2**20 / _STEPS, "load": os.getloadavg()[0]}
        Path(options.row).write_text(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", help="netlab.py")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        train(options)
        return
    if options.netlab is None:
        parser.error("pass --netlab PATH/netlab.py")
    rows = []
    for size in options.sizes:
        for place in (WITHIN, ACROSS):
            given = ["--nodes", str(options.nodes), "--sizes", str(size), "--place", place]
            rows.append(run_on_hosts(options.netlab, 270, __file__, given))
            first = rows[-1] if place == WITHIN else rows[-2]
            rows[-1]["of within hosts"] = rows[-1]["ms/step"] / first["ms/step"]
            assert rows[-1]["losses"] == first["losses"] or place == WITHIN, "losses must be equal"
    report(f"Placement of graph ranks, {options.nodes:,} nodes, 2x2 ranks on two hosts", rows, COLUMNS, options.json)


if __name__ == "__main__":
    main()
