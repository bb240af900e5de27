"""Where the time of an epoch goes: the part `host` of gpu_acceptance.py."""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import QUIET, report
from gpu_acceptance import Row, row, wide_graph
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models import GAT, GCN, GraphSAGE
from torch_geometric.utils import add_self_loops, remove_self_loops

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, planted_partition
from lightning_gnn.devices import synchronize
from lightning_gnn.kernels import CSR, attention, spmm

PARTS_OF_STEP = {
    "optimizer": ("/torch/optim/",),
    "logging": ("/logger_connector/", "/loggers/", "/torchmetrics/", "/lightning_gnn/steps/logs", "/lightning_gnn/steps/metrics"),
    "exchange": ("/lightning_gnn/comm/", "/lightning_gnn/extensions/"),
    "binding": ("/lightning_gnn/nn/", "/lightning_gnn/rows/", "/lightning_gnn/steps/", "/lightning_gnn/strategy/"),
    "kernels": ("/lightning_gnn/kernels/", "/triton/"),
    "Lightning loop": ("/lightning/", "/lightning_utilities/", "/lightning_fabric/"),
    "autograd": ("/torch/autograd/", "/torch/_tensor.py"),
    "model": ("/torch_geometric/", "/torch/nn/", "/lightning_gnn/modules/"),
}
"""Files of each part of a step; the first part with a matching file counts."""

PACKAGES = ("lightning_gnn", "lightning", "lightning_utilities", "torchmetrics", "torch_geometric", "triton", "torch")


def part_of(path: str) -> str:
    return next((part for part, places in PARTS_OF_STEP.items() if any(each in path for each in places)), "other")


def package_of(path: str) -> str | None:
    return next((each for each in PACKAGES if f"/{each}/" in path), None)


class Meter:
    """Measures epochs in four phases: the first ones, wall time, calls and host time, device.

    Args:
        options: of the command. With a plugin, phases are short and only counts are kept.

    Attributes:
        found: numbers of one epoch.
        epochs: epochs that the phases take together.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._device, self._plugin = torch.device(options.device), options.plugin
        self._bounds = (3, 4, 5, 6) if options.plugin else (10, 30, 40, 45)
        self.epochs, self.found = self._bounds[-1], dict[str, Any]()
        self._open = ExitStack()

    def begin(self, epoch: int) -> None:
        """Called at the beginning of each epoch, and once after the last one."""
        if epoch not in self._bounds:
            return
        self._open.close()
        place = self._bounds.index(epoch)
        if place < 3:
            phase = (self._wall, self._calls, self._counts if self._plugin else self._profile)[place]
            self._open.enter_context(phase(self._bounds[place + 1] - epoch))

    @contextmanager
    def _wall(self, epochs: int) -> Iterator[None]:
        synchronize(self._device)
        began = time.perf_counter()
        yield
        synchronize(self._device)
        if not self._plugin:
            self.found["wall ms"] = (time.perf_counter() - began) / epochs * 1e3

    @contextmanager
    def _calls(self, epochs: int) -> Iterator[None]:
        profiler = cProfile.Profile()
        profiler.enable()
        yield
        profiler.disable()
        calls, seconds = Counter[str](), Counter[str]()
        stats: Any = pstats.Stats(profiler)
        for (path, _, _), (_, count, own_s, _, callers) in stats.stats.items():
            package = package_of(path)
            if package is not None:
                calls[package] += count
            if path != "~":
                seconds[part_of(path)] += own_s
            for (caller, *_), (_, _, own_s, _) in callers.items() if path == "~" else ():
                seconds[part_of(caller)] += own_s  # of a built-in function
        self.found["calls"] = Counter({package: count / epochs for package, count in calls.most_common()})
        if not self._plugin:
            self.found["host ms"] = {part: spent / epochs * 1e3 for part, spent in seconds.most_common()}

    @contextmanager
    def _counts(self, epochs: int) -> Iterator[None]:
        plugin = importlib.import_module(self._plugin)
        with plugin.recorded() as waits, plugin.launched() as launches:
            yield
        self.found |= {"launches": launches.total() / epochs, "syncs": waits.total() / epochs}
        self.found["sync places"] = [" in ".join(each) for each in waits]

    @contextmanager
    def _profile(self, epochs: int) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            with torch.profiler.record_function("measured epochs"):
                yield
            synchronize(self._device)
        events: Any = profile.events()
        on_host = [each for each in events if each.device_type != torch.autograd.DeviceType.CUDA]
        [whole] = [each.time_range for each in on_host if each.name == "measured epochs"]
        # The profiler and the line above synchronize too, outside these epochs.
        inside = [each.name for each in on_host if whole.start <= each.time_range.start < whole.end]
        labels = {each.name for each in on_host if getattr(each, "is_user_annotation", False)} | {"measured epochs"}
        kernels = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA and each.name not in labels]
        self.found |= {
            "gpu ms": sum(each.self_device_time_total for each in kernels) / epochs / 1e3,
            "launches": sum("Launch" in name for name in inside) / epochs,
            "syncs": sum("Synchronize" in name for name in inside) / epochs,
        }


class Epochs(L.Callback):
    """Measures the epochs of a Trainer, and keeps the losses of the first ones."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.losses = meter, list[float]()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.meter.begin(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch < 3:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))


SIZES: dict[str, Any] = {"in_channels": 128, "hidden_channels": 128, "num_layers": 2, "out_channels": 16}
KINDS: dict[str, Callable[[], Any]] = {
    "gcn": lambda: GCN(**SIZES), "sage": lambda: GraphSAGE(**SIZES), "gat": lambda: GAT(**SIZES, heads=4)
}  # fmt: skip

WAYS: dict[str, dict[str, Any]] = {"dgcl": {}}
"""Rows with a Trainer: names, and arguments of the strategy."""

Losses = list[float]


def by_strategy(given: dict[str, Any], kind: str, graph: Data, meter: Meter, options: argparse.Namespace) -> Losses:
    measured = Epochs(meter)
    trainer = L.Trainer(
        **{**QUIET, "accelerator": options.device}, devices=1, max_epochs=meter.epochs + 1, strategy=DGCLStrategy(**given),
        callbacks=[measured], limit_val_batches=0, num_sanity_val_steps=0, inference_mode=False,
    )  # fmt: skip
    trainer.fit(NodeClassifier(KINDS[kind](), weight_decay=0.0), datamodule=GraphDataModule(graph))
    return measured.losses


def by_loop(layout: str, kind: str, graph: Data, meter: Meter, options: argparse.Namespace) -> Losses:
    """Loop of a PyG user; GCNConv normalizes once."""
    data = graph.clone().to(options.device)
    model = KINDS[kind]().to(options.device)
    for conv in model.convs:
        conv.cached = True
    adjacency = data.edge_index
    if layout == "csr":
        edges, weight = data.edge_index, torch.ones(data.num_edges, device=options.device)
        if kind == "gcn":
            edges, weight = gcn_norm(edges, None, data.num_nodes, dtype=data.x.dtype)
        order = torch.argsort(edges[1], stable=True)
        counts = torch.bincount(edges[1], minlength=data.num_nodes)
        pointer = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        adjacency = torch.sparse_csr_tensor(pointer, edges[0][order], weight[order], (data.num_nodes,) * 2)
        for conv in model.convs:
            conv.normalize = False
    return looped(lambda: model(data.x, adjacency), model, data, meter)


def by_hand(kind: str, graph: Data, meter: Meter, options: argparse.Namespace) -> Losses:
    """The least that our kernels need: the first layer's sums once, sums of the second layer's 16 columns."""
    data = graph.clone().to(options.device)
    model = KINDS[kind]().to(options.device)
    first, second = model.convs
    forward = {"gcn": gcn_by_hand, "sage": sage_by_hand, "gat": gat_by_hand}[kind](data, first, second)
    return looped(forward, model, data, meter, fused=options.device == "cuda")


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Any, back: Any) -> Tensor:
        ctx.back = back
        return spmm(sums[0], x, sums[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  
        return spmm(ctx.back[0], grad.contiguous(), ctx.back[1]), None, None


def sums_over(edges: Tensor, weight: Tensor, num_nodes: int) -> Callable[[Tensor], Tensor]:
    """Returns a function for weighted sums over in-edges, with gradients."""

    def matrix(row: Tensor, column: Tensor) -> tuple[CSR, Tensor]:
        csr = CSR.from_coo(row, column, num_nodes, num_nodes)
        return csr.to_slot_order(), weight[csr.edge_ids().long()]

    there, back = matrix(edges[1], edges[0]), matrix(edges[0], edges[1])
    return lambda x: _Sums.apply(x, there, back)


def gcn_by_hand(data: Data, first: Any, second: Any) -> Callable[[], Tensor]:
    edges, weight = gcn_norm(data.edge_index, None, data.num_nodes, dtype=data.x.dtype)
    sums = sums_over(edges, weight, data.num_nodes)
    summed = sums(data.x)
    return lambda: sums(second.lin(F.relu(F.linear(summed, first.lin.weight, first.bias)))) + second.bias


def sage_by_hand(data: Data, first: Any, second: Any) -> Callable[[], Tensor]:
    target = data.edge_index[1]
    degree = torch.bincount(target, minlength=data.num_nodes).to(data.x.dtype)
    means = sums_over(data.edge_index, 1 / degree[target], data.num_nodes)
    mean = means(data.x)

    def forward() -> Tensor:
        x = F.relu(first.lin_l(mean) + first.lin_r(data.x))
        return means(x @ second.lin_l.weight.t()) + second.lin_l.bias + second.lin_r(x)

    return forward


def gat_by_hand(data: Data, first: Any, second: Any) -> Callable[[], Tensor]:
    edges, _ = add_self_loops(remove_self_loops(data.edge_index)[0], num_nodes=data.num_nodes)
    csr = CSR.from_coo(edges[1], edges[0], data.num_nodes, data.num_nodes).to_slot_order()

    def layer(conv: Any, x: Tensor) -> Tensor:
        x = conv.lin(x).view(-1, conv.heads, conv.out_channels)
        scores = attention.pair_sums(csr, (x * conv.att_src).sum(-1), (x * conv.att_dst).sum(-1))
        shares = attention.edge_softmax(csr, F.leaky_relu(scores, 0.2))
        out = attention.weighted_sums(csr, x, shares)
        return (out.flatten(1) if conv.concat else out.mean(1)) + conv.bias

    return lambda: layer(second, F.relu(layer(first, data.x)))


def looped(forward: Callable[[], Tensor], model: Any, data: Data, meter: Meter, **adam: Any) -> Losses:
    labeled = data.train_mask.nonzero().squeeze(1)
    labels, losses = data.y[labeled], Losses()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **adam)
    for epoch in range(meter.epochs):
        meter.begin(epoch)
        optimizer.zero_grad()
        loss = F.cross_entropy(forward()[labeled], labels)
        loss.backward()
        optimizer.step()
        if epoch < 3:
            losses.append(loss.item())
    meter.begin(meter.epochs)
    return losses


COLUMNS = ["check", "wall ms", "gpu ms", "launches", "syncs", "python calls"]


def host(options: argparse.Namespace) -> list[Row]:
    wide = wide_graph(options)
    small = planted_partition(min(2708, wide.num_nodes), 4, num_classes=16, num_features=128, seed=1)
    rows = []
    for size, graph in ((f"{wide.num_edges / 1e6:.2g} M edges", wide), ("Cora's size", small)):
        for kind in options.kinds:
            # A device of a plugin may not have sparse matrices.
            layouts = ["edge_index"] if kind == "gat" or options.plugin else ["edge_index", "csr"]
            runs: dict[str, Callable[..., Losses]] = {
                **{f"PyG, {layout}": partial(by_loop, layout) for layout in layouts},
                "by hand": by_hand,
                **{way: partial(by_strategy, given) for way, given in WAYS.items()},
            }
            reference = Losses()
            for way, run in runs.items():
                torch.manual_seed(0)
                meter = Meter(options)
                losses = run(kind, graph, meter, options)
                reference = reference or losses
                off = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
                found = {**meter.found, "python calls": meter.found["calls"].total()}
                rows.append(row(f"{size}, {kind}, {way}: losses off PyG's", off, "< 0.001", off < 1e-3, **found))
    report("one epoch", rows, COLUMNS, None)
    return rows
