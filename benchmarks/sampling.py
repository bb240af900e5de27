"""The neighbour sampler on the common benchmark graph, one core: against PyG's NeighborLoader, or else plain numpy.

PyG's loader needs torch-sparse or pyg-lib; its rows are there where one of them can be imported.

python benchmarks/sampling.py [--large] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import load_planted, planted_file, report
from torch_geometric import typing as pyg
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput

from lightning_gnn.heap import keeping_freed_memory
from lightning_gnn.strategies.sampling import NeighborSampler, Numbering

FANOUTS = [15, 10, 5]


class PlainSampler:
    """What numpy does without loops of its own: sorts a random number per edge of each target."""

    def __init__(self, data: Data):
        source, target = data.edge_index.numpy()
        order = np.argsort(target, kind="stable")
        self.sources = source[order]
        self.indptr = np.searchsorted(target[order], np.arange(data.num_nodes + 1))
        self.numbers = np.full(data.num_nodes, -1)
        self.rng = np.random.default_rng(0)

    def __call__(self, seeds: np.ndarray) -> int:
        """Returns how many edges were sampled."""
        nodes, begin, edges = seeds, 0, 0
        for fanout in FANOUTS:
            targets = nodes[begin:]
            begin = len(nodes)
            degree = self.indptr[targets + 1] - self.indptr[targets]
            of_target = np.repeat(np.arange(len(targets)), degree)
            first = np.cumsum(degree) - degree
            slots = np.arange(len(of_target)) - np.repeat(first - self.indptr[targets], degree)
            order = np.argsort(of_target + self.rng.random(len(of_target)))
            kept = order[np.arange(len(order)) - np.repeat(first, degree) < fanout]
            found = self.sources[slots[kept]]
            self.numbers[nodes] = np.arange(len(nodes))
            fresh = found[self.numbers[found] < 0]
            _, places = np.unique(fresh, return_index=True)
            nodes = np.concatenate([nodes, fresh[np.sort(places)]])
            self.numbers[nodes] = np.arange(len(nodes))
            edges += len(self.numbers[found])
        self.numbers[nodes] = -1
        return edges


def seconds_of(
    draws: dict[str, Callable[[torch.Tensor], int]], seeds: torch.Tensor, batch_size: int, batches: int
) -> dict[str, tuple[float, float]]:
    """Returns the median seconds and the mean edges of a batch; all draw the same seeds in turn, so load hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in draws}
    edges = dict.fromkeys(draws, 0)
    for part in [seeds[:batch_size], *seeds.split(batch_size)[:batches]]:
        for name, draw in draws.items():
            began = time.perf_counter()
            count = draw(part)
            times[name].append(time.perf_counter() - began)
            edges[name] += count
    # The first batch warms up: loops are loaded, buffers grow.
    return {name: (statistics.median(all_[1:]), edges[name] / len(all_)) for name, all_ in times.items()}


def sampled(sampler: BaseSampler) -> Callable[[torch.Tensor], int]:
    """Returns what asks a sampler for one sample."""
    return lambda seeds: len(sampler.sample_from_nodes(NodeSamplerInput(None, seeds)).edge)


def loaded(loader: type[Any], data: Data, sampler: dict[str, Any], batch_size: int) -> Callable[[torch.Tensor], int]:
    """Returns what asks a loader for one batch."""
    nodes = loader(data, input_nodes=torch.arange(data.num_nodes), batch_size=batch_size, **sampler)

    def draw(seeds: torch.Tensor) -> int:
        batch = nodes(seeds)  # samples and gathers, as iterating does
        return batch.edge_index.size(1)

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="1 M nodes and 20 M edges instead of 200 k and 4 M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message=".*pyg-lib.*")
    with keeping_freed_memory():  # so that nobody waits for new pages
        measure(options)


def measure(options: argparse.Namespace) -> None:
    data = load_planted(str(planted_file(1_000_000 if options.large else 200_000)))
    graph = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)
    ours = NeighborSampler.from_data(graph, FANOUTS)
    table = NeighborSampler.from_data(graph, FANOUTS)
    table._numberings = {name: Numbering(size, dense=False) for name, size in table.num_nodes.items()}
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    for batch_size in (1000, 2000):
        draws: dict[str, Callable[[torch.Tensor], int]] = {
            "ours": lambda seeds: len(ours.sample(seeds, 1).edge),
            "ours, ids in a hash table": lambda seeds: len(table.sample(seeds, 1).edge),
            "ours in PyG's NodeLoader": loaded(NodeLoader, graph, {"node_sampler": ours}, batch_size),
            f"ours in NodeLoader, {data.x.size(1)} features": loaded(
                NodeLoader, data, {"node_sampler": ours}, batch_size
            ),
        }
        against = "plain numpy"
        plain = PlainSampler(graph)
        draws[against] = lambda seeds, plain=plain: plain(seeds.numpy())
        if pyg.WITH_PYG_LIB or pyg.WITH_TORCH_SPARSE:
            library = "pyg-lib" if pyg.WITH_PYG_LIB else "torch-sparse"
            theirs = {"num_neighbors": FANOUTS}
            against = f"PyG's sampler, {library}"
            draws[against] = sampled(NeighborLoader(graph, FANOUTS, torch.arange(1)).node_sampler)
            draws[f"NeighborLoader, {library}"] = loaded(NeighborLoader, graph, theirs, batch_size)
            draws[f"NeighborLoader, {library}, {data.x.size(1)} features"] = loaded(
                NeighborLoader, data, theirs, batch_size
            )
        found = seconds_of(draws, order, batch_size, options.batches)
        for name, (seconds, edges) in found.items():
            rows.append(
                {
                    "sampler": name,
                    "batch": batch_size,
                    "seconds": seconds,
                    "seeds/s": batch_size / seconds,
                    "M edges/s": edges / seconds / 1e6,
                    "times": found[against][0] / seconds,
                }
            )
    title = (
        f"Fan-outs {FANOUTS}, {data.num_nodes:,} nodes, {data.num_edges:,} edges, {options.threads} thread(s); "
        f"times: as fast as {against}"
    )
    report(title, rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
