"""From what ranks have measured to the numbers of a cell, how far these are from the reference's, and a table of them.

No processes here. The table is shown while cells run and at the end; the HTML report has the same columns.
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


def summarise(ranks: Sequence[Mapping[str, Any]], warmup: int) -> dict[str, Any]:
    """Returns the numbers of a finished cell.

    Args:
        ranks: what each rank has written, see :mod:`~lightning_gnn.tools.comparing.run_cell`.
        warmup: epochs left out of times and traffic.

    Returns:
        Keys as docs/compare.md has them; seconds, bytes, and counts per epoch.
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
    """Returns the epochs without the fastest and the slowest quarter of them, in order: at least one, of few, all."""
    ordered = sorted(epochs, key=lambda epoch: seconds[epoch])
    out = len(ordered) // 4
    return sorted(ordered[out : len(ordered) - out])


def split_time(epoch: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Returns how long each rank computed, communicated and waited in an epoch, seconds; they add up to its epoch.

    Waiting is what ranks have measured of it, for others and for mini-batches; communication the rest of what exchanges and sums
    took. The rest of an epoch is computing, and all that is not timed.

    Args:
        epoch: of each rank, see :class:`~lightning_gnn.tools.comparing.run_cell.EpochTimes`.
        ranks: whose ``workers`` report on ranks that train independently.
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
    if workers:  # that average with each other, not in each step
        sums = sum(each["averages"] for each in workers.values()) / len(ranks[0]["epochs"])
    return {
        "row_bytes": sum(each[0] for each in exchanges),
        "messages": sum(each[1] for each in exchanges),
        "rows": sum(each[2] for each in exchanges),
        "gradient_bytes": sums * ranks[0]["gradient_bytes"],
        "steps": max(rank["steps"] for rank in epoch),
    }


def partition_quality(report: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any] | None:
    """Returns the quality of a partition from its report; None of a graph that is not cut.

    Replication is rows held by all parts over nodes, none of clusters, which are trained on alone; balances are
    the heaviest part over the mean.
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
    found: Mapping[str, Any],
    reference: Mapping[str, Any] | None,
    weights: Mapping[str, Tensor] | None,
    reference_weights: Mapping[str, Tensor] | None,
    loss: str,
    tolerance: float,
) -> dict[str, Any]:
    """Returns how far a cell is from the reference.

    Args:
        found, reference: of :func:`summarise`; no reference where it has failed.
        weights, reference_weights: at the end.
        loss: name of the loss curve.
        tolerance: up to this distance of losses, an exact scheme matches.

    Returns:
        ``kind``: ``"exact"``, ``"approximate"``, ``"random"`` for exact schemes and a model with dropout, ``"unknown"``;
        ``ok``: whether an exact scheme matches, None for others; ``loss``: the largest difference of the loss curves over the
        reference's largest loss; ``weights``: the norm of the difference over that of the reference; ``metrics``: differences of
        the test metrics; ``why``: what makes it approximate.
    """
    why = found["approximation"]
    none: dict[str, Any] = {"ok": None, "loss": None, "weights": None, "metrics": {}}
    if reference is None:
        return {"kind": "unknown", "why": "the reference has failed", **none}
    if found["initial_weights"] != reference["initial_weights"]:
        return {"kind": "unknown", "why": "it began with other weights than the reference", **none}
    distance = curve_distance(found["curves"][loss], reference["curves"][loss])
    test = reference["test"]
    metrics = {name: value - test[name] for name, value in found["test"].items() if name in test}
    kind = "approximate" if why else "random" if found["dropout"] else "exact"
    ok = None
    if kind == "exact":
        losses = [abs(each) / max(abs(test[name]), 1e-12) for name, each in metrics.items() if "loss" in name]
        ok = all(each <= tolerance for each in [distance, *losses])  # nan is not
    if kind == "random":
        why = "dropout, which each rank draws for itself"
    of_weights = None if not (weights and reference_weights) else weight_distance(weights, reference_weights)
    return {"kind": kind, "why": why, "ok": ok, "loss": distance, "weights": of_weights, "metrics": metrics}


def curve_distance(curve: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the largest difference of two curves over the reference's largest value; infinite if one is longer."""
    if len(curve) != len(reference):
        return math.inf
    largest = max(abs(value) for value in reference)
    differences = [abs(a - b) for a, b in zip(curve, reference)]
    # max() may pass over a nan.
    return math.nan if any(map(math.isnan, differences)) else max(differences) / max(largest, 1e-12)


def weight_distance(weights: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Returns the norm of the difference of all floating-point weights over the norm of the reference's."""
    names = [name for name, value in reference.items() if value.is_floating_point()]
    if any(name not in weights or weights[name].shape != reference[name].shape for name in names):
        return math.inf
    differences = torch.cat([(weights[name] - reference[name]).double().flatten() for name in names])
    whole = torch.cat([reference[name].double().flatten() for name in names])
    return float(differences.norm() / whole.norm().clamp(min=1e-12))


Cell = Mapping[str, Any]
"""As the JSON has it, see docs/compare.md."""

MARKS = {"exact": "", "approximate": "approx. ", "random": "dropout "}


class Column(NamedTuple):
    """What a column shows of a cell that has finished: `title` is the report's, `head` that of a terminal."""

    title: str
    head: str
    text: Callable[[Cell], str]


def columns(cells: Sequence[Cell], loss: str = "loss") -> list[Column]:
    """Returns the columns of a table of these cells; `loss` is the logged value whose curves are compared."""
    accuracy = accuracy_name(cells) or "test"

    def of_partition(cell: Cell, name: str) -> str:
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
        ("edges cut", "cut", lambda cell: of_partition(cell, "cut_fraction")),
        ("replication", "replic.", lambda cell: of_partition(cell, "replication")),
        ("edges, max / mean", "edges max/mean", lambda cell: of_partition(cell, "edge_balance")),
        ("peak MB per rank", "peak MB", peak),
        ("set-up, s", "set-up, s", lambda cell: number(cell["setup_seconds"])),
    ]
    return [Column(*each) for each in made]


SPARED = (
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
"""Columns that a narrow terminal does without, the first ones first."""


@dataclass
class ComparisonTable:
    """A row per cell; of those that have not finished, their state. As many columns as fit, and a line that names the others."""

    cells: Sequence[Cell]
    title: str

    def __post_init__(self) -> None:
        self._of_width: dict[int, tuple[int, bool]] = {}  # since bars draw it again ten times a second, while cells are timed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width not in self._of_width:
            self._of_width[options.max_width] = self._spared(console, options)
        spared, fits = self._of_width[options.max_width]
        yield self._table(spared, folded=not fits)
        if spared:
            left_out = [column.head for column in columns(self.cells) if column.head in SPARED[:spared]]
            yield Text(f"In a wider terminal, and in the report: {'; '.join(left_out)}.")

    def _spared(self, console: Console, options: ConsoleOptions) -> tuple[int, bool]:
        """Returns how many columns there is no room for, and whether the others fit."""
        for spared in range(len(SPARED) + 1):
            if self._needs(console, options, spared) <= options.max_width:
                return spared, True
        return len(SPARED), False

    def _needs(self, console: Console, options: ConsoleOptions, spared: int) -> int:
        """Returns the width from which only names of cells are folded, after 24 letters."""
        table = self._table(spared)
        table.columns[0].max_width = 24
        return console.measure(table, options=options.update(max_width=10_000)).maximum

    def _table(self, spared: int, folded: bool = True) -> Table:
        shown = [column for column in columns(self.cells) if column.head and column.head not in SPARED[:spared]]
        table = text_table(*(column.head for column in shown), title=self.title, left=2)
        for column in table.columns[1:]:
            column.no_wrap = not folded
        for cell in self.cells:
            done = cell["status"] == "finished"
            table.add_row(*(escape(column.text(cell)) for column in (shown if done else shown[:1])), *[cell["status"]][done:])
        return table


def accuracy_name(cells: Sequence[Cell]) -> str | None:
    """Returns the first test metric that is no loss; None if nothing was tested."""
    tested = (name for cell in cells if cell["status"] == "finished" for name in cell["test"])
    return next((name for name in tested if "loss" not in name), None)


def parity_text(found: Mapping[str, Any]) -> str:
    """Returns a cell's parity in a word or two."""
    kind, ok = found["kind"], found["ok"]
    if kind == "reference":
        return "reference"
    if found["loss"] is None:
        return "unknown"
    return MARKS[kind] + ("" if ok is None else "ok " if ok else "differs ") + f"{found['loss']:.1e}"


def number(value: float | None, digits: int = 3) -> str:
    if value is None or math.isnan(value):
        return "-" if value is None else "nan"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
