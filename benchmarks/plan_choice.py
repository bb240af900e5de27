"""Whether the plan that the cost model chooses is the fastest one, over emulated links whose messages also arrive late.

    python benchmarks/plan_choice.py --netlab NETLAB.py --topologies FILE.json,FILE.json [--delays-ms 2,20] [--columns 2,16,64]

As the ranks of one cluster::

    python NETLAB.py run FILE.json -- python benchmarks/plan_choice.py

Links are netlab's, which have bandwidths only. The delay is added where rows are received: a stage's messages are handed over so
long after they have arrived, as if links were long. In every cell the direct exchange and SPST of at most 2, 3 and any number of
stages carry out the same allgather. The model knows the topology's bandwidths; what a stage and a message take is measured,
as ``lightning-gnn topology measure`` does, under the same delay.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from common import report
from planned_exchange import Rank, add_cluster_arguments, join_cluster, run_clusters, shared_cut
from torch import Tensor

from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans.measure import fixed_seconds
from lightning_gnn.extensions.plans.plan_cost import plan_cost
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import rank_plan

StartEach = Callable[[Sequence[tuple[int, Tensor]], Sequence[tuple[int, Tensor]]], Callable[[], None]]

COLUMNS = ["topology", "delay ms", "columns", "stages", "predicted ms", "measured ms", "chosen", "fastest", "/ fastest"]


def late(start_each: StartEach, seconds: float) -> StartEach:
    """Returns :meth:`Transport.start_each` whose messages are handed over some seconds after they have arrived."""

    def start_each_late(
        sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        wait = start_each(sends, receives)
        if not receives:
            return wait
        arrived: list[float] = []

        def watch() -> None:
            wait()
            arrived.append(time.monotonic())

        thread = threading.Thread(target=watch)
        thread.start()

        def until_handed_over() -> None:
            thread.join()
            if not arrived:
                raise RuntimeError("A message did not arrive.")
            time.sleep(max(0.0, arrived[0] + seconds - time.monotonic()))

        return until_handed_over

    return start_each_late


def cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the cells of the cluster that this process is a rank of."""
    topology, world = join_cluster(options.timeout)
    try:
        rank = Rank(world, shared_cut(world, options.graph, topology), options.repeats)
        relation, transport = rank.plan.relation, world.transport
        start_each = transport.start_each
        # The same on each rank: they are on one machine.
        plans = [spst(relation, topology, max_stages=most) for most in (1, 2, 3, None)]
        plans = list({plan.num_stages: plan for plan in plans}.values())
        exchanges: list[Exchange] = [PlannedExchange(rank_plan(plan, world.rank), world, Meter()) for plan in plans]
        found = []
        for delay in options.delays_ms:
            transport.start_each = late(start_each, delay / 1e3)
            stage, message = world.broadcast_object(fixed_seconds(world))
            priced = [
                plan_cost(plan, replace(topology, stage_seconds=stage, message_seconds=message)) for plan in plans
            ]
            for columns in options.columns:
                predicted = [1e3 * cost.seconds(4 * columns) for cost in priced]
                measured = [1e3 * rank.forward(exchange, columns) for exchange in exchanges]
                chosen = predicted.index(min(predicted))
                found.append(
                    {
                        "topology": topology.name,
                        "graph": options.graph,
                        "delay ms": delay,
                        "columns": columns,
                        "stage and message ms": [1e3 * stage, 1e3 * message],
                        "stages": ", ".join(str(plan.num_stages) for plan in plans),
                        "predicted ms": ", ".join(f"{each:.1f}" for each in predicted),
                        "measured ms": ", ".join(f"{each:.1f}" for each in measured),
                        "chosen": plans[chosen].num_stages,
                        "fastest": plans[measured.index(min(measured))].num_stages,
                        "/ fastest": measured[chosen] / min(measured),
                    }
                )
        return found if world.rank == 0 else []
    finally:
        world.close()


def show(rows: list[dict[str, Any]], json_file: str | None) -> None:
    report("Plans of one allgather: chosen by the cost model, and the fastest", rows, COLUMNS, json_file)
    right = sum(row["/ fastest"] <= 1.05 for row in rows)
    print(f"Chosen right within 5 %: {right} of {len(rows)} cells")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Callable[[str], list[float]] = lambda text: [float(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--graph", default="ego-twitter", help="of the data folder, or power-law-100000")
    parser.add_argument("--columns", default="2,16,64", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--delays-ms", default="2,20", type=numbers)
    parser.add_argument("--repeats", type=int, default=5)
    add_cluster_arguments(parser, "dgx1,pcie8")
    options = parser.parse_args()
    if options.netlab:
        own = ["--graph", options.graph, "--columns", ",".join(map(str, options.columns))]
        own += ["--delays-ms", ",".join(map(str, options.delays_ms)), "--repeats", str(options.repeats)]
        show(run_clusters(__file__, own, options), options.json)
    elif "NETLAB_TOPO" in os.environ:
        if rows := cells(options):
            show(rows, options.json)
    else:
        parser.error("run it as a rank of netlab, or pass --netlab PATH/netlab.py")


if __name__ == "__main__":
    main()
