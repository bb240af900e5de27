"""What must be true on a GPU, run on yours: one command, parts of at most ten minutes, a table, an exit status.

    python benchmarks/gpu_acceptance.py [--minutes 12] [--folder acceptance] [--parts models ranks ...] [--edges 20000000]

needs one GPU and no network. Untested parts run first, then parts that were skipped or have failed, short ones before long
ones. Each runs in a process of its own. A part that has passed is kept in the folder and not run again: call it again until
all have. ``--table`` prints the results in the folder as Markdown.

| part | what must be true |
|---|---|
| models | a rank on the GPU trains as one on the CPU does, in float64: losses and weights |
| ranks | two and four ranks on the one GPU do, under each scheme; they exchange through host memory |
| nccl | so do two, four and eight ranks by NCCL, under each strategy; a lost rank ends the other, and its memory is free |
| kernels | ours give what gather and scatter give, and the same bits twice; seconds beside cuSPARSE's and PyG's |
| bandwidth | sums in float32 are 1.3 times as fast as by cuSPARSE; shares of the bandwidth of a copy, for each kernel |
| memory | the peak of training steps is what was predicted, within a fifth |
| waits | a step waits for the device once |
| speed | losses are those of plain PyG loops; seconds of an epoch and memory beside theirs; of at most 6 million edges |
| sampling | losses are those without batches made ahead; of at most 6 million edges |
| host | losses are those of plain PyG loops; wall, GPU and host ms, calls, launches and synchronizations of an epoch |
| graphs | captured steps of GCN, SAGE and GAT equal others; seconds of a replay beside a step captured by hand, at most 1.15 |
| sanitizer | compute-sanitizer finds nothing in the kernels; where it is installed |
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import staged_group
import torch
import torch.nn.functional as F
from common import QUIET, machine, report
from epoch_time import Clock, plain_loop
from torch import Tensor
from torch_geometric.nn.models import GAT, GCN, GIN, PNA, GraphSAGE
from torch_geometric.utils import degree, scatter, softmax

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, SamplingStrategy, local_rows, planted_partition
from lightning_gnn.checks.footprint import Sizes
from lightning_gnn.devices import functions_of, synchronize
from lightning_gnn.kernels import CSR, attention, spmm
from lightning_gnn.kernels.sums import STATISTICS, RowStatistics
from lightning_gnn.strategy.memory import memory_advice

LIMIT_S = 600
"""Of a part."""

EXPECTED_S = {
    "models": 40, "ranks": 150, "nccl": 240, "kernels": 60, "memory": 40, "waits": 30, "speed": 60, "sampling": 90, "host": 120,
    "graphs": 60, "bandwidth": 60,
}  # fmt: skip
"""Seconds of each part on a GPU, rounded up; parts without an entry are expected to take 120 s."""

FEATURES, CLASSES, HIDDEN = 16, 4, 16

Row = dict[str, Any]


def small_graph() -> Any:
    graph = planted_partition(600, num_features=FEATURES, num_classes=CLASSES, seed=1)
    graph.x = graph.x.double()
    return graph


def model_of(name: str, hidden: int = HIDDEN) -> torch.nn.Module:
    """Returns a model of two layers from one seed."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "in_channels": FEATURES, "hidden_channels": hidden, "num_layers": 2, "out_channels": CLASSES
    }  # fmt: skip
    histogram = degree(small_graph().edge_index[1], 600).long().bincount() if name == "pna" else None
    models: dict[str, Callable[[], torch.nn.Module]] = {
        "gcn": lambda: GCN(**sizes),
        "gcn, batch norm": lambda: GCN(**sizes, norm="batch_norm"),
        "sage": lambda: GraphSAGE(**sizes),
        "sage, maxima": lambda: GraphSAGE(**sizes, aggr="max"),
        "gin": lambda: GIN(**sizes),
        "gat": lambda: GAT(**sizes, heads=4),
        "gatv2": lambda: GAT(**sizes, heads=4, v2=True),
        "pna": lambda: PNA(**sizes, aggregators=["mean", "std", "max"], scalers=["identity"], deg=histogram),
    }
    return models[name]()


MODELS = ("gcn", "gcn, batch norm", "sage", "sage, maxima", "gin", "gat", "gatv2", "pna")
SCHEMES = ("dgcl", "spmm_15d", "vertex_cut", "vertex_cut_cached", "sampling")


class Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))


def trained(device: str, name: str, strategy: Any, epochs: int = 3, **trainer: Any) -> list[Tensor]:
    """Returns the losses of epochs, and then the weights, on the CPU."""
    torch.manual_seed(0)
    ckpt_path, callbacks = trainer.pop("ckpt_path", None), [Losses(), *trainer.pop("callbacks", ())]
    losses = callbacks[0]
    # Adam would make steps of what is rounded in gradients of 0, such as those of a bias before BatchNorm.
    module = NodeClassifier(model_of(name), optimizer=partial(torch.optim.SGD, lr=0.1)).double()
    options = {**QUIET, "accelerator": device, "devices": 1, "max_epochs": epochs, "inference_mode": device == "cpu"}
    run = L.Trainer(strategy=strategy, callbacks=callbacks, **{**options, **trainer})
    run.fit(module, datamodule=GraphDataModule(small_graph()), ckpt_path=ckpt_path)
    weights = [each.detach().cpu().double() for each in module.state_dict().values() if each.is_floating_point()]
    return [torch.tensor(losses.values, dtype=torch.float64), *weights]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference, relative to each tensor's largest number, or to 0.001 where all are smaller."""
    off = [(a - b).abs().max() / b.abs().max().clamp(min=1e-3) for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(off).max())  # which, unlike Python's max, is NaN if one is


ROWS_FILE = "GPU_ACCEPTANCE_ROWS"
"""Variable with the file of the part's rows."""


def row(check: str, value: Any, wanted: str, ok: bool, **others: Any) -> Row:
    """Returns a row, and adds it to the part's file, which remains if the part does not end."""
    made = {"check": check, "value": value, "wanted": wanted, "ok": bool(ok), **others}
    if ROWS_FILE in os.environ:
        with open(os.environ[ROWS_FILE], "a") as file:
            file.write(json.dumps(made) + "\n")
    return made


# Parts ########################################################################


def models(options: argparse.Namespace) -> list[Row]:
    rows = []
    for name in MODELS:
        off = difference(trained(options.device, name, "dgcl"), trained("cpu", name, "auto"))
        rows.append(row(f"{name}: off one CPU device", off, "< 1e-9", off < 1e-9))
    return rows


def ranks(options: argparse.Namespace) -> list[Row]:
    """On one device, through host memory."""
    rows = []
    for size in options.ranks:
        found, expected = (on_ranks(size, device, options) for device in (options.device, "cpu"))
        rows += compared(f"{size} ranks on one {options.device}", found, expected)
    return rows


def nccl(options: argparse.Namespace) -> list[Row]:
    import gpu_nccl

    return gpu_nccl.nccl(options)


Results = list[dict[str, list[Tensor]]]
"""Of each rank, by scheme and model."""


def compared(where: str, found: Results, expected: Results) -> list[Row]:
    rows = []
    for case, on_cpu in expected[0].items():
        off = max(difference(each[case], on_cpu) for each in found)
        rows.append(row(f"{case}, {where}: off CPU ranks", off, "< 1e-9", off < 1e-9))
    return rows


def on_ranks(size: int, device: str, options: argparse.Namespace) -> Results:
    """Trains under every scheme on so many ranks, which share one device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = options.folder / f"{size}-{device}"
    folder.mkdir(exist_ok=True)
    torch.multiprocessing.spawn(_rank, (size, port, device, options, folder), size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def _rank(rank: int, size: int, port: int, device: str, options: argparse.Namespace, folder: Path) -> None:
    prepare(options)
    if device != "cpu":
        staged_group.install(device)
    # Ranks that share a device are, to Lightning, machines of one device each.
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size), LOCAL_RANK="0", NODE_RANK=str(rank)
    )
    found = {}
    for scheme in options.schemes:
        for name in ("gcn",) if scheme == "sampling" else ("gcn", "gat"):
            found[f"{scheme}, {name}"] = trained(device, name, scheme, num_nodes=size)
    torch.save(found, folder / f"{rank}.pt")


def kernels(options: argparse.Namespace) -> list[Row]:
    """Forward and backward, 64 columns in float32; sums also in bfloat16, and against cuSPARSE."""
    device, edges = torch.device(options.device), options.edges
    nodes, columns, heads = max(1, edges // 20), 64, 4
    torch.manual_seed(0)
    source = torch.randint(nodes, (edges,))
    # As many edges as the square says end at the first nodes: hubs.
    target = (torch.rand(edges) ** 2 * nodes).long()
    csr = CSR.from_coo(target.to(device), source.to(device), nodes, nodes)
    edge, csr = csr.edge_ids().long(), csr.to_slot_order()
    source, target = source.to(device), target.to(device)
    x = torch.randn(nodes, columns, device=device)
    weight = torch.rand(edges, device=device)
    scores = [torch.randn(nodes, heads, device=device) for _ in range(2)]
    per_head = x.view(nodes, heads, -1)
    slot_weight, has_edges = weight[edge], csr.indptr.diff().unsqueeze(1) > 0
    matrix = torch.sparse_csr_tensor(csr.indptr, csr.indices.long(), slot_weight, (nodes, nodes), device=device)

    def statistics() -> list[Tensor]:
        found = RowStatistics.empty(csr, x, STATISTICS)
        found.add(csr, x, accumulate=False)
        # Of rows without edges PyG's are 0.
        return [found.sum, found.squares, *(each.where(has_edges, 0) for each in (found.max, found.min))]

    def plain_statistics() -> list[Tensor]:
        rows = x[source]
        return [
            scatter(part, target, 0, nodes, how)
            for part, how in ((rows, "sum"), (rows * rows, "sum"), (rows, "max"), (rows, "min"))
        ]

    def attended(x: Tensor = per_head) -> list[Tensor]:
        shares = attention.edge_softmax(csr, F.leaky_relu(attention.pair_sums(csr, *scores), 0.2))
        return [attention.weighted_sums(csr, x, shares)]

    def plain_attended(x: Tensor = per_head) -> list[Tensor]:
        left, right = scores
        shares = softmax(F.leaky_relu(left[source] + right[target], 0.2), target, num_nodes=nodes)
        return [scatter(shares.unsqueeze(-1) * x[source], target, 0, nodes, "sum")]

    def backward(forward: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        leaf = per_head.detach().requires_grad_()
        forward(leaf)[0].square().sum().backward()
        assert leaf.grad is not None
        return [leaf.grad]

    short = x.bfloat16()
    cases: list[tuple[str, float, Callable[[], list[Tensor]], dict[str, Callable[[], list[Tensor]]]]] = [
        ("sums", 1e-4, lambda: [spmm(csr, x, slot_weight)], {
            "cuSPARSE": lambda: [matrix @ x],
            "PyG": lambda: [scatter(weight.unsqueeze(1) * x[source], target, 0, nodes, "sum")],
        }),
        ("sums of bfloat16", 2e-2, lambda: [spmm(csr, short)], {
            "PyG": lambda: [scatter(short.float()[source], target, 0, nodes, "sum")],
        }),
        ("statistics", 1e-4, statistics, {"PyG": plain_statistics}),
        ("attention", 1e-4, attended, {"PyG": plain_attended}),
        ("attention, backward", 1e-3, lambda: backward(attended), {"PyG": lambda: backward(plain_attended)}),
    ]  # fmt: skip
    rows = []
    for name, tolerance, ours, others in cases:
        found, again = ours(), ours()
        rows.append(
            row(
                f"{name}: bits repeat", all(map(torch.equal, found, again)), "True", all(map(torch.equal, found, again))
            )
        )
        seconds, peak = measured(ours, device)
        for other, run in others.items():
            off = difference([each.float().cpu() for each in found], [each.float().cpu() for each in run()])
            theirs, their_peak = measured(run, device)
            timed = {"seconds": seconds, "/ other": seconds / theirs, "peak MB": peak, "other's MB": their_peak}
            rows.append(row(f"{name}: off {other}", off, f"< {tolerance}", off < tolerance, **timed))
    return rows


def measured(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> tuple[float, float | None]:
    """Returns the shortest of some runs in seconds, and the memory that one takes on top in MB, where the device counts it."""
    functions = functions_of(device)
    counts = hasattr(functions, "reset_peak_memory_stats")
    before = functions.memory_allocated(device)
    if counts:
        functions.reset_peak_memory_stats(device)
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times), (functions.max_memory_allocated(device) - before) / 2**20 if counts else None


class PeakOfSteps(L.Callback):
    """The most memory that the device held from the second epoch on."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            functions_of(pl_module.device).reset_peak_memory_stats(pl_module.device)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bytes = functions_of(pl_module.device).max_memory_allocated(pl_module.device)


def memory(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device)
    if not hasattr(functions_of(device), "reset_peak_memory_stats"):
        return [row("peak of training steps", "not counted", "a device that counts", True, skipped=True)]
    rows = []
    for name in ("gcn", "gat"):
        data = GraphDataModule(planted_partition(max(600, options.edges // 20), 20, CLASSES, FEATURES))
        module, peak = NodeClassifier(model_of(name, hidden=64)), PeakOfSteps()
        run = L.Trainer(
            **{**QUIET, "accelerator": options.device}, devices=1, strategy="dgcl", max_epochs=3, callbacks=[peak]
        )
        run.fit(module, datamodule=data)
        scheme: Any = run.strategy.scheme  # type: ignore[attr-defined]
        cut = data.stored_cut()
        steps = memory_advice(scheme).steps(
            NodeClassifier(model_of(name, hidden=64)), cut.shard(0).batch, device=device
        )
        [sizes] = Sizes.from_cut(cut, module, scheme.layout(1).replicas)
        expected = steps.footprint(sizes).peak()
        ratio = max(expected.forward, expected.backward) / peak.bytes
        rows.append(
            row(
                f"{name}: predicted / peak",
                ratio,
                "0.8 to 1.25",
                0.8 <= ratio <= 1.25,
                **{"peak MB": peak.bytes / 2**20},
            )
        )
    return rows


class WaitsOfAStep(L.Callback):
    """Counts what torch warns of in the third step, or what the plugin's device has recorded."""

    found: Any = None

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        if self._options.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")  # which warns of itself once
            self._open: Any = warnings.catch_warnings(record=True)
            self.found = self._open.__enter__()
            warnings.simplefilter("always")
        else:
            self._open = importlib.import_module(self._options.plugin).recorded()
            self.found = self._open.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step != 3:
            return
        if self._options.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            self.found = [
                f"{Path(each.filename).name}:{each.lineno}" for each in self.found if "synchroniz" in str(each.message)
            ]
        else:
            self.found = [*self.found.elements()]
        self._open.__exit__(None, None, None)


def waits(options: argparse.Namespace) -> list[Row]:
    rows = []
    for name in ("gcn", "gcn, batch norm", "gat", "pna"):
        counted = WaitsOfAStep(options)
        torch.manual_seed(0)
        run = L.Trainer(
            **{**QUIET, "accelerator": options.device}, devices=1, strategy="dgcl", max_epochs=4, callbacks=[counted],
            limit_val_batches=0, num_sanity_val_steps=0, inference_mode=False,
        )  # fmt: skip
        run.fit(NodeClassifier(model_of(name)).double(), datamodule=GraphDataModule(small_graph()))
        where = [str(each) for each in counted.found]
        rows.append(row(f"{name}: waits of a step", len(where), "at most 1", len(where) <= 1, where=where))
    return rows


class DeviceClock(Clock):
    """Whose epochs end when the device has done what they asked of it."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        synchronize(pl_module.device)
        super().on_train_epoch_end(trainer, pl_module)


WAYS: dict[str, dict[str, Any]] = {
    "dgcl": {},
    "dgcl, bf16-mixed": {},
    "dgcl, cache_input_aggregation=False": {"cache_input_aggregation": False},
    "dgcl, recompute": {"checkpoint_convs": True},
}
"""What rows of `speed` are called, and what the strategy is given."""


def wide_graph(options: argparse.Namespace) -> Any:
    nodes = max(600, min(options.edges, 6_000_000) // 20)
    return planted_partition(nodes, 20, num_classes=16, num_features=128, seed=1)


def speed(options: argparse.Namespace) -> list[Row]:
    """Two layers of 128 columns in float32; PyG's GCN normalises once."""
    device, graph = torch.device(options.device), wide_graph(options)
    there = graph.clone().to(options.device)
    sizes: dict[str, Any] = {"in_channels": 128, "hidden_channels": 128, "num_layers": 2, "out_channels": 16}
    kinds: dict[str, Callable[[], torch.nn.Module]] = {
        "gcn": lambda: GCN(**sizes), "sage": lambda: GraphSAGE(**sizes), "gat": lambda: GAT(**sizes, heads=4)
    }  # fmt: skip
    rows = []
    for kind, build in kinds.items():

        def model(build: Callable[[], torch.nn.Module] = build) -> torch.nn.Module:
            torch.manual_seed(0)
            return build()

        def plain(layout: str, kind: str = kind, model: Any = model) -> dict[str, Any]:
            return plain_loop(kind, lambda: model().to(device), there.clone, layout, 8)

        def ours(way: str, model: Any = model) -> dict[str, Any]:
            clock = DeviceClock()
            trainer = L.Trainer(
                **{**QUIET, "accelerator": options.device}, devices=1, max_epochs=8, strategy=DGCLStrategy(**WAYS[way]),
                precision="bf16-mixed" if "bf16" in way else "32-true", callbacks=[clock],
                limit_val_batches=0, num_sanity_val_steps=0,
            )  # fmt: skip
            trainer.fit(NodeClassifier(model(), weight_decay=0.0), datamodule=GraphDataModule(graph))
            return {"losses": clock.losses, "seconds": clock.seconds}

        # A device of a plugin may not have sparse matrices.
        layouts = [] if kind == "gat" or options.plugin else ["csr"]
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            **{f"PyG, {layout}": partial(plain, layout) for layout in ["edge_index", *layouts]},
            **{way: partial(ours, way) for way in WAYS},
        }
        reference: list[float] = []
        plain_seconds = None
        for way, run in runs.items():
            found, peak = on_device(run, device)
            if found is None:
                rows.append(row(f"{kind}, {way}: losses", "out of memory", "enough memory", way.startswith("PyG")))
                continue
            losses, seconds = found["losses"], median(found["seconds"][3:])
            reference, plain_seconds = reference or losses, plain_seconds or seconds
            off = max(abs(a - b) for a, b in zip(losses, reference))
            limit = 5e-2 if "bf16" in way else 1e-3
            timed = {"seconds": seconds, "/ other": seconds / plain_seconds, "peak MB": peak}
            rows.append(row(f"{kind}, {way}: losses off the first row's", off, f"< {limit}", off < limit, **timed))
    return rows


def on_device(run: Callable[[], dict[str, Any]], device: torch.device) -> tuple[dict[str, Any] | None, float | None]:
    """Returns what a run returns, None where the device's memory did not do, and the most that it held in MB."""
    functions = functions_of(device)
    counts = hasattr(functions, "reset_peak_memory_stats")
    gc.collect()
    if counts:
        functions.empty_cache()
        functions.reset_peak_memory_stats(device)
    try:
        found = run()
    except torch.OutOfMemoryError:
        return None, None
    return found, functions.max_memory_allocated(device) / 2**20 if counts else None


def sampling(options: argparse.Namespace) -> list[Row]:
    """GraphSAGE, fan-out 10 and 10, 1,024 seeds: an epoch with batches made ahead and without."""
    graph = wide_graph(options)
    graph.train_mask = torch.arange(graph.num_nodes) < 1024 * 30
    rows: list[Row] = []
    for prefetch, samplers in ((0, 1), (4, 1), (8, 4)):
        clock = DeviceClock()
        torch.manual_seed(0)
        model = GraphSAGE(128, 128, 2, 16)
        trainer = L.Trainer(
            **{**QUIET, "accelerator": options.device}, devices=1, max_epochs=3, limit_val_batches=0, num_sanity_val_steps=0,
            strategy=SamplingStrategy([10, 10], batch_size=1024, prefetch_batches=prefetch, num_workers=samplers),
            callbacks=[clock],
        )  # fmt: skip
        trainer.fit(NodeClassifier(model), datamodule=GraphDataModule(graph))
        loss, seconds = clock.losses[-1], clock.seconds[-1]
        first = rows[0] if rows else {"value": loss, "seconds": seconds}
        timed = {"seconds": seconds, "/ other": seconds / first["seconds"]}
        check = f"prefetch={prefetch}, samplers={samplers}: loss"
        rows.append(row(check, loss, "the first row's", abs(loss - first["value"]) < 1e-4, **timed))
    return rows


def host(options: argparse.Namespace) -> list[Row]:
    import gpu_host

    return gpu_host.host(options)


def bandwidth(options: argparse.Namespace) -> list[Row]:
    import gpu_bandwidth

    return gpu_bandwidth.bandwidth(options, row, time.perf_counter)


class Replays(L.Callback):
    """Counts the replays of captured steps."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        graphs = trainer.strategy.steps.graphs
        self.count, self.obstacle = (0, "") if graphs is None else (graphs.replays, graphs.obstacle)


def graphs(options: argparse.Namespace) -> list[Row]:
    """Captured steps equal others; and the time of an epoch beside a step that is captured by hand, where there is a clock."""
    rows = []
    for name in ("gcn", "sage", "gat"):
        seen = Replays()
        found = trained(options.device, name, DGCLStrategy(cuda_graph="auto"), 9, callbacks=[seen])
        off = difference(found, trained(options.device, name, DGCLStrategy(), 9))
        rows.append(row(f"{name}: captured steps off others", off, "< 1e-12", off < 1e-12))
        rows.append(row(f"{name}: replays of nine steps", seen.count, "5", seen.count == 5, obstacle=seen.obstacle))
    if options.device == "cuda":
        rows += [by_hand(options, name) for name in ("gcn", "sage", "gat")]
    return rows


def by_hand(options: argparse.Namespace, name: str) -> Row:
    """Times the graphs of the last captured step, and one graph of the same step without a Trainer."""
    times: dict[str, float] = {}

    class Timed(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            if trainer.current_epoch == 8:
                known = trainer.strategy.steps.graphs
                steps = [*known._step.graphs, *known._optimizer_step.graphs]
                times["ours"] = measured(lambda: [each.replay() for each in steps], torch.device(options.device), 20)[0]
                times["by hand"] = timed_by_hand(module, batch, options)

    trained(options.device, name, DGCLStrategy(cuda_graph=True), 9, callbacks=[Timed()])
    ratio = times["ours"] / times["by hand"]
    return row(f"{name}: replay beside a step by hand", ratio, "<= 1.15", ratio <= 1.15, **times)


def timed_by_hand(module: Any, batch: Any, options: argparse.Namespace) -> float:
    """Returns the seconds of one graph with the forward and backward pass of bound layers, and the optimizer."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wanted = batch.train_mask.nonzero().view(-1)
    labels = batch.y[wanted]

    def step() -> None:
        optimizer.zero_grad()
        with local_rows():
            F.cross_entropy(module.model(batch.x, batch.edge_index)[wanted], labels).backward()
        optimizer.step()

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside), local_rows():
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return measured(graph.replay, torch.device(options.device), 20)[0]


def sanitizer(options: argparse.Namespace) -> list[Row]:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [row("compute-sanitizer", "not installed", "compute-sanitizer", True, skipped=True)]
    small = [
        "--part",
        "kernels",
        "--device",
        options.device,
        "--edges",
        "20000",
        "--folder",
        str(options.folder / "sanitizer"),
    ]
    own = {name: value for name, value in os.environ.items() if name != ROWS_FILE}
    done = subprocess.run(
        [tool, "--error-exitcode", "9", sys.executable, __file__, *small], capture_output=True, text=True, env=own
    )
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    return [
        row(
            "compute-sanitizer, kernels",
            summary[-1] if summary else done.stderr[-200:],
            "0 errors",
            done.returncode == 0,
        )
    ]


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    part.__name__: part for part in (models, ranks, nccl, kernels, memory, waits, speed, sampling, sanitizer)
}
PARTS |= {"host": host, "graphs": graphs, "bandwidth": bandwidth}


# Running them #################################################################


def prepare(options: argparse.Namespace) -> None:
    """What every process does first."""
    warnings.filterwarnings("ignore")
    os.environ["LIGHTNING_GNN_STORE"] = str(options.folder / "store")
    if options.plugin:
        importlib.import_module(options.plugin)


def run_part(options: argparse.Namespace) -> None:
    """Runs one part in this process."""
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options)
    PARTS[options.part](options)


def written(folder: Path) -> dict[str, Any]:
    """Returns the results in a folder: of each part `state`, `reason`, `seconds`, `date`, `machine` and `rows`."""
    path = folder / "acceptance.json"
    return json.loads(path.read_text())["parts"] if path.exists() else {}


def versions() -> dict[str, Any]:
    """Returns the GPU and the versions of libraries and driver, on which results depend; None for missing ones."""
    import gpu_nccl

    number = gpu_nccl.nccl_version()
    tool = shutil.which("nvidia-smi")
    query = [tool or "", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split() if tool else []
    return {"gpu": None, **machine(), "nccl": number and ".".join(map(str, number)), "driver": driver[0] if driver else None}


def result_of(options: argparse.Namespace, part: str, arguments: list[str], seconds: float) -> dict[str, Any]:
    """Returns the state, the reason and the rows of a part, after it ran in a process of its own for at most so many seconds."""
    import gpu_nccl

    file = options.folder / f"{part}.rows"
    file.unlink(missing_ok=True)
    limit = min(options.limit, seconds)
    command = [sys.executable, __file__, "--part", part, *arguments]
    process = subprocess.Popen(command, env={**os.environ, ROWS_FILE: str(file)}, start_new_session=True)
    reason = ""
    try:
        code = process.wait(limit)
        if code:
            reason = f"exit status {code}"
    except subprocess.TimeoutExpired:
        reason = f"took more than {limit:.0f} s" + (", the rest of --minutes" if limit < options.limit else "")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with processes that it started
        process.wait()
        gpu_nccl.stop_mps(options.folder)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    wrong = [each["check"] for each in rows if not each["ok"]]
    if wrong:
        return {"state": "failed", "reason": "; ".join([*filter(None, [reason]), *wrong]), "rows": rows}
    if reason:
        return {"state": "not run" if "--minutes" in reason else "failed", "reason": reason, "rows": rows}
    if not rows:
        return {"state": "failed", "reason": "no results", "rows": rows}
    if all(each.get("skipped") for each in rows):
        return {"state": "skipped", "reason": f"{rows[0]['value']}; needs {rows[0]['wanted']}", "rows": rows}
    return {"state": "passed", "reason": "", "rows": rows}


def in_order(parts: list[str], known: dict[str, Any]) -> list[str]:
    """Returns parts that have not passed: untested ones, then others; short ones before long ones."""
    last = ("skipped", "failed")
    state = {part: known.get(part, {}).get("state", "not run") for part in parts}
    untested = [part for part in parts if state[part] != "passed"]
    return sorted(untested, key=lambda part: (state[part] in last, EXPECTED_S.get(part, 120)))


def run_parts(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Runs parts while the minutes last; writes all results after each part, and returns them."""
    known, here = written(options.folder), versions()
    ends = time.monotonic() + 60 * (options.minutes or float("inf"))
    for part in in_order(options.parts, known):
        left, expected = ends - time.monotonic(), EXPECTED_S.get(part, 120)
        if expected > left:
            reason = f"{left:.0f} s of --minutes were left, and it takes about {expected} s"
            if part not in known:
                known[part] = {"state": "not run", "reason": reason, "rows": []}
            print(f"{part}: not run, {reason}", file=sys.stderr, flush=True)
            continue
        print(f"{part} ...", file=sys.stderr, flush=True)
        date, began = datetime.datetime.now().isoformat(" ", "minutes"), time.monotonic()
        known[part] = result_of(options, part, arguments, left)
        known[part] |= {"seconds": time.monotonic() - began, "date": date, "machine": here}
        print(f"{part}: {known[part]['state']} {known[part]['reason']}", file=sys.stderr, flush=True)
        write(options.folder / "acceptance.json", {"parts": known, "machine": here, "date": date})
    write(options.folder / "acceptance.json", {"parts": known, "machine": here, "date": datetime.date.today().isoformat()})
    return {part: known[part] for part in options.parts}


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes a file at once: there is always a whole one."""
    path.with_suffix(".new").write_text(json.dumps(found, indent=1))
    path.with_suffix(".new").rename(path)


def markdown(known: dict[str, Any]) -> str:
    """Returns the results as tables for docs/gpus.md: of parts, and of epochs."""
    wanted = dict(re.findall(r"^\| (\w+) \| (.*) \|$", __doc__ or "", re.MULTILINE))
    lines = ["| part | what must be true | result | GPU | date |", "|---|---|---|---|---|"]
    for part, found in known.items():
        rows = found["rows"]
        numbers = [each["value"] for each in rows if " off " in each["check"] and isinstance(each["value"], float)]
        parts = [found["state"], f"{sum(each['ok'] for each in rows)} of {len(rows)} checks" if rows else ""]
        parts += [f"at most {max(numbers):.1g} off" if numbers and found["state"] == "passed" else "", found["reason"]]
        on = found.get("machine", {})
        gpu = ", ".join(filter(None, [on.get("gpu") or "none", f"torch {on['torch']}" if on else ""]))
        cells = [part, wanted.get(part, ""), ", ".join(filter(None, parts)), gpu, found.get("date", "-")[:10]]
        lines.append(f"| {' | '.join(cells)} |")
    columns = ("wall ms", "gpu ms", "launches", "syncs", "python calls")
    epochs = [each for found in known.values() for each in found["rows"] if "python calls" in each]
    if epochs:
        lines += ["", f"| epoch | {' | '.join(columns)} | host ms by part |", "|---|---|---|---|---|---|---|"]
    for each in epochs:
        cells = [f"{each[name]:,.4g}" if name in each else "-" for name in columns]
        parts_ms = ", ".join(f"{name} {spent:.2f}" for name, spent in each.get("host ms", {}).items()) or "-"
        lines.append(f"| {each['check'].partition(':')[0]} | {' | '.join(cells)} | {parts_ms} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("acceptance"), help="keeps what has passed")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--minutes", type=float, help="for all parts; what does not fit is not run")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a part")
    parser.add_argument("--case-limit", type=float, default=60, help="seconds of a case of the part nccl")
    parser.add_argument("--table", action="store_true", help="print the results in the folder as Markdown, and run nothing")
    parser.add_argument("--edges", type=int, default=20_000_000, help="of the graph for kernels and memory")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="that share a device")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), help="of the part ranks")
    parser.add_argument("--kinds", nargs="+", default=["gcn", "sage", "gat"], help="of models, of the part host")
    parser.add_argument("--cases", nargs="+", help="of the part nccl; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plugin", help="a module to import first, which makes torch know the device")
    parser.add_argument("--part", help=argparse.SUPPRESS, choices=list(PARTS))
    parser.add_argument("--json", help="a file for the table; by default in the folder")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    if options.part:
        run_part(options)
        return 0
    if options.table:
        print(markdown(written(options.folder)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here, or torch has been built without CUDA.")
    options.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the part, too
    parts = run_parts(options, sys.argv[1:])
    rows = []
    for part, found in parts.items():
        missing = [] if found["rows"] else [{"check": part, "value": found["reason"], "wanted": "its rows", "ok": False}]
        rows += [{"part": part, **each} for each in found["rows"] + missing]
    for each in rows:
        each["result"] = "skipped" if each.get("skipped") else "ok" if each["ok"] else "FAILED"
    columns = ["part", "check", "value", "wanted", "result", "seconds", "/ other", "peak MB", "other's MB"]
    report(f"{torch.__version__} on {options.device}", rows, columns, options.json)
    states = {found["state"] for found in parts.values()}
    return 1 if "failed" in states else 2 if "not run" in states else 0


if __name__ == "__main__":
    import gpu_acceptance  # whose functions are those of the modules that import it

    sys.exit(gpu_acceptance.main())
