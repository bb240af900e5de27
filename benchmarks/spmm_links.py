"""One product over emulated links: 1D, 1.5D, 2D and 3D beside `dgcl`'s exchange, forward and backward.

On all topologies, each in a cluster of its own that netlab (root only) makes and removes::

    python benchmarks/spmm_links.py --netlab NETLAB.py --topologies FILE.json,4x2 --graphs ego-twitter [--json FILE]

Topologies and times are those of ``planned_exchange.py``; 4x2 is four machines of two ranks, with one network port each. A
product is all of it: rows that travel, and the sums of one thread a rank. Results are compared with what they must be. METIS
cuts the graph for all alike. *MB out* is what the machine that sends most sends to others in the forward product, and *bound* the
time that the bytes of the busiest port or link take by themselves.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import report
from planned_exchange import add_cluster_arguments, join_cluster, load_graph, run_clusters, timed
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import DIRECTIONS, Call
from lightning_gnn.comm.exchange import HaloExchange, Matrix, Triples
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans.plan_cost import direct_cost
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.nn.edges import SplitEdges, Sum, SumOfRows
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.metis import part_graph
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts, halo_plan
from lightning_gnn.strategies.spmm.grid import ProcessCube, ProcessGrid, legal_replications, on_grid
from lightning_gnn.strategies.spmm.matrices import BlockMatrix, SummaMatrix

COLUMNS = ["topology", "graph", "system", "MB", "MB out", "forward ms", "/ dgcl", "bound", "/ bound"]
COLUMNS += ["backward ms", "back / dgcl", "load"]

VALUES = 1 << 10
"""Rows hold integers below this, so that float32 holds sums in any order to the last bit."""


class HaloProduct(Matrix):
    """`dgcl`'s product: rows that edges read come from their owners, gradients go home.

    Args:
        edge_index: of this rank, in local ids.
        exchange: of its halo.
    """

    def __init__(self, edge_index: np.ndarray, exchange: HaloExchange) -> None:
        self.exchange = exchange
        edges = SplitEdges.from_edges(torch.from_numpy(edge_index), exchange.num_owned, exchange.num_halo)
        self.edge_sum = Sum(edges.to_slot_order())

    @override
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        with torch.no_grad():
            if call.direction == "forward":
                return SumOfRows.apply(x, self.exchange, self.edge_sum, call)
            found = SimpleNamespace(edge_sum=self.edge_sum, exchange=self.exchange, call=call, dtype=x.dtype)
            return SumOfRows.backward(found, x)[0]


class Watched(World):
    """A world that counts the bytes of messages to each other rank, `sent` int64 ``[P]``."""

    def __init__(self, world: World) -> None:
        self.__dict__.update(world.__dict__)
        self.sent = np.zeros(world.size, np.int64)
        start_each = world.transport.start_each

        def counted(sends: Any, receives: Any) -> Any:
            for peer, rows in sends:
                self.sent[peer] += rows.nbytes
            return start_each(sends, receives)

        self.transport.start_each = counted  # type: ignore[method-assign]


def write_cut(path: Path, graph: str, ranks: int) -> None:
    """Cuts a graph by METIS and writes each rank's part."""
    edge_index, num_nodes = load_graph(graph)
    relabelling = Relabelling.from_assignment(part_graph(Adjacency.of(edge_index, num_nodes), ranks, seed=0), ranks)
    parts = list(edge_cut_parts(edge_index, relabelling))
    halos = {f"halo{rank}": part.halo for rank, part in enumerate(parts)}
    edges = {f"edges{rank}": part.edge_index for rank, part in enumerate(parts)}
    ids = np.arange(num_nodes) % VALUES
    source, target = relabelling.new_ids()[edge_index]
    forward = np.bincount(target, ids[source], num_nodes)
    backward = np.bincount(source, ids[target], num_nodes)
    np.savez(path, offsets=relabelling.offsets, forward=forward, backward=backward, **halos, **edges)


def measure(
    world: Watched, topology: Topology, graph: str, path: Path, columns: int, repeats: int
) -> list[dict[str, Any]]:
    """Returns a line of the table for each way to multiply."""
    cut, rank, size = np.load(path), world.rank, world.size
    offsets = cut["offsets"]
    halos = [cut[f"halo{each}"] for each in range(size)]
    edge_index = cut[f"edges{rank}"]
    own = slice(*offsets[rank : rank + 2])
    node_ids = np.concatenate([np.arange(own.start, own.stop), halos[rank]])
    entries = Triples(torch.from_numpy(node_ids[edge_index[1]]), torch.from_numpy(node_ids[edge_index[0]]), None)
    x = torch.from_numpy(np.arange(own.start, own.stop) % VALUES).float()[:, None].repeat(1, columns)
    expected = [torch.from_numpy(cut[name][own]).float()[:, None] for name in ("forward", "backward")]
    if max(float(each.abs().max()) for each in expected) >= 2**24:
        raise ValueError(f"{graph} has nodes of so many edges that float32 does not hold their sums.")

    def matrices() -> Any:
        yield "dgcl", HaloProduct(edge_index, HaloExchange(halo_plan(rank, offsets, halos), world, Meter()))
        for c in legal_replications(size):
            yield f"c={c}", SparseMatrix(entries, on_grid(ProcessGrid(size, c), offsets), offsets, world, Meter())
            yield f"c={c}, blocks", BlockMatrix(entries, ProcessGrid(size, c), offsets, world, Meter())
        for dimensions in (2, 3):
            if round(size ** (1 / dimensions)) ** dimensions == size:
                yield f"{dimensions}D", SummaMatrix(entries, ProcessCube.of(size, dimensions), offsets, world, Meter())

    rows: list[dict[str, Any]] = []
    for name, matrix in matrices():
        row: dict[str, Any] = {"topology": topology.name, "graph": graph, "system": name, "columns": columns}
        for transposed, direction in enumerate(DIRECTIONS):
            found: list[Tensor] = []
            world.sent[:] = 0
            seconds = timed(
                world,
                repeats,
                found.clear,
                lambda: found.append(matrix.multiply(x, Call("layer", direction=direction))),  # noqa: B023 (called at once)
                lambda: bool((found[0] == expected[transposed]).all()),  # noqa: B023
            )
            row[f"{direction} ms"] = 1e3 * seconds
            everyone = np.stack(world.all_gather_object(world.sent)) / (repeats + 1)
            if direction == "forward":
                away = [everyone[list(host)].sum() - everyone[np.ix_(host, host)].sum() for host in topology.hosts]
                row |= {"MB": everyone.sum() / 1e6, "MB out": max(away) / 1e6}
                row["bound"] = 1e3 * direct_cost(everyone[None], topology).seconds(1)
                row["/ bound"] = row["forward ms"] / row["bound"]
        rows.append(row)
        row["/ dgcl"] = row["forward ms"] / rows[0]["forward ms"]
        row["back / dgcl"] = row["backward ms"] / rows[0]["backward ms"]
        row["load"] = os.getloadavg()[0]
    return rows


def run_rank(options: argparse.Namespace) -> None:
    """Measures on the cluster that this process is a rank of; rank 0 reports."""
    topology, joined = join_cluster(options.timeout)
    world = Watched(joined)
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            common = Path(world.broadcast_object(folder))  # files are common to all ranks
            for graph in options.graphs:
                if world.rank == 0:
                    write_cut(common / "cut.npz", graph, world.size)
                world.barrier()
                rows += measure(world, topology, graph, common / "cut.npz", options.columns, options.repeats)
                world.barrier()
        if world.rank == 0:
            show(rows, options)
    finally:
        joined.close()


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Prints the table and writes it."""
    report(f"One product over emulated links, {options.columns} columns", rows, COLUMNS, options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="random-20000-4000000,ego-twitter", type=lambda text: text.split(","))
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    add_cluster_arguments(parser, "4x2")
    options = parser.parse_args()
    if options.netlab:
        own = ["--graphs", ",".join(options.graphs), "--columns", str(options.columns)]
        show(run_clusters(__file__, [*own, "--repeats", str(options.repeats)], options), options)
    elif "NETLAB_TOPO" in os.environ:
        run_rank(options)
    else:
        parser.error("run it as a rank of netlab, or pass --netlab PATH/netlab.py")


if __name__ == "__main__":
    main()
