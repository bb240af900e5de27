"""The fewest rows: what ``cover`` sends beside ``dgcl`` and vertex cuts, predicted from edges and counted in training.

python benchmarks/cover.py [--graphs NAME ...] [--parts 2 4 8 16] [--counted gcn gat ...] [--json FILE]
python benchmarks/cover.py --netlab NETLAB.py [--graphs NAME ...] [--inner-mbit 270] [--json FILE]
python benchmarks/cover.py --refine [--graphs NAME ...] [--parts 4] [--json FILE]
python benchmarks/cover.py --speed [--json FILE]

Rows are those of an exchange in one direction, counted here from the edges alone; "most" are those that a rank sends or receives,
"edges" the heaviest rank over the mean. ``--counted`` trains each scheme for an epoch on ranks that are threads, and gives the
bytes that they send. ``--netlab`` (root only) measures epochs on two emulated hosts of two ranks, a GCN of three layers;
``--refine`` compares METIS's parts with those that nodes have moved between for covers; ``--speed`` the planner, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, SHARED, report, run_on_hosts
from torch_geometric.data import Data
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, NodeClassifier, VertexCutStrategy
from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.metrics import balance
from lightning_gnn.strategies.cover.covers import cover_edges
from lightning_gnn.strategies.cover.refine import refine_for_cover
from lightning_gnn.strategies.vertex_cut.cutters import assign_edges
from lightning_gnn.tools.advising.advice import Candidate, advise_on
from lightning_gnn.tools.advising.machine import Machine

LISTS = ("cnr-2000", "ego-twitter", "soc-slashdot0902", "gowalla-bipartite", "pubmed-no-features")
DATASETS = {
    "Cora": ("planetoid", "Planetoid", "Cora"),
    "Photo": ("amazon", "Amazon", "Photo"),
    "Computers": ("amazon", "Amazon", "Computers"),
    "Physics": ("coauthor", "Coauthor", "Physics"),
    "DBLP": ("citation_full", "CitationFull", "DBLP"),
    "Cora_ML": ("citation_full", "CitationFull", "Cora_ML"),
    "GitHub": ("github_social", "GitHub", None),
    "FacebookPagePage": ("facebook_page_page", "FacebookPagePage", None),
    "Tolokers": ("heterophilous", "HeterophilousGraphDataset", "Tolokers"),
    "cornell5": ("linkx", "LINKXDataset", "cornell5"),
    "WordNet18RR": ("wordnet18rr", "WordNet18RR", None),
}
GRAPHS = (*DATASETS, *LISTS, "planted")
MODELS = {
    "gcn": lambda columns, classes: GCN(columns, 64, num_layers=3, out_channels=classes),
    "sage": lambda columns, classes: GraphSAGE(columns, 64, num_layers=3, out_channels=classes),
    "sage_max": lambda columns, classes: GraphSAGE(columns, 64, num_layers=3, out_channels=classes, aggr="max"),
    "gat": lambda columns, classes: GAT(columns, 64, num_layers=3, out_channels=classes, heads=4),
}
COLUMNS, CLASSES = 32, 8


@cache
def edges_of(name: str, root: str) -> tuple[np.ndarray, int]:
    """Returns edges ``[2, E]`` and the number of nodes; of edges that are stored once, both directions."""
    if name == "planted":
        graph = planted_partition(50_000, 20.0, 16, 4)
        return graph.edge_index.numpy(), int(graph.num_nodes)
    if name in LISTS:
        arrays = np.load(SHARED / f"data/edges/{name}.npz")
        edges = np.stack([arrays["src"], arrays["dst"]]).astype(np.int64)
        if name == "gowalla-bipartite":
            edges = np.concatenate([edges, edges[::-1]], 1)
        return edges, int(arrays["num_nodes"])
    import shutil

    from torch_geometric import datasets

    folder, kind, argument = DATASETS[name]
    if not Path(root, folder).exists():
        shutil.copytree(SHARED / "data" / folder, Path(root, folder))  # PyG writes beside the data
    data = getattr(datasets, kind)(str(Path(root, folder)), *([] if argument is None else [argument]))[0]
    return data.edge_index.numpy(), int(data.num_nodes)


def rows_sent(edge_index: np.ndarray, holder: np.ndarray, owner: np.ndarray, parts: int) -> np.ndarray:
    """Returns the rows from each part to each other, ``[P, P]``: of sources to holders, of partial sums to targets' owners."""
    sent = np.zeros((parts, parts), np.int64)
    for ends, to_holder in ((edge_index[0], True), (edge_index[1], False)):
        node, part = np.divmod(np.unique(ends * parts + holder), parts)
        pair = (owner[node], part) if to_holder else (part, owner[node])
        np.add.at(sent, pair, 1)
    np.fill_diagonal(sent, 0)
    return sent


def predicted(name: str, parts: int, root: str) -> dict[str, Any]:
    edge_index, nodes = edges_of(name, root)
    owner = assign_nodes(edge_index, nodes, parts).part.astype(np.int64)
    found = {"dgcl": (owner[edge_index[1]], owner), "cover": (cover_edges(edge_index, owner, parts), owner)}
    for method in ("ne", "ebv"):
        cut = assign_edges(edge_index, nodes, parts, method)
        found[method] = cut.part.astype(np.int64), cut.master.astype(np.int64)
    sent = {scheme: rows_sent(edge_index, *each, parts) for scheme, each in found.items()}
    loads = {scheme: np.bincount(each[0], minlength=parts) for scheme, each in found.items()}
    row: dict[str, Any] = {"graph": name, "parts": parts}
    for scheme, each in sent.items():
        row[f"{scheme} rows"] = int(each.sum())
        row[f"{scheme} most"] = int(max(each.sum(0).max(), each.sum(1).max()))
        row[f"{scheme} edges"] = float(loads[scheme].max() / loads[scheme].mean())
    return row | {"cover / dgcl": row["cover rows"] / max(1, row["dgcl rows"])}


def refined(name: str, parts: int, root: str) -> dict[str, Any]:
    """Returns what covers send by METIS's parts and by refined ones, and the CPU seconds that either takes."""
    edge_index, nodes = edges_of(name, root)
    row: dict[str, Any] = {"graph": name, "parts": parts}
    began = time.process_time()
    part = assign_nodes(edge_index, nodes, parts).part
    made = time.process_time()
    moved = refine_for_cover(edge_index, part, parts)
    row |= {"METIS s": made - began, "refine s": time.process_time() - made}
    for kind, each in (("METIS", part), ("refined", moved)):
        owner = each.astype(np.int64)
        holder = cover_edges(edge_index, owner, parts)
        sent = rows_sent(edge_index, holder, owner, parts)
        row[f"{kind} rows"] = int(sent.sum())
        row[f"{kind} most"] = int(max(sent.sum(0).max(), sent.sum(1).max()))
        for what, counts in (("nodes", owner), ("edges", holder)):
            row[f"{kind} {what}"] = balance(np.bincount(counts, minlength=parts))
        row[f"{kind} dgcl rows"] = int(rows_sent(edge_index, owner[edge_index[1]], owner, parts).sum())
    return row | {"gain %": 100 - 100 * row["refined rows"] / max(1, row["METIS rows"])}


def data_of(name: str, root: str) -> Data:
    """Returns the graph with drawn features, labels and masks."""
    edge_index, nodes = edges_of(name, root)
    draws = torch.Generator().manual_seed(0)
    place = torch.rand(nodes, generator=draws)
    return Data(
        x=torch.randn(nodes, COLUMNS, generator=draws),
        edge_index=torch.from_numpy(edge_index),
        y=torch.randint(CLASSES, (nodes,), generator=draws),
        train_mask=place < 0.6,
        val_mask=(place >= 0.6) & (place < 0.8),
        test_mask=place >= 0.8,
    )


def counted(name: str, parts: int, models: list[str], root: str) -> dict[str, float]:
    """Returns megabytes that all ranks send in an epoch, by scheme and model."""
    data, found = data_of(name, root), {}
    schemes = [Candidate(DGCLStrategy, {"plan": "p2p"}), Candidate(CoverStrategy), Candidate(VertexCutStrategy)]
    for model in models:
        torch.manual_seed(0)
        module = NodeClassifier(MODELS[model](COLUMNS, CLASSES))
        for each in advise_on(Machine.of(parts, 1), module, GraphDataModule(data), only=schemes, overhead=0.0):
            found[f"{model} {each.candidate.name} MB"] = (each.bytes_sent or 0) / 1e6 if each.applies else float("nan")
    return found


class Clock(L.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.times.append(time.perf_counter())


def on_hosts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns seconds of an epoch, as one of the ranks of a cluster."""
    found = []
    for name in options.graphs:
        data = data_of(name, options.root)
        spst = {"plan": "spst", "topology": os.environ["NETLAB_TOPO"]}
        for label, strategy in (
            ("dgcl", DGCLStrategy(plan="p2p")),
            ("dgcl, spst", DGCLStrategy(**spst)),
            ("cover", CoverStrategy()),
            ("cover, spst", CoverStrategy(**spst)),
            ("cover, refined", CoverStrategy(refine=True)),
        ):
            torch.manual_seed(0)
            clock = Clock()
            trainer = L.Trainer(
                strategy=strategy,
                devices=2,
                num_nodes=2,
                max_epochs=options.epochs,
                limit_val_batches=0,
                callbacks=[clock],
                **QUIET,
            )
            trainer.fit(NodeClassifier(MODELS["gcn"](COLUMNS, CLASSES)), datamodule=GraphDataModule(data))
            found.append(
                {
                    "graph": name,
                    "scheme": label,
                    "ms/epoch": 1e3 * float(median(np.diff(clock.times)[1:])),
                    "MB": float(trainer.callback_metrics["comm/bytes_sent"]) / 1e6,
                    "loss": float(trainer.callback_metrics["train_loss"]),
                }
            )
            if trainer.is_global_zero:
                print(found[-1], flush=True)
    return found if trainer.is_global_zero else []


def speed() -> list[dict[str, Any]]:
    """Returns CPU seconds of covers on one core: graphs without structure, parts at random, so that most edges are cut."""
    found = []
    for kind in ("uniform", "power law"):
        for millions in (0.001, 5, 23):
            rng, edges = np.random.default_rng(0), int(millions * 1e6)
            nodes, parts = edges // 10 + 8, 8
            if kind == "uniform":
                edge_index = rng.integers(0, nodes, (2, edges))
            else:
                drawn = (rng.pareto(1.2, (2, edges)) * nodes / 2000).astype(np.int64) % nodes
                edge_index = np.stack([rng.permutation(nodes)[each] for each in drawn])
            owner = rng.integers(0, parts, nodes)
            began = time.process_time()
            holder = cover_edges(edge_index, owner, parts)
            seconds = time.process_time() - began
            dgcl, cover = (rows_sent(edge_index, each, owner, parts).sum() for each in (owner[edge_index[1]], holder))
            cut = int((owner[edge_index[0]] != owner[edge_index[1]]).sum())
            found.append({"graph": kind, "cut edges": cut, "s": seconds, "cover / dgcl": cover / dgcl})
    return [each for each in found if each["cut edges"] > 10_000]  # the first of each kind loads what is compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--parts", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--counted", nargs="+", choices=[*MODELS], default=[], help="models to train for their bytes")
    parser.add_argument("--speed", action="store_true", help="measure how fast covers are found")
    parser.add_argument("--refine", action="store_true", help="compare METIS's parts with refined ones")
    parser.add_argument("--netlab", help="netlab.py: measure epochs on two emulated hosts")
    parser.add_argument(
        "--inner-mbit", type=float, default=1000.0, help="of a link inside a host; 2.7 times that of a host's"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        found = on_hosts(options)
        if found:
            Path(options.row).write_text(json.dumps(found))
        return
    if options.speed:
        rows = speed()
        report("Covers, one core", rows, list(rows[0]), options.json)
        return
    with tempfile.TemporaryDirectory() as root:
        os.environ["LIGHTNING_GNN_STORE"] = f"{root}/store"
        if options.netlab:
            for name in options.graphs:  # PyG's files are made once, not by all ranks at a time
                edges_of(name, root)
            arguments = ["--graphs", *options.graphs, "--epochs", str(options.epochs), "--root", root]
            rows = run_on_hosts(options.netlab, options.inner_mbit, __file__, arguments)
        else:
            rows = []
            if options.refine:
                edges = np.random.default_rng(0).integers(0, 100, (2, 500))
                refine_for_cover(edges, np.arange(100) % 2, 2)  # loads what is compiled
            for name in options.graphs:
                for parts in options.parts:
                    row = refined(name, parts, root) if options.refine else predicted(name, parts, root)
                    if options.counted:
                        row |= counted(name, parts, options.counted, root)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        report("Rows of an exchange, edge cuts by METIS", rows, list(rows[0]), options.json)


if __name__ == "__main__":
    main()
