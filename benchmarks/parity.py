"""Does `dgcl` give the numbers of one device? Four real graphs x five models x two modules x 1 to 4 ranks.

    python benchmarks/parity.py [--graphs cora computers physics github] [--ranks 1 2 3 4] [--epochs 5] [--jobs 4] [--json FILE]

Other strategies, c after a colon, with whole blocks or as by default; a cell is empty where c does not divide the ranks::

    python benchmarks/parity.py --strategies spmm_15d:1 spmm_15d:2 spmm_15d:2:blocks spmm_2d --ranks 2 4 6 8 [--double]

float32 sums depend on their order, so the yardstick is the same run on one device with the nodes in another order:
"noise", the larger of two. A cell shows the largest relative difference of any epoch's
training or validation loss from one device, for the strategy and for the noise, and the difference in test accuracy.
*directed* is a generated graph with self-loops, parallel edges, nodes without edges, and hubs in one direction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.datasets as D
from common import QUIET, SHARED, report, run_row
from torch_geometric.data import Data
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_gnn import CommNet, DGCLStrategy, GraphDataModule, NodeClassifier, SpMM15DStrategy
from lightning_gnn.data.sources import prepare_graph

GRAPHS = {
    "cora": ("planetoid", lambda root: D.Planetoid(root, "Cora")),
    "computers": ("amazon", lambda root: D.Amazon(root, "Computers")),
    "physics": ("coauthor", lambda root: D.Coauthor(root, "Physics")),
    "github": ("github_social", D.GitHub),
    "directed": ("", lambda root: [directed_graph()]),
}
MODELS = ("gcn", "sage", "gin", "gat", "commnet")
PHYSICS_COLUMNS = 256
"""Of its 8,415 features: PyG's reference run would need 17 GB for their messages, and minutes for each epoch."""

SIZES = {
    "cora": (1433, 7),
    "computers": (767, 10),
    "physics": (PHYSICS_COLUMNS, 5),
    "github": (128, 2),
    "directed": (32, 5),
}


def directed_graph(num_nodes: int = 3000, num_edges: int = 40_000) -> Data:
    """Returns a graph whose edges come from few nodes and go anywhere."""
    rng = np.random.default_rng(0)
    source = (num_nodes * rng.random(num_edges) ** 3).astype(np.int64)
    target = rng.integers(0, num_nodes, num_edges)
    y = rng.integers(0, 5, num_nodes)
    x = rng.standard_normal((num_nodes, 32)) + y[:, None] * 0.3
    return Data(
        x=torch.from_numpy(x).float(),
        edge_index=torch.from_numpy(np.stack([source, target])),
        y=torch.from_numpy(y),
    )


def load_graph(name: str, root: str, order: int = 0, double: bool = False) -> Data:
    """Returns a graph with masks, its nodes in random order `order` (0: as they are); a source for GraphDataModule."""
    data = GRAPHS[name][1](root)[0]
    data.x = data.x[:, : SIZES[name][0]].contiguous()
    data = prepare_graph(data, fractions=None if name == "cora" else (0.5, 0.25, 0.25))
    if order:
        old = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(order))
        new = torch.empty_like(old)
        new[old] = torch.arange(len(old))
        for key in ("x", "y", "train_mask", "val_mask", "test_mask"):
            data[key] = data[key][old]
        data.edge_index = new[data.edge_index]
    if double:
        data.x = data.x.double()
    return data


class OwnModule(L.LightningModule):
    """As a user would write it: an ordinary mean over the mask, plain self.log, torchmetrics."""

    def __init__(self, model: torch.nn.Module, classes: int) -> None:
        super().__init__()
        self.model = model
        self.acc = MulticlassAccuracy(classes, average="micro")
        self.f1, self.auroc = MulticlassF1Score(classes), MulticlassAUROC(classes)

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        out = self.model(batch.x, batch.edge_index)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss)
        return loss

    def _evaluate(self, batch: Data, mask: torch.Tensor, stage: str) -> None:
        out = self.model(batch.x, batch.edge_index)[mask]
        self.log(f"{stage}_loss", F.cross_entropy(out, batch.y[mask]))
        for name in ("acc", "f1", "auroc"):
            getattr(self, name).update(out.softmax(-1), batch.y[mask])
            self.log(f"{stage}_{name}", getattr(self, name))

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self._evaluate(batch, batch.val_mask, "val")

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self._evaluate(batch, batch.test_mask, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values += [float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss")]


def build(model: str, columns: int, classes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    size: dict[str, Any] = {"in_channels": columns, "hidden_channels": 64, "num_layers": 2, "out_channels": classes}
    kinds: dict[str, Any] = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN, "gat": GAT, "commnet": CommNet}
    return kinds[model](**size, **({"heads": 4} if model == "gat" else {}))


def make_strategy(name: str, ranks: int) -> Any:
    """Returns the strategy of a name, with c and ``blocks`` after colons; None if so many ranks cannot follow it."""
    name, *options = name.split(":")
    if name == "dgcl":
        return DGCLStrategy(timeout=300)
    if name == "spmm_15d":
        c = int(options[0]) if options else None
        return None if c is not None and ranks % c else SpMM15DStrategy(c, "blocks" not in options, timeout=300)
    dimensions = {"spmm_2d": 2, "spmm_3d": 3}.get(name)
    if dimensions is not None and round(ranks ** (1 / dimensions)) ** dimensions != ranks:
        return None
    return name


def runs(options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns losses and test metrics by strategy, model and module; one script, many Trainers."""
    graph, strategies, ranks, order = options.row.split("/")
    arguments = {"name": graph, "root": options.root, "order": int(order), "double": options.double}
    sizes = SIZES[graph]
    results: dict[str, Any] = {}
    main_rank = True
    for strategy in strategies.split(","):
        data = GraphDataModule("parity.load_graph", arguments)
        for model in options.models:
            for module in ("NodeClassifier", "own"):
                used = make_strategy(strategy, int(ranks))
                if used is None:
                    continue
                built = build(model, *sizes)
                wrapped = NodeClassifier(built) if module == "NodeClassifier" else OwnModule(built, sizes[1])
                losses = Losses()
                trainer = L.Trainer(
                    strategy=used,
                    devices=int(ranks),
                    max_epochs=options.epochs,
                    **QUIET,
                    callbacks=[losses],
                    num_sanity_val_steps=0,
                )
                wrapped = wrapped.double() if options.double else wrapped
                trainer.fit(wrapped, datamodule=data)
                [tested] = trainer.test(wrapped, datamodule=data, verbose=False)
                results[f"{strategy}/{model}/{module}"] = {"losses": losses.values, "test": tested}
                main_rank = trainer.is_global_zero
    return results if main_rank else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=["cora", "computers", "physics", "github"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--strategies", nargs="+", default=["dgcl"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--double", action="store_true", help="in float64")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        found = runs(options)
        if found is not None:
            print(json.dumps(found))
        return

    rows: list[dict[str, Any]] = []
    losses = [f"{ranks} ranks" for ranks in options.ranks]
    metrics = [f"metrics, {ranks}" for ranks in options.ranks]
    columns = ["graph", "strategy", "model/module", "noise", *losses, *metrics, "test_acc"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        os.environ["LIGHTNING_GNN_STORE"] = folder

        def started(graph: str, strategies: list[str], ranks: int, order: int = 0) -> Future[dict[str, Any]]:
            root = str(Path(folder) / GRAPHS[graph][0])
            arguments = ["--row", f"{graph}/{','.join(strategies)}/{ranks}/{order}", "--root", root]
            arguments += ["--epochs", str(options.epochs), "--models", *options.models]
            arguments += ["--double"] if options.double else []
            return pool.submit(run_row, str(Path(__file__)), arguments, threads=1, timeout=3000)

        of_graph = {}
        for graph in options.graphs:
            if source := GRAPHS[graph][0]:
                shutil.copytree(SHARED / "data" / source, Path(folder) / source, dirs_exist_ok=True)
            load_graph(graph, str(Path(folder) / source))  # PyG's files are made once
            one_device = [started(graph, ["auto"], 1, order) for order in range(3)]
            of_graph[graph] = one_device, {ranks: started(graph, options.strategies, ranks) for ranks in options.ranks}
        for graph, (one_device, of_ranks) in of_graph.items():
            reference, *others = (each.result() for each in one_device)
            found = {ranks: each.result() for ranks, each in of_ranks.items()}
            for strategy, (name, expected) in itertools.product(options.strategies, reference.items()):
                cell = name.removeprefix("auto/")
                entry: dict[str, Any] = {"graph": graph, "strategy": strategy, "model/module": cell}
                entry["noise"] = max(_difference(other[name], expected) for other in others)
                for ranks, results in found.items():
                    result = results.get(f"{strategy}/{cell}")
                    entry[f"{ranks} ranks"] = None if result is None else _difference(result, expected)
                    entry[f"metrics, {ranks}"] = None if result is None else _metric_difference(result, expected)
                entry["test_acc"] = expected["test"]["test_acc"]
                rows.append(entry)
            # After each graph, since the next takes long.
            precision = "float64" if options.double else "float32"
            report(f"Difference from one device, {precision}", rows, columns, options.json)
    # A floor under the noise: two epochs' sums may agree by luck.
    floor = 1e-15 if options.double else 1e-6
    cells = [(row[name], row) for row in rows for name in losses if row[name] is not None]
    worst = max(difference / max(row["noise"], floor) for difference, row in cells)
    print(f"largest difference: {max(cells, key=lambda cell: cell[0])[0]:.1e}; over noise: {worst:.2f}")


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found["losses"], expected["losses"], strict=True))


def _metric_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    names = [name for name in expected["test"] if not name.endswith("loss")]
    return max(abs(found["test"][name] - expected["test"][name]) for name in names)


if __name__ == "__main__":
    main()
