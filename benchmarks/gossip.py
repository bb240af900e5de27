"""Training on clusters with a slow worker: seconds, accuracy and idle time of all-reduce and of gossip.

    python benchmarks/gossip.py [--graphs computers github] [--slow 4] [--ranks 4] [--intervals 1 20 100] [--seeds 5]
        [--only NAME ...] [--batch-ms 12] [--epochs 30] [--clusters 40] [--json FILE]

The thesis's model and settings: 2-layer GraphSAGE, learning rate 0.01, 30 epochs, 40 clusters. Each batch is stretched by
sleeping to `--batch-ms`, as if a device of its own computed it, and those of one worker to `--slow` times that; so more workers
than cores can be compared. Rows run in processes of their own, one after the other. Seconds are those from rank 0's first batch
to the end of its fit, which comes when all workers are done. The result, by ``final``, is tested on the whole graph.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from statistics import mean, stdev
from typing import Any

import lightning as L
from common import QUIET, report, run_row
from torch_geometric.nn.models import GraphSAGE
from vertex_cut_runs import SIZES

from lightning_gnn import ClusterAllReduceStrategy, GossipStrategy, GraphDataModule, NodeClassifier

HIDDEN = 64
ODD, EVEN = 1, 0
"""The slow worker: among those that are chosen by active_passive, or among those that choose."""


class Stretch(L.Callback):
    """Makes each batch take so many seconds, and notes when the first one began."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self._batch = seconds, 0.0, 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._batch = time.perf_counter()
        self.began = self.began or self._batch

    def on_after_backward(self, *_: Any) -> None:  # before workers meet
        time.sleep(max(0.0, self._batch + self.seconds - time.perf_counter()))


def run(
    scheme: str,
    graph: str,
    ranks: int,
    epochs: int,
    clusters: int,
    batch_s: float,
    slow: tuple[int, float],
    seed: int,
    **options: Any,
) -> dict[str, Any] | None:
    """Trains and tests; returns what was found on rank 0."""
    L.seed_everything(seed, verbose=False)
    strategies: dict[str, Any] = {"gossip": GossipStrategy, "cluster_allreduce": ClusterAllReduceStrategy}
    strategy = strategies[scheme](clusters=clusters, seed=seed, timeout=600, self_check=False, **options)
    columns, classes = SIZES[graph]
    data = GraphDataModule("sampling_epochs.load", {"name": graph}, split=(0.6, 0.2, 0.2), seed=0)
    module = NodeClassifier(GraphSAGE(columns, HIDDEN, num_layers=2, out_channels=classes, dropout=0.2), lr=0.01)
    slow_rank, times = slow
    here = int(os.environ.get("LOCAL_RANK", 0))
    clock = Stretch(batch_s * (times if ranks > 1 and here == slow_rank else 1.0))
    trainer = L.Trainer(
        strategy=strategy,
        devices=ranks,
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,  # once, for the best
        num_sanity_val_steps=0,
        callbacks=[clock],
        **QUIET,
    )
    trainer.fit(module, datamodule=data)
    seconds = time.perf_counter() - clock.began
    [tested] = trainer.test(module, datamodule=data, verbose=False)
    if not trainer.is_global_zero:
        return None
    counts = [strategy.report[rank] for rank in sorted(strategy.report)]
    idle = sum(each.waited + each.idle for each in counts) / max(sum(each.seconds for each in counts), 1e-9)
    return {
        "seconds": seconds,
        "batches": [each.batches for each in counts],
        "averages": sum(each.averages for each in counts),
        "idle": 100 * idle,
        "accuracy": 100 * tested["test_acc"],
    }


def row(seeds: int, **arguments: Any) -> dict[str, Any] | None:
    """Runs with so many seeds; returns the means, and what each gave."""
    runs = [run(seed=seed, **arguments) for seed in range(seeds)]
    found = [each for each in runs if each is not None]
    if not found:
        return None
    accuracies = [each["accuracy"] for each in found]
    return {
        "seconds": mean(each["seconds"] for each in found),
        "idle, %": mean(each["idle"] for each in found),
        "averages": mean(each["averages"] for each in found),
        "batches": " ".join(map(str, found[0]["batches"])),
        "accuracy, %": mean(accuracies),
        "+-": stdev(accuracies) if len(found) > 1 else 0.0,
        "runs": found,
    }


def cells(intervals: list[int]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields names, intervals and arguments; all-reduce comes first in each interval."""
    for interval in intervals:
        yield "all-reduce", interval, {"scheme": "cluster_allreduce", "slow": ODD}
        gradients = {"average": "gradients", "slow": ODD}
        yield "any", interval, {"pairing": "any", **gradients}
        yield "prompt", interval, gradients
        yield "active/passive, slow one passive", interval, {**gradients, "pairing": "active_passive"}
        yield "active/passive, slow one active", interval, {**gradients, "pairing": "active_passive", "slow": EVEN}
        if interval == 20:
            parameters = {"average": "parameters", "slow": ODD}
            yield "all-reduce, parameters", interval, {"scheme": "cluster_allreduce", **parameters}
            yield "prompt, parameters", interval, parameters
            yield "push-sum", interval, {"average": "push_sum", "slow": ODD}


def table(graph: str, options: argparse.Namespace) -> None:
    """Runs all rows on a graph."""
    common = {"graph": graph, "epochs": options.epochs, "clusters": options.clusters, "seeds": options.seeds}
    common["batch_s"] = options.batch_ms / 1e3

    def asked(slow: int, scheme: str = "gossip", ranks: int = options.ranks, **others: Any) -> dict[str, Any]:
        arguments = {**common, "scheme": scheme, "ranks": ranks, "slow": [slow, options.slow], **others}
        return run_row(__file__, ["--row", json.dumps(arguments)], threads=1)

    alone = asked(ODD, "cluster_allreduce", 1)
    rows: list[dict[str, Any]] = [{"trained": "one device", **alone}]
    lockstep: dict[int, float] = {}
    for name, interval, arguments in cells(options.intervals):
        if options.only and name not in options.only:
            continue
        found = asked(averaging_interval=interval, **arguments)
        if name == "all-reduce":
            lockstep[interval] = found["seconds"]
        found["times all-reduce"] = lockstep[interval] / found["seconds"] if interval in lockstep else None
        found["points"] = found["accuracy, %"] - alone["accuracy, %"]
        rows.append({"trained": name, "interval": interval, **found})
        print({name: value for name, value in rows[-1].items() if name != "runs"}, file=sys.stderr, flush=True)
    title = (
        f"{graph}: {options.clusters} clusters, {options.epochs} epochs, {options.ranks} workers, {options.batch_ms:g} ms a "
        f"batch, one worker's {options.slow:g} times that; {options.seeds} seeds"
    )
    columns = ["trained", "interval", "seconds", "times all-reduce", "idle, %", "averages", "batches"]
    columns += ["accuracy, %", "+-", "points"]
    path = options.json and options.json.replace(".json", f"-{graph}.json")
    report(title, rows, columns, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=["computers", "github"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--intervals", type=int, nargs="*", default=[1, 20, 100])
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--slow", type=float, default=4.0, help="how many times longer one worker's batches take")
    parser.add_argument("--batch-ms", type=float, default=12.0)
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        found = row(**json.loads(options.row))
        if found is not None:
            print(json.dumps(found))
        return
    for graph in options.graphs:
        table(graph, options)


if __name__ == "__main__":
    main()
