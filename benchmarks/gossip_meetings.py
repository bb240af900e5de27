"""What meetings of gossip are worth: by what workers send each other, whom they choose, and how often they meet.

    python benchmarks/gossip_meetings.py [--graphs computers github] [--only NAME ...] [--seeds 2] [--workers 4] [--epochs 10]
        [--clusters 40] [--interval 5] [--slow 4] [--json FILE]

Workers are simulated one after the other in this process, in a time of their own, in which a batch takes 1 and one of the slow
worker ``--slow``: so rows repeat digit by digit, whatever else the machine does, and meetings can be compared at equal numbers.
Training, clusters and what a meeting makes of two vectors are those of the package; pairing is that of ``"prompt"``, meetings are
free of cost. 2-layer GraphSAGE of 64, learning rate 0.01, dropout 0.2; splits of 60/20/20 %.

Apart: how far workers are from each other, relative to their mean, in per cent; the mean over the epochs' ends, and at the end.
Accuracy: of the mean of all workers' weights, on the whole graph, and the mean of those of each worker's own.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import random
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from common import report
from gossip_defaults import HIDDEN, graph
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.extensions.codecs.codec import make_codec
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.gossip.averaging import Averages
from lightning_gnn.strategies.gossip.clusters import Clusters
from lightning_gnn.strategies.gossip.differences import Difference, Differences, Whole
from lightning_gnn.strategies.gossip.worker import distance, sketch


class Simulated:
    """A worker: its model and what it knows; `period` is the time between its batches."""

    def __init__(self, me: int, model: torch.nn.Module, period: float, codec: str | None) -> None:
        self.me, self.model, self.period = me, model, period
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.averages = Averages(model, gradients=False, through_host=True)
        self.differences = None if codec is None else Differences(make_codec(codec), self.averages.sizes)  # type: ignore[arg-type]
        self.batches, self.sent, self.met_at = 0, 0, 0.0
        self.waits_for: int | None = None
        self.brought: tuple[Tensor, Whole | Difference] | None = None  # its vector when it chose, if it does not wait
        self.moves: list[Tensor] = []  # of averages that its batch at that time hides
        self.sketch = sketch(model.parameters())  # as published at an epoch's start

    def bring(self, partner: int, meeting: int) -> Whole | Difference:
        own = self.averages.vector()
        return Whole(own) if self.differences is None else Difference(own, self.differences, partner, meeting)

    def move(self) -> None:
        """Adds what averages of earlier vectors have changed in these."""
        for move in self.moves:
            total = 2 * self.averages.vector() + move
            total[-1] = 2  # both have all tensors
            self.averages.take(total)
        self.moves = []

    def gradient(self, batch: Data) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        out = self.model(batch.x, batch.edge_index)[batch.train_mask]
        F.cross_entropy(out, batch.y[batch.train_mask]).backward()
        self.batches += 1


def meet(one: Simulated, other: Simulated, meeting: int) -> None:
    """Averages `one`, which has ended a batch, with `other`, which waits, or has gone on from what it has brought."""
    vectors = one.averages.vector(), other.brought[0] if other.brought else other.averages.vector()
    brings = one.bring(other.me, meeting), other.brought[1] if other.brought else other.bring(one.me, meeting)
    agreed = brings[0].state_id == brings[1].state_id
    messages = [each.message(agreed) for each in brings]
    for worker, own, vector, theirs, sent in zip((one, other), brings, vectors, messages[::-1], messages, strict=True):
        total = own.total(theirs)
        if other.brought:
            worker.moves.append(total - 2 * vector)
        else:
            worker.averages.take(total)
        worker.sent += sent.nbytes
    other.brought = None


Choice = Callable[[random.Random, Simulated, list[Simulated]], Simulated]


def at_random(rng: random.Random, me: Simulated, free: list[Simulated]) -> Simulated:
    return rng.choice(free)


def by_sketch(rng: random.Random, me: Simulated, free: list[Simulated]) -> Simulated:
    """Returns the farthest by what each has published when its epoch began."""
    return max(rng.sample(free, len(free)), key=lambda other: float((other.sketch - me.sketch).norm()))


def by_distance(rng: random.Random, me: Simulated, free: list[Simulated]) -> Simulated:
    """Returns the farthest now, which no worker can know."""
    mine = me.averages.vector()
    return max(rng.sample(free, len(free)), key=lambda other: float((other.averages.vector() - mine).norm()))


def simulated(
    source: Data,
    clusters: Clusters,
    seed: int,
    asked: argparse.Namespace,
    codec: str | None = None,
    choice: Choice = at_random,
    by_time: bool = False,
    delayed: bool = False,
) -> dict[str, float]:
    """Trains; returns what came of it.

    With `by_time`, workers meet equally often whatever their pace. With `delayed`, none waits: both go on with the next batch
    while they exchange, and add what the average has changed after it.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = GraphSAGE(source.num_features, HIDDEN, num_layers=2, out_channels=int(source.y.max()) + 1, dropout=0.2)
    pace = [asked.slow if me == asked.workers - 1 else 1.0 for me in range(asked.workers)]
    everyone = [Simulated(me, copy.deepcopy(model), pace[me], codec) for me in range(asked.workers)]
    items, size = asked.epochs * clusters.batches, clusters.batches
    taken = meetings = 0
    apart: list[float] = []
    # Ends of batches: when, a number that breaks ties, whose.
    ends = [(each.period * (1 + 1e-3 * rng.random()), each.me) for each in everyone]
    heapq.heapify(ends)
    now, left = 0.0, set[int]()
    while ends:
        now, who = heapq.heappop(ends)
        me = everyone[who]
        if taken == items:
            left.add(who)
        else:
            me.gradient(clusters.batch(clusters.draw_clusters(taken)))
            taken += 1
        me.move()
        done = [me]
        waiting = [each for each in everyone if each.waits_for == who]
        if waiting:
            meetings += 1
            meet(me, waiting[0], meetings)
            me.met_at = waiting[0].met_at = now
            waiting[0].waits_for = None
            if not delayed:
                done.append(waiting[0])
        elif who not in left:
            due = now - me.met_at >= asked.interval if by_time else me.batches % asked.interval == 0
            chosen = {each.waits_for for each in everyone}
            free = [
                each for each in everyone if each is not me and each.waits_for is None and each.me not in chosen | left
            ]
            if due and free and me.waits_for is None:
                me.waits_for = choice(rng, me, free).me
                if not delayed:
                    continue
                me.brought = me.averages.vector(), me.bring(me.waits_for, meetings + 1)
        for each in done:
            if each.me not in left:
                each.optimizer.step()
                heapq.heappush(ends, (now + each.period * (1 + 1e-3 * rng.random()), each.me))
        if taken % size == 0 and taken // size > len(apart):
            vectors = [each.averages.vector()[: -each.averages.sizes[-1]] for each in everyone]
            apart.append(100 * distance(vectors))
            for each in everyone:
                each.sketch = sketch(each.model.parameters())

    for each in everyone:
        each.move()

    def accuracy(state: dict[str, Tensor]) -> float:
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            right = model(source.x, source.edge_index).argmax(1) == source.y
        return 100 * float(right[source.test_mask].double().mean())

    states = [each.model.state_dict() for each in everyone]
    return {
        "number": meetings,
        "time": now,
        "MB": sum(each.sent for each in everyone) / 1e6,
        "apart": mean(apart),
        "apart at the end": apart[-1],
        "accuracy, %": accuracy({name: torch.stack([each[name] for each in states]).mean(0) for name in states[0]}),
        "own, %": mean(accuracy(each) for each in states),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "delayed by a batch": {"delayed": True},
    "int8, delayed": {"codec": "int8", "delayed": True},
    "farthest by sketches": {"choice": by_sketch},
    "farthest now": {"choice": by_distance},
    "intervals of time": {"by_time": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=["computers", "github"])
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), help="names of rows")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--interval", type=int, default=5)
    parser.add_argument("--slow", type=float, default=4.0, help="how many times longer the last worker's batches take")
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in asked.graphs:
        source = prepare_graph(graph(name), None, (0.6, 0.2, 0.2))
        data = GraphDataModule(source)
        data.prepare_for(LayoutSpec("edge_cut", asked.clusters, method="random"))
        cut = data.stored_cut()
        for words in asked.only:
            options = VARIANTS[words]
            runs = [simulated(source, Clusters(cut, 1, seed), seed, asked, **options) for seed in range(asked.seeds)]
            row: dict[str, Any] = {"graph": name, "meetings": words} | {
                key: mean(each[key] for each in runs) for key in runs[0]
            }
            row["+-"] = stdev(each["accuracy, %"] for each in runs) if len(runs) > 1 else 0.0
            rows.append(row)
            print(row, flush=True)
    title = f"{asked.workers} workers, interval {asked.interval}, {asked.epochs} epochs, {asked.seeds} seeds"
    report(title, rows, list(rows[0]), asked.json)


if __name__ == "__main__":
    main()
