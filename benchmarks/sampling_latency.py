"""How fast ranks on several machines make batches, where messages take their time: batches/s, exchanges and bytes of a batch.

    python benchmarks/sampling_latency.py --netlab NETLAB.py [--delays-ms 0,1] [--hosts 2,4] [--sizes 32,1000] [--fanouts
    15,10,5]

Ranks on emulated hosts (root only), one each, make batches, which nobody trains on, none ahead. Links have netlab's bandwidths.
The delay is added where something is received: a collective ends so much later, and a message is handed over so long after it has
arrived. One that is received only once its length is known waits for a round trip: for gloo to say so to the sender, and for it.
*Local*: the same ranks read all parts in memory. Another version of the package is measured by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import report, run_on_hosts

from lightning_gnn import GraphDataModule
from lightning_gnn.comm import rows as channels
from lightning_gnn.comm.group import World
from lightning_gnn.data.store import read_cut
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.loader import BatchMaker, SampledBatches, SeedBatches, SplitSeeds
from lightning_gnn.strategies.sampling.strategy import SamplingScheme


class Late:
    """Messages that take their time, and how many there were: wraps torch.distributed."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.counts = seconds, Counter[str]()
        self._under_way: list[_Arriving] = []
        self._all_to_all, self._irecv, self._isend = dist.all_to_all_single, dist.irecv, dist.isend
        dist.all_to_all_single, dist.irecv, dist.isend = self.all_to_all, self.irecv, self.isend  # type: ignore[assignment]

    def all_to_all(self, *args: Any, **options: Any) -> None:
        self.counts["all-to-alls"] += 1
        self.counts["bytes"] += args[1].nbytes
        self._all_to_all(*args, **options)
        time.sleep(self.seconds)

    def isend(self, data: torch.Tensor, *args: Any, **options: Any) -> Any:
        self.counts["messages"] += 1
        self.counts["bytes"] += data.nbytes
        return self._isend(data, *args, **options)

    def irecv(self, data: torch.Tensor, *args: Any, **options: Any) -> _Arriving:
        trips = 1 if data.nbytes == getattr(channels, "_HEAD", 0) else 2
        self._under_way.append(_Arriving(self, self._irecv(data, *args, **options), trips))
        return self._under_way[-1]

    def look(self) -> None:
        """Notes what has arrived by now."""
        for each in self._under_way:
            if each.arrived is None and each.work.is_completed():
                each.arrived = time.perf_counter()
        self._under_way = [each for each in self._under_way if each.arrived is None]


class _Arriving:
    def __init__(self, late: Late, work: Any, trips: int) -> None:
        self._late, self.work, self._trips = late, work, trips
        self.arrived: float | None = None

    def wait(self) -> None:
        self.work.wait()
        self._late.look()
        arrived = time.perf_counter() if self.arrived is None else self.arrived
        time.sleep(max(0.0, arrived + self._trips * self._late.seconds - time.perf_counter()))


def rank_row(options: argparse.Namespace) -> dict[str, Any]:
    """Makes batches on this rank; returns what they took."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), options.hosts[0]
    world = World(rank, ranks, torch.device("cpu"), timedelta(seconds=600), shared_memory=False)
    near = list(range(ranks)) if options.local else [rank]
    cut = read_cut(Path(options.cut))
    store = GraphStore(cut, world, near, int(options.cache_mb * 1e6))
    split = SplitSeeds.of(cut, cut.types.input_type, "train_mask")
    batches = SeedBatches(split.sizes, options.sizes[0])
    # Versions that ask for each hop know no other ranks' seeds.
    others: dict[str, Any] = (
        {"peer_seeds": {peer: split.seeds(peer) for peer in store.askers}} if hasattr(store, "askers") else {}
    )
    maker = BatchMaker(store, {ONE_TYPE: options.num_neighbors})
    loader = SampledBatches([maker], batches, split.seeds(rank), split.first, rank, 0, 0, lambda: 0, **others)
    late, took = Late(options.delays_ms[0] / 1e3), []
    for batch in islice(loader, options.batches + 2):
        assert len(batch.x) == len(batch.n_id)
        received = store.channel.bytes_received if store.channel else 0
        took.append((time.perf_counter(), time.process_time(), late.counts.copy(), received))
    # The first two load, compile and meet.
    (began, cpu, before, received), (ended, cpu_now, after, now) = took[1], took[-1]
    count = len(took) - 2
    counted = torch.tensor([now - received, *(after[name] - before[name] for name in ("all-to-alls", "messages"))])
    of_all = world.all_gather(counted).double()
    world.close()
    return {
        "batches/s": ranks * count / (ended - began),
        "CPU ms": 1e3 * (cpu_now - cpu) / count,
        "all-to-alls": float(of_all[:, 1].mean() / count),
        "messages": float(of_all[:, 2].mean() / count),
        "MB": float(of_all[:, 0].mean() / count / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    floats: Any = lambda text: [float(each) for each in text.split(",")]  # noqa: E731
    ints: Any = lambda text: [int(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--netlab", help="netlab.py")
    parser.add_argument("--inner-mbit", type=float, default=2700.0, help="of a link inside an emulated host")
    parser.add_argument("--delays-ms", type=floats, default=[0.0, 1.0])
    parser.add_argument("--hosts", type=ints, default=[2, 4])
    parser.add_argument("--sizes", type=ints, default=[32, 1000], help="seeds of a batch")
    parser.add_argument("--fanouts", dest="num_neighbors", type=ints, default=[15, 10, 5])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--graph", default="planted-200000")
    parser.add_argument("--cache-mb", type=float, default=64.0)
    parser.add_argument("--json")
    for name in ("cut", "row"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--local", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cut:
        row = rank_row(options)
        if os.environ["RANK"] == "0":
            Path(options.row).write_text(json.dumps(row))
        return
    data = GraphDataModule("sampling_epochs.load", {"name": options.graph})
    own = ["--batches", str(options.batches), "--cache-mb", str(options.cache_mb)]
    own += ["--fanouts", ",".join(map(str, options.num_neighbors))]
    rows = []
    for size in options.sizes:
        for hosts, delay in [(hosts, delay) for hosts in options.hosts for delay in (None, *options.delays_ms)]:
            cut = data.partition_for(SamplingScheme().layout(hosts))
            cell = {"cut": cut, "sizes": size, "hosts": hosts, "delays-ms": delay or 0.0}
            given = [*own, *(f"--{name}={value}" for name, value in cell.items()), *["--local"] * (delay is None)]
            found = run_on_hosts(options.netlab, options.inner_mbit, __file__, given, hosts, hosts)
            row = {"hosts": hosts, "seeds": size, "delay ms": "local" if delay is None else delay, **found}
            rows.append({**row, "load": os.getloadavg()[0]})
            print(rows[-1], flush=True)
    title = f"{options.graph}, fan-outs {options.num_neighbors}; a host's link {options.inner_mbit / 2.7:.0f} Mbit/s"
    report(title, rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
