"""Training on clusters: seconds, micro F1 and idle time of all-reduce and of gossip, with a slow worker or without.

    python benchmarks/gossip.py [--graphs computers github] [--slow 4] [--ranks 4] [--intervals 1 20 100] [--seeds 5]
        [--only NAME ...] [--batch-ms 12] [--epochs 30] [--clusters 40] [--json FILE]
    python benchmarks/gossip.py --slow 1 --ranks 4 8 --graphs computers photo-words --seeds 2 --batch-ms 100
    python benchmarks/gossip.py --validation

The thesis's model and settings: 2-layer GraphSAGE, learning rate 0.01, 30 epochs, 40 clusters. Each batch is stretched by
sleeping to `--batch-ms`, as if a device of its own computed it, and those of one worker to `--slow` times that; so more workers
than cores can be compared. Rows run one after the other. Seconds are those from any worker's first batch to any worker's last,
validation left out. The result, by ``final``, is tested on the whole graph: micro F1, which is the accuracy where a node has one
label; nodes of ``photo-words`` have several. The second command makes the tables of the thesis's section 4.4: one worker, and as
many as asked for, all alike. The third tells what validation costs.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from statistics import mean, stdev
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import QUIET, report
from sampling_epochs import load
from torch_geometric.data import Data
from torch_geometric.nn.models import GraphSAGE
from torchmetrics.classification import MulticlassF1Score, MultilabelF1Score

from lightning_gnn import ClusterAllReduceStrategy, GossipStrategy, GraphDataModule, NodeClassifier

HIDDEN, WORDS = 64, 50
ODD, EVEN = 1, 0
"""The slow worker: among those that are chosen by active_passive, or among those that choose."""


class Stretch(L.Callback):
    """Makes each batch take so many seconds, and those of one worker so many `times` that; notes, in memory that workers share,
    when each began its first batch and ended its last."""

    def __init__(self, workers: int, seconds: float, slow: int, times: float) -> None:
        self.seconds, self.slow, self.times, self._batch = seconds, slow, times, 0.0
        self.began, self.ended = torch.zeros(2, workers, dtype=torch.float64).share_memory_()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._batch, me = time.time(), trainer.local_rank
        if not self.began[me]:
            self.began[me] = self._batch

    def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:  # before workers meet
        seconds = self.seconds * (self.times if trainer.local_rank == self.slow else 1.0)
        time.sleep(max(0.0, self._batch + seconds - time.time()))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ended[trainer.local_rank] = time.time()

    @property
    def all_seconds(self) -> float:
        return float(self.ended.max() - self.began.min())


def graph_of(name: str) -> Data:
    """Returns a graph by name, without its split. Nodes of ``photo-words`` are goods that are bought together; which of the 50
    most frequent words their reviews have is learnt from the others: labels as in the thesis's Amazon, any number to a node."""
    if name != "photo-words":
        return load(name)
    data = load("photo")
    has = data.x > 0
    order = has.sum(0).argsort(descending=True, stable=True)
    return Data(
        x=F.normalize(data.x[:, order[WORDS:]]), edge_index=data.edge_index, y=has[:, order[:WORDS]].to(torch.float32)
    )


def run(
    scheme: str,
    source: Data,
    ranks: int,
    epochs: int,
    clusters: int,
    batch_s: float,
    slow: tuple[int, float],
    seed: int,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains and tests; `trainer` are arguments of the Trainer."""
    L.seed_everything(seed, verbose=False)
    strategies: dict[str, Any] = {"gossip": GossipStrategy, "cluster_allreduce": ClusterAllReduceStrategy}
    fixed = {"start_method": "fork", "timeout": 600, "self_check": False}
    strategy = strategies[scheme](num_clusters=clusters, seed=seed, **fixed, **options)
    several = source.y.dim() == 2
    classes = source.y.size(1) if several else int(source.y.max()) + 1
    model = GraphSAGE(source.num_features, HIDDEN, num_layers=2, out_channels=classes, dropout=0.2)
    module = NodeClassifier(model, task="multilabel" if several else "multiclass", lr=0.01)
    module.test_f1 = (MultilabelF1Score if several else MulticlassF1Score)(classes, average="micro")
    data = GraphDataModule(source, split=(0.6, 0.2, 0.2), seed=0)
    once = {"check_val_every_n_epoch": epochs, "num_sanity_val_steps": 0}  # for the best
    clock = Stretch(ranks, batch_s, *(slow if ranks > 1 else (0, 1.0)))
    L.Trainer(
        strategy=strategy, devices=ranks, max_epochs=epochs, callbacks=[clock], **QUIET, **{**once, **(trainer or {})}
    ).fit(module, datamodule=data)
    [tested] = L.Trainer(devices=1, **QUIET).test(module, datamodule=data, verbose=False)
    counts = [strategy.report[rank] for rank in sorted(strategy.report)]
    idle = sum(each.waited + each.idle for each in counts) / (ranks * clock.all_seconds)
    return {
        "seconds": clock.all_seconds,
        "batches": [each.batches for each in counts],
        "averages": sum(each.averages for each in counts),
        "waits": sum(each.waits for each in counts),
        "idle": 100 * idle,
        "micro F1": 100 * tested["test_f1"],
    }


def row(seeds: int, **arguments: Any) -> dict[str, Any]:
    """Runs with so many seeds; returns the means, and what each gave."""
    found = [run(seed=seed, **arguments) for seed in range(seeds)]
    of_seeds = {name: [each[name] for each in found] for name in found[0]}
    return {
        "seconds": mean(of_seeds["seconds"]),
        "idle, %": mean(of_seeds["idle"]),
        "averages": mean(of_seeds["averages"]),
        "waits": mean(of_seeds["waits"]),
        "batches": " ".join(map(str, found[0]["batches"])),
        "micro F1, %": mean(of_seeds["micro F1"]),
        "+-": stdev(of_seeds["micro F1"]) if seeds > 1 else 0.0,
        "runs": found,
    }


def cells(intervals: list[int], alike: bool) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields names, intervals and arguments, of workers that are `alike` or one of which is slow; all-reduce comes first in each
    interval."""
    for interval in intervals:
        yield "all-reduce", interval, {"scheme": "cluster_allreduce", "slow": ODD}
        gradients = {"average": "gradients", "slow": ODD}
        yield "any", interval, {"pairing": "any", **gradients}
        yield "prompt", interval, gradients
        active = {**gradients, "pairing": "active_passive"}
        if alike:
            yield "active/passive", interval, active
        else:
            yield "active/passive, slow one passive", interval, active
            yield "active/passive, slow one active", interval, {**active, "slow": EVEN}
        if interval == 20:
            parameters = {"average": "parameters", "slow": ODD}
            yield "all-reduce, parameters", interval, {"scheme": "cluster_allreduce", **parameters}
            yield "prompt, parameters", interval, parameters
            yield "push-sum", interval, {"average": "push_sum", "slow": ODD}


def of_graph(graph: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns all rows of a graph."""
    common = {"source": graph_of(graph), "epochs": options.epochs, "clusters": options.clusters, "seeds": options.seeds}
    common["batch_s"] = options.batch_ms / 1e3
    rows: list[dict[str, Any]] = []

    def add(name: str, ranks: int, scheme: str = "gossip", slow: int = ODD, **others: Any) -> float:
        found = row(scheme=scheme, ranks=ranks, slow=(slow, options.slow), **common, **others)
        words = {"graph": graph, "workers": ranks, "trained": name, "interval": others.get("average_every_n_batches")}
        alone = rows[0] if rows else found
        times = alone["seconds"] / found["seconds"]
        points = found["micro F1, %"] - alone["micro F1, %"]
        rows.append({**words, **found, "times one": times, "points": points})
        return found["seconds"]

    add("one device", 1, "cluster_allreduce")
    lockstep: dict[tuple[int, int], float] = {}
    for ranks in options.ranks:
        for name, interval, arguments in cells(options.intervals, options.slow == 1):
            if options.only and name not in options.only:
                continue
            seconds = add(name, ranks, average_every_n_batches=interval, **arguments)
            if name == "all-reduce":
                lockstep[ranks, interval] = seconds
            all_reduce = lockstep.get((ranks, interval))
            rows[-1]["times all-reduce"] = all_reduce and all_reduce / seconds
            print({name: value for name, value in rows[-1].items() if name != "runs"}, file=sys.stderr, flush=True)
    return rows


VALIDATED: list[tuple[str, dict[str, Any]]] = [
    ("each epoch, all clusters", {"check_val_every_n_epoch": 1}),
    ("every 4th epoch and the last, all clusters", {"check_val_every_n_epoch": 4}),
    ("the last epoch, all clusters", {"check_val_every_n_epoch": 100}),
    ("each epoch, 10 clusters", {"check_val_every_n_epoch": 1, "limit_val_batches": 10}),
    ("nothing", {"check_val_every_n_epoch": 1, "limit_val_batches": 0}),
]


def validation() -> None:
    """What validation costs: CPU seconds of all workers, their start included."""
    rows, source = [], graph_of("computers")
    for name, trainer in VALIDATED:
        fixed = {"epochs": 10, "clusters": 40, "batch_s": 0.0, "slow": (ODD, 1.0), "seed": 0}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = run("gossip", source, 4, trainer=trainer, **fixed)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append({"validated": name, "CPU seconds": cpu, "micro F1, %": found["micro F1"]})
    report("computers: 40 clusters, 10 epochs, 4 workers", rows, ["validated", "CPU seconds", "micro F1, %"], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=["computers", "github"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[4])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--intervals", type=int, nargs="*", default=[1, 20, 100])
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--slow", type=float, default=4.0, help="how many times longer one worker's batches take")
    parser.add_argument("--batch-ms", type=float, default=12.0)
    parser.add_argument("--validation", action="store_true", help="what validation costs")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.validation:
        validation()
        return
    rows = [row for graph in options.graphs for row in of_graph(graph, options)]
    slow = "all alike" if options.slow == 1 else f"one worker's {options.slow:g} times that"
    title = f"{options.clusters} clusters, {options.epochs} epochs, {options.batch_ms:g} ms a batch, {slow}"
    columns = [
        "graph",
        "workers",
        "trained",
        "interval",
        "seconds",
        "times one",
        "times all-reduce",
        "idle, %",
        "averages",
        "waits",
        "batches",
        "micro F1, %",
        "+-",
        "points",
    ]
    report(f"{title}; {options.seeds} seeds", rows, columns, options.json)


if __name__ == "__main__":
    main()
