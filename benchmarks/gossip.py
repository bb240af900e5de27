"""Training on clusters: batches a second and accuracy of one device, of all-reduce and of gossip, also with slow workers.

    python benchmarks/gossip.py [--nodes 20000] [--ranks 2] [--epochs 10] [--intervals 1 20] [--pairings any active_passive]
        [--slow RANK:SECONDS ...] [--json FILE]

Every row runs in processes of its own. ``--slow 1:0.1`` has rank 1 sleep for 0.1 s in each batch, where there are several.
Seconds are those from rank 0's first batch to the end of its fit, which comes when all workers are done, without validation in
between. The result is the mean of the workers, tested on the whole graph.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import lightning as L
from common import QUIET, report, run_row
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import ClusterAllReduceStrategy, GossipStrategy, GraphDataModule, NodeClassifier

FEATURES, CLASSES, HIDDEN = 32, 8, 64


class Slow(L.Callback):
    """Sleeps in each batch of some workers, and notes when this one began."""

    def __init__(self, slow: dict[str, float]) -> None:
        self.slow, self.began = slow, 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.began = self.began or time.perf_counter()
        if trainer.world_size > 1:
            time.sleep(self.slow.get(str(trainer.global_rank), 0.0))


def row(
    scheme: str, nodes: int, ranks: int, epochs: int, clusters: int, slow: dict[str, float], **options: Any
) -> dict[str, Any] | None:
    """Trains and tests; returns what was found on rank 0."""
    L.seed_everything(0)
    strategies: dict[str, Any] = {"gossip": GossipStrategy, "cluster_allreduce": ClusterAllReduceStrategy}
    strategy = strategies[scheme](clusters=clusters, final="average", timeout=600, self_check=False, **options)
    clock = Slow(slow)
    data = GraphDataModule("lightning_gnn.planted_partition", {"num_nodes": nodes})
    module = NodeClassifier(GraphSAGE(FEATURES, HIDDEN, num_layers=2, out_channels=CLASSES, dropout=0.2), lr=0.01)
    trainer = L.Trainer(
        strategy=strategy,
        devices=ranks,
        max_epochs=epochs,
        limit_val_batches=0,
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
    batches = [each.batches for each in counts]
    idle = sum(each.waited + each.idle for each in counts) / max(sum(each.seconds for each in counts), 1e-9)
    return {
        "seconds": seconds,
        "batches/s": sum(batches) / seconds,
        "batches": " ".join(map(str, batches)),
        "averages": sum(each.averages for each in counts),
        "idle, %": 100 * idle,
        "test accuracy, %": 100 * tested["test_acc"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--intervals", type=int, nargs="*", default=[1, 20])
    parser.add_argument("--pairings", nargs="*", default=["any"])
    parser.add_argument("--slow", nargs="*", default=[], metavar="RANK:SECONDS")
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        found = row(**json.loads(options.row))
        if found is not None:
            print(json.dumps(found))
        return
    slow = {rank: float(seconds) for rank, _, seconds in (each.partition(":") for each in options.slow)}
    common = {"nodes": options.nodes, "epochs": options.epochs, "clusters": options.clusters, "slow": slow}
    asked: list[tuple[str, dict[str, Any]]] = [("one device", {"scheme": "cluster_allreduce", "ranks": 1})]
    for interval in options.intervals:
        how = {"ranks": options.ranks, "averaging_interval": interval}
        asked.append((f"all-reduce, interval {interval}", {"scheme": "cluster_allreduce", **how}))
        for pairing in options.pairings:
            asked.append((f"gossip, {pairing}, interval {interval}", {"scheme": "gossip", "pairing": pairing, **how}))
    rows = []
    for name, arguments in asked:
        found = run_row(__file__, ["--row", json.dumps({**common, **arguments})], threads=1)
        rows.append({"trained": name, **found})
        print(rows[-1], file=sys.stderr, flush=True)
    title = f"{options.clusters} clusters, {options.nodes:,} nodes, {options.epochs} epochs, {options.ranks} workers"
    if slow:
        title += "; slow: " + ", ".join(f"worker {rank} by {seconds:g} s a batch" for rank, seconds in slow.items())
    report(title, rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
