"""Where an epoch of `dgcl` goes: seconds and bytes by layer and phase, against what the machine can do.

    python benchmarks/breakdown.py [--ranks 2] [--model gcn|sage|gat] [--nodes 200000] [--anew] [--json FILE]

Rank 0's view, mean of 5 epochs after the first 10. *gathered* is what a sum over edges reads if no row is found in a cache:
edges x columns x 4 bytes and 4 bytes an index. It is set against a copy of the features, and products against a large product,
both measured in the same run on as many threads, into memory that is there. ``--anew``: without keeping what the first layer
makes of constant input.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import QUIET, planted_file, report, run_row
from epoch_time import make_model
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.kernels import run as kernel_runner

EPOCHS = 5
FIRST = 10  # until then memory is still found that fits
_layer = ["-"]
_events: list[tuple[str, list[Any], float]] = []
"""Name, shapes and seconds of what ran."""


class Timed(TorchDispatchMode):
    """Times every operation of torch. Its profiler would return freed memory to the system, and measure that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        shapes = [list(value.shape) for value in args if isinstance(value, torch.Tensor)]
        _events.append((f"aten::{func.overloadpacket.__name__}", shapes, seconds))
        return result


@contextmanager
def record_function(name: str) -> Iterator[None]:
    """Times what is inside under one name, and the operations of torch in it not at all."""
    before, began = len(_events), time.perf_counter()
    yield
    del _events[before:]
    _events.append((name, [], time.perf_counter() - began))


def labelled() -> None:
    """Marks what is ours: loops over edges, gathering what is sent, waiting for peers, and in which layer."""
    import lightning_gnn.comm.exchange as exchange
    import lightning_gnn.kernels.attention as attention
    import lightning_gnn.kernels.sums as sums
    import lightning_gnn.nn.edges as edges

    run_over_rows = kernel_runner.run_over_rows

    def marked(loop: Any, csr: Any, *arguments: Any, work: int) -> None:
        columns = max(1, work // max(1, csr.num_edges))
        with record_function(f"edges|{_layer[0]}|{loop.py_func.__name__}|{csr.num_edges}|{columns}"):
            run_over_rows(loop, csr, *arguments, work=work)

    sums.run_over_rows = attention.run_over_rows = marked  # type: ignore[attr-defined]
    index_select, send = torch.index_select, exchange.Exchange.send

    def taken(*arguments: Any, **options: Any) -> Any:
        with record_function(f"gather|{_layer[0]}"):
            return index_select(*arguments, **options)

    def sent(self: Any, out: Any, out_counts: Any, into: Any, into_counts: Any, call: Any, began: float) -> Any:
        bytes_sent = self.world.transport.message_bytes(out)
        with record_function(f"exchange|{call.layer}|{bytes_sent}"):
            wait = send(self, out, out_counts, into, into_counts, call, began)

        def waited() -> None:
            with record_function(f"exchange|{call.layer}|0"):
                wait()

        return waited

    torch.index_select, exchange.Exchange.send = taken, sent  # type: ignore[method-assign]
    for function in (edges.SumOfRows, edges.StatisticsOfRows):
        forward, backward = function.forward, function.backward

        def named_forward(ctx: Any, *arguments: Any, forward: Any = forward) -> Any:
            _layer[0] = f"{arguments[-1].layer} forward"
            return forward(ctx, *arguments)

        def named_backward(ctx: Any, *arguments: Any, backward: Any = backward) -> Any:
            _layer[0] = f"{ctx.call.layer} backward"
            return backward(ctx, *arguments)

        function.forward, function.backward = staticmethod(named_forward), staticmethod(named_backward)  # type: ignore


class Clock(L.Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.timed = Timed()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == FIRST:
            _events.clear()
            self.timed.__enter__()
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch >= FIRST:
            self.seconds.append(time.perf_counter() - self._began)
        if trainer.current_epoch == FIRST + EPOCHS - 1:
            self.timed.__exit__(None, None, None)


def phases() -> dict[tuple[str, str], dict[str, float]]:
    """Returns seconds, bytes and operations of an epoch by phase and layer."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, shapes, total in _events:
        kind, *rest = name.split("|")
        seconds = total / EPOCHS
        if kind == "edges":
            layer, loop, edges, columns = rest
            row = found[f"edges: {loop}", layer]
            row["gathered"] += int(edges) * (int(columns) * 4 + 4) / EPOCHS
        elif kind == "gather":
            row = found["gather of rows to send", rest[0]]
        elif kind == "exchange":
            row = found["exchange", rest[0]]
            row["sent"] += int(rest[1]) / EPOCHS
        elif kind in ("aten::mm", "aten::addmm"):
            (rows, inner), (_, columns_) = [shape for shape in shapes if len(shape) == 2][-2:]
            row = found["dense", f"[{rows}, {inner}] x [{inner}, {columns_}]"]
            row["flop"] += 2 * rows * inner * columns_ / EPOCHS
        elif kind == "aten::index_select" or kind == "aten::index_add_":
            row = found["rows taken and added", "-"]
        elif kind.startswith("aten::"):
            row = found["elementwise and the rest of torch", kind.removeprefix("aten::")]
        else:
            continue
        row["seconds"] += seconds
    return found


def rows_of(path: str, ranks: int, model: str, anew: bool) -> list[dict[str, Any]] | None:
    labelled()
    clock = Clock()
    data = GraphDataModule("common.load_planted", {"path": path})
    trainer = L.Trainer(
        strategy=DGCLStrategy(timeout=600, cache_input_aggregation=not anew, self_check=False),
        devices=ranks,
        max_epochs=FIRST + EPOCHS,
        **QUIET,
        callbacks=[clock],
        limit_val_batches=0,
    )
    trainer.fit(NodeClassifier(make_model(model, path), weight_decay=0.0), datamodule=data)
    if not trainer.is_global_zero:
        return None
    epoch = sum(clock.seconds) / len(clock.seconds)
    source, target = torch.randn(200_000, 128), torch.randn(200_000, 128)
    copy = 2 * source.nbytes / best(lambda: target.copy_(source))
    left, right, out = torch.randn(100_000, 128), torch.randn(128, 128), torch.randn(100_000, 128)
    product = 2 * 100_000 * 128 * 128 / best(lambda: torch.mm(left, right, out=out))
    rows: list[dict[str, Any]] = []
    small: dict[str, float] = defaultdict(float)
    for (phase, layer), row in phases().items():
        if row["seconds"] < 0.01 * epoch:
            small[phase.partition(":")[0]] += row["seconds"]
            continue
        rows.append(
            {
                "phase": phase,
                "layer or operation": layer,
                "s/epoch": row["seconds"],
                "share": row["seconds"] / epoch,
                "MB sent": row["sent"] / 1e6 or None,
                "GB/s gathered": row["gathered"] / row["seconds"] / 1e9 or None,
                "of a copy": row["gathered"] / row["seconds"] / copy or None,
                "GFLOP/s": row["flop"] / row["seconds"] / 1e9 or None,
                "of a product": row["flop"] / row["seconds"] / product or None,
            }
        )
    rows.sort(key=lambda row: -row["s/epoch"])
    for phase, seconds in small.items():
        rows.append({"phase": phase, "layer or operation": "others", "s/epoch": seconds, "share": seconds / epoch})
    rest = epoch - sum(row["s/epoch"] for row in rows)
    rows.append({"phase": "Lightning and Python", "layer or operation": "-", "s/epoch": rest, "share": rest / epoch})
    rows.append({"phase": "epoch", "layer or operation": "-", "s/epoch": epoch, "share": 1.0})
    rows.append({"phase": "a copy", "layer or operation": "200,000 x 128", "GB/s gathered": copy / 1e9})
    rows.append({"phase": "a product", "layer or operation": "100,000 x 128 x 128", "GFLOP/s": product / 1e9})
    return rows


def best(function: Any) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="gcn", choices=["gcn", "sage", "gat"])
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--graph", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.graph:
        rows = rows_of(options.graph, options.ranks, options.model, options.anew)
        if rows is not None:
            print(json.dumps(rows))
        return
    arguments = ["--graph", str(planted_file(options.nodes)), "--ranks", str(options.ranks), "--model", options.model]
    rows = run_row(str(Path(__file__)), [*arguments, *(["--anew"] if options.anew else [])], options.threads)
    columns = ["phase", "layer or operation", "s/epoch", "share", "MB sent", "GB/s gathered", "of a copy", "GFLOP/s"]
    title = f"2-layer {options.model}, rank 0 of {options.ranks}, {options.threads} thread(s)"
    report(title, rows, [*columns, "of a product"], options.json)


if __name__ == "__main__":
    main()
