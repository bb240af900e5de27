"""Predicted against measured epochs of every scheme, on one machine and on two emulated hosts.

    python benchmarks/advise.py [--netlab NETLAB.py] [--graphs computers github planted-100000] [--ranks 2 4]
        [--inner-mbit 365 2700] [--epochs 15] [--json FILE]

A 2-layer GCN of 64, full graph. In each cell (graph, ranks, where) `lightning_gnn.tools.advising` predicts an epoch of each
scheme, and each is then trained, three times, taking turns: the median of its epochs but for the first four of each time. With
netlab (root only), four ranks on two emulated hosts, a link inside a host of `--inner-mbit`, a host's port 2.7 times slower;
what sockets cost there is measured first. *Chosen*: the scheme that advice has first, and how much longer than the fastest it
took.
*Error*: of the predicted epochs, on the average of all schemes, regardless of sign.
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
import torch.distributed as dist
from common import QUIET, report, run_on_hosts, run_row
from torch_geometric.nn.models import GCN
from vertex_cut_runs import SIZES

from lightning_gnn import GraphDataModule, NodeClassifier
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.wiring import machines
from lightning_gnn.tools.advising.advice import Candidate, advise_on, candidates
from lightning_gnn.tools.advising.machine import Machine, available_cores, measured_contention

WARM, TIMES = 4, 3


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


def busy_seconds() -> float:
    """Returns what all cores have computed since the machine began."""
    user, nice, system, _, _, irq, soft_irq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def sockets(rounds: int = 60) -> dict[str, float] | None:
    """Returns what messages of emulated hosts take of the cores at each end, of a message and of a byte, and besides, of time.

    Runs on all ranks.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    peers, seconds = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()], []
    sizes = (1_000, 300_000)
    for size in sizes:
        sent, arriving = torch.zeros(size, dtype=torch.uint8), torch.empty(len(peers), size, dtype=torch.uint8)
        dist.barrier()
        began = busy_seconds()
        for _ in range(rounds):
            ops = [dist.P2POp(dist.irecv, into, peer) for peer, into in zip(peers, arriving)]
            for work in dist.batch_isend_irecv(ops + [dist.P2POp(dist.isend, sent, peer) for peer in peers]):
                work.wait()
        dist.barrier()
        seconds.append((busy_seconds() - began) / rounds / len(peers) / dist.get_world_size() / 2)
    per_byte = max(0.0, seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    rank, one = dist.get_rank(), torch.zeros(1)
    dist.barrier()
    began = time.perf_counter()
    for turn in range(2 * rounds):  # ranks 0 and 2, on two hosts, 1 and 3 likewise
        (dist.send if turn % 2 == rank // 2 else dist.recv)(one, (rank + 2) % 4)
    latency = max(0.0, (time.perf_counter() - began) / rounds / 2 - 2 * seconds[0])
    found = {"socket_s": seconds[0], "socket_s_per_byte": per_byte, "socket_latency": latency}
    return found if rank == 0 else None


def predicted(graph: str, ranks: int, inner_mbit: float, **of_sockets: float) -> dict[str, Any]:
    """Returns what is predicted, by scheme."""
    cores = available_cores() // (2 if inner_mbit else 1)  # emulated hosts share them
    contention = measured_contention(ranks)
    machine = Machine(
        topology(ranks, inner_mbit), cores, contention=contention, shared_memory=not inner_mbit, **of_sockets
    )
    found = advise_on(machine, *workload(graph), only=tried(ranks))
    return {str(each.candidate): each.as_dict() for each in found}


def measured(graph: str, ranks: int, inner_mbit: float, epochs: int) -> dict[str, float] | None:
    """Trains under every scheme; returns seconds of an epoch, on rank 0."""
    devices: dict[str, int] = {"devices": ranks}
    options: dict[str, Any] = {}
    if "NETLAB_TOPO" in os.environ:
        devices = {"num_nodes": 2, "devices": ranks // 2}
        options["shared_memory"] = False
    epochs_of: dict[str, list[float]] = {}
    for candidate in tried(ranks) * TIMES:
        module, data = workload(graph)
        clock = Clock()
        trainer = L.Trainer(
            strategy=candidate.strategy(**options, self_check=False),
            **devices,
            max_epochs=epochs,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[clock],
            **QUIET,
        )
        trainer.fit(module, datamodule=data)
        ends = clock.ends[WARM - 1 :]
        epochs_of.setdefault(str(candidate), []).extend(after - before for before, after in pairwise(ends))
    return {name: median(each) for name, each in epochs_of.items()} if trainer.is_global_zero else None


def cell(options: argparse.Namespace, graph: str, ranks: int, inner_mbit: float) -> dict[str, Any]:
    asked = {"graph": graph, "ranks": ranks, "inner_mbit": inner_mbit}
    of_sockets = {}
    if inner_mbit:
        of_sockets = run_on_hosts(options.netlab, inner_mbit, __file__, ["--cell", json.dumps(["sockets", {}])])
    said = run_row(__file__, ["--cell", json.dumps(["predicted", {**asked, **of_sockets}])], threads=1)
    training = ["--cell", json.dumps(["measured", {**asked, "epochs": options.epochs}])]
    if inner_mbit:
        took = run_on_hosts(options.netlab, inner_mbit, __file__, training)
    else:
        took = run_row(__file__, training, threads=1)
    schemes = {name: (said[name]["seconds"], seconds) for name, seconds in took.items() if said[name]["applies"]}
    chosen = next(name for name in said if name in schemes)  # said in order
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
        "sockets": of_sockets,
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
        row = {"predicted": predicted, "measured": measured, "sockets": sockets}[what](**arguments)
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
