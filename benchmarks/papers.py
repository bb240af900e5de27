"""The cost model against two papers: DGCL on its DGX-1 machines, CAGNET on Summit.

python benchmarks/papers.py [--papers dgcl,cagnet] [--json FILE]

Graphs are generated with power-law degrees and the papers' average degrees (Reddit's and Protein's are lower), smaller by a
factor that the first table states. Seconds are scaled back up: exchanges by nodes, sums by edges. A sum takes
V100_SECONDS_PER_EDGE_COLUMN; maps with weights, launches and latency are not counted. docs/papers.md discusses the tables.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, report
from numpy.typing import NDArray
from rings import published_traffic

from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload
from lightning_gnn.extensions.plans.plan_cost import balance, direct_cost
from lightning_gnn.extensions.plans.presets import find_topology, summit
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.edge_cut import assign_hierarchically
from lightning_gnn.partition.layout import Groups
from lightning_gnn.partition.metis import part_graph
from lightning_gnn.partition.replicas import replication_factors
from lightning_gnn.partition.shard import Ids, Relabelling
from lightning_gnn.strategies.dgcl.costs import plan_exchanges
from lightning_gnn.strategies.spmm.costs import grid_exchanges
from lightning_gnn.strategies.spmm.grid import ProcessGrid, legal_replications

BYTES_PER_ELEMENT = 4
"""float32."""

V100_SECONDS_PER_EDGE_COLUMN = BYTES_PER_ELEMENT / 900e9
"""Of SpMM in float32: the data sheet's memory bandwidth, at one number read per edge and column. Real kernels take longer."""


@dataclass(frozen=True)
class Graph:
    """A graph of a paper, and the one that is generated in its place.

    Attributes:
        name: of the paper's.
        nodes, edges, features: the paper's.
        outputs: width of each layer's output: hidden ones, and for CAGNET the labels.
        factor: how many times fewer nodes are generated.
        homophily, communities: of the generated graph: how well it can be cut.
        degree: generated in-edges per node, where it is not the paper's.
    """

    name: str
    nodes: int
    edges: int
    features: int
    outputs: tuple[int, ...]
    factor: float
    homophily: float = 0.0
    communities: int = 1
    degree: float | None = None

    @property
    def title(self) -> str:
        return f"{self.name} {self.homophily:g}" if self.homophily else self.name

    @property
    def made_nodes(self) -> int:
        return round(self.nodes / self.factor)


DGCL = (
    Graph("Reddit", 232_965, 110_000_000, 602, (256, 256), 16, 0.8, 16, degree=150),
    Graph("Com-Orkut", 3_070_000, 117_000_000, 128, (128, 128), 60, 0.7, 100),
    Graph("Web-Google", 870_000, 5_100_000, 256, (256, 256), 4, 0.9, 1000),
    Graph("Web-Google", 870_000, 5_100_000, 256, (256, 256), 4, 0.994, 1000),
    Graph("Wiki-Talk", 2_390_000, 5_000_000, 256, (256, 256), 16, 0.7, 500),
    Graph("Wiki-Talk", 2_390_000, 5_000_000, 256, (256, 256), 16, 0.97, 500),
)
"""Table 4. How well the real ones can be cut is not in the paper: sparse ones are generated twice."""

CAGNET = (
    Graph("Reddit", 232_965, 114_848_857, 602, (16, 16, 41), 16, degree=100),
    Graph("Amazon", 14_249_639, 230_788_269, 300, (16, 16, 24), 200),
    Graph("Protein", 8_745_542, 2_116_240_124, 128, (16, 16, 256), 600, degree=100),
)
"""Table 2; the paper's model is that of Kipf and Welling, whose hidden layers have 16 columns."""

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "p2p_allgather_ms": {  # Table 2: its slower kind of links
        "Web-Google": {"nvlink": 0.99, "others": 6.20},
        "Reddit": {"nvlink": 1.70, "others": 18.1},
        "Wiki-Talk": {"nvlink": 1.39, "others": 6.13},
    },
    "pcie_ms": {  # Table 6
        "Reddit": {"spst": 14.3, "swap": 14.5, "p2p": 17.9},
        "Com-Orkut": {"spst": 128, "swap": 1220, "p2p": 179},
        "Web-Google": {"spst": 7.84, "swap": 116, "p2p": 8.72},
        "Wiki-Talk": {"spst": 5.86, "swap": 317, "p2p": 8.51},
    },
    "spst_ms": {  # Table 7
        "Web-Google": {"nvlink": 0.787, "others": 0.821},
        "Reddit": {"nvlink": 1.16, "others": 1.07},
        "Com-Orkut": {"nvlink": 7.43, "others": 7.30},
        "Wiki-Talk": {"nvlink": 0.783, "others": 0.882},
    },
    "gcn_16_over_dgcl": {  # section 7.1 and Table 5
        "Reddit": {"p2p": 3.94, "replicate": 6.31, "dgcl_r": 86.4 / 88.4, "ms": 88.4},
        "Web-Google": {"dgcl_r": 26.7 / 54.0, "ms": 54.0},
    },
}
Row = dict[str, Any]


@cache
def edges_of(graph: Graph) -> Ids:
    """Returns the generated edges, ``[2, E]``."""
    degree = graph.degree or graph.edges / graph.nodes
    made = planted_partition(graph.made_nodes, degree, graph.communities, 1, homophily=graph.homophily)
    assert made.edge_index is not None
    return made.edge_index.numpy()


def workload(graph: Graph, part: NDArray[np.integer], parts: int, columns: int) -> Workload:
    order = Relabelling.from_assignment(part, parts)
    edge_index = order.new_ids()[edges_of(graph)]
    relation = Relation.from_edges(edge_index, order.offsets)
    return Workload(relation, edge_index, len(graph.outputs), columns, graph.features)


@cache
def cut(graph: Graph, name: str, ranks: int) -> Workload:
    """Returns the graph cut by METIS for a topology, between machines and sockets first (DGCL section 4.1)."""
    topology = find_topology(name, ranks)

    def metis(inside: Adjacency, _: Ids, group: Groups) -> NDArray[np.int32]:
        return part_graph(inside, len(group), seed=0)

    part = assign_hierarchically(Adjacency.of(edges_of(graph), graph.made_nodes), topology.groups, metis)
    return workload(graph, part, ranks, graph.outputs[0])


def in_random_parts(graph: Graph, parts: int) -> Workload:
    """Returns the graph in equal random parts, as CAGNET has them."""
    part = np.random.default_rng(0).permutation(np.arange(graph.made_nodes) * parts // graph.made_nodes)
    return workload(graph, part, parts, graph.outputs[0])


@dataclass(frozen=True)
class Epoch:
    """Seconds of an epoch at the paper's size.

    With K layers, an epoch sums K times forward and K - 1 times backward, since features need no gradient, and exchanges K - 1
    times each way; the papers exchange the features in every epoch, too.
    """

    communication: float
    sums: float

    @classmethod
    def of(cls, graph: Graph, work: Workload, each: ExchangeCost) -> Epoch:
        assert each.cost is not None
        of_features = each.cost.seconds_per_byte * work.feature_bytes
        exchanges = 2 * (work.num_layers - 1) * each.cost.seconds_per_byte * work.row_bytes + of_features
        sums = (2 * work.num_layers - 1) * float(each.edges.max()) * work.columns * V100_SECONDS_PER_EDGE_COLUMN
        return cls(exchanges * graph.nodes / graph.made_nodes, sums * graph.edges / edges_of(graph).shape[1])

    @property
    def seconds(self) -> float:
        return self.communication + self.sums


@cache
def predictions(graph: Graph, name: str, ranks: int) -> dict[str, ExchangeCost]:
    return {each.scheme: each for each in plan_exchanges(cut(graph, name, ranks), find_topology(name, ranks))}


def milliseconds(graph: Graph, each: ExchangeCost, columns: int) -> float:
    """Returns the time of one allgather at the paper's size."""
    assert each.cost is not None
    return 1e3 * each.cost.seconds_per_byte * columns * BYTES_PER_ELEMENT * graph.nodes / graph.made_nodes


# DGCL #########################################################################


def made(graphs: tuple[Graph, ...]) -> list[Row]:
    rows = []
    for graph in graphs:
        edge_index = edges_of(graph)
        degrees = np.sort(np.bincount(edge_index[1], minlength=graph.made_nodes))
        rows.append(
            {
                "graph": graph.title,
                "factor": graph.factor,
                "nodes": graph.made_nodes,
                "edges": edge_index.shape[1],
                "degree": edge_index.shape[1] / graph.made_nodes,
                "paper's degree": graph.edges / graph.nodes,
                "edges of the top 1 %": float(degrees[-graph.made_nodes // 100 :].sum() / degrees.sum()),
            }
        )
    return rows


def one_machine(graph: Graph) -> Row:
    """Figure 7: communication of an epoch over DGCL's, and epochs."""
    found, work = predictions(graph, "dgx1", 8), cut(graph, "dgx1", 8)
    epochs = {name: Epoch.of(graph, work, each) for name, each in found.items() if each.cost is not None}
    ours = epochs["spst"]
    published = PUBLISHED["p2p_allgather_ms"].get(graph.name)
    row: Row = {
        "graph": graph.title,
        "halo": float(work.relation.pair_rows.sum() / (7 * graph.made_nodes)),
        "DGCL ms": 1e3 * ours.communication,
        "share": ours.communication / ours.seconds,
        "p2p": epochs["p2p"].communication / ours.communication,
        "p2p, Tables 2, 7": published and max(published.values()) / max(PUBLISHED["spst_ms"][graph.name].values()),
        "swap": epochs["swap"].communication / ours.communication,
    }
    return row | {f"epoch {name}": epochs[name].seconds / ours.seconds for name in ("p2p", "swap", "replicate")}


def balanced(graph: Graph) -> Row:
    """Table 7: one allgather of DGCL on 8 GPUs, by kinds of links."""
    cost = predictions(graph, "dgx1", 8)["spst"].cost
    assert cost is not None
    found = balance(cost, graph.outputs[0] * BYTES_PER_ELEMENT)
    others, published = found.others_seconds, PUBLISHED["spst_ms"][graph.name]
    larger = 1e3 * graph.nodes / graph.made_nodes
    return {
        "graph": graph.title,
        "nvlink ms": found.kinds["nvlink"] * larger,
        "published nvlink ms": published["nvlink"],
        "others ms": None if others is None else others * larger,
        "published others ms": published["others"],
        "difference": found.paper_spread,
        "published difference": max(published.values()) / min(published.values()) - 1,
    }


def without_nvlink(graph: Graph) -> Row:
    """Table 6: one allgather of 128 columns on 8 GPUs with PCIe."""
    found, published = predictions(graph, "pcie8", 8), PUBLISHED["pcie_ms"][graph.name]
    ms = {name: milliseconds(graph, found[name], 128) for name in published}
    row: Row = {"graph": graph.title, "DGCL ms": ms["spst"], "published DGCL ms": published["spst"]}
    for name in ("p2p", "swap"):
        row |= {name: ms[name] / ms["spst"], f"published {name}": published[name] / published["spst"]}
    return row


def two_machines(graph: Graph) -> Row:
    """Table 5, GCN, and section 7.1: epochs on 16 GPUs over DGCL's."""
    found, work = predictions(graph, "dgx1x2", 16), cut(graph, "dgx1x2", 16)
    epochs = {name: Epoch.of(graph, work, each) for name, each in found.items() if each.cost is not None}
    published = PUBLISHED["gcn_16_over_dgcl"][graph.name]
    row: Row = {"graph": graph.title, "DGCL ms": 1e3 * epochs["spst"].seconds, "published ms": published["ms"]}
    for name in ("p2p", "replicate", "dgcl_r"):
        row |= {name: epochs[name].seconds / epochs["spst"].seconds, f"published {name}": published.get(name)}
    return row | {"3-hop RF": replication_factors(work.edge_index, work.owner, 16, 3)[-1]}


def few_gpus(graph: Graph) -> Row:
    """Figures 8 and 9: p2p communication over DGCL's; the paper has 1 on 2 and 4 GPUs."""
    row: Row = {"graph": graph.title}
    for count in (2, 4, 8):
        found = predictions(graph, "dgx1", count)
        row[f"{count} GPUs"] = found["p2p"].seconds / found["spst"].seconds
    return row


# CAGNET #######################################################################

RANKS = (4, 16, 36, 64)


def epoch_columns(graph: Graph) -> int:
    """Returns the columns of all products of an epoch: of layers' inputs, and of their outputs' gradients (4.1.1, 4.1.3)."""
    return sum((graph.features, *graph.outputs[:-1])) + sum(graph.outputs)


def rings(graph: Graph, ranks: int, replication: int) -> Row:
    """Figures 1 and 2: the paper's product over NCCL's rings; seconds of an epoch."""
    grid = ProcessGrid(ranks, replication)
    offsets = np.arange(ranks + 1) * graph.nodes // ranks
    traffic = published_traffic(grid, offsets)
    row_bytes = epoch_columns(graph) * BYTES_PER_ELEMENT
    edges = graph.edges / ranks  # random parts are even
    row: Row = {
        "graph": graph.name,
        "P": ranks,
        "c": replication,
        "stages": len(traffic) - 1,
        "words/nf": grid.paper_words(graph.nodes, 1) / graph.nodes,
        "local": edges * epoch_columns(graph) * V100_SECONDS_PER_EDGE_COLUMN,
    }
    for title, per_host in (("6 GPUs", 6), ("1 GPU", 1)):
        stages = direct_cost(traffic, summit(ranks, per_host)).hop_seconds.max(1) * row_bytes
        row |= {f"{title}: bcast": float(stages[:-1].sum()), f"{title}: reduce": float(stages[-1])}
    return row


def all_rings(graph: Graph) -> list[Row]:
    rows = []
    for ranks in RANKS:
        of_one: Row = {}
        for replication in (c for c in (1, 2, 4) if c in legal_replications(ranks) and c * c <= ranks):
            row = rings(graph, ranks, replication)
            of_one = of_one or row
            for title in ("6 GPUs", "1 GPU"):
                row[f"{title}: gain"] = of_one[f"{title}: bcast"] / row[f"{title}: bcast"]
                row[f"{title}: total"] = row[f"{title}: bcast"] + row[f"{title}: reduce"] + row["local"]
            rows.append(row)
    return rows


def our_products(graph: Graph, ranks: int = 36) -> list[Row]:
    """What this project's products would take in the same place: direct messages, whole blocks or the rows that are read."""
    work, topology = in_random_parts(graph, ranks), summit(ranks)
    products = grid_exchanges(work, topology)
    scale = graph.nodes / graph.made_nodes * epoch_columns(graph) / work.columns
    rows = []
    for sparse, blocks in zip(products[::2], products[1::2]):
        assert sparse.choice is not None and sparse.seconds is not None and blocks.seconds is not None
        replication = sparse.choice.grid.replication
        if replication in (1, 2, 4):
            ring = rings(graph, ranks, replication)
            rows.append(
                {
                    "graph": graph.name,
                    "c": replication,
                    "rows read / blocks": sparse.rows / blocks.rows,
                    "rings": ring["6 GPUs: bcast"] + ring["6 GPUs: reduce"],
                    "blocks, direct": blocks.seconds * scale,
                    "rows read, direct": sparse.seconds * scale,
                }
            )
    return rows


def dgcl_tables() -> dict[str, list[Row]]:
    some = [graph for graph in DGCL if graph.name in PUBLISHED["gcn_16_over_dgcl"]]
    return {
        "DGCL: generated graphs (with homophily)": made(DGCL),
        "DGCL, 8 GPUs: communication and epoch of a GCN, over DGCL's (Figure 7)": [one_machine(g) for g in DGCL],
        "DGCL, 8 GPUs: one allgather by links (Table 7)": [balanced(graph) for graph in DGCL],
        "DGCL, 8 PCIe GPUs: one allgather of 128 columns, over DGCL's (Table 6)": [without_nvlink(g) for g in DGCL],
        "DGCL, 16 GPUs: epoch of a GCN, over DGCL's (Table 5)": [two_machines(graph) for graph in some],
        "DGCL: p2p communication over DGCL's (Figures 8, 9)": [few_gpus(graph) for graph in some],
    }


def cagnet_tables() -> dict[str, list[Row]]:
    return {
        "CAGNET: generated graphs": made(CAGNET),
        "CAGNET on Summit, seconds of an epoch (Figures 1, 2)": [row for graph in CAGNET for row in all_rings(graph)],
        "CAGNET on Summit, 36 GPUs: communication of an epoch, seconds": [
            row for graph in CAGNET for row in our_products(graph)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--papers", default="dgcl,cagnet")
    parser.add_argument("--json")
    options = parser.parse_args()
    tables: dict[str, list[Row]] = {}
    for paper in options.papers.split(","):
        found = {"dgcl": dgcl_tables, "cagnet": cagnet_tables}[paper]()
        for title, rows in found.items():
            report(title, rows, list(rows[0]), None)
        tables |= found
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine(), "tables": tables}, indent=1))


if __name__ == "__main__":
    main()
