"""Predicted against measured epochs of every scheme, on one machine and on two emulated hosts.

    python benchmarks/advise.py [--netlab NETLAB.py] [--graphs computers github planted-100000] [--ranks 2 4]
        [--inner-mbit 365 2700] [--epochs 15] [--json FILE]

A 2-layer GCN of 64, full graph. In each cell (graph, ranks, where) `lightning_gnn.advising` predicts an epoch of each scheme, and
each is then trained: the median of its epochs after the first four. With netlab (root only), four ranks on two emulated hosts, a
link inside a host of `--inner-mbit`, a host's port 2.7 times slower. *Chosen*: the scheme that was predicted to be the fastest,
and how much longer than the fastest it took. *Error*: of the predicted epochs, on the average of all schemes, regardless of sign.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning as L
import torch
from common import QUIET, report, run_on_hosts, run_row
from torch_geometric.nn.models import GCN
from vertex_cut_runs import SIZES

from lightning_gnn import GraphDataModule, NodeClassifier
from lightning_gnn.advising.advice import advise_on
from lightning_gnn.advising.candidates import Candidate, candidates
from lightning_gnn.advising.machine import Machine, available_cores
from lightning_gnn.planning import Topology
from lightning_gnn.planning.presets import machines

WARM = 4


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_epoch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def workload(graph: str) -> tuple[NodeClassifier, GraphDataModule]:
    torch.manual_seed(0)
    columns, classes = SIZES.get(graph, (100, 16))
    data = GraphDataModule("sampling_epochs.load", {"name": graph}, split=(0.6, 0.2, 0.2) if graph in SIZES else None)
    return NodeClassifier(GCN(columns, 64, num_layers=2, out_channels=classes), lr=0.01), data


def topology(ranks: int, inner_mbit: float) -> Topology:
    """Returns one machine, or the two emulated hosts."""
    if not inner_mbit:
        return machines([ranks])
    return machines([ranks // 2] * 2, inner_mbit / 8e3, inner_mbit / 2.7 / 8e3)


def tried(ranks: int) -> list[Candidate]:
    """Returns the schemes that give the numbers of one device."""
    return [each for each in candidates(ranks) if each.exact]


def predicted(graph: str, ranks: int, inner_mbit: float) -> dict[str, Any]:
    """Returns what is predicted, by scheme."""
    cores = available_cores() // (2 if inner_mbit else 1)  # emulated hosts share them
    machine = Machine(topology(ranks, inner_mbit), cores)
    found = advise_on(machine, *workload(graph), only=tried(ranks))
    return {str(each.candidate): each.as_dict() for each in found}


def measured(graph: str, ranks: int, inner_mbit: float, epochs: int) -> dict[str, float] | None:
    """Trains under every scheme; returns seconds of an epoch, on rank 0."""
    devices: dict[str, int] = {"devices": ranks}
    options: dict[str, Any] = {}
    if "NETLAB_TOPO" in os.environ:
        devices = {"num_nodes": 2, "devices": ranks // 2}
        options["shared_memory"] = False
    found = {}
    for candidate in tried(ranks):
        module, data = workload(graph)
        clock = Clock()
        trainer = L.Trainer(
            strategy=candidate.kind(**candidate.arguments, **options, self_check=False),
            **devices,
            max_epochs=epochs,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[clock],
            **QUIET,
        )
        trainer.fit(module, datamodule=data)
        ends = clock.ends[WARM - 1 :]
        found[str(candidate)] = median(after - before for before, after in pairwise(ends))
    return found if trainer.is_global_zero else None


def cell(options: argparse.Namespace, graph: str, ranks: int, inner_mbit: float) -> dict[str, Any]:
    asked = {"graph": graph, "ranks": ranks, "inner_mbit": inner_mbit}
    said = run_row(__file__, ["--cell", json.dumps(["predicted", asked])], threads=1)
    training = ["--cell", json.dumps(["measured", {**asked, "epochs": options.epochs}])]
    if inner_mbit:
        took = run_on_hosts(options.netlab, inner_mbit, __file__, training)
    else:
        took = run_row(__file__, training, threads=1)
    schemes = {name: (said[name]["seconds"], seconds) for name, seconds in took.items() if said[name]["applies"]}
    chosen = min(schemes, key=lambda name: schemes[name][0])
    fastest = min(schemes, key=lambda name: schemes[name][1])
    return {
        "graph": graph,
        "ranks": ranks,
        "where": f"2 hosts, {inner_mbit / 2.7:.0f} Mbit/s" if inner_mbit else "one machine",
        "chosen": chosen,
        "predicted, ms": 1e3 * schemes[chosen][0],
        "measured, ms": 1e3 * schemes[chosen][1],
        "fastest": fastest,
        "its ms": 1e3 * schemes[fastest][1],
        "longer, %": 100 * (schemes[chosen][1] / schemes[fastest][1] - 1),
        "error, %": 100 * mean(abs(said / took - 1) for said, took in schemes.values()),
        "load": os.getloadavg()[0],
        "schemes": {name: {"predicted": said, "measured": took} for name, (said, took) in schemes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=["computers", "github", "planted-100000"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="on one machine")
    parser.add_argument("--netlab", help="netlab.py: also train on emulated hosts")
    parser.add_argument("--inner-mbit", type=float, nargs="*", default=[365.0, 2700.0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--json")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        what, arguments = json.loads(options.cell)
        row = {"predicted": predicted, "measured": measured}[what](**arguments)
        if row is not None:
            print(json.dumps(row))
            if options.row:
                Path(options.row).write_text(json.dumps(row))
        return
    places = [(ranks, 0.0) for ranks in options.ranks]
    if options.netlab:
        places += [(4, inner_mbit) for inner_mbit in options.inner_mbit]
    rows = []
    for graph in options.graphs:
        for ranks, inner_mbit in places:
            rows.append(cell(options, graph, ranks, inner_mbit))
            print(rows[-1], file=sys.stderr, flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1))
    right = sum(row["longer, %"] <= 10 for row in rows)
    title = f"{right} of {len(rows)} choices within 10 %; mean error {mean(row['error, %'] for row in rows):.0f} %"
    columns = [
        "graph",
        "ranks",
        "where",
        "chosen",
        "predicted, ms",
        "measured, ms",
        "fastest",
        "its ms",
        "longer, %",
        "error, %",
        "load",
    ]
    report(title, rows, columns, options.json)


if __name__ == "__main__":
    main()
