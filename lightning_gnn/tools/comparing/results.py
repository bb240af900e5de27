"""Results of a run from the measurements of its ranks, their differences to the reference, and a table of runs.

This module starts no processes. The table is shown during the comparison and at the end; the HTML report has the same columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lightning_gnn.console import text_table

PARTS = ("compute", "communication", "waiting")


def summarize(ranks: Sequence[Mapping[str, Any]], warmup: int) -> dict[str, Any]:
    """Returns the results of a finished run.

    Args:
        ranks: file contents of each rank, see :mod:`~lightning_gnn.tools.comparing.run_cell`.
        warmup: number of epochs excluded from times and traffic.

    Returns:
        Keys as in docs/compare.md; seconds, bytes and counts are per epoch.
    """
    first, epochs = ranks[0], min(len(rank["epochs"]) for rank in ranks)
    by_epoch = [[rank["epochs"][epoch] for rank in ranks] for epoch in range(epochs)]
    seconds = [max(each["seconds"] for each in epoch) for epoch in by_epoch]
    measured = middle_half(range(warmup, epochs), seconds)
    split = [split_time(by_epoch[epoch], ranks) for epoch in measured]
    traffic = [_traffic(epoch, ranks) for epoch in by_epoch[warmup:]]
    return {
        "metrics": {**first["epochs"][epochs - 1]["logged"], **first["test"]},
        "test": dict(first["test"]),
        "curves": {
            name: [epoch[0]["logged"].get(name, math.nan) for epoch in by_epoch] for name in first["epochs"][epochs - 1]["logged"]
        },
        "epoch_seconds": fmean(seconds[epoch] for epoch in measured),
        "epoch_seconds_by_epoch": seconds,
        "seconds": {part: fmean(fmean(each[part]) for each in split) for part in PARTS},
        "seconds_by_rank": {part: [fmean(values) for values in zip(*(each[part] for each in split))] for part in PARTS},
        **{name: fmean(each[name] for each in traffic) for name in traffic[0]},
        "partition": partition_quality(first["partition"], first["counts"]),
        "memory_bytes": [rank["memory"] for rank in ranks],
        "memory_at_start_bytes": [rank["memory_at_start"] for rank in ranks],
        "memory_cuda_bytes": None if first["memory_cuda"] is None else [rank["memory_cuda"] for rank in ranks],
        "setup_seconds": max(rank["seconds_to_set_up"] for rank in ranks),
        "start_seconds": first["seconds_to_start"],
        **{name: first["counts"][name] for name in ("nodes", "edges")},
        **{name: first[name] for name in ("approximation", "dropout", "initial_weights")},
    }


def middle_half(epochs: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Returns the epochs without the fastest and the slowest quarter, in order: at least one, and all if there are few."""
    ordered = sorted(epochs, key=lambda epoch: seconds[epoch])
    out = len(ordered) // 4
    return sorted(ordered[out : len(ordered) - out])


def split_time(epoch: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Returns the seconds that each rank computed, communicated and waited in an epoch; they add up to its epoch.

    Waiting is the measured time of waiting for other ranks and for mini-batches. Communication is the rest of the time of
    exchanges and sums. Computation is the rest of the epoch, including all untimed work.

    Args:
        epoch: epoch of each rank, see :class:`~lightning_gnn.tools.comparing.run_cell.EpochTimes`.
        ranks: results of the ranks; ``workers`` has the measurements of ranks that train independently.
    """
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for rank, own in zip(ranks, epoch):
        together = own["gradients"] + own["sums"] + sum(each[3] for each in own["exchange"].values())
        worker = ranks[0]["workers"].get(str(rank["rank"]))
        waited = min(together, own["waited"] if worker is None else worker["waited"] / len(rank["epochs"]))
        found["communication"].append(together - waited)
        found["waiting"].append(waited + own["batches"])
        found["compute"].append(max(0.0, own["seconds"] - together - own["batches"]))
    return found


def _traffic(epoch: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    exchanges = [each for rank in epoch for each in rank["exchange"].values()]
    summed, workers = len(epoch) > 1, ranks[0]["workers"]
    sums = sum(rank["steps"] for rank in epoch) * summed
    if workers:  # workers average with each other, not in each step
        sums = sum(each["averages"] for each in workers.values()) / len(ranks[0]["epochs"])
    return {
        "row_bytes": sum(each[0] for each in exchanges),
        "messages": sum(each[1] for each in exchanges),
        "rows": sum(each[2] for each in exchanges),
        "gradient_bytes": sums * ranks[0]["gradient_bytes"],
        "steps": max(rank["steps"] for rank in epoch),
    }


def partition_quality(report: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any] | None:
    """Returns the quality of a partition from its report; None for an unpartitioned graph.

    Replication is the number of rows stored by all parts divided by the number of nodes; None for clusters, which are trained on
    separately. Balances are the maximum over parts divided by the mean.
    """
    if not report:
        return None
    found = {"edge_balance": report["edge_balance"], "seconds": report.get("seconds")}
    if "cut_edges" not in report:
        return found | {
            "kind": "vertex cut",
            "parts": len(report["masters"]),
            "cut_fraction": None,
            "replication": report["replication_factor"],
            "node_balance": report["master_balance"],
        }
    clusters = len(report["nodes"]) != counts["ranks"]
    return found | {
        "kind": "clusters" if clusters else "edge cut",
        "parts": len(report["nodes"]),
        "cut_fraction": report["cut_edges"] / max(1, counts["edges"]),
        "replication": None if clusters else 1 + sum(report["halo_rows"]) / max(1, counts["nodes"]),
        "node_balance": report["node_balance"],
    }


def parity(
    result: Mapping[str, Any],
    reference: Mapping[str, Any] | None,
    weights: Mapping[str, Tensor] | None,
    reference_weights: Mapping[str, Tensor] | None,
    loss: str,
    tolerance: float,
) -> dict[str, Any]:
    """Returns the differences of a run to the reference.

    Args:
        result, reference: results of :func:`summarize`; None for a failed reference.
        weights, reference_weights: final weights.
        loss: name of the loss curve.
        tolerance: maximum difference of losses at which an exact scheme matches.

    Returns:
        A dict:

            - ``kind``: ``"exact"``, ``"approximate"``, ``"random"`` for exact schemes with dropout, or ``"unknown"``.
            - ``ok``: whether an exact scheme matches; None for others.
            - ``loss``: the largest difference of the loss curves, divided by the reference's largest loss.
            - ``weights``: the norm of the difference, divided by the norm of the reference.
            - ``metrics``: differences of the test metrics.
            - ``why``: reason of the approximation.
    """
    why = result["approximation"]
    none: dict[str, Any] = {"ok": None, "loss": None, "weights": None, "metrics": {}}
    if reference is None:
        return {"kind": "unknown", "why": "the reference has failed", **none}
    if result["initial_weights"] != reference["initial_weights"]:
        return {"kind": "unknown", "why": "it began with other weights than the reference", **none}
    distance = curve_distance(result["curves"][loss], reference["curves"][loss])
    test = reference["test"]
    metrics = {name: value - test[name] for name, value in result["test"].items() if name in test}
    kind = "approximate" if why else "random" if result["dropout"] else "exact"
    ok = None
    if kind == "exact":
        losses = [abs(each) / max(abs(test[name]), 1e-12) for name, each in metrics.items() if "loss" in name]
        ok = all(each <= tolerance for each in [distance, *losses])  # False for nan
    if kind == "random":
        why = "dropout, which each rank draws for itself"
    of_weights = None if not (weights and reference_weights) else weight_distance(weights, reference_weights)
    return {"kind": kind, "why": why, "ok": ok, "loss": distance, "weights": of_weights, "metrics": metrics}


def curve_distance(curve: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the largest difference of two curves divided by the reference's largest value; infinite for different lengths."""
    if len(curve) != len(reference):
        return math.inf
    largest = max(abs(value) for value in reference)
    differences = [abs(a - b) for a, b in zip(curve, reference)]
    # max() may ignore a nan.
    return math.nan if any(map(math.isnan, differences)) else max(differences) / max(largest, 1e-12)


def weight_distance(weights: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Returns the norm of the difference of all floating-point weights divided by the norm of the reference's weights."""
    names = [name for name, value in reference.items() if value.is_floating_point()]
    if any(name not in weights or weights[name].shape != reference[name].shape for name in names):
        return math.inf
    differences = torch.cat([(weights[name] - reference[name]).double().flatten() for name in names])
    whole = torch.cat([reference[name].double().flatten() for name in names])
    return float(differences.norm() / whole.norm().clamp(min=1e-12))


Cell = Mapping[str, Any]
"""Run as in the JSON file, see docs/compare.md."""

MARKS = {"exact": "", "approximate": "approx. ", "random": "dropout "}


class Column(NamedTuple):
    """Column of a finished run: `title` is the heading in the report, `head` the heading in a terminal."""

    title: str
    head: str
    text: Callable[[Cell], str]


def columns(cells: Sequence[Cell], loss: str = "loss") -> list[Column]:
    """Returns the columns of a table of these runs; `loss` is the logged value whose curves are compared."""
    accuracy = accuracy_name(cells) or "test"

    def partition_text(cell: Cell, name: str) -> str:
        value = (cell["partition"] or {}).get(name)
        return f"{value:.1%}" if value is not None and name == "cut_fraction" else number(value)

    def peak(cell: Cell) -> str:
        return number(max(cell["memory_cuda_bytes"] or cell["memory_bytes"]) / 1e6)

    made: list[tuple[str, str, Callable[[Cell], str]]] = [
        ("cell", "cell", lambda cell: cell["name"]),
        (f"parity, of {loss}", "parity", lambda cell: parity_text(cell["parity"])),
        (accuracy, accuracy, lambda cell: number(cell["test"].get(accuracy), 4)),
        (loss, "loss", lambda cell: number(cell["final_loss"], 4)),
        ("weights off by", "", lambda cell: number(cell["parity"]["weights"])),
        ("s per epoch", "epoch, s", lambda cell: number(cell["epoch_seconds"])),
        ("compute, s", "compute", lambda cell: number(cell["seconds"]["compute"])),
        ("communication, s", "commun.", lambda cell: number(cell["seconds"]["communication"])),
        ("waiting, s", "waiting", lambda cell: number(cell["seconds"]["waiting"])),
        ("rows, MB", "rows, MB", lambda cell: number(cell["row_bytes"] / 1e6)),
        ("gradients, MB", "grads, MB", lambda cell: number(cell["gradient_bytes"] / 1e6)),
        ("messages", "messages", lambda cell: number(cell["messages"])),
        ("edges cut", "cut", lambda cell: partition_text(cell, "cut_fraction")),
        ("replication", "replic.", lambda cell: partition_text(cell, "replication")),
        ("edges, max / mean", "edges max/mean", lambda cell: partition_text(cell, "edge_balance")),
        ("peak MB per rank", "peak MB", peak),
        ("set-up, s", "set-up, s", lambda cell: number(cell["setup_seconds"])),
    ]
    return [Column(*each) for each in made]


OPTIONAL_HEADS = (
    "set-up, s",
    "edges max/mean",
    "replic.",
    "cut",
    "grads, MB",
    "messages",
    "waiting",
    "commun.",
    "compute",
    "peak MB",
    "rows, MB",
)
"""Columns omitted in a narrow terminal, in this order."""


@dataclass
class ComparisonTable:
    """Table with a row per run, with the state of unfinished runs; omits columns that do not fit and lists them in a line."""

    cells: Sequence[Cell]
    title: str

    def __post_init__(self) -> None:
        self._layouts: dict[int, tuple[int, bool]] = {}  # bars redraw the table ten times a second

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width not in self._layouts:
            self._layouts[options.max_width] = self._fit_columns(console, options)
        num_omitted, fits = self._layouts[options.max_width]
        yield self._table(num_omitted, folded=not fits)
        if num_omitted:
            left_out = [column.head for column in columns(self.cells) if column.head in OPTIONAL_HEADS[:num_omitted]]
            yield Text(f"In a wider terminal, and in the report: {'; '.join(left_out)}.")

    def _fit_columns(self, console: Console, options: ConsoleOptions) -> tuple[int, bool]:
        """Returns the number of omitted columns, and whether the others fit."""
        for num_omitted in range(len(OPTIONAL_HEADS) + 1):
            if self._needs(console, options, num_omitted) <= options.max_width:
                return num_omitted, True
        return len(OPTIONAL_HEADS), False

    def _needs(self, console: Console, options: ConsoleOptions, num_omitted: int) -> int:
        """Returns the minimum width at which only names of runs are wrapped, after 24 letters."""
        table = self._table(num_omitted)
        table.columns[0].max_width = 24
        return console.measure(table, options=options.update(max_width=10_000)).maximum

    def _table(self, num_omitted: int, folded: bool = True) -> Table:
        shown = [column for column in columns(self.cells) if column.head and column.head not in OPTIONAL_HEADS[:num_omitted]]
        table = text_table(*(column.head for column in shown), title=self.title, num_left=2)
        for column in table.columns[1:]:
            column.no_wrap = not folded
        for cell in self.cells:
            done = cell["status"] == "finished"
            table.add_row(*(escape(column.text(cell)) for column in (shown if done else shown[:1])), *[cell["status"]][done:])
        return table


def accuracy_name(cells: Sequence[Cell]) -> str | None:
    """Returns the first test metric that is not a loss; None if nothing was tested."""
    tested = (name for cell in cells if cell["status"] == "finished" for name in cell["test"])
    return next((name for name in tested if "loss" not in name), None)


def parity_text(result: Mapping[str, Any]) -> str:
    """Returns a short text for a run's parity."""
    kind, ok = result["kind"], result["ok"]
    if kind == "reference":
        return "reference"
    if result["loss"] is None:
        return "unknown"
    return MARKS[kind] + ("" if ok is None else "ok " if ok else "differs ") + f"{result['loss']:.1e}"


def number(value: float | None, digits: int = 3) -> str:
    if value is None or math.isnan(value):
        return "-" if value is None else "nan"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
