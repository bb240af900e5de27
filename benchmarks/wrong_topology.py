"""Epochs along plans over a right topology and over a wrong one, and directly.

Two emulated hosts of two ranks (netlab, root only). The wrong topology has ranks 1 and 2 exchanged: the fast link inside a host
is taken for one between hosts. Of each run the last third of the epochs counts. The model is a GCN of three layers with 64
columns::

    python benchmarks/wrong_topology.py --netlab NETLAB.py [--graphs ego-twitter Computers GitHub] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from common import QUIET, report, run_on_hosts
from cover import CLASSES, COLUMNS, GRAPHS, MODELS, Clock, data_of, edges_of

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.extensions.plans.wiring import load_topology


def on_hosts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns seconds of an epoch, as one of the ranks of a cluster."""
    right, found = load_topology(os.environ["NETLAB_TOPO"]), []
    other = {1: 2, 2: 1}
    links = {(other.get(a, a), other.get(b, b)): via for (a, b), via in right.links.items()}
    topologies = {"right": right, "wrong": replace(right, links=links)}
    for name in options.graphs:
        data = data_of(name, options.root)
        strategies = {label: DGCLStrategy(plan="spst", topology=topology) for label, topology in topologies.items()}
        strategies["directly"] = DGCLStrategy(plan="p2p")
        for label, strategy in strategies.items():
            torch.manual_seed(0)
            clock, began = Clock(), time.perf_counter()
            trainer = L.Trainer(
                strategy=strategy,
                devices=2,
                num_nodes=2,
                max_epochs=options.epochs,
                limit_val_batches=0,
                callbacks=[clock],
                **QUIET,
            )
            trainer.fit(NodeClassifier(MODELS["gcn"](COLUMNS, CLASSES)), datamodule=GraphDataModule(data))
            row = {
                "graph": name,
                "topology": label,
                "until the first epoch's end, s": clock.times[0] - began,
                "ms/epoch": 1e3 * float(median(np.diff(clock.times)[-options.epochs // 3 :])),
                "MB": float(trainer.callback_metrics["comm/bytes_sent"]) / 1e6,
                "loss": float(trainer.callback_metrics["train_loss"]),
            }
            found.append(row)
            if trainer.is_global_zero:
                print(row, flush=True)
        rights = {row["topology"]: row["ms/epoch"] for row in found if row["graph"] == name}
        for row in found:
            if row["graph"] == name:
                row["/ right"] = row["ms/epoch"] / rights["right"]
    return found if trainer.is_global_zero else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", help="netlab.py")
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=["ego-twitter", "Computers", "GitHub"])
    parser.add_argument("--inner-mbit", type=float, default=270.0, help="of a link inside a host")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--json")
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        if found := on_hosts(options):
            Path(options.row).write_text(json.dumps(found))
        return
    if not options.netlab:
        parser.error("pass --netlab PATH/netlab.py")
    with tempfile.TemporaryDirectory() as root:
        os.environ["LIGHTNING_GNN_STORE"] = f"{root}/store"
        for name in options.graphs:  # PyG's files are made once, not by all ranks at a time
            edges_of(name, root)
        arguments = ["--graphs", *options.graphs, "--epochs", str(options.epochs), "--root", root]
        rows = run_on_hosts(options.netlab, options.inner_mbit, __file__, arguments)
    report("Epochs along plans, 2 hosts of 2 ranks", rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
