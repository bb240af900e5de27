"""What it takes one of up to 1,024 ranks to plan in two stages between machines, and what such a plan saves.

Ranks sit on machines of 8. Each reads 2 million rows: a machine has a pool of rows of other machines, of which each of its ranks
reads a quarter, drawn apart; so 8 ranks read 16 million rows, of which 7.2 million differ. Owners are asked for as many rows as
they ask for. Memory is the most that is held beside the given halos, in a second run.

    python benchmarks/hierarchy.py [--ranks 64 256 1024] [--rows 2000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from typing import Any

import numpy as np
from common import report

from lightning_gnn.extensions.plans.hierarchy import loads, plan_through_hosts, prices
from lightning_gnn.extensions.plans.topology import Hosts
from lightning_gnn.partition.shard import HaloPlan

PER_HOST, SHARE = 8, 0.25


def planned(ranks: int, rows: int) -> dict[str, Any]:
    rng, per_rank = np.random.default_rng(0), 2 * rows
    offsets = np.arange(ranks + 1) * per_rank
    hosts = Hosts(tuple(tuple(range(first, first + PER_HOST)) for first in range(0, ranks, PER_HOST)))
    # The pool of the first machine, whose rank 0 plans: rows of the others; the pools of others hold rows of rank 0.
    pool = np.unique(rng.integers(offsets[PER_HOST], offsets[-1], int(rows / SHARE)))
    halos = [pool[rng.random(len(pool)) < SHARE] if rank < PER_HOST else np.empty(0, np.int64) for rank in range(ranks)]
    sends = [np.empty(0, np.int64)] * PER_HOST
    for _ in hosts.ranks[1:]:
        asked = np.unique(rng.integers(0, per_rank, int(rows / SHARE / PER_HOST / (len(hosts.ranks) - 1))))
        sends += [asked[rng.random(len(asked)) < SHARE] for _ in range(PER_HOST)]
    counts = np.diff(np.searchsorted(halos[0], offsets))
    direct = HaloPlan(per_rank, tuple(counts.tolist()), tuple(sends))
    began = time.perf_counter()
    plan_through_hosts(0, hosts, direct, halos, offsets)
    seconds = time.perf_counter() - began
    tracemalloc.start()
    tables = plan_through_hosts(0, hosts, direct, halos, offsets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    mine = loads(0, hosts, direct, tables)
    (_, alone), (_, staged) = prices(hosts, np.broadcast_to(mine, (ranks, *mine.shape)))
    return {
        "ranks": ranks,
        "halo rows": len(halos[0]),
        "plan, s": seconds,
        "memory, MB": peak / 1e6,
        "tables, MB": tables.table_bytes / 1e6,
        "from machines, directly": int(mine[0, 1]),
        "in two stages": int(mine[1, 1]),
        "cost / direct": staged / alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256, 1024], help="multiples of 8, at least 16")
    parser.add_argument("--rows", type=int, default=2_000_000, help="halo rows of each rank")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = [planned(ranks, options.rows) for ranks in options.ranks]
    report("One rank's plan in two stages, machines of 8 ranks", rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
