"""The planned exchange over emulated links: measured seconds beside predicted ones, SPST beside the direct exchange.

On all topologies, each in a cluster of its own that netlab (root only) makes and removes::

    python benchmarks/planned_exchange.py --netlab NETLAB.py --topologies dgx1,pcie8,FILE.json [--json FILE]

As the ranks of one cluster::

    python NETLAB.py run FILE.json -- python benchmarks/planned_exchange.py --graph ego-twitter --columns 64

Topologies are netlab's files, or presets of ours at ``--scale`` Mbit/s per GB/s. Times are medians over repetitions of the time
from a common start until the last rank has its rows; all rows and sums of gradients are compared with what they must be.
Predicted are the costs of DGCL section 5.1 (Figure 10), the baseline is its peer-to-peer exchange (Tables 5 and 6), and
the backward is measured with sub-stages and without (Table 9). Times below some 50 ms are noisy there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import SHARED, report

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.extensions.plans.plan import Plan, p2p
from lightning_gnn.extensions.plans.plan_cost import plan_cost
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.wiring import load_topology, machines
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.metis import part_graph
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts, halo_plan

HEAD_START_S = 0.05
"""From the ranks' agreement on a start until it: longer than such an agreement takes to get around."""

COLUMNS = [
    "topology", "plan", "columns", "predicted ms", "forward ms", "/ predicted", "% below p2p", "% predicted",
    "backward ms", "/ direct", "sub-stages ms", "/ at once", "load",
]  # fmt: skip


# Topologies ########################################################################################################


def netlab_topology(topology: Topology, mbit_per_gb_per_s: float) -> dict[str, Any]:
    """Returns `topology` in netlab's format, its bandwidths scaled.

    netlab wants a bandwidth of its own for every pair: that of the hops that no other pair uses, or, where all are shared, that
    of the slowest shared one, which then changes nothing.

    Raises:
        ValueError: a pair has no link.
    """
    users: dict[int, set[tuple[int, int]]] = {}
    for (a, b), via in topology.links.items():
        for hop in via:
            users.setdefault(hop & ~1, set()).add((min(a, b), max(a, b)))
    shared = {hop for hop, pairs in users.items() if len(pairs) > 1}

    def entry(gb_per_s: float, kind: str) -> dict[str, Any]:
        return {
            "bandwidth_mbit": gb_per_s * mbit_per_gb_per_s,
            "reference": {"type": kind, "gbyte_per_s": gb_per_s},
        }

    links = []
    for a in range(topology.num_devices):
        for b in range(a + 1, topology.num_devices):
            if (a, b) not in topology.links:
                raise ValueError(
                    f"netlab needs a link for every pair; topology {topology.name!r} has none for {a}-{b}."
                )
            via = topology.links[a, b]
            limiting = [hop for hop in via if hop & ~1 not in shared] or via
            slowest = topology.hops[min(limiting, key=lambda hop: topology.hops[hop].gb_per_s)]
            names = [topology.hops[hop].name for hop in via if hop & ~1 in shared]
            links.append({"a": a, "b": b, **entry(slowest.gb_per_s, slowest.kind), "via": names})
    return {
        "about": f"{topology.name} at {mbit_per_gb_per_s:g} Mbit/s per GB/s",
        "ranks": topology.num_devices,
        "hosts": [{"name": f"host{i}", "ranks": list(host)} for i, host in enumerate(topology.hosts)],
        "hops": [
            {"name": topology.hops[hop].name, **entry(topology.hops[hop].gb_per_s, topology.hops[hop].kind)}
            for hop in sorted(shared)
        ],
        "links": links,
    }


# The cut and its plans #############################################################################################


def load_graph(name: str) -> tuple[np.ndarray, int]:
    """Returns ``edge_index`` int64 ``[2, E]`` and N: of a file in the data folder, or generated.

    Args:
        name: of the file; ``power-law-N`` and ``random-N-E`` are generated.
    """
    if name.startswith("random-"):
        num_nodes, num_edges = map(int, name.split("-")[1:])
        return np.random.default_rng(0).integers(0, num_nodes, (2, num_edges)), num_nodes
    if name.startswith("power-law-"):
        num_nodes = int(name.removeprefix("power-law-"))
        return planted_partition(num_nodes, 5.0, 8, 1).edge_index.numpy(), num_nodes
    arrays = np.load(SHARED / "data" / "edges" / f"{name}.npz")
    edge_index = np.stack([arrays["src"], arrays["dst"]]).astype(np.int64)
    return edge_index, int(edge_index.max()) + 1


def write_cut(path: str, graph: str, topology: Topology) -> None:
    """Cuts a graph by METIS, plans by SPST, and writes both for all ranks."""
    edge_index, num_nodes = load_graph(graph)
    size = topology.num_devices
    part = part_graph(Adjacency.of(edge_index, num_nodes), size, seed=0)
    relabelling = Relabelling.from_assignment(part, size)
    halos = [piece.halo for piece in edge_cut_parts(edge_index, relabelling)]
    plan = spst(Relation.from_halos(halos, relabelling.offsets), topology)
    named = {f"halo{rank}": halo for rank, halo in enumerate(halos)}
    np.savez(path, offsets=relabelling.offsets, bounds=plan.bounds, parent=plan.parent, stage=plan.stage, **named)


def read_cut(path: str) -> tuple[np.ndarray, list[np.ndarray], Plan]:
    """Returns ``offsets`` ``[P + 1]``, the halo of each rank, and the plan."""
    arrays = np.load(path)
    offsets = arrays["offsets"]
    halos = [arrays[f"halo{rank}"] for rank in range(len(offsets) - 1)]
    relation = Relation.from_halos(halos, offsets)
    return offsets, halos, Plan("spst", relation, arrays["bounds"], arrays["parent"], arrays["stage"])


def sub_stage_seconds(plan: Plan, topology: Topology, row_bytes: int) -> float:
    """Returns the predicted time of the backward in sub-stages, which follow each other as stages do."""
    edges = plan.edges
    slots, slot = np.unique(np.stack([edges.stage, edges.sub_stage]), axis=1, return_inverse=True)
    rows = np.zeros((slots.shape[1], plan.num_devices, plan.num_devices), np.int64)
    np.add.at(rows, (slot.reshape(-1), edges.receiver, edges.sender), plan.counts[edges.group])
    seconds = np.einsum("kab,abh->kh", rows, topology.passes) / (topology.gb_per_s * 1e9)
    return float(seconds.max(1, initial=0).sum() * row_bytes)


# One cluster #######################################################################################################


def timed(
    world: World, repeats: int, prepare: Callable[[], None], work: Callable[[], None], check: Callable[[], bool]
) -> float:
    """Returns the median time in seconds from a common start until the last rank has done its work, on all ranks.

    Args:
        world: the ranks, processes of one machine.
        repeats: timed repetitions, after one that is not.
        prepare: runs before the start.
        work: what is timed.
        check: whether the work's result is right.

    Raises:
        RuntimeError: a check failed; names the ranks.
    """
    seconds = []
    for number in range(repeats + 1):
        prepare()
        world.barrier()
        start = world.broadcast_object(time.monotonic() + HEAD_START_S)  # one machine, one clock
        late = time.monotonic() - start
        if late < 0:
            time.sleep(-late)
        work()
        ended = time.monotonic() - start
        everyone = world.all_gather_object((ended, late, check()))
        if not all(right for *_, right in everyone):
            raise RuntimeError(f"wrong rows on ranks {[r for r, each in enumerate(everyone) if not each[2]]}")
        if max(late for _, late, _ in everyone) > 0:
            print(f"A rank began {max(late for _, late, _ in everyone):.3f} s late", file=sys.stderr)
        if number:
            seconds.append(max(ended for ended, *_ in everyone))
    return statistics.median(seconds)


class Rank:
    """One process of a cluster.

    Args:
        world: the ranks, without shared memory.
        cut: of :func:`read_cut`.
        repeats: timed repetitions, after one that is not.
    """

    def __init__(self, world: World, cut: tuple[np.ndarray, list[np.ndarray], Plan], repeats: int) -> None:
        self.world, self.repeats = world, repeats
        self.offsets, self.halos, self.plan = cut
        self.direct = HaloExchange(halo_plan(world.rank, self.offsets, self.halos), world, Meter())
        self.planned = PlannedExchange(rank_plan(self.plan, world.rank), world, Meter())
        self.in_sub_stages = PlannedExchange(rank_plan(self.plan, world.rank, sub_stages=True), world, Meter())
        readers = np.zeros(int(self.offsets[-1]), np.int64)
        for halo in self.halos:
            readers[halo] += 1
        own = slice(*self.offsets[world.rank : world.rank + 2])
        # Small integers, so that float32 holds the rows, and sums in any order, to the last bit.
        ids = np.arange(int(self.offsets[-1])) % (1 << 20)
        self.own = torch.from_numpy(ids[own]).float()[:, None]
        self.halo = torch.from_numpy(ids[self.halos[world.rank]]).float()[:, None]
        self.readers = torch.from_numpy(readers[own]).float()[:, None]

    def forward(self, exchange: Exchange, columns: int) -> float:
        """Returns the seconds of one graph allgather."""
        x, halo = self.own.repeat(1, columns), torch.empty(len(self.halo), columns)

        def prepare() -> None:
            halo.fill_(-1)

        return timed(
            self.world,
            self.repeats,
            prepare,
            lambda: exchange.start_expand(x, halo, Call("forward"))(),
            lambda: bool((halo == self.halo).all()),
        )

    def backward(self, exchange: Exchange, columns: int) -> float:
        """Returns the seconds of its transpose, which adds up gradients at home: here one for each reader."""
        grad, halo_grad = torch.empty(len(self.own), columns), torch.ones(len(self.halo), columns)

        def prepare() -> None:
            grad.zero_()

        return timed(
            self.world,
            self.repeats,
            prepare,
            lambda: exchange.start_reduce(halo_grad, Call("backward"))(grad),
            lambda: bool((grad == self.readers).all()),
        )

    def rows(self, topology: Topology, graph: str, widths: Sequence[int]) -> list[dict[str, Any]]:
        """Returns two lines of the table for each width: the direct exchange and SPST."""
        found = []
        direct_plan = p2p(self.plan.relation, topology)
        costs = {plan.name: plan_cost(plan, topology) for plan in (direct_plan, self.plan)}
        for columns in widths:
            row_bytes = 4 * columns
            expected = {name: cost.seconds(row_bytes) for name, cost in costs.items()}
            common = {"topology": topology.name, "graph": graph, "columns": columns}
            load = os.getloadavg()[0]
            direct_s = self.forward(self.direct, columns)
            direct_back_s = self.backward(self.direct, columns)
            planned_s = self.forward(self.planned, columns)
            at_once_s = self.backward(self.planned, columns)
            sub_stages_s = self.backward(self.in_sub_stages, columns)
            found.append(
                {
                    **common,
                    "plan": "p2p",
                    "stages": 1,
                    "predicted ms": 1e3 * expected["p2p"],
                    "forward ms": 1e3 * direct_s,
                    "/ predicted": direct_s / expected["p2p"],
                    "backward ms": 1e3 * direct_back_s,
                    "load": load,
                }
            )
            found.append(
                {
                    **common,
                    "plan": "spst",
                    "stages": self.plan.num_stages,
                    "predicted ms": 1e3 * expected["spst"],
                    "forward ms": 1e3 * planned_s,
                    "/ predicted": planned_s / expected["spst"],
                    "% below p2p": 100 * (1 - planned_s / direct_s),
                    "% predicted": 100 * (1 - expected["spst"] / expected["p2p"]),
                    "backward ms": 1e3 * at_once_s,
                    "/ direct": at_once_s / direct_back_s,
                    "sub-stages ms": 1e3 * sub_stages_s,
                    "/ at once": sub_stages_s / at_once_s,
                    "sub-stages predicted ms": 1e3 * sub_stage_seconds(self.plan, topology, row_bytes),
                    "load": os.getloadavg()[0],
                }
            )
        return found


def join_cluster(timeout: float) -> tuple[Topology, World]:
    """Returns netlab's topology, and the ranks: nothing but the emulated links, though all are processes of one machine.

    Raises:
        ValueError: the topology is not for so many ranks.
    """
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    topology = load_topology(os.environ["NETLAB_TOPO"])
    if topology.num_devices != size:
        raise ValueError(f"{topology.name} has {topology.num_devices} ranks, but {size} run.")
    return topology, World(rank, size, torch.device("cpu"), timedelta(seconds=timeout), shared_memory=False)


def shared_cut(world: World, graph: str, topology: Topology) -> tuple[np.ndarray, list[np.ndarray], Plan]:
    """Returns the cut of :func:`read_cut`, which rank 0 makes for all ranks of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(world.broadcast_object(folder)) / "cut.npz")  # files are common to all ranks
        if world.rank == 0:
            write_cut(path, graph, topology)
        world.barrier()
        cut = read_cut(path)
        world.barrier()
    return cut


def run_rank(options: argparse.Namespace) -> None:
    """Measures on the cluster that this process is a rank of; rank 0 reports."""
    topology, world = join_cluster(options.timeout)
    try:
        cut = shared_cut(world, options.graph, topology)
        rows = Rank(world, cut, options.repeats).rows(topology, options.graph, options.columns)
        if world.rank == 0:
            show(rows, options.json)
    finally:
        world.close()


# The report ########################################################################################################


def fits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns by topology, graph and plan the line through (predicted, measured) over row widths, as in Figure 10.

    Least squares of relative deviations, since times differ by an order of magnitude.
    """
    found = []
    for key in dict.fromkeys((row["topology"], row["graph"], row["plan"]) for row in rows):
        chosen = [row for row in rows if (row["topology"], row["graph"], row["plan"]) == key]
        if len(chosen) < 3:
            continue
        x, y = (np.array([row[name] for row in chosen]) for name in ("predicted ms", "forward ms"))
        slope, start = np.polyfit(x, y, 1, w=1 / y)
        line = slope * x + start
        found.append(
            {
                "topology": key[0],
                "graph": key[1],
                "plan": key[2],
                "slope": float(slope),
                "offset ms": float(start),
                "R^2": float(1 - ((y - line) ** 2).sum() / ((y - y.mean()) ** 2).sum()),
                "% largest deviation": float(100 * np.abs(y / line - 1).max()),
                "% off prediction at most": float(100 * np.abs(y / x - 1).max()),
            }
        )
    return found


def show(rows: list[dict[str, Any]], json_file: str | None) -> None:
    """Prints the table, and the fitted lines below it; writes both."""
    graphs = ", ".join(dict.fromkeys(row["graph"] for row in rows))
    title = f"One graph allgather of {graphs} over emulated links; its backward, at once and in sub-stages"
    report(title, rows, COLUMNS, json_file)
    lines = fits(rows)
    for line in lines:
        print(
            f"{line['topology']}, {line['graph']}, {line['plan']}: measured = {line['slope']:.3f} predicted + "
            f"{line['offset ms']:.1f} ms; R^2 {line['R^2']:.4f}, at most {line['% largest deviation']:.1f} % off the line"
        )
    if json_file:
        written = json.loads(Path(json_file).read_text())
        Path(json_file).write_text(json.dumps({**written, "fits": lines}, indent=1))


# Several clusters ##################################################################################################


def run_clusters(script: str, arguments: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs a script as the ranks of one cluster after the other; returns the rows that rank 0 of each writes as JSON.

    Args:
        script: called with `arguments` and ``--json FILE``.
        arguments: of the script.
        options: of :func:`add_cluster_arguments`. A topology HxR is H machines of R ranks with one network port each.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for source in options.topologies:
            path, found = Path(source), Path(folder) / "rows.json"
            if not path.is_file():
                path = Path(folder) / f"{source}.json"
                hosts, _, ranks = source.partition("x")
                if hosts.isdecimal():
                    made = machines([int(ranks)] * int(hosts))
                else:
                    made = find_topology(source, options.devices)
                path.write_text(json.dumps(netlab_topology(made, options.scale), indent=1))
            own = [sys.executable, script, *arguments, "--json", str(found)]
            command = [sys.executable, options.netlab, "run", str(path), "--timeout", str(options.timeout), "--", *own]
            ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if ended.returncode:
                raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout[-6000:]}")
            rows += json.loads(found.read_text())["rows"]
    return rows


def add_cluster_arguments(parser: argparse.ArgumentParser, topologies: str) -> None:
    """Adds what :func:`run_clusters` and :func:`join_cluster` read."""
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one cluster")
    parser.add_argument("--json")
    parser.add_argument("--netlab", help="netlab.py; without it, this process is a rank")
    parser.add_argument("--topologies", default=topologies, type=lambda text: text.split(","))
    parser.add_argument("--devices", type=int, default=8, help="of a preset")
    parser.add_argument("--scale", type=float, default=2.0, help="Mbit/s per GB/s of a preset")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="ego-twitter", help="cnr-2000, ego-twitter, ..., or power-law-100000")
    parser.add_argument("--columns", default="16,32,64,128", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--repeats", type=int, default=5)
    add_cluster_arguments(parser, "dgx1,pcie8")
    options = parser.parse_args()
    if options.netlab:
        own = ["--graph", options.graph, "--columns", ",".join(map(str, options.columns))]
        show(run_clusters(__file__, [*own, "--repeats", str(options.repeats)], options), options.json)
    elif "NETLAB_TOPO" in os.environ:
        run_rank(options)
    else:
        parser.error("run it as a rank of netlab, or pass --netlab PATH/netlab.py")


if __name__ == "__main__":
    main()
