"""A comparison as a table, while it runs and at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

MARKS = {"exact": "", "approximate": "approx. ", "random": "dropout "}


def comparison_table(cells: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Returns a row per cell; of those that have not finished, their state.

    Args:
        cells: as the JSON has them, see docs/compare.md.
        title: of the table.
    """
    heads: tuple[str, ...] = (
        "cell",
        "parity",
        accuracy_name(cells) or "test",
        "loss",
        "epoch, s",
        "compute",
        "commun.",
        "waiting",
    )
    heads += ("rows, MB", "grads, MB", "messages", "cut", "replic.", "edges max/mean", "peak MB", "set-up, s")
    table = Table(*heads, title=title, title_justify="left")
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[2:]:
        column.justify = "right"
    for cell in cells:
        table.add_row(escape(cell["name"]), *_row(cell, accuracy_name(cells)))
    return table


def accuracy_name(cells: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the first test metric that is no loss; None if nothing was tested."""
    tested = (name for cell in cells if cell["status"] == "finished" for name in cell["test"])
    return next((name for name in tested if "loss" not in name), None)


def _row(cell: Mapping[str, Any], accuracy: str | None) -> tuple[str, ...]:
    if cell["status"] != "finished":
        return (escape(cell["status"]),)
    cut = cell["partition"] or {}
    memory = cell["memory_cuda_bytes"] or cell["memory_bytes"]
    return (
        parity_text(cell["parity"]),
        number(cell["test"].get(accuracy), 4),
        number(cell["final_loss"], 4),
        number(cell["epoch_seconds"]),
        *(number(cell["seconds"][part]) for part in ("compute", "communication", "waiting")),
        number(cell["row_bytes"] / 1e6),
        number(cell["gradient_bytes"] / 1e6),
        number(cell["messages"]),
        "-" if cut.get("cut_fraction") is None else f"{cut['cut_fraction']:.1%}",
        number(cut.get("replication")),
        number(cut.get("edge_balance")),
        number(max(memory) / 1e6),
        number(cell["setup_seconds"]),
    )


def parity_text(found: Mapping[str, Any]) -> str:
    """Returns a cell's parity in a word or two."""
    kind, ok = found["kind"], found["ok"]
    if kind == "reference":
        return "reference"
    if found["loss"] is None:
        return "unknown"
    return MARKS[kind] + ("" if ok is None else "ok " if ok else "differs ") + f"{found['loss']:.1e}"


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number in a few digits."""
    if value is None or math.isnan(value):
        return "-" if value is None else "nan"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
