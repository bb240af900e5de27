"""Records what runs of all schemes give, bit by bit, to compare two states of the code on one machine.

    python tests/goldens.py record before.json     # at one commit
    python tests/goldens.py compare before.json    # at another: runs again, and names each value that differs

Of each run and rank: hashes of weights and predictions, logged values to the bit, and bytes, messages and rows of each layer. Of
programs that are refused, the text. Runs repeat to the bit on one machine, with one thread a rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import lightning as L
import numpy as np
import torch
from common import CLASSES, FEATURES, UserModule, awkward_graph, build, quiet_trainer
from conftest import RankPool
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv, to_hetero

import lightning_gnn
from lightning_gnn import GraphDataModule, NodeClassifier


@dataclass(frozen=True)
class Run:
    """A model under a scheme.

    Attributes:
        strategy, options: the class and its arguments.
        model: a name of :func:`common.build`, ``"user module"``, ``"steps over rows"``, ``"types"``, or what is refused.
        ranks: how many.
        data: arguments of the datamodule.
    """

    strategy: str
    model: str = "gcn"
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called in the file."""
        options = {**self.options, **self.data}
        return f"{self.strategy}({', '.join(f'{k}={v!r}' for k, v in options.items())}) {self.model} x {self.ranks}"


SOCKETS = {"shared_memory": False}
BATCHES = {"num_neighbors": [4, 3], "batch_size": 8}
RUNS = [
    *(Run("DGCLStrategy", "gcn", ranks) for ranks in (1, 2, 3, 4)),
    Run("DGCLStrategy", "sage", 3, SOCKETS),
    Run("DGCLStrategy", "gat", 2),
    Run("DGCLStrategy", "gat_edges", 3, SOCKETS),
    Run("DGCLStrategy", "own", 2),
    Run("DGCLStrategy", "pna", 3),
    Run("DGCLStrategy", "gin_batch_norm", 4),
    Run("DGCLStrategy", "user module", 3),
    Run("DGCLStrategy", "steps over rows", 3),
    Run("DGCLStrategy", "types", 2),
    Run("DGCLStrategy", "gcn", 2, {"codec": "int8"}),
    Run("DGCLStrategy", "gat", 2, {"checkpoint_convs": True}),
    Run("DGCLStrategy", "gcn", 2, {"memory_limit": "2GB"}),
    Run("DGCLStrategy", "gcn", 4, {"plan": "spst", "topology": "dgx1"}),
    Run("DGCLStrategy", "sage", 3, {"plan": "swap"}),
    Run("DGCLStrategy", "gcn", 2, {"plan": "replicate", "num_hops": 2}),
    Run("CoverStrategy", "gcn", 2),
    Run("CoverStrategy", "gat", 4),
    Run("CoverStrategy", "sage", 3, SOCKETS),
    Run("SpMMStrategy", "gcn", 2),
    Run("SpMM1DStrategy", "sage", 3),
    Run("SpMM15DStrategy", "gcn", 4, {"replication_factor": 2}),
    Run("SpMM15DStrategy", "gat", 2, SOCKETS),
    Run("SpMM2DStrategy", "gcn", 4),
    Run("SpMM3DStrategy", "gcn", 8),
    Run("VertexCutStrategy", "gcn", 2),
    Run("VertexCutStrategy", "gat", 4),
    Run("VertexCutStrategy", "sage_max", 3, {**SOCKETS, "partition": "ebv"}),
    Run("VertexCutStrategy", "user module", 3, {"partition": "hdrf"}),
    Run("CachedVertexCutStrategy", "gcn", 3),
    Run("SamplingStrategy", "sage", 2, {}, BATCHES),
    Run("SamplingStrategy", "sage", 3, SOCKETS, BATCHES),
    Run("SamplingStrategy", "gcn", 2, {"sampler": "saint_walk"}, {"batch_size": 8}),
    Run("SamplingStrategy", "types", 2, {}, {"num_neighbors": [4, 3], "batch_size": 8}),
    Run("ClusterAllReduceStrategy", "gcn", 2),
    *(Run("DGCLStrategy", model, 2) for model in ("numpy in a step", "scan along rows", "parameters that differ")),
    Run("SpMMStrategy", "types", 2),
    Run("DGCLStrategy", "gcn", 2, {"codec": "int9"}),
]


class StepsOverRows(UserModule):
    """Reductions over rows in a step: a mean over nodes, class weights, a functional metric."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(batch.x, batch.edge_index)
        out = out - out.mean(0)
        mask = batch.train_mask & (batch.y >= 0)
        weight = 1 / (1 + batch.y[mask].bincount(minlength=CLASSES))
        loss = torch.nn.functional.cross_entropy(out[mask], batch.y[mask], weight=weight.to(out))
        self.log("hits", (out.argmax(1) == batch.y).sum().double())
        return loss + 1e-3 * torch.autograd.grad(loss, out, create_graph=True)[0].norm()


class Refused(UserModule):
    """A step that no rank can run as one device would."""

    kind = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(batch.x, batch.edge_index)
        if self.kind == "numpy in a step":
            out = out + float(out.detach().numpy().mean())
        else:
            out = torch.vmap(lambda row: row * 2)(out).cummax(0).values
        return out.mean()


class Typed(torch.nn.Module):
    """Two layers, made for all types of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def typed_graph() -> HeteroData:
    draw, data = torch.Generator().manual_seed(0), HeteroData()
    data["paper"].x = torch.randn(60, FEATURES, generator=draw)
    data["author"].x = torch.randn(30, 5, generator=draw)
    data["paper"].y = torch.randint(CLASSES, (60,), generator=draw)
    for mask, part in (("train_mask", 0), ("val_mask", 1), ("test_mask", 2)):
        data["paper"][mask] = torch.arange(60) % 3 == part
    for source, name, target, sizes in (("author", "writes", "paper", (30, 60)), ("paper", "by", "author", (60, 30))):
        ends = [torch.randint(size, (150,), generator=draw) for size in sizes]
        data[source, name, target].edge_index = torch.stack(ends)
    return data


def module_of(run: Run, rank: int) -> L.LightningModule:
    if run.model == "types":
        torch.manual_seed(1)
        graph = typed_graph()
        model = to_hetero(Typed(), graph.metadata())
        model(graph.x_dict, graph.edge_index_dict)  # layers learn their sizes
        return NodeClassifier(model, num_classes=CLASSES, node_type="paper")
    if run.model == "user module":
        return UserModule(build("gcn_batch_norm"))
    if run.model == "steps over rows":
        return StepsOverRows(build("sage"))
    if run.model in ("numpy in a step", "scan along rows"):
        module = Refused(build("gcn"))
        module.kind = run.model
        return module
    if run.model == "parameters that differ":
        return UserModule(torch.nn.Linear(3, 3 + rank))
    return NodeClassifier(build(run.model), num_classes=CLASSES)


def run_on_rank(rank: int, world_size: int, run: Run, store: str) -> dict[str, Any]:
    """Returns what a run gives on one rank, or how it is refused."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run(rank, run, store)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".replace(f"{Path(__file__).parent}{os.sep}", "")}


def _run(rank: int, run: Run, store: str) -> dict[str, Any]:
    graph = typed_graph() if run.model == "types" else awkward_graph()
    if run.model == "types":
        graph.apply(lambda value: value.double() if value.is_floating_point() else value)
    module = module_of(run, rank).double()
    strategy = getattr(lightning_gnn, run.strategy)(**run.options)
    data = GraphDataModule(graph, partition_dir=store, **run.data)
    seen = _Seen()
    trainer = quiet_trainer(strategy, run.ranks, True, max_epochs=3, callbacks=[seen], num_sanity_val_steps=1)
    trainer.fit(module, datamodule=data)
    found: dict[str, Any] = {"weights": digest(module.state_dict()), "epochs": seen.epochs, "layers": seen.layers}
    if is_overridden("test_step", module):
        [tested] = trainer.test(module, datamodule=data, verbose=False)
        found["test"] = values_of(tested)
    if is_overridden("predict_step", module):
        found["predictions"] = digest(trainer.predict(module, datamodule=data))
    return found


class _Seen(L.Callback):
    """Keeps logged values, and the traffic of each layer, of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []
        self.layers: list[dict[str, Any]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.append(values_of(trainer.callback_metrics))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            by_layer = getattr(callback, "by_layer", None)
            if by_layer is not None:
                self.layers.append(
                    {
                        f"{layer} {way}": [each.bytes_sent, each.messages, each.rows, sorted(each.to.items())]
                        for (layer, way), each in sorted(by_layer.items())
                    }
                )


def values_of(metrics: Any) -> dict[str, Any]:
    """Returns logged values, exactly, as text; of what depends on time only the names."""
    timed = ("seconds", "share", "per_s", "wait", "gossip/")
    return {name: "" if any(each in name for each in timed) else float(value).hex() for name, value in metrics.items()}


def digest(values: Any) -> str:
    """Returns a hash of the bits of nested tensors."""
    found = hashlib.sha256()
    for path, value in torch.utils._pytree.tree_flatten_with_path(values)[0]:
        array = np.ascontiguousarray(torch.as_tensor(value).detach().cpu().numpy())
        found.update(f"{path} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:16]


def record() -> dict[str, Any]:
    """Returns what all runs give, by name, on each rank."""
    pool, found = RankPool(), {}
    try:
        with tempfile.TemporaryDirectory() as store:
            for run in RUNS:
                found[run.name] = pool.run(run.ranks, run_on_rank, run, store)
                print(run.name, found[run.name][0].get("error", "")[:150], flush=True)
    finally:
        pool.close()
    return json.loads(json.dumps(found))


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """Returns where two nested values differ, in words."""
    if isinstance(expected, dict) and isinstance(found, dict):
        missing = [f"{where}: {name!r} in one only" for name in sorted(expected.keys() ^ found.keys())]
        return missing + [
            text
            for name in expected.keys() & found.keys()
            for text in differences(expected[name], found[name], f"{where} {name}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found))
        return [text for place, (one, other) in pairs for text in differences(one, other, f"{where} [{place}]")]
    return [] if expected == found else [f"{where}: {str(expected)[:200]} became {str(found)[:200]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.what == "record":
        options.file.write_text(json.dumps(record(), indent=1))
        return
    expected = json.loads(options.file.read_text())
    found = differences(expected, record())
    print("\n".join(found) or f"{len(expected)} runs are the same")
    sys.exit(bool(found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import goldens  # as ranks know it

    goldens.main()
