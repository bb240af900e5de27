"""Epoch time of a 2-layer model on the common benchmark graph: `dgcl` against plain PyG loops, in one run.

    python benchmarks/epoch_time.py [--model gcn|sage|gat] [--nodes 200000] [--runs 2x1 4x1] [--epochs 8] [--json FILE]

Every row runs in processes of its own. Losses must be those that the graph's generator states for GCN, and for other models
those of the plain loop. ``anew`` rows do not cache the first layer's aggregation of constant input, ``lean`` rows return freed
memory, ``gloo`` rows exchange over loopback, not shared memory. ``precomputed`` rows are loops that aggregate the input once,
before the first epoch. DGL's rows need an installed DGL:
``pip install --no-deps dgl==2.1.0 torchdata==0.7.1 pandas pytz python-dateutil``, of which GraphBolt is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import PLANTED_LOSSES, QUIET, PeakMemory, load_planted, planted_file, planted_weights, report, run_row
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.strategy.base import GNNStrategy

RUNS = ["1x1", "1x2", "2x1", "1x1 anew", "1x2 anew", "2x1 anew", "2x1 lean", "2x1 gloo", "4x1"]


def make_model(kind: str, path: str) -> torch.nn.Module:
    """Returns the model; GCN with the weights that come with the graph, others from one seed."""
    torch.manual_seed(0)
    sizes = {"in_channels": 128, "hidden_channels": 128, "num_layers": 2, "out_channels": 16}
    if kind == "sage":
        return GraphSAGE(**sizes)
    if kind == "gat":
        return GAT(**sizes, heads=4)
    gcn = GCN(**sizes, bias=False)
    for conv, weight in zip(gcn.convs, planted_weights(path)):
        assert isinstance(conv, GCNConv)
        conv.lin.weight.data = weight.t().contiguous()
    return gcn


def plain_loop(
    kind: str,
    build: Callable[[], torch.nn.Module],
    load: Callable[[], Data],
    layout: str,
    epochs: int,
    variant: str = "",
) -> dict[str, Any]:
    """Loop of a PyG user on one device; GCNConv normalizes once (``cached=True``)."""
    memory = PeakMemory()
    data = load()
    model = build().to(data.x.dtype)
    convs: Any = model.convs
    for conv in convs:
        conv.cached = True
    adjacency: Any = data.edge_index
    if layout == "csr":
        from torch_geometric.nn.conv.gcn_conv import gcn_norm

        edge_index, weight = data.edge_index, torch.ones(data.num_edges, device=data.x.device)
        if kind == "gcn":
            edge_index, weight = gcn_norm(data.edge_index, None, data.num_nodes, dtype=data.x.dtype)
        order = torch.argsort(edge_index[1], stable=True)
        counts = torch.bincount(edge_index[1], minlength=data.num_nodes)
        pointer = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        adjacency = torch.sparse_csr_tensor(pointer, edge_index[0][order], weight[order], (data.num_nodes,) * 2)
        for conv in convs:
            conv.normalize = False
    if not variant:
        return loop(lambda: model(data.x, adjacency), model, data, epochs, memory)
    first, second = convs
    sums = adjacency @ data.x
    if kind == "sage":
        sums = sums / counts.clamp(min=1).unsqueeze(1)

    def forward() -> Tensor:
        x = first.lin_l(sums) + first.lin_r(data.x) if kind == "sage" else first.lin(sums)
        found: Tensor = second(F.relu(x), adjacency)
        return found

    return loop(forward, model, data, epochs, memory)


def dgl_loop(
    kind: str,
    build: Callable[[], torch.nn.Module],
    load: Callable[[], Data],
    layout: str,
    epochs: int,
    variant: str,
) -> dict[str, Any]:
    """Loop of a DGL user on one device, from the same weights."""
    sys.modules["dgl.graphbolt"] = types.ModuleType("dgl.graphbolt")  # its library is compiled for one torch
    import dgl
    from dgl.nn import GATConv, GraphConv
    from dgl.nn import SAGEConv as Sage

    memory = PeakMemory()
    data, convs = load(), list[torch.nn.Module]()
    graph = dgl.graph((*data.edge_index,), num_nodes=data.num_nodes)
    if kind != "sage":
        graph = dgl.add_self_loop(graph)
    peers: Any = build().convs
    for peer in peers:
        sizes = peer.in_channels, peer.out_channels
        if kind == "gcn":
            conv: Any = GraphConv(*sizes, bias=False)
            conv.weight.data = peer.lin.weight.data.t().contiguous()
        elif kind == "sage":
            conv = Sage(*sizes, "mean")
            conv.fc_neigh.weight.data, conv.fc_self.weight.data = peer.lin_l.weight.data, peer.lin_r.weight.data
            conv.fc_self.bias.data = peer.lin_l.bias.data
        else:
            conv = GATConv(*sizes, peer.heads)
            conv.fc.weight.data, conv.attn_l.data, conv.attn_r.data = (
                peer.lin.weight.data,
                peer.att_src.data,
                peer.att_dst.data,
            )
        convs.append(conv)
    model = torch.nn.ModuleList(convs).to(data.x.dtype)
    if variant and kind == "gcn":
        sums = GraphConv(*data.x.shape[1:] * 2, weight=False, bias=False)(graph, data.x)
    elif variant:
        graph.ndata["x"] = data.x
        graph.update_all(dgl.function.copy_u("x", "message"), dgl.function.mean("message", "mean"))
        sums = graph.ndata["mean"]

    def forward() -> Tensor:
        x = data.x
        for conv, peer in zip(convs, peers):
            if variant and conv is convs[0]:
                x = sums @ conv.weight if kind == "gcn" else conv.fc_neigh(sums) + conv.fc_self(x)
                continue
            x = conv(graph, x if conv is convs[0] else F.relu(x))
            if kind == "gat":
                x = x.flatten(1) if peer.concat else x.mean(1)
        return x

    return loop(forward, model, data, epochs, memory)


def loop(
    forward: Callable[[], Tensor], model: torch.nn.Module, data: Data, epochs: int, memory: PeakMemory
) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, seconds = [], []
    for _ in range(epochs):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(forward()[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return {"losses": losses, "seconds": seconds, "peak_mb": [memory.megabytes()], "bytes": 0}


class Clock(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.by_layer: dict[str, Any] = {}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        communication = trainer.callbacks[0]
        self.bytes.append(communication.epoch.bytes_sent)
        self.by_layer = {"/".join(key): vars(traffic) for key, traffic in communication.by_layer.items()}


def dgcl(
    build: Callable[[], torch.nn.Module],
    source: str,
    source_kwargs: dict[str, Any],
    ranks: int,
    epochs: int,
    variant: str,
) -> dict[str, Any] | None:
    """`Trainer(strategy="dgcl")` with the same model; returns the row on rank 0."""
    strategy = DGCLStrategy(
        timeout=600, cache_input_aggregation=variant != "anew", reuse_buffers=variant != "lean", shared_memory=variant != "gloo"
    )
    return trained(build, source, source_kwargs, ranks, epochs, strategy)


def trained(
    build: Callable[[], torch.nn.Module],
    source: str,
    source_kwargs: dict[str, Any],
    ranks: int,
    epochs: int,
    strategy: GNNStrategy,
) -> dict[str, Any] | None:
    """Trains the model with a strategy; returns the row on rank 0."""
    memory = PeakMemory()
    clock = Clock()
    began = time.perf_counter()
    data = GraphDataModule(source, source_kwargs)
    model = build()
    module = NodeClassifier(model.double() if source_kwargs.get("double") else model, weight_decay=0.0)
    trainer = L.Trainer(
        strategy=strategy,
        devices=ranks,
        max_epochs=epochs,
        **QUIET,
        callbacks=[clock],
        limit_val_batches=0,
    )
    own: dict[str, Any] = {}

    class Gather(L.Callback):
        """While the ranks are still connected: memory and traffic of all."""

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:  # what is done once is done
                own["start"] = memory.megabytes()
                memory.reset()

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            shard, later = data.shard, memory.megabytes()
            peaks = max(own.get("start", 0.0), later), later
            mine = (
                *peaks,
                memory.of_others(),
                clock.bytes,
                clock.by_layer,
                sum(shard.plan.recv_counts),
                shard.report,
                shard.counts,
            )
            own["all"] = strategy.world.all_gather_object(mine)

    trainer.callbacks.append(Gather())
    trainer.fit(module, datamodule=data)
    if not trainer.is_global_zero:
        return None
    peaks, later_peaks, of_others, sent, layers, halo, reports, counts = zip(*own["all"])
    return {
        "losses": clock.losses,
        "seconds": clock.seconds,
        "peak_mb": list(peaks),
        "later_peak_mb": list(later_peaks),
        "of_others_mb": list(of_others),
        "bytes": sum(s[-1] for s in sent),
        "first_epoch_bytes": sum(s[0] for s in sent),
        "by_layer": layers,
        "halo_rows": list(halo),
        "counts": list(counts[0]),
        "partition_seconds": reports[0].get("seconds"),
        "edge_balance": reports[0].get("edge_balance"),
        "total_seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gcn", choices=["gcn", "sage", "gat"])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--runs", nargs="*", default=RUNS, help="ranks x threads")
    parser.add_argument("--double", action="store_true", help="in float64, for the losses")
    parser.add_argument("--json")
    parser.add_argument("--skip-coo", action="store_true", help="leave out the slow loop over edge_index")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--graph", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        system, value, variant = options.row.split(":")
        path, double = options.graph, options.double

        def build() -> torch.nn.Module:
            return make_model(options.model, path)

        def load() -> Data:
            return load_planted(path, double)

        loops = {"pyg": plain_loop, "dgl": dgl_loop}
        row = (
            loops[system](options.model, build, load, value, options.epochs, variant)
            if system in loops
            else dgcl(
                build, "common.load_planted", {"path": path, "double": double}, int(value), options.epochs, variant
            )
        )
        if row is not None:
            print(json.dumps(row))
        return

    graph = str(planted_file(options.nodes))
    plan = [] if options.skip_coo else [("PyG, edge_index", "pyg:coo:", 1, threads) for threads in (1, 2)]
    has_csr = options.model != "gat"  # whose conv takes no CSR, and whose first aggregation is learned
    if has_csr:
        plan += [("PyG, torch.sparse_csr", "pyg:csr:", 1, threads) for threads in (1, 2)]
        plan += [("PyG, torch.sparse_csr, precomputed", "pyg:csr:precomputed", 1, threads) for threads in (1, 2)]
    if find_spec("dgl") is not None:
        name = f"DGL {version('dgl')}"
        plan += [(name, "dgl::", 1, threads) for threads in (1, 2)]
        plan += [(f"{name}, precomputed", "dgl::precomputed", 1, threads) for threads in (1, 2) if has_csr]
    for run in options.runs:
        ranks, threads = map(int, run.split()[0].split("x"))
        variant = run.partition(" ")[2]
        plan.append((f"dgcl {variant}".strip(), f"dgcl:{ranks}:{variant}", ranks, threads))
    rows: list[dict[str, Any]] = []
    for name, row, ranks, threads in plan:
        epochs = min(options.epochs, 3 if options.model == "gat" else 4) if row == "pyg:coo:" else options.epochs
        arguments = ["--row", row, "--graph", graph, "--epochs", str(epochs), "--model", options.model]
        arguments += ["--double"] if options.double else []
        found = run_row(str(Path(__file__)), arguments, threads)
        # The first epoch holds what is done once: CSR, normalisation, the first layer's sums.
        rows.append(
            {"system": name, "ranks x threads": f"{ranks}x{threads}", "s/epoch": median(found["seconds"][1:]), **found}
        )
        print(f"{name} {ranks}x{threads}: {rows[-1]['s/epoch']:.3f} s", file=sys.stderr, flush=True)
    plain = [row for row in rows if row["system"].startswith("PyG")]
    reference = next((row for row in plain if "csr" in row["system"]), plain[0] if plain else rows[0])
    expected = PLANTED_LOSSES if (options.model, options.nodes) == ("gcn", 200_000) else reference["losses"]
    for row in rows:
        row["of PyG"] = row["s/epoch"] / reference["s/epoch"]
        row["first epoch, s"] = row["seconds"][0]
        row["MB sent/epoch"] = row["bytes"] / 1e6
        row["peak MB/rank above imports"] = max(row["peak_mb"])
        row["largest loss difference"] = max(abs(a - b) for a, b in zip(row["losses"], expected))
        if row.get("total_seconds"):
            row["set-up, s"] = row["total_seconds"] - sum(row["seconds"])
        if options.model == "gcn" and sum(row.get("halo_rows") or [0]):
            # The second layer's 16 columns, forward and back, 4 bytes a value; anew, the first layer's 128 forward too.
            columns = 16 * 2 + (128 if "anew" in row["system"] else 0)
            row["of all halo rows"] = row["bytes"] / (sum(row["halo_rows"]) * columns * 4)
    columns = ["system", "ranks x threads", "s/epoch", "of PyG", "first epoch, s", "set-up, s", "MB sent/epoch"]
    columns += ["of all halo rows", "peak MB/rank above imports", "largest loss difference"]
    title = f"2-layer {options.model}, 128-128-16, {options.nodes:,} nodes; of PyG: {reference['system']}"
    report(title, rows, columns, options.json)


if __name__ == "__main__":
    main()
